"""Weights of several products side by side, so that one kernel reads them as one.

A joined array is a copy: it is made at the first call, and again when a part is another tensor or was
changed in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ladder.runtime.model.program import Source


@dataclass(frozen=True)
class Join:
    """One array: arguments ``parts`` one after the other along ``axis``."""

    parts: tuple[int, ...]
    axis: int


def joins_of(source: Source) -> list[Join]:
    """Return the arrays of a joined source, in the order in which kernels take them.

    Packed words have rows of the weight along their first axis, what goes with them (scales, zero points)
    along the last; a matrix or a vector has one axis for both.
    """
    return [Join(parts, -1 if at else 0) for at, parts in enumerate(zip(*source.joined, strict=True))]


class Joined:
    """The joined arrays of a plan.

    Parameters
    ----------
    joins
        What to make of the arguments of a call.
    """

    def __init__(self, joins: Sequence[Join]) -> None:
        self.joins = tuple(joins)
        self.read = tuple(dict.fromkeys(at for join in self.joins for at in join.parts))
        self.parts: list[torch.Tensor] = []
        self.versions: list[int] = []
        self.arrays: tuple[torch.Tensor, ...] = ()

    def of(self, values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Return the arrays for the arguments of a call; the same tensors while no part changes."""
        parts = [values[at] for at in self.read]
        versions = [_version(part) for part in parts]
        same = len(parts) == len(self.parts) and all(a is b for a, b in zip(parts, self.parts, strict=True))
        if not same or versions != self.versions:
            with torch.no_grad():
                self.arrays = tuple(
                    torch.cat([values[at].detach() for at in join.parts], join.axis) for join in self.joins
                )
            self.parts, self.versions = parts, versions
        return self.arrays


def _version(tensor: torch.Tensor) -> int:
    """Return what counts the changes in place of a tensor; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version
