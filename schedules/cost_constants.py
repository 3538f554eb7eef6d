"""Constants of ``wgmma`` by what the weights are to it; those left out are as in `schedules.cost_model`."""

from __future__ import annotations

from collections.abc import Mapping

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
"""wgmma: other values of these constants, where weights are operands as they are.

Fitted to 486 runs of 51 problems on an H200 (convolutions and points of ResNet-50 and EfficientNet for eight
images, products of 256 to 4096, M up to 1576): the first choice takes 1.0 times the fastest measured
(median, 1.12 at worst), times are 12 % off (median).
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
"""wgmma: other values of these constants, where weights are decoded to 16 bits.

Fitted to 4,213 runs on an H200: of int4 at four shapes of no tuning row (M = 80 to 2048, tiles of 40 to 256
activation rows, 2026-11-23) and of all 16-bit classes of ``schedules/tuned/h200.json`` (M from 32 on), but
`DOUBLING_SECONDS` and `EXCHANGE_SECONDS` to 2,547 runs on both cards, from one row on. At
four other shapes the first choice takes 1.01 times the fastest of its contest's finals (geometric mean, 1.06
at worst), and times are 5 % off (median).
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
"""wgmma: the same where weights are decoded to fp8.

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
"""wgmma: the same where both operands are fp8 as they are.

Fitted to 381 kernels at 53 points of seven shapes of no tuning row on an H100 (M = 1 to 1500,
``benchmarks/results/h100_fp8_choices_2026-11-26.json``): the first choice among those timed takes 1.039 times
the fastest (geometric mean; 1.064 with the constants of other 8-bit operands). `TURNOVER_SECONDS` is read
off pairs of a plain and a persistent grid there that are alike in all else: the plain one takes as long where
each multiprocessor has one block, and about 2 µs longer for each further one. `L2_SHARE` is fitted to these
runs and 464 at 35 further points (``benchmarks/results/h100_fp8_why_2026-11-27.json``): what either half of
the shapes asks for (1.33, 1.65) serves the other half better than 1. The first nine lie between what the
two halves of 60 shapes ask for (1,591 runs at 286 points on both cards); at 16 shapes drawn afterwards the
choices take 0.96 of the time before for M up to 64 (``benchmarks/results/h200_fp8_refit_2026-11-27.json``).
"""
