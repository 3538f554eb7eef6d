"""The end of a gemv block: slices of K are added and the outputs stored, four rows at a time.

Where the blocks of a cluster split K, each finishes its part of the outputs and reads the others'
sums through distributed shared memory (PTX ISA, "mapa", "ld.shared::cluster").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.gpu.epilogue import finish_row

if TYPE_CHECKING:
    from ladder.lower.cuda.gemv import Gemv

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


def meet(cluster: int) -> None:
    """Emit a barrier of the block, or of all blocks of its cluster."""
    if cluster == 1:
        b.block_sync()
        return
    b.ptx("barrier.cluster.arrive.release")
    b.ptx("barrier.cluster.wait.acquire")


def reduce_and_store(kernel: Gemv) -> None:
    """Add the slices ``[slice][token][row]`` in the shared memory of all blocks, and store the outputs.

    The blocks of a cluster take equal shares of the outputs. None leaves while another reads.
    """
    geo, cluster = kernel.geo, kernel.schedule.cluster
    meet(cluster)
    pieces = geo.rows // ROWS
    count = b.bind(kernel.token_count * pieces)
    share = b.bind((count + cluster - 1) // cluster)
    first, own = b.bind(kernel.rank * share), b.bind(T.min(share, count - kernel.rank * share))
    with b.loop(b.bind((own + geo.threads - 1) // geo.threads), rolled=True) as turn:
        piece = b.bind(turn * geo.threads + kernel.thread)
        token, row = b.bind((first + piece) // pieces), b.bind((first + piece) % pieces * ROWS)
        with b.when(T.And(piece < own, kernel.first_row + row < kernel.args.n)):
            sums = _added(kernel, token, row)
            m, n = kernel.first_token + token, kernel.first_row + row
            finish_row(kernel.gemm, kernel.args, sums, ROWS, m, n)
    if cluster > 1:
        meet(cluster)


def _added(kernel: Gemv, token: Expr, row: Expr) -> Any:
    """Return float32 sums of `ROWS` rows over all slices of all blocks, in the order of K."""
    total = b.local(ROWS, kernel.sums.dtype)
    for rank in range(kernel.schedule.cluster):
        for index in range(kernel.schedule.split_k):
            part = _read(kernel, rank, index, token, row)
            for i in range(ROWS):
                b.store(total, part[i] if rank + index == 0 else total[i] + part[i], i)
    sums = b.local(ROWS, "float32")
    for i in range(ROWS):
        b.store(sums, T.Cast("float32", total[i]), i)
    return sums


def _read(kernel: Gemv, rank: int, index: int, token: Expr, row: Expr) -> list[Expr]:
    """Return `ROWS` sums of slice ``index`` of block ``rank``."""
    dtype = kernel.sums.dtype
    if kernel.schedule.cluster == 1:
        part = b.local(ROWS, dtype)
        with b.vector(ROWS) as v:
            b.store(part, kernel.slices[index, token, row + v], v)
        return [part[i] for i in range(ROWS)]
    words = b.local(ROWS, "uint32")
    place = kernel.slices.ptr_to([index, token, row])
    b.emit(b.call_inline("ladder_read_peer", READ_PEER, "void", place, rank, words.ptr_to([0])))
    return [T.reinterpret(words[i], dtype=dtype) for i in range(ROWS)]
