"""Views whose rows have gaps, as caches of a window are: one record for all lengths."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.capture import capture
from ladder.capture.values.remembered import may_write

WINDOW = 4


def grown(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat([cache, x[:, :, None]], 2)
    return both.sum((2, 3)) + cache.shape[2], both[:, :, -WINDOW:]


def written(x: Tensor, cache: Tensor) -> Tensor:
    cache += 1
    return x + cache.sum(2)


def given_back(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, cache[1:]


def strides_read(x: Tensor, cache: Tensor) -> tuple[Tensor, Any]:
    return x + cache.sum(2), cache.stride()


def viewed(x: Tensor, cache: Tensor) -> Tensor:
    return x + cache.transpose(1, 2).expand(-1, -1, *cache.shape[1::2]).sum(1)


def laid_out(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, bool]:
    return x + (cache * 2).sum(2), cache * 2, cache.is_contiguous()


SHAPES = [(2, 9), (3, 7), (3, 12), (2, 6), (5, 8), (4, 4), (2, 9)]


def caches(batch: int, length: int) -> Tensor:
    """Return a view of the last entries of a longer tensor, as a cache with a window keeps."""
    drawn = torch.Generator().manual_seed(batch * length)
    return torch.randn(batch, 2, length, 3, generator=drawn)[:, :, -WINDOW:]


@pytest.mark.parametrize("program", [grown, written, given_back, strides_read, viewed, laid_out])
def test_views_with_gaps(program: Callable[..., Any]) -> None:
    fast = capture(program)
    for batch, length in SHAPES:
        x = torch.randn(batch, 2, 3)
        mine, theirs = caches(batch, length), caches(batch, length)
        found, expected = fast(x, mine), program(x, theirs)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert torch.equal(mine, theirs)
        pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
        for left, right in pairs:
            if isinstance(right, Tensor):
                assert left.stride() == right.stride()
                same = (theirs.untyped_storage(), right.untyped_storage())
                assert (left.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()) is (
                    same[0].data_ptr() == same[1].data_ptr()
                )
    assert fast.calls["eager"] == 0


def test_a_cache_with_a_window_has_one_record() -> None:
    fast = capture(grown)
    for batch, length in SHAPES:
        cache = caches(batch, length)
        for step in range(3):
            x = torch.full((batch, 2, 3), float(step))
            found, expected = fast(x, cache), grown(x, cache)
            assert all(map(torch.equal, found, expected))
            cache = found[1]
    assert len(fast.records) <= 3, fast.explain()


def test_strides_alone_stay_open() -> None:
    fast = capture(grown)
    for length in (9, 7, 12, 6, 8):
        cache, x = caches(3, length), torch.ones(3, 2, 3)
        assert all(map(torch.equal, fast(x, cache), grown(x, cache)))
    assert len(fast.records) == 2, fast.explain()


def test_a_name_like_a_keyword_is_no_operator_in_place() -> None:
    assert not any(may_write(each, {}) for each in (operator.and_, operator.or_, operator.add))
    assert all(may_write(each, {}) for each in (operator.iand, torch.Tensor.add_, torch.relu_))
