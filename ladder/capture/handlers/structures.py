"""The other handlers: displays, calls, generators, exceptions, patterns, imports."""

from __future__ import annotations

import builtins
import types
from typing import Any

from ladder.capture.handlers.building import (
    add_to,
    build_dict,
    build_set,
    extend_display,
    format_field,
    joined_text,
    unpacked,
)
from ladder.capture.handlers.invoking import (
    advance_or_raise,
    call_spread,
    called_text,
    make_function,
    match_class,
    special_method,
    super_arguments,
)
from ladder.capture.handlers.variables import import_from, import_module
from ladder.capture.heap.nodes import CaptureError, Dynamic
from ladder.capture.interpreter.exceptions import handled_error, set_field
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.interpreter.opcodes import (
    HANDLERS,
    LIST_TO_TUPLE,
    UNARY_POSITIVE,
    YIELD,
    after_call,
    after_delegation,
    handles,
    popn,
    pops,
    pushes,
)
from ladder.capture.interpreter.recording import opaque
from ladder.capture.operations.attributes import load_attr
from ladder.capture.operations.moving import is_made_here
from ladder.capture.operations.objects import new_container, settled
from ladder.capture.operations.operators import unary
from ladder.capture.operations.replay import is_iterable, items_of, iterate, mapping_items
from ladder.capture.python.bytecode import VERSION, Instruction
from ladder.capture.python.frames import NULL, Frame
from ladder.capture.python.tracebacks import kept
from ladder.capture.values.kinds import is_a, is_key, name_of_kind
from ladder.capture.values.shapes import DynamicSize, Growing, Walk


# building ----------------------------------------------------------------------------------------
@handles("BUILD_LIST")
def _build_list(vm: Interpreter, f: Frame, i: Instruction) -> None:
    items = popn(f, i.arg)
    if any(type(item) is Dynamic for item in items) and _becomes_tuple(f, 0):
        f.stack.append(Growing(items))
        return
    f.stack.append(new_container(vm, [settled(vm, item, keep=True) for item in items]))


@handles("FORMAT_VALUE")
def _format_value(vm: Interpreter, f: Frame, i: Instruction) -> None:
    spec = f.stack.pop() if i.arg & 4 else ""
    f.stack.append(format_field(vm, f.stack.pop(), i.arg & 3, spec))


@handles("LIST_APPEND")
def _list_append(vm: Interpreter, f: Frame, i: Instruction) -> None:
    value = f.stack.pop()
    if type(f.stack[-i.arg]) is Growing:
        f.stack[-i.arg].items.append(value)
        return
    add_to(vm, f.stack[-i.arg], list.append, (value,))


@handles("LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE")
def _extend(vm: Interpreter, f: Frame, i: Instruction) -> None:
    value, target = f.stack.pop(), f.stack[-i.arg]
    if type(value) is dict and not value and i.op == "DICT_MERGE" and is_made_here(vm, value):
        return  # every matched run makes it empty
    _extend_by(vm, f, i, value, target)


def _extend_by(vm: Interpreter, f: Frame, i: Instruction, value: Any, target: Any) -> None:
    if type(target) is list and is_a(value, tuple) and _becomes_tuple(f, i.arg - 1):
        target = f.stack[-i.arg] = Growing([*_items_of(vm, target)])
    if type(target) is Growing:
        _extend_growing(vm, f, i, value)
        return
    value = value if type(value) in (tuple, DynamicSize, Walk) else vm.plain(value)
    merges = i.op == "DICT_MERGE"
    if not is_a(value, dict) and (merges or (i.op == "DICT_UPDATE" and not hasattr(type(value), "keys"))):
        given = (value, called_text(f.stack[CALLEE - i.arg]) if merges else "")
        f.stack.append(opaque(vm, mapping_items, given, {}, "redo", "an unknown mapping is unpacked"))
        f.index -= 1
        return
    if merges:
        _check_keywords(vm, f.stack[CALLEE - i.arg], value, target)
    method: Any = {"LIST_EXTEND": list.extend, "SET_UPDATE": set.update}.get(i.op, dict.update)
    if i.op == "LIST_EXTEND" and not is_iterable(type(value)):
        raise TypeError(f"Value after * must be an iterable, not {name_of_kind(value)}")
    try:
        extend_display(vm, target, method, value)
    except CaptureError as error:
        why = str(error)
    else:
        return
    kind: Any = {"LIST_EXTEND": list, "SET_UPDATE": items_of}.get(i.op, mapping_items)
    if type(value) in (dict, list):
        vm.stop(why, vm.here())
        method(target, value)
        return
    f.stack.append(opaque(vm, kind, (value,), {}, "redo", why))
    f.index -= 1


def _extend_growing(vm: Interpreter, f: Frame, i: Instruction, value: Any) -> None:
    items = unpacked(vm, value)
    target = f.stack[-i.arg]
    if items is None:
        f.index -= 1
    elif type(target) is Growing:
        target.items.extend(items)
    else:  # recording has ended meanwhile
        target.extend(map(vm.plain, items))


CALLEE = -3 if VERSION >= (3, 13) else -2
"""Where a call with keyword arguments has what it calls: from 3.13 on, below a place that is empty."""


def _check_keywords(vm: Interpreter, callee: Any, given: dict[str, Any], before: dict[str, Any]) -> None:
    """Raise where a name is given twice; the names are guarded then."""
    twice = next((key for key in dict.__iter__(given) if is_key(key) and key in before), None)
    if twice is not None:
        if vm.recording:
            vm.heap.touch(given, 1)
        raise TypeError(f"{called_text(callee)} got multiple values for keyword argument '{twice}'")


def _as_tuple(vm: Interpreter, value: Any) -> tuple[Any, ...]:
    return tuple(value.items if type(value) is Growing else _items_of(vm, value))


def _items_of(vm: Interpreter, value: list[Any]) -> Any:
    """Return the items of a list; those that a segment began with are guarded."""
    return vm.heap.items(value) if vm.recording else value


def _becomes_tuple(f: Frame, above: int) -> bool:
    """Say whether a list, `above` items below the top, goes into a tuple and is seen by nothing else."""
    for following in f.program.instructions[f.index :]:
        if above == 0 and following.op in ("LIST_TO_TUPLE", "CALL_INTRINSIC_1"):
            return following.op == "LIST_TO_TUPLE" or following.arg == LIST_TO_TUPLE
        if following.effect is None or above + following.effect < 0:
            return False
        above += following.effect
    return False


@handles("UNPACK_SEQUENCE")
def _unpack(vm: Interpreter, f: Frame, i: Instruction) -> None:
    items = unpacked(vm, f.stack.pop(), i.arg, False)
    if items is None:
        f.index -= 1
        return
    if len(items) > i.arg:
        raise ValueError(f"too many values to unpack (expected {i.arg})")
    if len(items) < i.arg:
        raise ValueError(f"not enough values to unpack (expected {i.arg}, got {len(items)})")
    f.stack.extend(reversed(items))


@handles("UNPACK_EX")
def _unpack_ex(vm: Interpreter, f: Frame, i: Instruction) -> None:
    before, after = i.arg & 255, i.arg >> 8
    items = unpacked(vm, f.stack.pop(), before)
    if items is None:
        f.index -= 1
        return
    if len(items) < before + after:
        raise ValueError(
            f"not enough values to unpack (expected at least {before + after}, got {len(items)})"
        )
    middle = new_container(vm, [settled(vm, item, keep=True) for item in items[before : len(items) - after]])
    tail = items[len(items) - after :]
    f.stack.extend(reversed([*items[:before], middle, *tail]))


# calls -------------------------------------------------------------------------------------------
@handles("KW_NAMES")
def _kw_names(vm: Interpreter, f: Frame, i: Instruction) -> None:
    value = i.value
    f.keywords = value if is_a(value, tuple) else f.code.co_consts[i.arg]


def _do_call(vm: Interpreter, f: Frame, count: int, keywords: tuple[str, ...]) -> None:
    args = popn(f, count)
    first, second = popn(f, 2)
    if VERSION < (3, 13):
        function, args = (second, args) if first is NULL else (first, [second, *args])
    else:
        function, args = (first, args) if second is NULL else (first, [second, *args])
    named = dict(zip(keywords, args[len(args) - len(keywords) :], strict=True))
    positional = tuple(args[: len(args) - len(keywords)])
    if function is super and not positional:
        function, positional = super, super_arguments(vm, f)
    f.stack.append(vm.call(function, positional, named))


@handles("CALL")
def _call(vm: Interpreter, f: Frame, i: Instruction) -> None:
    keywords, f.keywords = f.keywords, ()
    _do_call(vm, f, i.arg, keywords)


@handles("CALL_FUNCTION_EX")
def _call_ex(vm: Interpreter, f: Frame, i: Instruction) -> None:
    kwargs = f.stack.pop() if VERSION >= (3, 14) or i.arg & 1 else {}
    kwargs = {} if kwargs is NULL else kwargs
    args = f.stack.pop()
    function = f.stack.pop()
    if function is NULL:
        function = f.stack.pop()
    elif f.stack and f.stack[-1] is NULL:
        f.stack.pop()
    f.stack.append(call_spread(vm, function, args, kwargs))


_PARTS = {16: "annotate", 8: "closure", 4: "annotations", 2: "kwdefaults", 1: "defaults"}


@handles("MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE")
def _make_function(vm: Interpreter, f: Frame, i: Instruction) -> None:
    code = f.stack.pop()
    parts: dict[str, Any] = {}
    if VERSION < (3, 13):
        for bit, name in _PARTS.items():
            if i.arg & bit:
                parts[name] = settled(vm, f.stack.pop())
    while (following := f.program.instructions[f.index]).op == "SET_FUNCTION_ATTRIBUTE":
        parts[_PARTS[following.arg]] = settled(vm, f.stack.pop())
        f.index += 1
    f.stack.append(make_function(vm, f, code, parts))


@handles("CALL_INTRINSIC_1")
def _intrinsic(vm: Interpreter, f: Frame, i: Instruction) -> None:
    value = f.stack.pop()
    if i.arg == UNARY_POSITIVE:
        f.stack.append(unary(vm, "+", value))
    elif i.arg == LIST_TO_TUPLE:
        f.stack.append(_as_tuple(vm, value))
    elif is_a(value, StopIteration):
        error = RuntimeError("generator raised StopIteration")
        error.__cause__ = error.__context__ = value
        f.stack.append(error)
    else:
        f.stack.append(value)


# generators --------------------------------------------------------------------------------------
def _delegated(vm: Interpreter, value: Any) -> Any:
    """Return what ``yield from value`` gives the items of."""
    if is_a(value, types.CoroutineType):
        raise TypeError("cannot 'yield from' a coroutine object in a non-coroutine generator")
    return iterate(vm, value)


@handles("SEND")
def _send(vm: Interpreter, f: Frame, i: Instruction) -> None:
    value = vm.plain(f.stack.pop())
    target = f.stack[-1]
    try:
        given = advance_or_raise(vm, target) if value is None else target.send(value)
    except StopIteration as error:
        after_delegation(f, i, error.value)
        return
    f.stack.append(given)


# exceptions --------------------------------------------------------------------------------------
@handles("PUSH_EXC_INFO")
def _push_exc(vm: Interpreter, f: Frame, i: Instruction) -> None:
    error = f.stack.pop()
    f.stack.append(f.handled[-1] if f.handled else None)
    f.stack.append(error)
    f.handled.append(error)


@handles("POP_EXCEPT")
def _pop_except(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.pop()
    f.handled.pop()


@handles("CHECK_EXC_MATCH")
def _check_match(vm: Interpreter, f: Frame, i: Instruction) -> None:
    given = f.stack.pop()
    kinds = given if isinstance(given, tuple) else (given,)
    for kind in kinds:
        if not (is_a(kind, type) and issubclass(kind, BaseException)):
            raise TypeError("catching classes that do not inherit from BaseException is not allowed")
    order = type(f.stack[-1]).__mro__  # no `__instancecheck__` is asked
    f.stack.append(any(kind in order for kind in kinds))


@handles("RAISE_VARARGS")
def _raise(vm: Interpreter, f: Frame, i: Instruction) -> None:
    if i.arg == 0:
        current = handled_error(vm)
        if current is None:
            raise RuntimeError("No active exception to reraise")
        kept(current)
    cause: Any = f.stack.pop() if i.arg == 2 else NULL
    error = f.stack.pop()
    if is_a(error, type) and issubclass(error, BaseException):
        with vm.barrier():
            error = vm.call(error, (), {})
    if not is_a(error, BaseException):
        raise TypeError("exceptions must derive from BaseException")
    if cause is not NULL:
        set_field(vm, error, "__cause__", cause() if is_a(cause, type) else cause)
    raise error


@handles("BEFORE_WITH")
def _before_with(vm: Interpreter, f: Frame, i: Instruction) -> None:
    manager = vm.plain(f.stack.pop())
    leave = special_method(vm, manager, "__exit__")
    enter = special_method(vm, manager, "__enter__")
    f.stack.append(leave)
    f.stack.append(vm.call(enter, (), {}))


_SPECIAL = ("__enter__", "__exit__", "__aenter__", "__aexit__")


LEAVE = -5 if VERSION >= (3, 14) else -4
"""Where an exception within `with` finds what leaves it: from 3.14 on, below a place that is empty."""


@handles("WITH_EXCEPT_START")
def _with_except(vm: Interpreter, f: Frame, i: Instruction) -> None:
    error = f.stack[-1]
    leave = f.stack[LEAVE]
    f.stack.append(vm.call(leave, (type(error), error, error.__traceback__), {}))


@handles("CLEANUP_THROW")
def _cleanup_throw(vm: Interpreter, f: Frame, i: Instruction) -> None:
    error = f.stack.pop()
    if not is_a(error, StopIteration):
        kept(error)
    f.stack.pop()
    f.stack[-1] = None
    f.stack.append(error.value)


# matching ----------------------------------------------------------------------------------------
@handles("GET_LEN")
def _get_len(vm: Interpreter, f: Frame, i: Instruction) -> None:
    value = f.stack[-1]
    with vm.barrier():
        f.stack.append(vm.call(len, (value,), {}))


@handles("MATCH_KEYS")
def _match_keys(vm: Interpreter, f: Frame, i: Instruction) -> None:
    keys, subject = f.stack[-1], f.stack[-2]
    values: list[Any] = []
    seen = set()
    with vm.barrier():
        for key in keys:
            if key in seen:
                raise ValueError(f"mapping pattern checks duplicate key ({key!r})")
            seen.add(key)
            found = vm.call(load_attr(vm, subject, "get"), (key, NULL), {})
            if found is NULL:
                f.stack.append(None)
                return
            values.append(found)
    f.stack.append(tuple(values))


@handles("MATCH_CLASS")
def _match_class(vm: Interpreter, f: Frame, i: Instruction) -> None:
    subject, kind, names = popn(f, 3)
    with vm.barrier():
        f.stack.append(match_class(vm, subject, kind, names, i.arg))


# imports and classes -----------------------------------------------------------------------------


def _has_flag(vm: Interpreter, value: Any, bit: int) -> bool:
    return bool(type(vm.plain(value)).__flags__ & 1 << bit)


HANDLERS |= {
    "BUILD_TUPLE": pushes(lambda vm, f, i: tuple(popn(f, i.arg))),
    "BUILD_SET": pushes(lambda vm, f, i: build_set(vm, popn(f, i.arg))),
    "BUILD_MAP": pushes(lambda vm, f, i: build_dict(vm, (flat := popn(f, 2 * i.arg))[::2], flat[1::2])),
    "BUILD_CONST_KEY_MAP": pushes(lambda vm, f, i, keys: build_dict(vm, list(keys), popn(f, i.arg)), 1),
    "BUILD_STRING": pushes(lambda vm, f, i: joined_text(vm, popn(f, i.arg))),
    "BUILD_SLICE": pushes(lambda vm, f, i: slice(*popn(f, i.arg))),
    "CONVERT_VALUE": pushes(lambda vm, f, i, value: format_field(vm, value, i.arg, ""), 1),
    "FORMAT_SIMPLE": pushes(lambda vm, f, i, value: format_field(vm, value, 0, ""), 1),
    "FORMAT_WITH_SPEC": pushes(lambda vm, f, i, value, spec: format_field(vm, value, 0, spec), 2),
    "SET_ADD": pops(lambda vm, f, i, item: add_to(vm, f.stack[-i.arg], set.add, (item,)), 1),
    "MAP_ADD": pops(lambda vm, f, i, *pair: add_to(vm, f.stack[-i.arg], dict.__setitem__, pair), 2),
    "LIST_TO_TUPLE": pushes(lambda vm, f, i, value: _as_tuple(vm, value), 1),
    "CALL_KW": pops(lambda vm, f, i, keywords: _do_call(vm, f, i.arg, keywords), 1),
    "RETURN_GENERATOR": pushes(lambda vm, f, i: None),  # POP_TOP takes it; the call has made the generator
    "YIELD_VALUE": lambda vm, f, i: YIELD,
    "GET_YIELD_FROM_ITER": pushes(lambda vm, f, i, value: _delegated(vm, value), 1),
    "LOAD_ASSERTION_ERROR": pushes(lambda vm, f, i: AssertionError),
    "RERAISE": pops(lambda vm, f, i, error: kept(error), 1),
    "LOAD_SPECIAL": pops(
        lambda vm, f, i, value: after_call(f, special_method(vm, vm.plain(value), _SPECIAL[i.arg])), 1
    ),
    "MATCH_MAPPING": pushes(lambda vm, f, i: _has_flag(vm, f.stack[-1], 6)),
    "MATCH_SEQUENCE": pushes(lambda vm, f, i: _has_flag(vm, f.stack[-1], 5)),
    "IMPORT_NAME": pushes(lambda vm, f, i, level, names: import_module(vm, f, i.value, names, level), 2),
    "IMPORT_FROM": pushes(lambda vm, f, i: import_from(vm, f.stack[-1], i.value)),
    "LOAD_BUILD_CLASS": pushes(lambda vm, f, i: builtins.__build_class__),
}
"""The instructions of one step, as in `instructions`."""
