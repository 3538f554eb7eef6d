"""Registration of operators ``ladder::<name>`` with torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_Library: Any = torch.library.Library  # its methods have no types
library = _Library("ladder", "DEF")

READ_ONLY: dict[Any, str] = {}
"""Operators -> why programs must not write their results, which nobody would read again."""


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    places: Sequence[str] = ("CPU", "CUDA"),
    tags: Sequence[torch.Tag] = (torch.Tag.pt2_compliant_tag,),
) -> Any:
    """Register an operator and return it.

    schema: Its name, arguments and results.
    kernel, fake: Compute the results; tell their shapes and types.
    places: Dispatch keys of the kernel.
    """
    library.define(schema, tags=tags)
    name = schema.partition("(")[0]
    for place in places:
        library.impl(name, kernel, place)
    torch.library.register_fake(f"ladder::{name}", fake, lib=library)
    return getattr(torch.ops.ladder, name).default
