"""Packed words and scales of the pipeline ``digits``, streamed through registers; codes become operands."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.cuda.digit_geometry import Spec
from ladder.lower.cuda.digit_place import Place
from ladder.lower.cuda.gemv_place import half_words
from ladder.lower.cuda.gemv_weights import LOADS
from ladder.lower.gpu.emission import TirMachine
from ladder.lower.gpu.groups import array_dtype
from ladder.lower.gpu.machine import XOR_AND, repeat

Expr = Any


class Weights:
    """Registers of the tiles in flight, and their loads.

    words_at: Where the lane's words of the current tile begin.
    """

    def __init__(self, spec: Spec, place: Place, words_at: b.Variable) -> None:
        self.spec, self.place, self.words_at = spec, place, words_at
        bits, stages = spec.groups.bits, spec.schedule.stages
        self.words = [[b.local(bits, "uint32") for _ in range(spec.geo.row_blocks)] for _ in range(stages)]
        # Warps without work multiply what they never loaded: nobody reads the sums, but they are defined.
        for words in (words for stage in self.words for words in stage):
            for i in range(bits):
                b.store(words, T.uint32(0), i)
        gated = spec.geo.halves > 1
        self.half_words = half_words(place.args, spec.geo, spec.tile_words) if gated else T.int32(0)
        dtype = array_dtype(place.args.scales)
        periods = range(stages // spec.geo.period)
        # A lane has the scale of one row of 32, and hands it out when the period ends.
        self.scales = [b.local(spec.scale_parts, dtype) for _ in periods] if dtype else []

    def begin(self, tile: Expr) -> None:
        """Go to a packed tile along K."""
        start = T.Cast("int64", self.place.strip_tile + tile) * T.int64(self.spec.tile_words)
        self.words_at.set(start + T.Cast("int64", self.place.owner))

    def advance(self) -> None:
        """Go on by ``stages`` tiles."""
        step = T.int64(self.spec.schedule.stages * self.spec.tile_words)
        self.words_at.set(self.words_at.value + step)

    def load(self, slot: int, distance: int, tile: Expr, end: Expr, *, guarded: bool) -> None:
        """Emit the loads of the tile ``distance`` after ``tile``, and of its period's scales."""
        spec, args, bits = self.spec, self.place.args, self.spec.groups.bits
        with b.when(tile + distance < end if guarded else True):
            for block, words in enumerate(self.words[slot]):
                half, own = divmod(block, spec.geo.own_blocks)
                at = self.words_at.value + T.int64(distance * spec.tile_words + own * 32 * bits)
                at = at + T.Cast("int64", self.half_words) if half else at
                b.ptx(LOADS[bits], *(words[i] for i in range(bits)), args.words.ptr_to([0, 0, at]))
        before = spec.geo.period - 1
        if spec.gemm.scale and slot % spec.geo.period == before:
            first = tile + (distance - before)
            with b.when(first < end if guarded else True):
                row = b.bind(spec.groups.row(first, 0))
                for part in range(spec.scale_parts):
                    scale = args.scales[row, self.place.column + part * 32]
                    b.store(self.scales[slot // spec.geo.period], scale, part)

    def codes(self, words: Any, half: int, t: int) -> Expr:
        """Return four codes of row g or g+8 in place."""
        spec, bits = self.spec, self.spec.groups.bits
        quad = spec.quads[t]
        position = quad.position + bits * half
        mask = 0x01010101 * (((1 << bits) - 1) << position)
        if not spec.form.flip:
            return b.bind(words[quad.word] & T.uint32(mask))
        # All codes are flipped by one constant, which stays in a register beside the mask.
        m = TirMachine()
        flip = m.constant(repeat(spec.form.flip, bits))
        return m.lop3(m.input(words[quad.word]), flip, m.constant(mask), XOR_AND).content
