"""torch's operators on special values as the machine code of AMD GPUs: NaN is where eager torch has it."""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch

from benchmarks import opinfo
from benchmarks.emulated import on_amd

ARCHITECTURES = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
OPERATORS = (
    *("clamp", "maximum", "minimum", "amin", "nn.functional.relu", "softmax"),
    *(
        "nn.functional.hardtanh",
        "lt",
        "le",
        "ge",
        "eq",
        "ne",
        "isnan",
        "nan_to_num",
        "where",
        "sign",
        "heaviside",
    ),
    *("logsumexp", "nn.functional.threshold", "pow", "floor"),
)
"""In which NaN is lost most easily."""

EVERY_DAY = 5
DAY = int(os.environ["LADDER_TEST_DAY"])


def check(name: str, dtype: str, architecture: str, most: int) -> None:
    """Compare samples of an operator with eager torch; its kernels, not torch, must have computed them."""
    tries = opinfo.wanted_operators([name], dtypes=[dtype])
    info = next(info for info, _ in tries if opinfo.title(info) == name)
    with torch.no_grad(), on_amd(f"rocm/{architecture}") as gpu:
        row = opinfo.row_of(info, dtype, most, special=True)
    assert set(row.counts) == {"right"}, row.notes
    assert gpu.launches


@pytest.mark.parametrize("number", range(EVERY_DAY))
def test_operator(number: int) -> None:
    """One on each target, others every day."""
    name = OPERATORS[(DAY * EVERY_DAY + number) % len(OPERATORS)]
    check(name, "float32", ARCHITECTURES[number], 1)


def test_one_number_of_bfloat16() -> None:
    """RDNA4 loads 16 bits into a scalar register."""
    check("maximum", "bfloat16", "gfx1201", 1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "architecture"), list(product(OPERATORS, ARCHITECTURES)))
def test_every_operator(name: str, architecture: str, long_test: None) -> None:
    check(name, "float16", architecture, 4)
