"""One handler for each instruction of CPython 3.11 to 3.13; the order is that of `dis`'s manual."""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ladder.capture.bytecode import VERSION, Instruction
from ladder.capture.containers import STOP
from ladder.capture.frames import NULL, Absent, Frame, new_cell
from ladder.capture.segment import CaptureError, Dynamic

if TYPE_CHECKING:
    from ladder.capture.interpreter import Interpreter

RETURN = Absent()
YIELD = Absent()
Handler = Callable[["Interpreter", Frame, Instruction], Any]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for the instructions `names`."""

    def register(handler: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = handler
        return handler

    return register


def _popn(frame: Frame, count: int) -> list[Any]:
    if not count:
        return []
    taken = frame.stack[-count:]
    del frame.stack[-count:]
    return taken


# stack -------------------------------------------------------------------------------------------
@handles("NOP", "TO_BOOL", "COPY_FREE_VARS_DONE")
def _nop(m: Interpreter, f: Frame, i: Instruction) -> None:
    pass


@handles("POP_TOP", "END_FOR")
def _pop_top(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.pop()


@handles("END_SEND")
def _end_send(m: Interpreter, f: Frame, i: Instruction) -> None:
    value = f.stack.pop()
    f.stack[-1] = value


@handles("PUSH_NULL")
def _push_null(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(NULL)


@handles("COPY")
def _copy(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(f.stack[-i.arg])


@handles("SWAP")
def _swap(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack[-1], f.stack[-i.arg] = f.stack[-i.arg], f.stack[-1]


@handles("LOAD_CONST")
def _load_const(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(i.value)


@handles("RETURN_CONST")
def _return_const(m: Interpreter, f: Frame, i: Instruction) -> Any:
    f.stack.append(i.value)
    return RETURN


@handles("RETURN_VALUE")
def _return_value(m: Interpreter, f: Frame, i: Instruction) -> Any:
    return RETURN


# variables ---------------------------------------------------------------------------------------
def _local(f: Frame, name: str) -> Any:
    if name not in f.slots:
        raise UnboundLocalError(f"cannot access local variable '{name}' where it is not associated with a value")
    return f.slots[name]


@handles("LOAD_FAST")
def _load_fast(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(_local(f, i.value))


@handles("LOAD_FAST_LOAD_FAST")
def _load_two(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.extend(_local(f, name) for name in i.value)


@handles("STORE_FAST_LOAD_FAST")
def _store_load(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.slots[i.value[0]] = f.stack.pop()
    f.stack.append(_local(f, i.value[1]))


@handles("STORE_FAST_STORE_FAST")
def _store_two(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.slots[i.value[0]] = f.stack.pop()
    f.slots[i.value[1]] = f.stack.pop()


@handles("LOAD_FAST_AND_CLEAR")
def _load_clear(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(f.slots.pop(i.value, NULL))


@handles("STORE_FAST")
def _store_fast(m: Interpreter, f: Frame, i: Instruction) -> None:
    value = f.stack.pop()
    if value is NULL:
        f.slots.pop(i.value, None)
    else:
        f.slots[i.value] = value


@handles("DELETE_FAST")
def _delete_fast(m: Interpreter, f: Frame, i: Instruction) -> None:
    _local(f, i.value)
    del f.slots[i.value]


@handles("MAKE_CELL")
def _make_cell(m: Interpreter, f: Frame, i: Instruction) -> None:
    if i.value in f.slots:
        f.slots[i.value] = m.plain(f.slots[i.value])
    m.made_cell(new_cell(f.slots, i.value))


@handles("COPY_FREE_VARS")
def _copy_free(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.slots.update(zip(f.code.co_freevars, f.function.__closure__ or (), strict=True))


@handles("LOAD_CLOSURE")
def _load_closure(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(f.slots[i.value])


@handles("LOAD_DEREF")
def _load_deref(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(m.load_cell(f, i.value))


@handles("STORE_DEREF")
def _store_deref(m: Interpreter, f: Frame, i: Instruction) -> None:
    m.store_cell(f.slots[i.value], f.stack.pop())


@handles("DELETE_DEREF")
def _delete_deref(m: Interpreter, f: Frame, i: Instruction) -> None:
    m.load_cell(f, i.value)
    m.delete_cell(f.slots[i.value])


@handles("LOAD_GLOBAL")
def _load_global(m: Interpreter, f: Frame, i: Instruction) -> None:
    value = m.load_global(f, i.value)
    if i.arg & 1:
        f.stack.extend((NULL, value) if VERSION < (3, 13) else (value, NULL))
    else:
        f.stack.append(value)


@handles("STORE_GLOBAL")
def _store_global(m: Interpreter, f: Frame, i: Instruction) -> None:
    m.store_global(f, i.value, f.stack.pop())


@handles("DELETE_GLOBAL")
def _delete_global(m: Interpreter, f: Frame, i: Instruction) -> None:
    m.delete_subscript(f.names, i.value)


# attributes and items ----------------------------------------------------------------------------
def after_call(frame: Frame, value: Any) -> None:
    """Push an attribute that is about to be called."""
    frame.stack.extend((NULL, value) if VERSION < (3, 13) else (value, NULL))


@handles("LOAD_ATTR")
def _load_attr(m: Interpreter, f: Frame, i: Instruction) -> None:
    owner = f.stack.pop()
    if VERSION >= (3, 12) and i.arg & 1:
        after_call(f, m.load_attr(owner, i.value, "method"))
    else:
        f.stack.append(m.load_attr(owner, i.value))


@handles("LOAD_METHOD")
def _load_method(m: Interpreter, f: Frame, i: Instruction) -> None:
    after_call(f, m.load_attr(f.stack.pop(), i.value, "method"))


@handles("LOAD_SUPER_ATTR")
def _load_super(m: Interpreter, f: Frame, i: Instruction) -> None:
    function, kind, owner = _popn(f, 3)
    found = function(kind, owner) if function is super else m.call(function, (kind, owner), {})
    if i.arg & 1:
        after_call(f, m.load_attr(found, i.value, "method"))
    else:
        f.stack.append(m.load_attr(found, i.value))


@handles("STORE_ATTR")
def _store_attr(m: Interpreter, f: Frame, i: Instruction) -> None:
    owner = f.stack.pop()
    m.store_attr(owner, i.value, f.stack.pop())


@handles("DELETE_ATTR")
def _delete_attr(m: Interpreter, f: Frame, i: Instruction) -> None:
    m.delete_attr(f.stack.pop(), i.value)


@handles("BINARY_SUBSCR")
def _subscript(m: Interpreter, f: Frame, i: Instruction) -> None:
    container, key = _popn(f, 2)
    f.stack.append(m.subscript(container, key))


@handles("BINARY_SLICE")
def _slice(m: Interpreter, f: Frame, i: Instruction) -> None:
    container, start, stop = _popn(f, 3)
    f.stack.append(m.subscript(container, slice(m.plain(start), m.plain(stop))))


@handles("STORE_SLICE")
def _store_slice(m: Interpreter, f: Frame, i: Instruction) -> None:
    value, container, start, stop = _popn(f, 4)
    m.store_subscript(container, slice(m.plain(start), m.plain(stop)), value)


@handles("STORE_SUBSCR")
def _store_subscript(m: Interpreter, f: Frame, i: Instruction) -> None:
    value, container, key = _popn(f, 3)
    m.store_subscript(container, key, value)


@handles("DELETE_SUBSCR")
def _delete_subscript(m: Interpreter, f: Frame, i: Instruction) -> None:
    container, key = _popn(f, 2)
    m.delete_subscript(container, key)


# arithmetic --------------------------------------------------------------------------------------
@handles("BINARY_OP")
def _binary(m: Interpreter, f: Frame, i: Instruction) -> None:
    left, right = _popn(f, 2)
    f.stack.append(m.binary(i.text, left, right))


@handles("COMPARE_OP")
def _compare(m: Interpreter, f: Frame, i: Instruction) -> None:
    left, right = _popn(f, 2)
    f.stack.append(m.binary(i.value, left, right))


@handles("IS_OP")
def _is(m: Interpreter, f: Frame, i: Instruction) -> None:
    left, right = _popn(f, 2)
    f.stack.append(m.same(left, right) is not bool(i.arg))


@handles("CONTAINS_OP")
def _contains(m: Interpreter, f: Frame, i: Instruction) -> None:
    item, container = _popn(f, 2)
    f.stack.append(m.contains(container, item, bool(i.arg)))


@handles("UNARY_NEGATIVE")
def _negative(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(m.unary("-", f.stack.pop()))


@handles("UNARY_POSITIVE")
def _positive(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(m.unary("+", f.stack.pop()))


@handles("UNARY_INVERT")
def _invert(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(m.unary("~", f.stack.pop()))


@handles("UNARY_NOT")
def _not(m: Interpreter, f: Frame, i: Instruction) -> None:
    holds = _truth(m, f)
    if holds is not NULL:
        f.stack.append(not holds)


# jumps -------------------------------------------------------------------------------------------
def _truth(m: Interpreter, f: Frame) -> Any:
    """Pop a value and return its truth; where that is a split, push it and come again."""
    value = f.stack.pop()
    holds = m.truth(value)
    if holds is NULL:
        f.stack.append(m.opaque(bool, (value,), {}, "redo", f"the truth of {type(value).__qualname__}"))
        f.index -= 1
    return holds


@handles("JUMP")
def _jump(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.index = i.value


@handles("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE")
def _jump_if(m: Interpreter, f: Frame, i: Instruction) -> None:
    holds = _truth(m, f)
    if holds is not NULL and holds is (i.op == "POP_JUMP_IF_TRUE"):
        f.index = i.value


@handles("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP")
def _jump_or_pop(m: Interpreter, f: Frame, i: Instruction) -> None:
    value = f.stack[-1]
    holds = m.truth(value)
    if holds is NULL:
        # The value stays; its truth is read by a jump that cannot be taken up again, so not split.
        m.stop(f"`and`/`or` of {type(value).__qualname__}", m.here())
        holds = bool(m.plain(value))
    if holds is (i.op == "JUMP_IF_TRUE_OR_POP"):
        f.index = i.value
    else:
        f.stack.pop()


@handles("POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE")
def _jump_none(m: Interpreter, f: Frame, i: Instruction) -> None:
    if (f.stack.pop() is None) is (i.op == "POP_JUMP_IF_NONE"):
        f.index = i.value


@handles("GET_ITER")
def _get_iter(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(m.iterate(f.stack.pop()))


def after_next(frame: Frame, item: Instruction, value: Any) -> None:
    """Push what an iterator gave, or leave the loop."""
    if value is not STOP:
        frame.stack.append(value)
        return
    frame.stack.pop()
    frame.index = item.value
    if VERSION >= (3, 12):
        frame.index += 1 if VERSION < (3, 13) else 2


@handles("FOR_ITER")
def _for_iter(m: Interpreter, f: Frame, i: Instruction) -> None:
    after_next(f, i, m.advance(f.stack[-1]))


# building ----------------------------------------------------------------------------------------
@handles("BUILD_TUPLE")
def _build_tuple(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(tuple(_popn(f, i.arg)))


@handles("BUILD_LIST")
def _build_list(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(m.new([m.settled(item) for item in _popn(f, i.arg)]))


@handles("BUILD_SET")
def _build_set(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(m.new({m.settled(item) for item in _popn(f, i.arg)}))


@handles("BUILD_MAP")
def _build_map(m: Interpreter, f: Frame, i: Instruction) -> None:
    flat = [m.settled(item) for item in _popn(f, 2 * i.arg)]
    f.stack.append(m.new(dict(zip(flat[::2], flat[1::2], strict=True))))


@handles("BUILD_CONST_KEY_MAP")
def _build_const_map(m: Interpreter, f: Frame, i: Instruction) -> None:
    keys = f.stack.pop()
    f.stack.append(m.new(dict(zip(keys, map(m.settled, _popn(f, i.arg)), strict=True))))


@handles("BUILD_STRING")
def _build_string(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(m.join(_popn(f, i.arg)))


@handles("BUILD_SLICE")
def _build_slice(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(slice(*map(m.plain, _popn(f, i.arg))))


@handles("FORMAT_VALUE")
def _format_value(m: Interpreter, f: Frame, i: Instruction) -> None:
    spec = f.stack.pop() if i.arg & 4 else ""
    f.stack.append(m.formatted(f.stack.pop(), i.arg & 3, spec))


@handles("CONVERT_VALUE")
def _convert_value(m: Interpreter, f: Frame, i: Instruction) -> None:
    convert = (None, str, repr, ascii)[i.arg]
    f.stack.append(m.call(convert, (f.stack.pop(),), {}))


@handles("FORMAT_SIMPLE")
def _format_simple(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(m.formatted(f.stack.pop(), 0, ""))


@handles("FORMAT_WITH_SPEC")
def _format_spec(m: Interpreter, f: Frame, i: Instruction) -> None:
    value, spec = _popn(f, 2)
    f.stack.append(m.formatted(value, 0, spec))


@handles("LIST_APPEND")
def _list_append(m: Interpreter, f: Frame, i: Instruction) -> None:
    value = f.stack.pop()
    m.add_to(f.stack[-i.arg], list.append, (m.settled(value),))


@handles("SET_ADD")
def _set_add(m: Interpreter, f: Frame, i: Instruction) -> None:
    value = f.stack.pop()
    m.add_to(f.stack[-i.arg], set.add, (m.settled(value),))


@handles("MAP_ADD")
def _map_add(m: Interpreter, f: Frame, i: Instruction) -> None:
    key, value = _popn(f, 2)
    m.add_to(f.stack[-i.arg], dict.__setitem__, (m.settled(key), m.settled(value)))


@handles("LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE")
def _extend(m: Interpreter, f: Frame, i: Instruction) -> None:
    value = m.plain(f.stack.pop())
    target = f.stack[-i.arg]
    if i.op == "DICT_MERGE" and not isinstance(value, dict):
        value = dict(value)
    if i.op == "DICT_MERGE" and (set(value) & set(target) or not all(type(key) is str for key in value)):
        callee = getattr(f.stack[-2 - i.arg], "__qualname__", "function")
        key = next(iter(set(value) & set(target)), None)
        raise TypeError(f"{callee}() got multiple values for keyword argument {key!r}")
    method = {"LIST_EXTEND": list.extend, "SET_UPDATE": set.update}.get(i.op, dict.update)
    if i.op == "LIST_EXTEND" and not hasattr(value, "__iter__") and not hasattr(value, "__getitem__"):
        raise TypeError(f"Value after * must be an iterable, not {type(value).__name__}")
    m.extend(target, method, value)


@handles("LIST_TO_TUPLE")
def _list_to_tuple(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(tuple(f.stack.pop()))


@handles("UNPACK_SEQUENCE")
def _unpack(m: Interpreter, f: Frame, i: Instruction) -> None:
    items = m.unpacked(f.stack.pop())
    if items is None:
        f.index -= 1
        return
    if len(items) > i.arg:
        raise ValueError(f"too many values to unpack (expected {i.arg})")
    if len(items) < i.arg:
        raise ValueError(f"not enough values to unpack (expected {i.arg}, got {len(items)})")
    f.stack.extend(reversed(items))


@handles("UNPACK_EX")
def _unpack_ex(m: Interpreter, f: Frame, i: Instruction) -> None:
    before, after = i.arg & 255, i.arg >> 8
    items = m.unpacked(f.stack.pop())
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
def _kw_names(m: Interpreter, f: Frame, i: Instruction) -> None:
    value = i.value
    f.keywords = value if isinstance(value, tuple) else f.code.co_consts[i.arg]


def _do_call(m: Interpreter, f: Frame, count: int, keywords: tuple[str, ...]) -> None:
    args = _popn(f, count)
    first, second = _popn(f, 2)
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
def _call(m: Interpreter, f: Frame, i: Instruction) -> None:
    keywords, f.keywords = f.keywords, ()
    _do_call(m, f, i.arg, keywords)


@handles("CALL_KW")
def _call_kw(m: Interpreter, f: Frame, i: Instruction) -> None:
    keywords = f.stack.pop()
    _do_call(m, f, i.arg, keywords)


@handles("CALL_FUNCTION_EX")
def _call_ex(m: Interpreter, f: Frame, i: Instruction) -> None:
    kwargs = f.stack.pop() if i.arg & 1 else {}
    args = f.stack.pop()
    function = f.stack.pop()
    if function is NULL:
        function = f.stack.pop()
    elif f.stack and f.stack[-1] is NULL:
        f.stack.pop()
    f.stack.append(m.call_spread(function, args, kwargs))


@handles("MAKE_FUNCTION")
def _make_function(m: Interpreter, f: Frame, i: Instruction) -> None:
    code = f.stack.pop()
    parts: dict[str, Any] = {}
    if VERSION < (3, 13):
        for bit, name in ((8, "closure"), (4, "annotations"), (2, "kwdefaults"), (1, "defaults")):
            if i.arg & bit:
                parts[name] = m.settled(f.stack.pop())
    f.stack.append(m.make_function(f, code, parts))


@handles("SET_FUNCTION_ATTRIBUTE")
def _set_function_attribute(m: Interpreter, f: Frame, i: Instruction) -> None:
    value, function = _popn(f, 2)
    name = {1: "defaults", 2: "kwdefaults", 4: "annotations", 8: "closure"}[i.arg]
    f.stack.append(m.complete_function(f, function, name, m.settled(value)))


@handles("CALL_INTRINSIC_1")
def _intrinsic(m: Interpreter, f: Frame, i: Instruction) -> None:
    value = f.stack.pop()
    if i.arg == 5:  # INTRINSIC_UNARY_POSITIVE
        f.stack.append(m.unary("+", value))
    elif i.arg == 6:  # INTRINSIC_LIST_TO_TUPLE
        f.stack.append(tuple(value))
    elif i.arg == 3 and isinstance(value, StopIteration):  # INTRINSIC_STOPITERATION_ERROR
        error = RuntimeError("generator raised StopIteration")
        error.__cause__ = error.__context__ = value
        f.stack.append(error)
    elif i.arg == 3:
        f.stack.append(value)
    else:
        raise CaptureError(f"the intrinsic {i.arg}")


# generators --------------------------------------------------------------------------------------
@handles("RETURN_GENERATOR")
def _return_generator(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(None)  # what the following POP_TOP takes: the generator itself was made by the call


@handles("YIELD_VALUE")
def _yield(m: Interpreter, f: Frame, i: Instruction) -> Any:
    return YIELD


@handles("GET_YIELD_FROM_ITER")
def _yield_from(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(m.iterate(f.stack.pop()))


@handles("SEND")
def _send(m: Interpreter, f: Frame, i: Instruction) -> None:
    value = m.plain(f.stack.pop())
    target = f.stack[-1]
    try:
        if value is None:
            given = m.advance_or_raise(target)
        else:
            given = target.send(value)
    except StopIteration as error:
        if VERSION < (3, 12):
            f.stack[-1] = error.value
        else:
            f.stack.append(error.value)
        f.index = i.value
        return
    f.stack.append(given)


# exceptions --------------------------------------------------------------------------------------
@handles("LOAD_ASSERTION_ERROR")
def _assertion_error(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(AssertionError)


@handles("PUSH_EXC_INFO")
def _push_exc(m: Interpreter, f: Frame, i: Instruction) -> None:
    error = f.stack.pop()
    f.stack.append(f.handled[-1] if f.handled else None)
    f.stack.append(error)
    f.handled.append(error)


@handles("POP_EXCEPT")
def _pop_except(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.pop()
    f.handled.pop()


@handles("CHECK_EXC_MATCH")
def _check_match(m: Interpreter, f: Frame, i: Instruction) -> None:
    kinds = f.stack.pop()
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise TypeError("catching classes that do not inherit from BaseException is not allowed")
    f.stack.append(isinstance(f.stack[-1], kinds))


@handles("RERAISE")
def _reraise(m: Interpreter, f: Frame, i: Instruction) -> None:
    raise f.stack.pop()


@handles("RAISE_VARARGS")
def _raise(m: Interpreter, f: Frame, i: Instruction) -> None:
    if i.arg == 0:
        if not f.handled or f.handled[-1] is None:
            raise RuntimeError("No active exception to reraise")
        raise f.handled[-1]
    cause = f.stack.pop() if i.arg == 2 else NULL
    error = f.stack.pop()
    if isinstance(error, type) and issubclass(error, BaseException):
        with m.barrier():
            error = m.call(error, (), {})
    if not isinstance(error, BaseException):
        raise TypeError("exceptions must derive from BaseException")
    if cause is not NULL:
        error.__cause__ = cause() if isinstance(cause, type) else cause
    raise error


@handles("BEFORE_WITH")
def _before_with(m: Interpreter, f: Frame, i: Instruction) -> None:
    manager = m.plain(f.stack.pop())
    leave = m.special_method(manager, "__exit__")
    enter = m.special_method(manager, "__enter__")
    f.stack.append(leave)
    f.stack.append(m.call(enter, (), {}))


@handles("WITH_EXCEPT_START")
def _with_except(m: Interpreter, f: Frame, i: Instruction) -> None:
    error = f.stack[-1]
    leave = f.stack[-4]
    f.stack.append(m.call(leave, (type(error), error, error.__traceback__), {}))


@handles("CLEANUP_THROW")
def _cleanup_throw(m: Interpreter, f: Frame, i: Instruction) -> None:
    error = f.stack.pop()
    if not isinstance(error, StopIteration):
        raise error
    f.stack.pop()
    f.stack[-1] = None
    f.stack.append(error.value)


# matching ----------------------------------------------------------------------------------------
@handles("GET_LEN")
def _get_len(m: Interpreter, f: Frame, i: Instruction) -> None:
    value = f.stack[-1]
    with m.barrier():
        f.stack.append(m.call(len, (value,), {}))


@handles("MATCH_MAPPING")
def _match_mapping(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(bool(type(m.plain(f.stack[-1])).__flags__ & 1 << 6))


@handles("MATCH_SEQUENCE")
def _match_sequence(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(bool(type(m.plain(f.stack[-1])).__flags__ & 1 << 5))


@handles("MATCH_KEYS")
def _match_keys(m: Interpreter, f: Frame, i: Instruction) -> None:
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
def _match_class(m: Interpreter, f: Frame, i: Instruction) -> None:
    subject, kind, names = _popn(f, 3)
    with m.barrier():
        f.stack.append(m.match_class(subject, kind, names, i.arg))


# imports and classes -----------------------------------------------------------------------------
@handles("IMPORT_NAME")
def _import(m: Interpreter, f: Frame, i: Instruction) -> None:
    level, names = _popn(f, 2)
    f.stack.append(m.import_module(f, i.value, names, level))


@handles("IMPORT_FROM")
def _import_from(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(m.load_attr(f.stack[-1], i.value))


@handles("LOAD_BUILD_CLASS")
def _build_class(m: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(builtins.__build_class__)


__all__ = ["HANDLERS", "Dynamic", "types"]
