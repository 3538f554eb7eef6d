"""Splitting x into digits: its error bound, what is not finite, several chunks of K."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from problems import NUMPY, Problem, SimulatedKernel

from ladder.ir.gemm import Gemm
from ladder.lower.build import emit
from ladder.lower.cuda import digit_geometry
from ladder.lower.gpu.proven import packed_layout
from schedules.legal import is_legal
from schedules.schedule import GpuSchedule
from targets import get_device
from tile_types import get_type
from tile_types.errors import ScheduleError

H200 = get_device("cuda/sm_90a")
SCHEDULE = GpuSchedule("digits", 2, stages=2, warps=4, split_k=2, placement="accumulator")
INT2 = Gemm(64, 512, "int2", group_size=128, scale=True, output="float32")

PERIOD = 128
EXPONENTS = {"int1": 6, "int2": 4, "int4": 0}


def kernel(gemm: Gemm) -> SimulatedKernel:
    assert is_legal(gemm, H200, SCHEDULE)
    return SimulatedKernel(emit(gemm, H200, SCHEDULE, "simulated"))


def outputs(gemm: Gemm, problem: Problem, compiled: SimulatedKernel) -> np.ndarray:
    y = np.full((problem.m, gemm.n), 7.0, NUMPY[gemm.output])
    compiled(*problem.arrays, y)
    return y.astype(np.float64)


def set_x(problem: Problem, x: np.ndarray) -> None:
    problem.x = x.astype(problem.x.dtype)
    problem.arrays[0][:, : x.shape[1]] = problem.x


def decoded(gemm: Gemm, problem: Problem) -> np.ndarray:
    """Return the weights without scales."""
    ttype = get_type(gemm.weight)
    words = torch.from_numpy(problem.arrays[1].reshape(-1).view(np.int32))
    return ttype.values()[packed_layout(ttype, gemm.activation).unpack(words, gemm.n, gemm.k).numpy()]


@pytest.mark.costly
@pytest.mark.parametrize("weight", EXPONENTS)
@pytest.mark.parametrize("activation", ["float16", "bfloat16"])
def test_elements_are_as_exact_as_stated(weight: str, activation: str) -> None:
    gemm = replace(INT2, weight=weight, activation=activation, k=PERIOD, group_size=PERIOD, scale=False)
    problem = Problem(gemm, 2)
    problem.arrays[2][:] = 1.0
    rng = np.random.default_rng(3)
    x = np.stack([rng.normal(size=gemm.k) * 2.0 ** rng.integers(-14, -8, gemm.k), np.zeros(gemm.k)])
    x[1] = 2.0 ** rng.integers(-24, -12, gemm.k)
    x[:, 17] = 1.5  # the period's largest
    set_x(problem, x)
    exact, weights = problem.x.astype(np.float64), decoded(gemm, problem)
    errors = np.abs(outputs(gemm, problem, kernel(gemm)) - exact @ weights.T)
    values = np.abs(weights)
    split = values.sum(axis=1) * 2.0 ** (1 - 31 + EXPONENTS[weight])
    assert (errors <= split + 2.0**-22 * np.abs(exact) @ values.T).all()


@pytest.mark.costly
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_shows(value: float) -> None:
    problem = Problem(INT2, 2)
    x = problem.x.astype(np.float64)
    x[1, 300] = value
    set_x(problem, x)
    y = outputs(INT2, problem, kernel(INT2))
    assert np.isfinite(y[0]).all()
    assert not np.isfinite(y[1]).any()


def test_zero_and_tiny_rows() -> None:
    problem = Problem(INT2, 2)
    x = np.zeros((2, INT2.k))
    x[1] = 2.0**-24 * np.random.default_rng(1).integers(-3, 4, INT2.k)  # subnormals of float16
    set_x(problem, x)
    y = outputs(INT2, problem, kernel(INT2))
    assert not y[0].any()
    assert y[1].any()


def test_x_passes_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digit_geometry, "DIGIT_CHUNK_TILES", 4)
    for fields in (INT2.__dict__, {**INT2.__dict__, "activation": "int8", "scale": False}):
        gemm = Gemm(**{**fields, "k": 900, "group_size": 128 if fields["scale"] else 900})
        compiled = kernel(gemm)
        assert Problem(gemm, 2).run(compiled) <= 1e-6
        assert Problem(gemm, 2).run(compiled, reverse=True) <= 1e-6


@pytest.mark.parametrize(
    "change",
    [
        {"weight": "nf4"},
        {"weight": "int3"},
        {"weight": "int8"},
        {"zero": "integer"},
        {"group_size": 32},
        {"activation": "fp8_e4m3"},
        {"weight": "int1", "activation": "int8"},
    ],
)
def test_what_it_cannot_do_is_not_legal(change: dict[str, object]) -> None:
    assert is_legal(INT2, H200, SCHEDULE)
    assert not is_legal(replace(INT2, **change), H200, SCHEDULE)


def test_codes_that_are_not_evenly_spaced_are_refused() -> None:
    with pytest.raises(ScheduleError, match="multiplied where they are"):
        emit(replace(INT2, weight="fp4_e2m1"), H200, SCHEDULE, "k")
