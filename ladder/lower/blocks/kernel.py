"""One block graph as one kernel of a GPU.

A group of warps takes steps of the loop: it copies the tiles of later steps while it computes, and keeps
accumulators in registers. Where several groups, or the blocks of a cluster, share the loop, they publish
their accumulators afterwards and each finishes a part of the columns. Groups of one warp never wait for
others within the loop.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.lower import builder as b
from ladder.lower.blocks import warpgroups
from ladder.lower.blocks.accumulators import (
    Accumulator,
    Merger,
    RunningMaximum,
    accumulator_registers,
    maximum_registers,
)
from ladder.lower.blocks.analysis import AFTER, BEFORE, LOOP, BlockProgram, gemm_of
from ladder.lower.blocks.context import BlockContext
from ladder.lower.blocks.copies import tensor_map
from ladder.lower.blocks.cuda import CudaBlocks
from ladder.lower.blocks.geometry import BlockGeometry
from ladder.lower.blocks.lanes import fragment_lanes
from ladder.lower.blocks.makers import make_value
from ladder.lower.blocks.online_softmax import maxima
from ladder.lower.blocks.order import levels
from ladder.lower.blocks.pipeline import Pipeline, Ring
from ladder.lower.blocks.products import Matmul
from ladder.lower.blocks.reductions import SharedRow
from ladder.lower.blocks.rocm import RocmBlocks
from ladder.lower.blocks.schedule import BlockSchedule
from ladder.lower.blocks.shared import TileLayout
from ladder.lower.blocks.store import Store
from ladder.lower.blocks.values import SharedTile, Value, spilled
from ladder.lower.cuda.launch import Overlap
from ladder.lower.gpu.arguments import scale_dtype
from targets import TileDevice
from tile_types.errors import ScheduleError

Expr = Any

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
    """Emit the whole body."""
    plan, overlap = geo.schedule, Overlap(geo.device)
    dialect = DIALECTS[geo.device.kind](geo.device, geo.shape, geo.program.operand)
    tensors = _declared(geo.program)
    maps = _tensor_maps(geo, tensors)
    if plan.release != "never":
        overlap.declare("blockIdx.x", *["clusterCtaIdx.x"] * (plan.cluster > 1), "threadIdx.x")
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
