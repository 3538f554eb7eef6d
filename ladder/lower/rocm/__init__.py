"""ROCm: pipelines of MFMA, WMMA and dot products on top of `ladder.lower.gpu`.

`machine` has the instructions of decoders, `steps` those of products; `toolchain` compiles in a process of
its own and links with lld.
"""
