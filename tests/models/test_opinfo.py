"""A sample of torch's operator database as plans; `benchmarks.opinfo` tries all of it."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch

import ladder
from benchmarks import opinfo
from ladder.runtime.model import build

OPERATORS = (
    *("add", "cat", "clamp", "cumsum", "diff", "index_select", "logsumexp", "mean", "native_layer_norm"),
    *("nn.functional.embedding_bag", "nn.functional.gelu", "nn.functional.max_pool2d", "nonzero", "pow"),
    *("softmax", "sum", "transpose", "uniform", "var_mean", "where"),
)
"""Of every kind that importers treat differently: rows, calls, results of unknown size, random numbers."""

MOST = 4
KERNELS = 8
"""How many operators are run with kernels on one day."""

STRIDE = 101
"""From one of a day to the next in the list; it shares no factor with its length."""

DAY = int(os.environ["LADDER_TEST_DAY"])


@pytest.fixture(scope="module")
def operators() -> dict[str, Any]:
    return {opinfo.title(info): info for info, _ in opinfo.wanted_operators(OPERATORS)}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name: str, operators: dict[str, Any]) -> None:
    with torch.no_grad(), patch.dict(vars(build), {"build_kernels": opinfo.in_torch}):
        row = opinfo.row_of(operators[name], "float32", MOST)
    assert row.counts.get("right", 0) + row.counts.get("refused", 0) == sum(row.counts.values()), row.notes
    assert name == "nonzero" or set(row.counts) == {"right"}


@pytest.mark.parametrize("name", ["nn.functional.interpolate", "logsumexp", "nn.functional.max_pool2d"])
def test_operator_on_special_values(name: str) -> None:
    """NaN, infinities, -0 and extremes are where eager has them."""
    with torch.no_grad(), patch.dict(vars(build), {"build_kernels": opinfo.in_torch}):
        for info, dtype in opinfo.wanted_operators([name]):
            row = opinfo.row_of(info, dtype, MOST, special=True)
            assert set(row.counts) == {"right"}, row.notes


@pytest.mark.parametrize("name", ["linspace", "nn.functional.max_pool2d"])
def test_operator_on_integers(name: str) -> None:
    """Fractions as the ends of integers, and borders that no integer is less than."""
    info = next(info for info, _ in opinfo.wanted_operators([name], "0/1", ["int64"]) if info.name == name)
    with torch.no_grad(), patch.dict(vars(build), {"build_kernels": opinfo.in_torch}):
        row = opinfo.row_of(info, "int64", 64)
    assert set(row.counts) == {"right"}, row.notes


@pytest.mark.parametrize("number", range(KERNELS))
def test_operator_with_kernels(number: int) -> None:
    """Of the whole database, other operators each day: every kernel is built by itself and run."""
    every = opinfo.wanted_operators(())
    info, dtype = every[(DAY * KERNELS + number) * STRIDE % len(every)]
    with torch.no_grad(), opinfo.unseeded():
        row = opinfo.row_of(info, dtype, 2)
    assert row.counts.get("right", 0) + row.counts.get("refused", 0) == sum(row.counts.values()), row.notes


def test_what_torchs_fakes_state_wrongly_runs_in_torch() -> None:
    """On a CPU, means and deviations of this are float16; fake tensors say float32."""
    found = opinfo.wanted_operators(["_native_batch_norm_legit"])
    (info,) = (info for info, name in found if name == "float16")
    with torch.no_grad():
        assert opinfo.row_of(info, "float16", 2).counts == {"right": 2}


def test_a_wrong_result_is_found(operators: dict[str, Any]) -> None:
    (sample,) = opinfo.samples_of(operators["add"], torch.float32, 1)
    with torch.no_grad():
        (wanted,) = opinfo.eager_run([sample])
    assert "error" in opinfo.difference(wanted + 1, wanted)
    assert "dtype" in opinfo.difference(wanted.double(), wanted)
    assert opinfo.difference(wanted * (1 + 1e-7), wanted) == ""


def test_parts_are_all_of_it() -> None:
    whole = opinfo.wanted_operators(["s"])
    parts = [opinfo.wanted_operators(["s"], f"{number}/3") for number in range(3)]
    assert sorted(map(_key, whole)) == sorted(_key(each) for part in parts for each in part)
    assert all(parts)


def _key(each: tuple[Any, str]) -> tuple[str, str]:
    return opinfo.title(each[0]), each[1]


def test_margins_of_nan_count_nothing() -> None:
    """In parts they would be NaN; torch's kernels compare them with 0."""
    x, target = (
        torch.tensor([[float("nan"), 1.0, 2.0], [1.0, 2.0, 3.0]]),
        torch.tensor([[0, 1, -1], [1, 2, -1]]),
    )
    with torch.no_grad(), patch.dict(vars(build), {"build_kernels": opinfo.in_torch}):
        for loss, wanted in (("multi_margin_loss", target[:, 0]), ("multilabel_margin_loss", target)):
            function = getattr(torch.nn.functional, loss)
            fast = ladder.compile(lambda x, function=function, wanted=wanted: function(x, wanted))
            fast(x)
            assert torch.equal(fast(x), function(x, wanted)), loss
