"""One packed tile: decoded and multiplied span by span, into accumulators that groups flush."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ladder.lower import builder as b
from ladder.lower.gpu.accumulators import Accumulators
from ladder.lower.gpu.emission import SharedTable
from ladder.lower.gpu.groups import GroupRegisters

Expr = Any


class TileMultiplier:
    """Emits one packed tile's decode and multiplication, span by span.

    decoder: Turns packed words into operand registers.
    table: The decoder's table in shared memory, if it has one.
    """

    def __init__(self, decoder: Any, accumulators: Accumulators, table: SharedTable | None = None) -> None:
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
        """Return the granules that a span touches."""
        first = span * self.span // self.groups.registers
        return range(first, (span * self.span + self.span - 1) // self.groups.registers + 1)

    def _decode(self, words: list[Any], group_registers: list[GroupRegisters], block: int, span: int) -> None:
        count = min(self.span, self.groups.registers)
        zeros, registers = self.decoder.subtracts_zeros, group_registers[block // self.parts]
        for granule in self._granules(span):
            first = max(granule * self.groups.registers, span * self.span)
            self.decoder.registers(
                words[block],
                first,
                count,
                self.operands,
                block * self.span + first - span * self.span,
                registers.operand_scales(granule),
                registers.operand_zeros(granule) if zeros else None,
                self.table,
                at=registers.exponent_at(granule),
            )

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
