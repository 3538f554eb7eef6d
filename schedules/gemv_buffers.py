"""How gemv divides shared memory among its buffers of activations, and tiles of K among them."""

from __future__ import annotations

from ladder.ir.gemm import Gemm
from schedules.footprint import (
    CHUNK_BYTES,
    RESIDENT_THREADS,
    X_BUFFER_BYTES,
    X_BUFFERS,
    block_threads,
    least_x_bytes,
    registers_per_thread,
)
from schedules.schedule import GpuSchedule
from targets import TileDevice


def gemv_blocks(gemm: Gemm, device: TileDevice, schedule: GpuSchedule, tables: int) -> int:
    """Return the blocks per multiprocessor that registers and shared memory are meant for.

    tables: Bytes of a block's decode tables.
    """
    threads, registers = block_threads(schedule), registers_per_thread(gemm, schedule)
    fitting = device.registers_per_unit // (threads * -(-registers // 8) * 8)
    sharing = device.shared_per_unit // (tables + least_x_bytes(gemm, schedule) + 1024)
    return max(1, min(fitting, sharing, device.max_blocks_per_unit, RESIDENT_THREADS // threads))


def buffer_chunks(device: TileDevice, blocks: int, tables: int) -> int:
    """Return the 16-byte chunks of one of the `X_BUFFERS` of x: as many as resident blocks leave room for."""
    room = min(device.shared_per_unit // blocks - 1024, device.shared_per_block, X_BUFFER_BYTES)
    return (room - tables) // (X_BUFFERS * CHUNK_BYTES) // 8 * 8


def unit_rounds(schedule: GpuSchedule, run: int, tile_chunks: int) -> int:
    """Return the rounds by which buffers of x grow: the swizzle permutes whole rows of eight chunks."""
    return 2 if run * schedule.split_k * tile_chunks % 8 else 1


def gemv_run(schedule: GpuSchedule, chunks: int, tile_chunks: int) -> int:
    """Return the neighbouring tiles that a slice takes at once: a divisor of ``stages``.

    The largest for which a buffer of ``chunks`` holds a unit of rounds for ``tile_m`` activation rows, of
    ``tile_chunks`` for each row and tile of K.
    """
    room = chunks // schedule.tile_m
    sizes = [s for s in range(schedule.stages, 0, -1) if schedule.stages % s == 0]
    chunks_of = {s: unit_rounds(schedule, s, tile_chunks) * s * schedule.split_k * tile_chunks for s in sizes}
    return next((s for s in sizes if chunks_of[s] <= room), 1)
