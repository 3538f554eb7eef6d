"""What shares memory among the inputs and results of a graph, and how results lie in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.overrides

from ladder.capture.values.kinds import is_a
from ladder.runtime.functional import hint_of


class Strides(NamedTuple):
    """How the elements of a tensor lie.

    `order`: its axes from the outermost to the innermost in memory, where they lie without gaps; else None.
    `repeated`: the axes along which it is one element. `steps`, `offset`, `reach`: strides, the number of the
    first element and of all in its memory. `conjugated`, `negated`: whether elements are when they are read.
    """

    order: tuple[int, ...] | None
    repeated: frozenset[int]
    steps: tuple[int, ...]
    offset: int
    reach: int
    conjugated: bool = False
    negated: bool = False

    @property
    def changed(self) -> bool:
        """Whether elements are read otherwise than they lie in memory."""
        return self.conjugated or self.negated


class Aliasing(NamedTuple):
    """What shares memory among inputs and results, in order, and how results lie.

    `memory`, `objects`: for each the first that lies in the same storage, or is the same object.
    `writes`: whether inputs are written. `strides`: of each result, None for what is no strided tensor.
    `versions`: by how much that of each input grows, then that of each result; None where there is none.
    `devices`: of each result, None for what is no tensor. `gradients`: whether each result requires them.
    `views`: whether each result is a view for autograd, which lets some not be written in place.
    """

    memory: tuple[int, ...]
    objects: tuple[int, ...]
    writes: bool
    strides: tuple[Strides | None, ...]
    versions: tuple[int | None, ...]
    devices: tuple[torch.device | None, ...]
    gradients: tuple[bool, ...]
    views: tuple[bool, ...]


def flat(value: Any) -> list[Any]:
    """Return the items of nested tuples and lists."""
    return [leaf for item in value for leaf in flat(item)] if is_a(value, tuple | list) else [value]


def aliasing_of(
    inputs: Sequence[Any],
    results: Any,
    *,
    writes: bool = False,
    before: Sequence[int | None] | None = None,
    late: Mapping[int, int] | None = None,
) -> Aliasing:
    """Return what shares memory; numbers, equal ones too, share nothing.

    `before`: the versions of the inputs before the results were computed; `late`: how often storages were
    written since.
    """
    given = flat(results)
    values = [*inputs, *given]
    tensors = {at for at, value in enumerate(values) if is_a(value, torch.Tensor)}
    memory = [_memory_of(value) if at in tensors else ~at for at, value in enumerate(values)]
    objects = [id(value) if at in tensors else ~at for at, value in enumerate(values)]
    counts = [*map(version_of, values)]
    missed = [late.get(where, 0) for where in memory] if late else [0] * len(values)
    after = [None if count is None else count - more for count, more in zip(counts, missed, strict=True)]
    grown = [
        None if old is None or new is None else new - old
        for old, new in zip(after[: len(inputs)] if before is None else before, after, strict=False)
    ]
    return Aliasing(
        _firsts(memory),
        _firsts(objects),
        writes,
        tuple(map(strides_of, given)),
        (*grown, *after[len(inputs) :]),
        tuple(value.device if is_a(value, torch.Tensor) else None for value in given),
        tuple(is_a(value, torch.Tensor) and value.requires_grad for value in given),
        tuple(is_a(value, torch.Tensor) and value._is_view() for value in given),
    )


def _firsts(keys: Sequence[int]) -> tuple[int, ...]:
    """Return for each key where the first equal one stands."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(key, at) for at, key in enumerate(keys))


def version_of(value: Any) -> int | None:
    """Return how often a tensor was written; None where that is not counted."""
    counted = is_a(value, torch.Tensor) and value.layout is torch.strided and not value.is_inference()
    return value._version if counted else None


def strides_of(value: Any) -> Strides | None:
    """Return how a tensor lies; symbols count as what they were at first."""
    if not is_a(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
        return None
    shape, steps = [*map(hint_of, value.shape)], tuple(map(hint_of, value.stride()))
    reach = hint_of(value.untyped_storage().nbytes()) // value.element_size()
    lies = strides_from(shape, steps, hint_of(value.storage_offset()), reach)
    return lies._replace(conjugated=value.is_conj(), negated=value.is_neg())


def strides_from(shape: Sequence[int], steps: tuple[int, ...], offset: int, reach: int) -> Strides:
    """Return how a tensor of these numbers lies."""
    repeated = frozenset(axis for axis, step in enumerate(steps) if step == 0 and shape[axis] > 1)
    once = [1 if axis in repeated else size for axis, size in enumerate(shape)]
    return Strides(dense_order(once, steps), repeated, steps, offset, reach)


def dense_order(shape: Sequence[int], steps: Sequence[int]) -> tuple[int, ...] | None:
    """Return the axes of a tensor from the outermost on; None if its elements do not lie side by side."""
    order = sorted(range(len(shape)), key=lambda axis: (-steps[axis], -shape[axis], axis))
    expected = 1
    for axis in reversed(order):
        if shape[axis] != 1:
            if steps[axis] != expected:
                return None
            expected *= shape[axis]
    return tuple(order)


def laid_in(tensor: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor, or a copy of it, whose axes lie in memory in that order."""
    if list(axes) == sorted(axes):
        return tensor.contiguous()
    return tensor.permute(axes).contiguous().permute(sorted(range(len(axes)), key=axes.__getitem__))


def _memory_of(tensor: torch.Tensor) -> int:
    return storage_of(tensor) if tensor.layout is torch.strided else -id(tensor)


def storage_of(tensor: torch.Tensor) -> int:
    """Return a key of the memory behind `tensor`, which ``torch.vmap`` may hold."""
    while torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return int(tensor.untyped_storage()._cdata)


def are_apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Say whether no two of these tensors share memory."""
    return len({*map(storage_of, tensors)}) == len(tensors)
