"""Loop accumulators: held in registers during the loop, combined over groups and blocks after it.

Sums and maxima are joined as they are. ``rescale`` accumulates ``x exp(m - M)``, M being the maximum of all
m so far (online softmax): parts are scaled to the greatest of their maxima before they are added.

Where m is subtracted in exponents that end in such accumulators, the running maximum may stand for m
itself: ``x`` then has the factor ``exp(-M)`` already and is added, or accumulated by the matrix
instructions, as it is. Where x does not depend on m (partial sums of another kernel), it is multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.script import tirx as T

from ladder.ir.graph import Node
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.blocks.analysis import BlockProgram
from ladder.lower.blocks.context import BlockContext
from ladder.lower.blocks.fragments import hold, zeros
from ladder.lower.blocks.reductions import combine_of
from ladder.lower.blocks.values import Matmul, Value
from ladder.lower.cuda.gemv_sums import READ_PEER
from tile_types.errors import ScheduleError

LINEAR = ("matmul", "reduce_sum", "convert", "mul", "div", "accumulate")
"""Operators that keep a factor per row of their first operand."""


def maxima(program: BlockProgram) -> tuple[str, ...]:
    """Return the maxima that accumulators are scaled by.

    Raises ScheduleError if a maximum is used otherwise than online softmax does, so that the running one
        cannot stand for it.
    """
    names = dict.fromkeys(node.inputs[1] for node in program.accumulators if len(node.inputs) == 2)
    for name in names:
        _require_softmax(program, name)
    return tuple(names)


def _require_softmax(program: BlockProgram, name: str) -> None:
    """Check that the maximum m occurs only as ``exp(... - m)`` before accumulators that take m."""
    for user in program.users[name]:
        if user.operator == "accumulate":
            # As the maximum that others are scaled to, or accumulated itself.
            if user.inputs[1:] == (name,) and user.inputs[0] == name:
                raise ScheduleError(f"%{user.name} rescales the maximum %{name} by itself")
            continue
        exponents = program.users[user.name]
        if user.operator != "sub" or user.inputs[1] != name or any(e.operator != "exp" for e in exponents):
            raise ScheduleError(f"%{user.name} takes the maximum %{name} otherwise than in exp(x - maximum)")
        for exponent in exponents:
            _require_linear(program, exponent.name, name)


def _require_linear(program: BlockProgram, value: str, maximum: str) -> None:
    for user in program.users[value]:
        linear = user.operator in LINEAR and user.inputs[0] == value and value not in user.inputs[1:]
        if not linear or (user.operator == "accumulate" and user.inputs[1:] != (maximum,)):
            raise ScheduleError(f"%{user.name} takes an exponential of %{maximum} that it may not rescale")
        if user.operator != "accumulate":
            _require_linear(program, user.name, maximum)


def depends_on(program: BlockProgram, maximum: str, value: str) -> bool:
    """Return whether a value of the loop depends on a maximum."""
    if value == maximum:
        return True
    node = program.block.producer(value)
    inner = node.operator not in ("accumulate", "load")
    return inner and any(depends_on(program, maximum, name) for name in node.inputs)


LOWEST = -3.0e38
"""Stands for minus infinity: differences of two such numbers are 0, not NaN."""


def _later(x: Expr, y: Expr) -> Expr:
    return y


KINDS = {
    "sum": (0.0, "reduce_sum"),
    "rescale": (0.0, "reduce_sum"),
    "max": (LOWEST, "reduce_max"),
    "last": (0.0, ""),
}
"""Kind -> what it begins with, and the reduction that joins parts; of ``last``, the later one stays."""

SUMS = ("sum", "rescale")
"""Kinds that add, so that parts may be added late and products in place."""


def accumulator_registers(context: BlockContext, node: Node, kind: str) -> Any:
    """Return registers for what a warp accumulates, cleared."""
    if kind not in KINDS:
        raise ScheduleError(f"%{node.name}: accumulators of kind {', '.join(KINDS)} are lowered, not {kind}")
    rows, columns = context.program.shape(node.inputs[0])
    start, _ = KINDS[kind]
    return zeros(context.row_fragments(rows) * _elements_of_row(context, columns), start)


def _elements_of_row(context: BlockContext, columns: int) -> int:
    """Return the registers of a thread for a row of fragments of what is accumulated."""
    lanes = context.lanes
    return lanes.row_elements if columns == 1 else lanes.elements * context.geo.column_fragments(columns)


class Accumulator(Value):
    """A loop accumulator.

    node: The ``accumulate``.
    kind: One of `KINDS`.
    registers: As `accumulator_registers` returns them.
    maximum: For ``rescale``: the node of the step's maximum, and the maximum so far.
    merger: What joins the accumulators of groups; None for one group.
    """

    def __init__(
        self,
        context: BlockContext,
        node: Node,
        source: Value,
        kind: str,
        registers: Any,
        maximum: tuple[str, RunningMaximum] | None,
        merger: Merger | None,
    ) -> None:
        super().__init__(context, node.name, source.shape, "float32")
        self.source, self.kind, self.registers, self.merger = source, kind, registers, merger
        self.maximum = None if maximum is None else maximum[0]
        self.running = None if maximum is None else maximum[1]
        self.is_apart = maximum is not None and not depends_on(context.program, maximum[0], source.name)
        """Whether what is rescaled does not depend on the maximum, so that it must be multiplied."""
        _, joins = KINDS[kind]
        self.join = combine_of(joins, context.dialect) if joins else _later
        self.columns = context.geo.column_fragments(self.shape[1])
        self.is_row = self.shape[1] == 1
        self.each = _elements_of_row(context, self.shape[1])

    # ---- in the loop --------------------------------------------------------------------------------
    def update(self) -> None:
        if self.running is not None:
            self._rescale(self.running)
        if isinstance(self.source, Matmul) and self._exclusive():
            self.source.add_into(self.registers)
            return
        own = self.running.own if self.running is not None and self.is_apart else None
        if not self.is_row:
            self.context.require_whole_columns(self.name)
        for m in range(self.context.row_fragments(self.shape[0])):
            if self.is_row:
                part = self.source.partial_row(m) if self._defers() else self.source.row(m)
                self._join(self.each * m, self._times(own, m, part))
            for n in range(0 if self.is_row else self.columns):
                part = self.source.fragment(m, n)
                self._join(self.each * m + len(part) * n, self._times(own, m, part))

    def _exclusive(self) -> bool:
        """Whether the accumulator is the only user of a product, which then is accumulated in place."""
        alone = len(self.context.program.users[self.source.name]) == 1
        return alone and self.kind in SUMS and not self.is_apart

    def _times(self, factors: list[list[Expr]] | None, m: int, elements: list[Expr]) -> list[Expr]:
        if factors is None:
            return elements
        spread = factors[m] if self.is_row else self.context.lanes.spread(factors[m])
        return [x * factor for x, factor in zip(elements, spread, strict=True)]

    def _join(self, first: int, elements: list[Expr]) -> None:
        for i, element in enumerate(elements):
            b.store(self.registers, self.join(self.registers[first + i], element), first + i)

    def _rescale(self, running: RunningMaximum) -> None:
        for m in range(self.context.row_fragments(self.shape[0])):
            factors = running.factors[m]
            for i in range(self.each):
                at = self.each * m + i
                size = self.context.lanes.elements
                factor = factors[i if self.is_row else self.context.lanes.row_of(i % size)]
                b.store(self.registers, self.registers[at] * factor, at)

    # ---- after the loop -----------------------------------------------------------------------------
    def held(self, m: int, n: int) -> list[Expr]:
        """Return a lane's elements of a fragment, or of a column's rows, as this group has them."""
        if self.is_row:
            return self._own_row(m)
        size = self.context.lanes.elements
        return [self.registers[self.each * m + size * n + i] for i in range(size)]

    def _own_row(self, m: int) -> list[Expr]:
        own = [self.registers[self.each * m + i] for i in range(self.each)]
        return self.context.lanes.join_row(self.name, own, self.join) if self._defers() else own

    def _defers(self) -> bool:
        """Whether the threads of a row sum their parts of it after the loop."""
        return self.source.is_partial and self.kind in SUMS

    def _require_own(self) -> None:
        if self.context.point.whole and self.context.schedule.row_warps > 1:
            raise ScheduleError(f"%{self.name} is reduced over rows that several warps have; use row_warps=1")

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        self._require_own()
        sums = self.held(m, n) if self.merger is None else self.merger.joined(self, m, n)
        if isinstance(self.source, Matmul) and self._exclusive():
            return self.source.scaled(sums, n)
        return sums

    def _row(self, m: int) -> list[Expr]:
        self._require_own()
        return self._own_row(m) if self.merger is None else self.merger.joined(self, m, 0)


def maximum_registers(context: BlockContext, name: str) -> Any:
    """Return registers for a running maximum, at the lowest number."""
    rows, _ = context.program.shape(name)
    return zeros(context.lanes.row_elements * context.row_fragments(rows), LOWEST)


class RunningMaximum(Value):
    """The maximum so far, in place of a step's own.

    source: The maximum of a step.
    registers: As `maximum_registers` returns them.
    """

    def __init__(self, context: BlockContext, source: Value, registers: Any) -> None:
        super().__init__(context, f"{source.name} so far", source.shape, "float32")
        self.source, self.registers = source, registers
        self.factors: list[list[Expr]] = []
        """Factors of the sums so far in a step, by fragment and row."""
        self.own: list[list[Expr]] = []
        """Factors of the step's elements that do not depend on its maximum."""

    def end_step(self) -> None:
        """Forget the factors of a step."""
        self.factors, self.own = [], []

    def step(self) -> None:
        """Take in the step's maximum, and compute the factors of this step."""
        exponential = self.context.dialect.exponential
        for m in range(self.context.row_fragments(self.shape[0])):
            local, before = self.source.row(m), self._row(m)
            news = [hold(T.max(x, part)) for x, part in zip(before, local, strict=True)]
            self.own.append([hold(exponential(x - new)) for x, new in zip(local, news, strict=True)])
            self.factors.append([hold(exponential(x - new)) for x, new in zip(before, news, strict=True)])
            for i, new in enumerate(news):
                b.store(self.registers, new, len(news) * m + i)

    def _row(self, m: int) -> list[Expr]:
        count = self.context.lanes.row_elements
        return [self.registers[count * m + i] for i in range(count)]

    def held(self, m: int, n: int) -> list[Expr]:
        """Return a lane's rows."""
        return self._row(m)


class Merger:
    """Joins the accumulators of all groups that share a loop, through shared memory.

    A warp publishes its fragments, one 16-byte word per lane; the group that finishes a column reads the
    fragments of all groups, and of all blocks of a cluster (`ladder.lower.cuda.gemv_sums.READ_PEER`).
    """

    def __init__(self, context: BlockContext) -> None:
        self.context, self.plan = context, context.schedule
        self.offset = context.geo.offsets["sums"]
        self.has_read = False

    def publish(self, sources: Mapping[str, Accumulator | RunningMaximum]) -> None:
        """Write this group's accumulators where others read them, and wait for theirs."""
        context, geo = self.context, self.context.geo
        context.dialect.sync_block()  # the tiles of the loop lie in the same place
        warp = b.bind(self.offset + context.threads.warp * geo.published_bytes)
        for name in geo.published_values:
            source = sources[name]
            columns = geo.column_fragments(source.shape[1])
            for m in range(geo.row_fragments(source.shape[0])):
                for n in range(columns):
                    byte = warp + geo.published[name] + (m * columns + n) * geo.fragment_bytes(name)
                    place = context.shared.base + context.dialect.address(byte + self._lane_byte(name))
                    held = source.held(m, n)
                    held += [T.float32(0)] * (self._count(name) - len(held))
                    own: Expr = context.lanes.position(m, 0, 0)[1] == 0
                    with b.when(own if source.shape[1] == 1 else True):
                        context.dialect.write(context.shared, place, held)
        self._meet()

    def _lane_byte(self, name: str) -> Expr:
        """Return where a lane's elements lie in a fragment: the lanes of a row have the same."""
        lanes, is_row = self.context.lanes, self.context.program.shape(name)[1] == 1
        first = lanes.position(0, 0, 0)[0] if is_row else self.context.threads.lane
        return first * (4 * self._count(name))

    def _count(self, name: str) -> int:
        """Return the elements of a lane that a warp publishes of a fragment."""
        shape = self.context.geo.shape
        return shape.row_words if self.context.program.shape(name)[1] == 1 else shape.elements

    def _meet(self) -> None:
        if self.plan.cluster == 1:
            self.context.dialect.sync_block()
            return
        b.cluster_sync()

    def have_read(self) -> None:
        """Say, by every thread, that the others' shared memory has been read."""
        if self.plan.cluster > 1 and not self.has_read:
            b.ptx("barrier.cluster.arrive.release")
            self.has_read = True

    def leave(self) -> None:
        """Keep a block's shared memory until the others have read it."""
        if self.plan.cluster > 1:
            self.have_read()
            b.ptx("barrier.cluster.wait.acquire")

    def joined(self, value: Accumulator, m: int, n: Expr) -> list[Expr]:
        """Return a lane's elements of a fragment, of all groups."""
        factors = None if value.maximum is None else self._factors(value.maximum, m)
        total: list[Expr] = []
        for source in range(self.plan.sharers):
            part = self._read(value.name, value.columns, source, m, n)
            if factors is not None:
                rows = factors[source] if value.is_row else self.context.lanes.spread(factors[source])
                part = [element * factor for element, factor in zip(part, rows, strict=True)]
            total = [value.join(x, y) for x, y in zip(total, part, strict=True)] if total else part
        return [hold(element) for element in total]

    def _factors(self, maximum: str, m: int) -> list[list[Expr]]:
        """Return, for each group, what a lane's rows are multiplied with."""
        exponential = self.context.dialect.exponential

        def make() -> list[list[Expr]]:
            parts = [self._read(maximum, 1, source, m, 0) for source in range(self.plan.sharers)]
            most = [hold(_greatest(list(row))) for row in zip(*parts, strict=True)]
            return [[hold(exponential(x - y)) for x, y in zip(part, most, strict=True)] for part in parts]

        return self.context.point.once((maximum, "factors", m), make)  # type: ignore[no-any-return]

    def _read(self, name: str, columns: int, source: int, m: int, n: Expr) -> list[Expr]:
        """Return a lane's elements of a fragment of one group: ``source`` counts groups of all blocks."""
        context, geo = self.context, self.context.geo
        rank, group = divmod(source, self.plan.groups)
        warp = group * self.plan.group_warps + context.threads.row_warp
        if self.plan.column_warps > 1:
            warp, n = warp + n // columns * self.plan.row_warps, n % columns
        fragment = geo.published[name] + (m * columns + n) * geo.fragment_bytes(name)
        byte, count = fragment + self._lane_byte(name), self._count(name)
        rows = context.lanes.row_elements if context.program.shape(name)[1] == 1 else count
        byte = self.offset + warp * geo.published_bytes + byte
        if self.plan.cluster == 1:
            place = context.shared.base + context.dialect.address(byte)
            return context.dialect.read(context.shared, place, count, "float32")[:rows]
        bits = b.local(4, "uint32")
        place = context.shared.words.ptr_to([byte // 4])
        b.emit(b.call_inline("ladder_read_peer", READ_PEER, "void", place, rank, bits.ptr_to([0])))
        return [T.reinterpret(bits[i], dtype="float32") for i in range(rows)]


def _greatest(values: list[Expr]) -> Expr:
    total = values[0]
    for value in values[1:]:
        total = T.max(total, value)
    return total
