"""The end of attention on AMD GPUs: waves that had other keys join their sums through LDS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.gpu.activation_tile import each_piece
from ladder.lower.gpu.attention import unseen_rows
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.attention_loads import row_of
from ladder.lower.rocm.attention_operands import pack
from ladder.lower.rocm.attention_place import Place, Spec, aligned
from ladder.lower.rocm.attention_sums import Sums, over_keys, power
from schedules.wave_attention import FRAGMENT, PAD, STATE, shared_words

Expr = Any

VECTOR = 4
"""Elements of a head that a thread joins at a time."""

MOST = 8
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
        piece, found = operands.value_elements, []
        for index in range(operands.value_pieces):
            places = [divmod(at, piece) for at in range(each * piece)]
            run = [values[index * piece + within][i] for i, within in places]
            found.append(((index * FRAGMENT + each * self.place.g) * piece, run))
        return found

    def _store_own(self, totals: list[Expr]) -> None:
        for part in range(self.spec.schedule.parts):
            row = b.bind(row_of(self.spec, self.place, part))
            scale = self._inverse(totals[part])
            with b.when(row < self.place.row_count):
                for first, run in self._runs(part):
                    step = min(MOST, len(run))
                    for at in range(0, len(run), step):
                        self._store(row, first + at, [value * scale for value in run[at : at + step]])

    def _join(self, totals: list[Expr]) -> None:
        """Leave the wave's sums in LDS, and store joined ones."""
        plan, size = self.spec.schedule, self.spec.form.size
        shared = d.shared(shared_words(self.spec.form, plan))
        width, states = size + PAD, plan.key_waves * plan.rows * (size + PAD)
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
        pieces = size // VECTOR

        def store(piece: Expr) -> None:
            row, at = b.bind(piece // pieces), b.bind(piece % pieces * VECTOR)
            with b.when(row < self.place.row_count):
                self._store(row, at, self._joined(shared, row, at, states))

        each_piece(plan.rows * pieces, self.spec.threads, self.place.thread, store)

    def _joined(self, shared: Any, row: Expr, at: Expr, states: int) -> list[Expr]:
        """Return some elements of the result: all waves' sums, which other largest scores scaled, as one."""
        plan, width = self.spec.schedule, self.spec.form.size + PAD
        rows = [row + wave * plan.rows for wave in range(plan.key_waves)]
        held = [_floats(shared, states + place * STATE, 2) for place in rows]
        largest = held[0][0]
        for state in held[1:]:
            largest = T.max(largest, state[0])
        largest = b.Variable("float32", largest).value
        factors = [b.Variable("float32", power(state[0] - largest)).value for state in held]
        total: Expr = T.float32(0)
        for factor, state in zip(factors, held, strict=True):
            total = total + factor * state[1]
        sums: list[Expr] = [T.float32(0)] * VECTOR
        for factor, place in zip(factors, rows, strict=True):
            part = _floats(shared, place * width + at, VECTOR)
            sums = [found + factor * value for found, value in zip(sums, part, strict=True)]
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
