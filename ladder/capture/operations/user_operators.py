"""Operators that classes of the program define: their methods, in the order in which CPython asks them."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ladder.capture.heap.nodes import CaptureError
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.operations.objects import same
from ladder.capture.operations.truth import truth
from ladder.capture.python.frames import NULL
from ladder.capture.python.symbols import COMPARE, METHODS
from ladder.capture.values.kinds import is_a, name_of_kind

_MIRROR = {"<": "gt", "<=": "ge", "==": "eq", "!=": "ne", ">": "lt", ">=": "le"}
_NUMBERS = (int, float, complex, bool)
_COMPARED: dict[type, Any] = {kind: kind for kind in (str, bytes, list, tuple, dict)}
_COMPARED |= dict.fromkeys((set, frozenset), (set, frozenset))
"""Native types -> those that theirs compare with: of others they say nothing."""
_SEQUENCES = (list, tuple, str, bytes, bytearray, range)
_ORDER = tuple(getattr(object, f"__{name}__") for name in ("lt", "le", "gt", "ge"))
"""What classes have that do not say how their instances are ordered."""


class Attempt(NamedTuple):
    """A method that CPython asks for the result of an operator, with its object and argument."""

    name: str
    method: Any
    owner: Any
    other: Any


def user_unary(vm: Interpreter, symbol: str, function: Any, value: Any) -> Any:
    """Return ``symbol value`` by a method of the program."""
    method = vm.heap.class_attribute(type(value), f"__{function.__name__}__")
    if not is_a(method, types.FunctionType):
        raise CaptureError(f"{symbol}{type(value).__qualname__}")
    return vm.call_function(method, (value,), {})


def user_binary(vm: Interpreter, symbol: str, left: Any, right: Any) -> Any:
    """Return ``left symbol right`` by methods of the program."""
    attempts = list(_attempts(vm, symbol, left, right))
    # Sequences have slots of their own for these.
    joins = is_a(left if symbol[0] == "+" else right, _SEQUENCES) and symbol[0] in "+*"
    inherits = type(right) is not type(left) and is_a(right, type(left))
    if joins or inherits or not all(_is_known(vm, attempt) for attempt in attempts):
        raise CaptureError(f"{type(left).__qualname__} {symbol} {type(right).__qualname__}")
    for attempt in attempts:
        result = _asked(vm, attempt)
        if result is not NotImplemented:
            return result
    if symbol in ("==", "!="):
        return same(vm, left, right) is (symbol == "==")
    raise TypeError(_unsupported(symbol, left, right))


def _attempts(vm: Interpreter, symbol: str, left: Any, right: Any) -> Iterator[Attempt]:
    if symbol in COMPARE:
        names = [(f"__{COMPARE[symbol]}__", left), (f"__{_MIRROR[symbol]}__", right)]
    else:
        name = METHODS[symbol.rstrip("=")]
        in_place = [(f"__i{name}__", left)] if symbol.endswith("=") else []
        mirrored = [(f"__r{name}__", right)] if type(right) is not type(left) else []
        names = [*in_place, (f"__{name}__", left), *mirrored]
    for name, owner in names:
        method = vm.heap.class_attribute(type(owner), name)
        if method is not NULL:
            yield Attempt(name, method, owner, right if owner is left else left)


def _is_known(vm: Interpreter, attempt: Attempt) -> bool:
    """Say whether a method is code of the program, or one of CPython's without effect."""
    name, method, owner, other = attempt
    if method is object.__ne__:
        equal = vm.heap.class_attribute(type(owner), "__eq__")
        return is_a(equal, types.FunctionType) or equal is object.__eq__
    if is_a(method, types.FunctionType) or any(method is known for known in (object.__eq__, *_ORDER)):
        return True
    if type(owner) in _COMPARED and name.strip("_") in COMPARE.values():
        return not is_a(other, _COMPARED[type(owner)])
    return type(owner) in _NUMBERS and not is_a(other, (*_NUMBERS, np.generic))


def _asked(vm: Interpreter, attempt: Attempt) -> Any:
    _, method, owner, other = attempt
    if method is object.__eq__:
        return True if same(vm, owner, other) else NotImplemented
    if method is object.__ne__:
        equal = vm.heap.class_attribute(type(owner), "__eq__")
        found = _asked(vm, Attempt("__eq__", equal, owner, other))
        return found if found is NotImplemented else _opposite(vm, found)
    if not is_a(method, types.FunctionType):
        return NotImplemented
    with vm.barrier():
        return vm.call_function(method, (owner, other), {})


def _opposite(vm: Interpreter, value: Any) -> bool:
    holds = truth(vm, value)
    if holds is NULL:
        vm.stop("a comparison that gives no bool, negated", vm.here())
        return not value
    return not holds


def _unsupported(symbol: str, left: Any, right: Any) -> str:
    """Return the message of the TypeError where no method has an answer."""
    kinds = name_of_kind(left), name_of_kind(right)
    if symbol in COMPARE:
        return f"'{symbol}' not supported between instances of '{kinds[0]}' and '{kinds[1]}'"
    named = "** or pow()" if symbol == "**" else symbol
    return f"unsupported operand type(s) for {named}: '{kinds[0]}' and '{kinds[1]}'"
