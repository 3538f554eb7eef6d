"""Rules of each pipeline: extents of a schedule, the device feature it needs, features of a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from ladder.ir.gemm import Gemm
from schedules.schedule import GpuSchedule


@dataclass(frozen=True)
class Rule:
    """Extents that a pipeline's skeleton supports, and the device feature it needs."""

    feature: str
    tile_m: tuple[int, ...]
    tile_n: tuple[int, ...]
    tile_k: tuple[int, ...]
    stages: tuple[int, ...]
    warps: tuple[int, ...]
    split_k: tuple[int, ...]
    persistent: tuple[bool, ...]
    cluster: tuple[int, ...] = (1,)
    stream_k: tuple[bool, ...] = (False,)
    warp_rows: tuple[int, ...] = (16,)
    pair: tuple[bool, ...] = (False,)
    raster: tuple[int, ...] = ()
    """Widths to choose from; none: any."""
    placement: tuple[str, ...] = ()
    """Placements to choose from; none: the one of `placement_for`."""


def _wmma(feature: str) -> Rule:
    """Return the rule of RDNA's matrix instructions."""
    return Rule(
        feature,
        (16, 32, 64, 128),
        (64, 128, 256),
        (64, 128),
        (2,),
        (4, 8),
        (1, 2, 4, 8),
        (False,),
        warp_rows=(16, 32),
        placement=("operand", "accumulator"),
    )


RULES: Mapping[str, Rule] = {
    "gemv": Rule(
        "ldmatrix",
        (8, 16),
        (64,),
        (64,),
        (2, 3, 4, 6, 8),
        tuple(range(1, 33)),
        (1, 2, 3, 4, 6, 8, 16),
        (False,),
        cluster=(1, 2),  # of four, too few fit at once: a second wave (measured on an H200)
        warp_rows=(16, 32),  # of 64, too few registers or warps are left (measured on an H200)
        raster=(8,),  # not read: a block has all activation rows
        placement=("operand", "accumulator"),
    ),
    "digits": Rule(
        "cp.async",
        (1, 2, 4, 8),
        (64,),
        (64,),
        (2, 4, 8, 16),
        tuple(range(1, 33)),
        (1, 2, 3, 4, 6, 8, 16),
        (False,),
        cluster=(1, 2),  # of four, too few fit at once (measured on an H200)
        warp_rows=(16, 32, 64),
        raster=(8,),  # not read: a block has all activation rows
        placement=("accumulator",),
    ),
    "mma": Rule("mma", (16, 32, 64, 128), (64, 128), (64, 128), (2, 3, 4), (4, 8), (1,), (False,)),
    "wgmma": Rule(
        "wgmma",
        (*range(8, 64, 8), *range(64, 257, 16)),
        (64, 128, 192, 256),
        (64, 128, 256),
        (2, 3, 4, 5, 6, 7, 8),
        (4, 8, 12, 16),
        (1, 2, 4, 8),
        (False, True),
        (1, 2, 4),
        (False, True),
    ),
    "tcgen05": Rule(
        "tcgen05",
        (*range(16, 65, 16), *range(96, 257, 32)),
        (128,),
        (64, 128, 256),
        (2, 3, 4, 5, 6, 7, 8),
        (4, 8),
        (1,),
        (False,),
        (1, 2, 4),
        pair=(False, True),
    ),
    "mfma": Rule(
        "mfma",
        (16, 32, 64, 128, 256),
        (64, 128, 256),
        (64, 128),
        (2,),
        (4,),  # TVM marks AMD kernels as having at most 256 threads
        (1, 2, 4),
        (False,),
        warp_rows=(16, 32),
        placement=("operand", "accumulator"),
    ),
    "mfma32": Rule(
        "mfma",
        (32, 64, 128),
        (64, 128, 256),
        (64, 128),
        (2,),
        (4,),
        (1, 2, 4),
        (False,),
        placement=("operand", "accumulator"),
    ),
    "mfma_groups": Rule(
        "mfma",
        (1,),
        (64,),
        (64, 128, 256, 512, 1024),
        (2,),
        (4,),
        (1, 2, 4),
        (False,),
        warp_rows=(32, 64),
        placement=("accumulator",),
    ),
    "dot": Rule(
        "dot",
        (1, 2, 4),
        (64,),
        (64, 128, 256, 512),
        (2,),
        (4,),
        (1, 2, 4),
        (False,),
        warp_rows=(32, 64),
        placement=("operand", "accumulator"),
    ),
    "wmma": _wmma("wmma"),
    "wmma_split": _wmma("wmma.split"),
    "dot32": Rule(
        "dot32",
        (1, 2, 4),
        (64,),
        (64, 128),  # longer stages, or 64 rows, are predicted to save 0.2 %, of four times as much code
        (2,),
        (4, 8),
        (1, 2, 4, 8),
        (False,),
        warp_rows=(32,),
        placement=("operand", "accumulator"),
    ),
}


DEALS = (2, 4, 8)
"""Slices to which ``wgmma`` may deal K: as many as ``gemv`` and clusters sum fast."""

AXES = tuple(f.name for f in fields(Rule) if f.name in GpuSchedule.__dataclass_fields__)
"""Fields of a schedule for which a rule states what is allowed."""

SERVES: Mapping[str, frozenset[str]] = {
    "gemv": frozenset({"experts", "token_group", "gate"}),
    "digits": frozenset({"gate"}),
    "mma": frozenset({"experts", "token_group", "windows", "residual", "factor"}),
    "wgmma": frozenset({"experts", "token_group", "windows", "residual", "factor"}),
    "tcgen05": frozenset({"experts", "windows", "residual", "factor"}),
    "mfma": frozenset({"experts", "token_group"}),
    "mfma32": frozenset({"experts", "token_group"}),
    "mfma_groups": frozenset({"experts"}),
    "dot": frozenset({"experts", "token_group"}),
    "wmma": frozenset({"experts", "token_group"}),
    "wmma_split": frozenset({"experts", "token_group"}),
    "dot32": frozenset({"experts", "token_group"}),
    "cpu": frozenset(),
}
"""Which of `Gemm.extras` each pipeline supports."""


def serves(gemm: Gemm, pipeline: str) -> bool:
    """Whether a pipeline can do all that the problem asks."""
    return SERVES[pipeline].issuperset(gemm.extras)
