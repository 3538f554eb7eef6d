"""The public API: `Matmul`, `Linear`, `quantize_`, expressions.

May import everything below; ``ladder`` re-exports the public names.
"""
