"""What is noted of single objects: identity, natives that are called again, containers that are made."""

from __future__ import annotations

import gc
import types
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from ladder.capture.heap.nodes import CaptureError, Dynamic, Itself, Node, dynamic_parts
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.python import natives
from ladder.capture.python.arity import fits
from ladder.capture.python.words import words
from ladder.capture.values.kinds import is_a, is_constant
from ladder.capture.values.shapes import DynamicSize

OVERRIDES = frozenset(
    words("__getitem__ __setitem__ __delitem__ __contains__ __iter__ __len__ keys items values")
)
_READ_OVERRIDES = OVERRIDES - {"__setitem__", "__delitem__"}
_OF_MAPPINGS = frozenset(words("keys items values"))
"""Names that any field of a tuple may have."""
LAZY = (zip, enumerate, iter, reversed)


def require_fitting(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Break the graph where a native refuses its arguments: it says best how."""
    if not fits(function, args, kwargs):
        raise CaptureError("arguments that do not fit")


def closes_something(vm: Interpreter, value: Any) -> bool:
    """Say whether `value` is, or is a tuple of, a generator that does something when it is dropped."""
    if type(value) is tuple:
        return any(closes_something(vm, item) for item in value)
    node = vm.heap.nodes.get(id(value))
    return node is not None and node.closes


def pinned_part(vm: Interpreter, value: Any) -> Any:
    """Return `value`, a read-only part of a constant, after pinning it."""
    if vm.recording and not is_constant(value):
        vm.heap.pin(value)
    return value


def settled(vm: Interpreter, item: Any, *, keep: bool = False) -> Any:
    """Return `item` as it goes into the heap: plain, but for open numbers where a place can `keep` them."""
    if keep and vm.recording and dynamic_parts(item):
        return item
    return vm.plain(item) if type(item) in (Dynamic, tuple, slice, DynamicSize) else item


def shown(proxy: types.MappingProxyType[Any, Any]) -> Any:
    """Return the mapping of which `proxy` is a read-only view."""
    return gc.get_referents(proxy)[0]


def seen_through(vm: Interpreter, value: Any) -> Any:
    """Return `value`, or the dictionary of which it is a read-only view."""
    if type(value) is not types.MappingProxyType or not vm.recording:
        return value
    behind, node = shown(value), vm.heap.node(value)
    if type(behind) not in (dict, OrderedDict):
        raise CaptureError(f"a read-only view of a {type(behind).__qualname__}")
    if node.external and vm.heap.find(behind) is None:
        text = f"{vm.heap.constant(shown)}({node.var})"
        vm.heap.meet(behind, text, vm.heap.guard.path(node.var), stable=node.stable)
    return behind


def met_part(vm: Interpreter, value: Any, name: str) -> Any:
    """Return a part of a bound method or partial, met if the object is external."""
    part = getattr(value, name)
    node = vm.heap.find(value)
    if node is not None and node.external:
        vm.heap.read(node, name, part, f"{node.var}.{name}", f"{node.var}.{name}")
    return part


def touch_part(vm: Interpreter, owner: Any, part: Any) -> None:
    """Guard the contents of a container inside a native object."""
    node = vm.heap.find(owner)
    if node is not None and node.external:
        vm.heap.touch(part, 1)


def identify(vm: Interpreter, function: Any) -> None:
    """Guard that a function from outside is this one: its table row holds for no other."""
    node = vm.heap.find(function)
    if node is not None and not node.stable and node.first(Itself.IDENTITY):
        vm.heap.guard.check(f"{node.var} is {vm.heap.constant(function)}", f"{node.var} is unchanged")


def check_not_overridden(kind: type) -> None:
    """Raise if natives that read a container of class `kind` would call methods of the program."""
    if kind in natives.METHODS:
        return
    called = _READ_OVERRIDES - _OF_MAPPINGS if issubclass(kind, tuple | list) else _READ_OVERRIDES
    for owner in kind.__mro__:
        if owner in natives.METHODS:
            return
        if called & set(vars(owner)):
            raise CaptureError(f"{kind.__qualname__} overrides what natives call")


def perform(
    vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], changes: list[Node]
) -> Any:
    """Call a native with admitted arguments and add the step that calls it again."""
    heap = vm.heap
    uses: set[str] = set()
    consumed = [heap.node(item) for item in args if type(item) in natives.ITERATORS]
    changes = [*changes, *(node for node in consumed if function not in LAZY and node not in changes)]
    text = heap.call_text(heap.constant(function), args, kwargs, uses)
    for node in changes:
        heap.keep_entry(node)
    arrays = [(item, item.tobytes()) for item in (*args, *kwargs.values()) if type(item) is np.ndarray]
    try:
        result = function(*args, **kwargs)
    except BaseException:
        if changes and getattr(function, "__name__", "") not in natives.WHOLE_OR_NOT:
            vm.stop("a native that changes its argument failed")
        raise
    if any(item.tobytes() != before for item, before in arrays):
        vm.stop("a native changes an array")
        return result
    _note_result(vm, result, text, uses, changes)
    if type(result) in natives.ITERATORS:
        sources = [heap.node(item) for item in args if type(item) in natives.ITERATORS]
        heap.derive(heap.node(result), sources)
    return result


def _note_result(vm: Interpreter, result: Any, text: str, uses: set[str], changes: list[Node]) -> None:
    heap = vm.heap
    known = heap.find(result) is not None or is_constant(result)
    if changes:
        if known or type(result) is tuple:
            heap.change(text, changes, uses)
            return
        var = heap.guard.fresh_name()
        heap.change(f"{var} = {text}", changes, uses, var)
        node = heap.computed(result, var)
    elif not known:
        node = heap.fresh(result, text, uses)
    if not known:
        _note_inside(vm, result, node.var, 4, set())


def _note_inside(vm: Interpreter, value: Any, var: str, depth: int, parents: set[str]) -> None:
    """Register the new mutable objects inside a new container by where they lie in it."""
    base = next((kind for kind in (list, tuple, dict) if is_a(value, kind)), None)
    if depth == 0 or base is None:
        return
    entries = dict.items(value) if base is dict else enumerate(base.__iter__(value))
    own = type(value).__getitem__ is not base.__getitem__
    home = f"{vm.heap.constant(base)}.__getitem__({var}, " if own else f"{var}["
    for key, item in list(entries):
        if is_constant(item) or vm.heap.find(item) is not None:
            continue
        if is_a(item, list | dict | set | deque | tuple) or hasattr(type(item), "__dict__"):
            if type(item) is types.MethodType:
                continue
            node = vm.heap.fresh(item, f"{home}{vm.heap.constant(key)}{')' if own else ']'}", {var})
            node.parents = {var, *parents}
            _note_inside(vm, item, node.var, depth - 1, node.parents)


def new_container(vm: Interpreter, value: Any) -> Any:
    """Register a list, dict or set that an instruction has just made of items on the stack.

    Numbers in it that are left open stay so.
    """
    if not vm.recording:
        return value
    heap = vm.heap
    uses: set[str] = set()
    is_set = is_a(value, set)
    opened = [(key, item) for key, item in [*entries(value)] if dynamic_parts(item)] if not is_set else []
    try:
        if is_a(value, dict):
            pairs = [(heap.reference(k, uses), heap.reference(v, uses)) for k, v in value.items()]
            text = "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}"
        else:
            items = ", ".join(heap.reference(item, uses) for item in value)
            text = f"[{items}]" if is_a(value, list) else f"{{*({items},)}}" if value else "set()"
        node = heap.fresh(value, text, uses)
    except CaptureError as error:
        # Nothing of the user's has run: only a later use of this object ends the recording.
        node = heap.hidden(value, getattr(error, "origin", None) or vm.here())
    for key, item in opened:
        value[key] = vm.held(item)
        node.wrote(key, item) if node.recordable else heap.fix_parts(item)
    return value


def entries(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys of a dictionary, or the indices of a sequence, each with what is there."""
    return dict.items(value) if is_a(value, dict) else enumerate(value)


def same(vm: Interpreter, left: Any, right: Any) -> bool:
    """Return ``left is right``, guarded."""
    left, right = vm.plain(left), vm.plain(right)
    if vm.recording:
        nodes = [vm.heap.find(item) for item in (left, right)]
        for node, other in zip(nodes, (right, left), strict=True):
            if node is not None and node.external and type(node.obj) in (tuple, frozenset):
                vm.heap.touch(node.obj)  # equal ones may be one object or several
                if is_constant(other) and vm.heap.find(other) is None:
                    vm.heap.guard.keep.append(other)
                    check = f"(id({node.var}) == {id(other)}) is {left is right}"
                    vm.heap.guard.check(check, f"which object {node.var} is")
        if nodes[0] and nodes[1] and nodes[0] is not nodes[1] and nodes[0].external and nodes[1].external:
            vm.heap.guard.check(f"{nodes[0].var} is not {nodes[1].var}", "two objects are not the same")
    return left is right


def tuple_item(vm: Interpreter, container: tuple[Any, ...], key: int) -> Any:
    """Return one item of a tuple."""
    node, length = vm.heap.find(container), tuple.__len__(container)  # not what its class says
    if node is not None and node.pinned:
        vm.heap.touch(container, 1)
    if node is None or not node.external or node.pinned:
        at = key if key >= 0 else key + length
        return node.lifted[at] if node is not None and node.holds_dynamic(at) else container[key]
    if node.first(Itself.LENGTH):
        measured = f"{vm.heap.constant(tuple.__len__)}({node.var})"
        vm.heap.guard.check(f"{measured} == {length}", f"len({node.var})")
    index = key if key >= 0 else key + length
    item = tuple.__getitem__(container, key)
    path = f"{vm.heap.guard.path(node.var)}[{index}]"
    return vm.heap.load(node, index, item, f"{node.var}[{index}]", path)


def hide(vm: Interpreter, target: Any, origin: Any) -> None:
    """Note that a fresh container holds what no step can make."""
    node = vm.heap.find(target)
    if node is None or node.external:
        vm.stop("a container of unknown origin", vm.here())
        return
    node.recordable = False
    node.origin = node.origin or origin or vm.here()


SMALL_ARRAY = 1 << 16
"""Bytes of an array from outside that each call compares."""
_ELEMENTS = object()


def is_fixed(vm: Interpreter, value: Any) -> bool:
    """Say whether `value` is what natives make of plain data, and no step changes it.

    It was made in this segment, or is a small array from outside: its elements are guarded.
    """
    node = vm.heap.find(value) if type(value) in natives.FIXED else None
    if node is None or not node.recordable or (is_a(value, np.ndarray) and value.dtype.hasobject):
        return False
    return not node.external or (is_a(value, np.ndarray) and _is_guarded(vm, node, value))


def _is_guarded(vm: Interpreter, node: Node, array: np.ndarray[Any, Any]) -> bool:
    """Guard the elements of an array from outside; say whether that can be done."""
    if array.nbytes > SMALL_ARRAY or vm.trace.changes_tensors:  # some of which may share its memory
        return False
    if node.first(_ELEMENTS):
        held = vm.heap.constant((array.dtype, array.shape, array.strides, array.tobytes()))
        read = f"({node.var}.dtype, {node.var}.shape, {node.var}.strides, {node.var}.tobytes())"
        vm.heap.guard.check(f"{read} == {held}", f"the elements of {vm.heap.guard.path(node.var)}")
    return True


def says_its_arguments(vm: Interpreter, value: Any, method: str = "__str__") -> bool:
    """Say whether `value` is an error of this segment whose text follows from its constant arguments.

    method: What writes the text, if it is no function of the program.
    """
    if not is_a(value, BaseException) or not is_constant(value.args):
        return False
    node = vm.heap.find(value)
    own = is_a(vm.heap.class_attribute(type(value), method), types.FunctionType)
    return not own and (node is None or not node.external)
