"""Calls of CPU kernels in which most operands have the addresses that they had in the last call.

What stays (constants, buffers of the plan) is handed to the kernel in the form that it takes, made once; a
call then only looks at what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ladder.runtime.allocate import viewer
from ladder.runtime.kernel import ALIGNMENT
from ladder.runtime.model.memory import contiguous
from ladder.runtime.model.workspace import Bound, Slots, Workspace


@dataclass(frozen=True)
class Operand:
    """A value as a kernel takes it.

    value: Of the plan.
    shape: That the kernel has for it; None for its own.
    strided: Whether the kernel takes any strides.
    """

    value: str
    shape: tuple[int, ...] | None = None
    strided: bool = False

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the kernel's shape: numbers have one axis there."""
        if self.shape is not None:
            return tensor.reshape(self.shape)
        return tensor if tensor.ndim else tensor.reshape(1)

    def viewer(self, shape: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return `seen` for contiguous tensors of one shape; None where the kernel takes that shape."""
        wanted = self.shape or shape or (1,)
        count = prod(shape)
        known = prod(extent for extent in wanted if extent != -1)
        sizes = tuple(count // known if extent == -1 else extent for extent in wanted)
        if sizes == shape:
            return None
        view, strides = viewer(), contiguous(sizes)
        return lambda tensor: view(tensor, sizes, strides, 0)


def is_read_in_place(tensor: torch.Tensor) -> bool:
    """Tell whether kernels read a tensor as it lies: rows one after the other, from an aligned address on."""
    if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT:
        return False
    return bool(tensor.numel()) or tensor.stride() == contiguous(tensor.shape)


def ready(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as kernels read it: a copy where it lies otherwise."""
    if is_read_in_place(tensor):
        return tensor
    if not tensor.numel():  # torch's strides take an extent of 0 for 1
        return tensor.new_empty(tensor.shape).as_strided(tensor.shape, contiguous(tensor.shape))
    return tensor.clone(memory_format=torch.contiguous_format)


def bind_entry(
    memory: Workspace, entry: Any, first: Sequence[Any], operands: Sequence[Any], out: Sequence[Any]
) -> Bound:
    """Return the call of a kernel.

    memory: Of the plan, on a CPU; shapes are known.
    entry: The kernel.
    first: Numbers that it takes first.
    operands: What it reads: an `Operand`, or a tensor that stays.
    out: What it writes: buffers of the plan, new tensors, or a tensor that stays; none of them empty.
    """
    arguments: list[Any] = [*first]
    moving: list[tuple[int, int, Any, bool]] = []
    for operand in operands:
        known = _known(memory, operand)
        if known is None:
            view = _view_of(memory, operand)
            moving.append((len(arguments), memory.slot[operand.value], view, operand.strided))
        arguments.append(known)
    made = []
    for operand in out:
        known = _known(memory, operand)
        if known is None:
            place, target = memory.slot[operand.value], memory.target(operand.value)
            made.append((len(arguments), place, target, _view_of(memory, operand)))
        arguments.append(known)
    if not moving and not made:
        return lambda slots: entry(*arguments)
    return _partly_known(entry, arguments, moving, made)


def _partly_known(entry: Any, known: list[Any], moving: Sequence[Any], made: Sequence[Any]) -> Bound:
    def run(slots: Slots) -> None:
        arguments = known.copy()
        for at, slot, view, strided in moving:
            x = slots[slot]
            begin = x.data_ptr()  # 0 where there are no elements
            if not strided and (not begin or begin % ALIGNMENT or not x.is_contiguous()):
                x = ready(x)
            arguments[at] = x if view is None else view(x)
        for at, slot, target, view in made:
            slots[slot] = y = target()
            arguments[at] = y if view is None else view(y)
        entry(*arguments)

    return run


def _view_of(memory: Workspace, operand: Operand) -> Callable[[torch.Tensor], torch.Tensor] | None:
    return operand.viewer(memory.now.numbers(memory.owner.plan.tiles[operand.value].shape)())


def _known(memory: Workspace, operand: Any) -> Any:
    """Return what stands for an operand in every call, in the form that kernels take; None if it changes."""
    from tvm_ffi import from_dlpack

    if isinstance(operand, torch.Tensor):
        return from_dlpack(operand)
    found = memory.known(operand.value)
    if found is None or not (operand.strided or is_read_in_place(found)):
        return None
    return from_dlpack(operand.seen(found.detach()))
