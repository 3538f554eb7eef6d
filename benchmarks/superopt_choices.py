"""Tiles and schedules of block graphs that `benchmarks.superopt` builds and chooses among, by point.

What an H200 left over (`results/h200_superopt_2026-11-21.json`), and neighbours of it. Where weights are
streamed, whole loops within a block beat clusters, tensor copies beat those of lanes, and a kernel whose
blocks fill a multiprocessor had better let the next one start at the end of its loop than at once or never.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Choice = tuple[tuple[int, ...], Mapping[str, Any], bool]
"""Tiles, fields of a `BlockSchedule`, and whether weights are declared constant."""


def _plan(tiles: tuple[int, ...], groups: int, stages: int, cluster: Any = 1, **rest: Any) -> Choice:
    """Return a choice; copies are those of tensors, and the next kernel starts late, unless told."""
    constants = rest.pop("constants", False)
    fields = {"groups": groups, "stages": stages, "cluster": cluster, "copies": "tensor", "release": "asked"}
    return tiles, {**fields, **rest}, constants


BEGIN, END, NEVER, LANES = {"release": "begin"}, {"release": "end"}, {"release": "never"}, {"copies": "lanes"}
CONSTANT = {"constants": True}


def _both(*choices: Choice) -> tuple[Choice, ...]:
    """Return choices without and with constant weights."""
    return tuple((tiles, fields, constant) for tiles, fields, _ in choices for constant in (False, True))


_WARPS4 = {"row_warps": 4}
_RMSNORM = (
    _plan((64, 128), 4, 2, **NEVER),
    _plan((64, 64), 4, 5, **END),
    *_both(
        _plan((64, 128), 4, 2, **END),
        _plan((64, 128), 4, 2),
        _plan((64, 64), 4, 5),
        _plan((64, 64), 4, 3),
        _plan((64, 64), 4, 3, **BEGIN),
        _plan((64, 64), 6, 2, **BEGIN),
        _plan((64, 128), 2, 3, **BEGIN),
        _plan((192, 32), 4, 2, 4, **BEGIN),
        _plan((192, 32), 4, 4, 4),
        _plan((192, 64), 4, 2, 4),
        _plan((128, 32), 4, 3, 2, **BEGIN),
        _plan((128, 64), 2, 3, 2, **BEGIN),
    ),
    _plan((64, 64), 4, 3, ahead=1),
    _plan((64, 64), 4, 3, ahead=2, **BEGIN),
    _plan((64, 64), 4, 3, ahead=2, **CONSTANT),
)
_GATED = (
    _plan((32, 64), 8, 2, **NEVER),
    *_both(
        _plan((32, 64), 8, 2, **END),
        _plan((32, 64), 8, 2),
        _plan((32, 64), 4, 5),
        _plan((64, 64), 2, 6, 2, **BEGIN),
        _plan((64, 64), 2, 3, 2, **BEGIN),
        _plan((64, 64), 2, 3, 2),
        _plan((64, 32), 4, 3, 2, **BEGIN),
        _plan((128, 32), 2, 3, 4, **BEGIN),
        _plan((32, 64), 4, 3, **BEGIN),
        _plan((32, 64), 3, 4, **BEGIN),
    ),
    _plan((32, 64), 4, 3, ahead=2),
    _plan((64, 64), 2, 3, 2, ahead=2),
)
_SQUARE, _WIDE, _TALL = (
    {"row_warps": 2, "column_warps": 2},
    {"row_warps": 2, "column_warps": 4},
    {"row_warps": 4},
)
_GATED_LONG = (
    _plan((32, 64), 4, 3, **_SQUARE, **NEVER),
    _plan((64, 64), 2, 4, 2, **_SQUARE, **BEGIN),
    *_both(
        _plan((64, 64), 2, 4, 2, **_SQUARE, **END),
        _plan((64, 64), 2, 4, 2, **_SQUARE),
        _plan((64, 64), 2, 2, 2, **_SQUARE, **BEGIN),
        _plan((64, 64), 1, 4, 2, **_WIDE, **BEGIN),
        _plan((32, 64), 4, 3, **_SQUARE, **END),
        _plan((32, 64), 4, 3, **_SQUARE),
        _plan((32, 64), 2, 3, **_SQUARE, **BEGIN),
        _plan((128, 64), 1, 4, 4, **_WIDE),
        _plan((128, 32), 2, 4, 4, **_WIDE),
        _plan((128, 32), 2, 2, 4, **_WIDE, **BEGIN),
    ),
    _plan((64, 64), 1, 4, 2, ahead=2, **_WIDE),
)
_ATTENTION = (
    _plan((64, 64), 2, 3, 8, row_warps=4, **LANES, **BEGIN),
    _plan((64, 64), 2, 3, 8, row_warps=4, **BEGIN),
    _plan((64, 64), 2, 3, 8, row_warps=4, **LANES),
    _plan((64, 64), 2, 4, 8, row_warps=4, **LANES),
    _plan((64, 32), 2, 4, 8, row_warps=4, **LANES, **BEGIN),
    _plan((64, 64), 4, 2, 8, row_warps=4, **LANES, **BEGIN),
    _plan((128, 64), 1, 3, 8, row_warps=8, **LANES, **BEGIN),
    _plan((32, 64), 4, 2, 8, row_warps=2, **LANES, **BEGIN),
    _plan((64, 64), 4, 2, 4, row_warps=4, **LANES, **BEGIN),
)
_LONG_ATTENTION = (
    _plan((64, 64), 2, 2, 2, row_warps=4, **LANES, **BEGIN),
    _plan((64, 64), 2, 2, 2, row_warps=4, **BEGIN),
    _plan((64, 64), 2, 3, 2, row_warps=4),
    _plan((128, 64), 1, 3, 4, row_warps=8, **BEGIN),
)
_C2, _C4 = {"column_warps": 2}, {"column_warps": 4}
_INT4 = (
    *_both(
        _plan((64, 64), 8, 4, **BEGIN),
        _plan((64, 64), 8, 4, **END),
        _plan((64, 64), 8, 3, **BEGIN),
        _plan((64, 64), 16, 2, **END),
        _plan((64, 64), 4, 6, **_C2, **BEGIN),
        _plan((192, 64), 4, 3, 4, **_C2, **BEGIN),
        _plan((192, 64), 4, 3, 4, **BEGIN),
        _plan((64, 128), 8, 2, **_C2, **BEGIN),
    ),
    _plan((64, 64), 8, 3, ahead=2, **BEGIN),
)
_INT4_PAIR = (
    *_both(
        _plan((64, 64), 4, 4, 2, **BEGIN),
        _plan((64, 64), 8, 2, 2, **BEGIN),
        _plan((64, 64), 8, 3, 2, **BEGIN),
        _plan((64, 64), 8, 4, 2, **END),
        _plan((64, 64), 4, 4, 2, **_C2, **BEGIN),
        _plan((64, 64), 4, 4, 2, **_C4, **BEGIN),
        _plan((64, 128), 4, 2, 2, **_C2, **BEGIN),
        _plan((64, 128), 4, 4, 2, **_C2, **END),
        _plan((128, 64), 4, 3, 4, **_C2, **BEGIN),
    ),
    _plan((64, 64), 4, 4, 2, ahead=2, **_C2, **BEGIN),
)
_INT4_LORA = (
    _plan((64, 64), 4, 4, 2, **LANES, **BEGIN),
    _plan((64, 64), 8, 3, **LANES, **NEVER),
    _plan((64, 64), 8, 3, **LANES, **END),
)
_ROWS: tuple[Choice, ...] = tuple(
    ((), {"row_warps": warps, "release": release}, False)
    for warps in (16, 8)
    for release in ("begin", "never")
)

CHOICES: Mapping[str, Sequence[Choice]] = {
    "rmsnorm_matmul b=1": _RMSNORM,
    "rmsnorm_matmul b=8": _RMSNORM,
    "gated_mlp b=1": _GATED,
    "gated_mlp b=8": _GATED_LONG,
    "lora": (_plan((64, 32), 8, 2, **LANES, **BEGIN), _plan((64, 32), 8, 2, **LANES, **NEVER)),
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
