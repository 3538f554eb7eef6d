"""`batch_invariant`: a row gives the same bits for every number of rows and wherever it stands among them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import ladder
from ladder.api.problem import gemm_for
from schedules.cost_model import predict
from schedules.policy import choose, make_plan, order_of_sums
from schedules.schedule import GpuSchedule
from schedules.tuning import TuningDatabase
from targets import get_device

ROWS = (1, 2, 3, 5, 8, 9, 16, 17, 40)


def draw(rows: int, columns: int, seed: int) -> Any:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def products_of_each_count(multiply: Any, x: Any) -> list[Any]:
    """The product of the first rows of x, for several numbers of rows, and of all with the order reversed."""
    return [*(multiply(x[:rows]) for rows in ROWS), multiply(x.flip(0)).flip(0)]


@pytest.mark.parametrize(
    ("weight", "activation", "zero"),
    [
        ("int4", "bfloat16", "none"),
        ("nf4", "float32", "none"),
        ("int4", "int8", "none"),
        ("fp6_e3m2", "float16", "none"),
        ("uint4", "float32", "integer"),
        ("nf4", "float32", "float"),
    ],
)
def test_rows_keep_their_bits_on_this_cpu(weight: str, activation: str, zero: str) -> None:
    operator = ladder.Matmul(80, 200, weight, activation, group_size=40, zero=zero, batch_invariant=True)
    packed = operator.pack(ladder.quantize(draw(80, 200, 0), weight, group_size=40, zero=zero))
    source = torch.float32 if activation == "int8" else getattr(torch, activation)
    x = draw(max(ROWS), 200, 1).to(source)
    whole = operator(x, packed)
    for found in products_of_each_count(lambda rows: operator(rows, packed), x):
        assert torch.equal(found, whole[: len(found)])


def test_a_model_passes_it_on() -> None:
    layers = torch.nn.Linear(96, 128), torch.nn.SiLU(), torch.nn.Linear(128, 64)
    model = ladder.quantize_(
        torch.nn.Sequential(*layers).bfloat16().eval(), "int4", group_size=32, batch_invariant=True
    )
    assert model[0].batch_invariant
    fast, x = ladder.compile(model, precise=True), draw(max(ROWS), 96, 2).bfloat16()
    with torch.no_grad():
        whole = model(x)
        for found in products_of_each_count(fast, x):
            assert torch.equal(found, whole[: len(found)])
    assert not fast.refused


@pytest.mark.parametrize(
    ("weight", "activation", "device"),
    [
        ("int4", "float16", "cuda/sm_90a"),
        ("mxfp4", "bfloat16", "cuda/sm_80"),
        ("int4", "int8", "cuda/sm_90a"),
        ("fp8_e4m3", "fp8_e4m3", "cuda/sm_90a"),
        ("int4", "float16", "rocm/gfx942"),
        ("int4", "bfloat16", "cpu/amx"),
    ],
)
def test_kernels_of_a_plan_add_in_one_order(weight: str, activation: str, device: str) -> None:
    gemm, target = gemm_for(2048, 4096, weight, activation, batch_invariant=True), get_device(device)
    plan = make_plan(gemm, target)
    orders = {order_of_sums(gemm, target, schedule) for _, schedule in plan.entries}
    assert len(orders) == 1
    assert None not in orders
    assert choose(gemm, target, 24).schedule == plan.schedule_for(24)
    other = make_plan(replace(gemm, batch_invariant=False), target)
    assert len({order_of_sums(gemm, target, schedule) for _, schedule in other.entries}) > 1


HOPPER = get_device("cuda/sm_90a")


def test_what_moves_with_the_number_of_rows_has_no_order() -> None:
    gemm, schedule = gemm_for(64, 64, "int4", "float16"), GpuSchedule("wgmma", 64, 128, persistent=True)
    order = order_of_sums(gemm, HOPPER, schedule)
    assert order == order_of_sums(gemm, HOPPER, replace(schedule, tile_m=128, stages=6))
    assert order != order_of_sums(gemm, HOPPER, replace(schedule, split_k=2))
    assert order_of_sums(gemm, HOPPER, replace(schedule, stream_k=True)) is None


def test_slices_of_other_lengths_are_another_order() -> None:
    gemm, schedule = gemm_for(64, 2624, "int4", "float16"), GpuSchedule("wgmma", 8, 64, 64, split_k=2)
    longer = replace(schedule, tile_k=256)  # 24 and 17 tiles of K instead of 22 and 19
    assert order_of_sums(gemm, HOPPER, schedule) != order_of_sums(gemm, HOPPER, longer)
    even = replace(gemm, k=4096)
    assert order_of_sums(even, HOPPER, schedule) == order_of_sums(even, HOPPER, longer)


def test_gemv_has_the_order_of_wgmma_that_deals_k() -> None:
    gemm = gemm_for(512, 4096, "int4", "float16", group_size=128)
    gemv = GpuSchedule("gemv", 8, stages=2, warps=16, split_k=4, warp_rows=32)
    dealt = GpuSchedule("wgmma", 64, 128, warps=8, deal=4)
    orders = [
        order_of_sums(gemm, HOPPER, each)
        for each in (gemv, replace(gemv, tile_m=16, warps=8, warp_rows=16), dealt, replace(dealt, split_k=4))
    ]
    assert len(set(orders)) == 1
    others = (
        replace(gemv, split_k=8), replace(gemv, stages=8), replace(gemv, cluster=2), replace(dealt, deal=8),
        replace(gemv, placement="accumulator"), replace(dealt, deal=1, split_k=4),
    )  # fmt: skip
    assert not {order_of_sums(gemm, HOPPER, each) for each in others} & set(orders)
    table = gemm_for(512, 4096, "nf4", "float16", group_size=64)
    assert order_of_sums(table, HOPPER, gemv) != order_of_sums(table, HOPPER, dealt)


def test_the_kernels_themselves_are_shared() -> None:
    gemm = gemm_for(64, 64, "int4", "float16")
    assert replace(gemm, batch_invariant=True).shape_free() == gemm.shape_free()


@pytest.mark.parametrize("n", [8192, 8128])
def test_plans_of_one_order_take_tiles_that_fit_also_where_the_shape_was_measured(n: int) -> None:
    gemm, device = gemm_for(n, 8192, "int4", "float16", group_size=128), get_device("cuda/sm_90a")
    usual = make_plan(gemm, device, TuningDatabase())
    plan = make_plan(replace(gemm, batch_invariant=True), device, TuningDatabase())
    assert n != 8192 or plan.schedule_for(1) == usual.schedule_for(1)
    for m in (1, 32, 1024):
        times = [predict(gemm, device, each.schedule_for(m), m).seconds for each in (plan, usual)]
        assert times[0] <= 1.35 * times[1]
