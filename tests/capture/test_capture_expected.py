"""Programs with a cache: what the first prompt recorded serves prompts of other lengths and batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ladder.capture import capture
from ladder.capture.records import CALLS_BEFORE_RECORDING

WIDTH, HEADS, STEPS = 8, 3, 4
TABLE = torch.randn(16, HEADS * WIDTH, generator=torch.Generator().manual_seed(0))


class Cache:
    """Grows by what each call adds; `crossed` is made of the source once."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.crossed: Tensor | None = None


def embedded(tokens: Tensor) -> Tensor:
    return TABLE[tokens].view(*tokens.shape, HEADS, WIDTH).transpose(1, 2)


def attended(x: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    scores = (x @ keys.transpose(2, 3)).masked_fill(mask[:, None, None, -keys.shape[2] :] == 0, -1e9)
    return scores.softmax(-1) @ keys


def decoder(tokens: Tensor, mask: Tensor, cache: Cache) -> Tensor:
    x = embedded(tokens).contiguous()
    cache.keys = x if cache.keys is None else torch.cat([cache.keys, x], 2)
    return attended(x, cache.keys, mask).sum(1)


def translator(tokens: Tensor, mask: Tensor, cache: Cache, source: Tensor) -> Tensor:
    x = embedded(tokens).contiguous()
    if cache.crossed is None:
        cache.crossed = source.view(*source.shape[:2], HEADS, WIDTH).transpose(1, 2).contiguous()
    return attended(x, cache.crossed, mask).sum(1)


def prompt(step: Callable[..., Tensor], batch: int, length: int) -> list[Tensor]:
    """Return what a prompt and the steps after it give."""
    drawn = torch.Generator().manual_seed(length)
    tokens = torch.randint(16, (batch, length), generator=drawn)
    mask, cache, found = torch.ones(batch, length, dtype=torch.long), Cache(), []
    for _ in range(STEPS):
        y = step(tokens, mask, cache)
        found.append(y)
        tokens = y[:, -1:, 0].abs().long() % 16
        mask = torch.cat([mask, mask[:, :1]], 1)
    return found


def translation(step: Callable[..., Tensor], batch: int, length: int) -> list[Tensor]:
    """Return what the steps of a translation give."""
    source = torch.randn(batch, length, HEADS * WIDTH, generator=torch.Generator().manual_seed(length))
    mask, cache = torch.ones(batch, length, dtype=torch.long), Cache()
    tokens = torch.zeros(batch, 1, dtype=torch.long)
    return [step(tokens + at, mask, cache, source) for at in range(STEPS)]


@pytest.mark.parametrize(("program", "session"), [(decoder, prompt), (translator, translation)])
def test_later_prompts_record_nothing(
    program: Callable[..., Tensor], session: Callable[..., list[Tensor]]
) -> None:
    fast = capture(program)
    sizes = [(2, 9), (2, 5), (5, 12), (3, 3), (4, 8), (2, 2)]
    recorded = []
    for batch, length in sizes:
        expected, found = session(program, batch, length), session(fast, batch, length)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        recorded.append(fast.calls["recorded"])
    assert recorded[1:] == recorded[:1] * 5
    assert fast.calls["eager"] == 0


@pytest.mark.parametrize(("batch", "length"), [(1, 6), (2, 1), (1, 1), (3, 3), (8, 4), (24, 24)])
def test_first_prompts_of_special_sizes_are_right(batch: int, length: int) -> None:
    fast = capture(decoder)
    for sizes in ((batch, length), (2, 7), (batch, length), (batch, 5)):
        torch.testing.assert_close(prompt(fast, *sizes), prompt(decoder, *sizes), rtol=0, atol=0)
    assert fast.calls["eager"] == 0


def unrolled(tokens: Tensor, cache: Cache) -> Tensor:
    x = embedded(tokens).sum(1)
    return sum((x[:, at] for at in range(tokens.shape[1])), x[:, 0]) if cache.keys is None else x


def test_lengths_that_cannot_be_open_are_recorded_where_they_come_often() -> None:
    fast = capture(unrolled)
    for length in (4, 7, 9, 12, *[7] * (CALLS_BEFORE_RECORDING + 1)):
        tokens = torch.arange(2 * length).view(2, length) % 16
        torch.testing.assert_close(fast(tokens, Cache()), unrolled(tokens, Cache()), rtol=0, atol=0)
    assert fast.calls == {"recorded": 2, "eager": CALLS_BEFORE_RECORDING + 2}


class Prepared:
    """Its first call scales a table and notes that it has; as transformers' rwkv does."""

    def __init__(self) -> None:
        self.scaled = False

    def __call__(self, tokens: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        if not self.scaled:
            self.scaled = True
        return decoder(tokens, mask, cache)


def test_what_a_first_call_sets_is_no_case_that_comes_seldom() -> None:
    """The second prompt, and 31 later ones, ran eagerly: the record of the first began before the flag."""
    fast = capture(program := Prepared())
    for sizes in ((2, 7), (2, 7), (3, 5), (2, 9)):
        torch.testing.assert_close(prompt(fast, *sizes), prompt(decoder, *sizes), rtol=0, atol=0)
    assert program.scaled
    assert fast.calls["eager"] == 0


def test_programs_without_a_cache_keep_their_sizes() -> None:
    fast = capture(lambda tokens: TABLE[tokens].sum(1))
    fast(torch.zeros(2, 5, dtype=torch.long))
    assert not any(point.lifted for point in fast.all_points())
