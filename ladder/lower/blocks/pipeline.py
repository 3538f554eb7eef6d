"""The software pipeline of a kernel: tiles of later steps are copied while a step is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from tvm.script import tirx as T

from ladder.ir.graph import Node
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.blocks.context import BlockContext
from ladder.lower.blocks.copies import Copy, HeldCopy, TensorCopy, TileCopy
from ladder.lower.blocks.packed import PackedCopy
from ladder.lower.cuda import barriers
from ladder.lower.cuda.launch import Overlap


class Ring:
    """The slots of a pipeline, as the loop goes round them.

    stages: How many there are.
    """

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.slot, self.ahead = b.Variable("int32", 0), b.Variable("int32", stages - 1)
        self.phase = b.Variable("int32", 0)

    def advance(self, phases: bool) -> None:
        """Go to the next slot; ``phases``: barriers change their phase after a round."""
        if phases:
            last = self.slot.value == self.stages - 1
            self.phase.set(T.Select(last, self.phase.value ^ 1, self.phase.value))
        for position in (self.slot, self.ahead):
            position.set(T.Select(position.value == self.stages - 1, 0, position.value + 1))


class Pipeline:
    """Copies of a kernel, and when the next kernel may start.

    maps: Load -> tensor map, for tiles that tensor copies take.
    """

    def __init__(self, context: BlockContext, overlap: Overlap, maps: Mapping[str, Expr]) -> None:
        geo = context.geo
        self.context, self.overlap = context, overlap
        self.schedule, self.threads = context.schedule, context.threads
        self.tensor = bool(geo.barriers)
        """Whether tensor copies bring the tiles of the loop."""
        self.through_registers = geo.shape.through_registers
        self.held: list[HeldCopy] = []
        """Copies of the next step's tiles that are in registers."""
        loads = geo.shared_loads
        self.loop_copies = [_copy_of(context, node, maps) for node in loads if geo.is_looped(node)]
        self.block_copies = [_copy_of(context, node, maps) for node in loads if not geo.is_looped(node)]
        self.filled = self.schedule.stages - 1 if geo.stage_offsets else 0
        """Steps whose tiles are copied before the loop."""

    def release(self, when: str, condition: Expr = True) -> None:
        """Let the next kernel start, if the schedule says so."""
        if self.schedule.release != when or condition is False:
            return
        with nullcontext() if condition is True else b.when(condition):
            self.overlap.release()

    @property
    def _early(self) -> bool:
        """Whether anything may be read while the kernels before still run."""
        return self.overlap.possible and self.schedule.release != "never"

    def prepare_arrivals(self) -> None:
        """Initialise the barriers of tensor copies, before the first copy or wait."""
        arrivals = self.context.shared.arrivals
        if arrivals is None:
            return
        with b.when(self.threads.thread == 0):
            for index in range(self.context.geo.barriers):
                barriers.initialise(arrivals.ptr_to([index]))
            barriers.publish()
        b.block_sync()

    def copy_early(self) -> None:
        """Copy what the kernels before do not write, and bring what they might have written into L2."""
        if self.tensor:
            for copy in self.loop_copies:
                copy.fetch_map()
        if not self._early:
            return
        for copy in self.block_copies:
            if copy.is_constant:
                self._copy(copy, 0, self.context.dialect.address(0))
        for iteration in range(self.filled):
            with self._if_iteration(iteration), self.context.point.nested():
                if self._constant_copies:
                    self._copy_tiles(iteration, iteration, self._constant_copies, opens=True)
                for copy in self.loop_copies:
                    if copy.is_streamed and not copy.is_constant:
                        copy.prefetch(self.threads.own_step(iteration))

    @property
    def _constant_copies(self) -> list[Copy]:
        """Copies of a step that need not wait for the kernels before."""
        return [copy for copy in self.loop_copies if copy.is_constant]

    def start(self) -> None:
        """Copy what all steps share, and the first steps' tiles."""
        for copy in self.block_copies:
            if not (self._early and copy.is_constant):
                self._copy(copy, 0, self.context.dialect.address(0))
        if self.block_copies:
            self._close_group()
        for iteration in range(self.filled):
            self._copy_step(iteration, iteration, left=self._early and bool(self._constant_copies))
        self.release("asked", self.threads.iterations < self.schedule.stages + self.schedule.lead)
        if self.block_copies:
            later = self.loop_copies and not self.tensor
            self._wait_groups(self.schedule.stages - 1 if later else 0)
            self.context.dialect.sync_block()

    def _if_iteration(self, iteration: Expr) -> Any:
        """Enter a branch that is taken if there is such an iteration."""
        iterations = self.threads.iterations
        known = isinstance(iteration, int) and isinstance(iterations, int)
        return nullcontext() if known and iteration < iterations else b.when(iteration < iterations)

    def _copy_step(self, iteration: Expr, slot: Expr, left: bool = False) -> None:
        """Copy the tiles of an iteration, if there is such an iteration, and close the group of copies.

        ``left``: only those that were not copied early.
        """
        copies = [copy for copy in self.loop_copies if not (left and copy.is_constant)]
        with self._if_iteration(iteration), self.context.point.nested():
            self._copy_tiles(iteration, slot, copies, opens=not left)
        if not self.tensor:
            self._close_group()

    def _copy_tiles(self, iteration: Expr, slot: Expr, copies: Sequence[Copy], opens: bool) -> None:
        """Start copies of an iteration's tiles; ``opens``: the first ones, which say how much will arrive."""
        at = b.bind(self.context.dialect.address(self._slot_byte(slot)))
        step = b.keep(self.threads.own_step(iteration))
        if not self.tensor:
            for copy in copies:
                self._copy(copy, step, at)
            return
        with b.when(self.threads.group_thread == 0):
            if opens:
                count = sum(copy.bytes for copy in self.loop_copies)
                barriers.expect(self._arrival(slot), T.uint32(count))
            for copy in sorted(copies, key=lambda copy: -copy.bytes):  # what comes from memory first
                copy.start(step, at, self._arrival(slot))

    def _copy(self, copy: Copy, step: Expr, at: Expr) -> None:
        """Copy a tile, asynchronously where the device can."""
        if not self.through_registers:
            copy.emit(step, at)
            return
        held = HeldCopy(copy)
        held.fetch(step)
        held.put(at)

    def _slot_byte(self, slot: Expr) -> Expr:
        return self.context.shared.stages_at + slot * self.context.geo.stage_bytes

    def _arrival(self, slot: Expr) -> Expr:
        return self.context.shared.arrivals.ptr_to([self.threads.group * self.schedule.stages + slot])

    def enter_step(self, ring: Ring, iteration: Expr, refills: bool) -> None:
        """Wait until this iteration's tiles have arrived, and let values read them.

        ``refills``: the place of the last iteration's tiles is free already.
        """
        if not self.loop_copies:
            return
        if self.tensor:
            barriers.wait(self._arrival(ring.slot.value), ring.phase.value)
        else:  # for what this thread copied: others are waited for before the refill
            self._wait_groups(self.schedule.stages - 2)
        if self.through_registers:
            self._fetch_next(iteration)
        elif refills:
            self.refill(ring, iteration)
        shared = self.context.shared
        shared.stage.set(shared.base + self.context.dialect.address(self._slot_byte(ring.slot.value)))

    def _close_group(self) -> None:
        """Make a group of the asynchronous copies that began since the last one."""
        if not self.through_registers:
            b.ptx("cp.async.commit_group")

    def _wait_groups(self, left: int) -> None:
        """Wait for this thread's asynchronous copies but for those of the last ``left`` groups."""
        if not self.through_registers:
            b.ptx("cp.async.wait_group", left)

    def drain(self) -> None:
        """Wait for all asynchronous copies of this thread."""
        self._wait_groups(0)

    def _fetch_next(self, iteration: Expr) -> None:
        """Let the group read this step's tiles, and load those of the next one into registers.

        In the last step its own again: LLVM moves products past a branch, away from where their operands are
        made, which then take more registers than there are. So nothing is conditional here.
        """
        self.context.sync_group()
        step = b.keep(self.threads.own_step(T.min(iteration + 1, self.threads.iterations - 1)))
        self.held = [HeldCopy(copy) for copy in self.loop_copies]
        for held in self.held:
            held.fetch(step)

    def leave_step(self, ring: Ring) -> None:
        """Store what was loaded in registers over the tiles of the step before."""
        at = b.bind(self.context.dialect.address(self._slot_byte(ring.ahead.value))) if self.held else 0
        for held in self.held:
            held.put(at)

    def refill(self, ring: Ring, iteration: Expr) -> None:
        """Copy a later iteration's tiles over the last iteration's, once the whole group has done that."""
        self.context.sync_group()
        self._copy_step(b.bind(iteration + (self.schedule.stages - 1)), ring.ahead.value)
        self.release(
            "asked", iteration == self.threads.iterations - self.schedule.stages - self.schedule.lead
        )


def _copy_of(context: BlockContext, node: Node, maps: Mapping[str, Expr]) -> Copy:
    """Return what copies a load's tile."""
    if node.tile.ttype.is_block:
        return PackedCopy(context, node)
    if node.name in maps:
        return TensorCopy(context, node, maps[node.name])
    return TileCopy(context, node)
