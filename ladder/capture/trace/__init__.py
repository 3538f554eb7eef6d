"""The trace of tensor operators, which becomes an fx graph with loops and conditionals.

May import `values` and `python`; knows neither the heap model nor the interpreter.
"""
