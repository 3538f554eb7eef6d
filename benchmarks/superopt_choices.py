"""Tiles and schedules of block graphs that `benchmarks.superopt` builds and chooses among, by point.

What an H200 left over (`results/h200_superopt_2026-11-22.json`). Where weights are streamed, tensor copies
beat those of lanes; blocks of which two fit a multiprocessor beat larger ones; the next kernel had better
start when the last tiles have been asked for than at once, and earlier copies of constant weights then fill
the time in which memory would idle. Kernels on half of the multiprocessors leave the others to the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Choice = tuple[tuple[int, ...], Mapping[str, Any], bool]
"""Tiles, fields of a `BlockSchedule`, and whether weights are declared constant."""


def _plan(tiles: tuple[int, ...], groups: int, stages: int, cluster: int = 1, **rest: Any) -> Choice:
    """Return a choice; copies are those of tensors, and the next kernel starts late, unless told."""
    fields = {"groups": groups, "stages": stages, "cluster": cluster, "copies": "tensor", "release": "asked"}
    return tiles, {**fields, **rest}, False


def _constant(choice: Choice) -> Choice:
    """Return a choice with constant weights."""
    return (*choice[:2], True)


def _both(choice: Choice) -> tuple[Choice, Choice]:
    """Return a choice without and with constant weights."""
    return choice, _constant(choice)


BEGIN: Mapping[str, Any] = {"release": "begin"}
END: Mapping[str, Any] = {"release": "end"}
LANES: Mapping[str, Any] = {"copies": "lanes", "release": "begin"}
PAIR: Mapping[str, Any] = {"column_warps": 2}
FOUR: Mapping[str, Any] = {"column_warps": 4}
WARPGROUP: Mapping[str, Any] = {"row_warps": 4, "products": "wgmma"}

_ATTENTION = (
    _plan((64, 64), 2, 3, 8, row_warps=4, **LANES),
    _plan((64, 64), 2, 3, 8, row_warps=4, **BEGIN),
)
_LONG_ATTENTION = (
    _plan((64, 64), 2, 2, 2, row_warps=4, **LANES),
    _plan((64, 64), 2, 2, 2, row_warps=4, **BEGIN),
)
_INT4 = (
    *_both(_plan((64, 64), 8, 3)),
    *_both(_plan((64, 64), 16, 2)),
    _plan((64, 64), 16, 2, **END),
    _constant(_plan((64, 128), 8, 2)),
)
_INT4_PAIR = (
    *_both(_plan((64, 128), 4, 2, 2)),
    *_both(_plan((64, 128), 2, 4, 2, **PAIR)),
    _plan((64, 128), 4, 3, 2, **END),
)
_INT4_LORA = _both(_plan((64, 64), 8, 3, copies="lanes", release="end"))
_ROWS: tuple[Choice, ...] = tuple(((), {"row_warps": warps}, False) for warps in (16, 8))

CHOICES: Mapping[str, Sequence[Choice]] = {
    "rmsnorm_matmul b=1": (
        *_both(_plan((64, 64), 4, 3)),
        *_both(_plan((64, 64), 2, 6, **PAIR)),
        _plan((64, 64), 4, 3, **END),
    ),
    "rmsnorm_matmul b=8": (
        *_both(_plan((64, 64), 2, 5, **PAIR)),
        *_both(_plan((64, 64), 2, 5, **PAIR, lead=2)),
    ),
    "gated_mlp b=1": (
        *_both(_plan((64, 64), 4, 3)),
        *_both(_plan((64, 64), 2, 6, **FOUR)),
        _plan((64, 64), 2, 3, 2, **PAIR),
    ),
    "gated_mlp b=8": (
        *_both(_plan((64, 64), 1, 9, **WARPGROUP)),
        *_both(_plan((64, 64), 2, 4, **WARPGROUP)),
        *_both(_plan((64, 64), 1, 9, **WARPGROUP, lead=4)),
    ),
    "lora": _both(_plan((64, 32), 8, 2, **LANES)),
    "gqa b=1": _ATTENTION,
    "gqa b=8": _LONG_ATTENTION,
    "qknorm_attention b=1": _ATTENTION,
    "qknorm_attention b=8": _LONG_ATTENTION,
    "ntrans b=1": _ROWS,
    "ntrans b=8": _ROWS,
    **{f"int4 rmsnorm_matmul M={m}": _INT4 for m in (1, 8)},
    **{f"int4 gated_mlp M={m}": _INT4_PAIR for m in (1, 8)},
    **{f"int4 lora M={m}": _INT4_LORA for m in (1, 8)},
}
