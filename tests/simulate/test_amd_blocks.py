"""Block graphs on AMD GPUs: right on the simulator and as machine code, no spills, refusals by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import block_graphs as graphs
import pytest
from block_graphs import BOUND, Case, require_quantized, run, run_quantized
from found_graphs import graphs_of

from ladder.lower.blocks import BlockSchedule
from ladder.lower.blocks.candidates import ranked
from ladder.lower.blocks.kernel import emit
from ladder.simulate.machine import ORDERS
from targets import get_device
from tile_types import group_scaled
from tile_types.errors import ScheduleError

ARCHITECTURES = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
INT4 = group_scaled("int4", 128).name
REAL_ZEROS = group_scaled("uint2", 32, zero="float").name

CASES: dict[str, tuple[Callable[[], Case], BlockSchedule]] = {
    "norm": (lambda: graphs.rmsnorm_matmul(2, 256, 96, 48, 32), BlockSchedule(4)),
    "norm, steps not even": (lambda: graphs.rmsnorm_matmul(24, 256, 96, 48, 32), BlockSchedule(3)),
    "gated": (lambda: graphs.gated_mlp(8, 128, 64, 32, 32), BlockSchedule()),
    "gated, rows and groups": (lambda: graphs.gated_mlp(64, 128, 64, 32, 32), BlockSchedule(2, 2)),
    "gated, columns": (lambda: graphs.gated_mlp(32, 128, 64, 64, 32), BlockSchedule(1, 2, 2, 1, 2)),
    "low rank": (lambda: graphs.lora(16, 64, 64, 16, 32, 16), BlockSchedule(2)),
    "low rank, no loop": (lambda: graphs.lora(16, 64, 64, 16, 32, 0), BlockSchedule()),
    "low rank, few rows": (lambda: graphs.lora(8, 32, 32, 16, 16, 0), BlockSchedule()),
    "computed second operand": (lambda: graphs.add_then_multiply(32, 64, 16, 32), BlockSchedule(1, 2)),
    "attention": (lambda: graphs.attention(1, 64, 32, 128, 64, 32, norm=True), BlockSchedule(1, 4)),
    "attention, groups": (lambda: graphs.attention(2, 32, 64, 128, 32, 32, 0.125), BlockSchedule(2, 2)),
    "greatest product": (lambda: graphs.greatest_product(64, 256, 64, 64, 64), BlockSchedule(2, 2)),
    "rows": (lambda: graphs.norm_transition(3, 1024), BlockSchedule(1, 2)),
    "short rows": (lambda: graphs.norm_transition(2, 96), BlockSchedule()),
}

WEIGHTS: dict[str, tuple[str, int]] = {
    "int4": (INT4, 128),
    "nf4": (group_scaled("nf4", 64).name, 64),
    "int3": (group_scaled("int3", 32).name, 128),
    "exponents": ("mxfp4", 64),
    "exponents of 8 bits": ("mxfp8_e4m3", 128),
    "whole zeros": (group_scaled("uint4", 128, zero="integer").name, 64),
    "real zeros": (REAL_ZEROS, 128),
}

PACKED = [BlockSchedule(2), BlockSchedule(1, 1, 2, 1, 2)]


def expected(name: str, arch: str) -> AbstractContextManager[Any]:
    """Return what is expected: a refusal, of device code that would be wrong."""
    if (name, arch) == ("real zeros", "gfx90a"):
        return pytest.raises(ScheduleError, match="no real zero points")
    return nullcontext()


def check(case: Case, schedule: BlockSchedule, arch: str, dtype: str = "float16", **options: Any) -> None:
    result, error = run(case, schedule, arch=f"rocm/{arch}", **options)
    assert not result.findings, result.report()
    assert error <= BOUND[dtype]


def check_packed(weight: str, kt: int, schedule: BlockSchedule, arch: str, **options: Any) -> None:
    case = graphs.rmsnorm_matmul(4, 512, 128, 64, kt, weight)
    require_quantized(case, schedule, arch=f"rocm/{arch}", **options)


@pytest.mark.costly
@pytest.mark.parametrize(("name", "arch"), list(product(CASES, ARCHITECTURES)))
def test_simulated(name: str, arch: str) -> None:
    make, schedule = CASES[name]
    check(make(), schedule, arch)


@pytest.mark.costly
@pytest.mark.parametrize(("name", "arch"), list(product(CASES, ARCHITECTURES)))
def test_machine_code(name: str, arch: str) -> None:
    make, schedule = CASES[name]
    with expected(name, arch):
        check(make(), schedule, arch, stage="code")


@pytest.mark.costly
@pytest.mark.parametrize(("name", "arch"), list(product(WEIGHTS, ARCHITECTURES)))
def test_packed_weights(name: str, arch: str) -> None:
    for schedule in PACKED:
        with expected(name, arch) if arch == "gfx90a" else nullcontext():
            check_packed(*WEIGHTS[name], schedule, arch)


@pytest.mark.costly
@pytest.mark.parametrize(("name", "arch"), list(product(WEIGHTS, ARCHITECTURES)))
def test_machine_code_of_packed_weights(name: str, arch: str) -> None:
    with expected(name, arch):
        check_packed(*WEIGHTS[name], PACKED[0], arch, stage="code")


@pytest.mark.costly
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bfloat16(arch: str) -> None:
    case = graphs.rmsnorm_matmul(4, 128, 64, 32, 32, dtype="bfloat16")
    check(case, BlockSchedule(2), arch, "bfloat16")
    check(case, BlockSchedule(2), arch, "bfloat16", stage="passed")


@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_waves(order: str) -> None:
    check(graphs.gated_mlp(8, 256, 64, 32, 32), BlockSchedule(2), "gfx942", order=order)


def test_a_packed_gated_product() -> None:
    case = graphs.gated_mlp(3, 512, 64, 64, 128, INT4)
    require_quantized(case, BlockSchedule(2), arch="rocm/gfx942")


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_the_model_ranks_schedules_that_fit(arch: str) -> None:
    device = get_device(f"rocm/{arch}")
    found = ranked(graphs.rmsnorm_matmul(4, 4096, 4096, 64, 64).block, device)
    assert found
    assert all(each.schedule.warps * device.warp <= 256 for each in found)
    assert {each.schedule.stages for each in found} == {2}


RANKED: dict[str, Callable[[], Case]] = {
    "int4": lambda: graphs.rmsnorm_matmul(4, 512, 128, 64, 128, INT4),
    "exponents": lambda: graphs.gated_mlp(32, 256, 128, 64, 64, "mxfp4"),
    "real zeros": lambda: graphs.lora(3, 256, 64, 64, 64, 128, REAL_ZEROS),
    "computed operand": lambda: graphs.doubled_product(4, 512, 64, 64, 128, INT4),
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", RANKED)
def test_whatever_is_ranked_can_be_emitted(name: str, arch: str) -> None:
    block, device = RANKED[name]().block, get_device(f"rocm/{arch}")
    found = ranked(block, device)
    assert bool(found) == (name != "computed operand" and (name, arch) != ("real zeros", "gfx90a"))
    for each in {one.schedule.column_warps: one for one in found}.values():
        emit(block, device, each.schedule, "k")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_products_within_the_loop_are_not_shared_by_columns(arch: str) -> None:
    graph = list(graphs_of("lora", random.Random(0)))[9]
    device = get_device(f"rocm/{arch}")
    for body in (node.body for node in graph.nodes if node.body is not None):
        found = ranked(body, device)
        assert found
        for each in {one.schedule.column_warps: one for one in found}.values():
            emit(body, device, each.schedule, "k")


REFUSED = {
    "threads exceed the 256 of a block": BlockSchedule(8),
    "2 stages": BlockSchedule(2, stages=3),
    "no tensor copies": BlockSchedule(2, copies="tensor"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str) -> None:
    case = graphs.rmsnorm_matmul(4, 512, 64, 32, 32)
    with pytest.raises(ScheduleError, match=message):
        emit(case.block, get_device("rocm/gfx942"), REFUSED[message], "k")


def test_groups_of_several_waves_take_as_many_steps() -> None:
    """A wave cannot wait for some waves of a block only."""
    case, schedule = graphs.gated_mlp(64, 96, 64, 32, 32), BlockSchedule(2, 2)
    with pytest.raises(ScheduleError, match="as many steps each"):
        emit(case.block, get_device("rocm/gfx942"), schedule, "k")
    check(case, replace(schedule, groups=1), "gfx942")


def test_packed_low_rank_updates() -> None:
    case = graphs.lora(3, 512, 64, 64, 64, 128, INT4)
    require_quantized(case, BlockSchedule(), arch="rocm/gfx942")


def test_computed_operands_beside_packed_weights_are_refused() -> None:
    case = graphs.doubled_product(4, 512, 64, 64, 128, INT4)
    with pytest.raises(ScheduleError, match="packed weights are multiplied by loaded tiles"):
        emit(case.block, get_device("rocm/gfx942"), BlockSchedule(), "k")
    result, error = run_quantized(case, BlockSchedule())
    assert not result.findings
    assert error <= BOUND["float16"]
