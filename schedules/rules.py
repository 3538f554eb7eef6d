"""Rules of each pipeline: extents of a schedule, the device feature it needs, features of a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ladder.ir.gemm import Gemm
from schedules.schedule import GpuSchedule


@dataclass(frozen=True)
class Rule:
    """Extents that a pipeline's skeleton supports, and what it needs and can do.

    feature: Of devices that have it.
    serves: Which of `Gemm.extras` it can do.
    tile_m to persistent: Values of these fields of a schedule to choose from, and so on.
    raster, placement: The same; none of the first stand for any, of the second for `placement_for`'s.
    depths: Of pipelining that were measured, where these are fewer than ``stages``.
    """

    feature: str
    serves: frozenset[str]
    tile_m: tuple[int, ...]
    tile_n: tuple[int, ...]
    tile_k: tuple[int, ...]
    stages: tuple[int, ...]
    warps: tuple[int, ...]
    split_k: tuple[int, ...] = (1,)
    persistent: tuple[bool, ...] = (False,)
    cluster: tuple[int, ...] = (1,)
    stream_k: tuple[bool, ...] = (False,)
    warp_rows: tuple[int, ...] = (16,)
    pair: tuple[bool, ...] = (False,)
    raster: tuple[int, ...] = ()
    placement: tuple[str, ...] = ()
    depths: tuple[int, ...] = ()


WHOLE_TILES = frozenset({"experts", "token_group", "windows", "residual", "factor"})
"""What pipelines that store whole tiles can do."""

STORED = frozenset({"rows", "columns"})
"""Orders of matrices that are not packed."""

PLACEMENTS = ("operand", "accumulator")


WAVES: Mapping[str, Any] = {
    "serves": frozenset({"experts", "token_group"}),
    "stages": (2,),
    "warps": (4,),  # TVM marks AMD kernels as having at most 256 threads
    "split_k": (1, 2, 4),
    "warp_rows": (16, 32),
    "placement": PLACEMENTS,
}
"""Fields of the rules of pipelines of AMD's waves, where they say nothing else."""


def _waves(
    feature: str, tile_m: tuple[int, ...], tile_n: tuple[int, ...], tile_k: tuple[int, ...], **other: Any
) -> Rule:
    """Return the rule of a pipeline of AMD's waves."""
    return Rule(feature, tile_m=tile_m, tile_n=tile_n, tile_k=tile_k, **{**WAVES, **other})


def _wmma(feature: str) -> Rule:
    """Return the rule of RDNA's matrix instructions."""
    tiles = (16, 32, 64, 128), (64, 128, 256), (64, 128)
    return _waves(feature, *tiles, warps=(4, 8), split_k=(1, 2, 4, 8), serves=WHOLE_TILES)


RULES: Mapping[str, Rule] = {
    "gemv": Rule(
        "ldmatrix",
        frozenset({"experts", "token_group", "gate"}),
        tile_m=(8, 16),
        tile_n=(64,),
        tile_k=(64,),
        stages=(2, 3, 4, 6, 8),
        warps=tuple(range(1, 33)),
        split_k=(1, 2, 3, 4, 6, 8, 16),
        cluster=(1, 2),  # of four, too few fit at once: a second wave (measured on an H200)
        warp_rows=(16, 32),  # of 64, too few registers or warps are left (measured on an H200)
        raster=(8,),  # not read: a block has all activation rows
        placement=PLACEMENTS,
        depths=(2, 4, 8),
    ),
    "digits": Rule(
        "cp.async",
        frozenset({"gate"}),
        tile_m=(1, 2, 4, 8),
        tile_n=(64,),
        tile_k=(64,),
        stages=(2, 4, 8, 16),
        warps=tuple(range(1, 33)),
        split_k=(1, 2, 3, 4, 6, 8, 16),
        cluster=(1, 2),  # of four, too few fit at once (measured on an H200)
        warp_rows=(16, 32, 64),
        raster=(8,),  # not read: a block has all activation rows
        placement=("accumulator",),
        depths=(2, 4, 8),
    ),
    "mma": Rule("mma", WHOLE_TILES | STORED, (16, 32, 64, 128), (64, 128), (64, 128), (2, 3, 4), (4, 8)),
    "wgmma": Rule(
        "wgmma",
        WHOLE_TILES | STORED,
        tile_m=(*range(8, 64, 8), *range(64, 257, 16)),
        tile_n=(64, 128, 192, 256),
        tile_k=(64, 128, 256),
        stages=(2, 3, 4, 5, 6, 7, 8),
        warps=(4, 8, 12, 16),
        split_k=(1, 2, 4, 8),
        persistent=(False, True),
        cluster=(1, 2, 4),
        stream_k=(False, True),
        depths=(4, 6, 8),
    ),
    "tcgen05": Rule(
        "tcgen05",
        WHOLE_TILES - {"token_group"},
        tile_m=(*range(16, 65, 16), *range(96, 257, 32)),
        tile_n=(128,),
        tile_k=(64, 128, 256),
        stages=(2, 3, 4, 5, 6, 7, 8),
        warps=(4, 8),
        cluster=(1, 2, 4),
        pair=(False, True),
        depths=(3, 4, 6, 8),
    ),
    "mfma": _waves("mfma", (16, 32, 64, 128, 256), (64, 128, 256), (64, 128), serves=WHOLE_TILES),
    "mfma_groups": _waves(
        "mfma",
        (1,),
        (64,),
        (64, 128, 256, 512, 1024),
        warp_rows=(32, 64),
        placement=("accumulator",),
        serves=frozenset({"experts"}),
    ),
    "dot": _waves("dot", (1, 2, 4), (64,), (64, 128, 256, 512), warp_rows=(32, 64)),
    "wmma": _wmma("wmma"),
    "wmma_split": _wmma("wmma.split"),
    # Longer stages, or 64 rows, are predicted to save 0.2 %, of four times as much code.
    "dot32": _waves(
        "dot32", (1, 2, 4), (64,), (64, 128), warps=(4, 8), split_k=(1, 2, 4, 8), warp_rows=(32,)
    ),
}


DEALS = (2, 4, 8)
"""Slices to which ``wgmma`` may deal K: as many as ``gemv`` and clusters sum fast."""

AXES = tuple(f.name for f in fields(Rule) if f.name in GpuSchedule.__dataclass_fields__)
"""Fields of a schedule for which a rule states what is allowed."""


def serves(gemm: Gemm, pipeline: str) -> bool:
    """Whether a pipeline can do all that the problem asks; those of CPUs do plain products alone."""
    served = RULES[pipeline].serves if pipeline in RULES else frozenset()
    return served.issuperset(gemm.extras)
