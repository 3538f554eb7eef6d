"""Products of models have one schedule each where a module of tests asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def one_schedule(kernels_of_the_run: Path) -> Iterator[None]:
    """Build one kernel for a product, whatever M; tests/numeric/test_cpu_gemm.py goes through schedules."""
    from one_schedule import plans_of_one_schedule

    with plans_of_one_schedule(kernels_of_the_run / "one schedule"):
        yield
