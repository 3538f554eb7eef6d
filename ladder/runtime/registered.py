"""Registration of operators ``ladder::<name>`` with torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch

_Library: Any = torch.library.Library  # its methods have no types
library = _Library("ladder", "DEF")


HOMES = {
    "dequantize": "ladder.api.stored_weight",
    "grouped_gradients": "ladder.runtime.experts",
    "grouped_matmul": "ladder.runtime.experts",
    "grouped_product": "ladder.runtime.stored_experts",
    "named_product": "ladder.runtime.stored_experts",
}
"""Operator -> the module that registers it, which loading a file does not import without need."""


def import_home(target: str) -> bool:
    """Import what registers an operator ``ladder.<name>.<overload>``; return whether that is known."""
    namespace, _, rest = target.partition(".")
    home = HOMES.get(rest.partition(".")[0]) if namespace == "ladder" else None
    if home is not None:
        import_module(home)
    return home is not None


class ReadOnly(NamedTuple):
    """What a program must not write.

    why: What an error says of a write.
    kind: The class of tensors that refuse writes: what leaves a graph becomes one.
    """

    why: str
    kind: type[torch.Tensor]


READ_ONLY: dict[Any, ReadOnly] = {}
"""Operators whose results programs must not write, as nobody would read them again."""


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
