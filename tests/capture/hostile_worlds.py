"""Worlds of nine calls for programs made to be run wrongly."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from capture_world import World, calls, normal

SIZES = (3, 4, 5, 5, 1, 7, 2, 5, 12)


def sizes(function: Callable[..., Any], make: Callable[[int], Any], **more: Any) -> World:
    """Return a world of nine calls with arguments of changing sizes."""
    return calls(function, *(functools.partial(make, size) for size in SIZES), **more)


def nine(function: Callable[..., Any], *makes: Callable[[], Any], **more: Any) -> World:
    return calls(function, *(make for _, make in zip(range(9), itertools.cycle(makes), strict=False)), **more)


def rows(n: int, seed: int = 0) -> torch.Tensor:
    return normal(n, 4, seed=seed)
