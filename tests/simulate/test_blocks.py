"""Kernels of block graphs on the simulator: right results, no races, in any order of warps."""

from __future__ import annotations

import block_graphs as graphs
import pytest
from block_graphs import Case, run

from ladder.ir import GraphBuilder
from ladder.lower.blocks import BlockSchedule
from ladder.lower.blocks.kernel import emit
from ladder.simulate.machine import ORDERS
from targets import get_device
from tile_types.errors import ScheduleError

BOUND = {"float16": 5e-4, "bfloat16": 4e-3}


def check(case: Case, schedule: BlockSchedule, dtype: str = "float16", **options: object) -> None:
    result, error = run(case, schedule, **options)
    assert not result.findings, result.report()
    assert not result.notes, result.notes
    assert error <= BOUND[dtype]


SHARED = [
    BlockSchedule(),
    BlockSchedule(groups=4, stages=3),
    BlockSchedule(groups=3, stages=2),  # eight steps: not evenly
    BlockSchedule(groups=2, stages=4, cluster=2),
]


@pytest.mark.parametrize("schedule", SHARED, ids=str)
@pytest.mark.parametrize("tokens", [2, 16, 24])
def test_division_past_the_matmul(tokens: int, schedule: BlockSchedule) -> None:
    check(graphs.rmsnorm_matmul(tokens, 256, 96, 32, 48), schedule)


def test_bfloat16() -> None:
    check(graphs.rmsnorm_matmul(4, 128, 64, 32, 32, "bfloat16"), BlockSchedule(groups=2), "bfloat16")


def test_ampere() -> None:
    check(graphs.rmsnorm_matmul(4, 128, 64, 32, 32), BlockSchedule(groups=2), arch="sm_80")


@pytest.mark.parametrize("row_warps", [1, 2, 4])
def test_parallel_products(row_warps: int) -> None:
    check(graphs.gated_mlp(64, 128, 64, 32, 32), BlockSchedule(2, row_warps, 3))


@pytest.mark.parametrize("order", ORDERS)
def test_parallel_products_in_any_order(order: str) -> None:
    check(graphs.gated_mlp(8, 256, 64, 32, 32), BlockSchedule(2, 1, 3, 2), order=order)


@pytest.mark.parametrize("kt", [0, 16, 32])
def test_low_rank_updates(kt: int) -> None:
    check(graphs.lora(16, 64, 64, 16, 32, kt), BlockSchedule(groups=2 if kt else 1))


@pytest.mark.parametrize("row_warps", [1, 2])
def test_computed_second_operand(row_warps: int) -> None:
    check(graphs.add_then_multiply(32, 64, 16, 32), BlockSchedule(1, row_warps))


ATTENTION = [
    BlockSchedule(1, 4),
    BlockSchedule(2, 2, 3),
    BlockSchedule(1, 2, 2, 2),
    BlockSchedule(2, 1, 2, 2),
]


@pytest.mark.parametrize("schedule", ATTENTION, ids=str)
def test_attention(schedule: BlockSchedule) -> None:
    check(graphs.attention(2, 64, 32, 128, 64, 32), schedule)


@pytest.mark.parametrize("order", ORDERS)
def test_attention_in_any_order(order: str) -> None:
    check(graphs.attention(1, 32, 64, 128, 32, 32, 0.125), BlockSchedule(2, 2, 2, 2), order=order)


def test_refusals_say_what_is_wrong() -> None:
    device = get_device("cuda/sm_90a")
    case = graphs.rmsnorm_matmul(4, 64, 64, 32, 32)
    with pytest.raises(ScheduleError, match="3 groups share 2 steps"):
        emit(case.block, device, BlockSchedule(groups=3), "k")
    with pytest.raises(ScheduleError, match="2 warps do not share 4 rows"):
        emit(case.block, device, BlockSchedule(row_warps=2), "k")
    with pytest.raises(ScheduleError, match="bytes of shared memory"):
        emit(case.block, device, BlockSchedule(stages=200), "k")
    b = GraphBuilder("block", "block")
    tile = b.add("load", b.input("x", "float16", (32, 32)), shape=(32, 32))
    moved = b.add("transpose", tile, permutation=(1, 0))
    with pytest.raises(ScheduleError, match="transpose is not lowered"):
        emit(b.finish(b.add("store", moved, shape=(32, 32))), device, BlockSchedule(), "k")
