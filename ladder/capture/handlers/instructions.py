"""Handlers of single instructions, CPython 3.11 to 3.14: stack, variables, attributes, arithmetic, jumps."""

from __future__ import annotations

from typing import Any

import torch

from ladder.capture.handlers.variables import (
    delete_cell,
    load_cell,
    load_global,
    made_cell,
    store_cell,
    store_global,
)
from ladder.capture.heap.nodes import dynamic_parts
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.interpreter.opcodes import RETURN, after_call, after_next, handles, popn
from ladder.capture.interpreter.recording import opaque
from ladder.capture.operations.attribute_stores import delete_attr, store_attr
from ladder.capture.operations.attributes import load_attr
from ladder.capture.operations.objects import same
from ladder.capture.operations.operators import (
    binary,
    contains,
    delete_subscript,
    store_subscript,
    subscript,
    unary,
)
from ladder.capture.operations.replay import advance, iterate
from ladder.capture.operations.truth import truth
from ladder.capture.python.bytecode import VERSION, Instruction
from ladder.capture.python.frames import NULL, Frame, new_cell
from ladder.capture.values.kinds import is_a


# stack -------------------------------------------------------------------------------------------
@handles("NOP", "TO_BOOL", "COPY_FREE_VARS_DONE")
def _nop(vm: Interpreter, f: Frame, i: Instruction) -> None:
    pass


@handles("POP_TOP", "END_FOR")
def _pop_top(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.pop()


@handles("END_SEND")
def _end_send(vm: Interpreter, f: Frame, i: Instruction) -> None:
    value = f.stack.pop()
    f.stack[-1] = value


@handles("PUSH_NULL")
def _push_null(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(NULL)


@handles("COPY")
def _copy(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(f.stack[-i.arg])


@handles("SWAP")
def _swap(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack[-1], f.stack[-i.arg] = f.stack[-i.arg], f.stack[-1]


@handles("LOAD_CONST")
def _load_const(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(i.value)


@handles("RETURN_CONST")
def _return_const(vm: Interpreter, f: Frame, i: Instruction) -> Any:
    f.stack.append(i.value)
    return RETURN


@handles("RETURN_VALUE")
def _return_value(vm: Interpreter, f: Frame, i: Instruction) -> Any:
    return RETURN


# variables ---------------------------------------------------------------------------------------
def _local(f: Frame, name: str) -> Any:
    if name not in f.slots:
        raise UnboundLocalError(
            f"cannot access local variable '{name}' where it is not associated with a value"
        )
    return f.slots[name]


@handles("LOAD_FAST")
def _load_fast(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(_loaded(vm, f, i.value))


def _loaded(vm: Interpreter, f: Frame, name: str) -> Any:
    """Return a local: what is no tensor is looked at now, if the segment began with it."""
    value = _local(f, name)
    return value if is_a(value, torch.Tensor) else vm.seen(value)


@handles("LOAD_FAST_LOAD_FAST")
def _load_two(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.extend(_loaded(vm, f, name) for name in i.value)


@handles("STORE_FAST_LOAD_FAST")
def _store_load(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.slots[i.value[0]] = f.stack.pop()
    f.stack.append(_loaded(vm, f, i.value[1]))


@handles("STORE_FAST_STORE_FAST")
def _store_two(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.slots[i.value[0]] = f.stack.pop()
    f.slots[i.value[1]] = f.stack.pop()


@handles("LOAD_FAST_AND_CLEAR")
def _load_clear(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(f.slots.pop(i.value, NULL))


@handles("STORE_FAST")
def _store_fast(vm: Interpreter, f: Frame, i: Instruction) -> None:
    value = f.stack.pop()
    if value is NULL:
        f.slots.pop(i.value, None)
    else:
        f.slots[i.value] = value


@handles("DELETE_FAST")
def _delete_fast(vm: Interpreter, f: Frame, i: Instruction) -> None:
    _local(f, i.value)
    del f.slots[i.value]


@handles("MAKE_CELL")
def _make_cell(vm: Interpreter, f: Frame, i: Instruction) -> None:
    value = f.slots.get(i.value, NULL)
    if value is not NULL:
        value = value if dynamic_parts(value) else vm.plain(value)
        f.slots[i.value] = vm.unlifted(value)
    made_cell(vm, new_cell(f.slots, i.value), value)


@handles("COPY_FREE_VARS")
def _copy_free(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.slots.update(zip(f.code.co_freevars, f.function.__closure__ or (), strict=True))


@handles("LOAD_CLOSURE")
def _load_closure(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(f.slots[i.value])


@handles("LOAD_DEREF")
def _load_deref(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(load_cell(vm, f, i.value))


@handles("STORE_DEREF")
def _store_deref(vm: Interpreter, f: Frame, i: Instruction) -> None:
    store_cell(vm, f.slots[i.value], f.stack.pop())


@handles("DELETE_DEREF")
def _delete_deref(vm: Interpreter, f: Frame, i: Instruction) -> None:
    load_cell(vm, f, i.value)
    delete_cell(vm, f.slots[i.value])


@handles("LOAD_GLOBAL")
def _load_global(vm: Interpreter, f: Frame, i: Instruction) -> None:
    value = load_global(vm, f, i.value)
    if i.arg & 1:
        f.stack.extend((NULL, value) if VERSION < (3, 13) else (value, NULL))
    else:
        f.stack.append(value)


@handles("STORE_GLOBAL")
def _store_global(vm: Interpreter, f: Frame, i: Instruction) -> None:
    store_global(vm, f, i.value, f.stack.pop())


@handles("DELETE_GLOBAL")
def _delete_global(vm: Interpreter, f: Frame, i: Instruction) -> None:
    delete_subscript(vm, f.names, i.value)


# attributes and items ----------------------------------------------------------------------------
@handles("LOAD_ATTR")
def _load_attr(vm: Interpreter, f: Frame, i: Instruction) -> None:
    owner = f.stack.pop()
    if VERSION >= (3, 12) and i.arg & 1:
        after_call(f, load_attr(vm, owner, i.value))
    else:
        f.stack.append(load_attr(vm, owner, i.value))


@handles("LOAD_METHOD")
def _load_method(vm: Interpreter, f: Frame, i: Instruction) -> None:
    after_call(f, load_attr(vm, f.stack.pop(), i.value))


@handles("LOAD_SUPER_ATTR")
def _load_super(vm: Interpreter, f: Frame, i: Instruction) -> None:
    function, kind, owner = popn(f, 3)
    with vm.barrier():
        found = vm.call(function, (kind, owner), {})
    if i.arg & 1:
        after_call(f, load_attr(vm, found, i.value))
    else:
        f.stack.append(load_attr(vm, found, i.value))


@handles("STORE_ATTR")
def _store_attr(vm: Interpreter, f: Frame, i: Instruction) -> None:
    owner = f.stack.pop()
    store_attr(vm, owner, i.value, f.stack.pop())


@handles("DELETE_ATTR")
def _delete_attr(vm: Interpreter, f: Frame, i: Instruction) -> None:
    delete_attr(vm, f.stack.pop(), i.value)


@handles("BINARY_SUBSCR")
def _subscript(vm: Interpreter, f: Frame, i: Instruction) -> None:
    container, key = popn(f, 2)
    f.stack.append(subscript(vm, container, key))


@handles("BINARY_SLICE")
def _slice(vm: Interpreter, f: Frame, i: Instruction) -> None:
    container, start, stop = popn(f, 3)
    f.stack.append(subscript(vm, container, slice(start, stop)))


@handles("STORE_SLICE")
def _store_slice(vm: Interpreter, f: Frame, i: Instruction) -> None:
    value, container, start, stop = popn(f, 4)
    store_subscript(vm, container, slice(start, stop), value)


@handles("STORE_SUBSCR")
def _store_subscript(vm: Interpreter, f: Frame, i: Instruction) -> None:
    value, container, key = popn(f, 3)
    store_subscript(vm, container, key, value)


@handles("DELETE_SUBSCR")
def _delete_subscript(vm: Interpreter, f: Frame, i: Instruction) -> None:
    container, key = popn(f, 2)
    delete_subscript(vm, container, key)


# arithmetic --------------------------------------------------------------------------------------
@handles("BINARY_OP")
def _binary(vm: Interpreter, f: Frame, i: Instruction) -> None:
    left, right = popn(f, 2)
    f.stack.append(binary(vm, i.text, left, right))


@handles("COMPARE_OP")
def _compare(vm: Interpreter, f: Frame, i: Instruction) -> None:
    left, right = popn(f, 2)
    f.stack.append(binary(vm, i.value, left, right))


@handles("IS_OP")
def _is(vm: Interpreter, f: Frame, i: Instruction) -> None:
    left, right = popn(f, 2)
    f.stack.append(same(vm, left, right) is not bool(i.arg))


@handles("CONTAINS_OP")
def _contains(vm: Interpreter, f: Frame, i: Instruction) -> None:
    item, container = popn(f, 2)
    f.stack.append(contains(vm, container, item, bool(i.arg)))


@handles("UNARY_NEGATIVE")
def _negative(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(unary(vm, "-", f.stack.pop()))


@handles("UNARY_POSITIVE")
def _positive(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(unary(vm, "+", f.stack.pop()))


@handles("UNARY_INVERT")
def _invert(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(unary(vm, "~", f.stack.pop()))


@handles("UNARY_NOT")
def _not(vm: Interpreter, f: Frame, i: Instruction) -> None:
    holds = _truth(vm, f)
    if holds is not NULL:
        f.stack.append(not holds)


# jumps -------------------------------------------------------------------------------------------
def _truth(vm: Interpreter, f: Frame) -> Any:
    """Pop a value and return its truth; where that breaks the graph, push it and come again."""
    value = f.stack.pop()
    holds = truth(vm, value)
    if holds is NULL:
        f.stack.append(opaque(vm, bool, (value,), {}, "redo", f"the truth of {type(value).__qualname__}"))
        f.index -= 1
    return holds


@handles("JUMP")
def _jump(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.index = i.value


@handles("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE")
def _jump_if(vm: Interpreter, f: Frame, i: Instruction) -> None:
    holds = _truth(vm, f)
    if holds is not NULL and holds is (i.op == "POP_JUMP_IF_TRUE"):
        f.index = i.value


@handles("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP")
def _jump_or_pop(vm: Interpreter, f: Frame, i: Instruction) -> None:
    value = f.stack[-1]
    holds = truth(vm, value)
    if holds is NULL:
        # The value stays; its truth is read by a jump that cannot be resumed, so the graph does not break.
        vm.stop(f"`and`/`or` of {type(value).__qualname__}", vm.here())
        holds = bool(vm.plain(value))
    if holds is (i.op == "JUMP_IF_TRUE_OR_POP"):
        f.index = i.value
    else:
        f.stack.pop()


@handles("POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE")
def _jump_none(vm: Interpreter, f: Frame, i: Instruction) -> None:
    if (vm.seen(f.stack.pop()) is None) is (i.op == "POP_JUMP_IF_NONE"):
        f.index = i.value


@handles("GET_ITER")
def _get_iter(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack.append(iterate(vm, f.stack.pop()))


@handles("FOR_ITER")
def _for_iter(vm: Interpreter, f: Frame, i: Instruction) -> None:
    after_next(f, i, advance(vm, f.stack[-1]))
