"""The math loop of the wgmma pipeline for 16-bit operands: one sum over all of K."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.wgmma_cluster_sums import Sum
from ladder.lower.cuda.wgmma_epilogue import Epilogue
from ladder.lower.cuda.wgmma_geometry import Spec
from ladder.lower.cuda.wgmma_grid import Piece
from ladder.lower.cuda.wgmma_operands import Operands, Registers, allocate_registers
from ladder.lower.cuda.wgmma_products import (
    Consumer,
    Descriptor,
    commit_group,
    open_group,
    pin_registers,
    start_step,
    wait_groups,
)
from schedules.footprint import slices_in_turn


@dataclass(frozen=True)
class Parts:
    """The parts of a math loop."""

    spec: Spec
    operands: Operands
    x: Descriptor
    consumer: Consumer
    epilogue: Epilogue


STEPS = 4
"""Products along K in a slab of 128 bytes."""


@dataclass(frozen=True)
class State:
    """A thread's registers.

    sums, weights: Accumulators, and weights.
    total: Sums of the slices of K before, where there are several: added, or of each where the blocks of a
        cluster have some. Else None.
    """

    sums: Any
    weights: Registers
    total: Any


def allocate_state(spec: Spec, *, scaled: bool) -> State:
    """Allocate a thread's registers; ``scaled``: there are scales within K."""
    sums = b.local(spec.sums, "float32")
    turns = slices_in_turn(spec.schedule)
    sets = turns - 1 if spec.schedule.split_k > 1 else min(1, turns - 1)
    total = b.local(sets * spec.sums, "float32") if sets else None
    return State(sums, allocate_registers(spec, scaled=scaled), total)


@dataclass(frozen=True)
class Loop16:
    """The loop: a slab is decoded while the products of the one before run."""

    parts: Parts
    state: State

    def tile(self, piece: Piece) -> None:
        """Sum one tile, or its piece, over K and write it."""
        consumer, epilogue = self.parts.consumer, self.parts.epilogue
        held = epilogue.load(piece)
        consumer.await_stage()
        self.parts.operands.fetch(0)
        if self.state.total is not None and self.parts.spec.schedule.split_k > 1:
            finished = self._sum_apart(piece)
        else:
            sums = self._sum(piece) if self.state.total is None else self._sum_slices(piece)
            finished = sums.__getitem__
        consumer.release()
        consumer.ring.advance()
        epilogue.finish(piece, held, finished, self.state.sums)

    def _sum(self, piece: Piece) -> Any:
        """Sum all iterations; return the sums."""
        with b.loop(piece.iterations) as iteration:
            for slab in range(self.parts.spec.geo.body):
                self._slab(piece.iterations, iteration, iteration, slab)
        return self._finished()

    def _sum_slices(self, piece: Piece) -> Any:
        """Sum slices of ``piece.iterations`` apart and add them in order; return the total."""
        total, count = self.state.total, self.parts.spec.sums
        turns = slices_in_turn(self.parts.spec.schedule)
        for index in range(count):
            b.store(total, T.float32(-0.0), index)  # added to, it leaves the first slice as it is
        with b.loop(turns) as turn:
            sums = self._sum_one(piece, turn)
            for index in range(count):
                b.store(total, total[index] + sums[index], index)
            pin_registers(total, count)
        return total

    def _sum_apart(self, piece: Piece) -> Sum:
        """Sum slices of ``piece.iterations``; return what returns all their sums, one slice after another."""
        total, count = self.state.total, self.parts.spec.sums
        turns = slices_in_turn(self.parts.spec.schedule)
        for turn in range(turns):
            sums = self._sum_one(piece, turn)
            for index in range(count if turn < turns - 1 else 0):
                b.store(total, sums[index], turn * count + index)
        before = (turns - 1) * count
        return lambda register: total[register] if register < before else sums[register - before]

    def _sum_one(self, piece: Piece, turn: Expr) -> Any:
        """Sum the iterations of the block's slice ``turn``; return the sums."""
        turns = slices_in_turn(self.parts.spec.schedule)
        with b.loop(piece.iterations) as number:
            iteration = b.keep(turn * piece.iterations + number)
            for slab in range(self.parts.spec.geo.body):
                self._slab(piece.iterations * turns, iteration, number, slab)
        return self._finished()

    def _finished(self) -> Any:
        """Wait for all products; return the accumulators."""
        wait_groups(0)
        pin_registers(self.state.sums, self.parts.spec.sums)
        return self.state.sums

    def _slab(self, iterations: Expr, iteration: Expr, number: Expr, slab: int) -> None:
        """Decode one slab, start its products and fetch the next; the previous slab's products finish.

        The slab is one of ``iteration``, of so many in all, which is ``number`` since sums were begun.
        """
        geo, consumer = self.parts.spec.geo, self.parts.consumer
        within = slab % geo.slabs
        for m in range(geo.m64):
            for tile in range(geo.tiles_per_slab):
                self.parts.operands.decode(m, tile, slab % 2)
        self._start(within, slab % 2, number > 0 if slab == 0 else True)
        last = within == geo.slabs - 1
        if last:
            consumer.finished.set(consumer.ring.stage.value)
        # Words that are operands as they are come into registers which products of the slab before still
        # read: ptxas would run all products one by one (C7513).
        early = geo.slabs > 1 and geo.groups.bits < geo.groups.lane
        if early and geo.table_bytes:
            # Else ptxas looks codes up between this slab's first product and the others, which wait for it.
            b.emit(T.cuda.warp_sync())
        if early:
            self._fetch_next(iterations, iteration, slab)
        wait_groups(1)
        if within == 0:
            self._release_before(iteration, slab)
        if not early:
            # A ring of two stages can only be filled again once the previous one is free.
            self._fetch_next(iterations, iteration, slab)
        if last:
            consumer.previous.set(consumer.finished.value)

    def _release_before(self, iteration: Expr, slab: int) -> None:
        """Free the stage that ended with the slab before: its products are done."""
        if slab > 0:
            self.parts.consumer.release()
        else:
            with b.when(iteration > 0):
                self.parts.consumer.release()

    def _fetch_next(self, iterations: Expr, iteration: Expr, slab: int) -> None:
        geo = self.parts.spec.geo
        if (slab + 1) % geo.slabs == 0:
            self.parts.consumer.enter_stage(iteration, iterations, slab + 1)
        self.parts.operands.fetch((slab + 1) % geo.body)

    def _start(self, within: int, bank: int, accumulate: Expr) -> None:
        """Start a slab's products; ``accumulate`` says whether the first ones add to the sums."""
        spec, stage = self.parts.spec, self.parts.consumer.ring.stage.value
        open_group()
        for step in range(STEPS):
            registers = partial(self.parts.operands.step, bank, step=step)
            descriptor, adds = self.parts.x.at(stage, within, step), True if step else accumulate
            start_step(spec, self.state.sums, registers, descriptor, adds)
        commit_group()
