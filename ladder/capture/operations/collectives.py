"""Collectives of torch.distributed: each becomes its functional operator, awaited at once.

Those that change a tensor in place become a copy of what the operator gives. Groups are named in graphs, and
guarded to be the same objects. What is not awaited (``async_op``), and the rest, runs as it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ladder.capture.heap.nodes import CaptureError
from ladder.capture.interpreter.interpreter import Call, Interpreter
from ladder.capture.operations.objects import identify, pinned_part
from ladder.capture.operations.tensor_operators import tensor_operator

HOME, FUNCTIONAL = "torch.distributed.distributed_c10d", "torch.distributed._functional_collectives"
"""Modules of the functions that change a tensor in place, and of those that return another."""

Given = dict[str, Any]

Operands = Callable[[Given], tuple[str, torch.Tensor, tuple[Any, ...]]]
"""From the arguments of a call, by name, to the functional operator, what it takes, and the rest of that
but the group; a group has its number of ranks under ``"ranks"``, its own under ``"rank"``."""


def _reduction(given: Given) -> str:
    """Return the name of a reduction as functional operators have it.

    Raises CaptureError if they have none such.
    """
    op = given["op"] if "op" in given else given["reduceOp"]
    known = torch.distributed.ReduceOp
    named = {known.SUM: "sum", known.AVG: "avg", known.PRODUCT: "product", known.MIN: "min", known.MAX: "max"}
    name = (
        op.lower() if isinstance(op, str) else next((text for row, text in named.items() if row == op), None)
    )
    if name is None:
        raise CaptureError(f"a collective with {op}")
    return name


def _source(given: Given) -> int:
    """Return the rank in the group that a broadcast comes from."""
    if given.get("group_src") is not None:
        return int(given["group_src"])
    return int(torch.distributed.get_group_rank(given["group"], given["src"]))


IN_PLACE: dict[str, tuple[str, Operands]] = {
    "all_reduce": ("tensor", lambda given: ("all_reduce", given["tensor"], (_reduction(given),))),
    "broadcast": ("tensor", lambda given: ("broadcast", given["tensor"], (_source(given),))),
    "all_gather_into_tensor": (
        "output_tensor",
        lambda given: ("all_gather_into_tensor", given["input_tensor"], (given["ranks"],)),
    ),
    "reduce_scatter_tensor": (
        "output",
        lambda given: ("reduce_scatter_tensor", given["input"], (_reduction(given), given["ranks"])),
    ),
}
"""Function -> the argument that it changes, and what it is made of."""


def _group(vm: Interpreter, given: Any) -> Any:
    """Return a process group that is guarded to be this one; the default group for None.

    Raises CaptureError if it is none, or this process is not in it.
    """
    default = torch.distributed.distributed_c10d._get_default_group
    group = vm.call_function(pinned_part(vm, default), (), {}) if given is None else given
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise CaptureError(f"a collective of {group!r}")
    identify(vm, group)
    return group


def in_place(
    vm: Interpreter,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    changed: str,
    made: Operands,
) -> None:
    """Call a collective that changes a tensor, as a copy of what its functional operator gives."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if vm.plain(given["async_op"]):
        raise CaptureError("a collective that is not awaited")
    given["group"] = group = _group(vm, given["group"])
    given["ranks"] = group.size()
    name, source, rest = made(given)
    result = awaited(vm, name, source, (*rest, group.group_name))
    target = given[changed]
    if target.shape != result.shape:
        result = tensor_operator(vm, torch.Tensor.reshape, (result, tuple(target.shape)), {})
    tensor_operator(vm, torch.Tensor.copy_, (target, result), {})


def awaited(vm: Interpreter, name: str, source: torch.Tensor, rest: tuple[Any, ...]) -> Any:
    """Return the result of a functional operator once it is there."""
    operators = torch.ops._c10d_functional
    source = tensor_operator(vm, torch.Tensor.contiguous, (source,), {})
    begun = tensor_operator(vm, getattr(operators, name), (source, *rest), {})
    return tensor_operator(vm, operators.wait_tensor, (begun,), {})


def all_reduce(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the functional ``all_reduce``; eager code gets a tensor that is awaited when it is first used."""
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    group = given["group"]
    if not isinstance(group, str):
        group = _group(vm, group).group_name
    return awaited(vm, "all_reduce", given["self"], (_reduction(given), group))


def same_group(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ask a mesh of devices for a group: it gives the same one as long as it is the same mesh."""
    identify(vm, args[0])
    return pinned_part(vm, function(*map(vm.plain, args), **kwargs))


NAMED: dict[tuple[str, str], Call] = {
    **{
        (HOME, name): functools.partial(in_place, changed=changed, made=made)
        for name, (changed, made) in IN_PLACE.items()
    },
    (FUNCTIONAL, "all_reduce"): all_reduce,
    ("torch.distributed.device_mesh", "DeviceMesh.get_group"): same_group,
}
"""(module, qualified name) -> ``call(vm, function, args, kwargs)``."""
