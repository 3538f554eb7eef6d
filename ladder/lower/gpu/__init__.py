"""Shared parts of the GPU back ends: argument order, decoders with their proofs, scale groups, epilogue.

`decode` turns packed words into operand registers by recipes that `proof` has exhausted; `groups`
and `tile_multiplier` scale and multiply what it decoded; `instructions` is the table of matrix
instructions; `arguments` and `epilogue` are the kernels' two ends.
"""
