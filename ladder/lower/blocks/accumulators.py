"""Loop accumulators: in registers during the loop, joined over groups and blocks after it.

Sums and maxima are joined as they are. ``rescale`` accumulates ``x exp(m - M)``, M being the maximum of all
m so far (online softmax): parts are scaled to the greatest of their maxima before they are added.

Where m is subtracted in exponents that end in such accumulators, the running maximum may stand for m
itself: ``x`` then has the factor ``exp(-M)`` already and is added, or accumulated by the matrix
instructions, as it is. Where x does not depend on m (partial sums of another kernel), it is multiplied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T

from ladder.ir.graph import Node
from ladder.lower import builder as b
from ladder.lower.blocks.reductions import COMBINE
from ladder.lower.blocks.values import Matmul, Value, hold, zeros
from ladder.lower.cuda.functions import exponential
from ladder.lower.cuda.gemv_sums import READ_PEER
from tile_types.errors import ScheduleError

if TYPE_CHECKING:
    from ladder.lower.blocks.kernel import BlockKernel

Expr = Any

LOWEST = -3.0e38
"""Stands for minus infinity: differences of two such numbers are 0, not NaN."""


def _later(x: Expr, y: Expr) -> Expr:
    """Return what came last."""
    return y


KINDS = {
    "sum": (0.0, COMBINE["reduce_sum"]),
    "rescale": (0.0, COMBINE["reduce_sum"]),
    "max": (LOWEST, COMBINE["reduce_max"]),
    "last": (0.0, _later),
}
"""Kind -> what it begins with, and how parts are joined."""

SUMS = ("sum", "rescale")
"""Kinds that add, so that parts may be added late and products in place."""

LINEAR = ("matmul", "reduce_sum", "convert", "mul", "div", "accumulate")
"""Operators that keep a factor per row of their first operand."""


class Accumulator(Value):
    """A loop accumulator.

    Parameters
    ----------
    node
        The ``accumulate``.
    operands
        What is accumulated and, for ``rescale``, the step's maximum.
    kind
        One of `KINDS`.
    """

    def __init__(self, kernel: BlockKernel, node: Node, operands: list[Value], kind: str) -> None:
        super().__init__(kernel, node.name, operands[0].shape, "float32")
        if kind not in KINDS:
            raise ScheduleError(
                f"%{node.name}: accumulators of kind {', '.join(KINDS)} are lowered, not {kind}"
            )
        self.source, self.kind = operands[0], kind
        self.maximum = operands[1].name if len(operands) == 2 else None
        self.start, self.join = KINDS[kind]
        self.columns = kernel.column_fragments(self.shape[1])
        self.is_row = self.shape[1] == 1

    # ---- in the loop --------------------------------------------------------------------------------
    def begin(self) -> None:
        """Allocate and clear the registers."""
        lanes, rows = self.kernel.lanes, self.kernel.row_fragments(self.shape[0])
        self.each = lanes.row_elements if self.is_row else lanes.elements * self.columns
        self.registers = zeros(rows * self.each, self.start)

    def update(self) -> None:
        """Take in a step."""
        if self.maximum is not None:
            self._rescale()
        if isinstance(self.source, Matmul) and self._exclusive():
            self.source.add_into(self.registers)
            return
        own = self._own_factors()
        if not self.is_row:
            self.kernel.require_whole_columns(self.name)
        for m in range(self.kernel.row_fragments(self.shape[0])):
            if self.is_row:
                part = self.source.partial_row(m) if self._defers() else self.source.row(m)
                self._join(self.each * m, self._times(own, m, part))
            for n in range(0 if self.is_row else self.columns):
                part = self.source.fragment(m, n)
                self._join(self.each * m + len(part) * n, self._times(own, m, part))

    def _exclusive(self) -> bool:
        """Whether nobody else takes the product, which then is accumulated in place."""
        alone = len(self.kernel.program.users[self.source.name]) == 1
        return alone and self.kind in SUMS and not self._is_apart()

    def _is_apart(self) -> bool:
        """Whether what is rescaled does not depend on the maximum, so that it must be multiplied."""
        return self.maximum is not None and not self.kernel.rescaler.reaches(self.maximum, self.source.name)

    def _own_factors(self) -> list[list[Expr]] | None:
        """Return what the step's elements are multiplied with, by fragment and row, or None."""
        return self.kernel.rescaler.maxima[self.maximum].own if self._is_apart() and self.maximum else None

    def _times(self, factors: list[list[Expr]] | None, m: int, elements: list[Expr]) -> list[Expr]:
        if factors is None:
            return elements
        spread = factors[m] if self.is_row else self.kernel.lanes.spread(factors[m])
        return [x * factor for x, factor in zip(elements, spread, strict=True)]

    def _join(self, first: int, elements: list[Expr]) -> None:
        for i, element in enumerate(elements):
            b.store(self.registers, self.join(self.registers[first + i], element), first + i)

    def _rescale(self) -> None:
        for m in range(self.kernel.row_fragments(self.shape[0])):
            factors = self.kernel.rescaler.factors(self.maximum, m)
            for i in range(self.each):
                at = self.each * m + i
                factor = factors[i if self.is_row else i // 2 % 2]
                b.store(self.registers, self.registers[at] * factor, at)

    # ---- after the loop -----------------------------------------------------------------------------
    def held(self, m: int, n: int) -> list[Expr]:
        """Return four registers of a fragment, or a row's two and zeros, as this group has them."""
        if self.is_row:
            return [*self._own_row(m), T.float32(0), T.float32(0)]
        size = self.kernel.lanes.elements
        return [self.registers[self.each * m + size * n + i] for i in range(size)]

    def _own_row(self, m: int) -> list[Expr]:
        own = [self.registers[self.each * m + i] for i in range(self.each)]
        return self.kernel.lanes.join_row(self.name, own, self.join) if self._defers() else own

    def _defers(self) -> bool:
        """Whether the threads of a row sum their parts of it after the loop."""
        return self.source.is_partial and self.kind in SUMS

    def _require_own(self) -> None:
        if self.kernel.whole and self.kernel.schedule.row_warps > 1:
            raise ScheduleError(f"%{self.name} is reduced over rows that several warps have; use row_warps=1")

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        self._require_own()
        merger = self.kernel.merger
        sums = self.held(m, n) if merger is None else merger.joined(self, m, n)
        if isinstance(self.source, Matmul) and self._exclusive():
            return self.source.scaled(sums, n)
        return sums

    def _row(self, m: int) -> list[Expr]:
        self._require_own()
        merger = self.kernel.merger
        return self._own_row(m) if merger is None else merger.joined(self, m, 0)[:2]


class RunningMaximum(Value):
    """The maximum so far, in place of a step's own."""

    def __init__(self, kernel: BlockKernel, source: Value) -> None:
        super().__init__(kernel, f"{source.name} so far", source.shape, "float32")
        self.source = source

    def begin(self) -> None:
        """Allocate the registers."""
        rows = self.kernel.row_fragments(self.shape[0])
        self.registers = zeros(2 * rows, LOWEST)

    def step(self) -> None:
        """Take in the step's maximum; keep what accumulators are to be multiplied with."""
        self.factors: list[list[Expr]] = []
        self.own: list[list[Expr]] = []
        for m in range(self.kernel.row_fragments(self.shape[0])):
            local = self.source.row(m)
            news = [hold(T.max(self.registers[2 * m + i], part)) for i, part in enumerate(local)]
            self.own.append([hold(exponential(x - new)) for x, new in zip(local, news, strict=True)])
            self.factors.append(
                [hold(exponential(self.registers[2 * m + i] - new)) for i, new in enumerate(news)]
            )
            for i, new in enumerate(news):
                b.store(self.registers, new, 2 * m + i)

    def _row(self, m: int) -> list[Expr]:
        return [self.registers[2 * m + i] for i in range(2)]

    def held(self, m: int, n: int) -> list[Expr]:
        """Return a row's two elements and zeros."""
        return [*self._row(m), T.float32(0), T.float32(0)]


class Rescaler:
    """The maxima of all ``rescale`` accumulators of a kernel.

    Raises
    ------
    ScheduleError
        If a maximum is used otherwise than online softmax does, so that the running one cannot stand for it.
    """

    def __init__(self, kernel: BlockKernel) -> None:
        self.kernel = kernel
        names = dict.fromkeys(
            value.maximum
            for value in kernel.values.values()
            if isinstance(value, Accumulator) and value.maximum is not None
        )
        self.maxima = {name: RunningMaximum(kernel, kernel.values[name]) for name in names}
        for name, running in self.maxima.items():
            self._require_softmax(name)
            for value in kernel.values.values():
                if hasattr(value, "operands"):
                    value.operands = [running if x.name == name else x for x in value.operands]

    def _require_softmax(self, name: str) -> None:
        """Check that the maximum m occurs only as ``exp(... - m)`` before accumulators that take m."""
        program = self.kernel.program
        for user in program.users[name]:
            if user.operator == "accumulate":
                # As the maximum that others are scaled to, or accumulated itself.
                if user.inputs[1:] == (name,) and user.inputs[0] == name:
                    raise ScheduleError(f"%{user.name} rescales the maximum %{name} by itself")
                continue
            exponents = program.users[user.name]
            if (
                user.operator != "sub"
                or user.inputs[1] != name
                or any(e.operator != "exp" for e in exponents)
            ):
                raise ScheduleError(
                    f"%{user.name} takes the maximum %{name} otherwise than in exp(x - maximum)"
                )
            for exponent in exponents:
                self._require_linear(exponent.name, name)

    def _require_linear(self, value: str, maximum: str) -> None:
        for user in self.kernel.program.users[value]:
            linear = user.operator in LINEAR and user.inputs[0] == value and value not in user.inputs[1:]
            if not linear or (user.operator == "accumulate" and user.inputs[1:] != (maximum,)):
                raise ScheduleError(
                    f"%{user.name} takes an exponential of %{maximum} that it may not rescale"
                )
            if user.operator != "accumulate":
                self._require_linear(user.name, maximum)

    def reaches(self, maximum: str, value: str) -> bool:
        """Return whether a value of the loop depends on a maximum."""
        if value == maximum:
            return True
        node = self.kernel.program.block.producer(value)
        inner = node.operator not in ("accumulate", "load")
        return inner and any(self.reaches(maximum, name) for name in node.inputs)

    def begin(self) -> None:
        """Allocate registers."""
        for running in self.maxima.values():
            running.begin()

    def step(self) -> None:
        """Find the maxima of this step and the factors of what was accumulated."""
        for running in self.maxima.values():
            running.step()

    def end_step(self) -> None:
        """Forget the factors of a step."""
        for running in self.maxima.values():
            running.factors, running.own = [], []

    def factors(self, name: str | None, m: int) -> list[Expr]:
        """Return the factors of rows g and g + 8."""
        assert name is not None
        return self.maxima[name].factors[m]


class Merger:
    """Joins the accumulators of all groups that share a loop, through shared memory.

    A warp publishes its fragments, one 16-byte word per lane; whoever finishes a column reads those of all
    groups, and of all blocks of a cluster (`ladder.lower.cuda.gemv_sums.READ_PEER`).
    """

    def __init__(self, kernel: BlockKernel) -> None:
        self.kernel, self.plan = kernel, kernel.schedule
        self.offset = kernel.geo.offsets["sums"]
        self.has_read = False

    def publish(self) -> None:
        """Write this group's accumulators where others read them, and wait for theirs."""
        kernel, geo = self.kernel, self.kernel.geo
        b.block_sync()  # the tiles of the loop lie in the same place
        warp = b.bind(self.offset + kernel.warp * geo.published_bytes)
        for name in geo.published_values:
            source = self._source(name)
            columns = geo.column_fragments(source.shape[1])
            for m in range(geo.row_fragments(source.shape[0])):
                for n in range(columns):
                    byte = warp + geo.published[name] + (m * columns + n) * geo.fragment_bytes(name)
                    place = kernel.base + T.Cast("uint32", byte + self._lane_byte(name))
                    held = source.held(m, n)
                    with b.when(kernel.lane % 4 == 0 if source.shape[1] == 1 else True):
                        b.ptx("st.shared.v4.f32", place, *held)
        self._meet()

    def _lane_byte(self, name: str) -> Expr:
        """Return where a lane's elements lie in a fragment: the lanes of a row have the same."""
        lane = self.kernel.lane
        return lane // 4 * 16 if self.kernel.shape(name)[1] == 1 else lane * 16

    def _source(self, name: str) -> Any:
        return self.kernel.rescaler.maxima.get(name) or self.kernel.values[name]

    def _meet(self) -> None:
        if self.plan.cluster == 1:
            b.block_sync()
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
        """Return the four elements of a fragment, of all groups."""
        factors = None if value.maximum is None else self._factors(value.maximum, m)
        total: list[Expr] = []
        for source in range(self.plan.sharers):
            part = self._read(value.name, value.columns, source, m, n)
            if factors is not None:
                rows = (0, 1, 0, 1) if value.is_row else (0, 0, 1, 1)
                part = [element * factors[source][row] for element, row in zip(part, rows, strict=True)]
            total = [value.join(x, y) for x, y in zip(total, part, strict=True)] if total else part
        return [hold(element) for element in total]

    def _factors(self, maximum: str, m: int) -> list[list[Expr]]:
        """Return, for each group, what its rows g and g + 8 are multiplied with."""

        def make() -> list[list[Expr]]:
            parts = [self._read(maximum, 1, source, m, 0)[:2] for source in range(self.plan.sharers)]
            most = [hold(_greatest([part[i] for part in parts])) for i in range(2)]
            return [[hold(exponential(part[i] - most[i])) for i in range(2)] for part in parts]

        return self.kernel.once((maximum, "factors", m), make)  # type: ignore[no-any-return]

    def _read(self, name: str, columns: int, source: int, m: int, n: Expr) -> list[Expr]:
        """Return the four elements of a fragment of one group: ``source`` counts groups of all blocks."""
        kernel, geo = self.kernel, self.kernel.geo
        rank, group = divmod(source, self.plan.groups)
        warp = group * self.plan.group_warps + kernel.row_warp
        if self.plan.column_warps > 1:
            warp, n = warp + n // columns * self.plan.row_warps, n % columns
        fragment = geo.published[name] + (m * columns + n) * geo.fragment_bytes(name)
        byte = self.offset + warp * geo.published_bytes + fragment + self._lane_byte(name)
        if self.plan.cluster == 1:
            words = b.local(4, "float32")
            place = kernel.base + T.Cast("uint32", byte)
            b.ptx("ld.shared.v4.f32", *(words[i] for i in range(4)), place)
            return [words[i] for i in range(4)]
        bits = b.local(4, "uint32")
        place = kernel.shared.ptr_to([byte // 4])
        b.emit(b.call_inline("ladder_read_peer", READ_PEER, "void", place, rank, bits.ptr_to([0])))
        return [T.reinterpret(bits[i], dtype="float32") for i in range(4)]


def _greatest(values: list[Expr]) -> Expr:
    total = values[0]
    for value in values[1:]:
        total = T.max(total, value)
    return total
