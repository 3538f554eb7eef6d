"""Tensor operators: run, watched, and added to the graph."""

from __future__ import annotations

import operator
import types
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.fx

from ladder.capture.heap.nodes import CaptureError, Itself, Node, Text
from ladder.capture.interpreter.branches import Abandoned, fork
from ladder.capture.interpreter.graph_arguments import argument, operator_node, value_of
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.interpreter.recording import try_break
from ladder.capture.interpreter.segments import finish
from ladder.capture.operations.counts import (
    alias_is_known,
    gives_as_many,
    may_compute,
    number_of,
    ranks_are_known,
)
from ladder.capture.operations.deep_copies import COPIES_MEMORY, meet_copied_memory
from ladder.capture.operations.function_modes import watched
from ladder.capture.operations.number_tensors import with_number_tensors
from ladder.capture.operations.objects import new_container
from ladder.capture.operations.symbolic import (
    fake_results,
    real_values,
    settle_extents,
    settled_for_operator,
)
from ladder.capture.python.frames import NULL
from ladder.capture.python.words import words
from ladder.capture.trace.assumptions import Assumption
from ladder.capture.trace.trace import Value
from ladder.capture.trace.undo import Effect, effect_of
from ladder.capture.values import settings, tensors
from ladder.capture.values.aliasing import laid_in, storage_of, strides_of
from ladder.capture.values.fakes import fails_without_values
from ladder.capture.values.kinds import is_a, is_constant, module_of
from ladder.capture.values.monitor import Monitor, Refused
from ladder.interrupts import pass_on
from ladder.runtime.registered import READ_ONLY

_TAKE_NUMBERS = frozenset(
    words("add sub mul truediv div rsub pow neg true_divide add_ sub_ mul_ div_ iadd isub imul itruediv")
    + words("lt le gt ge eq ne clamp clamp_min clamp_max clamp_ clamp_min_ clamp_max_")
    + words("addcmul addcmul_ addcdiv addcdiv_ lerp lerp_")
)
"""Operators whose results have the same shape and type whatever number they are given."""
_OTHERWISE_WATCHED = frozenset({torch.max_pool1d, torch.nn.functional.max_pool1d})
"""Operators whose results lie otherwise while a mode watches: torch then takes another of its ways."""
_SETTERS = frozenset({operator.setitem, torch.Tensor.__setitem__})


@watched
def tensor_operator(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a tensor operator; it becomes a node of the graph if only tensors come of it."""
    if not vm.recording:
        return vm.natively(function, *args, **kwargs)
    _meet_hooks(vm, function, args)
    if (made := with_number_tensors(vm, function, args, kwargs, tensor_operator)) is not NULL:
        return made
    args, kwargs = _settled_given(vm, function, args, kwargs)
    if getattr(function, "__module__", "") == operator.add.__module__:
        _meet_slots(vm, function.__name__.strip("_"))
    inputs: list[Value] = []
    nodes = argument(vm, args, inputs), argument(vm, kwargs, inputs)
    values, named = real_values(args), real_values(kwargs)
    monitor = Monitor(_untouched(vm, function, args) if vm.aside else None)
    try:
        result = _run(function, values, named, monitor)
    except Exception as error:
        pass_on(error)
        vm.trace.late = monitor.counted
        always = _fails_always(vm, function, (values, named), monitor, inputs, error)
        _failed(vm, function, *vm.plain_given(args, kwargs), error, always=always)
    _meet_read_only(vm, function, result, monitor)
    if (number := _read_number(vm, function, inputs, result)) is not NULL:
        return number
    _fix_read_numbers(vm, monitor)
    why = _must_break(vm, function, args, kwargs, result, monitor, inputs) or _meet_moved(vm, monitor)
    why = why or _cannot_wait(vm, function, args, result, monitor, inputs)
    if monitor.mutated and torch.is_grad_enabled():
        why = _meet_written(vm, monitor) or why
    if why:
        vm.trace.late = monitor.counted  # it has run, and is not in the graph
        return _break_after(vm, function, *vm.plain_given(args, kwargs), result, why)
    _note_effects(vm, function, args, result, monitor)
    if vm.heap.copies:
        _meet_memory(vm, function)
        vm.heap.copies.follow(function, values, named, result, monitor)
    node = operator_node(vm, function, *_in_order(vm, nodes, inputs, monitor))
    vm.trace.effects[node] = effect_of(node, (values, named), result, monitor)
    _note_result(vm, (function, args, kwargs), result, node, inputs, monitor)
    if not (_depends(monitor, inputs) or tensors.maps_rows()):
        _note_fakes(vm, function, args, kwargs, inputs, result)
    _give_back(vm, function, inputs)
    return result


def _give_back(vm: Interpreter, function: Any, inputs: list[Value]) -> None:
    """Give back the memory of results that the program does not reach any more."""
    vm.trace.idle.keep(function, [item.obj for item in inputs if is_a(item.obj, torch.Tensor)])
    if not (vm.aside or vm.trace.impure or vm.trace.replaced):
        vm.trace.idle.look(vm.heap)


def _in_order(vm: Interpreter, nodes: Any, inputs: list[Value], monitor: Monitor) -> Any:
    """Return an operator's arguments; of one that draws, with axes in memory as here: it draws in that order.

    Whoever traces the graph anew does not always know how kernels lay their results.
    """
    laid: dict[torch.fx.Node, torch.fx.Node] = {}
    for item in inputs if monitor.random and not tensors.maps_rows() else ():
        lies = strides_of(item.obj) if item.fx is not None and item.fx.op != "placeholder" else None
        if lies is None or lies.order is None or storage_of(item.obj) in monitor.mutated:
            continue
        assert item.fx is not None  # as it is computed
        laid[item.fx] = vm.trace.graph.call_function(laid_in, (item.fx, lies.order))
        vm.trace.effects[laid[item.fx]] = Effect()
    return torch.fx.map_arg(nodes, lambda node: laid.get(node, node))


def _run(function: Any, args: Any, kwargs: dict[str, Any], monitor: Monitor) -> Any:
    try:
        with monitor:
            result = function(*args, **kwargs)
        return function(*args, **kwargs) if function in _OTHERWISE_WATCHED else result
    except Refused:
        raise Abandoned("an operator on a side of a branch changes what is outside") from None


def _meet_read_only(vm: Interpreter, function: Any, result: Any, monitor: Monitor) -> None:
    vm.trace.refuse_writes(monitor.mutated, getattr(function, "__name__", str(function)))
    if row := READ_ONLY.get(function):
        vm.trace.read_only[storage_of(result)] = result, row


def _meet_memory(vm: Interpreter, function: Any) -> None:
    """Take arguments as they lie, and not copies of them, where an operator reads memory by strides."""
    if getattr(function, "__name__", "").startswith("as_strided"):
        vm.heap.fix_shapes("memory is read")


def _note_fakes(vm: Interpreter, function: Any, args: Any, kwargs: Any, inputs: Any, result: Any) -> None:
    for tensor, fake in fake_results(vm, function, args, kwargs, inputs, result):
        vm.heap.shapes.fakes[vm.heap.node(tensor).var] = fake


def read_list(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``Tensor.tolist``: its numbers are known or assumed as one number of a tensor is."""
    numbers = tensor_operator(vm, function, args, kwargs)
    return _listed(vm, numbers) if vm.recording and vm.heap.find(numbers) is None else numbers


def _listed(vm: Interpreter, numbers: Any) -> Any:
    if type(numbers) is not list:
        return numbers
    return new_container(vm, [_listed(vm, item) for item in numbers])


def _meet_slots(vm: Interpreter, name: str) -> None:
    """Guard the methods behind an operator's symbol: tensors may be given others, which no graph calls."""
    for method in (f"__{name}__", f"__r{name}__"):
        found = vm.heap.class_attribute(torch.Tensor, method)
        if is_a(found, types.FunctionType) and not module_of(found).startswith("torch."):
            raise CaptureError(f"{method} of tensors is not torch's")


def _meet_hooks(vm: Interpreter, function: Any, args: Any) -> None:
    """Let the graph break before what calls hooks of autograd, if they could see a change that is pending."""
    if function in tensors.CALLS_HOOKS and any(step.keep for step in vm.heap.steps):
        raise CaptureError("hooks of autograd may see what was changed before")
    if function is COPIES_MEMORY:
        meet_copied_memory(vm, args[0])


def _untouched(vm: Interpreter, function: Any, args: Any) -> set[int]:
    """Return the memory that a side of a branch must not write: it may run twice, or without effect.

    Raises Abandoned where `function` would change a tensor from outside otherwise.
    """
    gathers = function in tensors.CALLS_HOOKS and function is not torch.autograd.grad
    if gathers or (_is_in_place(function) and args and is_external(vm, args[0])):
        raise Abandoned("an operator on a side of a branch changes a tensor from outside")
    strided = [node.obj for node in vm.heap.tensors if node.obj.layout is torch.strided]
    return {*map(storage_of, strided)}


def _is_in_place(function: Any) -> bool:
    return bool(getattr(function, "__name__", "").endswith("_"))


def is_external(vm: Interpreter, value: Any) -> bool:
    """Say whether an object was there before the segment."""
    node = vm.heap.find(value)
    return node is not None and node.external


def _settled_given(vm: Interpreter, function: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Return arguments in which only what the graph can take is `Dynamic`, under ``torch.vmap`` nothing."""
    if tensors.maps_rows():
        settle_extents(vm, torch.utils._pytree.tree_leaves((args, kwargs)))
    if getattr(function, "__name__", "") in _TAKE_NUMBERS and vm.heap.numbers:
        return args, kwargs
    args = tuple(settled_for_operator(vm, value) for value in args)
    return args, {key: settled_for_operator(vm, value) for key, value in kwargs.items()}


def _note_effects(vm: Interpreter, function: Any, args: Any, result: Any, monitor: Monitor) -> None:
    vm.trace.note(monitor, ((node.var, node.obj) for node in _written(vm, monitor)))
    vm.trace.impure |= _is_impure(vm, function, args, result, monitor)


def _is_impure(vm: Interpreter, function: Any, args: Any, result: Any, monitor: Monitor) -> bool:
    """Tell whether a tensor from outside is changed otherwise than by writing its memory.

    `backward`, `requires_grad_` and the like change what no kernel writes, and gradients, which nothing
    puts back; autograd notes who wrote.
    """
    if monitor.mutated and function not in tensors.CALLS_HOOKS:
        return torch.is_grad_enabled() and any(node.obj.requires_grad for node in _written(vm, monitor))
    if function in _SETTERS or function in tensors.STATE_WRITES or function in settings.READS:
        return False
    in_place = _is_in_place(function) and bool(args) and result is args[0]
    return result is None or (in_place and is_external(vm, result))


def _written(vm: Interpreter, monitor: Monitor) -> list[Node]:
    """Return the tensors from outside in memory that an operator has written."""
    return vm.heap.tensors.in_memory(monitor.mutated)


def _note_result(
    vm: Interpreter, call: Any, result: Any, node: torch.fx.Node, inputs: list[Value], monitor: Monitor
) -> None:
    vm.trace.operators += 1
    depends = _depends(monitor, inputs)
    ranked = not depends or (
        all(item.ranked for item in inputs) and (not monitor.ranks or ranks_are_known(vm, *call))
    )
    mode = torch.is_inference_mode_enabled()
    _fx_result(vm, result, Value("", None, node, depends, ranked=ranked, inference=mode))
    open_numbers = set(node.all_input_nodes) - {item.fx for item in inputs}
    pure = not (monitor.random or monitor.mutated or open_numbers)
    constant = pure and all(item.constant for item in inputs)
    held = pure and all(item.constant or is_held(vm, item.obj) for item in inputs)
    for tensor in _leaves(result):
        value = value_of(vm, tensor)
        value.constant, value.held = value.constant or constant, value.held or held


def is_held(vm: Interpreter, tensor: Any) -> bool:
    """Say whether a tensor is one, or computed of some, that the program holds and has not written here."""
    node = vm.heap.find(tensor)
    if node is None or not is_a(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return False
    if not node.external:
        return value_of(vm, tensor).held
    return node.stable and storage_of(tensor) not in vm.trace.written and node.var not in vm.trace.replaced


def _read_number(vm: Interpreter, function: Any, inputs: list[Value], result: Any) -> Any:
    """Return numbers read from a tensor if they are the same in all runs, or assumed to be and checked.

    Tensors made of numbers alone are the same. What others hold is checked when the graph has run; where
    that has failed before, one number is the graph's, and only what the program decides by it is checked.
    Where that has failed too, the graph breaks: the result is `NULL`.
    """
    if not tensors.is_number_or_list(result) or function in tensors.STATE_WRITES or not inputs:
        return NULL
    if all(value.constant for value in inputs):
        return result
    point, here = vm.point, vm.here()
    reads = len(inputs) == 1 and getattr(function, "__name__", "") in tensors.READS_NUMBERS
    if not reads or point is None or bool(vm.aside) or vm.trace.impure:
        return NULL
    lists = type(result) is list
    if inputs[0].obj.numel() > tensors.MOST_NUMBERS if lists else inputs[0].dynamic:
        return NULL
    branches = function is torch.Tensor.__bool__ or (type(result) is bool and point.layouts)
    if vm.store.joins and branches:
        return NULL  # both of the sides are recorded
    if here in point.surprising:
        return _computed_number(vm, function, inputs[0].obj, result)
    if lists:  # their lengths are compared with them
        settle_extents(vm, [inputs[0].obj])
    assume(vm, inputs[0].obj, result, most=1 if type(result) is bool and vm.store.joins else 3)
    return result


def _computed_number(vm: Interpreter, function: Any, value: torch.Tensor, number: Any) -> Any:
    """Return what is read of a tensor as a number of the graph; `NULL` where it can be none."""
    if not may_compute(vm, number):
        return NULL
    return number_of(vm, tensor_operator(vm, torch.clone, (value,), {}), function.__name__, number)


def may_be_assumed(vm: Interpreter, value: torch.Tensor) -> bool:
    """Tell whether the truth of a tensor may be assumed, and compared after the graph has run."""
    if vm.point is None or vm.side is not None or vm.aside or vm.trace.impure:
        return False
    return vm.here() not in vm.point.surprising and not value_of(vm, value).dynamic


def assume(vm: Interpreter, value: torch.Tensor, number: Any, most: int = 3) -> None:
    """Assume a number read from a tensor; the record does not serve calls in which it differs."""
    copy = tensor_operator(vm, torch.clone, (value,), {})
    vm.trace.assumed.append(Assumption(vm.heap.node(copy).var, number, vm.here(), most))


def known_text(vm: Interpreter, text: Any) -> Any:
    """Return a string that is made of values of tensors as one of the numbers that they are assumed to be."""
    if type(text) is not Text:
        return text
    if not all(number is not None and may_be_assumed(vm, value) for value, number in text.numbers):
        return text
    for value, number in text.numbers:
        assume(vm, value, number)
    return str(text)


def _fix_read_numbers(vm: Interpreter, monitor: Monitor) -> None:
    """Let an operator that takes a constant tensor for a number be of known shape."""
    nodes = [vm.heap.nodes.get(id(tensor)) for tensor in monitor.read]
    if monitor.dynamic and monitor.read and not monitor.shape_depends:
        monitor.dynamic = not all(node is not None and vm.trace.is_constant(node.var) for node in nodes)


def _fails_always(
    vm: Interpreter, function: Any, given: Any, monitor: Monitor, inputs: list[Value], error: Exception
) -> bool:
    """Say whether an operator that has raised, and done nothing, does so for all tensors like these."""
    known = type(error).__module__ == "builtins" and is_constant(error.args)
    if not known or monitor.mutated or monitor.random or monitor.risks or _depends(monitor, inputs):
        return False
    taken = _leaves((*given[0], *given[1].values()))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in taken):
        return False  # whether it is a leaf or a view may decide
    if not fails_without_values(function, *given):
        return False
    if vm.heap.shapes:
        vm.heap.fix_shapes(f"{getattr(function, '__name__', function)} raised {type(error).__name__}")
    return True


def _failed(
    vm: Interpreter, function: Any, args: Any, kwargs: Any, error: Exception, *, always: bool
) -> NoReturn:
    """Raise what an operator has raised; unless it does so `always`, the graph breaks there."""
    if always:
        raise error
    if vm.aside:
        raise Abandoned("an operator failed on a side of a branch") from error
    graph_break = try_break(vm, function, args, kwargs, "push", "an operator failed")
    if graph_break is not None:
        finish(vm, graph_break, error)
    raise error


def _must_break(
    vm: Interpreter, function: Any, args: Any, kwargs: Any, result: Any, monitor: Monitor, inputs: list[Value]
) -> str:
    """Say why the graph must break at an operator that has just run; empty if it need not."""
    if function in settings.READS:
        return ""
    if function in tensors.STATE_WRITES:
        vm.trace.state_written = True
        if "autocast" in function.__name__:
            vm.heap.guard.meet_autocast()
        return ""
    if not _only_tensors(result):
        return "a value is read from a tensor"
    monitor.fails = vm.trace.can_fail(monitor)
    if monitor.fails:
        vm.trace.may_fail = True
        if vm.trace.impure:
            return "an operator that may fail comes after a change"
    if not any(item.dynamic for item in inputs):
        return ""
    if is_a(result, tuple | list) and not gives_as_many(vm, function, args, kwargs, result):
        return "how many tensors an operator gives may depend on values"
    given = any(vm.heap.find(tensor) for tensor in _leaves(result))
    if not alias_is_known(vm, function, args, kwargs, given=given):
        return "an alias that depends on values"
    return ""


def _cannot_wait(
    vm: Interpreter, function: Any, args: Any, result: Any, monitor: Monitor, inputs: list[Value]
) -> str:
    """Say why an operator must run after what is assumed has been compared, or data of tensors were set."""
    if vm.trace.assumed and _is_impure(vm, function, args, result, monitor):
        return "what is assumed of values may be wrong, and a change is not taken back"
    if vm.trace.replaced and _meets_replaced(vm, (function, *args), result, monitor, inputs):
        return "a tensor whose data were set is written, or shown by another"
    return ""


def _meets_replaced(vm: Interpreter, call: Any, result: Any, monitor: Monitor, inputs: list[Value]) -> bool:
    """Tell whether an operator writes what a tensor was given as its data, or makes a view of that tensor."""
    replaced = {storage_of(tensor) for tensor, _ in vm.trace.replaced.values()}
    if monitor.mutated & replaced:
        return True
    taken = {storage_of(item.obj) for item in inputs if item.var in vm.trace.replaced}
    shown = {storage_of(tensor) for tensor in _leaves(result) if tensor.layout is torch.strided}
    return bool(taken & shown) and (call[0] is not getattr or call[2] != "data")


def _meet_moved(vm: Interpreter, monitor: Monitor) -> str:
    """Say whether a tensor from outside got another shape or other strides, which no graph can give it."""
    if not monitor.moved:
        return ""
    outside = {id(node.obj): node for node in vm.heap.tensors}
    met = [(outside[id(tensor)], place) for tensor, place in monitor.moved if id(tensor) in outside]
    for node, place in met:
        vm.trace.stand_in(node.var, place)
    return "a tensor from outside gets another shape or other strides" if met else ""


def _meet_written(vm: Interpreter, monitor: Monitor) -> str:
    """Guard that autograd will let tensors be written again; say why to break the graph if not known."""
    heap, unknown = vm.heap, False
    for node in _written(vm, monitor):
        if node.first(Itself.AUTOGRAD):
            text = f"({node.var}.is_leaf, {node.var}._is_view()) == {heap.constant(node.autograd)}"
            heap.guard.check(text, f"{heap.guard.paths.get(node.var)} is a leaf, a view or neither")
        unknown |= node.autograd[1]
    return "a view from outside is written after a change" if unknown and vm.trace.changes_tensors else ""


def _break_after(vm: Interpreter, function: Any, args: Any, kwargs: Any, result: Any, why: str) -> Any:
    graph_break = try_break(vm, function, args, kwargs, "push", why)
    if graph_break is not None:
        fork(vm, graph_break, function, args, kwargs, result)
    return result if graph_break is None or not vm.recording else finish(vm, graph_break, result)


def _depends(monitor: Monitor, inputs: list[Value]) -> bool:
    """Say whether shapes of results may depend on values."""
    return monitor.dynamic or any(item.dynamic for item in inputs)


def _fx_result(vm: Interpreter, result: Any, like: Value) -> None:
    """Register what an operator has given: `like` has its node, and what is known of shapes."""
    fx = like.fx
    if is_a(result, torch.Tensor):
        if vm.heap.find(result) is None:
            dynamic = like.dynamic and (bool(result.dim()) or not like.ranked)
            vm.trace.add(replace(like, var=vm.heap.computed(result).var, obj=result, dynamic=dynamic))
    elif is_a(result, tuple | list):
        node = vm.heap.computed(result)
        node.full = True
        vm.trace.add(Value(node.var, result, fx))
        for index, item in enumerate(result):
            if item is not None:
                part = vm.trace.graph.call_function(operator.getitem, (fx, index))
                part.meta["part"] = True
                _fx_result(vm, item, replace(like, fx=part))


def _only_tensors(result: Any) -> bool:
    if is_a(result, torch.Tensor):
        return tensors.is_plain_tensor(result)
    if is_a(result, tuple | list):
        kind = type(result)
        known = kind in (tuple, list) or module_of(kind).startswith("torch.return_types")
        return known and bool(result) and all(item is None or _only_tensors(item) for item in result)
    return result is None


def _leaves(result: Any) -> list[torch.Tensor]:
    if is_a(result, torch.Tensor):
        return [result]
    return [leaf for item in result for leaf in _leaves(item)] if is_a(result, tuple | list) else []
