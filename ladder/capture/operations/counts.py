"""Extents of tensors whose shape depends on values: the graph computes them, and what follows from them.

The guard comes before the graph and knows nothing of them. Where the program needs such a number (it branches
on it, loops over it), it is taken to be what it is, and compared when the graph has run.
"""

from __future__ import annotations

import inspect
import math
import operator
from typing import Any

import torch
import torch.fx

from ladder.capture.heap.nodes import CaptureError, Dynamic
from ladder.capture.interpreter.graph_arguments import argument, value_of
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.python.words import words
from ladder.capture.trace.trace import Value
from ladder.capture.trace.undo import Effect
from ladder.capture.values.kinds import is_a, module_of
from ladder.capture.values.shapes import DynamicSize

RANKS = frozenset(words("ndim dim ndimension"))
"""Metadata that are the number of axes."""

COUNTS = {
    "size": "size",
    "numel": "numel",
    "nelement": "numel",
    "__len__": "size",
    "stride": "stride",
    "is_contiguous": "is_contiguous",
}
"""Metadata that are one number -> the method that a graph calls for it."""

SURE = frozenset(
    {operator.add, operator.sub, operator.mul, operator.neg, operator.abs, abs, int, float, max, min}
    | {operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne}
)
"""Functions of numbers that never raise, and whose results are of a type that follows from theirs."""

FAILING = frozenset({operator.floordiv, operator.mod, operator.truediv, math.ceil, math.floor, round})
"""Others of such a type."""


def is_counted(vm: Interpreter, value: torch.Tensor) -> bool:
    """Say whether the shape of a tensor depends on values."""
    return vm.trace.is_dynamic(vm.heap.node(value).var)


def counted_metadata(
    vm: Interpreter, value: torch.Tensor, name: str, rest: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """Return metadata of a tensor whose shape depends on values: its extents are numbers of the graph.

    Raises CaptureError where these have been other than assumed too often, or the number of axes is not known
        either.
    """
    known, here, (rest, named) = value_of(vm, value), vm.here(), vm.plain_given(rest, named)
    surprises = vm.point is None or here in vm.point.surprising
    if known.fx is None or not known.ranked or surprises or vm.aside:
        raise CaptureError(f"{name} of a tensor whose shape depends on values")
    if name in RANKS:
        return value.dim()
    if name == "shape" or (name == "size" and not (rest or named)):
        return DynamicSize(_extent(vm, known, "size", (axis,), here) for axis in range(value.dim()))
    if name == "stride" and not (rest or named):
        return tuple(_extent(vm, known, name, (axis,), here) for axis in range(value.dim()))
    if name not in COUNTS:
        raise CaptureError(f"{name} of a tensor whose shape depends on values")
    return _extent(vm, known, COUNTS[name], (0,) if name == "__len__" else rest, here, **named)


def _extent(
    vm: Interpreter, known: Value, method: str, rest: tuple[Any, ...], here: Any, **named: Any
) -> Dynamic:
    number = getattr(known.obj, method)(*rest, **named)
    node = vm.trace.graph.call_method(method, (known.fx, *rest), named)
    node.meta["part"] = True
    return _counted(vm, number, node, here)


def _counted(vm: Interpreter, number: Any, node: torch.fx.Node, here: Any) -> Dynamic:
    var = vm.heap.guard.fresh_name()
    vm.trace.add(Value(var, number, node, dynamic=True))
    vm.heap.counts = vm.heap.uses_dynamic = True
    return Dynamic(number, var, counted=here)


def may_compute(vm: Interpreter, number: Any) -> bool:
    """Say whether a number read here may be the graph's: what is decided by it has not often changed."""
    known = vm.point.surprising if vm.point is not None else ()
    return type(number) in (int, float) and _decided(vm) not in known


def _decided(vm: Interpreter) -> Any:
    return *vm.here(), "decided"


def number_of(vm: Interpreter, value: torch.Tensor, method: str, number: Any) -> Dynamic:
    """Return the `number` that a method reads from a tensor as one that the graph computes."""
    node = vm.trace.graph.call_method(method, (value_of(vm, value).fx,))
    vm.trace.effects[node] = Effect(fails=None if method == "item" else node)
    return _counted(vm, number, node, _decided(vm))


def holds_count(values: tuple[Any, ...]) -> bool:
    """Say whether a number that the graph computes is among `values`."""
    return any(type(item) is Dynamic and item.counted is not None for item in values)


def computed_count(vm: Interpreter, function: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Let the graph compute ``function(*args)``, of which some are its numbers, if its type is known.

    `result` is what it gives in this run.
    """
    numbers = is_a(result, int | float) and all(type(item) in (Dynamic, int, float) for item in args)
    if vm.aside or function not in SURE | FAILING or not numbers:
        return function(*map(vm.plain, args))
    given = [vm.plain(item) if _is_guarded(item) and item.symbol is None else item for item in args]
    node = vm.trace.graph.call_function(function, tuple(argument(vm, item, []) for item in given))
    node.meta["part"] = function in SURE
    vm.trace.effects[node] = Effect(fails=None if function in SURE else node)
    here = next(item.counted for item in args if type(item) is Dynamic and item.counted is not None)
    return _counted(vm, result, node, here)


def _is_guarded(value: Any) -> bool:
    return type(value) is Dynamic and value.counted is None


_IN_PLACE = frozenset(
    words("setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul")
)
_SAME = _IN_PLACE | frozenset(
    words(
        "to float double half bfloat16 long int bool type_as cpu cuda dropout detach __setitem__"
        " conj conj_physical positive real resolve_conj resolve_neg as_tensor asarray"
    )
)
"""Operators that give an operand itself or do not, whatever its elements are."""
_SAME_BY_AXES = frozenset(words("flatten atleast_1d atleast_2d atleast_3d"))
"""Operators of which only the number of axes says whether they give an operand itself."""
_SAME_BY_EXTENTS = frozenset(words("contiguous sum_to_size"))
"""Operators of which extents say it; so they do where `_SAME` is asked for a layout."""

_FIXED_LISTS = frozenset(
    words(
        "split_with_sizes where nonzero meshgrid broadcast_tensors unique unique_consecutive var_mean"
        " std_mean lstm gru rnn_tanh rnn_relu lstm_cell _pack_padded_sequence _pad_packed_sequence"
        " multi_head_attention_forward"
    )
)
"""Operators that give as many tensors as their operands, axes or sizes say."""


def alias_is_known(
    vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, given: bool
) -> bool:
    """Say whether elements decide nothing of whether an operator gives an operand, as it has `given` one."""
    name = getattr(function, "__name__", "")
    if name in _SAME_BY_AXES:
        return bool(args) and is_a(args[0], torch.Tensor) and value_of(vm, args[0]).ranked
    if name == "contiguous" and len(args) == 1 and not kwargs:
        vm.plain(counted_metadata(vm, args[0], "is_contiguous", (), {}))
        return True
    if name in _SAME_BY_EXTENTS or (name in _SAME and "memory_format" in kwargs):
        return False
    in_place = (name.endswith("_") and not name.endswith("__")) or _is_asked_in_place(function, args, kwargs)
    return not given or name in _SAME or in_place or kwargs.get("out") is not None


def _is_asked_in_place(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether a Python function has an argument ``inplace`` that is true, as activations of torch do."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    names = () if code is None else code.co_varnames[: code.co_argcount]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given.get("inplace") is True


_AXES = {"unbind": 1, "chunk": 2, "split": 2, "tensor_split": 2}
"""Operators that give as many tensors as one extent says -> the place of the axis among the arguments."""


def gives_as_many(
    vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> bool:
    """Say whether an operator gives as many tensors whatever the elements are; for some, assume an extent."""
    name = getattr(function, "__name__", "")
    sizes = args[1] if len(args) > 1 else next(iter(kwargs.values()), None)
    if name in ("split", "tensor_split") and is_a(sizes, tuple | list):
        return True
    if name in _AXES and is_a(args[0], torch.Tensor):
        given = args[_AXES[name]] if len(args) > _AXES[name] else 0
        if is_counted(vm, args[0]):
            vm.plain(counted_metadata(vm, args[0], "size", (kwargs.get("dim", given),), {}))
        return True
    return name in _FIXED_LISTS or module_of(type(result)).startswith("torch.return_types")


def ranks_are_known(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether elements decide nothing of how many axes are left; for axes of ``squeeze``, assume it."""
    axes = args[1] if len(args) > 1 else kwargs.get("dim")
    axes = axes if is_a(axes, tuple) else (axes,)
    value: Any = args[0] if args else None
    named = getattr(function, "__name__", "") == "squeeze" and all(type(axis) is int for axis in axes)
    if not named or not is_a(value, torch.Tensor) or vm.aside or vm.point is None:
        return False
    if vm.here() in vm.point.surprising or not value_of(vm, value).ranked:
        return False
    for axis in axes:
        extent = counted_metadata(vm, value, "size", (axis,), {})
        vm.plain(computed_count(vm, operator.eq, (extent, 1), value.shape[axis] == 1))
    return True
