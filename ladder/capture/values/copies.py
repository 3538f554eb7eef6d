"""Views of the dense copies that a graph takes of inputs that lie with gaps.

Whether ``reshape`` gives a view depends on how its operand lies: of an input with gaps it may be a copy, and
of the dense copy that the graph takes in its place a view. What is written into that one would be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ladder.capture.values.aliasing import flat, storage_of
from ladder.capture.values.kinds import is_a
from ladder.capture.values.monitor import Monitor
from ladder.capture.values.remembered import tensors_in
from ladder.capture.values.shapes import Shapes
from ladder.interrupts import pass_on


class Copies:
    """Follows what would share memory with inputs if these lay densely.

    ``views``: the fakes of such inputs and of views of them, by the tensors that they stand for.
    ``written``: whether one of them is. ``same``: whether a result would be its operand itself.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.views: dict[int, torch.Tensor] = {}
        self.kept: list[torch.Tensor] = []
        self.written = self.same = False

    def clear(self) -> None:
        self.views, self.kept = {}, []
        self.written = self.same = False

    def __bool__(self) -> bool:
        return bool(self.views)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.views

    def add(self, tensor: torch.Tensor) -> None:
        self._note(tensor, self._dense(tensor))

    def follow(
        self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any, monitor: Monitor
    ) -> None:
        """Note what an operator wrote, or which of its results are views.

        What cannot be run on fakes counts as written.
        """
        given = [tensor for tensor in tensors_in((args, kwargs)) if tensor in self]
        if not given:
            return
        if monitor.mutated:
            self.written |= any(storage_of(tensor) in monitor.mutated for tensor in given)
            return
        try:
            found = self.shapes.run_once(function, self._faked(args), self._faked(kwargs))
        except Exception as error:  # what an operator may raise for fakes is not documented
            pass_on(error)
            self.written = True
            return
        known = [*self.views.values()]
        memory = {*map(storage_of, known)}
        for real, fake in zip(flat(result), flat(found), strict=True):
            if is_a(real, torch.Tensor) and storage_of(fake) in memory:
                self.same |= real not in self and any(fake is view for view in known)
                self._note(real, fake)

    def _note(self, tensor: torch.Tensor, view: torch.Tensor) -> None:
        self.views[id(tensor)] = view
        self.kept.append(tensor)

    def _dense(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.shapes.fakes_mode():
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def _faked(self, value: Any) -> Any:
        if is_a(value, torch.Tensor):
            known = self.views.get(id(value))
            return self.shapes.closed_fake(value) if known is None else known
        if is_a(value, dict):
            return {key: self._faked(item) for key, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(map(self._faked, value))
        return value
