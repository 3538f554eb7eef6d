"""ROCm: pipelines mfma and dot on top of `ladder.lower.gpu`, for waves of 64 lanes.

`machine` and `steps` are what CDNA executes decoders and matrix products with; `toolchain` compiles
in a process of its own and links with lld.
"""
