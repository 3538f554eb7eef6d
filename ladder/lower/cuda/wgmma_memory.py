"""Shared memory of the pipeline ``wgmma``: a ring of stages, their barriers, and the epilogue's part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ladder.lower import builder as b
from ladder.lower.cuda import barriers
from ladder.lower.cuda.wgmma_cluster_sums import ClusterSums, ColumnSums
from ladder.lower.cuda.wgmma_geometry import Spec
from ladder.lower.cuda.wgmma_grid import Grid
from ladder.lower.gpu.arguments import Arguments
from schedules.shares import shares_columns


@dataclass(frozen=True)
class Memory:
    """Shared memory of a block; what a kernel does not need is None.

    x, words, scales, zeros: Stages of x, packed words, scales and zero points.
    staging: Where each team of warps transposes its sums.
    table: The decode table.
    full, empty: Barriers of the stages.
    """

    x: Any
    words: Any
    scales: Any
    zeros: Any
    staging: Any
    cluster_sums: ClusterSums | None
    table: Any
    full: Any
    empty: Any


def allocate_memory(spec: Spec, grid: Grid, args: Arguments) -> Memory:
    """Allocate shared memory."""
    pool = b.SharedPool()
    memory = place_memory(pool, spec, grid, args)
    pool.commit(spec.geo.least_bytes(spec.device))
    return memory


def place_memory(pool: Any, spec: Spec, grid: Grid, args: Arguments) -> Memory:
    """Place what a block shares in a pool of shared memory."""
    geo, stages = spec.geo, spec.schedule.stages

    def rows(stage_bytes: int, element: int, source: Any) -> Any:
        if not stage_bytes:
            return None
        return pool.alloc((stages, stage_bytes // element), source.dtype, align=128)

    x = pool.alloc((stages, geo.x_bytes), "uint8", align=1024)
    words = pool.alloc((stages, geo.word_bytes // 4), "uint32", align=1024 if spec.gemm.stored else 128)
    scales = rows(geo.scale_stage_bytes, geo.scale_bytes, args.scales)
    zeros = rows(geo.zero_stage_bytes, geo.zero_bytes, args.zeros)
    teams = spec.schedule.warps // geo.team
    buffers = geo.store_buffers(spec.device)
    # Tensor copies count rows of their swizzle by addresses.
    staged = (teams * max(1, buffers), geo.chunk * geo.pitch)
    staging = pool.alloc(staged, spec.gemm.output, align=1024 if buffers else 128)
    kind = ColumnSums if shares_columns(spec.schedule) else ClusterSums
    cluster_sums = kind(spec, grid, pool) if spec.schedule.split_k > 1 else None
    count = spec.decoder.table_words
    table = pool.alloc((count,), "uint32", align=128) if count else None
    full = pool.alloc((stages,), "uint64", align=8)
    empty = pool.alloc((stages,), "uint64", align=8)
    return Memory(x, words, scales, zeros, staging, cluster_sums, table, full, empty)


def initialise_barriers(spec: Spec, memory: Memory, leaving: int) -> None:
    """Emit the initialisation of all barriers, for one thread; ``leaving`` arrivals free a stage."""
    for stage in range(spec.schedule.stages):
        barriers.initialise(memory.full.ptr_to([stage]))
        barriers.initialise(memory.empty.ptr_to([stage]), leaving)
    if memory.cluster_sums is not None:
        memory.cluster_sums.initialise()
    barriers.publish()
