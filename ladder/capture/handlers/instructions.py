"""Handlers of single instructions, CPython 3.11 to 3.14: stack, variables, attributes, arithmetic, jumps."""

from __future__ import annotations

from typing import Any

import torch

from ladder.capture.handlers.variables import (
    delete_cell,
    delete_global,
    load_cell,
    load_global,
    made_cell,
    store_cell,
    store_global,
)
from ladder.capture.heap.nodes import dynamic_parts
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.interpreter.opcodes import (
    HANDLERS,
    RETURN,
    after_call,
    after_next,
    handles,
    popn,
    pops,
    pushes,
)
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
@handles("END_SEND")
def _end_send(vm: Interpreter, f: Frame, i: Instruction) -> None:
    value = f.stack.pop()
    f.stack[-1] = value


@handles("SWAP")
def _swap(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.stack[-1], f.stack[-i.arg] = f.stack[-i.arg], f.stack[-1]


@handles("RETURN_CONST")
def _return_const(vm: Interpreter, f: Frame, i: Instruction) -> Any:
    f.stack.append(i.value)
    return RETURN


# variables ---------------------------------------------------------------------------------------
def _local(f: Frame, name: str) -> Any:
    if name not in f.slots:
        raise UnboundLocalError(
            f"cannot access local variable '{name}' where it is not associated with a value"
        )
    return f.slots[name]


def _loaded(vm: Interpreter, f: Frame, name: str) -> Any:
    """Return a local: what is no tensor is looked at now, if the segment began with it."""
    value = _local(f, name)
    if vm.recording and id(value) in vm.heap.roots and not is_a(value, torch.Tensor):
        vm.heap.find(value)
    return value


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
        f.slots[i.value] = vm.held(value)
    made_cell(vm, new_cell(f.slots, i.value), value)


@handles("COPY_FREE_VARS")
def _copy_free(vm: Interpreter, f: Frame, i: Instruction) -> None:
    f.slots.update(zip(f.code.co_freevars, f.function.__closure__ or (), strict=True))


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


# attributes and items ----------------------------------------------------------------------------
@handles("LOAD_ATTR")
def _load_attr(vm: Interpreter, f: Frame, i: Instruction) -> None:
    owner = f.stack.pop()
    if VERSION >= (3, 12) and i.arg & 1:
        after_call(f, load_attr(vm, owner, i.value))
    else:
        f.stack.append(load_attr(vm, owner, i.value))


@handles("LOAD_SUPER_ATTR")
def _load_super(vm: Interpreter, f: Frame, i: Instruction) -> None:
    function, kind, owner = popn(f, 3)
    with vm.barrier():
        found = vm.call(function, (kind, owner), {})
    if i.arg & 1:
        after_call(f, load_attr(vm, found, i.value))
    else:
        f.stack.append(load_attr(vm, found, i.value))


# arithmetic --------------------------------------------------------------------------------------
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


@handles("FOR_ITER")
def _for_iter(vm: Interpreter, f: Frame, i: Instruction) -> None:
    after_next(f, i, advance(vm, f.stack[-1]))


HANDLERS |= {
    "NOP": lambda vm, f, i: None,
    "TO_BOOL": lambda vm, f, i: None,
    "COPY_FREE_VARS_DONE": lambda vm, f, i: None,
    "RETURN_VALUE": lambda vm, f, i: RETURN,
    "POP_TOP": pops(lambda vm, f, i, value: None, 1),
    "END_FOR": pops(lambda vm, f, i, value: None, 1),
    "PUSH_NULL": pushes(lambda vm, f, i: NULL),
    "COPY": pushes(lambda vm, f, i: f.stack[-i.arg]),
    "LOAD_CONST": pushes(lambda vm, f, i: i.value),
    "LOAD_FAST": pushes(lambda vm, f, i: _loaded(vm, f, i.value)),
    "LOAD_FAST_AND_CLEAR": pushes(lambda vm, f, i: f.slots.pop(i.value, NULL)),
    "LOAD_CLOSURE": pushes(lambda vm, f, i: f.slots[i.value]),
    "LOAD_DEREF": pushes(lambda vm, f, i: load_cell(vm, f, i.value)),
    "STORE_DEREF": pops(lambda vm, f, i, value: store_cell(vm, f.slots[i.value], value), 1),
    "STORE_GLOBAL": pops(lambda vm, f, i, value: store_global(vm, f, i.value, value), 1),
    "DELETE_GLOBAL": pops(lambda vm, f, i: delete_global(vm, f, i.value), 0),
    "LOAD_METHOD": pops(lambda vm, f, i, owner: after_call(f, load_attr(vm, owner, i.value)), 1),
    "STORE_ATTR": pops(lambda vm, f, i, value, owner: store_attr(vm, owner, i.value, value), 2),
    "DELETE_ATTR": pops(lambda vm, f, i, owner: delete_attr(vm, owner, i.value), 1),
    "BINARY_SUBSCR": pushes(lambda vm, f, i, owner, key: subscript(vm, owner, key), 2),
    "BINARY_SLICE": pushes(lambda vm, f, i, owner, *ends: subscript(vm, owner, slice(*ends)), 3),
    "STORE_SLICE": pops(lambda vm, f, i, item, at, *ends: store_subscript(vm, at, slice(*ends), item), 4),
    "STORE_SUBSCR": pops(lambda vm, f, i, item, owner, key: store_subscript(vm, owner, key, item), 3),
    "DELETE_SUBSCR": pops(lambda vm, f, i, owner, key: delete_subscript(vm, owner, key), 2),
    "BINARY_OP": pushes(lambda vm, f, i, left, right: binary(vm, i.text, left, right), 2),
    "COMPARE_OP": pushes(lambda vm, f, i, left, right: binary(vm, i.value, left, right), 2),
    "IS_OP": pushes(lambda vm, f, i, left, right: same(vm, left, right) is not bool(i.arg), 2),
    "CONTAINS_OP": pushes(lambda vm, f, i, item, owner: contains(vm, owner, item, bool(i.arg)), 2),
    "UNARY_NEGATIVE": pushes(lambda vm, f, i, value: unary(vm, "-", value), 1),
    "UNARY_POSITIVE": pushes(lambda vm, f, i, value: unary(vm, "+", value), 1),
    "UNARY_INVERT": pushes(lambda vm, f, i, value: unary(vm, "~", value), 1),
    "GET_ITER": pushes(lambda vm, f, i, value: iterate(vm, value), 1),
}
"""The instructions that take values off the stack and give one, or do one thing with them."""
