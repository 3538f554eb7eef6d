"""Constants of ``wgmma``, and by what the weights are to it those that differ."""

from __future__ import annotations

from collections.abc import Mapping

WGMMA: dict[str, float] = {
    "LAUNCH_SECONDS": 4.05e-07,  # a kernel in a CUDA graph, start to start, with nothing to do
    "OVERLAP": 4.2,  # exponent that joins multiprocessors, DRAM and L2: near the longest of the three
    "SLAB_CYCLES": 148.0,  # issue slots per scheduler for 128 bytes of K of 64 rows, decoding aside
    "DECODE_CYCLES": 1.0,  # issue slots per vector operation of a decode
    "TILE_CYCLES": 0.0,  # latency of one row tile's slab within a warpgroup: what others may hide
    "STAGE_CYCLES": 0.0,  # the same of a stage
    "STEP_CYCLES": 0.0,  # what nothing hides from one stage to the next
    "FIRST_BYTE_SECONDS": 0.0,  # the same until the first stage has come, per byte of it
    "WORK_POWER": 2.0,  # how latency, issue slots and tensor cores add up, see `schedules.cost_grid.Work`
    "RING_POWER": 0.0,  # how a block's work and the turns of its ring add up; 0: the longer of both
    "TENSOR_SHARE": 0.987,  # part of the peak that tensor cores reach while nothing else delays them
    "INGEST_BYTES": 64.0,  # bytes per clock that a multiprocessor takes in from L2
    "FILL_SECONDS": 1.72e-06,  # from asking for a stage to its last byte, were the memory idle
    "PROMOTION_SLOTS": 1.21,  # issue slots per activation row of a row tile when sums move to running ones
    "PROMOTION_CYCLES": 100.0,  # waiting for products that must be scaled before a slab ends (not fitted)
    "TIGHT_LOSS": 0.149,  # share of time lost where the estimate of registers is near the limit
    "WIDE_LOSS": 0.0,  # share of time that two warpgroups lose by tiles of 256 activation rows that carry
    "MULTICAST_LOSS": 0.19,  # share of time that blocks of a cluster wait while they share tiles of A
    "BLOCK_SECONDS": 1.07e-06,  # set-up of a block: barriers, tensor map, first bytes
    "OUTPUT_SECONDS": 1.85e-12,  # filling and draining a block per output; a persistent kernel overlaps it
    "EDGE_OVERLAP": 1.0,  # share of a block's start and end that others of its multiprocessor hide
    "TURNOVER_SECONDS": 0.0,  # from one block to the next where a multiprocessor holds one
    "CROWDED": 0.8,  # of weights that are decoded: by how much blocks lie closer than spread evenly
    "FLOP_SECONDS": 0.0,  # per operation, padding included: the clock falls as cores draw power
    "L2_KEPT": 1.0,  # stream-K: part of L2 that holds operands which blocks use out of step
    "L2_SHARE": 1.0,  # bandwidth of L2 over what `targets` states as sustained
    "CLUSTER_SECONDS": 5.2e-06,  # split K: launching a cluster and its two barriers
    "DOUBLING_SECONDS": 0.0,  # split K: the same for each doubling of the blocks that share K
    "EXCHANGE_SECONDS": 2.95e-10,  # split K: reading one partial sum of another block
    "CUT_SECONDS": 3.0e-06,  # stream-K: handing over sums of a tile and taking in others
    "CUT_OUTPUT_SECONDS": 2.0e-10,  # the same per output of the tile
    "PART_SECONDS": 2.0e-11,  # the same per output and other block of the tile
}
"""Of products of integers, and where the tables below have no row.

Those of stream-K are read off 28 problems on an H200 (M = 64 to 4096) beside grids without shares. As rows of
a tile exceed `schedules.footprint.PROMOTED_COLUMNS` by less than at 256, ``WIDE_LOSS`` is less.
"""

DENSE: Mapping[str, float] = {
    "BLOCK_SECONDS": 1.72e-06,
    "OUTPUT_SECONDS": 8.75e-11,
    "FILL_SECONDS": 1.31e-06,
    "INGEST_BYTES": 163.0,
    "SLAB_CYCLES": 136.0,
    "OVERLAP": 6.89,
    "CLUSTER_SECONDS": 2.13e-06,
    "EXCHANGE_SECONDS": 4.25e-12,
    "LAUNCH_SECONDS": 1.08e-06,
    "TENSOR_SHARE": 0.846,
}
"""Where weights of 16 bits are operands as they are.

Fitted on an H200 to convolutions and points of ResNet-50 and EfficientNet for eight images, and to products.
"""


DECODED: dict[str, float] = {
    "LAUNCH_SECONDS": 9.32e-08,
    "OVERLAP": 3.09,
    "L2_SHARE": 2.35,
    "SLAB_CYCLES": 77.7,
    "DECODE_CYCLES": 0.673,
    "TILE_CYCLES": 86.7,
    "STAGE_CYCLES": 287.0,
    "WORK_POWER": 2.63,
    "TENSOR_SHARE": 1.11,
    "INGEST_BYTES": 80.5,
    "FLOP_SECONDS": 2.8e-16,
    "FILL_SECONDS": 7.02e-07,
    "MULTICAST_LOSS": 0.0652,
    "BLOCK_SECONDS": 2.01e-06,
    "OUTPUT_SECONDS": 7.36e-13,
    "EDGE_OVERLAP": 0.0,
    "CROWDED": 0.8,
    "CLUSTER_SECONDS": 0.0,
    "DOUBLING_SECONDS": 4.34e-07,
    "EXCHANGE_SECONDS": 9.62e-11,
    "CUT_SECONDS": 3.61e-06,
    "CUT_OUTPUT_SECONDS": 6.3e-11,
    "PART_SECONDS": 2.45e-11,
}
"""Where weights are decoded to 16 bits.

Fitted on an H200 to int4 at four shapes of no tuning row and to all 16-bit classes of
``schedules/tuned/h200.json``, of many rows of x; `DOUBLING_SECONDS` and `EXCHANGE_SECONDS` on an H100 too,
from one row on.
"""

TO_FP8: dict[str, float] = {
    "LAUNCH_SECONDS": 1.09e-06,
    "OVERLAP": 3.13,
    "SLAB_CYCLES": 132,
    "DECODE_CYCLES": 0.914,
    "PROMOTION_SLOTS": 0.638,
    "PROMOTION_CYCLES": 100,
    "WORK_POWER": 2.91,
    "TENSOR_SHARE": 0.938,
    "INGEST_BYTES": 222,
    "FLOP_SECONDS": 1.16e-17,
    "FILL_SECONDS": 1.59e-06,
    "MULTICAST_LOSS": 0.159,
    "BLOCK_SECONDS": 1.7e-06,
    "STEP_CYCLES": 95,
    "FIRST_BYTE_SECONDS": 1.5e-11,
    "OUTPUT_SECONDS": 4.36e-11,
    "EDGE_OVERLAP": 0.253,
    "CROWDED": 0.8,
    "CLUSTER_SECONDS": 5.9e-08,
    "DOUBLING_SECONDS": 2.87e-07,
    "EXCHANGE_SECONDS": 4.05e-10,
    "PART_SECONDS": 6.14e-11,
    "L2_KEPT": 0.65,
    "CUT_SECONDS": 4.29e-06,
    "CUT_OUTPUT_SECONDS": 7.5e-11,
    "TURNOVER_SECONDS": 2.2e-06,
    "RING_POWER": 3.65,
}
"""Where weights are decoded to fp8.

Fitted to 542 runs of int4 on an H200 and an H100, from one row to 2,048.
`STEP_CYCLES`, `FIRST_BYTE_SECONDS` and `BLOCK_SECONDS` follow from 37 pairs that differ in `tile_k` and
`stages` alone. `L2_KEPT` here and of `FP8` is read off 10 and 18 kernels by stream-K on an H100
(``benchmarks/results/h100_stream_tails_2026-11-26.json``).
"""

FP8: dict[str, float] = {
    "LAUNCH_SECONDS": 2.0e-06,
    "OVERLAP": 3.45,
    "FILL_SECONDS": 9.5e-07,
    "RING_POWER": 6.0,
    "BLOCK_SECONDS": 2.4e-07,
    "EDGE_OVERLAP": 0.46,
    "CLUSTER_SECONDS": 8.0e-07,
    "DOUBLING_SECONDS": 1.2e-07,
    "EXCHANGE_SECONDS": 5.9e-10,
    "TURNOVER_SECONDS": 2.0e-06,
    "CUT_SECONDS": 5.35e-06,
    "CUT_OUTPUT_SECONDS": 2.0e-10,
    "PART_SECONDS": 1.0e-10,
    "L2_KEPT": 0.4,
    "L2_SHARE": 1.4,
    "WIDE_LOSS": 0.12,
}
"""Where both operands are fp8 as they are.

Fitted to seven shapes of no tuning row on an H100 (``benchmarks/results/h100_fp8_choices_2026-11-26.json``).
`TURNOVER_SECONDS` is read off pairs of a plain and a persistent grid there that are alike in all else.
`L2_SHARE` is fitted to these runs and ``benchmarks/results/h100_fp8_why_2026-11-27.json``, the first nine
to both cards (``benchmarks/results/h200_fp8_refit_2026-11-27.json``).
"""
