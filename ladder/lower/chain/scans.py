"""Scans of rows (cumulative sums, products, largest so far) by lanes that hold the row in registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.graph import Node
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.indices import Index
from ladder.lower.chain.nest import Reduction
from schedules.schedule import check


def scan_row(nest: Any, node: Node, index: Index) -> None:
    """Emit a row's scan by a `GpuNest`: of each lane's vector, of the lanes before it, of earlier turns."""
    it = Reduction(nest, node, index)
    check(bool(nest.mapping.num) and not nest.alone, "lanes that scan a row hold it")
    probe = nest.probe("k", it.extent)
    nest.prepare(it.operand, it.at(probe), (probe,))
    width = nest.width()
    turns = nest.unrolled(nest.values.simplified(tirx.floordiv(it.extent, width)))
    places = [[it.at(number * width + lane) for lane in range(width)] for number, _ in turns]
    found = [[nest.register(value) for value in nest.elements(it.operand, row)] for row in places]
    carry: Expr = None
    for (_, valid), row, values in zip(turns, places, found, strict=True):
        own: list[Expr] = []
        for value in values:
            value = value if valid is None else T.if_then_else(valid, value, it.neutral)
            own.append(b.bind(it.combine(own[-1], value) if own else value))
        before, total = before_lanes(nest, it, own[-1])
        before = before if carry is None else b.bind(it.combine(carry, before))
        for at, place in enumerate(row):
            nest.keep_cell(node, place, up_to(it, before, own, at))
        carry = total if carry is None else b.bind(it.combine(carry, total))
    row_of = tuple(map(nest.values.simplified, index[:-1]))
    nest.values.scanned.add(nest.values.key(node.name, row_of))


def up_to(it: Reduction, before: Expr, own: Sequence[Expr], at: int) -> Expr:
    """Return what a lane's elements up to one come to; without it, if the scan is of what is before each.

    before: What all elements before those of the lane come to; None: there are none.
    """
    taken = own[: at + (not it.exclusive)]
    if not taken:
        return it.neutral if before is None else before
    return taken[-1] if before is None else b.bind(it.combine(before, taken[-1]))


def before_lanes(nest: Any, it: Reduction, value: Expr) -> tuple[Expr, Expr]:
    """Return what the lanes of a row before this one have together, and what all have."""
    wave, before, total, distance = nest.dialect.wave, b.bind(it.neutral), b.bind(value), 1
    while distance < min(nest.lanes, wave):
        other = b.bind(nest.moved(total, it.dtype, distance))
        behind = tirx.floormod(tirx.floordiv(nest.lane, distance), 2) == 1
        before = b.bind(T.if_then_else(behind, it.combine(other, before), before))
        total, distance = b.bind(it.combine(total, other)), 2 * distance
    warps = nest.lanes // wave
    if warps <= 1:
        return before, total
    if not nest.scan_slots:
        nest.scan_slots = [nest.slot, nest.slot + 2]
        nest.slot += 4
    nest.scan_slots.reverse()
    read, lane = nest.exchanged(total, it.dtype, nest.scan_slots[0]), tirx.floormod(nest.lane, warps)
    of_warp = b.bind(read(lane))
    earlier = T.if_then_else(lane < tirx.floordiv(nest.lane, wave), of_warp, it.neutral)
    before = b.bind(it.combine(nest.shuffled(it, earlier, warps), before))
    return before, nest.shuffled(it, of_warp, warps)
