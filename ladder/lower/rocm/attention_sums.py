"""Sums of attention in the registers of AMD GPUs: weighted values, largest scores and totals.

A lane's scores and sums are all of one row of q for each part: online softmax scales them by one number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from ladder.ir.attention import LOG2_E
from ladder.lower import builder as b
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.attention_loads import Keys, Limits
from ladder.lower.rocm.attention_operands import Instruction
from ladder.lower.rocm.attention_place import RUN, Place, Spec
from schedules.wave_attention import FRAGMENT

Expr = Any

LOWEST = -1e30
"""Where maxima begin: below every score that counts, and finite, so that differences are numbers."""

LIFT = {("float16", False): 14.0, ("float16", True): 7.0}
"""(Type of weights, whether values' scales multiply them) -> binary digits that they are lifted by.

The largest stay within what float16 holds, and small ones are no subnormal numbers, which CDNA2's
matrix cores take for 0.
"""


def over_keys(place: Place, value: Expr, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """Return the combination over the lanes that hold other keys of the same row."""
    for distance in (FRAGMENT, 2 * FRAGMENT):
        value = b.Variable("float32", value).value
        value = combine(value, d.shuffle_xor(value, "float32", place.lane, distance))
    return b.Variable("float32", value).value


def _registers(words: list[Expr], step: Instruction, index: int) -> list[Expr]:
    return words[index * step.words : (index + 1) * step.words]


class Sums:
    """Sums of a lane.

    spec, place: The kernel's spec, and where this lane works.
    """

    def __init__(self, spec: Spec, place: Place) -> None:
        self.spec, self.place = spec, place
        parts = range(spec.schedule.parts)
        self.values = [[_zeros() for _ in range(spec.operands.tiles)] for _ in parts]
        self.maxima = [b.Variable("float32", T.float32(LOWEST)) for _ in parts]
        self.totals = [b.Variable("float32", T.float32(0)) for _ in parts]
        self.lift = LIFT.get((spec.form.ttype, spec.operands.scaled), 0.0)

    def raw_scores(self, queries: list[list[Expr]], keys: Keys) -> list[Expr]:
        """Return the products of q and the keys of an iteration, in the order of `Spec.scores`."""
        spec, found = self.spec, []
        for fragment in range(spec.schedule.fragments):
            words = spec.operands.key_words(keys.key(fragment))
            step = spec.operands.instruction(len(words))
            for part in range(spec.schedule.parts):
                sums = _zeros()
                for index in range(len(words) // step.words):
                    step.multiply(
                        sums, _registers(words, step, index), _registers(queries[part], step, index)
                    )
                found += [sums[i] for i in range(RUN)]
        return found

    def seen_scores(self, keys: Keys, limits: Limits, iteration: Expr, raw: list[Expr]) -> list[Expr]:
        """Return the scores of an iteration in powers of two; minus infinity for keys that are masked."""
        spec, found = self.spec, []
        form, factor = spec.form, spec.form.scale * LOG2_E
        minus = T.reinterpret("float32", T.uint32(0xFF800000))
        for index, (fragment, part, element) in enumerate(spec.scores):
            key = iteration * spec.schedule.span + (fragment * FRAGMENT + element) + self.place.g * RUN
            value = raw[index] * T.float32(factor)
            if spec.operands.scaled:
                value = value * d.as_type(keys.key_scales[fragment * RUN + element], "float32")
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
        largest = over_keys(self.place, largest, T.max)
        shrink = b.Variable("float32", power(running.value - largest)).value
        running.set(largest)
        base = largest - T.float32(self.lift) if self.lift else largest
        added: Expr = total.value * shrink
        for at in mine:
            scores[at] = b.Variable("float32", power(scores[at] - base)).value
            added = added + scores[at]
        total.set(added)
        for sums in self.values[part]:
            for i in range(RUN):
                b.store(sums, sums[i] * shrink, i)

    def add(self, weights: list[Expr], keys: Keys) -> None:
        """Add the values of an iteration times their weights."""
        spec, operands = self.spec, self.spec.operands
        step = operands.instruction(2 * spec.schedule.fragments)
        together = step.words // 2
        for first in range(0, spec.schedule.fragments, together):
            fragments = range(first, first + together)
            tiles = [operands.value_words(keys.value(fragment)) for fragment in fragments]
            for part in range(spec.schedule.parts):
                words = [
                    word for fragment in fragments for word in self._operand(weights, keys, fragment, part)
                ]
                for tile, sums in enumerate(self.values[part]):
                    step.multiply(sums, [word for held in tiles for word in held[tile]], words)

    def _operand(self, weights: list[Expr], keys: Keys, fragment: int, part: int) -> list[Expr]:
        """Return the operand that weights of a fragment are, scaled as its values are."""
        spec = self.spec
        mine = [at for at, (f, p, _) in enumerate(spec.scores) if (f, p) == (fragment, part)]
        found = [weights[at] for at in mine]
        if spec.operands.scaled:
            scales = [d.as_type(keys.value_scales[fragment * RUN + i], "float32") for i in range(RUN)]
            found = [weight * scale for weight, scale in zip(found, scales, strict=True)]
        return spec.operands.weights(found)


def _zeros() -> Any:
    sums = b.local(RUN, "float32")
    b.store(sums, T.Broadcast(T.float32(0), RUN), d.lanes(0, RUN))
    return sums


def power(x: Expr) -> Expr:
    """Return a power of two; subnormal ones are 0."""
    return d.intrinsic("float32", "llvm.amdgcn.exp2", x)
