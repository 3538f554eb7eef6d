"""Sums of attention in registers: weighted values, largest scores and totals, by online softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.script import tirx as T

from ladder.ir.attention import LOG2_E
from ladder.lower import builder as b
from ladder.lower.cuda.attention_loads import Keys
from ladder.lower.cuda.attention_place import Spec
from schedules.attention import FRAGMENT, WARP

Expr = Any

LOWEST = -1e30
"""Where maxima begin: below every score that counts, and finite, so that differences are numbers."""


def over_keys(value: Expr, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """Return the combination over the lanes that hold other keys of the same rows."""
    for distance in (4, 8, 16):
        other = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), value, distance, WARP, WARP)
        value = b.bind(combine(value, other))
    return value


def multiply(spec: Spec, sums: Any, at: int, a: Sequence[Expr], x: Sequence[Expr], *, fresh: bool) -> None:
    """Emit ``sums += a · x``, or, if ``fresh``, ``sums = a · x``."""
    registers = [sums[at + i] for i in range(4)]
    start = [T.float32(0)] * 4 if fresh else registers
    b.ptx(spec.step.spelling, *registers, *a, *x, *start)


def raw_scores(spec: Spec, queries: list[list[Expr]], keys: Any) -> Any:
    """Return the products of q and the keys of an iteration in registers, in the order of `Spec.scores`."""
    scores = b.local(len(spec.scores), "float32")
    other = b.local(4, "float32")
    for fragment in range(spec.schedule.fragments):
        registers = spec.operands.keys(keys, fragment)
        for part in range(spec.parts):
            first = (fragment * spec.parts + part) * 4
            chains = [(scores, first), (other, 0)]
            for step, a in enumerate(registers):
                sums, at = chains[step % 2]
                multiply(spec, sums, at, a, queries[part][2 * step : 2 * step + 2], fresh=step < 2)
            for i in range(4 if len(registers) > 1 else 0):
                b.store(scores, scores[first + i] + other[i], first + i)
    return scores


class Sums:
    """Sums of a lane."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        count, parts = spec.parts * spec.tiles * 4, range(spec.parts)
        self.values = b.local(count, "float32")
        for index in range(count):
            b.store(self.values, T.float32(0), index)
        self.maxima = [[b.Variable("float32", T.float32(LOWEST)) for _ in range(2)] for _ in parts]
        self.totals = [[b.Variable("float32", T.float32(0)) for _ in range(2)] for _ in parts]

    def weigh(self, scores: list[Expr]) -> None:
        """Rescale the sums so far to the largest scores; scores become weights."""
        for part in range(self.spec.parts):
            for row in range(2):
                self._rescale(scores, part, row)

    def _rescale(self, scores: list[Expr], part: int, row: int) -> None:
        """Find the largest score of a row, and scale what was summed to it; scores become weights."""
        places = enumerate(self.spec.scores)
        mine = [at for at, (_, p, element) in places if p == part and element % 2 == row]
        running, total = self.maxima[part][row], self.totals[part][row]
        largest: Expr = running.value
        for at in mine:
            largest = T.max(largest, scores[at])
        largest = b.Variable("float32", over_keys(b.bind(largest), T.max)).value
        shrink = b.Variable("float32", T.exp2(running.value - largest)).value
        running.set(largest)
        added: Expr = total.value * shrink
        for at in mine:
            scores[at] = b.Variable("float32", T.exp2(scores[at] - largest)).value
            added = added + scores[at]
        total.set(added)
        for tile in range(self.spec.tiles):
            for half in range(2):
                at = (part * self.spec.tiles + tile) * 4 + 2 * half + row
                b.store(self.values, self.values[at] * shrink, at)

    def add(self, weights: list[list[list[Expr]]], values: Any) -> None:
        """Add the values of an iteration times their weights, operands by fragment and part."""
        spec = self.spec
        for fragment in range(spec.schedule.fragments):
            for tile, a in enumerate(spec.operands.values(values, fragment)):
                for part in range(spec.parts):
                    at = (part * spec.tiles + tile) * 4
                    multiply(spec, self.values, at, a, weights[fragment][part], fresh=False)


def seen_scores(
    spec: Spec, keys: Keys, limits: list[list[Expr]], g: Expr, iteration: Expr, scores: Any
) -> list[Expr]:
    """Return the scaled scores of an iteration, in powers of two; minus infinity for keys that are masked."""
    form, factor = spec.form, spec.form.scale * LOG2_E * spec.operands.key_gain
    found = []
    for index, (fragment, part, element) in enumerate(spec.scores):
        key = iteration * spec.span + (fragment * FRAGMENT + 8 * (element // 2)) + g
        value = scores[index] * T.float32(factor)
        if keys.key_scales is not None:
            value = value * keys.key_scales[fragment * 2 + element // 2]
        seen = key < limits[part][element % 2]
        if form.mask == "bool":
            seen = T.And(seen, keys.masks[index] != T.uint32(0))
        elif form.mask:
            value = value + keys.masks[index] * T.float32(LOG2_E)
        minus = T.reinterpret("float32", T.uint32(0xFF800000))
        found.append(b.Variable("float32", T.Select(seen, value, minus)).value)
    return found


def weight_operands(spec: Spec, keys: Keys, weights: list[Expr], fragment: int, part: int) -> list[Expr]:
    """Return the B operand that weights are, scaled as the values are."""
    first = (fragment * spec.parts + part) * 4
    words = []
    for half in range(2):
        pair = weights[first + 2 * half : first + 2 * half + 2]
        if keys.value_scales is not None:
            scale = keys.value_scales[fragment * 2 + half]
            pair = [weight * scale for weight in pair]
        words.append(spec.operands.transposed(*pair))
    return words
