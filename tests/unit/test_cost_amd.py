"""The model of AMD's kernels: clocks counted by hand, and what it predicts for the bars of the project."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ladder.api.problem import gemm_for
from ladder.ir.gemm import Gemm
from schedules.cost_amd import block_clocks, predict_amd, stage_clocks, stages_of
from schedules.footprint import resources
from schedules.policy import rank
from schedules.schedule import GpuSchedule
from schedules.waves import Division, division, divisions, tile_rows
from targets import TileDevice, get_device

MI355X, MI300X, MI250 = (get_device(f"rocm/{arch}") for arch in ("gfx950", "gfx942", "gfx90a"))
SQUARE = Gemm(8192, 8192, "float16", scale=False)
TILE = GpuSchedule("mfma", 256, 128, 64, 2, 4)


def utilisation(gemm: Gemm, device: TileDevice, schedule: GpuSchedule, m: int, resident: int) -> float:
    """Return the share of clocks in which the matrix cores work for results, were memory no limit.

    The rest: other units, latency, barriers, starts of blocks, tiles beyond N and M, the last round.
    """
    rounds = -(-(-(-m // schedule.tile_m) * -(-gemm.n // tile_rows(schedule))) // device.units)
    stage, count = stage_clocks(gemm, device, schedule), stages_of(gemm, schedule)
    clocks, _ = block_clocks(device, stage, count, rounds, resident, schedule.warps)
    core = device.core_for(gemm.activation, schedule.pipeline)
    return 2.0 * m * gemm.n * gemm.k / (core.ops_per_cycle * device.units) / clocks


def test_a_stage_takes_the_clocks_that_the_isa_states() -> None:
    # 256 x 128 x 64 are 16 * 8 * 4 products of 16x16x16 in four passes of four clocks, on four SIMDs.
    assert stage_clocks(SQUARE, MI300X, TILE).matrix == 16 * 8 * 4 * 16 / 4
    assert stage_clocks(SQUARE, MI250, TILE).matrix == 16 * 8 * 4 * 32 / 4
    # x is 256 tokens of 128 bytes, written once and read by each of two waves along the rows.
    assert division(TILE) == Division(row_waves=2, m_waves=2)
    assert stage_clocks(SQUARE, MI300X, TILE).lds == 3 * 256 * 128 / 128


def test_idle_simds_count() -> None:
    lone = replace(TILE, tile_m=16, tile_n=64, warps=1)
    four = replace(TILE, tile_m=16, tile_n=256, warps=4)
    assert stage_clocks(SQUARE, MI300X, lone).matrix == stage_clocks(SQUARE, MI300X, four).matrix


@pytest.mark.parametrize("weight", ["float16", "int4"])
@pytest.mark.parametrize("device", [MI250, MI300X], ids=lambda device: device.arch)
def test_large_tiles_keep_the_matrix_cores_busy(weight: str, device: TileDevice) -> None:
    gemm = SQUARE if weight == "float16" else Gemm(8192, 8192, weight, group_size=128)
    two = replace(TILE, tile_m=128)
    assert resources(gemm, device, two).blocks_per_unit == 2
    assert utilisation(gemm, device, two, 8192, 2) >= 0.8
    assert utilisation(gemm, device, two, 8192, 1) < utilisation(gemm, device, two, 8192, 2) <= 1.0
    small = replace(TILE, tile_m=64, tile_n=64)
    assert utilisation(gemm, device, small, 8192, 1) < utilisation(gemm, device, TILE, 8192, 1)


def test_few_tokens_are_bound_by_memory_and_large_products_by_the_cores() -> None:
    few = replace(TILE, tile_m=16, tile_n=64, split_k=2)
    gemm = Gemm(8192, 28672, "int4", group_size=128)
    one, many = predict_amd(gemm, MI300X, few, 1, 8), predict_amd(gemm, MI300X, TILE, 8192, 1)
    assert one.bound == "latency"  # 128 blocks for 304 units: each waits for its own stages
    wide = predict_amd(replace(gemm, n=8 * 8192), MI300X, few, 1, 8)
    assert wide.bound in ("dram", "l1")
    assert many.bound == "core"
    assert one.seconds > one.bytes / MI300X.layer("dram").bandwidth


def test_waves_that_do_not_divide_a_tile_are_refused() -> None:
    assert not divisions(replace(TILE, tile_m=16, tile_n=64, warps=4))
    with pytest.raises(ValueError, match="4 waves do not divide"):
        division(replace(TILE, tile_m=16, tile_n=64, warps=4))


@pytest.mark.parametrize("device", [MI250, MI300X], ids=lambda device: device.arch)
def test_the_policy_keeps_matrix_cores_busy(device: TileDevice) -> None:
    """80 % of the matrix cores at 8192^3 in fp16."""
    chosen = rank(SQUARE, device, 8192)[0].schedule
    blocks = resources(SQUARE, device, chosen).blocks_per_unit
    assert utilisation(SQUARE, device, chosen, 8192, blocks) >= 0.8


@pytest.mark.parametrize("device", [MI250, MI300X, MI355X], ids=lambda device: device.arch)
@pytest.mark.parametrize(("weight", "group"), [("int4", 128), ("float16", None)])
def test_one_row_takes_what_reads_sustain(device: TileDevice, weight: str, group: int | None) -> None:
    """92 % of what kernels that only read get from memory, as instructions are counted in machine code.

    That is 85 % of the peak on an MI210 and 79 % on an MI300X (`targets.amd`): no kernel reaches it itself.
    """
    dram = device.layer("dram")
    for n, k in ((28672, 8192), (8192, 28672)):
        cost = rank(gemm_for(n, k, weight, "float16", group_size=group), device, 1)[0].cost
        assert cost.bytes / cost.seconds >= 0.92 * dram.sustained_bandwidth
