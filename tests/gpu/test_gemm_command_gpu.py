"""What ``ladder gemm`` compiles, checks and times on the GPU that is here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ladder.cli.gemm import run_gemm
from ladder.cli.problem import Problem
from ladder.runtime.compile import target_of

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

PROBLEMS = {
    "one row": Problem(n=256, k=512, bias=True),
    "one result": Problem(n=1, k=256),
    "int8": Problem(activation="int8", m=16, n=256, k=512),
    "table": Problem("nf4", group_size=64, m=64, n=256, k=512),
    "no rows": Problem(m=0, n=256, k=512),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_product_is_checked_and_timed(name: str) -> None:
    problem = replace(PROBLEMS[name], target=target_of(torch.device("cuda")))
    report = run_gemm(problem, simulated=False)
    assert report.passed
    assert report.relative_error <= report.tolerance
    assert (report.time_us is not None) == bool(problem.m)
