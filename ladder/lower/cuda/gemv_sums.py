"""The end of a block whose warps are slices of K: they are added and stored, four rows at a time.

Where the blocks of a cluster split K, each finishes its part of the outputs and reads the others'
sums through distributed shared memory (PTX ISA, "mapa", "ld.shared::cluster").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.gemv_geometry import Slices
from ladder.lower.cuda.gemv_place import BlockPlace
from ladder.lower.gpu.arguments import Arguments
from ladder.lower.gpu.epilogue import finish_gated, finish_row
from schedules.layouts import TILE

ROWS = 4
"""Rows that a thread finishes at a time: 16 bytes of sums."""

READ_PEER = """
static __device__ __forceinline__ void ladder_read_peer(const void* place, int rank, unsigned int* out) {
  unsigned int at = (unsigned int)__cvta_generic_to_shared(place);
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(at), "r"(rank));
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(at) : "memory");
}
"""


@dataclass(frozen=True)
class Rows:
    """A part of an array of weight rows, indexed like the whole: row ``first`` is its first."""

    part: Any
    first: Expr

    def __getitem__(self, row: Expr) -> Expr:
        return self.part[row - self.first]


class RowScales:
    """Scales of a block's weight rows, loaded early so that nothing waits for them at the end.

    Making it emits the loads of each thread's share, `keep` their stores to shared memory.
    """

    def __init__(self, geo: Slices, place: BlockPlace) -> None:
        self.geo, self.place = geo, place
        args, threads = place.args, geo.threads
        count = -(-geo.rows // threads)
        self.loaded, last = b.local(count, "uint32"), args.n_tiles * TILE - 1
        for i in range(count):
            row = place.warp.thread + i * threads
            if geo.halves > 1:
                own = T.min(place.first_row + row % geo.columns, args.n - 1)
                row = T.min(row // geo.columns * args.n + own, last)
            else:
                row = T.min(place.first_row + row, last)
            b.ptx("ld.global.u32", self.loaded[i], args.row_scale.ptr_to([row]))

    def keep(self, shared: Any) -> None:
        """Store the scales in ``shared``; the block must wait for them."""
        for i in range(-(-self.geo.rows // self.geo.threads)):
            row = self.place.warp.thread + i * self.geo.threads
            with b.when(row < self.geo.rows):
                b.store(shared, T.reinterpret(self.loaded[i], dtype="float32"), row)


def halves_of(place: BlockPlace, geo: Slices, row_scales: Any) -> tuple[Arguments, ...]:
    """Return a kernel's tensors as the rows of each half of the weight see them.

    row_scales: Shared memory that holds the scales of the block's rows.
    """
    args = place.args
    biases = (args.bias, None if args.bias is None else Rows(args.bias, -args.n))
    return tuple(
        replace(args, row_scale=Rows(row_scales, place.first_row - half * geo.columns), bias=biases[half])
        for half in range(geo.halves)
    )


@dataclass(frozen=True)
class SliceSums:
    """Sums ``[slice][m][weight row]`` in the shared memory of all blocks of a cluster.

    gemm, halves, geo: The problem, its tensors as the rows of each half of the weight see them (of a product
        that is not gated, there is one), and how the warps of a block divide rows and K.
    place: Which outputs the cluster has.
    slices, kind: The sums, and their type.
    gain: What finished sums are multiplied by.
    """

    gemm: Gemm
    halves: tuple[Arguments, ...]
    geo: Slices
    place: BlockPlace
    slices: Any
    kind: str
    gain: float = 1.0

    def store(self) -> None:
        """Add the slices and store the outputs.

        The blocks of a cluster take equal shares of the outputs. None leaves while another reads.
        """
        cluster, threads, place = self.geo.schedule.cluster, self.geo.threads, self.place
        b.sync(cluster)
        pieces = self.geo.columns // ROWS
        count = b.bind(place.m_count * pieces)
        share = b.bind((count + cluster - 1) // cluster)
        first, own = b.bind(place.rank * share), b.bind(T.min(share, count - place.rank * share))
        with b.loop(b.bind((own + threads - 1) // threads), rolled=True) as iteration:
            piece = b.bind(iteration * threads + place.warp.thread)
            m, row = b.bind((first + piece) // pieces), b.bind((first + piece) % pieces * ROWS)
            with b.when(T.And(piece < own, place.first_row + row < self.halves[0].n)):
                self._finish(m, row)
        if cluster > 1:
            b.sync(cluster)

    def _finish(self, m: Expr, row: Expr) -> None:
        """Store `ROWS` outputs of an activation row of the block."""
        at = self.place.first_m + m, self.place.first_row + row
        if len(self.halves) == 1:
            finish_row(self.gemm, self.halves[0], self._added(m, row), ROWS, *at)
            return
        own = self.geo.own_rows
        first = b.bind(row // own * self.geo.schedule.warp_rows + row % own)
        sums = self._added(m, first), self._added(m, first + own)
        finish_gated(self.gemm, (self.halves[0], self.halves[1]), sums, ROWS, *at)

    def _added(self, m: Expr, row: Expr) -> Any:
        """Return float32 sums of `ROWS` weight rows over all slices of all blocks, in the order of K."""
        cluster, total = self.geo.schedule.cluster, b.local(ROWS, self.kind)
        for rank in range(cluster):
            for index in range(self.geo.schedule.split_k):
                place = (index, m, row)
                part = self._read_peer(rank, place) if cluster > 1 else self._read(place)
                for i in range(ROWS):
                    b.store(total, part[i] if rank + index == 0 else total[i] + part[i], i)
        sums = b.local(ROWS, "float32")
        for i in range(ROWS):
            value = T.Cast("float32", total[i])
            b.store(sums, value if self.gain == 1.0 else value * T.float32(self.gain), i)
        return sums

    def _read(self, place: tuple[Expr, Expr, Expr]) -> list[Expr]:
        """Return `ROWS` sums of this block."""
        index, m, row = place
        part = b.local(ROWS, self.kind)
        with b.vector(ROWS) as v:
            b.store(part, self.slices[index, m, row + v], v)
        return [part[i] for i in range(ROWS)]

    def _read_peer(self, rank: int, place: tuple[Expr, Expr, Expr]) -> list[Expr]:
        """Return `ROWS` sums of a block of the cluster."""
        words = b.local(ROWS, "uint32")
        sums = self.slices.ptr_to(list(place))
        b.emit(b.call_inline("ladder_read_peer", READ_PEER, "void", sums, rank, words.ptr_to([0])))
        return [T.reinterpret(words[i], dtype=self.kind) for i in range(ROWS)]
