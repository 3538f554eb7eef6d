"""CUDA: pipelines (gemv, digits, mma, wgmma) and what they share.

`decode` turns packed words into operand registers by recipes that `proof` has exhausted;
`arguments` and `epilogue` are the kernels' two ends; `toolchain` runs nvcc.
"""
