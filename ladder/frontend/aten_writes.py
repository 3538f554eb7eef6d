"""What operators of a traced program write, and writes that no functional graph can stand for."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from ladder.runtime.functional import hint_of, memory_of
from ladder.runtime.model.program import ImportRefused

_NOWHERE = np.empty(1, np.uint8)
"""Memory of addresses that are compared and not read."""


def refuse_real_writes(function: Any, written: Sequence[torch.Tensor]) -> None:
    """Raise ImportRefused before tracing writes into a tensor that the program holds."""
    for value in written:
        real = type(value) in (torch.Tensor, torch.nn.Parameter)
        if real and not torch._is_functional_tensor(value):
            raise ImportRefused(f"{function} changes a tensor that is no argument")


def written_by(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call of an operator writes."""
    found: list[torch.Tensor] = []
    if function._schema.is_mutable:
        for place, argument in enumerate(function._schema.arguments):
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                found += [value for value in tree_leaves(given) if isinstance(value, torch.Tensor)]
    return found


def refuse_resized(function: Any, written: Sequence[tuple[torch.Tensor, torch.Size]]) -> None:
    """Raise ImportRefused where a tensor of some elements gets another size (``resize_``, ``out=``).

    Functional graphs give it memory of its own; in eager, views show what it had, and it writes there.
    """
    moves_axes = torch.Tag.inplace_view in function.tags and "resize" not in function._schema.name
    for value, before in written if not moves_axes else ():
        if value.shape != before and not any(isinstance(extent, int) and extent == 0 for extent in before):
            raise ImportRefused(f"{function} gives what it writes another size")


def refuse_shared_results(function: Any, args: Sequence[Any], written: Sequence[torch.Tensor]) -> None:
    """Raise ImportRefused where ``out=`` holds what a sum or product reads: torch clears it at once."""
    if not written or "out" not in function._overloadname or torch.Tag.pointwise in function.tags:
        return
    memory = {memory_of(value) for value in tree_leaves(args) if isinstance(value, torch.Tensor)}
    if memory & {memory_of(value) for value in written}:
        raise ImportRefused(f"{function} writes what it reads")


def refuse_overlaps(args: Sequence[Any], written: Sequence[torch.Tensor]) -> None:
    """Raise ImportRefused where an operator reads elements that it has written by then: ``y[::2] += y[:1]``.

    Functional graphs read what was there before; in eager, elements follow one another.
    """
    memory: dict[int, list[torch.Tensor]] = defaultdict(list)
    for read in tree_leaves(args) if written else ():
        if isinstance(read, torch.Tensor) and read.layout is torch.strided:
            memory[memory_of(read)].append(read)
    for value in written:
        reads = memory[memory_of(value)] if value.layout is torch.strided else ()
        if any(read is not value and _overlaps(value, read) for read in reads):
            raise ImportRefused("an operator reads in another order what it writes")


def _overlaps(written: torch.Tensor, read: torch.Tensor) -> bool:
    """Tell whether an element of one memory is read, for the sizes at hand, where another one is written."""
    try:
        if _place(read.expand(written.shape)) == _place(written):
            return False
    except RuntimeError:  # of another shape
        pass
    return bool(np.shares_memory(_addresses(written), _addresses(read)))


def _place(value: torch.Tensor) -> tuple[Any, ...]:
    """Return where elements lie: the offset, and the strides of axes of several."""
    axes = zip(map(hint_of, value.shape), map(hint_of, value.stride()), strict=True)
    return hint_of(value.storage_offset()), tuple((extent, stride) for extent, stride in axes if extent != 1)


def _addresses(value: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return an array of the same addresses; nothing is read there."""
    shape, strides = map(hint_of, value.shape), map(hint_of, value.stride())
    begin, size = hint_of(value.storage_offset()) * value.itemsize, value.itemsize
    memory = np.lib.stride_tricks.as_strided(_NOWHERE, (begin + size,), (1,), writeable=False)
    first = memory[begin : begin + size].view(f"V{size}")
    steps = tuple(stride * size for stride in strides)
    return np.lib.stride_tricks.as_strided(first, (*shape, 1), (*steps, size), writeable=False)


def without_local_writes(traced: torch.fx.GraphModule, apart: Container[Any]) -> bool:
    """Let elementwise operators give what they wrote over, if that is all that a traced graph writes.

    As activations with ``inplace=True`` do: what an operator made is written by one that reads no other place
    of it, and no view shows it. Functionalization traces all of the graph again for it.

    apart: Operators that tracing takes apart.
    Returns: Whether the graph writes nothing now; else it is as it was.
    """
    shown: dict[int, list[torch.fx.Node]] = defaultdict(list)
    for node in traced.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            shown[memory_of(value)].append(node)
    writes = [node for node in traced.graph.nodes if _is_mutable(node.target)]
    forms = {node: form for node in writes if (form := _elementwise_form(node, shown, apart)) is not None}
    if len(forms) < len(writes):
        return False
    place = {node: at for at, node in enumerate(traced.graph.nodes)}
    for write, form in forms.items():
        write.target, before = form, write.all_input_nodes[0]
        for reader in [user for user in before.users if place[user] > place[write]]:
            reader.replace_input_with(before, write)
    traced.recompile()
    return True


def _is_mutable(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _elementwise_form(
    write: torch.fx.Node, shown: Mapping[int, Sequence[torch.fx.Node]], apart: Container[Any]
) -> Any:
    """Return the operator that gives what a node writes; None if more than its own result changes."""
    target: Any = write.target
    space, name = target._schema.name.split("::")
    form = getattr(getattr(torch.ops.aten, name.rstrip("_"), None), target._overloadname, None)
    if space != "aten" or not name.endswith("_") or form is None or form in apart:
        return None
    if torch.Tag.pointwise not in form.tags or write.kwargs:
        return None
    first, *others = write.args
    if not (isinstance(first, torch.fx.Node) and _is_made(first)):
        return None
    value = first.meta["val"]
    operands = [other.meta.get("val") for other in others if isinstance(other, torch.fx.Node)]
    if not value.is_floating_point() or not all(_is_laid_as(value, operand) for operand in operands):
        return None
    own = [node for node in shown[memory_of(value)] if not _is_mutable(node.target)]
    return form if len(own) == 1 else None


def _is_made(node: torch.fx.Node) -> bool:
    """Tell whether a node is a tensor of its own that an operator of torch made, or writes to one."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    while _is_mutable(node.target):
        node = node.args[0]  # type: ignore[assignment]
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    return all(result.alias_info is None for result in target._schema.returns)


def _is_laid_as(value: torch.Tensor, operand: Any) -> bool:
    """Tell whether an operand leaves type and order of the result as they are."""
    if not isinstance(operand, torch.Tensor):
        return False
    return (
        operand.dtype is value.dtype and operand.shape == value.shape and operand.stride() == value.stride()
    )
