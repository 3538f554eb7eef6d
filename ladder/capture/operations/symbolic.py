"""Open extents: reading shapes, computing with them, giving them to operators."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch

from ladder.capture.heap.nodes import Dynamic
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.operations.counts import computed_count, holds_count
from ladder.capture.python.words import words
from ladder.capture.trace.trace import Value
from ladder.capture.values import shapes
from ladder.capture.values.kinds import is_a, is_constant, mapped
from ladder.capture.values.shapes import DynamicSize
from ladder.interrupts import pass_on
from ladder.runtime.recurrent_operator import WHOLE

ARITHMETIC: frozenset[Any] = frozenset(
    {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg}
)
"""Functions of extents whose result is an extent."""

CHOOSING: frozenset[Any] = frozenset({max, min})
"""Functions that give one of some extents, which their comparisons decide."""

EXTENTS = frozenset(words("shape size numel nelement __len__"))
"""Metadata that are extents."""

WITHOUT_EXTENTS = frozenset(
    words(
        "ndim dim ndimension dtype device requires_grad is_leaf layout is_cuda is_cpu itemsize element_size"
        " is_complex is_floating_point is_signed is_sparse is_quantized is_meta is_tensor names name type"
        " get_device is_inference is_conj is_neg is_nested is_mkldnn result_type"
    )
)
"""Metadata that no extent changes."""

OF_ANY_VALUES = WITHOUT_EXTENTS - {"ndim", "dim", "ndimension", "is_leaf"}
"""Metadata that a tensor has whose shape depends on values."""


def is_open(vm: Interpreter, value: Any) -> bool:
    """Say whether `value` is a tensor with open extents."""
    if not vm.heap.shapes or not is_a(value, torch.Tensor):
        return False
    node = vm.heap.find(value)
    return node is not None and node.var in vm.heap.shapes.fakes


def open_metadata(
    vm: Interpreter, value: torch.Tensor, name: str, rest: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """Return metadata of a tensor with open extents; what is neither extent nor without fixes them."""
    fake = vm.heap.shapes.fakes[vm.heap.node(value).var]
    rest, named = tuple(map(vm.plain, rest)), {key: vm.plain(item) for key, item in named.items()}
    if name in EXTENTS:
        if name == "shape" or (name == "size" and not (rest or named)):
            extents = [_extent(vm, extent) for extent in fake.shape]
            return (DynamicSize if any(type(item) is Dynamic for item in extents) else torch.Size)(extents)
        return _extent(vm, getattr(fake, name)(*rest, **named))
    if name not in WITHOUT_EXTENTS:
        vm.heap.fix_shapes(f"{name} is read")
    if name == "result_type":
        return torch.result_type(value, *rest, **named)
    found = getattr(value, name)
    return found(*rest, **named) if callable(found) else found


def settle_extents(vm: Interpreter, values: Iterable[Any]) -> None:
    """Settle the extents of tensors, for an operator whose parts depend on them."""
    fakes = vm.heap.shapes.fakes
    names = [vm.heap.node(value).var for value in values if is_a(value, torch.Tensor)]
    vm.heap.settle(extent for name in names if name in fakes for extent in fakes[name].shape)


def _extent(vm: Interpreter, extent: Any) -> Any:
    if shapes.is_fixed(extent):
        return int(extent)
    heap = vm.heap
    text, known = heap.shapes.text(extent.node.expr), heap.shapes.extents
    if text not in known:
        known[text] = text if text.isidentifier() else heap.guard.bind(text, text)
        heap.guard.paths.setdefault(known[text], text)
    heap.uses_dynamic = True
    return Dynamic(extent.node.hint, known[text], extent)


def pure_dynamic(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether a scalar can be computed of dynamic scalars and constants."""
    dynamic = any(type(item) is Dynamic for item in args)
    return dynamic and not kwargs and all(type(item) is Dynamic or is_constant(item) for item in args)


def computed_dynamic(vm: Interpreter, function: Any, args: tuple[Any, ...]) -> Any:
    """Compute a scalar from dynamic scalars, in the guard: an exception there is a miss."""
    values = [item.value if type(item) is Dynamic else item for item in args]
    try:
        result = function(*values)
    except Exception:
        for item in args:  # what follows is for these values
            vm.plain(item)
        raise
    if type(result) not in (int, float, bool, str):
        return function(*map(vm.plain, args))
    if holds_count(args):
        return computed_count(vm, function, args, result)
    heap = vm.heap
    texts = [item.var if type(item) is Dynamic else heap.constant(item) for item in args]
    text = f"{heap.constant(function)}({', '.join(texts)})"
    made = Dynamic(result, heap.guard.bind(text, text))
    if function not in ARITHMETIC:  # of others the type may depend on the values
        heap.guard.check(f"type({made.var}) is {type(result).__name__}", f"type of {text}")
    return computed_extent(function, args, made)


def computed_extent(function: Any, args: tuple[Any, ...], result: Dynamic) -> Dynamic:
    """Note what `result`, computed from extents, is as an expression of symbols."""
    given = [item.symbol if type(item) is Dynamic else item for item in args]
    if function is int and len(args) == 1:
        result.symbol = given[0]
    elif (function in ARITHMETIC or function in CHOOSING) and None not in given and type(result.value) is int:
        found = function(*given)
        result.symbol = found if is_a(found, torch.SymInt) else None
    return result


# operators --------------------------------------------------------------------------------
def settled_for_operator(vm: Interpreter, value: Any) -> Any:
    """Return an argument of an operator in which only extents, and numbers of the graph, are `Dynamic`."""
    if not vm.heap.shapes and not vm.heap.counts:
        return vm.plain(value)
    if type(value) is Dynamic:
        return value if value.symbol is not None or value.counted is not None else vm.plain(value)
    if type(value) in (tuple, DynamicSize):
        return type(value)(settled_for_operator(vm, item) for item in value)
    if type(value) is slice:
        return mapped(value, lambda part: settled_for_operator(vm, part))
    if type(value) is list:
        items = vm.heap.items(value)
        return value if items is value else [settled_for_operator(vm, item) for item in items]
    return vm.plain(value)


def fake_results(
    vm: Interpreter, function: Any, args: Any, kwargs: Any, inputs: list[Value], real: Any
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run an operator on fakes too if it has open inputs; return open results with their fakes."""
    symbols = vm.heap.shapes
    if not symbols:
        return []
    if not any(value.var in symbols.fakes for value in inputs) and not _holds_extent((args, kwargs)):
        return []
    names = {id(value.obj): value.var for value in inputs}
    settled = symbols.settled() if "out" in kwargs else None

    def faked(value: Any) -> Any:
        return symbols.fake_alone(names[id(value)], value) if id(value) in names else value

    try:
        fakes = symbols.run(
            WHOLE.get(function, function), *(_replaced(each, faked, _symbol) for each in (args, kwargs))
        )
        fakes = faked(real) if id(real) in names else symbols.laid_out_as(fakes, real)
        if long := symbols.in_long_expressions(fakes):
            vm.heap.settle(long)
        agreed = shapes.agrees(fakes, real) and (settled is None or settled == symbols.settled())
    except Exception as error:  # what an operator may raise for symbols is not documented
        pass_on(error)
        vm.heap.fix_shapes(f"{getattr(function, '__name__', function)}: {type(error).__name__}")
        return []
    if not agreed:
        vm.heap.fix_shapes(f"{getattr(function, '__name__', function)} gives another shape")
        return []
    return [pair for pair in _pairs(real, fakes) if shapes.is_open(pair[1])]


def real_values(value: Any) -> Any:
    """Return an operator's argument with the values of this run in place of `Dynamic`."""
    return _replaced(value, lambda item: item, lambda dynamic: dynamic.value)


def _symbol(dynamic: Dynamic) -> Any:
    return dynamic.value if dynamic.symbol is None else dynamic.symbol


def _replaced(value: Any, tensor: Any, dynamic: Any) -> Any:
    if is_a(value, torch.Tensor):
        return tensor(value)
    if type(value) is Dynamic:
        return dynamic(value)
    if type(value) in (tuple, list, DynamicSize):
        items = [_replaced(item, tensor, dynamic) for item in value]
        return items if type(value) is list else tuple(items)
    if type(value) is dict:
        return {key: _replaced(item, tensor, dynamic) for key, item in value.items()}
    if type(value) is slice:
        return mapped(value, lambda item: _replaced(item, tensor, dynamic))
    return value


def _holds_extent(value: Any) -> bool:
    found: list[Dynamic] = []
    _replaced(value, lambda item: item, found.append)
    return any(dynamic.symbol is not None for dynamic in found)


def _pairs(real: Any, fake: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if is_a(real, torch.Tensor):
        return [(real, fake)]
    if is_a(real, tuple | list):
        return [pair for mine, other in zip(real, fake, strict=True) for pair in _pairs(mine, other)]
    return []
