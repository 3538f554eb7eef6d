"""CPython as data: code objects, frames, tracebacks, and what each native function may do.

May import nothing else of capture.
"""
