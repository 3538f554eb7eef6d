"""Numbers that the values of a graph are taken to hold, and compared with when it has run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ladder.capture.values.kinds import has_same_numbers

MOST_COUNTS = 8
"""How often what is assumed of the sizes of a tensor may be wrong: few programs make them matter often."""


class Assumption(NamedTuple):
    """A number that a value holds, by the instruction that read it; checked when the graph has run.

    `most`: how often it may be another before it is assumed no more.
    """

    var: str
    number: Any
    here: Any
    most: int = 3


class Place(Protocol):
    """Where a segment begins; it is notified of assumptions that fail."""

    def note_surprise(self, assumed: Assumed, met: Assumption) -> None:
        """Note that a number differs from what a record assumes."""


class Assumed:
    """What a record assumes of numbers that its graph gives."""

    def __init__(self, point: Place, numbers: Sequence[Assumption]) -> None:
        self.point = point
        self.numbers = numbers

    def failed(self) -> None:
        """Note that the graph raised: some number was another, the first for all that is known."""
        self.point.note_surprise(self, self.numbers[0])

    def holds(self, *values: Any) -> bool:
        """Compare tensors, or numbers; what does not hold too often is assumed no more."""
        for value, assumed in zip(values, self.numbers, strict=True):
            if not has_same_numbers(_read(value, type(assumed.number)), assumed.number):
                self.point.note_surprise(self, assumed)
                return False
        return True


def _read(value: Any, kind: type) -> Any:
    """Return a number of a graph, or of a tensor, as a program read it: as one of a type, or a list."""
    if not isinstance(value, torch.Tensor):
        return value
    if kind is list:
        return value.tolist()
    try:
        return kind(value.item())
    except (ValueError, OverflowError):  # no integer
        return None
