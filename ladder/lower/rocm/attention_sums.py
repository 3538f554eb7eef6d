"""Sums of attention in the registers of AMD GPUs: weighted values, largest scores and totals.

A lane's scores and sums are all of one row of q for each part: online softmax scales them by one number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import mul
from typing import Any

from tvm.script import tirx as T

from ladder.ir.attention import LOG2_E
from ladder.lower import builder as b
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.attention_loads import Keys, Limits
from ladder.lower.rocm.attention_place import Place, Spec
from ladder.lower.rocm.steps import WaveStep
from schedules.wave_attention import FRAGMENT

Expr = Any

LOWEST = -1e30
"""Where maxima begin: below every score that counts, and finite, so that differences are numbers."""

LIFT = {("float16", False): 14.0, ("float16", True): 7.0}
"""(Type of weights, whether values' scales multiply them) -> binary digits that they are lifted by.

The largest stay within what float16 holds, and small ones are no subnormal numbers, which CDNA2's
matrix cores take for 0.
"""


def over_keys(spec: Spec, place: Place, value: Expr, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """Return the combination over the lanes that hold other keys of the same row."""
    value = b.Variable("float32", value).value
    if spec.operands.groups == 2:
        return b.Variable("float32", combine(value, d.other_half(value, "float32"))).value
    for distance in (FRAGMENT, 2 * FRAGMENT):
        value = b.Variable("float32", value).value
        value = combine(value, d.shuffle_xor(value, "float32", place.lane, distance))
    return b.Variable("float32", value).value


class Sums:
    """Sums of a lane."""

    def __init__(self, spec: Spec, place: Place) -> None:
        self.spec, self.place = spec, place
        parts = range(spec.schedule.parts)
        self.values = [[_zeros(spec) for _ in range(spec.operands.tiles)] for _ in parts]
        self.maxima = [b.Variable("float32", T.float32(LOWEST)) for _ in parts]
        self.totals = [b.Variable("float32", T.float32(0)) for _ in parts]
        self.lift = LIFT.get((spec.form.ttype, spec.operands.scaled), 0.0)

    def raw_scores(self, queries: list[list[Expr]], keys: Keys) -> list[Expr]:
        """Return the products of q and the keys of an iteration, in the order of `Spec.scores`."""
        spec, operands, found = self.spec, self.spec.operands, []
        for fragment in range(spec.schedule.fragments):
            words = operands.key_words(keys.key(fragment))
            step = operands.step(len(words))
            own, parts = operands.own_words(step), [_zeros(spec) for _ in queries]
            for index in range(len(words) // own):
                key = operands.whole(words[index * own : (index + 1) * own], self.place.g)
                for sums, query in zip(parts, queries, strict=True):
                    _multiply(step, sums, key, query[index * step.words : (index + 1) * step.words])
            found += [sums[i] for sums in parts for i in range(spec.run)]
        return found

    def seen_scores(self, keys: Keys, limits: Limits, iteration: Expr, raw: list[Expr]) -> list[Expr]:
        """Return the scores of an iteration in powers of two; minus infinity for keys that are masked."""
        spec, found = self.spec, []
        form, factor = spec.form, spec.form.scale * LOG2_E
        minus = T.reinterpret("float32", T.uint32(0xFF800000))
        for index, (fragment, part, element) in enumerate(spec.scores):
            key = iteration * spec.schedule.span + (fragment * FRAGMENT + element) + self.place.g * spec.run
            value = raw[index] * T.float32(factor)
            if spec.operands.scaled:
                value = value * d.as_type(keys.key_scales[fragment * spec.run + element], "float32")
            seen = key < limits.rows[part]
            if form.mask == "bool":
                seen = T.And(seen, keys.mask(index))
            elif form.mask:
                value = value + keys.mask(index) * T.float32(LOG2_E)
            found.append(b.Variable("float32", T.Select(seen, value, minus)).value)
        return found

    def weigh(self, scores: list[Expr]) -> None:
        """Rescale the sums so far to the largest scores; scores become weights."""
        for part in range(self.spec.schedule.parts):
            self._rescale(scores, part)

    def _rescale(self, scores: list[Expr], part: int) -> None:
        mine = [at for at, (_, p, _) in enumerate(self.spec.scores) if p == part]
        running, total = self.maxima[part], self.totals[part]
        largest: Expr = running.value
        for at in mine:
            largest = T.max(largest, scores[at])
        largest = over_keys(self.spec, self.place, largest, T.max)
        shrink = b.Variable("float32", power(running.value - largest)).value
        running.set(largest)
        base = largest - T.float32(self.lift) if self.lift else largest
        added: Expr = total.value * shrink
        for at in mine:
            scores[at] = b.Variable("float32", power(scores[at] - base)).value
            added = added + scores[at]
        total.set(added)
        for sums in self.values[part]:
            for i in range(self.spec.run):
                b.store(sums, sums[i] * shrink, i)

    def add(self, weights: list[Expr], keys: Keys) -> None:
        """Add the values of an iteration times their weights."""
        spec, operands = self.spec, self.spec.operands
        each = spec.run // 2
        step = operands.step(each * spec.schedule.fragments)
        together = operands.own_words(step) // each
        for first in range(0, spec.schedule.fragments, together):
            fragments = range(first, first + together)
            words = [self._operand(weights, keys, fragments, part) for part in range(spec.schedule.parts)]
            held = [operands.value_words(keys.value(fragment)) for fragment in fragments]
            for tile, registers in enumerate(zip(*held, strict=True)):
                value = operands.whole([word for each in registers for word in each], self.place.g)
                for sums, operand in zip(self.values, words, strict=True):
                    _multiply(step, sums[tile], value, operand)

    def _operand(self, weights: list[Expr], keys: Keys, fragments: range, part: int) -> list[Expr]:
        """Return the operand that weights of fragments are, scaled as their values are."""
        spec, found = self.spec, list[Expr]()
        for at, (fragment, p, element) in enumerate(spec.scores):
            if fragment in fragments and p == part:
                held = [keys.value_scales[fragment * spec.run + element]] if spec.operands.scaled else []
                factors = [d.as_type(scale, "float32") for scale in held]
                found.append(reduce(mul, factors, weights[at]))
        return spec.operands.whole(spec.operands.weights(found), self.place.g)


def _multiply(step: WaveStep, sums: Any, a: list[Expr], x: list[Expr]) -> None:
    """Emit ``sums += a · x``; nothing of attention is an 8-bit float, whose type the name would state."""
    step.perform("", sums, range(int(sums.shape[0])), a, x, None)


def _zeros(spec: Spec) -> Any:
    sums = b.local(spec.run, "float32")
    b.store(sums, T.Broadcast(T.float32(0), spec.run), d.lanes(0, spec.run))
    return sums


def power(x: Expr) -> Expr:
    """Return a power of two; subnormal ones are 0."""
    return d.intrinsic("float32", "llvm.amdgcn.exp2", x)
