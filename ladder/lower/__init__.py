"""Lowering: a GEMM and a schedule become TIR, then a shared library (`build`).

Pipelines are rows of `build.KERNELS`, or of `build.SKELETONS` where a tile program is all that the emitter
reads (``skeletons``: products on CPUs). CUDA lives in ``cuda``, what GPU kernels share in ``gpu``, packing
and instructions of CPUs in ``cpu``. May import everything below the runtime; TVM is imported by the modules
that emit, not by this one.
"""

from typing import Any

Expr = Any
"""A TIR expression or a Python number (TVM ships no type stubs)."""
