"""The other handlers: displays, calls, generators, exceptions, patterns, imports."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Any

from ladder.capture.bytecode import VERSION, Instruction
from ladder.capture.containers import items_of
from ladder.capture.errors import set_field
from ladder.capture.frames import NULL, Frame
from ladder.capture.handlers import YIELD, handles, popn
from ladder.capture.kinds import is_a
from ladder.capture.nodes import CaptureError, Dynamic
from ladder.capture.shapes import DynamicSize, Growing

if TYPE_CHECKING:
    from ladder.capture.machine import Machine


# building ----------------------------------------------------------------------------------------
@handles("BUILD_TUPLE")
def _build_tuple(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(tuple(popn(f, i.arg)))


@handles("BUILD_LIST")
def _build_list(m: Machine, f: Frame, i: Instruction) -> None:
    items = popn(f, i.arg)
    if any(type(item) is Dynamic for item in items) and _becomes_tuple(f, 0):
        f.stack.append(Growing(items))
        return
    f.stack.append(m.new([m.settled(item) for item in items]))


@handles("BUILD_SET")
def _build_set(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(m.build_set(popn(f, i.arg)))


@handles("BUILD_MAP")
def _build_map(m: Machine, f: Frame, i: Instruction) -> None:
    flat = popn(f, 2 * i.arg)
    f.stack.append(m.build_dict(flat[::2], flat[1::2]))


@handles("BUILD_CONST_KEY_MAP")
def _build_const_map(m: Machine, f: Frame, i: Instruction) -> None:
    keys = f.stack.pop()
    f.stack.append(m.build_dict(list(keys), popn(f, i.arg)))


@handles("BUILD_STRING")
def _build_string(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(m.join(popn(f, i.arg)))


@handles("BUILD_SLICE")
def _build_slice(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(slice(*popn(f, i.arg)))


@handles("FORMAT_VALUE")
def _format_value(m: Machine, f: Frame, i: Instruction) -> None:
    spec = f.stack.pop() if i.arg & 4 else ""
    f.stack.append(m.formatted(f.stack.pop(), i.arg & 3, spec))


@handles("CONVERT_VALUE")
def _convert_value(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(m.formatted(f.stack.pop(), i.arg, ""))


@handles("FORMAT_SIMPLE")
def _format_simple(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(m.formatted(f.stack.pop(), 0, ""))


@handles("FORMAT_WITH_SPEC")
def _format_spec(m: Machine, f: Frame, i: Instruction) -> None:
    value, spec = popn(f, 2)
    f.stack.append(m.formatted(value, 0, spec))


@handles("LIST_APPEND")
def _list_append(m: Machine, f: Frame, i: Instruction) -> None:
    value = f.stack.pop()
    if type(f.stack[-i.arg]) is Growing:
        f.stack[-i.arg].items.append(value)
        return
    m.add_to(f.stack[-i.arg], list.append, (m.settled(value),))


@handles("SET_ADD")
def _set_add(m: Machine, f: Frame, i: Instruction) -> None:
    value = f.stack.pop()
    m.add_to(f.stack[-i.arg], set.add, (m.settled(value),))


@handles("MAP_ADD")
def _map_add(m: Machine, f: Frame, i: Instruction) -> None:
    key, value = popn(f, 2)
    m.add_to(f.stack[-i.arg], dict.__setitem__, (m.settled(key), m.settled(value)))


@handles("LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE")
def _extend(m: Machine, f: Frame, i: Instruction) -> None:
    value, target = f.stack.pop(), f.stack[-i.arg]
    if type(target) is list and type(value) in (tuple, DynamicSize) and _becomes_tuple(f, i.arg - 1):
        target = f.stack[-i.arg] = Growing(target)
    if type(target) is Growing:
        items = m.unpacked(value)
        if items is None:
            f.index -= 1
        else:
            target.items.extend(items)
        return
    value = m.plain(value)
    if i.op == "DICT_MERGE" and not is_a(value, dict):
        f.stack.append(m.opaque(dict, (value,), {}, "redo", "an unknown mapping is unpacked"))
        f.index -= 1
        return
    if i.op == "DICT_MERGE" and (set(value) & set(target) or not all(type(key) is str for key in value)):
        callee = getattr(f.stack[-2 - i.arg], "__qualname__", "function")
        key = next(iter(set(value) & set(target)), None)
        raise TypeError(f"{callee}() got multiple values for keyword argument {key!r}")
    method: Any = {"LIST_EXTEND": list.extend, "SET_UPDATE": set.update}.get(i.op, dict.update)
    if i.op == "LIST_EXTEND" and not _iterable(type(value)):
        raise TypeError(f"Value after * must be an iterable, not {type(value).__name__}")
    try:
        m.extend(target, method, value)
    except CaptureError as error:
        why = str(error)
    else:
        return
    kind: Any = {"LIST_EXTEND": list, "SET_UPDATE": items_of}.get(i.op, dict)
    if type(value) in (dict, list):
        m.stop(why, m.here())
        method(target, value)
        return
    f.stack.append(m.opaque(kind, (value,), {}, "redo", why))
    f.index -= 1


def _iterable(kind: type) -> bool:
    return hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")


@handles("LIST_TO_TUPLE")
def _list_to_tuple(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(_as_tuple(f.stack.pop()))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value.items if type(value) is Growing else value)


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
def _unpack(m: Machine, f: Frame, i: Instruction) -> None:
    items = m.unpacked(f.stack.pop(), i.arg, False)
    if items is None:
        f.index -= 1
        return
    if len(items) > i.arg:
        raise ValueError(f"too many values to unpack (expected {i.arg})")
    if len(items) < i.arg:
        raise ValueError(f"not enough values to unpack (expected {i.arg}, got {len(items)})")
    f.stack.extend(reversed(items))


@handles("UNPACK_EX")
def _unpack_ex(m: Machine, f: Frame, i: Instruction) -> None:
    before, after = i.arg & 255, i.arg >> 8
    items = m.unpacked(f.stack.pop(), before)
    if items is None:
        f.index -= 1
        return
    if len(items) < before + after:
        raise ValueError(
            f"not enough values to unpack (expected at least {before + after}, got {len(items)})"
        )
    middle = m.new([m.settled(item) for item in items[before : len(items) - after]])
    tail = items[len(items) - after :]
    f.stack.extend(reversed([*items[:before], middle, *tail]))


# calls -------------------------------------------------------------------------------------------
@handles("KW_NAMES")
def _kw_names(m: Machine, f: Frame, i: Instruction) -> None:
    value = i.value
    f.keywords = value if is_a(value, tuple) else f.code.co_consts[i.arg]


def _do_call(m: Machine, f: Frame, count: int, keywords: tuple[str, ...]) -> None:
    args = popn(f, count)
    first, second = popn(f, 2)
    if VERSION < (3, 13):
        function, args = (second, args) if first is NULL else (first, [second, *args])
    else:
        function, args = (first, args) if second is NULL else (first, [second, *args])
    named = dict(zip(keywords, args[len(args) - len(keywords) :], strict=True))
    positional = tuple(args[: len(args) - len(keywords)])
    if function is super and not positional:
        function, positional = super, m.super_arguments(f)
    f.stack.append(m.call(function, positional, named))


@handles("CALL")
def _call(m: Machine, f: Frame, i: Instruction) -> None:
    keywords, f.keywords = f.keywords, ()
    _do_call(m, f, i.arg, keywords)


@handles("CALL_KW")
def _call_kw(m: Machine, f: Frame, i: Instruction) -> None:
    keywords = f.stack.pop()
    _do_call(m, f, i.arg, keywords)


@handles("CALL_FUNCTION_EX")
def _call_ex(m: Machine, f: Frame, i: Instruction) -> None:
    kwargs = f.stack.pop() if i.arg & 1 else {}
    args = f.stack.pop()
    function = f.stack.pop()
    if function is NULL:
        function = f.stack.pop()
    elif f.stack and f.stack[-1] is NULL:
        f.stack.pop()
    f.stack.append(m.call_spread(function, args, kwargs))


_PARTS = {8: "closure", 4: "annotations", 2: "kwdefaults", 1: "defaults"}


@handles("MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE")
def _make_function(m: Machine, f: Frame, i: Instruction) -> None:
    code = f.stack.pop()
    parts: dict[str, Any] = {}
    if VERSION < (3, 13):
        for bit, name in _PARTS.items():
            if i.arg & bit:
                parts[name] = m.settled(f.stack.pop())
    while (following := f.program.instructions[f.index]).op == "SET_FUNCTION_ATTRIBUTE":
        parts[_PARTS[following.arg]] = m.settled(f.stack.pop())
        f.index += 1
    f.stack.append(m.make_function(f, code, parts))


STOP_ITERATION_ERROR, UNARY_POSITIVE, LIST_TO_TUPLE = 3, 5, 6
INTRINSICS = frozenset({STOP_ITERATION_ERROR, UNARY_POSITIVE, LIST_TO_TUPLE})
"""The intrinsics that are interpreted; the others print, make type parameters or import names."""


@handles("CALL_INTRINSIC_1")
def _intrinsic(m: Machine, f: Frame, i: Instruction) -> None:
    value = f.stack.pop()
    if i.arg == UNARY_POSITIVE:
        f.stack.append(m.unary("+", value))
    elif i.arg == LIST_TO_TUPLE:
        f.stack.append(_as_tuple(value))
    elif is_a(value, StopIteration):
        error = RuntimeError("generator raised StopIteration")
        error.__cause__ = error.__context__ = value
        f.stack.append(error)
    else:
        f.stack.append(value)


# generators --------------------------------------------------------------------------------------
@handles("RETURN_GENERATOR")
def _return_generator(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(None)  # what the following POP_TOP takes: the generator itself was made by the call


@handles("YIELD_VALUE")
def _yield(m: Machine, f: Frame, i: Instruction) -> Any:
    return YIELD


@handles("GET_YIELD_FROM_ITER")
def _yield_from(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(m.iterate(f.stack.pop()))


@handles("SEND")
def _send(m: Machine, f: Frame, i: Instruction) -> None:
    value = m.plain(f.stack.pop())
    target = f.stack[-1]
    try:
        given = m.advance_or_raise(target) if value is None else target.send(value)
    except StopIteration as error:
        after_delegation(f, i, error.value)
        return
    f.stack.append(given)


def after_delegation(f: Frame, i: Instruction, value: Any) -> None:
    """Go on after ``yield from``, which gives `value`; `i` is its SEND."""
    if VERSION < (3, 12):
        f.stack[-1] = value
    else:
        f.stack.append(value)
    f.index = i.value


# exceptions --------------------------------------------------------------------------------------
@handles("LOAD_ASSERTION_ERROR")
def _assertion_error(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(AssertionError)


@handles("PUSH_EXC_INFO")
def _push_exc(m: Machine, f: Frame, i: Instruction) -> None:
    error = f.stack.pop()
    f.stack.append(f.handled[-1] if f.handled else None)
    f.stack.append(error)
    f.handled.append(error)


@handles("POP_EXCEPT")
def _pop_except(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.pop()
    f.handled.pop()


@handles("CHECK_EXC_MATCH")
def _check_match(m: Machine, f: Frame, i: Instruction) -> None:
    given = f.stack.pop()
    kinds = given if isinstance(given, tuple) else (given,)
    for kind in kinds:
        if not (is_a(kind, type) and issubclass(kind, BaseException)):
            raise TypeError("catching classes that do not inherit from BaseException is not allowed")
    order = type(f.stack[-1]).__mro__  # no `__instancecheck__` is asked
    f.stack.append(any(kind in order for kind in kinds))


@handles("RERAISE")
def _reraise(m: Machine, f: Frame, i: Instruction) -> None:
    raise f.stack.pop()


@handles("RAISE_VARARGS")
def _raise(m: Machine, f: Frame, i: Instruction) -> None:
    if i.arg == 0:
        if not f.handled or f.handled[-1] is None:
            raise RuntimeError("No active exception to reraise")
        raise f.handled[-1]
    cause: Any = f.stack.pop() if i.arg == 2 else NULL
    error = f.stack.pop()
    if is_a(error, type) and issubclass(error, BaseException):
        with m.barrier():
            error = m.call(error, (), {})
    if not is_a(error, BaseException):
        raise TypeError("exceptions must derive from BaseException")
    if cause is not NULL:
        set_field(m, error, "__cause__", cause() if is_a(cause, type) else cause)
    raise error


@handles("BEFORE_WITH")
def _before_with(m: Machine, f: Frame, i: Instruction) -> None:
    manager = m.plain(f.stack.pop())
    leave = m.special_method(manager, "__exit__")
    enter = m.special_method(manager, "__enter__")
    f.stack.append(leave)
    f.stack.append(m.call(enter, (), {}))


@handles("WITH_EXCEPT_START")
def _with_except(m: Machine, f: Frame, i: Instruction) -> None:
    error = f.stack[-1]
    leave = f.stack[-4]
    f.stack.append(m.call(leave, (type(error), error, error.__traceback__), {}))


@handles("CLEANUP_THROW")
def _cleanup_throw(m: Machine, f: Frame, i: Instruction) -> None:
    error = f.stack.pop()
    if not is_a(error, StopIteration):
        raise error
    f.stack.pop()
    f.stack[-1] = None
    f.stack.append(error.value)


# matching ----------------------------------------------------------------------------------------
@handles("GET_LEN")
def _get_len(m: Machine, f: Frame, i: Instruction) -> None:
    value = f.stack[-1]
    with m.barrier():
        f.stack.append(m.call(len, (value,), {}))


@handles("MATCH_MAPPING")
def _match_mapping(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(bool(type(m.plain(f.stack[-1])).__flags__ & 1 << 6))


@handles("MATCH_SEQUENCE")
def _match_sequence(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(bool(type(m.plain(f.stack[-1])).__flags__ & 1 << 5))


@handles("MATCH_KEYS")
def _match_keys(m: Machine, f: Frame, i: Instruction) -> None:
    keys, subject = f.stack[-1], f.stack[-2]
    values = []
    with m.barrier():
        for key in keys:
            found = m.call(m.load_attr(subject, "get"), (key, NULL), {})
            if found is NULL:
                f.stack.append(None)
                return
            values.append(found)
    f.stack.append(tuple(values))


@handles("MATCH_CLASS")
def _match_class(m: Machine, f: Frame, i: Instruction) -> None:
    subject, kind, names = popn(f, 3)
    with m.barrier():
        f.stack.append(m.match_class(subject, kind, names, i.arg))


# imports and classes -----------------------------------------------------------------------------
@handles("IMPORT_NAME")
def _import(m: Machine, f: Frame, i: Instruction) -> None:
    level, names = popn(f, 2)
    f.stack.append(m.import_module(f, i.value, names, level))


@handles("IMPORT_FROM")
def _import_from(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(m.load_attr(f.stack[-1], i.value))


@handles("LOAD_BUILD_CLASS")
def _build_class(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(builtins.__build_class__)
