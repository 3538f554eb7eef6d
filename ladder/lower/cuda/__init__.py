"""CUDA: pipelines (gemv, digits, mma, wgmma) on top of `ladder.lower.gpu`; `toolchain` runs nvcc."""
