"""A drop-in for BitBLAS: ``import ladder.integrations.bitblas as bitblas``.

Names, arguments, the order of operands and the storage of weights (interleaved for fast decoding, in tiles of
tensor cores) are BitBLAS's, so its checkpoints load; kernels are Ladder's. Operators run on the device of
their tensors, CPUs included, and sum in float32 (integers: in int32) whatever ``accum_dtype`` says. Where
BitBLAS's documentation and its kernels contradict each other, the documentation holds: ``fp4_e2m1`` has OCP's
values, subnormal ``e4m3_float8`` are subnormal. Facts of the layouts: BitBLAS 0.1, ``bitblas/ops`` and
``bitblas/tl/mma_layout.py``.
"""

from __future__ import annotations

import logging

from ladder.integrations.bitblas import cache, ops, quantization
from ladder.integrations.bitblas.config import MatmulConfig, OptimizeStrategy, TransformKind
from ladder.integrations.bitblas.linear import Linear
from ladder.integrations.bitblas.matmul import Matmul, auto_detect_nvidia_target

__all__ = [
    "Linear",
    "Matmul",
    "MatmulConfig",
    "OptimizeStrategy",
    "TransformKind",
    "auto_detect_nvidia_target",
    "cache",
    "ops",
    "quantization",
    "set_log_level",
]


def set_log_level(level: str | int) -> None:
    """Set the level of this package's logger: a number, or a name such as ``"DEBUG"``."""
    logging.getLogger(__name__).setLevel(level.upper() if isinstance(level, str) else level)
