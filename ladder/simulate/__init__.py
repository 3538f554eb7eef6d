"""The SIMT simulator: executes the emitted TIR of whole kernel launches on the CPU and checks all they do.

``ladder.simulate(op, x, packed)`` is `ladder.simulate.operator.simulate`: the package can be called.
The engine needs numpy only; `nvidia` and `amd` hold what is particular to a machine family.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ladder.simulate.extents import SimulationError
from ladder.simulate.findings import KINDS, Finding
from ladder.simulate.launch import SimulationResult, simulate_launch
from ladder.simulate.translate import UnknownCallError

if TYPE_CHECKING:
    from ladder.simulate.operator import simulate as simulate

__all__ = ["KINDS", "Finding", "SimulationError", "SimulationResult", "UnknownCallError", "simulate_launch"]


class _Callable(ModuleType):
    """The package as the function that it is named after."""

    def __call__(self, *arguments: Any, **options: Any) -> SimulationResult:
        """Simulate an operator; see `ladder.simulate.operator.simulate`."""
        from ladder.simulate.operator import simulate

        return simulate(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
