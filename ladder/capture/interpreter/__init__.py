"""The interpreter: frames, the loop over instructions, segments and graph breaks, records of both.

Holds a heap model and a trace; knows no handler and no operation by name.
"""
