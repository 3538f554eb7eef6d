"""Scans of what comes before each element: as the light that is left in front of each sample of a ray."""

from __future__ import annotations

import math
from typing import Any

from ladder.ir.build import node_attributes
from ladder.ir.graph import Node
from ladder.rewrite.rules import Match, Rule, Rules, pattern
from tile_types.tile import Extent

NEUTRAL = {"scan_sum": 0.0, "scan_product": 1.0, "scan_max": -math.inf, "scan_logsumexp": -math.inf}
"""Scan -> what changes nothing, of floats."""

SCANS = "|".join(NEUTRAL)


def _behind_first(match: Match, node: Node, axis: int, number: float) -> str | None:
    """Return what follows one element along an axis in a join, if that is a number everywhere."""
    given = node_attributes(node)
    if node.operator == "pad":
        rank = len(node.tile.shape)
        alone = tuple(int(at == axis) for at in range(rank))
        return node.inputs[0] if _is(given, low=alone, high=(0,) * rank, value=number) else None
    if node.operator != "concat" or len(node.inputs) != 2 or given["axis"] % len(node.tile.shape) != axis:
        return None
    first = match.builder.node(node.inputs[0])
    if first.tile.shape[axis] != 1:
        return None
    while first.operator in ("broadcast", "reshape"):
        first = match.builder.node(first.inputs[0])
    return (
        node.inputs[1] if first.operator == "constant" and _is(node_attributes(first), value=number) else None
    )


def _is(given: dict[str, Any], **expected: Any) -> bool:
    """Tell whether attributes are as expected; a zero with a sign is another number."""
    same = all(given[name] == value for name, value in expected.items())
    return same and math.copysign(1, given["value"]) == math.copysign(1, expected["value"])


def _leaves_last(node: Node, whole: tuple[Extent, ...], axis: int) -> bool:
    """Tell whether a slice is all but the last element along an axis."""
    given, extent = node_attributes(node), whole[axis]
    shorter = isinstance(extent, int) and node.tile.shape == (*whole[:axis], extent - 1, *whole[axis + 1 :])
    return shorter and not any(given["begin"]) and all(step == 1 for step in given["step"])


def _of_number_and_rest(match: Match) -> str | None:
    """``scan(concat(neutral, x))[:-1]`` -> the scan of what comes before each element of x."""
    scan = match.node("scan")
    given, shape = node_attributes(scan), scan.tile.shape
    axis, floats = given["axis"] % len(shape), "float" in scan.tile.ttype.name
    if match["scan"] in match.shared or given["exclusive"] or not floats:
        return None
    if not _leaves_last(match.root, shape, axis):
        return None
    rest = _behind_first(match, match.node("x"), axis, NEUTRAL[scan.operator])
    return None if rest is None else match.builder.add(scan.operator, rest, axis=axis, exclusive=True)


def _of_number_and_scan(match: Match) -> str | None:
    """``concat(neutral, scan(x)[:-1])`` -> the same."""
    cut = match.builder.node(match.root.inputs[-1])
    scan = match.builder.node(cut.inputs[0]) if cut.operator == "slice" else cut
    if scan.operator not in NEUTRAL or scan is cut or "float" not in scan.tile.ttype.name:
        return None
    given, shape = node_attributes(scan), scan.tile.shape
    axis = given["axis"] % len(shape)
    if given["exclusive"] or match.root.tile.shape != shape or not _leaves_last(cut, shape, axis):
        return None
    if _behind_first(match, match.root, axis, NEUTRAL[scan.operator]) is None:
        return None
    return match.builder.add(scan.operator, scan.inputs[0], axis=axis, exclusive=True)


EXCLUSIVE_SCANS: Rules = (
    Rule(
        "scans of a number and the rest",
        pattern("slice", pattern(SCANS, "x", name="scan")),
        _of_number_and_rest,
    ),
    Rule("a number and the rest of scans", pattern("concat|pad"), _of_number_and_scan),
)
"""Rules for kernels that scan; torch's scans include each element."""
