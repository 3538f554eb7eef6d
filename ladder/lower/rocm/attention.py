"""Attention on AMD GPUs: keys and values stream from memory straight into operands of MFMA or WMMA 16x16.

A wave has 16 or 32 rows of q: tokens times the heads that share keys. ``sᵀ = K qᵀ`` leaves a lane four
neighbouring keys of one row of q (eight in waves of 32 lanes), which is how ``oᵀ = Vᵀ pᵀ`` takes weights:
nothing moves between lanes but the largest score and, on RDNA3, whose operands both halves of a wave hold,
operands. A lane loads pieces of K in the order in which they are operands (q is loaded
likewise); of V it loads pieces of its neighbouring keys, of which byte permutations make operands. Waves of
a block have other rows, or take the keys of the same rows in turn and join their sums through LDS
(`Join`). No such kernel has run on hardware yet.

Sums of attention in the registers of AMD GPUs: weighted values, largest scores and totals.

A lane's scores and sums are all of one row of q for each part: online softmax scales them by one number.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from operator import mul
from typing import Any

from tvm.script import tirx as T

from ladder.ir.attention import LOG2_E, Attention
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.activation_tile import each_piece
from ladder.lower.gpu.attention import LOWEST, VECTOR, Limits, declare_inputs, joined, unseen_rows, weigh
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.attention_loads import (
    Keys,
    Place,
    Spec,
    aligned,
    choose_spec,
    find_limits,
    find_place,
    load_queries,
    pack,
    row_of,
)
from ladder.lower.rocm.steps import WaveStep
from schedules.wave_attention import PAD, SIDE, STATE, WaveAttentionSchedule, registers, shared_words
from targets import TileDevice

FULL = 0.75
"""Part of a lane's registers beyond which an estimate that is too low means spills."""

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
    for distance in (SIDE, 2 * SIDE):
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
            key = iteration * spec.schedule.span + (fragment * SIDE + element) + self.place.g * spec.run
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
        most = partial(over_keys, self.spec, self.place, combine=T.max)
        shrink = weigh(scores, mine, (self.maxima[part], self.totals[part]), most, power, self.lift)
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
            for tile, own in enumerate(zip(*held, strict=True)):
                value = operands.whole([word for each in own for word in each], self.place.g)
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


MOST_STORED = 8
"""Elements that a lane stores at once."""


@dataclass(frozen=True)
class Join:
    """Finishes and stores sums.

    sums: What the lane summed up.
    """

    spec: Spec
    place: Place
    sums: Sums

    def finish(self) -> None:
        """Emit the end of the kernel."""
        totals = [
            over_keys(self.spec, self.place, total.value, lambda x, y: x + y) for total in self.sums.totals
        ]
        if self.spec.schedule.key_waves == 1:
            self._store_own(totals)
        else:
            self._join(totals)

    def _runs(self, part: int) -> list[tuple[Expr, list[Expr]]]:
        """Return where runs of neighbouring elements of a head begin that a lane has sums of, and those."""
        operands, values, each = self.spec.operands, self.sums.values[part], self.spec.run
        found = []
        for piece in operands.value_pieces:
            places = [divmod(at, piece.elements) for at in range(each * piece.elements)]
            run = [values[piece.before + within][i] for i, within in places]
            found.append((piece.column(each * self.place.g), run))
        return found

    def _store_own(self, totals: list[Expr]) -> None:
        for part in range(self.spec.schedule.parts):
            row = b.bind(row_of(self.spec, self.place, part))
            scale = self._inverse(totals[part])
            with b.when(row < self.place.row_count):
                for first, run in self._runs(part):
                    step = min(MOST_STORED, len(run))
                    for at in range(0, len(run), step):
                        values = [value * scale for value in run[at : at + step]]
                        with self._within(first + at):
                            self._store(row, first + at, values)

    def _within(self, at: Expr) -> AbstractContextManager[None]:
        """Return a branch for elements that are the head's."""
        form = self.spec.form
        return b.when(at < form.size) if form.width > form.size else nullcontext()

    def _join(self, totals: list[Expr]) -> None:
        """Leave the wave's sums in LDS, and store joined ones."""
        plan, form = self.spec.schedule, self.spec.form
        shared = d.shared(shared_words(self.spec.form, plan))
        width = form.width + PAD
        states = plan.key_waves * plan.rows * width
        for part in range(plan.parts):
            row = b.bind(self.place.key_wave * plan.rows + row_of(self.spec, self.place, part))
            with b.when(self.place.g == 0):
                words = [d.as_type(x, "uint32") for x in (self.sums.maxima[part].value, totals[part])]
                b.store(shared, d.vector(words), d.lanes(states + row * STATE, 2))
            for first, run in self._runs(part):
                for at in range(0, len(run), VECTOR):
                    words = [d.as_type(value, "uint32") for value in run[at : at + VECTOR]]
                    b.store(shared, d.vector(words), d.lanes(row * width + first + at, VECTOR))
        d.block_sync(self.spec.device)
        pieces = form.size // VECTOR

        def store(piece: Expr) -> None:
            row, at = b.bind(piece // pieces), b.bind(piece % pieces * VECTOR)
            with b.when(row < self.place.row_count):
                self._store(row, at, self._joined(shared, row, at, states))

        each_piece(plan.rows * pieces, self.spec.threads, self.place.thread, store)

    def _joined(self, shared: Any, row: Expr, at: Expr, states: int) -> list[Expr]:
        """Return some elements of the result: all waves' sums, which other largest scores scaled, as one."""
        plan, width = self.spec.schedule, self.spec.form.width + PAD
        rows = [row + wave * plan.rows for wave in range(plan.key_waves)]
        held = [_floats(shared, states + place * STATE, 2) for place in rows]
        parts = (_floats(shared, place * width + at, VECTOR) for place in rows)
        sums, _, total = joined(held, parts, power)
        scale = self._inverse(b.Variable("float32", total).value)
        return [value * scale for value in sums]

    def _inverse(self, total: Expr) -> Expr:
        """Return what the sums of a row are multiplied by."""
        found = d.intrinsic("float32", "llvm.amdgcn.rcp", total)
        unseen = unseen_rows(self.spec.form, self.place.inputs.numbers["keys"])
        return b.Variable("float32", T.Select(total == T.float32(0), unseen, found)).value

    def _store(self, row: Expr, at: Expr, values: list[Expr]) -> None:
        """Round and store neighbouring elements of a row."""
        place, n, ttype = self.place, self.place.inputs.numbers, self.spec.form.ttype
        token, head = place.query(row)
        begin = aligned(place.batch * n["out_b"] + head * n["out_h"] + token * n["out_s"], 2)
        words = [pack(values[i], values[i + 1], ttype) for i in range(0, len(values), 2)]
        value = d.as_type(d.vector(words), f"{ttype}x{len(values)}")
        b.store(place.inputs.tensors["out"], value, d.lanes(begin + at, len(values)))


def _floats(shared: Any, at: Expr, count: int) -> list[Expr]:
    words = b.local(count, "uint32")
    d.load(words, shared, at, width=count)
    return [d.as_type(words[i], "float32") for i in range(count)]


def emit(form: Attention, device: TileDevice, schedule: WaveAttentionSchedule, name: str) -> Any:
    """Emit one kernel: ``(numbers..., tensors...)`` as the form names them; tensors have one axis.

    Raises ScheduleError as `schedules.wave_attention.check_legal`.
    """
    with b.function(name) as result:
        spec = choose_spec(form, device, schedule)
        place = find_place(spec, declare_inputs(form))
        limits, queries = find_limits(spec, place), load_queries(spec, place)
        sums = Sums(spec, place)
        walk(spec, place, limits, queries, sums, Keys(spec, place, limits.needed))
        Join(spec, place, sums).finish()
    return result.func


def walk(spec: Spec, place: Place, limits: Limits, queries: list[list[Expr]], sums: Sums, keys: Keys) -> None:
    """Emit the loop over a wave's keys: loads of the next iteration are in flight while one is computed.

    All waves that share keys take as many iterations. Of an iteration beyond the last key weights are 0.
    Where registers are few, LLVM may not move a step's instructions into another's, where it would spill.
    """
    plan = spec.schedule
    own = plan.span * plan.key_waves
    is_full = registers(spec.form, spec.device, plan) > FULL * spec.operands.fragment.registers
    fence_if_full = d.schedule_fence if is_full else lambda: None
    count = b.keep((limits.needed + (own - 1)) // own)
    loads: list[Callable[[Expr], None]] = [keys.load_keys, keys.load_values]
    if spec.form.mask:
        loads.insert(0, keys.load_mask)
    with b.when(count > 0):
        for load in loads:
            load(place.key_wave)
    with b.loop(count, rolled=True) as index:
        iteration = b.keep(index * plan.key_waves + place.key_wave)
        following = b.keep(iteration + plan.key_waves)
        raw = sums.raw_scores(queries, keys)
        fence_if_full()
        weights = sums.seen_scores(keys, limits, iteration, raw)
        for load in loads[:-1]:
            load(following)
            fence_if_full()
        d.schedule_fence()
        sums.weigh(weights)
        fence_if_full()
        sums.add(weights, keys)
        keys.load_values(following)
        d.schedule_fence()
