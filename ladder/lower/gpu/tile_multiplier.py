"""One packed tile: decoded and multiplied span by span, into accumulators that groups flush.

8-bit activations on the float16 tensor core: both operands are widened, exactly, in registers.

Hopper has fp8 tensor cores for wgmma alone: ptxas makes of an fp8 ``mma`` conversions of all its operands and
two float16 products. Here weights are decoded to float16 at once, and the operands of x, which all row blocks
share, are converted once. Packed words stay those of the 8-bit core: a register of four bytes becomes one of
its even and one of its odd bytes, which permutes K alike in both operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.accumulators import Accumulators
from ladder.lower.gpu.decode import Decoder, GroupValues
from ladder.lower.gpu.emission import WIDENINGS, SharedTable, helper, widened_pair
from ladder.lower.gpu.groups import GroupRegisters
from ladder.lower.gpu.instructions import MatrixStep
from schedules.codes import EMULATED
from schedules.layouts import TILE, packed_group
from targets import TileDevice
from tile_types import get_type


class TileMultiplier:
    """Emits one packed tile's decode and multiplication, span by span.

    decoder: Turns packed words into operand registers.
    table: The decoder's table in shared memory, if it has one.
    """

    def __init__(
        self, decoder: Decoder, accumulators: Accumulators, table: SharedTable | None = None
    ) -> None:
        self.decoder, self.accumulators, self.table = decoder, accumulators, table
        self.groups = accumulators.groups
        self.parts, self.joined = accumulators.step.parts, accumulators.step.joined
        self.word_blocks, self.m_blocks = accumulators.row_blocks * self.parts, accumulators.m_blocks
        self.span = 2 * 4
        self.operands = b.local(self.word_blocks * self.span, "uint32")
        held = self.m_blocks if self.word_blocks > 1 and self.m_blocks == 2 else 1
        self.x = [b.local(4 * self.parts, "uint32") for _ in range(held)]

    def emit(
        self,
        words: list[Any],
        group_registers: list[GroupRegisters],
        load_activations: Callable[[int, int, Any], None],
        flush: bool,
    ) -> None:
        """Emit the tile.

        words: Local buffers of the thread's packed words, one per row block and part of the step.
        group_registers: Scales and zero points of each row block.
        load_activations: ``load_activations(m_block, span, out)`` emits the loads of B operands, four for
            each part.
        flush: Whether partial sums are flushed at the tile's last granule.
        """
        for span in range(self.groups.lane // self.span):
            if len(self.x) == self.m_blocks and len(self._granules(span)) == 1:
                self._by_rows(words, group_registers, load_activations, span, flush)
                continue
            for block in range(self.word_blocks):
                self._decode(words, group_registers, block, span)
            for m_block in range(self.m_blocks):
                load_activations(m_block, span, self._loaded(m_block))
                for granule in self._granules(span):
                    for block in range(0, self.word_blocks, self.joined):
                        self._multiply(block, m_block, span, granule)
                    self._flush(group_registers, m_block, span, granule, flush)

    def emit_flushing(
        self,
        words: list[Any],
        group_registers: list[GroupRegisters],
        load_activations: Callable[[int, int, Any], None],
        due: Expr,
    ) -> None:
        """Emit the tile, and a flush where ``due``, a Python bool or a condition of the kernel, holds."""
        self.emit(words, group_registers, load_activations, flush=due is True)
        if not isinstance(due, bool):
            with b.when(due):
                self.flush_all(group_registers)

    def _by_rows(
        self,
        words: list[Any],
        group_registers: list[GroupRegisters],
        load_activations: Callable[[int, int, Any], None],
        span: int,
        flush: bool,
    ) -> None:
        """Emit a span that lies in one granule so that the operands of one row block live at a time."""
        (granule,) = self._granules(span)
        for m_block, x in enumerate(self.x):
            load_activations(m_block, span, x)
        for block in range(0, self.word_blocks, self.joined):
            for each in range(block, block + self.joined):
                self._decode(words, group_registers, each, span)
            for m_block in range(self.m_blocks):
                self._multiply(block, m_block, span, granule)
        for m_block in range(self.m_blocks):
            self._flush(group_registers, m_block, span, granule, flush)

    def _granules(self, span: int) -> range:
        first = span * self.span // self.groups.registers
        return range(first, (span * self.span + self.span - 1) // self.groups.registers + 1)

    def _decode(self, words: list[Any], group_registers: list[GroupRegisters], block: int, span: int) -> None:
        count = min(self.span, self.groups.registers)
        zeros, registers = self.decoder.subtracts_zeros, group_registers[block // self.parts]
        for granule in self._granules(span):
            first = max(granule * self.groups.registers, span * self.span)
            values = GroupValues(
                registers.operand_scales(granule),
                registers.operand_zeros(granule) if zeros else None,
                registers.exponent_at(granule),
            )
            place = block * self.span + first - span * self.span
            which = range(first, first + count)
            self.decoder.registers(words[block], which, self.operands, place, values, self.table)

    def _multiply(self, block: int, m_block: int, span: int, granule: int) -> None:
        """Emit a granule's steps of the joined parts of a row block from ``block`` on within a span."""
        low = granule * self.groups.registers - span * self.span
        loaded, (row_block, part) = self._loaded(m_block), divmod(block, self.parts)
        together = self.accumulators.step.steps
        for step in range(0, 2, together):
            registers = range(4 * step, 4 * (step + together))
            inside = [low <= r < low + self.groups.registers for r in registers]
            if not any(inside):
                continue
            a, x = [], []
            for each in range(self.joined):
                x += [loaded[4 * (part + each) + r] for r in range(2 * step, 2 * (step + together))]
                first = (block + each) * self.span
                held = zip(registers, inside, strict=True)
                a += [self.operands[first + r] if yes else None for r, yes in held]
            self.accumulators.multiply(row_block * self.m_blocks + m_block, a, x)
            if row_block == 0:
                self.accumulators.add_x(m_block, a, x)

    def _loaded(self, m_block: int) -> Any:
        """Return the registers that hold a block along M's operands."""
        return self.x[m_block % len(self.x)]

    def _flush(
        self, group_registers: list[GroupRegisters], m_block: int, span: int, granule: int, flush: bool
    ) -> None:
        """Emit a block along M's flush if the granule ends within the span."""
        ends = (granule + 1) * self.groups.registers <= (span + 1) * self.span
        inner = self.groups.per_tile > 1 and self.accumulators.flushes_granules
        if self.accumulators.flushes and ends and (flush or inner):
            self.accumulators.flush(m_block, granule, group_registers)

    def flush_all(self, group_registers: list[GroupRegisters]) -> None:
        """Emit the flush of every fragment with the tile's last granule."""
        for m_block in range(self.m_blocks):
            self.accumulators.flush(m_block, self.groups.per_tile - 1, group_registers)


WIDTHS = (1, 2, 4)
"""Bits of codes whose words hold registers of both cores in places that differ by a permutation of K."""

EVEN_THEN_ODD = 0x3120
"""`prmt` selector: bytes 0 and 2 in the low half, 1 and 3 in the high half."""

CORE = "float16"

STEPS = {
    activation: MatrixStep(activation, (9, 0), "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
    for activation in WIDENINGS
}


def widened_step(gemm: Gemm, device: TileDevice) -> MatrixStep | None:
    """Return the step for widened operands, or None where the core takes both operands as they are.

    Groups that end within a tile keep the fp8 step: permuted, their elements are not neighbours.
    """
    bits = get_type(gemm.weight).elem_bits
    whole = gemm.group_size >= gemm.k or packed_group(gemm.group_size, gemm.k) % TILE == 0
    possible = device.compute_capability in EMULATED and bits in WIDTHS and whole and gemm.zero == "none"
    return STEPS.get(gemm.activation) if possible else None


@dataclass(frozen=True)
class Part:
    """The float16 step of one half of the bytes of an 8-bit step.

    registers: Decoded float16 registers of a tile that are its W operands.
    x: Widened registers of x that are its x operands.
    """

    registers: tuple[int, ...]
    x: tuple[int, int]


def parts_of(bits: int) -> list[Part]:
    """Return the float16 steps of a tile in the order in which codes of a width are decoded."""
    slots = 8 // bits  # registers of the 8-bit core per word

    def decoded(register: int, half: int) -> int:
        word, slot = divmod(register, slots)
        return word * 2 * slots + half * slots + slot

    found = [
        Part(
            tuple(decoded(4 * step + i, half) for i in range(4)),
            (2 * (2 * step) + half, 2 * (2 * step + 1) + half),
        )
        for step in (0, 1)
        for half in (0, 1)
    ]
    return sorted(found, key=lambda part: part.registers)


def widen(activation: str, word: Expr, out: Any, at: int) -> None:
    """Emit four 8-bit floats becoming two registers of float16: of the even bytes, and of the odd ones."""
    prmt = helper("ladder_prmt", "prmt.b32 %0, %1, %2, %3;", 3)
    order = T.uint32(EVEN_THEN_ODD)
    pairs = b.bind(b.call_inline("ladder_prmt", prmt, "uint32", word, word, order))
    for half in range(2):
        b.store(out, widened_pair(activation, pairs, half), at + half)


class WideningMultiplier(TileMultiplier):
    """Emits one tile's decode, widening and multiplication; the rest as for `TileMultiplier`."""

    def __init__(self, decoder: Any, accumulators: Any, activation: str) -> None:
        super().__init__(decoder, accumulators)
        self.activation = activation
        self.parts_of_tile = parts_of(accumulators.groups.bits)
        self.bytes = b.local(4, "uint32")
        self.wide = [b.local(8, "uint32") for _ in range(self.m_blocks)]

    def emit(
        self,
        words: list[Any],
        group_registers: list[GroupRegisters],
        load_activations: Callable[[int, int, Any], None],
        flush: bool,
    ) -> None:
        for m_block, wide in enumerate(self.wide):
            load_activations(m_block, 0, self.bytes)
            for register in range(4):
                widen(self.activation, self.bytes[register], wide, 2 * register)
        for block in range(self.word_blocks):
            for span in range(self.groups.lane // self.span):
                self._decode(words, group_registers, block, span)
                self._multiply_span(block, range(span * self.span, (span + 1) * self.span))
        if flush and self.accumulators.flushes:
            self.flush_all(group_registers)

    def _multiply_span(self, block: int, span: range) -> None:
        """Emit the steps of one row block whose registers are ``span``."""
        for part in self.parts_of_tile:
            if part.registers[0] not in span:
                continue
            a = [self.operands[block * self.span + register - span.start] for register in part.registers]
            for m_block, wide in enumerate(self.wide):
                x = [wide[i] for i in part.x]
                self.accumulators.multiply(block * self.m_blocks + m_block, a, x)
                if block == 0:
                    self.accumulators.add_x(m_block, a, x)
