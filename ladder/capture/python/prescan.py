"""What code tells before it runs: that it looks at frames, is a generator or coroutine, or only computes."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from ladder.capture.python.bytecode import program_of
from ladder.capture.python.natives import FRAME_FUNCTIONS, FRAME_FUNCTIONS_ALONE, FRAME_NAMES
from ladder.capture.python.words import words

COMPUTING = frozenset(
    words("range len min max sum int float abs tuple list round divmod sorted enumerate zip bool reversed")
)
"""Builtins that, given numbers and containers of them, do nothing but compute."""
_REACHING_OUT = frozenset(
    words("LOAD_ATTR LOAD_METHOD STORE_ATTR DELETE_ATTR STORE_GLOBAL DELETE_GLOBAL IMPORT_NAME")
)
_NOT_CALLS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


Unfollowed = tuple[types.CodeType, int]
"""Code that runs as it is, and the module, by its id, whose method it is then; 0 for a plain function."""


def unfollowed(code: types.CodeType, first: Any) -> Unfollowed:
    """Return what says that code runs as it is with a first argument."""
    is_module = issubclass(type(first), torch.nn.Module)  # `isinstance` may ask the object itself
    return code, id(first) if is_module else 0


def activation_of(code: types.CodeType, slots: dict[str, Any]) -> Unfollowed | None:
    """Return `unfollowed` of an activation with such variables; None where its first argument is gone.

    A variable that functions within use lies in a cell.
    """
    if not code.co_argcount:
        return unfollowed(code, None)
    name = code.co_varnames[0]
    first = slots.get(name)
    if type(first) is types.CellType:
        try:
            first = first.cell_contents
        except ValueError:
            return None
    return unfollowed(code, first) if name in slots else None


def reason_not_to_capture(function: Any) -> str:
    """Return why `function` runs as it is in every call; empty if it is to be captured."""
    code = _code_of(function)
    if code is None:
        return ""
    if code.co_flags & _NOT_CALLS:
        return "a generator or coroutine function: a call only makes an object"
    for inner in _codes(code):
        found = frame_names(inner)
        if found:
            return f"{inner.co_name} looks at frames: {', '.join(sorted(found))}"
    return ""


def frame_names(code: types.CodeType) -> frozenset[str]:
    """Return the names by which `code` itself looks at frames: attributes, and built-in functions."""
    names = FRAME_NAMES.intersection(code.co_names)
    if (FRAME_FUNCTIONS | FRAME_FUNCTIONS_ALONE).isdisjoint(code.co_names):
        return names
    steps = [item for item in program_of(code).instructions if item.op not in ("NOP", "PUSH_NULL")]
    pairs = [(item.value, then) for item, then in pairwise(steps) if item.op in ("LOAD_GLOBAL", "LOAD_NAME")]
    alone = {value for value, then in pairs if then.op == "CALL" and not then.arg}
    named = FRAME_FUNCTIONS.intersection(value for value, _ in pairs)
    return names | named | FRAME_FUNCTIONS_ALONE.intersection(alone)


def only_computes(function: types.FunctionType) -> bool:
    """Say whether `function`, given constants, reads and changes nothing else."""
    if function.__code__.co_freevars or not COMPUTING.isdisjoint(function.__globals__):
        return False
    instructions = [item for code in _codes(function.__code__) for item in program_of(code).instructions]
    named = {item.value for item in instructions if item.op in ("LOAD_GLOBAL", "LOAD_NAME")}
    return named <= COMPUTING and _REACHING_OUT.isdisjoint(item.op for item in instructions)


def _code_of(function: Any) -> types.CodeType | None:
    if isinstance(function, types.MethodType):
        function = function.__func__
    if isinstance(function, types.FunctionType):
        return function.__code__
    forward = getattr(type(function), "forward", None)
    return forward.__code__ if isinstance(forward, types.FunctionType) else None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            yield from _codes(item)
