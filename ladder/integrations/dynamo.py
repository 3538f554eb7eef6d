"""``torch.compile(model, backend="ladder")``: torch finds it by the entry point in ``pyproject.toml``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.fx

from ladder.api.model import Compiler

compiler = Compiler()
"""What compiles every graph; `Compiler.built` and `Compiler.refused` say what became of each."""


def backend(module: torch.fx.GraphModule, examples: list[Any], **_: Any) -> Callable[..., Any]:
    """Compile a graph that torch's own capture made; see `ladder.compile` for ours."""
    return compiler(module, examples)
