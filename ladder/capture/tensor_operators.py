"""Tensor operators: run, watched, and added to the graph."""

from __future__ import annotations

import operator
import types
from typing import Any

import numpy as np
import torch
import torch.fx

from ladder.capture import tensors
from ladder.capture.kinds import is_a, mapped
from ladder.capture.nodes import CaptureError, Dynamic
from ladder.capture.shapes import DynamicSize
from ladder.capture.symbolic import real_values
from ladder.capture.symbols import BINARY, IN_PLACE
from ladder.capture.trace import Assumption, Value
from ladder.capture.user_operators import UserOperators
from ladder.capture.words import words

_NOT_IN_PLACE = {BINARY[symbol]: BINARY[symbol[:-1]] for symbol in IN_PLACE}
"""``number += tensor`` changes nothing in place, and is no statement where the number is written out."""
_DYNAMIC_SAFE = frozenset(words("add sub mul truediv div rsub pow neg true_divide add_ sub_ mul_ div_"))
_DYNAMIC_SAFE |= {f"i{name}" for name in ("add", "sub", "mul", "truediv")}
_DYNAMIC_SAFE |= {"lt", "le", "gt", "ge", "eq", "ne", "clamp", "clamp_min", "clamp_max"}
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


class TensorOperators(UserOperators):
    """`operator`."""

    # tensor operators -------------------------------------------------------------------------
    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a tensor operator; it becomes a node of the graph if only tensors come of it."""
        if not self.recording:
            return self.natively(function, *args, **kwargs)
        if getattr(function, "__name__", "") not in _DYNAMIC_SAFE or not self.heap.numbers:
            args = tuple(map(self.settled_for_operator, args))
        kwargs = {key: self.settled_for_operator(value) for key, value in kwargs.items()}
        inputs: list[Value] = []
        fx_args = self._fx(args, inputs)
        fx_kwargs = self._fx(kwargs, inputs)
        values, named = real_values(args), real_values(kwargs)
        monitor = tensors.Monitor()
        try:
            with monitor:
                result = function(*values, **named)
        except Exception as error:
            self.trace.late = monitor.counted
            return self._failed(function, values, named, error)
        if self._value_is_known(function, inputs, result):
            return result
        self._fix_read_numbers(monitor)
        split = self._must_split(function, result, monitor, inputs)
        if monitor.mutated and torch.is_grad_enabled():
            split = self._meet_written(monitor) or split
        if split:
            self.trace.late = monitor.counted  # it has run, and is not in the graph
            given = {key: self.plain(value) for key, value in kwargs.items()}
            return self._split_after(function, tuple(map(self.plain, args)), given, result, split)
        self.trace.note(monitor, ((node.var, node.obj) for node in self.heap.tensors))
        # `backward`, `requires_grad_` and the like change what no kernel writes.
        if function not in _SETTERS and function not in tensors.STATE_WRITES:
            in_place = getattr(function, "__name__", "").endswith("_") and not monitor.mutated
            self.trace.impure |= result is None or (in_place and bool(args) and result is args[0])
        node = self._fx_call(function, fx_args, fx_kwargs)
        self.trace.operators += 1
        dynamic = monitor.dynamic or any(item.dynamic for item in inputs)
        constant = not monitor.random and all(item.constant for item in inputs)
        self._fx_result(result, node, dynamic)
        for tensor in _leaves(result):
            self.value(tensor).constant |= constant and not monitor.mutated
        for tensor, fake in self.fake_results(function, args, kwargs, inputs, result):
            self.heap.shapes.fakes[self.heap.node(tensor).var] = fake
        return result

    def _value_is_known(self, function: Any, inputs: list[Value], result: Any) -> bool:
        """Say whether a number read from a tensor is the same in all runs, or is assumed to be and checked.

        Tensors made of numbers alone are the same. What others hold is checked when the graph has run;
        where that has failed before, the program is split instead.
        """
        if type(result) not in (bool, int, float) or function in tensors.STATE_WRITES or not inputs:
            return False
        if all(value.constant for value in inputs):
            return True
        site, here = self.site, self.here()
        reads = len(inputs) == 1 and getattr(function, "__name__", "") in tensors.READS_A_NUMBER
        if not reads or site is None or here in site.surprising or self.is_aside() or inputs[0].dynamic:
            return False
        branches = function is torch.Tensor.__bool__ or (type(result) is bool and site.layouts)
        if self.captured.joins and branches:
            return False  # both of the sides are recorded
        copy = self.operator(torch.clone, (inputs[0].obj,), {})
        self.trace.assumed.append(Assumption(self.heap.node(copy).var, result, here))
        return True

    def is_aside(self) -> bool:
        """Say whether a side of a branch is being recorded beside the run itself."""
        return False

    def _fix_read_numbers(self, monitor: tensors.Monitor) -> None:
        """Let an operator that takes a constant tensor for a number be of known shape."""
        nodes = [self.heap.nodes.get(id(tensor)) for tensor in monitor.read]
        if monitor.dynamic and monitor.read and not monitor.shape_depends:
            monitor.dynamic = not all(node is not None and self.trace.is_constant(node.var) for node in nodes)

    def _failed(self, function: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        plan = self.try_plan(function, tuple(map(self.plain, args)), kwargs, "push", "an operator failed")
        if plan is not None:
            self.finish(plan, error)
        raise error

    def _must_split(self, function: Any, result: Any, monitor: tensors.Monitor, inputs: list[Value]) -> str:
        """Say why the program must be split at an operator that has just run; empty if it need not."""
        if function in tensors.STATE_WRITES:
            self.trace.state_written = True
            if "autocast" in function.__name__:
                self.heap.guard.meet_autocast()
            return ""
        if not _only_tensors(result):
            return "a value is read from a tensor"
        if self.trace.can_fail(monitor):
            self.trace.may_fail = True
            if self.trace.impure:
                return "an operator that may fail comes after a change"
        if any(item.dynamic for item in inputs) and is_a(result, tuple | list):
            return "the number of results may depend on values"
        if any(item.dynamic for item in inputs) and any(self.heap.find(t) for t in _leaves(result)):
            return "an alias that depends on values"
        return ""

    def _meet_written(self, monitor: tensors.Monitor) -> str:
        """Guard that autograd will let tensors be written again; say why to split where that is not known."""
        heap, unknown = self.heap, False
        for node in heap.tensors:
            if node.obj.layout is torch.strided and tensors.storage_of(node.obj) in monitor.mutated:
                if "written" not in node.seen:
                    node.seen.add("written")
                    text = f"({node.var}.is_leaf, {node.var}._is_view()) == {heap.constant(node.autograd)}"
                    heap.guard.check(text, f"{heap.guard.paths.get(node.var)} is a leaf, a view or neither")
                unknown |= node.autograd[1]
        return (
            "a view from outside is written after a change" if unknown and self.trace.changes_tensors else ""
        )

    def _split_after(self, function: Any, args: Any, kwargs: Any, result: Any, why: str) -> Any:
        plan = self.try_plan(function, args, kwargs, "push", why)
        if plan is not None:
            self.fork(plan, function, args, kwargs, result)
        return result if plan is None or not self.recording else self.finish(plan, result)

    def _fx_call(self, function: Any, args: Any, kwargs: Any) -> torch.fx.Node:
        graph = self.trace.graph
        described = is_a(function, types.MethodDescriptorType | types.WrapperDescriptorType)
        method = is_a(function, types.FunctionType) and function.__qualname__.startswith("Tensor.")
        if described and function.__name__ in ("__getitem__", "__setitem__"):
            return graph.call_function(getattr(operator, function.__name__.strip("_")), args, kwargs)
        if (described or method) and args and is_a(args[0], torch.fx.Node):
            self.heap.class_attribute(torch.Tensor, function.__name__)
            return graph.call_method(function.__name__, args, kwargs)
        if is_a(function, torch.jit.ScriptFunction):
            function = tensors.scripted(function)
        if args and not is_a(args[0], torch.fx.Node):
            function = _NOT_IN_PLACE.get(function, function)
        return graph.call_function(function, args, kwargs)

    def _fx(self, value: Any, inputs: list[Value]) -> Any:
        """Return `value` as an argument of a graph node."""
        if type(value) is Dynamic:
            if self.heap.shapes:
                self.heap.shapes.given[value.var] = value.symbol
            return self.trace.placeholder(value.var, value.value)
        if is_a(value, torch.Tensor):
            return self._fx_tensor(value, inputs)
        if type(value) in (list, tuple, torch.Size, DynamicSize):
            self.heap.touch(value, 1)
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

    def _fx_tensor(self, value: torch.Tensor, inputs: list[Value]) -> torch.fx.Node:
        if not tensors.is_plain_tensor(value):
            raise CaptureError("an operator on a tensor subclass")
        known = self.value(value)
        inputs.append(known)
        if known.fx is None:
            if not self.heap.node(value).external:
                raise CaptureError("a tensor that was not made by an operator")
            if value.layout is not torch.strided:
                raise CaptureError("a tensor that is not strided")
            known.fx = self.trace.placeholder(known.var, value)
        return known.fx

    def value(self, tensor: torch.Tensor) -> Value:
        """Return what the trace knows of a tensor."""
        return self.trace.value(self.heap.node(tensor).var, tensor)

    def _fx_result(self, result: Any, fx: torch.fx.Node, dynamic: bool) -> None:
        if is_a(result, torch.Tensor):
            if self.heap.find(result) is None:
                node = self.heap.computed(result)
                node.seen.add("graph")
                self.trace.add(Value(node.var, result, fx, dynamic))
        elif is_a(result, tuple | list):
            node = self.heap.computed(result)
            node.full = True
            self.trace.add(Value(node.var, result, fx))
            for index, item in enumerate(result):
                if item is not None:
                    part = self.trace.graph.call_function(operator.getitem, (fx, index))
                    part.meta["part"] = True
                    self._fx_result(item, part, dynamic)


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
