"""Instructions that may become tensor operators: arithmetic, comparison, truth, subscripts."""

from __future__ import annotations

import operator
import types
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import torch
import torch.fx

from ladder.capture import natives
from ladder.capture.frames import NULL
from ladder.capture.kinds import is_a, is_constant, is_plain
from ladder.capture.nodes import CaptureError, Dynamic
from ladder.capture.shapes import DynamicSize
from ladder.capture.symbols import BINARY, IN_PLACE, UNARY
from ladder.capture.tensor_operators import TensorOperators
from ladder.capture.user_operators import COMPARE

_CONTAINERS = (list, tuple, dict, set, frozenset)


def negated_contains(container: Any, item: Any) -> bool:
    """Return ``item not in container``."""
    return item not in container


class Answer:
    """An object of which CPython takes the truth or length that a method of another one gave."""

    __slots__ = ("answer", "name")

    def __init__(self, answer: Any, name: str) -> None:
        self.answer, self.name = answer, name

    def __len__(self) -> Any:
        return self.answer

    def __bool__(self) -> Any:
        return self.answer if self.name == "__bool__" else len(self) > 0


class Operations(TensorOperators):
    """`binary`, `compare`, `unary`, `subscript`, `truth`."""

    # arithmetic -------------------------------------------------------------------------------
    def binary(self, symbol: str, left: Any, right: Any) -> Any:
        """Return ``left symbol right``, also for comparisons and in-place forms."""
        function = BINARY[symbol]
        if not self.recording:
            return self.natively(function, left, right)
        return self.recorded(self._binary, (symbol, function, left, right), (function, (left, right)))

    def _binary(self, symbol: str, function: Any, left: Any, right: Any) -> Any:
        if symbol == "+" and DynamicSize in (type(left), type(right)):
            return self._joined_sizes(left, right)
        if is_a(left, torch.Tensor) or is_a(right, torch.Tensor):
            return self._tensor_binary(symbol, function, left, right)
        if type(left) is Dynamic and symbol in IN_PLACE:
            function = BINARY[symbol[:-1]]
        if self._pure_dynamic(function, (left, right), {}):
            return self._computed_dynamic(function, (left, right))
        left, right = self.plain(left), self.plain(right)
        if is_constant(left) and is_constant(right) and not self._user_constant(left, right):
            return function(left, right)
        known = (*_CONTAINERS, int, str)
        if is_a(left, known) and is_a(right, known):
            return self._container_binary(symbol, function, left, right)
        return self.user_binary(symbol, left, right)

    def _joined_sizes(self, left: Any, right: Any) -> Any:
        """Concatenate shapes, or a shape and a tuple."""
        if not (is_a(left, tuple) and is_a(right, tuple)):
            raise CaptureError("a shape is added to what is no tuple")
        values = [torch.Size(()) if type(item) is DynamicSize else type(item)(()) for item in (left, right)]
        joined = (*left, *right)
        return DynamicSize(joined) if type(values[0] + values[1]) is torch.Size else joined

    def _tensor_binary(self, symbol: str, function: Any, left: Any, right: Any) -> Any:
        left, right = (item if type(item) is Dynamic else self.plain(item) for item in (left, right))
        if is_a(right, np.generic):
            right = right.item()  # on the left, numpy would take over
        if symbol in IN_PLACE and not is_a(left, torch.Tensor):
            function = BINARY[symbol[:-1]]  # numbers have no in-place form
        other = right if is_a(left, torch.Tensor) else left
        if type(other) in (Dynamic, int, float, bool, complex) or is_a(other, torch.Tensor):
            return self.operator(function, (left, right), {})
        if other is None and symbol in ("==", "!="):
            return function(left, right)
        raise CaptureError(f"a tensor {symbol} {type(other).__qualname__}")

    def _user_constant(self, *values: Any) -> bool:
        """Say whether a constant is an instance of a class of the user's (an enum member)."""
        return any(type(v).__flags__ & 1 << 9 and type(v).__module__ != "torch" for v in values)

    def _container_binary(self, symbol: str, function: Any, left: Any, right: Any) -> Any:
        for item in (left, right):
            if type(item) not in natives.METHODS and not is_constant(item):
                raise CaptureError("arithmetic of a container subclass")
        looking = symbol in COMPARE or is_a(left, set | frozenset | dict) or symbol.startswith("%")
        for item in (left, right):
            self._admit(item, looking and not (is_a(left, dict) and symbol.startswith("|")))
        in_place = symbol.endswith("=") and symbol not in COMPARE and not is_constant(left)
        changes = [self.heap.node(left)] if in_place and type(left) in (list, set, dict) else []
        return self.perform(function, (left, right), {}, changes)

    def same(self, left: Any, right: Any) -> bool:
        """Return ``left is right``, guarded."""
        left, right = self.plain(left), self.plain(right)
        if self.recording:
            nodes = [self.heap.find(item) for item in (left, right)]
            if nodes[0] and nodes[1] and nodes[0] is not nodes[1] and nodes[0].external and nodes[1].external:
                self.heap.guard.check(f"{nodes[0].var} is not {nodes[1].var}", "two objects are not the same")
        return left is right

    def unary(self, symbol: str, value: Any) -> Any:
        """Return ``symbol value``."""
        function = UNARY[symbol]
        if not self.recording:
            return self.natively(function, value)
        return self.recorded(self._unary, (symbol, function, value), (function, (value,)))

    def _unary(self, symbol: str, function: Any, value: Any) -> Any:
        if is_a(value, torch.Tensor):
            return self.operator(function, (value,), {})
        if type(value) is Dynamic:
            return self._computed_dynamic(function, (value,))
        if is_constant(value) and not self._user_constant(value):
            return function(value)
        return self.user_unary(symbol, function, value)

    # truth and membership ---------------------------------------------------------------------
    def truth(self, value: Any) -> Any:
        """Return ``bool(value)``, or `NULL` if it must be read by a split."""
        value = self.plain(value)
        if not self.recording:
            return self.natively(bool, value)
        if is_a(value, bool) or value is None:
            return bool(value)
        if is_constant(value) and not self._user_constant(value):
            return bool(value)
        try:
            self.refuse_poisoned()
            return self._truth(value)
        except CaptureError:
            return NULL

    def _truth(self, value: Any) -> bool:
        known = type(value) in natives.METHODS
        if known or (is_a(value, _CONTAINERS) and self._has_no_truth(type(value))):
            self._check_not_overridden(type(value))
            node = self.heap.find(value)
            if node is not None and node.pinned and not value and not node.mutated and not node.full:
                node.full = True
                self.heap.guard.table.empty.append(value)
                return False
            if node is not None and node.external and not node.full and not node.mutated:
                size = self.heap.constant(type(value).__len__)
                holds = len(value) > 0
                self.heap.guard.check(f"({size}({node.var}) > 0) is {holds}", f"{node.var} is empty or not")
                node.full = False
                if not holds:
                    self.heap.touch(value, 1)
            return bool(value)
        if is_a(value, torch.Tensor):
            raise CaptureError("the truth of a tensor")
        kind = type(value)
        for name in ("__bool__", "__len__"):
            method = self.heap.class_attribute(kind, name)
            if is_a(method, types.FunctionType):
                with self.barrier():
                    return self.truth_as(name, self.call_function(method, (value,), {}))
            if method is not NULL:
                raise CaptureError("a native truth value")
        return True

    def _has_no_truth(self, kind: type) -> bool:
        """Say whether the truth of instances of a class of containers is that of their length."""
        return self.heap.class_attribute(kind, "__bool__") is NULL

    def decided(self, answer: Any) -> bool:
        """Return the truth of what a method of the program gave: guarded, or no longer recorded.

        The method is never called again, so that what it changed is changed once.
        """
        holds = self.truth(answer)
        if holds is NULL:
            self.stop(f"the truth of {type(answer).__qualname__}, which a method gave", self.here())
            holds = self.natively(bool, answer)
        return bool(holds)

    def truth_as(self, name: str, answer: Any) -> bool:
        """Return the truth of an object whose ``__bool__`` or ``__len__`` gave `answer`."""
        return bool(Answer(self.settled_answer(answer), name))

    def length_as(self, answer: Any) -> int:
        """Return the length of an object whose ``__len__`` gave `answer`."""
        return len(Answer(self.settled_answer(answer), "__len__"))

    def settled_answer(self, answer: Any) -> Any:
        """Return a guarded number; where CPython would ask `answer` for one, recording ends."""
        answer = self.plain(answer)
        if self.recording and not is_constant(answer):
            self.stop(f"{type(answer).__qualname__} stands for a number", self.here())
        return answer

    def contains(self, container: Any, item: Any, negate: bool) -> Any:
        """Return ``item in container`` or its negation."""
        container, item = self.plain(container), self.plain(item)
        function = negated_contains if negate else operator.contains
        if not self.recording:
            return self.natively(function, container, item)
        return self.recorded(self._contains, (container, item, negate), (function, (container, item)))

    def _contains(self, container: Any, item: Any, negate: bool) -> bool:
        return self._holds(container, item) is not negate

    def _holds(self, container: Any, item: Any) -> bool:
        kind = type(container)
        if is_constant(container) and is_constant(item) and self.heap.find(container) is None:
            return item in container
        view = self.heap.find(container) if kind in natives.VIEWS else None
        if view is not None and view.source is not None:
            return self._holds(view.source, item)
        method = self.heap.class_attribute(kind, "__contains__")
        if is_a(method, types.FunctionType):
            with self.barrier():
                return self.decided(self.call_function(method, (container, item), {}))
        if is_a(container, dict) and is_constant(item):
            quick = self._dict_read(container, "__contains__", (item,), None)
            if quick is not NULL:
                return bool(quick)
        if is_a(container, dict) and not is_plain(item):
            raise CaptureError("a key that is not a constant")
        if is_a(container, set) and self.identity_key(container, item):
            return item in container
        if not is_a(container, dict) and not (is_plain(container) and is_plain(item)):
            raise CaptureError("membership among objects")
        self._admit(container, not is_a(container, dict))
        self._admit(item, True)
        return item in container

    # subscripts -------------------------------------------------------------------------------
    def subscript(self, container: Any, key: Any) -> Any:
        """Return ``container[key]``."""
        container = self.plain(container) if type(container) not in (tuple, DynamicSize) else container
        key = self.plain(key) if not is_a(container, torch.Tensor) else key
        if not self.recording:
            return self.natively(operator.getitem, container, key)
        return self.recorded(self._subscript, (container, key), (operator.getitem, (container, key)))

    def _subscript(self, container: Any, key: Any) -> Any:
        if is_a(container, torch.Tensor):
            return self.operator(operator.getitem, (container, key), {})
        if type(container) is DynamicSize and type(key) is slice:
            return DynamicSize(container[key])
        if is_a(container, type | torch.nn.Module):
            pass
        elif is_a(container, tuple) and is_a(key, int) and self._plain_items(container):
            return self.tuple_item(container, key)
        elif is_constant(container) and is_constant(key) and not self._user_constant(container):
            return container[key]
        elif type(container) is tuple and type(key) is slice:
            self.heap.touch(container, 1)
            return container[key]
        elif is_a(container, list | tuple | dict | deque):
            method = self.heap.class_attribute(type(container), "__getitem__")
            if not is_a(method, types.FunctionType):
                return self.container_method(method, container, "__getitem__", (key,), {})
        method = self.heap.class_attribute(type(container), "__getitem__")
        if is_a(method, types.FunctionType):
            return self.call_function(method, (container, key), {})
        raise CaptureError(f"{type(container).__qualname__} is subscripted")

    def _plain_items(self, container: Any) -> bool:
        own = type(container) is DynamicSize
        return own or self.heap.class_attribute(type(container), "__getitem__") is tuple.__getitem__

    def tuple_item(self, container: tuple[Any, ...], key: int) -> Any:
        node = self.heap.find(container)
        if node is not None and node.pinned:
            self.heap.touch(container, 1)
        if node is None or not node.external or node.pinned:
            return container[key]
        size = self.heap.constant(len(container))
        if "len" not in node.seen:
            node.seen.add("len")
            self.heap.guard.check(f"len({node.var}) == {size}", f"len({node.var})")
        index = key if key >= 0 else key + len(container)
        item = tuple.__getitem__(container, key)
        path = f"{self.heap.guard.path(node.var)}[{index}]"
        return self.heap.load(node, index, item, f"{node.var}[{index}]", path)

    def store_subscript(self, container: Any, key: Any, item: Any) -> None:
        """Do ``container[key] = item``."""
        container, key = self.plain(container), self.plain(key)
        if not self.recording:
            self.natively(operator.setitem, container, key, item)
            return
        item = self.settled(item, keep=is_a(container, dict))
        given = (container, key, item)
        self.recorded(self._store_subscript, given, (operator.setitem, given))

    def _store_subscript(self, container: Any, key: Any, item: Any) -> None:
        if is_a(container, torch.Tensor):
            self.operator(operator.setitem, (container, key, item), {})
            return
        method = self.heap.class_attribute(type(container), "__setitem__")
        if is_a(method, types.FunctionType):
            self.call_in_statement(method, (container, key, item))
        elif is_a(container, dict) and is_constant(key) and not is_a(container, OrderedDict):
            self._store_key(container, key, item)
        elif is_a(container, list | dict | deque):
            self.container_method(method, container, "__setitem__", (key, item), {})
        else:
            raise CaptureError(f"an item of {type(container).__qualname__} is set")

    def _store_key(self, container: dict[Any, Any], key: Any, item: Any) -> None:
        """Set one key. Whether it was there decides the order of the keys, so that is guarded."""
        node = self.heap.node(container)
        if node.external and not node.mutated and len(container) <= 64 and not self.changes_often(node):
            self.heap.touch(container, 1)
        if self._dict_read(container, "__contains__", (key,), None) is NULL:
            self.heap.touch(container, 1)
        uses: set[str] = set()
        target = self.heap.reference(container, uses)
        text = f"dict.__setitem__({target}, {self.heap.constant(key)}, {self.heap.reference(item, uses)})"
        dict.__setitem__(container, key, self.unlifted(item))
        node.wrote(key, item)
        self.heap.change(text, [node], uses)

    def delete_subscript(self, container: Any, key: Any) -> None:
        """Do ``del container[key]``."""
        container, key = self.plain(container), self.plain(key)
        if not self.recording:
            self.natively(operator.delitem, container, key)
            return
        self.recorded(self._delete_subscript, (container, key), (operator.delitem, (container, key)))

    def _delete_subscript(self, container: Any, key: Any) -> None:
        method = self.heap.class_attribute(type(container), "__delitem__")
        if is_a(method, types.FunctionType):
            self.call_in_statement(method, (container, key))
        elif is_a(container, list | dict | deque):
            self.container_method(method, container, "__delitem__", (key,), {})
        else:
            raise CaptureError("an item is deleted natively")
