"""Memory that the results of a plan share: as the program's own would, whatever the plan does inside.

Plans compute equal expressions once, drop copies and write into copies of what a program writes in place.
A caller may write into what it gets, so results must share memory, with each other and with arguments,
just where the program's do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ladder.capture.tensors import Aliasing, aliasing_of, flat


def expected_aliasing(module: torch.fx.GraphModule, examples: list[Any]) -> Aliasing:
    """Return which results of a graph share memory: as capture saw it, or by a run on fakes."""
    known: Aliasing | None = module.meta.get("aliasing")
    if known is not None:
        return known
    mode, fakes = without_values(examples)
    before = [value._version for value in fakes if isinstance(value, torch.Tensor)]
    with mode:
        results = module.forward(*fakes)
    after = [value._version for value in fakes if isinstance(value, torch.Tensor)]
    return aliasing_of(fakes, results, writes=before != after)


def without_values(examples: list[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """Return fakes of examples, those that are fakes as they are, and the mode under which they compute."""
    given = (value.fake_mode for value in examples if isinstance(value, FakeTensor))
    mode = next(given, None) or detect_fake_mode(examples) or FakeTensorMode()
    real = (torch.Tensor, torch.nn.Parameter)
    return mode, [mode.from_tensor(value) if type(value) in real else value for value in examples]


def _viewed(value: torch.Tensor) -> torch.Tensor:
    return value.view_as(value)


class Separated:
    """Runs an executable; what its first run shows to share memory wrongly is mended in every run.

    Parameters
    ----------
    executable
        What runs the graph.
    instead
        What runs it operator by operator, where results fail to share memory that they should.
    expected
        What shares memory in the program; nothing is written there if results are to share memory.
    """

    def __init__(
        self, executable: Callable[..., Any], instead: Callable[..., Any], expected: Aliasing
    ) -> None:
        self.run = executable
        self.instead = instead
        self.expected = expected
        self.changes: dict[int, Callable[[torch.Tensor], torch.Tensor]] | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Run."""
        results = self.run(*inputs)
        if self.changes is None:
            return self._first(inputs, results)
        return self._mended(results) if self.changes else results

    def _first(self, inputs: tuple[Any, ...], results: Any) -> Any:
        found, expected, start = aliasing_of(inputs, results), self.expected, len(inputs)
        self.changes = {}
        for at in range(start, len(found.memory)):
            if expected.memory[at] != expected.memory[found.memory[at]]:
                self.changes[at - start] = torch.clone
            elif expected.objects[at] != expected.objects[found.objects[at]]:
                self.changes[at - start] = _viewed
        mended = self._mended(results)
        if aliasing_of(inputs, mended)[:2] != expected[:2]:
            self.run, self.changes = self.instead, {}
            return self.instead(*inputs)
        return mended

    def _mended(self, results: Any) -> Any:
        changes = self.changes or {}
        numbers = iter(range(len(flat(results))))

        def mended(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return type(value)(map(mended, value))
            change = changes.get(next(numbers))
            return value if change is None else change(value)

        return mended(results)
