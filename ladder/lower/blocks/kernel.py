"""One block graph as one kernel of a GPU.

A group of warps takes steps of the loop: it copies the tiles of later steps while it computes, and keeps
accumulators in registers. Where several groups, or the blocks of a cluster, share the loop, they publish
their accumulators afterwards and each finishes a part of the columns. Groups of one warp never wait for
others within the loop.

Order of values that pass through shared memory: one barrier per level of dependence.

A warp must wait for the others of its group between writing such a value and reading it. With each value
computed at its *depth*, the number of such values on the longest path to it, one barrier serves all values
of a depth, and no order has fewer: the values on a longest path need one barrier each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from tvm.script import tirx as T

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.blocks import warpgroups
from ladder.lower.blocks.accumulators import (
    Accumulator,
    Merger,
    RunningMaximum,
    accumulator_registers,
    maxima,
    maximum_registers,
)
from ladder.lower.blocks.analysis import AFTER, BEFORE, LOOP, BlockProgram, gemm_of
from ladder.lower.blocks.context import BlockContext
from ladder.lower.blocks.copies import tensor_map
from ladder.lower.blocks.cuda import CudaBlocks
from ladder.lower.blocks.geometry import BlockGeometry
from ladder.lower.blocks.lanes import fragment_lanes
from ladder.lower.blocks.makers import make_value
from ladder.lower.blocks.pipeline import Pipeline, Ring
from ladder.lower.blocks.reductions import SharedRow
from ladder.lower.blocks.rocm import RocmBlocks
from ladder.lower.blocks.schedule import BlockSchedule
from ladder.lower.blocks.shared import TileLayout
from ladder.lower.blocks.values import Matmul, SharedTile, Value, spilled
from ladder.lower.cuda.launch import Overlap
from ladder.lower.gpu.arguments import scale_dtype
from targets import TileDevice
from tile_types.errors import ScheduleError


class Store:
    """Stores results.

    merger: What joins the accumulators of groups; None for one group.
    """

    def __init__(self, context: BlockContext, merger: Merger | None) -> None:
        self.context, self.merger = context, merger

    def emit(self, node: Node, value: Value) -> None:
        """Store a result: each of the groups that share the loop takes some of its columns."""
        if value.shape[1] == 1:
            self._store_rows(node, value)
            return
        columns, rest = divmod(value.shape[1], self.context.lanes.columns)
        if rest:
            raise ScheduleError(
                f"%{node.name}: columns are stored by {self.context.lanes.columns}, got {value.shape[1]}"
            )
        plan, threads = self.context.schedule, self.context.threads
        sharers = plan.sharers * plan.column_warps
        worker = threads.worker * plan.column_warps + threads.column_warp
        span = 2 if columns % 2 == 0 and columns >= 2 * sharers else 1
        if sharers == 1:
            self._store_columns(node, value, list(range(columns)))
            return
        if columns == span * sharers and self.context.program.stores == (node,):
            self._store_once(node, value, [b.keep(worker * span + i) for i in range(span)])
            return
        for iteration in range(-(-columns // (span * sharers))):
            first = b.keep((iteration * sharers + worker) * span)
            with b.when(first < columns), self.context.point.nested():
                self._store_columns(node, value, [b.keep(first + i) for i in range(span)])

    def _store_once(self, node: Node, value: Value, columns: Sequence[Expr]) -> None:
        """Store a result whose columns are divided evenly among groups; each reads others' sums before."""
        places = [(m, n) for m in range(self.context.row_fragments(value.shape[0])) for n in columns]
        parts = [value.fragment(m, n) for m, n in places]
        if self.merger is not None:
            self.merger.have_read()
        for (m, n), elements in zip(places, parts, strict=True):
            self._store_fragment(node, value, m, n, elements)

    def _store_columns(self, node: Node, value: Value, columns: Sequence[Expr]) -> None:
        for m in range(self.context.row_fragments(value.shape[0])):
            for n in columns:
                self._store_fragment(node, value, m, n, value.fragment(m, n))

    def _store_fragment(self, node: Node, value: Value, m: int, n: Expr, elements: list[Expr]) -> None:
        rows, out = value.shape[0], self.context.tensors[node.name]
        begin, pitch = self.context.place.begin(node, None)
        size = len(elements) // self.context.lanes.runs
        for run in range(self.context.lanes.runs):
            place, column = self.context.lanes.position(m, n, run)
            row = b.bind(self.context.first_row(rows) + place)
            with b.when(row < rows) if rows % self.context.lanes.rows else nullcontext():
                at = b.bind(begin + row * pitch + column)
                self.context.dialect.store(out, at, elements[run * size :][:size])

    def _store_rows(self, node: Node, value: Value) -> None:
        """Store a value of one column: of the threads that hold a row, one stores it."""
        rows, out, threads = value.shape[0], self.context.tensors[node.name], self.context.threads
        begin, pitch = self.context.place.begin(node, None)
        for m in range(self.context.row_fragments(rows)):
            elements = value.row(m)
            for run, element in enumerate(elements):
                place, column = self.context.lanes.position(m, 0, run)
                row = b.bind(self.context.first_row(rows) + place)
                # The first column's threads; of groups that share the loop, the first.
                first = T.And(column == 0, T.And(threads.worker == 0, threads.column_warp == 0))
                with b.when(T.And(first, row < rows)):
                    self.context.dialect.store(out, begin + row * pitch, [element])


def depths(operands: Mapping[str, Sequence[str]], shared: Collection[str]) -> dict[str, int]:
    """Return the depth of every value.

    operands: Value -> the values it is computed of, in an order in which operands come first.
    shared: Values that pass through shared memory.
    """
    found: dict[str, int] = {}
    for value, inputs in operands.items():
        found[value] = max((found[name] + (name in shared) for name in inputs if name in found), default=0)
    return found


def levels(operands: Mapping[str, Sequence[str]], shared: Collection[str]) -> list[list[str]]:
    """Return the shared values by depth: a barrier follows each list."""
    depth = depths(operands, shared)
    count = 1 + max((depth[name] for name in shared if name in depth), default=-1)
    return [[name for name in operands if name in shared and depth[name] == level] for level in range(count)]


DIALECTS: Mapping[str, type[CudaBlocks] | type[RocmBlocks]] = {"cuda": CudaBlocks, "rocm": RocmBlocks}
"""How kernels are written for each kind of device."""

HOISTED_REGISTERS = 64
"""Most registers for operands that stay the same in all steps."""


def emit(
    block: Graph, device: TileDevice, schedule: BlockSchedule, name: str, constants: Collection[str] = ()
) -> Any:
    """Emit one block graph.

    block: A block graph with known extents.
    device: An NVIDIA GPU from compute capability 8.0 on, or an AMD GPU with matrix instructions.
    schedule: Division of the work.
    name: Symbol of the kernel's host entry. It takes the graph's inputs, then its outputs, each as one
        contiguous axis.
    constants: Inputs that no kernel before writes, so that they may be read before those have ended.
    Returns: A TIRx PrimFunc.
    Raises ScheduleError if the schedule does not fit, or names what is not lowered.
    """
    with b.function(name) as result:
        _emit(BlockGeometry(BlockProgram.of(block), device, schedule), frozenset(constants))
    return result.func


def _emit(geo: BlockGeometry, constants: frozenset[str]) -> None:
    plan, overlap = geo.schedule, Overlap(geo.device)
    dialect = DIALECTS[geo.device.kind](geo.device, geo.shape, geo.program.operand)
    tensors = _declared(geo.program)
    maps = _tensor_maps(geo, tensors)
    if plan.release != "never":
        overlap.declare(cluster=plan.cluster)
    threads = dialect.threads(geo.program, plan)
    if plan.release == "begin":
        overlap.release()
    context = BlockContext.of(geo, threads, dialect, tensors, constants)
    pipeline = Pipeline(context, overlap, maps)
    kernel = BlockKernel(context, pipeline)
    pipeline.prepare_arrivals()
    pipeline.copy_early()
    overlap.wait()
    pipeline.start()
    kernel.share_stage(BEFORE)
    kernel.loop()
    pipeline.release("end")
    kernel.finish()


def _declared(program: BlockProgram) -> dict[str, Any]:
    """Declare the arguments; of a quantized weight, its packed arrays."""
    block, tensors = program.block, dict[str, Any]()
    for node in (*block.inputs, *(block.producer(output) for output in block.outputs)):
        shape = node.tile.known_shape
        if not node.tile.ttype.is_block:
            tensors[node.name] = b.tensor(node.name, (math.prod(shape),), node.tile.ttype.name)
            continue
        gemm = gemm_of(node.tile.ttype, shape, program.operand)
        parts = {
            "words": "uint32",
            "scales": scale_dtype(gemm) if gemm.scale else None,
            "zeros": None if gemm.zero == "none" else program.operand,
            "row_scale": "float32",
        }
        for part, dtype in parts.items():
            name = f"{node.name}_{part}"
            tensors[name] = b.tensor(name, (b.symbol(name),), dtype) if dtype else None
    return tensors


def _tensor_maps(geo: BlockGeometry, tensors: Mapping[str, Any]) -> dict[str, Expr]:
    """Make the tensor maps of the loop's tiles, on the host; packed tiles lie together and need none."""
    maps = {}
    for node in filter(geo.is_looped, geo.program.loads if geo.barriers else ()):
        layout = geo.layouts[node.name]
        if isinstance(layout, TileLayout):
            shape = geo.program.block.tile(node.inputs[0]).known_shape
            maps[node.name] = tensor_map(tensors[node.inputs[0]], shape, layout)
    return maps


class BlockKernel:
    """The values of one kernel being emitted."""

    def __init__(self, context: BlockContext, pipeline: Pipeline) -> None:
        self.context, self.pipeline = context, pipeline
        self.program, self.geo = context.program, context.geo
        self.maxima = maxima(context.program)
        self.merger = Merger(context) if context.geo.merges else None
        self.values: dict[str, Value] = {}
        self.accumulators: list[Accumulator] = []
        self.running: dict[str, RunningMaximum] = {}
        for node in self._of_stage(BEFORE):
            self.values[node.name] = self._value(node)

    # ---- from nodes to values -----------------------------------------------------------------------------
    def _of_stage(self, *stages: str) -> list[Node]:
        nodes = (n for n in self.program.block.nodes if n.operator not in ("input", "store"))
        return [node for node in nodes if self.program.stages[node.name] in stages]

    def _value(self, node: Node) -> Value:
        operands = [
            self.running.get(name) or self.values[name] for name in node.inputs if name in self.values
        ]
        value = make_value(self.context, node, operands)
        inverted = self.geo.shared_rows.get(node.name)
        return value if inverted is None else SharedRow(self.context, value, inverted)

    def _begin(self) -> None:
        """Clear the accumulators, and make the values of the loop and of what follows it."""
        nodes = {node.name: node for node in self.program.accumulators}
        if nodes and not self.geo.looped:
            raise ScheduleError(f"%{next(iter(nodes))} accumulates steps that are all the same")
        kinds = {name: str(node_attributes(node)["kind"]) for name, node in nodes.items()}
        sums = {name: accumulator_registers(self.context, node, kinds[name]) for name, node in nodes.items()}
        highest = {name: maximum_registers(self.context, name) for name in self.maxima}
        for name in (name for name in self.maxima if name in self.values):
            self.running[name] = RunningMaximum(self.context, self.values[name], highest[name])
        for node in self._of_stage(LOOP, AFTER):
            name = node.name
            self.values[name] = (
                self._accumulator(node, kinds[name], sums[name]) if name in nodes else self._value(node)
            )
            if name in highest:
                self.running[name] = RunningMaximum(self.context, self.values[name], highest[name])

    def _accumulator(self, node: Node, kind: str, registers: Any) -> Accumulator:
        source, *most = node.inputs
        maximum = (most[0], self.running[most[0]]) if most else None
        found = Accumulator(self.context, node, self.values[source], kind, registers, maximum, self.merger)
        self.accumulators.append(found)
        return found

    # ---- values that pass through shared memory -----------------------------------------------------------
    def share_stage(self, stage: str) -> None:
        """Compute the values of a stage that pass through shared memory, a barrier after each depth."""
        names = {node.name: node.inputs for node in self.program.block.nodes}
        through = {*self.geo.spills, *self.geo.shared_rows}
        shared = {name for name in through if self.program.stages[name] == stage}
        if shared and stage == AFTER and self.merger is None:
            self.context.dialect.sync_block()  # tiles of the loop may lie in the same place
        for level in levels(names, shared):
            for name in level:
                value = self.values[name]
                self.context.point.written.add(name)
                if isinstance(value, SharedRow):
                    value.share()
                if name in self.geo.spills:
                    self._spill(value)
            self.context.sync_group()

    def _spill(self, value: Value) -> None:
        """Put the warp's rows of a value into shared memory, rounded to 16 bits."""
        context, (rows, columns) = self.context, value.shape
        lanes = fragment_lanes(context.lanes)
        tile, run = spilled(context, value), lanes.run
        for m in range(context.row_fragments(rows)):
            for n in range(columns // lanes.columns):
                elements = value.fragment(m, n)
                chunk, within = lanes.chunk(n)
                for part in range(lanes.runs):
                    row = context.first_row(rows) + lanes.position(m, n, part)[0]
                    place = tile.base + context.dialect.address(tile.layout.byte(row, chunk) + within)
                    own = elements[part * run :][:run]
                    pairs = zip(own[::2], own[1::2], strict=True)
                    words = [context.dialect.pack(*pair, context.operand) for pair in pairs]
                    with b.when(row < rows) if rows % lanes.rows else nullcontext():
                        context.dialect.write(context.shared, place, words)

    # ---- the loop -----------------------------------------------------------------------------------------
    def loop(self) -> None:
        """Emit the loop, if there is one."""
        self._begin()
        if not self.geo.looped:
            return
        point, threads = self.context.point, self.context.threads
        self._hoist()
        ring = Ring(self.context.schedule.stages)
        with b.loop(threads.iterations, rolled=True) as iteration, point.nested():
            asynchronous = self.context.schedule.products == "wgmma"
            self.pipeline.enter_step(ring, iteration, refills=not asynchronous)
            point.step = b.keep(threads.own_step(iteration))
            self._step()
            if asynchronous:
                self.pipeline.refill(ring, iteration)
            self.pipeline.leave_step(ring)
            ring.advance(self.pipeline.tensor)
        point.step = None
        if asynchronous:
            warpgroups.finish()

    def _step(self) -> None:
        """Compute a step and accumulate it."""
        asynchronous = self.context.schedule.products == "wgmma"
        self.share_stage(LOOP)
        for running in self.running.values():
            running.step()
        if asynchronous:
            warpgroups.begin_step()
        for accumulator in self.accumulators:
            accumulator.update()
        for running in self.running.values():
            running.end_step()
        if asynchronous:
            warpgroups.end_step(self.context.deferred)

    def _hoist(self) -> None:
        """Load operands that are the same in all steps before the loop, as far as registers allow."""
        self._hoist_rows()
        left, stages = HOISTED_REGISTERS, self.program.stages
        for value in self.values.values():
            if not isinstance(value, Matmul) or stages[value.name] != LOOP:
                continue
            if not isinstance(value.a, SharedTile) or stages[value.a.name] != BEFORE:
                continue
            rows = self.context.row_fragments(value.shape[0])
            left -= rows * value.depth * 4
            if left >= 0:
                for m in range(rows):
                    for k in range(value.depth):
                        value.a.operand_a(m, k)

    def _hoist_rows(self) -> None:
        """Compute columns that are the same in all steps, and their reciprocals, before the loop."""
        for node in self._of_stage(BEFORE):
            value, users = self.values[node.name], self.program.users[node.name]
            if value.shape[1] != 1 or math.prod(value.shape) == 1:
                continue
            if all(self.program.stages[user.name] == BEFORE for user in users):
                continue
            for m in range(self.context.row_fragments(value.shape[0])):
                value.row(m)
                if any(user.operator == "div" and user.inputs[1] == node.name for user in users):
                    value.inverses(m, 0)

    # ---- the end ------------------------------------------------------------------------------------------
    def finish(self) -> None:
        """Join accumulators and store the results."""
        if self.merger is not None:
            self.pipeline.drain()
            self.merger.publish({**{value.name: value for value in self.accumulators}, **self.running})
        self.share_stage(AFTER)
        for node in self._of_stage(AFTER):
            value = self.values[node.name]
            if value.shape[1] == 1:
                for m in range(self.context.row_fragments(value.shape[0])):
                    value.row(m)  # by all lanes, before they part
        store = Store(self.context, self.merger)
        for node in self.program.stores:
            store.emit(node, self.values[node.inputs[0]])
        if self.merger is not None:
            self.merger.leave()
