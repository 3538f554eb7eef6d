"""One block graph as one CUDA kernel.

A group of warps takes steps of the loop: it copies the tiles of later steps (cp.async) while it computes,
and keeps accumulators in registers. Where several groups, or the blocks of a cluster, share the loop, they
publish their accumulators afterwards and each finishes a part of the columns. Groups of one warp never wait
for others within the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm.script import tirx as T

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.lower import builder as b
from ladder.lower.blocks import values as v
from ladder.lower.blocks import warpgroups
from ladder.lower.blocks.accumulators import Accumulator, Merger, Rescaler
from ladder.lower.blocks.analysis import AFTER, BEFORE, LOOP, BlockProgram, gemm_of
from ladder.lower.blocks.copies import GridPlace, TensorCopy, TileCopy
from ladder.lower.blocks.geometry import Geometry
from ladder.lower.blocks.lanes import FlatLanes, FragmentLanes, Lanes
from ladder.lower.blocks.makers import MAKERS
from ladder.lower.blocks.order import levels
from ladder.lower.blocks.reductions import SharedRow
from ladder.lower.blocks.saver import Saver
from ladder.lower.blocks.schedule import WARP, BlockSchedule
from ladder.lower.cuda.launch import Overlap
from ladder.lower.gpu.arguments import scale_dtype
from ladder.lower.gpu.instructions import select_step
from targets import TileDevice
from tile_types.errors import ScheduleError

Expr = Any

RESIDENT_BLOCKS = 1
"""Blocks that a multiprocessor must be able to hold: leaves a thread as many registers as there are."""

HOISTED_REGISTERS = 64
"""Most registers for operands that stay the same in all steps."""


def emit(
    block: Graph,
    device: TileDevice,
    schedule: BlockSchedule,
    name: str,
    constants: Collection[str] = (),
) -> Any:
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
    constants
        Inputs that no kernel before writes, so that they may be read before those have ended.

    Returns
    -------
    A TIRx PrimFunc.

    Raises
    ------
    ScheduleError
        If the schedule does not fit, or names what is not lowered.
    """
    with b.function(name) as result:
        BlockKernel(BlockProgram.of(block), device, schedule, constants).emit()
    return result.func


class BlockKernel:
    """One kernel being emitted."""

    def __init__(
        self,
        program: BlockProgram,
        device: TileDevice,
        schedule: BlockSchedule,
        constants: Collection[str] = (),
    ) -> None:
        self.program, self.schedule, self.constants = program, schedule, frozenset(constants)
        self.geo = Geometry(program, device, schedule)
        self.lanes: Lanes = FlatLanes(self) if self.geo.flat else FragmentLanes(self)
        self.operand, self.device = program.operand, device
        self.step = select_step(device, self.operand)
        self.loop_step: Expr = None
        self.whole = False
        self.overlap = Overlap(device)
        self.frames: list[dict[Any, Any]] = [{}]
        self.written: set[str] = set()
        self.alive: list[Any] = []
        self.warpgroup_products: list[tuple[v.Matmul, Any]] = []
        self.values: dict[str, v.Value] = {}
        self.shape = self.geo.program.shape
        self.fragments = self.geo.fragments

    # ---- values that are computed once ------------------------------------------------------------------
    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return what ``make`` emits, emitted once where it is still valid."""
        hashed = (self.whole, *(self._name(part) for part in key))
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
        self.tensors: dict[str, Any] = {}
        for node in (*block.inputs, *(block.producer(output) for output in block.outputs)):
            self._declare(node)
        self.place = GridPlace(block, 0)
        self.tensor_copies: dict[str, Any] = {}
        if self.geo.barriers:
            for node in filter(self.geo.is_looped, self.program.loads):
                self.tensor_copies[node.name] = self._copy_of(node, TensorCopy)
                self.tensor_copies[node.name].encode()
        cluster = ["clusterCtaIdx.x"] * (self.schedule.cluster > 1)
        if self.schedule.release != "never":
            self.overlap.declare("blockIdx.x", *cluster, "threadIdx.x")
        self._locate()
        self._release("begin")
        self._allocate()
        self._prepare_arrivals()
        self._copy_early()
        self.overlap.wait()
        self._start_copies()
        if self.geo.looped:
            self._loop()
        self._release("end")
        self._finish()

    def _declare(self, node: Node) -> None:
        """Declare a tensor argument; of a quantized weight, its packed arrays."""
        if not node.tile.ttype.is_block:
            self.tensors[node.name] = b.tensor(node.name, (_elements(node),), node.tile.ttype.name)
            return
        gemm = gemm_of(node.tile.ttype, node.tile.known_shape, self.operand)
        parts = {
            "words": "uint32",
            "scales": scale_dtype(gemm) if gemm.scale else None,
            "zeros": None if gemm.zero == "none" else self.operand,
            "row_scale": "float32",
        }
        for part, dtype in parts.items():
            name = f"{node.name}_{part}"
            self.tensors[name] = b.tensor(name, (b.symbol(name),), dtype) if dtype else None

    def _release(self, when: str, condition: Expr = True) -> None:
        """Let the next kernel start, if now is when."""
        if self.schedule.release != when or condition is False:
            return
        with _always() if condition is True else b.when(condition):
            self.overlap.release()

    def _locate(self) -> None:
        plan, program = self.schedule, self.program
        b.device(RESIDENT_BLOCKS)
        (block,) = b.block_index([program.blocks * plan.cluster])
        self.rank: Expr = b.keep(b.cluster_rank([plan.cluster])[0]) if plan.cluster > 1 else 0
        block = b.keep(block // plan.cluster) if plan.cluster > 1 else block
        self.thread = b.thread_index(plan.threads)
        self.lane = b.bind(self.thread % WARP)
        warp = b.bind(self.thread // WARP)
        self.group: Expr = b.keep(warp // plan.group_warps) if plan.groups > 1 else 0
        self.row_warp: Expr = b.keep(warp % plan.row_warps) if plan.row_warps > 1 else 0
        within = warp % plan.group_warps // plan.row_warps
        self.column_warp: Expr = b.keep(within) if plan.column_warps > 1 else 0
        self.group_thread = b.bind(self.thread % (plan.group_warps * WARP))
        self.warp = warp
        self.worker = b.keep(self.rank * plan.groups + self.group)
        self.place = GridPlace(program.block, block)
        self.turns: Expr = program.steps // plan.sharers
        if program.steps % plan.sharers:
            self.turns = b.keep((program.steps - self.worker + plan.sharers - 1) // plan.sharers)

    def own_step(self, turn: Expr) -> Expr:
        """Return the step of the loop that this group takes in a turn."""
        return self.worker + turn * self.schedule.sharers

    def row_fragments(self, rows: int) -> int:
        """Return the fragments along the rows of a value that the warp has."""
        return -(-rows // self.lanes.rows) if self.whole else self.geo.row_fragments(rows)

    def first_row(self, rows: int) -> Expr:
        """Return the warp's first row of a value."""
        split = not (self.whole or self.geo.flat)
        return self.row_warp * (self.row_fragments(rows) * self.lanes.rows) if split else 0

    def column_fragments(self, columns: int) -> int:
        """Return the fragments along columns of what a warp accumulates."""
        return self.geo.column_fragments(columns)

    def first_column(self, fragments: int) -> Expr:
        """Return the warp's first fragment of columns, of as many each."""
        return self.column_warp * fragments

    def require_whole_columns(self, name: str) -> None:
        """Raise unless a warp has all columns of what it computes.

        Raises
        ------
        ScheduleError
            Otherwise: only sums of products are split along columns.
        """
        if self.schedule.column_warps > 1 and self.loop_step is not None:
            raise ScheduleError(f"%{name} is taken within the loop as a whole; use column_warps=1")

    @contextmanager
    def whole_rows(self) -> Iterator[None]:
        """Let the warp ask for any row of values, not only for its own."""
        self.whole, saved = True, self.whole
        yield
        self.whole = saved

    def _allocate(self) -> None:
        geo, plan = self.geo, self.schedule
        pool = b.shared_pool()
        size = geo.shared_bytes - 8 * geo.barriers
        self.shared = pool.alloc((-(-size // 4),), "uint32", align=geo.alignment)
        self.arrivals: Any = pool.alloc((geo.barriers,), "uint64", align=8) if geo.barriers else None
        pool.commit()
        self.base = b.Variable("uint32", T.cuda.cvta_generic_to_shared(self.shared.ptr_to([0]))).value
        self.stage = b.Variable("uint32", T.uint32(0))
        if geo.stage_offsets:
            own = geo.offsets["stages"] + self.group * (plan.stages * geo.stage_bytes)
            self.stages_at = b.keep(own)
        self.loop_copies: list[TileCopy] = []
        self.block_copies: list[TileCopy] = []
        for node in self.program.loads:
            if geo.is_looped(node) and not geo.direct:
                self.loop_copies.append(self.tensor_copies.get(node.name) or self._copy_of(node, TileCopy))
            elif not geo.direct:
                self.block_copies.append(self._copy_of(node, TileCopy))
        for node in self.program.block.nodes:
            if node.operator not in ("input", "store"):
                self.values[node.name] = self._value(node)
            if node.name in geo.shared_rows:
                source = self.values[node.name]
                self.values[node.name] = SharedRow(self, source, geo.shared_rows[node.name])
        self.rescaler = Rescaler(self)
        self.merger = Merger(self) if geo.merges else None

    def _copy_of(self, node: Node, plain: type[TileCopy]) -> TileCopy:
        """Return what copies a load's tile."""
        if not node.tile.ttype.is_block:
            return plain(self, node)
        from ladder.lower.blocks.packed import PackedCopy

        return PackedCopy(self, node)

    # ---- from nodes to values -----------------------------------------------------------------------------
    def _value(self, node: Node) -> v.Value:
        shape, dtype = self.shape(node.name), node.tile.ttype.name
        attributes = node_attributes(node)
        operands = [self.values[name] for name in node.inputs if name in self.values]
        make = MAKERS.get(node.operator)
        if make is not None:
            return make(self, node, operands, attributes)
        row = get_operator(node.operator)
        if row.elementwise:
            return v.Elementwise(self, node.name, shape, dtype, row, operands)
        raise ScheduleError(f"%{node.name}: {node.operator} is not lowered to CUDA block graphs")

    def spilled(self, value: v.Value) -> v.SharedTile:
        """Return where a computed value lies in shared memory."""
        self.require_written(value.name)
        layout = self.geo.spills[value.name]
        offset = self.geo.offsets[f"spill {value.name}"] + self.group * layout.bytes

        def make() -> v.SharedTile:
            base = b.Variable("uint32", self.base + T.Cast("uint32", offset)).value
            return v.SharedTile(
                self, f"{value.name} in shared memory", value.shape, self.operand, layout, base
            )

        return self.once((value.name, "spilled"), make)  # type: ignore[no-any-return]

    def require_written(self, name: str) -> None:
        """Raise unless a value that passes through shared memory is there.

        Raises
        ------
        ScheduleError
            Otherwise: its stage comes later.
        """
        if name not in self.written:
            raise ScheduleError(f"%{name} is used before it is in shared memory")

    def _spill_stage(self, stage: str) -> None:
        """Compute the values of a stage that pass through shared memory, a barrier after each depth."""
        names = {node.name: node.inputs for node in self.program.block.nodes}
        through = {*self.geo.spills, *self.geo.shared_rows}
        shared = {name for name in through if self.program.stages[name] == stage}
        if shared and stage == AFTER and self.merger is None:
            b.block_sync()  # tiles of the loop may lie in the same place
        for level in levels(names, shared):
            for name in level:
                value = self.values[name]
                self.written.add(name)
                if isinstance(value, SharedRow):
                    value.share()
                if name in self.geo.spills:
                    self._spill(value)
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
        if plan.group_warps == 1:
            b.emit(T.cuda.warp_sync())
        elif plan.groups == 1:
            b.block_sync()
        else:
            b.ptx("bar.sync", T.Cast("uint32", self.group + 1), T.uint32(plan.group_warps * WARP))

    # ---- the loop -----------------------------------------------------------------------------------------
    @property
    def _early(self) -> bool:
        """Whether anything may be read while the kernels before still run."""
        return self.overlap.possible and self.schedule.release != "never"

    def _copy_early(self) -> None:
        """Copy what the kernels before do not write, and bring what they might have written into L2."""
        for copy in self.tensor_copies.values():
            copy.fetch_map()
        if not self._early:
            return
        for copy in self.block_copies:
            if copy.is_constant:
                copy.emit(0, T.uint32(0))
        for turn in range(self.schedule.stages - 1 if self.geo.stage_offsets else 0):
            with self._if_turn(turn), self.scope():
                if self._constant_copies:
                    self._copy_tiles(turn, turn, self._constant_copies, opens=True)
                for copy in self.loop_copies:
                    if copy.is_streamed and not copy.is_constant:
                        copy.prefetch(self.own_step(turn))

    @property
    def _constant_copies(self) -> list[TileCopy]:
        """Copies of a step that need not wait for the kernels before."""
        return [copy for copy in self.loop_copies if copy.is_constant]

    def _start_copies(self) -> None:
        """Copy what all steps share, and the first steps' tiles."""
        for copy in self.block_copies:
            if not (self._early and copy.is_constant):
                copy.emit(0, T.uint32(0))
        if self.block_copies:
            b.ptx("cp.async.commit_group")
        for turn in range(self.schedule.stages - 1 if self.geo.stage_offsets else 0):
            self._copy_step(turn, turn, left=self._early and bool(self._constant_copies))
        self._release("asked", self.turns < self.schedule.stages + self.schedule.lead)
        if self.block_copies:
            later = self.loop_copies and not self.tensor_copies
            b.ptx("cp.async.wait_group", self.schedule.stages - 1 if later else 0)
            b.block_sync()
        self._spill_stage(BEFORE)

    def _if_turn(self, turn: Expr) -> Any:
        """Enter a branch that is taken if there is such a turn."""
        known = isinstance(turn, int) and isinstance(self.turns, int)
        return _always() if known and turn < self.turns else b.when(turn < self.turns)

    def _copy_step(self, turn: Expr, slot: Expr, left: bool = False) -> None:
        """Copy the tiles of a turn, if there is such a turn, and close the group of copies.

        ``left``: only those that were not copied early.
        """
        copies = [copy for copy in self.loop_copies if not (left and copy.is_constant)]
        with self._if_turn(turn), self.scope():
            self._copy_tiles(turn, slot, copies, opens=not left)
        if not self.tensor_copies:
            b.ptx("cp.async.commit_group")

    def _copy_tiles(self, turn: Expr, slot: Expr, copies: Sequence[Any], opens: bool) -> None:
        """Start copies of a turn's tiles; ``opens``: the first of them, which say how much will arrive."""
        at = b.bind(T.Cast("uint32", self.stages_at + slot * self.geo.stage_bytes))
        step = b.keep(self.own_step(turn))
        if not self.tensor_copies:
            for copy in copies:
                copy.emit(step, at)
            return
        with b.when(self.group_thread == 0):
            if opens:
                count = sum(copy.bytes for copy in self.tensor_copies.values())
                b.emit(T.ptx.mbarrier.arrive.expect_tx.shared.b64(self._arrival(slot), T.uint32(count)))
            for copy in sorted(copies, key=lambda copy: -copy.bytes):  # what comes from memory first
                copy.start(step, at, self._arrival(slot))

    def _arrival(self, slot: Expr) -> Expr:
        return self.arrivals.ptr_to([self.group * self.schedule.stages + slot])

    def _prepare_arrivals(self) -> None:
        """Initialise the barriers of tensor copies before anybody copies or waits."""
        if self.arrivals is None:
            return
        with b.when(self.thread == 0):
            for index in range(self.geo.barriers):
                b.emit(T.ptx.mbarrier.init.shared.b64(self.arrivals.ptr_to([index]), T.uint32(1)))
            b.emit(T.ptx.fence.mbarrier_init.release.cluster())
        b.block_sync()

    def _loop(self) -> None:
        stages = self.schedule.stages
        accumulators = [x for x in self.values.values() if isinstance(x, Accumulator)]
        for accumulator in accumulators:
            accumulator.begin()
        self.rescaler.begin()
        self._hoist()
        slot, ahead = b.Variable("int32", 0), b.Variable("int32", stages - 1)
        phase = b.Variable("int32", 0)
        asynchronous = self.schedule.products == "wgmma"
        with b.loop(self.turns, rolled=True) as turn, self.scope():
            if self.loop_copies:
                self._await_step(slot, phase)
                if not asynchronous:
                    self._refill(turn, ahead)
                place = self.stages_at + slot.value * self.geo.stage_bytes
                self.stage.set(self.base + T.Cast("uint32", place))
            self.loop_step = b.keep(self.own_step(turn))
            self._spill_stage(LOOP)
            self.rescaler.step()
            if asynchronous:
                warpgroups.begin_step()
            for accumulator in accumulators:
                accumulator.update()
            self.rescaler.end_step()
            if asynchronous:
                warpgroups.end_step(self)
                self._refill(turn, ahead)
            if self.tensor_copies:
                phase.set(T.Select(slot.value == stages - 1, phase.value ^ 1, phase.value))
            for position in (slot, ahead):
                position.set(T.Select(position.value == stages - 1, 0, position.value + 1))
        self.loop_step = None
        if asynchronous:
            warpgroups.finish()

    def _refill(self, turn: Expr, ahead: b.Variable) -> None:
        """Copy a later turn's tiles into the place of the last turn's, once the whole group has done that."""
        self.group_sync()
        self._copy_step(b.bind(turn + (self.schedule.stages - 1)), ahead.value)
        self._release("asked", turn == self.turns - self.schedule.stages - self.schedule.lead)

    def _await_step(self, slot: b.Variable, phase: b.Variable) -> None:
        """Wait until this turn's tiles have arrived: what this thread copied, or all of them."""
        if self.tensor_copies:
            b.emit(T.cuda.mbarrier_wait(self._arrival(slot.value), phase.value))
        else:
            b.ptx("cp.async.wait_group", self.schedule.stages - 2)

    def _hoist(self) -> None:
        """Load operands that are the same in all steps before the loop, as far as registers allow."""
        self._hoist_rows()
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

    def _hoist_rows(self) -> None:
        """Compute columns that are the same in all steps, and their reciprocals, before the loop."""
        for node in self.program.block.nodes:
            value = self.values.get(node.name)
            if value is None or value.shape[1] != 1 or self.program.stages[node.name] != BEFORE:
                continue
            users = self.program.users[node.name]
            if math.prod(value.shape) == 1 or all(self.program.stages[u.name] == BEFORE for u in users):
                continue
            for m in range(self.row_fragments(value.shape[0])):
                value.row(m)
                if any(user.operator == "div" and user.inputs[1] == node.name for user in users):
                    value.inverses(m, 0)

    # ---- the end ------------------------------------------------------------------------------------------
    def _finish(self) -> None:
        """Join accumulators and store the results."""
        if self.merger is not None:
            b.ptx("cp.async.wait_group", 0)
            self.merger.publish()
        self._spill_stage(AFTER)
        for node in self.program.block.nodes:
            value = self.values.get(node.name)
            if value is not None and self.program.stages[node.name] == "after" and value.shape[1] == 1:
                for m in range(self.row_fragments(value.shape[0])):
                    value.row(m)  # by all lanes, before they part
        saver = Saver(self)
        for node in self.program.stores:
            saver.store(node)
        if self.merger is not None:
            self.merger.leave()


@contextmanager
def _always() -> Iterator[None]:
    yield


def _elements(node: Node) -> int:
    count = 1
    for extent in node.tile.known_shape:
        count *= extent
    return count
