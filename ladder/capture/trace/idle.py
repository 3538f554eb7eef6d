"""Memory of results that the program has let go of is given back while a segment is recorded.

The trace knows tensors by their identity and keeps them all, but nothing reads what they held once no
variable, container or view of the program reaches them. Without this, recording would take the memory of all
results.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ladder.capture.values.aliasing import storage_of
from ladder.capture.values.kinds import is_a

LEAST_BYTES = 1 << 20
"""Bytes of a tensor from which on its memory is worth looking after."""

BETWEEN_LOOKS = 64 << 20
"""Bytes of new results after which there is a look at which are reached; or half of what was, if more."""

KNOWN_LIBRARIES = ("aten", "prims", "prim", "ladder")
"""Namespaces of operators that keep none of their arguments."""

RECORDED = 2
"""References to an object that is recorded: of its node, and of the call that counts them."""


class Idle:
    """Results that may be let go of.

    values: Those with memory of their own (``obj`` is the tensor), of a program without gradients.
    given: Ids of what operators gave: one value more has each.
    fresh: Bytes since the last look; `due`: how many bring about the next.
    off: Whether memory is left alone, since what autograd keeps is not seen here.
    """

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.given: set[int] = set()
        self.fresh, self.due = 0, BETWEEN_LOOKS
        self.off = False

    def release(self) -> None:
        """Drop all references to tensors."""
        self.values, self.given = [], set()

    def add(self, value: Any) -> None:
        """Note what an operator has given."""
        tensor = value.obj
        if self.off or tensor is None:
            return
        self.given.add(id(tensor))
        if not is_a(tensor, torch.Tensor):
            return
        kept = tensor.requires_grad and torch.is_grad_enabled()  # views of parameters always require them
        if kept or torch.autograd.forward_ad._current_level >= 0:
            self.off = True
            self.release()
        elif _has_memory(tensor) and not (value.constant or value.held):
            self.values.append(value)
            self.fresh += tensor.untyped_storage().nbytes()

    def keep(self, function: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the arguments of an operator of a library that is not known: it may have taken them."""
        namespace = getattr(function, "namespace", "aten")
        name = getattr(function, "_qualified_op_name", "aten::").partition("::")[0]
        if {namespace, name} - {*KNOWN_LIBRARIES}:
            taken = {storage_of(tensor) for tensor in tensors if _has_memory(tensor)}
            self.values = [value for value in self.values if storage_of(value.obj) not in taken]

    def look(self, heap: Any) -> None:
        """Give back the memory of results that nothing reaches, if there is much that is new."""
        if self.fresh < self.due:
            return
        groups: dict[int, list[Any]] = {}
        for value in self.values:
            groups.setdefault(storage_of(value.obj), []).append(value)
        bases = {id(value.obj._base) for value in self.values if value.obj._is_view()}
        recorded, self.values, reached = _Recorded(heap, self.given, bases), [], 0
        for members in groups.values():
            idle = all(recorded.alone(id(v.obj)) and not (v.constant or v.held) for v in members)
            if idle and _own_memory([value.obj for value in members], heap.nodes):
                members[0].obj.untyped_storage().resize_(0)
            else:
                self.values += members
                reached += members[0].obj.untyped_storage().nbytes()
        self.fresh, self.due = 0, max(BETWEEN_LOOKS, reached // 2)


class _Recorded:
    """Which objects the recording alone has, in this moment.

    nodes: Id of an object -> its node.
    kept: Id of an object -> further references to it.
    within: Id of an object -> those of the containers that have it.
    """

    def __init__(self, heap: Any, given: Iterable[int], bases: Iterable[int]) -> None:
        self.nodes: Mapping[int, Any] = heap.nodes
        self.kept = Counter(map(id, heap.guard.keep))
        self.kept.update(given)
        self.kept.update(list(heap.shapes.quick))  # beside their fakes
        self.kept.update(bases if BASES_COUNT else ())
        self.known: dict[int, bool] = {}
        self.within: dict[int, list[int]] = {}
        for at, node in self.nodes.items():
            for part in () if node.external else _parts(node.obj):
                if id(part) in self.nodes:
                    self.within.setdefault(id(part), []).append(at)

    def alone(self, at: int) -> bool:
        """Tell whether the object of an id is reached by nothing but the recording, and what it alone has."""
        if at not in self.known:
            self.known[at] = False  # of a container that is within itself
            node = self.nodes.get(at)
            self.known[at] = node is not None and self._counted(node, at)
        return self.known[at]

    def _counted(self, node: Any, at: int) -> bool:
        references = RECORDED + self.kept[at]
        references += sum(self.alone(container) for container in self.within.get(at, ()))
        watched = is_a(node.obj, torch.Tensor) and weakref.getweakrefcount(node.obj)
        return not watched and sys.getrefcount(node.obj) <= references


def _parts(value: Any) -> Iterable[Any]:
    """Return the objects that a container, a function's closure or a variable of one has."""
    kind = type(value)
    if kind is tuple or kind is list:
        return value  # type: ignore[no-any-return]
    if kind is dict:
        return value.values()  # type: ignore[no-any-return]
    if kind is types.CellType:
        return gc.get_referents(value)
    if kind is types.FunctionType:
        return value.__closure__ or ()
    return ()


def _has_memory(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a plain one with much memory."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    if not plain or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    if tensor.device.type not in ("cpu", "cuda"):
        return False
    storage = tensor.untyped_storage()
    shared = tensor.device.type == "cpu" and storage.is_shared()  # of GPUs all say that they are
    return not shared and storage.nbytes() >= LEAST_BYTES and storage.resizable()


def _own_memory(tensors: Sequence[torch.Tensor], nodes: Mapping[int, Any]) -> bool:
    """Tell whether tensors share their memory with none but bases that their views alone have."""
    own = {id(tensor) for tensor in tensors}
    hidden = {id(tensor._base): tensor for tensor in tensors if tensor._is_view()}
    for at in own & hidden.keys():
        del hidden[at]
    if any(at in nodes or _base_references(view) > OF_HIDDEN_BASE for at, view in hidden.items()):
        return False
    owners, handles = _holders(tensors[0])
    return owners <= OF_ONE[0] + len(own) + len(hidden) - 1 and handles <= OF_ONE[1]


def _base_references(view: torch.Tensor) -> int:
    """Return how many have the base of a view by name, with this call."""
    return sys.getrefcount(view._base)


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how many own a tensor's memory, and how many have it by name; both count this call."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _bases_count() -> bool:
    base = torch.empty(2, device="cpu")
    alone = sys.getrefcount(base)
    view = base.view(2)
    return sys.getrefcount(base) > alone and view is not None


def _of_hidden_base() -> int:
    view = torch.empty(2, device="cpu").view(2)
    return max(_base_references(view) for _ in range(2))


OF_ONE = _holders(torch.empty(1, device="cpu"))
"""What `_holders` says of a tensor alone."""

BASES_COUNT = _bases_count()
"""Whether Python counts one reference more to a tensor that a view has as its base."""

OF_HIDDEN_BASE = _of_hidden_base()
"""References to a base that its view alone has, as `_base_references` says."""
