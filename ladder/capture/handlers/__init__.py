"""One handler for each instruction of CPython 3.11 to 3.13, by operations.

A handler takes interpreter, frame and instruction; `instructions.handles` registers it.
"""
