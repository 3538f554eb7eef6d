"""Epilogue of the wgmma pipeline: from accumulator fragments to rows of the output.

Accumulators hold ``out^T``: a thread owns scattered (row, token) pairs. Each warpgroup
stages a chunk of tokens in shared memory, transposed, and stores runs of eight outputs
along N. With split K the chunk is the whole tile, and every block of the cluster sums
its share of the rows over all blocks through distributed shared memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.cuda.epilogue import finish_row
from ladder.lower.cuda.wgmma_geometry import accumulator_row, accumulator_token
from schedules.layouts import TILE

if TYPE_CHECKING:
    from ladder.lower.cuda.wgmma import Kernel

Expr = Any
RUN = 8
"""Outputs that one thread stores at a time: 16 bytes of a 16-bit type."""

CLUSTER_LOAD = """
__device__ __forceinline__ void ladder_cluster_add4(float* sum, const float* p, int rank) {
  unsigned address = (unsigned)__cvta_generic_to_shared(p), remote;
  float x, y, z, w;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x), "=f"(y), "=f"(z), "=f"(w) : "r"(remote) : "memory");
  sum[0] += x; sum[1] += y; sum[2] += z; sum[3] += w;
}
"""


def finish_tile(kernel: Kernel, row_tile: Expr, token: Expr) -> None:
    """Write one finished tile whose first packed row tile and first token are given."""
    first_row = b.bind((row_tile + kernel.group_index * kernel.geo.m64) * TILE)
    for chunk in range(kernel.schedule.tile_m // kernel.geo.chunk):
        _stage(kernel, chunk)
        _sync(kernel)
        _store_chunk(kernel, first_row, token + chunk * kernel.geo.chunk)
        if kernel.schedule.split_k == 1:
            # The next chunk, or the next tile, overwrites what this one still reads.
            _sync(kernel)


def _sync(kernel: Kernel) -> None:
    """Wait for everybody whose staged sums will be read."""
    if kernel.schedule.split_k > 1:
        b.emit(T.cuda.cluster_sync())
    else:
        b.named_sync(kernel.group_index + 1, 128)


def _stage(kernel: Kernel, chunk: int) -> None:
    """Transpose this thread's sums of one chunk into shared memory."""
    geo = kernel.geo
    first = chunk * geo.chunk
    for m in range(geo.m64):
        row = m * TILE + accumulator_row(kernel.warp, kernel.lane, 0)
        for index in range(first // 8 * 4, (first + geo.chunk) // 8 * 4):
            token = accumulator_token(kernel.lane, index) - first
            position = token * geo.pitch + row + index // 2 % 2 * 8
            register = m * geo.accumulators + index
            value = kernel.partial_sum(register) if kernel.total is None else kernel.total[register]
            b.store(kernel.staging, value, kernel.group_index, position)


def _store_chunk(kernel: Kernel, first_row: Expr, first_token: Expr) -> None:
    """Sum over the cluster, finish and store runs of eight outputs along N."""
    geo, ranks = kernel.geo, kernel.schedule.split_k
    rows = TILE * geo.m64 // ranks
    runs = rows // RUN * geo.chunk
    sums = b.local(RUN, "float32")
    with b.loop((runs + 127) // 128) as turn:
        run = b.bind(turn * 128 + kernel.member)
        row = b.bind(kernel.rank * rows + run % (rows // RUN) * RUN)
        token = b.bind(run // (rows // RUN))
        with b.when(T.And(run < runs, first_token + token < kernel.args.m)):
            _gather(kernel, sums, token * geo.pitch + row)
            finish_row(kernel.gemm, kernel.args, sums, RUN, first_token + token, first_row + row)


def _gather(kernel: Kernel, sums: Any, position: Expr) -> None:
    """Load one run of sums, over all blocks of the cluster if K is split."""
    if kernel.schedule.split_k == 1:
        for half in (0, 4):
            with b.vector(4) as v:
                b.store(sums, kernel.staging[kernel.group_index, position + half + v], half + v)
        return
    for index in range(RUN):
        b.store(sums, T.float32(0), index)
    for rank in range(kernel.schedule.split_k):
        for half in (0, 4):
            source = kernel.staging.ptr_to([kernel.group_index, position + half])
            call = b.call_inline(
                "ladder_cluster_add4", CLUSTER_LOAD, "void", sums.ptr_to([half]), source, T.int32(rank)
            )
            b.emit(call)
