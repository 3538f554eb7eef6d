"""Lowering: a GEMM and a schedule become TIR, then a shared library (`build`).

Pipelines are rows of `build.KERNELS`; CUDA lives in ``cuda``, what GPU kernels share in ``gpu``,
the CPU in ``cpu``. May import everything below the runtime; TVM is imported by the modules that
emit, not by this one.
"""
