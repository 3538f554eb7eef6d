"""Capture: whole operator graphs of eager PyTorch programs, by monitoring one run (after MagPy).

`capture(function)` gives a callable that records itself: a guard, a graph and a mock for each way
through the program. `ladder.compile` adds a backend that compiles the graphs. May import only what
lies below `ladder.api`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ladder.capture.captured import Captured
from ladder.capture.records import Backend


def capture(function: Callable[..., Any], *, backend: Backend | None = None) -> Captured:
    """Return `function` under capture.

    function: A Python function, method, `torch.nn.Module` or other callable.
    backend: ``backend(graph_module, example_inputs)`` returns a callable that runs a `torch.fx` graph on
        inputs like the examples and returns the same tuple; without it graphs run as they are.
    """
    return Captured(function, backend)


__all__ = ["Captured", "capture"]
