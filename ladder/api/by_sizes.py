"""Graphs of open sizes that no one plan serves: a plan for each set of sizes that comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from ladder.api.aliasing import strides_for

MOST_PLANS = 8
"""Sets of sizes that get plans; calls with others run in torch."""

Key = tuple[Any, ...]
Make = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


class BySizes:
    """Runs a graph by the plan for the sizes of a call.

    module: The graph.
    make: Compiles it for arguments of known sizes.
    instead: What runs it where there are plans enough.
    full: Called once, when that happens for the first time.
    """

    def __init__(
        self, module: torch.fx.GraphModule, make: Make, instead: Callable[..., Any], full: Callable[[], None]
    ) -> None:
        self.module = torch.fx.GraphModule(module, module.graph)
        self.module.meta = {name: held for name, held in module.meta.items() if name != "open"}
        self.make, self.instead, self.full = make, instead, full
        self.plans: dict[Key, Callable[..., Any]] = {}

    def __call__(self, *values: Any) -> Any:
        key = tuple(value.shape if isinstance(value, torch.Tensor) else value for value in values)
        run = self.plans.get(key)
        if run is None:
            if len(self.plans) >= MOST_PLANS:
                return self._without_plan(values)
            run = self.plans[key] = self._plan_for(values)
        return run(*values)

    def _plan_for(self, values: tuple[Any, ...]) -> Callable[..., Any]:
        """Return a plan for the sizes of a call: how results with gaps lie was noted for other sizes."""
        known = self.module.meta.get("aliasing")
        if known is None or all(each is None or each.order is not None for each in known.strides):
            return self.make(self.module, list(values))
        try:
            strides = strides_for(self.instead, values)
        except RuntimeError:  # sizes of results that depend on values
            return self.instead
        module = torch.fx.GraphModule(self.module, self.module.graph)
        module.meta = self.module.meta | {"aliasing": known._replace(strides=strides)}
        return self.make(module, list(values))

    def _without_plan(self, values: tuple[Any, ...]) -> Any:
        self.full()
        self.full = _nothing
        return self.instead(*values)


def _nothing() -> None:
    """Do nothing."""
