"""Epilogue of the wgmma pipeline: from accumulator fragments to rows of the output.

Accumulators hold ``out^T``: a thread owns scattered (row, token) pairs, always of the same two
rows of each row tile. Scales, bias and operators apply to them in registers; then each warp
transposes a chunk of tokens of its sixteen rows through shared memory of its own, so that no
other warp waits. With split K the chunk is the whole tile of a warpgroup, and every block of
the cluster sums its share of the rows over all blocks through distributed shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.cuda.epilogue import finish_float, finish_row
from ladder.lower.cuda.wgmma_geometry import (
    WARP_ROWS,
    Geometry,
    accumulator_row,
    accumulator_token,
    swizzled_run,
)
from schedules.layouts import TILE

if TYPE_CHECKING:
    from ladder.lower.cuda.wgmma import Kernel

Expr = Any
RUN = 8
"""Outputs that one thread of a splitting cluster stores at a time: 16 bytes of a 16-bit type."""

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

PACK = """
__device__ __forceinline__ unsigned ladder_pack_{name}(float low, float high) {{
  unsigned packed;
  asm("cvt.rn.{ptx}.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}}
"""

PACKED: Mapping[str, str] = {"float16": "f16x2", "bfloat16": "bf16x2"}
"""PTX's name of two elements of a 16-bit output type."""


def allocate(pool: Any, gemm: Gemm, geo: Geometry) -> Any:
    """Allocate what sums are transposed through: per warpgroup for a splitting cluster, else per warp."""
    if geo.schedule.split_k > 1:
        return pool.alloc((geo.warpgroups, geo.chunk * geo.pitch), "float32", align=128)
    return pool.alloc((geo.schedule.warps, geo.chunk * geo.pitch), gemm.output, align=128)


@dataclass(frozen=True)
class PerRow:
    """A per-row tensor of which a thread keeps the rows it serves; its index is the register's."""

    registers: Any
    dtype: str

    def __getitem__(self, index: int) -> Expr:
        """Return the value of row ``index`` of this thread: 2 * m64 tile + half."""
        return T.reinterpret(self.registers[index], dtype=self.dtype)


def row_values(kernel: Kernel, row_tile: Expr) -> dict[str, PerRow]:
    """Load row scale and bias of this thread's rows, long before they are used."""
    geo, args = kernel.geo, kernel.args
    if kernel.schedule.split_k > 1:
        return {}
    wanted = {"row_scale": (args.row_scale, args.n_tiles * TILE), "bias": (args.bias, args.n)}
    held = {}
    for name, (tensor, extent) in wanted.items():
        if tensor is None:
            continue
        bits = 32 if str(tensor.dtype) == "float32" else 16
        registers = b.local(2 * geo.m64, f"uint{bits}")
        for m in range(geo.m64):
            row = _first_row(kernel, row_tile, m) + accumulator_row(kernel.warp, kernel.lane, 0)
            for half in (0, 1):
                source = tensor.ptr_to([T.min(row + half * 8, extent - 1)])
                # Not a plain read: the compiler would move it ahead of the wait for the kernel before.
                b.ptx(f"ld.global.u{bits}", registers[2 * m + half], source)
        held[name] = PerRow(registers, str(tensor.dtype))
    return held


def _first_row(kernel: Kernel, row_tile: Expr, m: int) -> Expr:
    return (row_tile + kernel.group_index * kernel.geo.m64 + m) * TILE


def finish_tile(kernel: Kernel, row_tile: Expr, token: Expr, rows: Mapping[str, PerRow]) -> None:
    """Write one finished tile whose first packed row tile and first token are given.

    ``rows`` is what `row_values` loaded for the tile.
    """
    if kernel.schedule.split_k > 1:
        _sum_over_cluster(kernel, row_tile, token)
        return
    store = _WarpStore(kernel, rows)
    for m in range(kernel.geo.m64):
        first_row = b.bind(_first_row(kernel, row_tile, m) + kernel.warp * WARP_ROWS)
        for chunk in range(0, kernel.schedule.tile_m, kernel.geo.chunk):
            store.chunk(m, chunk, first_row, token)


class _WarpStore:
    """Stores chunks of tokens of one warp's sixteen rows."""

    def __init__(self, kernel: Kernel, rows: Mapping[str, PerRow]) -> None:
        self.kernel, self.gemm, self.geo = kernel, kernel.gemm, kernel.geo
        self.args = replace(kernel.args, **rows)
        self.wide = self.gemm.output == "float32"
        self.run = 4 if self.wide else 8
        self.slot = b.bind(kernel.group_index * 4 + kernel.warp)

    def chunk(self, m: int, first: int, first_row: Expr, token: Expr) -> None:
        """Transpose and store tokens ``first .. first+chunk`` of row tile ``m``."""
        stage = self._stage_floats if self.wide else self._stage_halves
        stage(m, first, token)
        b.emit(T.cuda.warp_sync())
        runs = WARP_ROWS // self.run
        tokens = 32 // runs
        # Rolled: addresses of many stores at once would not leave registers for the sums.
        with b.loop((self.geo.chunk + tokens - 1) // tokens, rolled=True) as turn:
            place = b.bind(turn * tokens + self.kernel.lane // runs)
            inside = T.And(place < self.geo.chunk, token + first + place < self.args.m)
            with b.when(inside):
                self._store_run(place, self.kernel.lane % runs, first_row, token + first + place)
        # The next chunk overwrites what this one still reads.
        b.emit(T.cuda.warp_sync())

    def _sum(self, m: int, index: int, token: Expr) -> Expr:
        """Return the finished output of accumulator ``index``, as float32."""
        kernel = self.kernel
        register = m * self.geo.accumulators + index
        value = kernel.partial_sum(register) if kernel.total is None else kernel.total[register]
        column = T.min(token + accumulator_token(kernel.lane, index), self.args.m - 1)
        return finish_float(self.gemm, value, column, 2 * m + index // 2 % 2, self.args)

    def _stage_halves(self, m: int, first: int, token: Expr) -> None:
        """Round to 16 bits and store transposed 8x8 matrices: two halves of the rows by up to 16 tokens."""
        name, lane = self.gemm.output, self.kernel.lane
        source = PACK.format(name=name, ptx=PACKED[name])
        for start in range(0, self.geo.chunk, 16):
            count = min(16, self.geo.chunk - start) // 4
            registers = []
            for matrix in range(count):
                index = (first + start) // 2 + 2 * matrix
                low, high = (self._sum(m, index + i, token) for i in (0, 1))
                registers.append(b.call_inline(f"ladder_pack_{name}", source, "uint32", low, high))
            place = start + lane // 16 % (count // 2) * 8 + lane % 8
            target = swizzled_run(place, lane // 8 % 2) * self.run
            spelling = f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16"
            b.ptx(spelling, self.kernel.staging.ptr_to([self.slot, target]), *registers)

    def _stage_floats(self, m: int, first: int, token: Expr) -> None:
        """Store each sum at its token and row."""
        lane = self.kernel.lane
        for index in range(first // 2, (first + self.geo.chunk) // 2):
            place = accumulator_token(lane, index) - first
            row = lane // 4 + index // 2 % 2 * 8
            b.store(self.kernel.staging, self._sum(m, index, token), self.slot, place * self.geo.pitch + row)

    def _store_run(self, place: Expr, part: Expr, first_row: Expr, token: Expr) -> None:
        """Store 16 bytes of one token, or what of them lies within N."""
        run, args = self.run, self.args
        source = b.bind(place * self.geo.pitch + part * run if self.wide else swizzled_run(place, part) * run)
        row = b.bind(first_row + part * run)

        def vectors() -> None:
            with b.vector(run) as v:
                b.store(args.y, self.kernel.staging[self.slot, source + v], token, row + v)

        def scalars() -> None:
            with b.loop(T.min(run, args.n - row), rolled=True) as index:
                b.store(args.y, self.kernel.staging[self.slot, source + index], token, row + index)

        b.either(T.And(args.n % run == 0, row + run <= args.n), vectors, scalars)


# ---- split K --------------------------------------------------------------------------
def _sum_over_cluster(kernel: Kernel, row_tile: Expr, token: Expr) -> None:
    """Stage this block's sums, then finish this block's share of the rows of all of them."""
    _stage(kernel)
    b.emit(T.cuda.cluster_sync())
    _store_share(kernel, b.bind(_first_row(kernel, row_tile, 0)), token)


def _stage(kernel: Kernel) -> None:
    """Transpose this thread's sums into shared memory."""
    geo = kernel.geo
    for m in range(geo.m64):
        row = m * TILE + accumulator_row(kernel.warp, kernel.lane, 0)
        for index in range(geo.accumulators):
            position = accumulator_token(kernel.lane, index) * geo.pitch + row + index // 2 % 2 * 8
            register = m * geo.accumulators + index
            value = kernel.partial_sum(register) if kernel.total is None else kernel.total[register]
            b.store(kernel.staging, value, kernel.group_index, position)


def _store_share(kernel: Kernel, first_row: Expr, first_token: Expr) -> None:
    """Sum over the cluster, finish and store runs of eight outputs along N."""
    geo, slices = kernel.geo, kernel.schedule.split_k
    rows = TILE * geo.m64 // slices
    runs = rows // RUN * geo.chunk
    sums = b.local(RUN, "float32")
    with b.loop((runs + 127) // 128) as turn:
        run = b.bind(turn * 128 + kernel.group_thread)
        row = b.bind(kernel.slice * rows + run % (rows // RUN) * RUN)
        token = b.bind(run // (rows // RUN))
        with b.when(T.And(run < runs, first_token + token < kernel.args.m)):
            _gather(kernel, sums, token * geo.pitch + row)
            finish_row(kernel.gemm, kernel.args, sums, RUN, first_token + token, first_row + row)


def _gather(kernel: Kernel, sums: Any, position: Expr) -> None:
    """Load one run of sums over all blocks of the cluster that share its rows."""
    for index in range(RUN):
        b.store(sums, T.float32(0), index)
    for part in range(kernel.schedule.split_k):
        rank = T.Cast("int32", part * kernel.schedule.cluster + kernel.member)
        for half in (0, 4):
            source = kernel.staging.ptr_to([kernel.group_index, position + half])
            call = b.call_inline(
                "ladder_cluster_add4",
                CLUSTER_LOAD,
                "void",
                sums.ptr_to([half]),
                source,
                T.Cast("int32", rank),
            )
            b.emit(call)
