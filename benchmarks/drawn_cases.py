"""Chains that nobody tuned: how their programs say what they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

bf, h = torch.bfloat16, torch.float16


class Argument(NamedTuple):
    """What is drawn for a program.

    shape, dtype: Of the tensor.
    scale: Of normal numbers; the bound of whole ones; the share of truths.
    positive: Whether numbers lie evenly between 0 and `scale` instead.
    last: Whether it is an image whose channels are last in memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: float = 1.0
    positive: bool = False
    last: bool = False

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Return such a tensor on the GPU."""
        options: dict[str, Any] = {"device": "cuda", "generator": generator}
        if self.dtype is torch.bool:
            return torch.rand(self.shape, **options) < self.scale
        if not self.dtype.is_floating_point:
            return torch.randint(0, int(self.scale), self.shape, dtype=self.dtype, **options)
        draw = torch.rand if self.positive else torch.randn
        drawn = (draw(self.shape, **options) * self.scale).to(self.dtype)
        return drawn.to(memory_format=torch.channels_last) if self.last else drawn


CASES: dict[str, tuple[Callable[..., Any], tuple[Argument, ...]]] = {}
"""Name -> (program, what it takes)."""


def f(*shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> Argument:
    """Return an argument of floats; `options` are fields of `Argument`."""
    return Argument(shape, dtype, **options)


def i(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Argument:
    """Return an argument of whole numbers below a bound."""
    return Argument(shape, dtype, high)


def m(share: float, *shape: int) -> Argument:
    """Return an argument of truth values."""
    return Argument(shape, torch.bool, share)


def case(name: str, *arguments: Argument) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a program into `CASES`."""

    def entered(function: Callable[..., Any]) -> Callable[..., Any]:
        CASES[name] = (function, arguments)
        return function

    return entered
