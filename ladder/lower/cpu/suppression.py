"""Non-maximum suppression on CPUs: of boxes that overlap, those that come first are kept."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v


def emit_suppression(name: str) -> Any:
    """Emit ``(edges, areas, order, starts, limit, kept, counts)``: lists of boxes, each class for itself.

    edges, areas: float32 ``[images, N, 4]``, corners low and high, and ``[images, N]``.
    order: int32 ``[candidates]``: boxes of all classes one behind another, the best first.
    starts: int32 ``[images * classes + 1]``: where the boxes of a class begin.
    limit: float32 ``[1]``: overlap up to which both boxes are kept.
    kept: int32 ``[images * classes, most]``: boxes that are kept.
    counts: int32 ``[images * classes]``: how many these are.
    """
    with b.function(name) as result:
        images, boxes, candidates = (b.symbol(s) for s in ("images", "boxes", "candidates"))
        ends, lists, most = b.symbol("ends"), b.symbol("lists"), b.symbol("most")
        edges = b.tensor("edges", [images, boxes, 4], "float32", align=4)
        areas = b.tensor("areas", [images, boxes], "float32", align=4)
        order = b.tensor("order", [candidates], "int32", align=4)
        starts = b.tensor("starts", [ends], "int32", align=4)
        limit = b.tensor("limit", [1], "float32", align=4)
        kept = b.tensor("kept", [lists, most], "int32", align=4)
        counts = b.tensor("counts", [lists], "int32", align=4)
        with v.parallel(lists) as each:
            image = b.bind(tirx.floordiv(each * images, lists))
            state = v.scratch(3, "int32")  # the next candidate, how many are kept, with which one is compared
            b.store(state, starts[each], 0)
            b.store(state, T.int32(0), 1)
            with b.repeat_while(tirx.all(state[0] < starts[each + 1], state[1] < most)):
                box = b.bind(order[state[0]])
                b.store(state, T.int32(0), 2)
                with b.repeat_while(
                    tirx.all(
                        state[2] < state[1], _apart(edges, areas, image, kept[each, state[2]], box, limit[0])
                    )
                ):
                    b.store(state, state[2] + 1, 2)
                with b.when(state[2] == state[1]):
                    b.store(kept, box, each, state[1])
                    b.store(state, state[1] + 1, 1)
                b.store(state, state[0] + 1, 0)
            b.store(counts, state[1], each)
    return result.func


def _apart(edges: Any, areas: Any, image: Expr, first: Expr, second: Expr, limit: Expr) -> Expr:
    """Tell whether two boxes overlap at most by a limit: intersection over union."""
    sides = [
        tirx.max(
            tirx.min(edges[image, first, 2 + axis], edges[image, second, 2 + axis])
            - tirx.max(edges[image, first, axis], edges[image, second, axis]),
            T.float32(0),
        )
        for axis in range(2)
    ]
    shared = sides[0] * sides[1]
    union = areas[image, first] + areas[image, second] - shared
    share = shared / tirx.Select(union > 0, union, T.float32(1))
    return tirx.Select(union > 0, share, T.float32(0)) <= limit
