"""Programs under capture beside the same programs without: what is compared, and how.

A `World` is one fresh universe: a function, calls of it with what happens before each, and what can
be observed from outside. Two worlds of one program, one of them captured, go through the same calls
and must agree on results, types, mutations, aliasing, output, generators and exceptions.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import inspect
import io
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ladder.capture import Captured, capture

Step = tuple[Callable[[], Any] | None, Callable[[], tuple[Any, ...]]]


@dataclass
class World:
    """A function, the calls of it as (set-up, arguments) and what an observer sees."""

    function: Callable[..., Any]
    steps: list[Step]
    observe: Callable[[], Any] | None = None


PROGRAMS: dict[str, Callable[[], World]] = {}


def program(make: Callable[[], World]) -> Callable[[], World]:
    """Register a program under its name."""
    assert make.__name__ not in PROGRAMS
    PROGRAMS[make.__name__] = make
    return make


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return a tensor of normal numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def programs(**makers: Callable[[], World]) -> None:
    """Register programs by name."""
    for name, make in makers.items():
        assert name not in PROGRAMS
        PROGRAMS[name] = make


def normals(*shape: int) -> Callable[[], tuple[Any, ...]]:
    """Return what makes the arguments of a call: one tensor of normal numbers, of shape (3, 4) by default."""
    return lambda: (normal(*(shape or (3, 4))),)


def steps(function: Callable[..., Any], *set_ups: Any, observe: Any = None, make: Any = None) -> World:
    """Return a world of one call after each of `set_ups` (None: nothing happens)."""
    return World(function, [(set_up, make or normals()) for set_up in set_ups], observe)


def programs_of(home: dict[str, Any], prefix: str) -> None:
    """Register the functions of a module whose names begin with an underscore, under `prefix` and name."""
    own = [make for make in home.values() if isinstance(make, types.FunctionType)]
    own = [make for make in own if make.__module__ == home["__name__"] and make.__name__[0] == "_"]
    programs(**{f"{prefix}{make.__name__}": make for make in own})


def calls(function: Callable[..., Any], *arguments: Callable[[], tuple[Any, ...]], observe=None) -> World:
    """Return a world in which nothing happens between the calls."""
    return World(function, [(None, make) for make in arguments], observe)


@dataclass
class Outcome:
    """What one call did."""

    error: BaseException | None
    result: Any
    arguments: Any
    observed: Any
    output: str
    identities: list[int] = field(default_factory=list)
    layouts: list[Any] = field(default_factory=list)
    random: list[int] = field(default_factory=list)


def run(world: World, function: Callable[..., Any]) -> list[Outcome]:
    """Make all calls of `world`, of `function` in place of the world's own."""
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    outcomes = []
    for set_up, make in world.steps:
        if set_up is not None:
            set_up()
        arguments = make()
        error = result = None
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            try:
                result = function(*arguments)
            except Exception as raised:  # the comparison is of exceptions too
                error = raised
        seen = snapshot(world.observe()) if world.observe else None
        outcome = Outcome(error, snapshot(result), snapshot(list(arguments)), seen, output.getvalue())
        outcome.identities = identities(arguments, result)
        outcome.layouts = layouts(arguments, result)
        outcome.random = random_states()
        outcomes.append(outcome)
    return outcomes


def captured_run(
    make: Callable[[], World], repeat: int, backend: Any = None
) -> tuple[list[Outcome], list[Outcome], Captured]:
    """Return the outcomes without and with capture, each step made `repeat` times, and the capture."""
    plain = _repeated(seeded(make), repeat)
    expected = run(plain, plain.function)
    watched = _repeated(seeded(make), repeat)
    captured = capture(watched.function, backend=backend)
    return expected, run(watched, captured), captured


def seeded(make: Callable[[], World]) -> World:
    """Return the world that `make` gives, with the same random numbers every time."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return make()


def _repeated(world: World, repeat: int) -> World:
    world.steps = [
        (None if again else set_up, make) for set_up, make in world.steps for again in range(repeat)
    ]
    return world


def layouts(*roots: Any) -> list[Any]:
    """Return strides, offset, version and memory (by first visit) of the tensors under `roots`."""
    seen: dict[int, int] = {}
    found: list[Any] = []

    def walk(value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            found.append(layout(value, seen))
        elif depth:
            for item in _parts(value):
                walk(item, depth - 1)

    walk(roots, 6)
    return found


def layout(tensor: torch.Tensor, seen: dict[int, int]) -> Any:
    """Return strides (of axes that have any), offset in memory that others show, version and memory."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    tensor = tensor.as_subclass(torch.Tensor)
    steps = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    version = None if tensor.is_inference() else tensor._version
    place = tensor.untyped_storage().data_ptr()
    offset = tensor.storage_offset() if place in seen else None
    return steps if tensor.numel() else None, offset, version, seen.setdefault(place, len(seen))


def random_states() -> list[int]:
    """Return what tells the states of all random generators apart."""
    known = hash(torch.get_rng_state().numpy().tobytes()), hash(random.getstate())
    return [*known, hash(str(np.random.get_state(legacy=False)))]


def snapshot(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return a deep copy of the data in `value`."""
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, torch.Tensor):
        copied = value.detach().clone()
        copied.requires_grad_(value.requires_grad) if value.is_floating_point() else None
        memo[id(value)] = copied
        return copied
    if type(value) in (list, tuple):
        return type(value)(snapshot(item, memo) for item in value)
    if type(value) is dict:
        return {key: snapshot(item, memo) for key, item in value.items()}
    if isinstance(value, deque):
        return deque((snapshot(item, memo) for item in value), value.maxlen)
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def identities(*roots: Any) -> list[int]:
    """Return the pattern of identities of the mutable objects under `roots`, by first visit."""
    seen: dict[int, int] = {}
    kept: list[Any] = []
    pattern: list[int] = []
    mutable = (torch.Tensor, list, dict, set, deque, np.ndarray)

    def walk(value: Any, depth: int) -> None:
        if isinstance(value, mutable) or _is_data_object(value):
            known = id(value) in seen
            pattern.append(seen.setdefault(id(value), len(seen)))
            kept.append(value)
            if known:
                return
        if depth:
            for item in _parts(value):
                walk(item, depth - 1)

    for root in roots:
        walk(root, 6)
    return pattern


def _is_data_object(value: Any) -> bool:
    opaque = (nn.Module, types.ModuleType, enum.Enum, torch.Tensor)
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, opaque)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | deque):
        return list(value)
    return [vars(value)[key] for key in sorted(vars(value))] if _is_data_object(value) else []


def difference(expected: Any, found: Any, path: str = "", memo: set[Any] | None = None) -> str:
    """Return where and how `found` differs; empty if it does not."""
    memo = set() if memo is None else memo
    if (id(expected), id(found)) in memo:
        return ""
    memo.add((id(expected), id(found)))
    if type(expected) is not type(found) and type(expected).__qualname__ != type(found).__qualname__:
        return f"{path}: {type(found).__qualname__} in place of {type(expected).__qualname__}"
    if isinstance(expected, torch.Tensor):
        return _tensor_difference(expected, found, path)
    if isinstance(expected, np.ndarray):
        same = expected.dtype == found.dtype and np.array_equal(expected, found, equal_nan=True)
        return "" if same else f"{path}: arrays differ"
    if isinstance(expected, float):
        return "" if repr(expected) == repr(found) else f"{path}: {found!r} in place of {expected!r}"
    if isinstance(expected, int | str | bytes | bool | type(None)):
        return "" if expected == found else f"{path}: {found!r} in place of {expected!r}"
    if isinstance(expected, set | frozenset):
        return "" if sorted(map(repr, expected)) == sorted(map(repr, found)) else f"{path}: sets differ"
    return _structure_difference(expected, found, path, memo)


def _tensor_difference(expected: Any, found: Any, path: str) -> str:
    if expected.layout is not torch.strided or expected.is_meta:
        return "" if repr(expected) == repr(found) else f"{path}: {found!r} in place of {expected!r}"
    first, second = (item.detach().as_subclass(torch.Tensor) for item in (expected, found))
    for name in ("dtype", "shape", "requires_grad"):
        if getattr(expected, name) != getattr(found, name):
            return f"{path}.{name}: {getattr(found, name)} in place of {getattr(expected, name)}"
    if (first.is_conj(), first.is_neg()) != (second.is_conj(), second.is_neg()):
        return f"{path}: conjugated or negated where it is read, or not"
    return "" if same_values(first, second) else f"{path}: values differ"


def same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Say whether two tensors hold the same numbers."""
    known, found = first.isnan(), second.isnan()
    return torch.equal(known, found) and torch.equal(first[~known], second[~found])


def _structure_difference(expected: Any, found: Any, path: str, memo: set[Any]) -> str:
    if isinstance(expected, dict):
        if list(map(repr, dict.keys(expected))) != list(map(repr, dict.keys(found))):
            return f"{path}: keys {list(dict.keys(found))} in place of {list(dict.keys(expected))}"
        pairs = [(repr(key), expected_item) for key, expected_item in dict.items(expected)]
        others = list(dict.values(found))
    elif isinstance(expected, list | tuple | deque):
        if len(expected) != len(found):
            return f"{path}: {len(found)} items in place of {len(expected)}"
        pairs, others = list(enumerate(expected)), list(found)
    elif _is_data_object(expected):
        return difference(vars(expected), vars(found), f"{path}.__dict__", memo)
    else:
        return ""
    for (key, item), other in zip(pairs, others, strict=True):
        reason = difference(item, other, f"{path}[{key}]", memo)
        if reason:
            return reason
    return ""


def compare(expected: list[Outcome], found: list[Outcome]) -> str:
    """Return the first difference between two runs; empty if they agree."""
    for number, (first, second) in enumerate(zip(expected, found, strict=True)):
        reason = _call_difference(first, second)
        if reason:
            return f"call {number}: {reason}"
    return ""


def described(error: BaseException | None) -> Any:
    """Return what can be seen of an exception: its type, message, attributes, and what it came of."""
    if error is None:
        return None
    attributes = {key: repr(value) for key, value in vars(error).items()}
    chain = described(error.__cause__), described(error.__context__), error.__suppress_context__
    return type(error).__qualname__, str(error), attributes, chain


def _call_difference(first: Outcome, second: Outcome) -> str:
    errors = [described(item.error) for item in (first, second)]
    if errors[0] != errors[1]:
        return f"{errors[1]} in place of {errors[0]}"
    for name in ("result", "arguments", "observed", "output"):
        reason = difference(getattr(first, name), getattr(second, name), name)
        if reason:
            return reason
    for name in ("random",) if first.error is not None else ("identities", "layouts", "random"):
        if getattr(first, name) != getattr(second, name):
            return f"{name} {getattr(second, name)} in place of {getattr(first, name)}"
    return ""


__all__ = ["PROGRAMS", "World", "calls", "captured_run", "compare", "inspect", "normal", "program"]
__all__ += ["OrderedDict", "programs"]
