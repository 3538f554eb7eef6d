"""How many arguments natives take: what stands for one must not be called with others."""

from __future__ import annotations

import builtins
import functools
import inspect
import itertools
from collections import OrderedDict, defaultdict, deque
from typing import Any

MANY = 1 << 30
COUNTS: dict[Any, tuple[int, int]] = {
    builtins.getattr: (2, 3),
    builtins.iter: (1, 2),
    builtins.next: (1, 2),
    builtins.bool: (0, 1),
    builtins.vars: (0, 1),
    builtins.super: (0, 2),
    builtins.map: (2, MANY),
    builtins.filter: (2, 2),
    functools.reduce: (2, 3),
    itertools.islice: (2, 4),
    itertools.chain.from_iterable: (1, 1),
    **{
        method: (2, 2)
        for kind in (dict, OrderedDict, defaultdict, list, tuple, set, frozenset, deque)
        for name in ("__contains__", "__getitem__", "add", "discard", "remove", "append", "appendleft")
        if (method := getattr(kind, name, None)) is not None
    },
}
"""Native without a signature, which takes no names -> the least and the greatest number of arguments."""


@functools.cache
def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def fits(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether a native takes such arguments, as far as it is known."""
    if function in COUNTS:
        least, most = COUNTS[function]
        return least <= len(args) <= most and not kwargs
    signature = _signature(function)
    if signature is None:
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
