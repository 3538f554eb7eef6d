"""Tensor operators, and the instructions that may become one: arithmetic, comparison, subscripts."""

from __future__ import annotations

import operator
import types
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import torch
import torch.fx

from ladder.capture import natives, tensors
from ladder.capture.frames import NULL
from ladder.capture.kinds import is_a, is_constant, is_plain, mapped
from ladder.capture.segment import CaptureError, Dynamic, Node
from ladder.capture.shapes import DynamicSize
from ladder.capture.symbolic import real_values
from ladder.capture.user_operators import COMPARE, METHODS, UserOperators
from ladder.capture.words import words

BINARY = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "@": operator.matmul,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "+=": operator.iadd,
    "-=": operator.isub,
    "*=": operator.imul,
    "/=": operator.itruediv,
    "//=": operator.ifloordiv,
    "%=": operator.imod,
    "**=": operator.ipow,
    "@=": operator.imatmul,
    "<<=": operator.ilshift,
    ">>=": operator.irshift,
    "&=": operator.iand,
    "|=": operator.ior,
    "^=": operator.ixor,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
}
UNARY: dict[str, Any] = {"-": operator.neg, "~": operator.invert, "+": operator.pos}
_IN_PLACE = frozenset(f"{symbol}=" for symbol in METHODS)
_NOT_IN_PLACE = {BINARY[symbol]: BINARY[symbol[:-1]] for symbol in _IN_PLACE}
"""``number += tensor`` changes nothing in place, and is no statement where the number is written out."""
_DYNAMIC_SAFE = frozenset(words("add sub mul truediv div rsub pow neg true_divide add_ sub_ mul_ div_"))
_DYNAMIC_SAFE |= {f"i{name}" for name in ("add", "sub", "mul", "truediv")}
_DYNAMIC_SAFE |= {"lt", "le", "gt", "ge", "eq", "ne", "clamp", "clamp_min", "clamp_max"}
_CONTAINERS = (list, tuple, dict, set, frozenset)
_FX_CONSTANTS: tuple[Any, ...] = (
    int,
    float,
    complex,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
)
_FX_CONSTANTS = (*_FX_CONSTANTS, torch.memory_format, type(...), torch._ops.OpOverload)


_SETTERS = frozenset({operator.setitem, torch.Tensor.__setitem__})


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


class Operations(UserOperators):
    """`operator`, `binary`, `compare`, `unary`, `subscript`, `truth`."""

    # tensor operators -------------------------------------------------------------------------
    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a tensor operator; it becomes a node of the graph if only tensors come of it."""
        if not self.recording:
            return self.natively(function, *args, **kwargs)
        if getattr(function, "__name__", "") not in _DYNAMIC_SAFE or not self.segment.numbers:
            args = tuple(map(self.settled_for_operator, args))
        kwargs = {key: self.settled_for_operator(value) for key, value in kwargs.items()}
        inputs: list[Node] = []
        fx_args = self._fx(args, inputs)
        fx_kwargs = self._fx(kwargs, inputs)
        values, named = real_values(args), real_values(kwargs)
        monitor = tensors.Monitor()
        try:
            with monitor:
                result = function(*values, **named)
        except Exception as error:
            self.segment.late = monitor.counted
            return self._failed(function, values, named, error)
        if self._value_is_known(function, inputs, result):
            return result
        self._fix_read_numbers(monitor)
        split = self._must_split(function, result, monitor, inputs)
        if monitor.mutated and torch.is_grad_enabled():
            split = self._meet_written(monitor) or split
        if split:
            self.segment.late = monitor.counted  # it has run, and is not in the graph
            given = {key: self.plain(value) for key, value in kwargs.items()}
            return self._split_after(function, tuple(map(self.plain, args)), given, result, split)
        self._note_effects(monitor)
        # `backward`, `requires_grad_` and the like change what no kernel writes.
        if function not in _SETTERS and function not in tensors.STATE_WRITES:
            in_place = getattr(function, "__name__", "").endswith("_") and not monitor.mutated
            self.segment.impure |= result is None or (in_place and bool(args) and result is args[0])
        self.segment.asserts |= [] in monitor.risks
        node = self._fx_call(function, fx_args, fx_kwargs)
        self.segment.operators += 1
        dynamic = monitor.dynamic or any(item.dynamic for item in inputs)
        constant = not monitor.random and all(item.constant for item in inputs)
        self._fx_result(result, node, dynamic)
        for tensor in _leaves(result):
            self.segment.node(tensor).constant |= constant and not monitor.mutated
        for tensor, fake in self.fake_results(function, args, kwargs, inputs, result):
            self.segment.node(tensor).fake = fake
        return result

    def _value_is_known(self, function: Any, inputs: list[Node], result: Any) -> bool:
        """Say whether a number read from a tensor is the same in all runs, or is assumed to be and checked.

        Tensors made of numbers alone are the same. What others hold is checked when the graph has run;
        where that has failed before, the program is split instead.
        """
        if type(result) not in (bool, int, float) or function in tensors.STATE_WRITES or not inputs:
            return False
        if all(node.constant for node in inputs):
            return True
        site, here = self.site, self.here()
        reads = len(inputs) == 1 and getattr(function, "__name__", "") in tensors.READS_A_NUMBER
        if not reads or site is None or here in site.surprising or self.is_aside() or inputs[0].dynamic:
            return False
        branches = function is torch.Tensor.__bool__ or (type(result) is bool and site.layouts)
        if self.captured.joins and branches:
            return False  # both of the sides are recorded
        copy = self.operator(torch.clone, (inputs[0].obj,), {})
        self.segment.assumed.append((self.segment.node(copy), result, here))
        return True

    def is_aside(self) -> bool:
        """Say whether a side of a branch is being recorded beside the run itself."""
        return False

    def _fix_read_numbers(self, monitor: tensors.Monitor) -> None:
        """Let an operator that takes a constant tensor for a number be of known shape."""
        nodes = [self.segment.nodes.get(id(tensor)) for tensor in monitor.read]
        if monitor.dynamic and monitor.read and not monitor.shape_depends:
            monitor.dynamic = not all(node is not None and node.constant for node in nodes)

    def _failed(self, function: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        plan = self.try_plan(function, tuple(map(self.plain, args)), kwargs, "push", "an operator failed")
        if plan is not None:
            self.finish(plan, error)
        raise error

    def _must_split(self, function: Any, result: Any, monitor: tensors.Monitor, inputs: list[Node]) -> str:
        """Say why the program must be split at an operator that has just run; empty if it need not."""
        if function in tensors.STATE_WRITES:
            self.segment.state_written = True
            if "autocast" in function.__name__:
                self.segment.meet_autocast()
            return ""
        if not _only_tensors(result):
            return "a value is read from a tensor"
        if self._may_fail(monitor):
            self.segment.may_fail = True
            if self.segment.impure:
                return "an operator that may fail comes after a change"
        if any(item.dynamic for item in inputs) and is_a(result, tuple | list):
            return "the number of results may depend on values"
        if any(item.dynamic for item in inputs) and any(self.segment.find(t) for t in _leaves(result)):
            return "an alias that depends on values"
        return ""

    def _meet_written(self, monitor: tensors.Monitor) -> str:
        """Guard that autograd will let tensors be written again; say why to split where that is not known."""
        segment, unknown = self.segment, False
        for node in segment.tensors:
            if node.obj.layout is torch.strided and tensors.storage_of(node.obj) in monitor.mutated:
                if "written" not in node.seen:
                    node.seen.add("written")
                    text = f"({node.var}.is_leaf, {node.var}._is_view()) == {segment.constant(node.autograd)}"
                    segment.check(text, f"{segment.paths.get(node.var)} is a leaf, a view or neither")
                unknown |= node.autograd[1]
        return "a view from outside is written after a change" if unknown and segment.changes_tensors else ""

    def _may_fail(self, monitor: tensors.Monitor) -> bool:
        """Tell whether what has just run may raise in a later run; its indices are known to be good then."""
        proven, risks = self.segment.proven, monitor.risks
        fails = any(risk is None or not all(map(proven.covers, risk)) for risk in risks)
        for use in (use for risk in risks for use in risk or ()):
            proven.add(use)
        return fails

    def _split_after(self, function: Any, args: Any, kwargs: Any, result: Any, why: str) -> Any:
        plan = self.try_plan(function, args, kwargs, "push", why)
        if plan is not None:
            self.fork(plan, function, args, kwargs, result)
        return result if plan is None or not self.recording else self.finish(plan, result)

    def _note_effects(self, monitor: tensors.Monitor) -> None:
        segment = self.segment
        segment.random |= monitor.random
        if monitor.mutated:
            segment.written_memory = True
            for node in segment.graph_values:
                is_strided = is_a(node.obj, torch.Tensor) and node.obj.layout is torch.strided
                if node.constant and is_strided and tensors.storage_of(node.obj) in monitor.mutated:
                    node.constant = False
            strided = [node for node in segment.tensors if node.obj.layout is torch.strided]
            written = [node for node in strided if tensors.storage_of(node.obj) in monitor.mutated]
            segment.written.update({tensors.storage_of(node.obj): node for node in written})

    def _fx_call(self, function: Any, args: Any, kwargs: Any) -> torch.fx.Node:
        graph = self.segment.graph
        described = is_a(function, types.MethodDescriptorType | types.WrapperDescriptorType)
        method = is_a(function, types.FunctionType) and function.__qualname__.startswith("Tensor.")
        if described and function.__name__ in ("__getitem__", "__setitem__"):
            return graph.call_function(getattr(operator, function.__name__.strip("_")), args, kwargs)
        if (described or method) and args and is_a(args[0], torch.fx.Node):
            self.segment.class_attribute(torch.Tensor, function.__name__)
            return graph.call_method(function.__name__, args, kwargs)
        if is_a(function, torch.jit.ScriptFunction):
            function = tensors.scripted(function)
        if args and not is_a(args[0], torch.fx.Node):
            function = _NOT_IN_PLACE.get(function, function)
        return graph.call_function(function, args, kwargs)

    def _fx(self, value: Any, inputs: list[Node]) -> Any:
        """Return `value` as an argument of a graph node."""
        if type(value) is Dynamic:
            if self.segment.shapes is not None:
                self.segment.shapes.given[value.var] = value.symbol
            return self._placeholder(value.var, value.value)
        if is_a(value, torch.Tensor):
            return self._fx_tensor(value, inputs)
        if type(value) in (list, tuple, torch.Size, DynamicSize):
            self.segment.touch(value, 1)
            items = [self._fx(item, inputs) for item in value]
            return items if type(value) is list else tuple(items)
        if type(value) is dict:
            return {key: self._fx(item, inputs) for key, item in value.items()}
        if type(value) is slice:
            return mapped(value, lambda part: self._fx(part, inputs))
        if is_a(value, np.generic):
            return value.item()
        if is_a(value, _FX_CONSTANTS) and type(value) in _FX_CONSTANTS:
            return value
        raise CaptureError(f"an operator takes {type(value).__qualname__}")

    def _fx_tensor(self, value: torch.Tensor, inputs: list[Node]) -> torch.fx.Node:
        if not tensors.is_plain_tensor(value):
            raise CaptureError("an operator on a tensor subclass")
        node = self.segment.node(value)
        inputs.append(node)
        if node.fx is None:
            if not node.external:
                raise CaptureError("a tensor that was not made by an operator")
            if node.obj.layout is not torch.strided:
                raise CaptureError("a tensor that is not strided")
            node.fx = self._placeholder(node.var, value)
        return node.fx

    def _placeholder(self, var: str, example: Any) -> torch.fx.Node:
        segment = self.segment
        known = segment.placed.get(var)
        if known is not None:
            return known
        graph, last = segment.graph, segment.placeholders[-1][0] if segment.placeholders else None
        with graph.inserting_before(None) if last is None else graph.inserting_after(last):
            node = graph.placeholder(var if var.isidentifier() else f"a{len(segment.placeholders)}")
        segment.placeholders.append((node, var, example))
        segment.placed[var] = node
        segment.versions[var] = tensors.version_of(example)
        return node

    def _fx_result(self, result: Any, fx: torch.fx.Node, dynamic: bool) -> None:
        if is_a(result, torch.Tensor):
            known = self.segment.find(result)
            if known is not None:
                return
            node = Node(result, self.segment.fresh_name(), external=False)
            node.fx, node.dynamic = fx, dynamic
            node.seen.add("graph")
            self.segment.nodes[id(result)] = node
            self.segment.keep.append(result)
            self.segment.graph_values.append(node)
        elif is_a(result, tuple | list):
            whole = Node(result, self.segment.fresh_name(), external=False)
            whole.fx, whole.full = fx, True
            self.segment.nodes[id(result)] = whole
            self.segment.keep.append(result)
            self.segment.graph_values.append(whole)
            for index, item in enumerate(result):
                if item is not None:
                    part = self.segment.graph.call_function(operator.getitem, (fx, index))
                    part.meta["part"] = True
                    self._fx_result(item, part, dynamic)

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
        if type(left) is Dynamic and symbol in _IN_PLACE:
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
        if symbol in _IN_PLACE and not is_a(left, torch.Tensor):
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
        changes = [self.segment.node(left)] if in_place and type(left) in (list, set, dict) else []
        return self.perform(function, (left, right), {}, changes)

    def same(self, left: Any, right: Any) -> bool:
        """Return ``left is right``, guarded."""
        left, right = self.plain(left), self.plain(right)
        if self.recording:
            nodes = [self.segment.find(item) for item in (left, right)]
            if nodes[0] and nodes[1] and nodes[0] is not nodes[1] and nodes[0].external and nodes[1].external:
                self.segment.check(f"{nodes[0].var} is not {nodes[1].var}", "two objects are not the same")
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
            node = self.segment.find(value)
            if node is not None and node.pinned and not value and not node.mutated and not node.full:
                node.full = True
                self.segment.table.empty.append(value)
                return False
            if node is not None and node.external and not node.full and not node.mutated:
                size = self.segment.constant(type(value).__len__)
                holds = len(value) > 0
                self.segment.check(f"({size}({node.var}) > 0) is {holds}", f"{node.var} is empty or not")
                node.full = False
                if not holds:
                    self.segment.touch(value, 1)
            return bool(value)
        if is_a(value, torch.Tensor):
            raise CaptureError("the truth of a tensor")
        kind = type(value)
        for name in ("__bool__", "__len__"):
            method = self.segment.class_attribute(kind, name)
            if is_a(method, types.FunctionType):
                with self.barrier():
                    return self.truth_as(name, self.call_function(method, (value,), {}))
            if method is not NULL:
                raise CaptureError("a native truth value")
        return True

    def _has_no_truth(self, kind: type) -> bool:
        """Say whether the truth of instances of a class of containers is that of their length."""
        return self.segment.class_attribute(kind, "__bool__") is NULL

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
        if is_constant(container) and is_constant(item) and self.segment.find(container) is None:
            return item in container
        view = self.segment.find(container) if kind in natives.VIEWS else None
        if view is not None and view.source is not None:
            return self._holds(view.source, item)
        method = self.segment.class_attribute(kind, "__contains__")
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
            self.segment.touch(container, 1)
            return container[key]
        elif is_a(container, list | tuple | dict | deque):
            method = self.segment.class_attribute(type(container), "__getitem__")
            if not is_a(method, types.FunctionType):
                return self.container_method(method, container, "__getitem__", (key,), {})
        method = self.segment.class_attribute(type(container), "__getitem__")
        if is_a(method, types.FunctionType):
            return self.call_function(method, (container, key), {})
        raise CaptureError(f"{type(container).__qualname__} is subscripted")

    def _plain_items(self, container: Any) -> bool:
        own = type(container) is DynamicSize
        return own or self.segment.class_attribute(type(container), "__getitem__") is tuple.__getitem__

    def tuple_item(self, container: tuple[Any, ...], key: int) -> Any:
        node = self.segment.find(container)
        if node is not None and node.pinned:
            self.segment.touch(container, 1)
        if node is None or not node.external or node.pinned:
            return container[key]
        size = self.segment.constant(len(container))
        if "len" not in node.seen:
            node.seen.add("len")
            self.segment.check(f"len({node.var}) == {size}", f"len({node.var})")
        index = key if key >= 0 else key + len(container)
        item = tuple.__getitem__(container, key)
        path = f"{self.segment.paths.get(node.var, node.var)}[{index}]"
        return self.segment.load(node, index, item, f"{node.var}[{index}]", path)

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
        method = self.segment.class_attribute(type(container), "__setitem__")
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
        node = self.segment.node(container)
        if node.external and not node.mutated and len(container) <= 64 and not self.changes_often(node):
            self.segment.touch(container, 1)
        if self._dict_read(container, "__contains__", (key,), None) is NULL:
            self.segment.touch(container, 1)
        uses: set[str] = set()
        target = self.segment.reference(container, uses)
        text = (
            f"dict.__setitem__({target}, {self.segment.constant(key)}, {self.segment.reference(item, uses)})"
        )
        dict.__setitem__(container, key, self.unlifted(item))
        node.wrote(key, item)
        self.segment.change(text, [node], uses)

    def delete_subscript(self, container: Any, key: Any) -> None:
        """Do ``del container[key]``."""
        container, key = self.plain(container), self.plain(key)
        if not self.recording:
            self.natively(operator.delitem, container, key)
            return
        self.recorded(self._delete_subscript, (container, key), (operator.delitem, (container, key)))

    def _delete_subscript(self, container: Any, key: Any) -> None:
        method = self.segment.class_attribute(type(container), "__delitem__")
        if is_a(method, types.FunctionType):
            self.call_in_statement(method, (container, key))
        elif is_a(container, list | dict | deque):
            self.container_method(method, container, "__delitem__", (key,), {})
        else:
            raise CaptureError("an item is deleted natively")


def _only_tensors(result: Any) -> bool:
    if is_a(result, torch.Tensor):
        return tensors.is_plain_tensor(result)
    if is_a(result, tuple | list):
        kind = type(result)
        known = kind in (tuple, list) or kind.__module__.startswith("torch.return_types")
        return known and bool(result) and all(item is None or _only_tensors(item) for item in result)
    return result is None


def _leaves(result: Any) -> list[torch.Tensor]:
    if is_a(result, torch.Tensor):
        return [result]
    return [leaf for item in result for leaf in _leaves(item)] if is_a(result, tuple | list) else []
