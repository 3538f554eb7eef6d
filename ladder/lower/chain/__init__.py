"""Memory-bound chains as TIR: loops over rows, everything else is an expression of the element's index.

`values` gives the expression of any value of a chain at an index, whatever views and joins lie between; it
is the same for all targets. `cpu` is the loop nest for CPUs. A kernel takes the chain's inputs and outputs
in order; symbolic sizes come first, as integers.
"""
