"""What Python does with values: calls, attributes, containers, operators, each recorded or a graph break.

Functions that take an `Interpreter`; `modeled` and `builtin_functions` are tables of more.
"""
