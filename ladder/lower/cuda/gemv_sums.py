"""The end of a block whose warps are slices of K: they are added and stored, four rows at a time.

Where the blocks of a cluster split K, each finishes its part of the outputs and reads the others'
sums through distributed shared memory (PTX ISA, "mapa", "ld.shared::cluster").
"""

from __future__ import annotations

from typing import Any, Protocol

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.cuda.gemv_geometry import Slices
from ladder.lower.gpu.arguments import Arguments
from ladder.lower.gpu.epilogue import finish_row

Expr = Any

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


class Sliced(Protocol):
    """A kernel at its end.

    Parameters
    ----------
    gemm, args, thread
        The problem, its tensors and this thread of the block.
    rank
        This block's place in its cluster.
    first_token, token_count, first_row
        Which outputs the cluster has.
    slices
        Shared sums ``[slice][token][row]``, of type ``kind``.
    """

    gemm: Gemm
    args: Arguments
    thread: Expr
    rank: Expr
    first_token: Expr
    token_count: Expr
    first_row: Expr
    slices: Any

    @property
    def kind(self) -> str:
        """Type of the sums."""

    def finished(self, total: Expr) -> Expr:
        """Return a total of all slices as float32."""


def meet(cluster: int) -> None:
    """Emit a barrier of the block, or of all blocks of its cluster."""
    if cluster == 1:
        b.block_sync()
        return
    b.cluster_sync()


def reduce_and_store(kernel: Sliced, geo: Slices) -> None:
    """Add the slices ``[slice][token][row]`` in the shared memory of all blocks, and store the outputs.

    The blocks of a cluster take equal shares of the outputs. None leaves while another reads.
    """
    cluster = geo.schedule.cluster
    meet(cluster)
    pieces = geo.rows // ROWS
    count = b.bind(kernel.token_count * pieces)
    share = b.bind((count + cluster - 1) // cluster)
    first, own = b.bind(kernel.rank * share), b.bind(T.min(share, count - kernel.rank * share))
    with b.loop(b.bind((own + geo.threads - 1) // geo.threads), rolled=True) as turn:
        piece = b.bind(turn * geo.threads + kernel.thread)
        token, row = b.bind((first + piece) // pieces), b.bind((first + piece) % pieces * ROWS)
        with b.when(T.And(piece < own, kernel.first_row + row < kernel.args.n)):
            sums = _added(kernel, geo, token, row)
            m, n = kernel.first_token + token, kernel.first_row + row
            finish_row(kernel.gemm, kernel.args, sums, ROWS, m, n)
    if cluster > 1:
        meet(cluster)


def _added(kernel: Sliced, geo: Slices, token: Expr, row: Expr) -> Any:
    """Return float32 sums of `ROWS` rows over all slices of all blocks, in the order of K."""
    total = b.local(ROWS, kernel.kind)
    for rank in range(geo.schedule.cluster):
        for index in range(geo.schedule.split_k):
            place = (index, token, row)
            part = _read_peer(kernel, rank, place) if geo.schedule.cluster > 1 else _read(kernel, place)
            for i in range(ROWS):
                b.store(total, part[i] if rank + index == 0 else total[i] + part[i], i)
    sums = b.local(ROWS, "float32")
    for i in range(ROWS):
        b.store(sums, kernel.finished(total[i]), i)
    return sums


def _read(kernel: Sliced, place: tuple[Expr, Expr, Expr]) -> list[Expr]:
    """Return `ROWS` sums of this block."""
    index, token, row = place
    part = b.local(ROWS, kernel.kind)
    with b.vector(ROWS) as v:
        b.store(part, kernel.slices[index, token, row + v], v)
    return [part[i] for i in range(ROWS)]


def _read_peer(kernel: Sliced, rank: int, place: tuple[Expr, Expr, Expr]) -> list[Expr]:
    """Return `ROWS` sums of a block of the cluster."""
    words = b.local(ROWS, "uint32")
    sums = kernel.slices.ptr_to(list(place))
    b.emit(b.call_inline("ladder_read_peer", READ_PEER, "void", sums, rank, words.ptr_to([0])))
    return [T.reinterpret(words[i], dtype=kernel.kind) for i in range(ROWS)]
