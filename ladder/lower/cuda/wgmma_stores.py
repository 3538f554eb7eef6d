"""Tensor copies of finished sums from shared memory to the output, while math warps go on.

Threads that copy what they staged wait for each other and for shared memory, twice a turn, and compute an
address for every 16 bytes, while tensor cores stand still. Here one thread starts a copy, and the next turn
is staged in another buffer (PTX ISA, "cp.async.bulk.tensor", from shared memory). What lies outside of the
output is not written; staged rows have the swizzle of the tensor map.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.bulk_copies import tiled_map
from ladder.lower.cuda.wgmma_geometry import Spec
from ladder.lower.cuda.wgmma_memory import Memory
from ladder.lower.gpu.arguments import Arguments
from schedules.layouts import TILE

TENSOR_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
COMMIT, AWAIT_READS = "cp.async.bulk.commit_group", "cp.async.bulk.wait_group.read"
PUBLISH = "fence.proxy.async.shared::cta"

RUN = 8
"""Elements of 16 bytes: rows of so many that follow each other begin where a tensor map's may."""


def encode_output_map(spec: Spec, args: Arguments) -> Expr:
    """Encode the tensor map of the output on the host; return its handle.

    Rows that are no multiple of 16 bytes have none, and no copy uses it: they may begin at any address.
    """
    box, whole = (TILE, spec.geo.copied_rows), args.n % RUN == 0
    return tiled_map(args.y, spec.gemm.output, (args.n, args.m), (args.n * 2,), box, where=whole)


@dataclass(frozen=True)
class TensorStores:
    """Emits the copies of a team.

    y_map: The tensor map of the output.
    one: Whether the thread is the one of its team that copies.
    """

    spec: Spec
    memory: Memory
    y_map: Expr
    one: Expr

    def slot(self, team: Expr, turn: int) -> Expr:
        """Return the buffer of a team's turn, as staging counts them; turns of a tile are counted from 0."""
        buffers = self.spec.geo.store_buffers(self.spec.device)
        return team * buffers + turn % buffers

    def await_buffer(self, turn: int) -> None:
        """Wait until a turn's buffer has been read; the team must meet before it is written.

        The first turn of a tile follows the last one of another, which may have had the same buffer.
        """
        with b.when(self.one):
            b.ptx(AWAIT_READS, self.spec.geo.store_buffers(self.spec.device) - 1 if turn else 0)

    def publish(self) -> None:
        """Let copies see what this thread has staged, once the team has met."""
        b.ptx(PUBLISH)

    def store(self, slot: Expr, first_row: Expr, first_m: Expr, count: int) -> None:
        """Start to copy ``count`` staged activation rows of 64 weight rows."""
        geo = self.spec.geo
        with b.when(self.one):
            for row in range(0, count, geo.copied_rows):
                place = self.memory.staging.ptr_to([slot, row * geo.pitch])
                b.ptx(TENSOR_STORE, T.address_of(self.y_map), first_row, first_m + row, place)
            b.ptx(COMMIT)

    def leave(self) -> None:
        """Wait until shared memory may be given up."""
        self.await_buffer(0)
