"""Fake results of operators on fake tensors with open sizes, without torch's decompositions.

For such sizes torch runs an operator's decomposition, in Python, to find the shape, type and strides of its
result, several times in each compilation. Here are operators whose result has the strides of their operand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

Fake = Callable[..., Any]

ELEMENTWISE = (
    *("hardtanh", "hardswish", "hardsigmoid", "leaky_relu", "elu", "celu", "selu", "relu", "silu", "gelu"),
    *("mish", "softplus", "hardshrink", "softshrink", "threshold", "clamp", "clamp_min", "clamp_max"),
    *("sigmoid", "tanh", "exp", "sqrt", "rsqrt"),
)
"""Operators of one floating-point tensor and of numbers, whose result has its type; in place too."""

NORMS = ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training")
"""Batch norms of x, weight, bias, mean, variance; the first two then take whether they train."""


@contextmanager
def quick_fakes() -> Iterator[None]:
    """Give torch these functions for fake tensors with open sizes, where it has none."""
    from torch._subclasses import fake_impls

    table: dict[Any, Fake] = fake_impls.get_fast_op_impls()
    added = {op: fake for op, fake in _fakes().items() if op not in table}
    table.update(added)
    try:
        yield
    finally:
        for op in added:
            table.pop(op, None)


@cache
def _fakes() -> Mapping[Any, Fake]:
    """Return operator -> what makes its fake result, of those that torch has a decomposition of."""
    from torch._decomp import decomposition_table

    found: dict[Any, Fake] = {}
    written = [f"{name}_" for name in ELEMENTWISE]
    for names, fake in ((ELEMENTWISE, _elementwise), (written, _in_place), (NORMS, _norm)):
        for name in names:
            op = getattr(getattr(torch.ops.aten, name, None), "default", None)
            if op in decomposition_table:
                found[op] = partial(fake, op, decomposition_table[op])
    return found


def _is_plain(op: Any, x: Any, numbers: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Tell whether a result is laid as x, of its type, and nothing raises."""
    given = [value for value in (*numbers, *named.values()) if value is not None]
    bounds = "clamp" in op.name() or "hardtanh" in op.name()
    if any(isinstance(value, torch.Tensor) for value in given):
        return False
    if bounds and (named or (numbers and not given) or not all(isinstance(v, int | float) for v in given)):
        return False
    return x.is_floating_point() and not (bounds and len(given) == 2 and given[0] > given[1])


def _elementwise(op: Any, parts: Fake, mode: Any, x: Any, *numbers: Any, **named: Any) -> Any:
    with mode:
        return torch.empty_like(x) if _is_plain(op, x, numbers, named) else parts(x, *numbers, **named)


def _in_place(op: Any, parts: Fake, mode: Any, x: Any, *numbers: Any, **named: Any) -> Any:
    with mode:
        return x.copy_(x) if _is_plain(op, x, numbers, named) else parts(x, *numbers, **named)


def _norm(op: Any, parts: Fake, mode: Any, x: Any, *given: Any, **named: Any) -> Any:
    statistics, training = given[2:4], len(given) == 7 and given[4]
    plain = x.is_floating_point() and x.device.type == "cpu" and len(given) >= 6
    plain = plain and all(value is not None for value in statistics)
    with mode:
        if not plain or training or named:
            return parts(x, *given, **named)
        return torch.empty_like(x), x.new_empty(0), x.new_empty(0)
