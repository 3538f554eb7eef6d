"""The heap model: what was read, made and changed, from which guard and mock follow.

May import `values` and `python`; knows neither the trace nor the interpreter.
"""
