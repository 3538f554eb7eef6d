"""`benchmarks.blackwell --simulate` executes the schedule of each product, and fails where one is wrong."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from benchmarks import blackwell
from benchmarks.spills import Outcome
from ladder.lower.cuda.toolchain import load_compiler
from schedules.scaled_choice import choose
from targets import get_device

TARGET = "cuda/sm_100a"


def test_block_scaled_schedules_are_simulated() -> None:
    load_compiler()
    form = blackwell.ScaledGemm(8192, 8192, "nvfp4", "nvfp4")
    schedule = choose(form, get_device(TARGET), 1)
    found = blackwell.simulated_scaled(TARGET, "nvfp4", schedule, 1)
    assert found["findings"] == ()
    assert found["relative_error"] < 1e-6
    assert found["blocks"] > 1


@pytest.mark.parametrize("weight", ["mxfp4", "nvfp4"])
def test_products_of_block_types_are_simulated_with_scales_of_their_own_kind(weight: str) -> None:
    load_compiler()
    gemm = blackwell.gemm_for(8192, 8192, weight, "bfloat16", token_scale=False)
    best = next(iter(blackwell.rank(gemm, get_device(TARGET), 1)))
    found = blackwell.simulated(TARGET, weight, gemm, best.schedule, 1)
    assert found["findings"] == ()
    assert found["relative_error"] < 3e-3


@pytest.mark.parametrize(("findings", "spilled"), [((), 0), (("race",), 0), ((), 8)])
def test_what_is_wrong_or_spills_is_an_error(
    findings: tuple[str, ...],
    spilled: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[Any] = []

    def simulated(*given: Any) -> dict[str, Any]:
        asked.append(given)
        return {"findings": findings}

    monkeypatch.setattr(blackwell, "compiled", lambda kernel: Outcome(kernel, "", 40, spilled))
    monkeypatch.setattr(blackwell, "simulated", simulated)
    monkeypatch.setattr(blackwell, "SHAPES", ((4096, 4096),))
    monkeypatch.setattr(sys, "argv", ["blackwell", "--only", "int4", "--simulate"])
    blackwell.code_of.cache_clear()
    with pytest.raises(SystemExit) as ended:
        blackwell.main()
    blackwell.code_of.cache_clear()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert len(rows) == len(asked) == len(blackwell.TOKENS)
    assert bool(ended.value.code) == bool(findings or spilled)
