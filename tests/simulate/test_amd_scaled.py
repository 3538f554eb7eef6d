"""Block-scaled products of gfx950: right in simulation and as machine code, no spills, planted bugs found."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from rewriting import Once, remove, rewrite, stored
from test_scaled import error_of, random_matrix
from tvm import tirx

import ladder
from ladder.ir.scaled import ScaledGemm
from ladder.lower.rocm.scaled import emit
from ladder.lower.rocm.toolchain import resources_of
from ladder.runtime.scaled import arguments
from ladder.simulate import simulate_launch
from ladder.simulate.operator import numpy_of
from schedules.scaled_choice import choose
from schedules.wave_scaled import LAYOUTS, WaveScaledSchedule, core_for, predict, schedules
from targets import get_device
from tile_types.errors import DeviceError, ScheduleError

GPU = get_device("rocm/gfx950")
FP4 = ("mxfp4", "mxfp4")
PAIRS = list(product(LAYOUTS, repeat=2))
BOUNDS = {"float32": 1e-5, "bfloat16": 3e-3}
Schedule = WaveScaledSchedule

CASES = {
    "one of each": (1, 1, 1, Schedule(1, 1, 1, 1), "float32", False, "together"),
    "four waves share K": (3, 67, 200, Schedule(1, 1, 4, 2), "float32", False, "random"),
    "K ends within a span": (5, 20, 1090, Schedule(4, 1, 1, 2), "float32", True, "last warps first"),
    "stored as vectors": (37, 132, 650, Schedule(2, 2, 2, 1), "bfloat16", True, "random"),
    "large tiles": (70, 90, 384, Schedule(4, 4, 2, 1), "bfloat16", False, "first warps first"),
    "far ahead": (20, 40, 2600, Schedule(1, 2, 4, 4), "float32", False, "random"),
}
"""M, N, K, schedule, output, bias, order of waves."""


def run(
    case: str,
    change: Callable[[Any], Any] = lambda function: function,
    types: tuple[str, str] = FP4,
    **options: Any,
) -> tuple[Any, float]:
    """Simulate a case; return what was found, and the error."""
    m, n, k, schedule, output, biased, order = CASES[case]
    form = ScaledGemm(n, k, *types, output, biased)
    x, w = random_matrix(form, types[1], m, 1), random_matrix(form, types[0], n, 2)
    dtype = getattr(torch, output)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(3)).to(dtype) if biased else None
    arrays = [
        numpy_of(a) for a in arguments(x.operand, w.operand, bias, torch.full((m, n), torch.nan).to(dtype))
    ]
    function = change(emit(form, GPU, schedule, "scaled"))
    if options.get("stage") != "code":
        options["order"] = order
    result = simulate_launch(function, arrays, target=GPU, **options)
    exact = x.exact @ w.exact.T + (0 if bias is None else bias.double().numpy())
    return result, error_of(arrays[-1].astype(np.float64), exact)


@pytest.mark.parametrize("case", CASES)
def test_simulated(case: str) -> None:
    result, error = run(case)
    assert not result.findings, result.report()
    assert not result.bank_conflicts
    assert error < BOUNDS[CASES[case][4]]


@pytest.mark.parametrize("case", CASES)
def test_machine_code(case: str) -> None:
    result, error = run(case, stage="code")
    assert not result.findings, result.report()
    assert error < BOUNDS[CASES[case][4]]


@pytest.mark.parametrize("stage", ["emitted", "code"])
@pytest.mark.parametrize("case", ["one of each", "K ends within a span", "stored as vectors", "far ahead"])
@pytest.mark.parametrize("types", PAIRS, ids=" x ".join)
def test_pairs_of_types(types: tuple[str, str], case: str, stage: str) -> None:
    if case == "far ahead" and max(LAYOUTS[name].words for name in types) > 4:
        pytest.skip("more registers than there are")
    result, error = run(case, types=types, stage=stage)
    assert not result.findings, result.report()
    assert error < BOUNDS[CASES[case][4]]


WIDTHS = list(product(("mxfp8_e5m2", "mxfp6_e2m3", "mxfp4"), repeat=2))
SCHEDULES = [(types, one) for types in WIDTHS for one in schedules(ScaledGemm(64, 64, *types), GPU)]


@pytest.mark.costly(turns=61)
@pytest.mark.parametrize(("types", "schedule"), SCHEDULES, ids=str)
def test_no_schedule_spills(types: tuple[str, str], schedule: Schedule) -> None:
    form = ScaledGemm(8448, 7168, *types, "bfloat16", True)
    found = resources_of({"scaled": emit(form, GPU, schedule, "scaled")}, GPU)["scaled"]
    assert found["vgpr_spills"] == found["scratch_bytes"] == found["sgpr_spills"] == 0
    assert found["lds_bytes"] <= GPU.shared_per_block


@pytest.mark.parametrize(
    "types", [FP4, ("mxfp4", "mxfp8_e4m3"), ("mxfp6_e2m3", "mxfp6_e3m2")], ids=" x ".join
)
def test_blocks_of_nan_make_their_rows_nan(types: tuple[str, str]) -> None:
    x, w = torch.randn(3, 128), torch.randn(20, 128)
    x[1, 70] = torch.inf
    op = ladder.Matmul(20, 128, *types, target="rocm/gfx950")
    packed = op.pack(ladder.quantize(w, types[0]))
    result = ladder.simulate(op, x, packed)
    assert not result.findings, result.report()
    assert np.isnan(result.y).all(axis=1).tolist() == [False, True, False]


def test_infinite_codes_stay_infinite_where_k_ends_within_a_span() -> None:
    """The codes of x that lanes read again beyond K meet zeros of the weight."""
    form = ScaledGemm(16, 40, "mxfp8_e4m3", "mxfp8_e5m2", "float32")
    x, w = random_matrix(form, "mxfp8_e5m2", 3, 1), random_matrix(form, "mxfp8_e4m3", 16, 2)
    x.operand.codes[1, 39], w.operand.codes[:, 39] = 0x7C, 0x38
    y = torch.zeros(3, 16)
    arrays = [numpy_of(a) for a in arguments(x.operand, w.operand, None, y)]
    result = simulate_launch(emit(form, GPU, Schedule(1, 1, 4, 2), "scaled"), arrays, target=GPU)
    assert not result.findings, result.report()
    assert np.isposinf(arrays[-1][1]).all()
    assert np.isfinite(arrays[-1][[0, 2]]).all()


def _next(index: Any) -> Any:
    return (
        index + 4
        if not isinstance(index, tirx.Ramp)
        else tirx.Ramp(index.base + 4, index.stride, index.lanes)
    )


MUTANTS: dict[str, tuple[str, Callable[[], Once], set[str]]] = {
    "no barrier before sums are added": (
        "four waves share K", lambda: remove("tirx.tvm_storage_sync", 0), {"race", "uninitialised", "wrong"},
    ),
    "sums one run further": (
        "four waves share K",
        lambda: stored("shared", "uint32", index=_next),
        {"out of bounds", "race", "wrong"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_found(name: str) -> None:
    case, change, kinds = MUTANTS[name]

    def changed(function: Any) -> Any:
        mutant = rewrite(function, change())
        assert mutant.script() != function.script()
        return mutant

    result, error = run(case, changed)
    wrong = {"wrong"} if not error < BOUNDS[CASES[case][4]] else set()
    assert (result.kinds() | wrong) & kinds


def test_choices() -> None:
    form = ScaledGemm(8448, 7168, "mxfp4", "mxfp4")
    assert choose(form, GPU, 1).split_k == 4
    assert choose(form, GPU, 4096).tile_m >= 32
    times = [predict(form, GPU, choose(form, GPU, m), m).seconds for m in (1, 64, 4096)]
    assert times == sorted(times)
    read = 8448 * 7168 * (4.25 / 8) / 6.914e12
    assert read < times[0] < 3 * read


def test_what_there_is_not() -> None:
    with pytest.raises(DeviceError, match=r"rocm/gfx942 has no kernel for mxfp4 by mxfp4: use rocm/gfx950"):
        ladder.Matmul(64, 128, "mxfp4", "mxfp4", target="rocm/gfx942").explain()
    with pytest.raises(DeviceError, match="nvfp4"):
        ladder.Matmul(64, 128, "nvfp4", "nvfp4", target="rocm/gfx950").explain()
    with pytest.raises(ScheduleError, match="row_steps=3"):
        Schedule(3)
    with pytest.raises(ScheduleError, match="registers"):
        emit(ScaledGemm(8448, 7168, *FP4), GPU, Schedule(4, 4, 1, 4), "scaled")
    assert core_for(ScaledGemm(8, 8, "mxfp4", "mxfp8_e4m3"), GPU).ops_per_cycle == 8192
    assert core_for(ScaledGemm(8, 8, "mxfp4", "mxfp6_e2m3"), GPU).ops_per_cycle == 16384
