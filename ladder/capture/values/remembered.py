"""A cache of operators' results on fake tensors, by all that decides them: repeated layers cost one run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
SEQUENCES = (tuple, list, torch.Size)


class Unknown(Exception):
    """Raised for an argument of which the cache cannot tell what an operator may read."""


class Remembered:
    """Gives the fakes of an earlier run of the same operator on operands of the same metadata.

    A fake may then stand for several tensors, whose elements may be written; how they lie may not be changed.
    """

    def __init__(self) -> None:
        self.results: dict[Any, Any] = {}
        self.in_place: set[Any] = set()
        """What has changed elements of a first operand."""
        self.shared: dict[int, torch.Tensor] = {}
        """Those that stand for several tensors."""

    def __call__(self, function: Callable[..., Any], args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Return what ``run()`` gives, which calls `function`.

        Raises Unknown if it changes how an operand lies that stands for several.
        """
        if may_write(function, kwargs):
            if any(id(value) in self.shared for value in tensors_in((args, kwargs))) and relays(function):
                raise Unknown("one of several tensors that lie alike is laid otherwise")
            return self._written(function, args, kwargs, run)
        key = _key(function, args, kwargs)
        if key is None:
            return run()
        found = self.results.get(key)
        if found is None:
            found = run()
            if not any(
                result is value for result in tensors_in(found) for value in tensors_in((args, kwargs))
            ):
                self.results[key] = found
            return found
        self.shared.update((id(value), value) for value in tensors_in(found))
        return found

    def _written(self, function: Callable[..., Any], args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Return what an operator gives that may change its first operand: that, where only elements change.

        What it asks of extents has then been asked before.
        """
        inside = "out" not in kwargs and not relays(function) and not torch.is_grad_enabled()
        plain = inside and not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"))
        key = _key(function, args, kwargs) if plain and args else None
        if key is not None and key in self.in_place:
            return args[0]
        found = run()
        if key is not None and found is args[0]:
            self.in_place.add(key)
        return found


def _key(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return the cache key of an operator on fake tensors: all that decides its results; None if unknown."""
    try:
        state = torch.get_default_dtype(), torch.is_grad_enabled()
        key = (function, *state, described(args), described(kwargs))
        hash(key)
    except (Unknown, TypeError):
        return None
    return key


def may_write(function: Callable[..., Any], kwargs: Any) -> bool:
    """Tell whether an operator may change an operand: by its name, as torch has them, or its schema."""
    if isinstance(function, torch._ops.OpOverload):
        return bool(function._schema.is_mutable)
    name = getattr(function, "__name__", "_")
    inside = name.startswith("__i") or name in INPLACE
    # `and_` of the module `operator` has its name from the keyword.
    keyword = getattr(function, "__module__", "") == operator.and_.__module__
    return (
        "out" in kwargs
        or bool(kwargs.get("inplace"))
        or inside
        or (name.endswith("_") and not name.endswith("__") and not keyword)
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
    )


def relays(function: Callable[..., Any]) -> bool:
    """Tell whether an operator may change how its operand lies."""
    name = getattr(function, "__name__", "_")
    known = name in INPLACE or name.removesuffix("_") in ELEMENTS or name.startswith("__i")
    return not known


ELEMENTS = (
    *("add", "sub", "mul", "div", "copy", "fill", "zero", "masked_fill", "clamp", "clamp_min", "clamp_max"),
    *("relu", "relu6", "leaky_relu", "elu", "celu", "selu", "mish", "threshold", "hardsigmoid", "silu"),
    *("hardtanh", "hardswish", "dropout", "sigmoid", "tanh", "exp", "index_add", "index_copy"),
    *("scatter", "scatter_add", "index_put", "normal", "uniform", "bernoulli", "neg", "pow", "sqrt", "rsqrt"),
)
"""Names, without the final underscore, of operators in place that change elements and nothing else."""

INPLACE = (
    *("__setitem__", "setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("iand", "ior", "ixor", "ilshift", "irshift"),
)
"""Names of functions of ``operator`` and of tensors that change their first operand."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, SEQUENCES):
        for item in value:
            yield from tensors_in(item)


def described(value: Any) -> Any:
    """Return what an operator on fakes can know of an argument, to be compared.

    Raises Unknown if it may ask for something else.
    """
    kind = type(value)
    if kind in PLAIN or isinstance(value, PLAIN_OF_TORCH):
        return kind, value
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if kind is torch.SymInt:
        return kind, value.node.expr
    if kind in SEQUENCES:
        return kind, *map(described, value)
    if kind is slice:
        return kind, *map(described, (value.start, value.stop, value.step))
    if kind is dict:
        return kind, *((key, described(item)) for key, item in value.items())
    raise Unknown(kind.__name__)


def _of_tensor(value: torch.Tensor) -> Any:
    if type(value) is not torch._subclasses.FakeTensor or value.layout is not torch.strided:
        raise Unknown(type(value).__name__)
    if value.is_complex() or value.is_neg() or value.is_nested or value.constant is not None:
        raise Unknown("a tensor of which more counts than how it lies")
    lies = (*value.shape, *value.stride(), value.storage_offset())
    extents = tuple(item.node.expr if type(item) is torch.SymInt else item for item in lies)
    return torch.Tensor, value.dim(), value.dtype, value.device, value.requires_grad, extents
