"""Graphs of nodes (branches, bodies of loops) as models for the types and shapes that a call shows.

A graph whose operands have no known rank at import runs node by node, or as many stages. What it is given in
a call has all of that, so it becomes a model then: of what is given first, since most programs give the same.
A whole model of several stages, most of which often are for open sizes alone, becomes one likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Model = Callable[..., Any]
"""``(values) -> result``, or a tuple of several."""


class Specialized:
    """A graph as a model for types and shapes that come again.

    names: The values that it is given, in the order in which the model takes them.
    make: Name -> value of a call, to the model; None if it can be none.
    patience: Calls in a row with the same types and shapes until it is made.
    most: Sets of types and shapes that have models; others have none.
    """

    def __init__(
        self,
        names: Sequence[str],
        make: Callable[[Mapping[str, torch.Tensor]], Model | None],
        patience: int,
        most: int = 1,
    ) -> None:
        self.names, self.make, self.patience, self.most = tuple(names), make, patience, most
        self.form: tuple[Any, ...] = ()
        self.calls = 0
        """In a row, with `form`."""
        self.models: dict[tuple[Any, ...], Model | None] = {}

    def of(self, given: Sequence[Any], form: tuple[Any, ...] | None = None) -> Model | None:
        """Return the model for values in order, whose `form_of` may be given; None if there is none."""
        form = form_of(given) if form is None else form
        if form in self.models or len(self.models) >= self.most:
            return self.models.get(form)
        self.calls = self.calls + 1 if form == self.form else 1
        self.form = form
        if self.calls < self.patience:
            return None
        are_tensors = all(isinstance(value, torch.Tensor) for value in given)
        self.models[form] = self.make(dict(zip(self.names, given, strict=True))) if are_tensors else None
        return self.models[form]


def form_of(given: Sequence[Any]) -> tuple[Any, ...]:
    """Return the types and shapes of values."""
    return tuple([(v.dtype, v.shape) if isinstance(v, torch.Tensor) else (type(v),) for v in given])
