"""Experts on AMD GPUs: both layouts of tokens, experts without any, more experts than a wave has lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rewriting import Once, rewrite, stored

import ladder
from ladder.lower import build
from ladder.lower.build import emit
from ladder.runtime.compile import ANY_M
from ladder.runtime.experts import host_ranges
from ladder.runtime.tokens import quantize_tokens
from schedules.schedule import GpuSchedule, Plan

N, K, GROUP = 70, 200, 64

DOT = GpuSchedule("dot", 2, 64, 64, 2, 4, 2, placement="accumulator", warp_rows=32)
MFMA = GpuSchedule("mfma", 16, 64, 64, 2, 4, 2, placement="accumulator")
WIDE = GpuSchedule("mfma", 32, 64, 64, 2, 4, placement="accumulator")

GROUPS = GpuSchedule("mfma_groups", 1, 64, 64, 2, 4, 2, placement="accumulator", warp_rows=32)

OFFSETS = (5, [1, 4, 4, 9, 43, 46], 47)
"""Experts, ranges of their tokens, and rows of x: rows of nobody lie at both ends."""

COUNTS = (4, [5, 0, 40, 17], 40)
MANY = (70, [0, 0, *range(69)], 70)

CASES = {
    "offsets": ("gfx942", "int4", "float16", OFFSETS, MFMA),
    "offsets of few tokens": ("gfx90a", "nf4", "float16", OFFSETS, DOT),
    "wide tiles of bfloat16": ("gfx942", "int3", "bfloat16", OFFSETS, WIDE),
    "counts": ("gfx942", "int4", "int8", COUNTS, WIDE),
    "counts of fp8": ("gfx942", "fp8_e4m3", "fp8_e4m3", COUNTS, MFMA),
    "groups in columns": ("gfx950", "int4", "float16", OFFSETS, GROUPS),
    "more experts than lanes": ("gfx942", "int4", "float16", MANY, DOT),
    "gfx950": ("gfx950", "mxfp4", "float16", OFFSETS, WIDE),
    "gfx1100": ("gfx1100", "int4", "float16", OFFSETS, replace(MFMA, pipeline="wmma")),
    "more experts than lanes of gfx1100": (
        "gfx1100",
        "nf4",
        "bfloat16",
        MANY,
        replace(DOT, pipeline="dot32"),
    ),
    "counts of gfx1201": ("gfx1201", "int4", "int8", COUNTS, replace(WIDE, pipeline="wmma_split")),
}

BOUNDS = {"float16": 5e-4, "bfloat16": 3e-3, "int8": 1e-5, "fp8_e4m3": 2e-3}


def simulated(name: str) -> tuple[Any, torch.Tensor]:
    """Return the simulation of a case, and the exact results: NaN in rows of nobody."""
    arch, weight, activation, (count, ranges, rows), schedule = CASES[name]
    torch.manual_seed(3)
    masked, narrow = len(ranges) == count, activation in ("int8", "fp8_e4m3")
    group = 32 if weight == "mxfp4" else GROUP
    op = ladder.GroupedMatmul(
        count, N, K, weight, activation, masked=masked, output="float32", bias=True,
        group_size=None if weight == "mxfp4" else group,
        target=f"rocm/{arch}", plan=Plan(((ANY_M, schedule),)),
    )  # fmt: skip
    options = {} if weight == "mxfp4" else {"group_size": group}
    weights = [ladder.quantize(torch.randn(N, K), weight, **options) for _ in range(count)]
    bias = torch.randn(count, N)
    x = torch.randn(*((count, rows) if masked else (rows,)), K)
    x, scale = quantize_tokens(x, activation) if narrow else (x.to(getattr(torch, activation)), None)
    given = torch.tensor(ranges, dtype=torch.int32)
    flat = x.reshape(-1, K).double() * (1 if scale is None else scale.reshape(-1, 1).double())
    exact = torch.full((len(flat), N), torch.nan, dtype=torch.float64)
    for expert, start, stop in host_ranges(op.gemm, given, len(flat)):
        matrix = torch.as_tensor(weights[expert].dequantize("float64"))
        exact[start:stop] = flat[start:stop] @ matrix.T + bias[expert].double()
    result = ladder.simulate(op, x, op.pack(weights), bias, scale, ranges=given, expected=exact)
    return result, exact


@pytest.mark.parametrize("name", CASES)
def test_experts(name: str) -> None:
    result, exact = simulated(name)
    assert not result.findings, result.report()
    assert not result.bank_conflicts
    owned = exact.isfinite().numpy()
    assert owned.any()
    assert result.relative_error <= BOUNDS[CASES[name][2]]
    assert np.isfinite(result.y[owned]).all()


def _further(scope: str, dtype: str) -> Callable[[Any], Any]:
    """Return a change of loads from global memory: the first index is one more."""

    def apply(e: Any) -> Any:
        if type(e).__name__ != "TensorLoad" or (e.source.scope(), str(e.source.dtype)) != (scope, dtype):
            return None
        return e.source.vload([e.indices[0] + 1, *e.indices[1:]])

    return apply


def _without_guard(which: int) -> Once:
    return Once(
        lambda s: type(s).__name__ == "IfThenElse" and s.else_case is None, lambda s: s.then_case, which
    )


MUTANTS: dict[str, tuple[Callable[[], Once], set[str]]] = {
    "weights of the next expert": (
        lambda: stored("local", "uint32", value=_further("global", "uint32")),
        {"wrong values", "out of bounds"},
    ),
    "tokens of the next expert": (
        lambda: stored("local", "int32", value=_further("global", "int32")),
        {"wrong values", "out of bounds"},
    ),
    "neighbours counted twice": (lambda: _without_guard(0), {"out of bounds", "race", "wrong values"}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, kinds = MUTANTS[name]

    def changed(*arguments: Any) -> Any:
        function = emit(*arguments)
        mutant = rewrite(function, change())
        assert mutant.script() != function.script(), "the mutation changed nothing"
        return mutant

    monkeypatch.setattr(build, "emit", changed)
    assert simulated("offsets")[0].kinds() & kinds
