"""Handlers of single instructions, CPython 3.11 to 3.13: stack, variables, attributes, arithmetic, jumps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ladder.capture.bytecode import VERSION, Instruction
from ladder.capture.containers import STOP
from ladder.capture.frames import NULL, Absent, Frame, new_cell
from ladder.capture.words import words

if TYPE_CHECKING:
    from ladder.capture.machine import Machine

RETURN = Absent()
YIELD = Absent()
Handler = Callable[["Machine", Frame, Instruction], Any]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for the instructions `names`."""

    def register(handler: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = handler
        return handler

    return register


def popn(frame: Frame, count: int) -> list[Any]:
    """Pop `count` values, the deepest first."""
    if not count:
        return []
    taken = frame.stack[-count:]
    del frame.stack[-count:]
    return taken


# stack -------------------------------------------------------------------------------------------
@handles("NOP", "TO_BOOL", "COPY_FREE_VARS_DONE")
def _nop(m: Machine, f: Frame, i: Instruction) -> None:
    pass


@handles("POP_TOP", "END_FOR")
def _pop_top(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.pop()


@handles("END_SEND")
def _end_send(m: Machine, f: Frame, i: Instruction) -> None:
    value = f.stack.pop()
    f.stack[-1] = value


@handles("PUSH_NULL")
def _push_null(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(NULL)


@handles("COPY")
def _copy(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(f.stack[-i.arg])


@handles("SWAP")
def _swap(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack[-1], f.stack[-i.arg] = f.stack[-i.arg], f.stack[-1]


@handles("LOAD_CONST")
def _load_const(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(i.value)


@handles("RETURN_CONST")
def _return_const(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack.append(i.value)
    return RETURN


@handles("RETURN_VALUE")
def _return_value(m: Machine, f: Frame, i: Instruction) -> Any:
    return RETURN


# variables ---------------------------------------------------------------------------------------
def _local(f: Frame, name: str) -> Any:
    if name not in f.slots:
        raise UnboundLocalError(
            f"cannot access local variable '{name}' where it is not associated with a value"
        )
    return f.slots[name]


@handles("LOAD_FAST")
def _load_fast(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(_local(f, i.value))


@handles("LOAD_FAST_LOAD_FAST")
def _load_two(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.extend(_local(f, name) for name in i.value)


@handles("STORE_FAST_LOAD_FAST")
def _store_load(m: Machine, f: Frame, i: Instruction) -> None:
    f.slots[i.value[0]] = f.stack.pop()
    f.stack.append(_local(f, i.value[1]))


@handles("STORE_FAST_STORE_FAST")
def _store_two(m: Machine, f: Frame, i: Instruction) -> None:
    f.slots[i.value[0]] = f.stack.pop()
    f.slots[i.value[1]] = f.stack.pop()


@handles("LOAD_FAST_AND_CLEAR")
def _load_clear(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(f.slots.pop(i.value, NULL))


@handles("STORE_FAST")
def _store_fast(m: Machine, f: Frame, i: Instruction) -> None:
    value = f.stack.pop()
    if value is NULL:
        f.slots.pop(i.value, None)
    else:
        f.slots[i.value] = value


@handles("DELETE_FAST")
def _delete_fast(m: Machine, f: Frame, i: Instruction) -> None:
    _local(f, i.value)
    del f.slots[i.value]


@handles("MAKE_CELL")
def _make_cell(m: Machine, f: Frame, i: Instruction) -> None:
    if i.value in f.slots:
        f.slots[i.value] = m.plain(f.slots[i.value])
    m.made_cell(new_cell(f.slots, i.value))


@handles("COPY_FREE_VARS")
def _copy_free(m: Machine, f: Frame, i: Instruction) -> None:
    f.slots.update(zip(f.code.co_freevars, f.function.__closure__ or (), strict=True))


@handles("LOAD_CLOSURE")
def _load_closure(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(f.slots[i.value])


@handles("LOAD_DEREF")
def _load_deref(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(m.load_cell(f, i.value))


@handles("STORE_DEREF")
def _store_deref(m: Machine, f: Frame, i: Instruction) -> None:
    m.store_cell(f.slots[i.value], f.stack.pop())


@handles("DELETE_DEREF")
def _delete_deref(m: Machine, f: Frame, i: Instruction) -> None:
    m.load_cell(f, i.value)
    m.delete_cell(f.slots[i.value])


@handles("LOAD_GLOBAL")
def _load_global(m: Machine, f: Frame, i: Instruction) -> None:
    value = m.load_global(f, i.value)
    if i.arg & 1:
        f.stack.extend((NULL, value) if VERSION < (3, 13) else (value, NULL))
    else:
        f.stack.append(value)


@handles("STORE_GLOBAL")
def _store_global(m: Machine, f: Frame, i: Instruction) -> None:
    m.store_global(f, i.value, f.stack.pop())


@handles("DELETE_GLOBAL")
def _delete_global(m: Machine, f: Frame, i: Instruction) -> None:
    m.delete_subscript(f.names, i.value)


# attributes and items ----------------------------------------------------------------------------
def after_call(frame: Frame, value: Any) -> None:
    """Push an attribute that is about to be called."""
    frame.stack.extend((NULL, value) if VERSION < (3, 13) else (value, NULL))


_STATEMENTS = frozenset(
    words("STORE_ATTR DELETE_ATTR STORE_SUBSCR STORE_SLICE DELETE_SUBSCR LIST_APPEND SET_ADD MAP_ADD")
)


def push_result(frame: Frame, value: Any) -> None:
    """Take up the instruction of `frame` that was waiting for `value`."""
    item = frame.program.instructions[frame.index - 1]
    if item.op in _STATEMENTS:
        return
    method = item.op == "LOAD_METHOD" or (item.op == "LOAD_SUPER_ATTR" and item.arg & 1)
    if method or (VERSION >= (3, 12) and item.op == "LOAD_ATTR" and item.arg & 1):
        after_call(frame, value)
    else:
        frame.stack.append(value)


@handles("LOAD_ATTR")
def _load_attr(m: Machine, f: Frame, i: Instruction) -> None:
    owner = f.stack.pop()
    if VERSION >= (3, 12) and i.arg & 1:
        after_call(f, m.load_attr(owner, i.value))
    else:
        f.stack.append(m.load_attr(owner, i.value))


@handles("LOAD_METHOD")
def _load_method(m: Machine, f: Frame, i: Instruction) -> None:
    after_call(f, m.load_attr(f.stack.pop(), i.value))


@handles("LOAD_SUPER_ATTR")
def _load_super(m: Machine, f: Frame, i: Instruction) -> None:
    function, kind, owner = popn(f, 3)
    with m.barrier():
        found = m.call(function, (kind, owner), {})
    if i.arg & 1:
        after_call(f, m.load_attr(found, i.value))
    else:
        f.stack.append(m.load_attr(found, i.value))


@handles("STORE_ATTR")
def _store_attr(m: Machine, f: Frame, i: Instruction) -> None:
    owner = f.stack.pop()
    m.store_attr(owner, i.value, f.stack.pop())


@handles("DELETE_ATTR")
def _delete_attr(m: Machine, f: Frame, i: Instruction) -> None:
    m.delete_attr(f.stack.pop(), i.value)


@handles("BINARY_SUBSCR")
def _subscript(m: Machine, f: Frame, i: Instruction) -> None:
    container, key = popn(f, 2)
    f.stack.append(m.subscript(container, key))


@handles("BINARY_SLICE")
def _slice(m: Machine, f: Frame, i: Instruction) -> None:
    container, start, stop = popn(f, 3)
    f.stack.append(m.subscript(container, slice(start, stop)))


@handles("STORE_SLICE")
def _store_slice(m: Machine, f: Frame, i: Instruction) -> None:
    value, container, start, stop = popn(f, 4)
    m.store_subscript(container, slice(start, stop), value)


@handles("STORE_SUBSCR")
def _store_subscript(m: Machine, f: Frame, i: Instruction) -> None:
    value, container, key = popn(f, 3)
    m.store_subscript(container, key, value)


@handles("DELETE_SUBSCR")
def _delete_subscript(m: Machine, f: Frame, i: Instruction) -> None:
    container, key = popn(f, 2)
    m.delete_subscript(container, key)


# arithmetic --------------------------------------------------------------------------------------
@handles("BINARY_OP")
def _binary(m: Machine, f: Frame, i: Instruction) -> None:
    left, right = popn(f, 2)
    f.stack.append(m.binary(i.text, left, right))


@handles("COMPARE_OP")
def _compare(m: Machine, f: Frame, i: Instruction) -> None:
    left, right = popn(f, 2)
    f.stack.append(m.binary(i.value, left, right))


@handles("IS_OP")
def _is(m: Machine, f: Frame, i: Instruction) -> None:
    left, right = popn(f, 2)
    f.stack.append(m.same(left, right) is not bool(i.arg))


@handles("CONTAINS_OP")
def _contains(m: Machine, f: Frame, i: Instruction) -> None:
    item, container = popn(f, 2)
    f.stack.append(m.contains(container, item, bool(i.arg)))


@handles("UNARY_NEGATIVE")
def _negative(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(m.unary("-", f.stack.pop()))


@handles("UNARY_POSITIVE")
def _positive(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(m.unary("+", f.stack.pop()))


@handles("UNARY_INVERT")
def _invert(m: Machine, f: Frame, i: Instruction) -> None:
    f.stack.append(m.unary("~", f.stack.pop()))


@handles("UNARY_NOT")
def _not(m: Machine, f: Frame, i: Instruction) -> None:
    holds = _truth(m, f)
    if holds is not NULL:
        f.stack.append(not holds)


# jumps -------------------------------------------------------------------------------------------
def _truth(m: Machine, f: Frame) -> Any:
    """Pop a value and return its truth; where that is a split, push it and come again."""
    value = f.stack.pop()
    holds = m.truth(value)
    if holds is NULL:
        f.stack.append(m.opaque(bool, (value,), {}, "redo", f"the truth of {type(value).__qualname__}"))
        f.index -= 1
    return holds


@handles("JUMP")
def _jump(m: Machine, f: Frame, i: Instruction) -> None:
    f.index = i.value


@handles("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE")
def _jump_if(m: Machine, f: Frame, i: Instruction) -> None:
    holds = _truth(m, f)
    if holds is not NULL and holds is (i.op == "POP_JUMP_IF_TRUE"):
        f.index = i.value


@handles("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP")
def _jump_or_pop(m: Machine, f: Frame, i: Instruction) -> None:
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
def _jump_none(m: Machine, f: Frame, i: Instruction) -> None:
    if (f.stack.pop() is None) is (i.op == "POP_JUMP_IF_NONE"):
        f.index = i.value


@handles("GET_ITER")
def _get_iter(m: Machine, f: Frame, i: Instruction) -> None:
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
def _for_iter(m: Machine, f: Frame, i: Instruction) -> None:
    after_next(f, i, m.advance(f.stack[-1]))
