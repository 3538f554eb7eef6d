"""CUDA: pipelines (gemv, digits, mma, wgmma, tcgen05) on top of `ladder.lower.gpu`; `toolchain` runs nvcc."""
