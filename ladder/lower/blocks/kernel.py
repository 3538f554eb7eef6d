"""One block graph as one CUDA kernel.

A group of warps takes steps of the loop: it copies the tiles of later steps (cp.async) while it computes,
and keeps accumulators in registers. Where several groups, or the blocks of a cluster, share the loop, they
publish their accumulators afterwards and each finishes a part of the columns. Groups of one warp never wait
for others within the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm.script import tirx as T

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.lower import builder as b
from ladder.lower.blocks import values as v
from ladder.lower.blocks.accumulators import Accumulator, Merger, Rescaler, RunningMaximum
from ladder.lower.blocks.analysis import BEFORE, LOOP, BlockProgram, known
from ladder.lower.blocks.copies import GridPlace, TileCopy
from ladder.lower.blocks.geometry import Geometry
from ladder.lower.blocks.order import levels
from ladder.lower.blocks.schedule import WARP, BlockSchedule
from ladder.lower.cuda.launch import Overlap
from ladder.lower.gpu.instructions import select_step
from targets import TileDevice
from tile_types.errors import ScheduleError

Expr = Any

RESIDENT_BLOCKS = 1
"""Blocks that a multiprocessor must be able to hold: leaves a thread as many registers as there are."""

HOISTED_REGISTERS = 64
"""Most registers for operands that stay the same in all steps."""


def emit(block: Graph, device: TileDevice, schedule: BlockSchedule, name: str) -> Any:
    """Emit one block graph.

    Parameters
    ----------
    block
        A block graph with known extents.
    device
        An NVIDIA GPU from compute capability 8.0 on.
    schedule
        Division of the work.
    name
        Symbol of the kernel's host entry. It takes the graph's inputs, then its outputs, each as one
        contiguous axis.

    Returns
    -------
    A TIRx PrimFunc.

    Raises
    ------
    ScheduleError
        If the schedule does not fit, or names what is not lowered.
    """
    with b.function(name) as result:
        BlockKernel(BlockProgram.of(block), device, schedule).emit()
    return result.func


class BlockKernel:
    """One kernel being emitted."""

    def __init__(self, program: BlockProgram, device: TileDevice, schedule: BlockSchedule) -> None:
        self.program, self.schedule = program, schedule
        self.geo = Geometry(program, device, schedule)
        self.operand = _operand_type(program)
        self.step = select_step(device, self.operand)
        self.overlap = Overlap(device)
        self.frames: list[dict[Any, Any]] = [{}]
        self.alive: list[Any] = []
        self.values: dict[str, v.Value] = {}
        self.shape = self.geo.program.shape
        self.row_fragments, self.fragments = self.geo.row_fragments, self.geo.fragments

    # ---- values that are computed once ------------------------------------------------------------------
    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return what ``make`` emits, emitted once where it is still valid."""
        hashed = tuple(self._name(part) for part in key)
        for frame in reversed(self.frames):
            if hashed in frame:
                return frame[hashed]
        self.frames[-1][hashed] = made = make()
        return made

    def _name(self, part: Any) -> Any:
        if isinstance(part, (int, str, tuple, bool)) or part is None or hasattr(part, "pitch"):
            return part
        self.alive.append(part)  # so that no other expression gets its identity
        return ("expression", id(part))

    def kept(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Expr:
        """Return a uint32 that depends on the thread alone."""
        return self.once(("kept", *key), lambda: b.Variable("uint32", make()).value)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Enter a loop or branch: what is computed in it is not valid after it."""
        self.frames.append({})
        yield
        self.frames.pop()

    # ---- the kernel ---------------------------------------------------------------------------------------
    def emit(self) -> None:
        """Emit the whole body."""
        block = self.program.block
        nodes = [*block.inputs, *(block.producer(output) for output in block.outputs)]
        self.tensors = {
            node.name: b.tensor(node.name, (_elements(node),), node.tile.ttype.name) for node in nodes
        }
        cluster = ["clusterCtaIdx.x"] * (self.schedule.cluster > 1)
        self.overlap.declare("blockIdx.x", *cluster, "threadIdx.x")
        self._locate()
        self.overlap.release()
        self._allocate()
        for copy in self.loop_copies:
            copy.prefetch(self.own_step, self.turns)
        self.overlap.wait()
        self._start_copies()
        if self.loop_copies:
            self._loop()
        self._finish()

    def _locate(self) -> None:
        plan, program = self.schedule, self.program
        b.device(RESIDENT_BLOCKS)
        (block,) = b.block_index([program.blocks * plan.cluster])
        self.rank: Expr = b.keep(b.cluster_rank([plan.cluster])[0]) if plan.cluster > 1 else 0
        block = b.keep(block // plan.cluster) if plan.cluster > 1 else block
        self.thread = b.thread_index(plan.threads)
        self.lane = b.bind(self.thread % WARP)
        warp = b.bind(self.thread // WARP)
        self.group: Expr = b.keep(warp // plan.row_warps) if plan.groups > 1 else 0
        self.row_warp: Expr = b.keep(warp % plan.row_warps) if plan.row_warps > 1 else 0
        self.warp = warp
        self.worker = b.keep(self.rank * plan.groups + self.group)
        self.place = GridPlace(program.block, block)
        self.turns: Expr = program.steps // plan.sharers
        if program.steps % plan.sharers:
            self.turns = b.keep((program.steps - self.worker + plan.sharers - 1) // plan.sharers)

    def own_step(self, turn: Expr) -> Expr:
        """Return the step of the loop that this group takes in a turn."""
        return self.worker + turn * self.schedule.sharers

    def first_row(self, rows: int) -> Expr:
        """Return the warp's first row of a value."""
        return self.row_warp * (self.row_fragments(rows) * v.FRAGMENT_ROWS)

    def _allocate(self) -> None:
        geo, plan = self.geo, self.schedule
        pool = b.shared_pool()
        self.shared = pool.alloc((-(-geo.shared_bytes // 4),), "uint32", align=128)
        pool.commit()
        self.base = b.Variable("uint32", T.cuda.cvta_generic_to_shared(self.shared.ptr_to([0]))).value
        self.stage = b.Variable("uint32", T.uint32(0))
        if geo.stage_offsets:
            own = geo.offsets["stages"] + self.group * (plan.stages * geo.stage_bytes)
            self.stages_at = b.keep(own)
        self.loop_copies: list[TileCopy] = []
        self.block_copies: list[TileCopy] = []
        for node in self.program.loads:
            (self.loop_copies if geo.is_looped(node) else self.block_copies).append(TileCopy(self, node))
        for node in self.program.block.nodes:
            if node.operator not in ("input", "store"):
                self.values[node.name] = self._value(node)
        self.rescaler = Rescaler(self)
        self.merger = Merger(self) if geo.merges else None

    # ---- from nodes to values -----------------------------------------------------------------------------
    def _value(self, node: Node) -> v.Value:
        shape, dtype = self.shape(node.name), node.tile.ttype.name
        attributes = node_attributes(node)
        operands = [self.values[name] for name in node.inputs if name in self.values]
        make = _MAKERS.get(node.operator)
        if make is not None:
            return make(self, node, operands, attributes)
        row = get_operator(node.operator)
        if row.elementwise:
            return v.Elementwise(self, node.name, shape, dtype, row, operands)
        raise ScheduleError(f"%{node.name}: {node.operator} is not lowered to CUDA block graphs")

    def spilled(self, value: v.Value) -> v.SharedTile:
        """Return where a computed value lies in shared memory."""
        layout = self.geo.spills[value.name]
        offset = self.geo.offsets[f"spill {value.name}"] + self.group * layout.bytes

        def make() -> v.SharedTile:
            base = b.Variable("uint32", self.base + T.Cast("uint32", offset)).value
            return v.SharedTile(
                self, f"{value.name} in shared memory", value.shape, self.operand, layout, base
            )

        return self.once((value.name, "spilled"), make)  # type: ignore[no-any-return]

    def _spill_stage(self, stage: str) -> None:
        """Compute the values of a stage that pass through shared memory, a barrier after each depth."""
        names = {node.name: node.inputs for node in self.program.block.nodes}
        shared = {name for name in self.geo.spills if self.program.stages[name] == stage}
        for level in levels(names, shared):
            for name in level:
                self._spill(self.values[name])
            self.group_sync()

    def _spill(self, value: v.Value) -> None:
        tile, (rows, columns) = self.spilled(value), value.shape
        for m in range(self.row_fragments(rows)):
            for n in range(columns // v.FRAGMENT_COLUMNS):
                elements = value.fragment(m, n)
                for half in range(2):
                    row = self.first_row(rows) + m * v.FRAGMENT_ROWS + self.lane // 4 + 8 * half
                    place = tile.base + T.Cast("uint32", tile.layout.byte(row, n) + self.lane % 4 * 4)
                    word = v.pack(elements[2 * half], elements[2 * half + 1], self.operand)
                    with b.when(row < rows) if rows % v.FRAGMENT_ROWS else _always():
                        b.ptx("st.shared.u32", place, word)

    def group_sync(self) -> None:
        """Let the warps of a group wait for each other."""
        plan = self.schedule
        if plan.row_warps == 1:
            b.emit(T.cuda.warp_sync())
        elif plan.groups == 1:
            b.block_sync()
        else:
            b.ptx("bar.sync", T.Cast("uint32", self.group + 1), T.uint32(plan.row_warps * WARP))

    # ---- the loop -----------------------------------------------------------------------------------------
    def _start_copies(self) -> None:
        """Copy what all steps share, and the first steps' tiles."""
        for copy in self.block_copies:
            copy.emit(0, T.uint32(0))
        if self.block_copies:
            b.ptx("cp.async.commit_group")
        for turn in range(self.schedule.stages - 1 if self.loop_copies else 0):
            self._copy_step(turn, turn)
        if self.block_copies:
            b.ptx("cp.async.wait_group", self.schedule.stages - 1 if self.loop_copies else 0)
            b.block_sync()
        self._spill_stage(BEFORE)

    def _copy_step(self, turn: Expr, slot: Expr) -> None:
        """Copy the tiles of a turn, if there is such a turn, and close the group of copies."""
        at = b.bind(T.Cast("uint32", self.stages_at + slot * self.geo.stage_bytes))
        guard = (
            _always() if isinstance(turn, int) and isinstance(self.turns, int) and turn < self.turns else None
        )
        with guard or b.when(turn < self.turns), self.scope():
            step = b.keep(self.own_step(turn))
            for copy in self.loop_copies:
                copy.emit(step, at)
        b.ptx("cp.async.commit_group")

    def _loop(self) -> None:
        stages = self.schedule.stages
        accumulators = [x for x in self.values.values() if isinstance(x, Accumulator)]
        for accumulator in accumulators:
            accumulator.begin()
        self.rescaler.begin()
        self._hoist()
        slot, ahead = b.Variable("int32", 0), b.Variable("int32", stages - 1)
        with b.loop(self.turns, rolled=True) as turn, self.scope():
            b.ptx("cp.async.wait_group", stages - 2)
            self.group_sync()
            self._copy_step(b.bind(turn + (stages - 1)), ahead.value)
            self.stage.set(self.base + T.Cast("uint32", self.stages_at + slot.value * self.geo.stage_bytes))
            self._spill_stage(LOOP)
            self.rescaler.step()
            for accumulator in accumulators:
                accumulator.update()
            self.rescaler.end_step()
            for position in (slot, ahead):
                position.set(T.Select(position.value == stages - 1, 0, position.value + 1))

    def _hoist(self) -> None:
        """Load operands that are the same in all steps before the loop, as far as registers allow."""
        left = HOISTED_REGISTERS
        for value in self.values.values():
            if not isinstance(value, v.Matmul) or self.program.stages[value.name] != LOOP:
                continue
            if not isinstance(value.a, v.SharedTile) or self.program.stages[value.a.name] != BEFORE:
                continue
            rows = self.row_fragments(value.shape[0])
            left -= rows * value.depth * 4
            if left >= 0:
                for m in range(rows):
                    for k in range(value.depth):
                        value.a.operand_a(m, k)

    # ---- the end ------------------------------------------------------------------------------------------
    def _finish(self) -> None:
        """Join accumulators and store the results."""
        if self.merger is not None:
            b.ptx("cp.async.wait_group", 0)
            self.merger.publish()
        for node in self.program.block.nodes:
            value = self.values.get(node.name)
            if value is not None and self.program.stages[node.name] == "after" and value.shape[1] == 1:
                for m in range(self.row_fragments(value.shape[0])):
                    value.row(m)  # by all lanes, before they part
        for node in self.program.stores:
            self._store(node)
        if self.merger is not None:
            self.merger.leave()

    def _store(self, node: Node) -> None:
        """Store a result: each of the groups that share the loop takes some of its columns."""
        value = self.values[node.inputs[0]]
        columns = -(-value.shape[1] // v.FRAGMENT_COLUMNS)
        sharers = self.schedule.sharers
        span = 2 if columns % 2 == 0 and columns >= 2 * sharers else 1
        if sharers == 1:
            self._store_columns(node, value, list(range(columns)))
            return
        for turn in range(-(-columns // (span * sharers))):
            first = b.keep((turn * sharers + self.worker) * span)
            with b.when(first < columns), self.scope():
                self._store_columns(node, value, [b.keep(first + i) for i in range(span)])

    def _store_columns(self, node: Node, value: v.Value, columns: Sequence[Expr]) -> None:
        rows = value.shape[0]
        out = self.tensors[node.name]
        begin, pitch = self.place.begin(node, None)
        for m in range(self.row_fragments(rows)):
            for n in columns:
                elements = value.fragment(m, n)
                for half in range(2):
                    row = b.bind(self.first_row(rows) + m * v.FRAGMENT_ROWS + self.lane // 4 + 8 * half)
                    at = b.bind(begin + row * pitch + n * v.FRAGMENT_COLUMNS + self.lane % 4 * 2)
                    with b.when(row < rows) if rows % v.FRAGMENT_ROWS else _always():
                        pair = b.local(2, str(out.dtype))
                        for i in range(2):
                            b.store(pair, T.Cast(str(out.dtype), elements[2 * half + i]), i)
                        with b.vector(2) as lane:
                            b.store(out, pair[lane], at + lane)


@contextmanager
def _always() -> Iterator[None]:
    yield


def _elements(node: Node) -> int:
    count = 1
    for extent in node.tile.known_shape:
        count *= extent
    return count


def _operand_type(program: BlockProgram) -> str:
    """Return the 16-bit type that all loaded tiles have."""
    types = sorted({node.tile.ttype.name for node in program.loads})
    if len(types) != 1:
        raise ScheduleError(f"tiles of one type are lowered, got {', '.join(types)}")
    return types[0]


def _load(kernel: BlockKernel, node: Node, operands: Any, attributes: Any) -> v.Value:
    geo, name = kernel.geo, node.name
    looped = geo.is_looped(node)
    tile = v.SharedTile(kernel, name, kernel.shape(name), node.tile.ttype.name, geo.layouts[name], None)
    offset = geo.stage_offsets[name] if looped else geo.offsets[name]
    tile.base = (kernel.stage.value if looped else kernel.base) + T.uint32(offset)
    return tile


def _constant(kernel: BlockKernel, node: Node, operands: Any, attributes: Any) -> v.Value:
    if kernel.shape(node.name) != (1, 1):
        raise ScheduleError(f"%{node.name}: constants of one element are lowered")
    return v.Constant(kernel, node.name, float(attributes["value"]))


def _convert(kernel: BlockKernel, node: Node, operands: Any, attributes: Any) -> v.Value:
    return v.Convert(kernel, node.name, kernel.shape(node.name), node.tile.ttype.name, operands[0])


def _matmul(kernel: BlockKernel, node: Node, operands: Any, attributes: Any) -> v.Value:
    transposed = bool(attributes["transpose_b"])
    return v.Matmul(kernel, node.name, kernel.shape(node.name), operands[0], operands[1], transposed)


def _concat(kernel: BlockKernel, node: Node, operands: Any, attributes: Any) -> v.Value:
    rank = len(node.tile.known_shape)
    axis = attributes["axis"] % rank - (rank - 2)
    return v.Concat(kernel, node.name, kernel.shape(node.name), node.tile.ttype.name, operands, axis)


def _reduce(kernel: BlockKernel, node: Node, operands: Any, attributes: Any) -> v.Value:
    rank = len(node.tile.known_shape)
    if not attributes["keep"] or attributes["axis"] % rank != rank - 1:
        raise ScheduleError(f"%{node.name}: reductions along the last axis that keep it are lowered")
    return v.Reduce(kernel, node.name, kernel.shape(node.name), node.operator, operands[0])


def _accumulate(kernel: BlockKernel, node: Node, operands: Any, attributes: Any) -> v.Value:
    return Accumulator(kernel, node, operands, str(attributes["kind"]))


_MAKERS: dict[str, Callable[..., v.Value]] = {
    "load": _load, "constant": _constant, "convert": _convert, "matmul": _matmul, "concat": _concat,
    "reduce_sum": _reduce, "reduce_max": _reduce, "accumulate": _accumulate,
}  # fmt: skip
"""Operator -> what makes its value; element-wise rows of the operator table need none."""

__all__ = ["BlockKernel", "RunningMaximum", "emit", "known"]
