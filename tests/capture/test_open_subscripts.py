"""Integers that grow from call to call, as subscripts of tensors: open from the third value on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ladder
from ladder.capture import capture


def opened(module: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
    """Run a graph operator by operator, and take numbers as symbols alone, as plans do."""
    return module.forward


opened.dynamic_shapes, opened.numbers = True, False  # type: ignore[attr-defined]

READS = [
    lambda k, p, q: k[p],
    lambda k, p, q: k[..., p],
    lambda k, p, q: k[q, ..., p, None],
    lambda k, p, q: k[p, None, :, q],
    lambda k, p, q: k[p:, q],
    lambda k, p, q: k[p][q][p],
    lambda k, p, q: k[p, 1:q],
    lambda k, p, q: k[k.shape[0] - 1 - p, ::2],
]


def _row(k: Tensor, p: int, q: int) -> None:
    k[:, p] = k[0, 0]


def _number(k: Tensor, p: int, q: int) -> None:
    k[p, q, p] = 7


def _from_itself(k: Tensor, p: int, q: int) -> None:
    k[p, ..., q] = k[q, :, p] * 2


def _added(k: Tensor, p: int, q: int) -> None:
    k[None, p] += 1


@pytest.mark.parametrize("read", READS)
def test_reads_are_recorded_for_any_integer(read: Callable[..., Tensor]) -> None:
    fast = capture(read, backend=opened)
    for p, q in ((2, 3), (4, 5), (5, 2), (7, 7), (3, 6)):
        k = torch.randn(9, 8, 8)
        found, expected = fast(k, p, q), read(k, p, q)
        assert torch.equal(found, expected)
        assert (found.stride(), found.data_ptr()) == (expected.stride(), expected.data_ptr())
    assert len(fast.records) <= 3, fast.explain()


@pytest.mark.parametrize("write", [_row, _number, _from_itself, _added])
def test_writes_are_recorded_for_any_integer(write: Callable[..., None]) -> None:
    def program(k: Tensor, p: int, q: int) -> Tensor:
        write(k, p, q)
        return k * 2

    fast = ladder.compile(program)
    for p, q in ((2, 3), (4, 5), (5, 2), (7, 7), (3, 6)):
        k = torch.randn(9, 8, 8)
        own = k.clone()
        assert torch.equal(fast(own, p, q), program(k, p, q))
        assert torch.equal(own, k)
    assert len(fast.records) <= 3, fast.explain()


def test_negative_ones_and_those_beyond_the_end_are_as_in_eager() -> None:
    def program(k: Tensor, p: int) -> Tensor:
        return k[:, p] * 2

    fast = ladder.compile(program)
    k = torch.randn(4, 6)
    for p in (2, 3, 4, 5, -2, -3, -1, 0, 1):
        torch.testing.assert_close(fast(k, p), program(k, p))
    for p in (6, 9, -7):
        with pytest.raises(IndexError) as expected:
            program(k, p)
        with pytest.raises(IndexError) as found:
            fast(k, p)
        assert str(found.value) == str(expected.value)
    torch.testing.assert_close(fast(k, 3), program(k, 3))
