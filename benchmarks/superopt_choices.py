"""Tiles and schedules of block graphs that `benchmarks.superopt` builds and chooses among, by point.

What an H200 left over (`results/h200_superopt_2026-11-21.json`), and neighbours of it. Where weights are
streamed, whole loops within a block beat clusters, tensor copies beat those of lanes, and a kernel whose
blocks fill a multiprocessor had better let the next one start at the end of its loop than at once or never.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Choice = tuple[tuple[int, ...], Mapping[str, Any]]


NEVER, END, LANES = {"release": "never"}, {"release": "end"}, {"copies": "lanes"}


def _plan(groups: int, stages: int, **rest: Any) -> Mapping[str, Any]:
    """Return a schedule's fields; copies are those of tensors unless told otherwise."""
    return {"groups": groups, "stages": stages, "copies": "tensor", **rest}


_RMSNORM = (
    ((64, 128), _plan(4, 2, **NEVER)),
    ((64, 128), _plan(4, 2, **END)),
    ((64, 64), _plan(4, 4, **END)),
    ((64, 64), _plan(4, 5, **END)),
    ((64, 64), _plan(7, 3, **END)),
    ((48, 128), _plan(4, 3, **END)),
    ((48, 64), _plan(8, 3, **END)),
)
_ATTENTION = (
    ((64, 64), _plan(2, 3, row_warps=4, cluster=8, **LANES)),
    ((64, 64), _plan(2, 3, row_warps=4, cluster=8)),
    ((64, 64), _plan(2, 3, row_warps=4, cluster=8, **LANES, **END)),
    ((64, 64), _plan(2, 4, row_warps=4, cluster=8, **LANES)),
    ((64, 32), _plan(2, 4, row_warps=4, cluster=8, **LANES)),
)
_LONG_ATTENTION = (
    ((64, 64), _plan(2, 2, row_warps=4, cluster=2, **LANES)),
    ((64, 64), _plan(2, 2, row_warps=4, cluster=2)),
    ((64, 64), _plan(2, 3, row_warps=4, cluster=2, **NEVER)),
)
_INT4 = (
    ((64, 64), _plan(8, 4)),
    ((64, 64), _plan(8, 4, **END)),
    ((64, 64), _plan(16, 2, **END)),
    ((64, 64), _plan(16, 3, **END)),
)
_INT4_PAIR = (
    ((64, 64), _plan(4, 4, cluster=2)),
    ((64, 64), _plan(4, 4, cluster=2, **END)),
    ((64, 64), _plan(8, 3, cluster=2, **END)),
    ((64, 128), _plan(4, 3, cluster=2, **END)),
    ((64, 128), _plan(8, 2, **END)),
)
_INT4_LORA = (
    ((64, 64), _plan(4, 4, cluster=2, **LANES)),
    ((64, 64), _plan(8, 3, **LANES, **NEVER)),
    ((64, 64), _plan(8, 3, **LANES, **END)),
)
_ROWS: tuple[Choice, ...] = tuple(
    ((), {"row_warps": warps, "release": release}) for warps in (16, 8) for release in ("begin", "never")
)

CHOICES: Mapping[str, Sequence[Choice]] = {
    "rmsnorm_matmul b=1": _RMSNORM,
    "rmsnorm_matmul b=8": _RMSNORM,
    "gated_mlp b=1": (
        ((32, 64), _plan(8, 2, **NEVER)),
        ((32, 64), _plan(8, 2, **END)),
        ((32, 64), _plan(4, 5, **END)),
        ((32, 128), _plan(4, 2, **END)),
        ((64, 64), _plan(2, 6, cluster=2)),
        ((64, 64), _plan(2, 6, cluster=2, **END)),
    ),
    "gated_mlp b=8": (
        ((64, 64), _plan(2, 4, row_warps=2, column_warps=2, cluster=2)),
        ((64, 64), _plan(2, 4, row_warps=2, column_warps=2, cluster=2, **END)),
        ((32, 64), _plan(4, 3, row_warps=2, column_warps=2, **NEVER)),
        ((32, 64), _plan(4, 3, row_warps=2, column_warps=2, **END)),
        ((32, 64), _plan(4, 3, row_warps=2, **END)),
        ((32, 128), _plan(2, 3, row_warps=2, column_warps=2, **END)),
    ),
    "lora": (((64, 32), _plan(8, 2, **LANES)), ((64, 32), _plan(8, 2, **LANES, **NEVER))),
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
