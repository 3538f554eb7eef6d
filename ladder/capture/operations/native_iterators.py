"""Iterators of natives that call back: the native ones, given functions and iterators that are watched."""

from __future__ import annotations

import itertools
import types
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.interpreter.opcodes import STOP
from ladder.capture.operations.functions import hide
from ladder.capture.operations.moving import walk_alone
from ladder.capture.operations.objects import closes_something, pinned_part, require_fitting
from ladder.capture.operations.replay import advance, is_hidden, iterate
from ladder.capture.operations.truth import decided
from ladder.capture.python import polyfills
from ladder.capture.python.frames import NULL
from ladder.capture.values.kinds import is_a, is_constant


class Watched:
    """An iterator for natives, each of whose items is taken under watch and then given as `change` has it."""

    __slots__ = ("change", "iterator", "token", "vm")

    def __init__(self, vm: Interpreter, value: Any, change: Any = None, token: Any = None) -> None:
        self.vm, self.change, self.token = vm, change, token
        walked = walk_alone(vm, value)
        with vm.barrier():
            self.iterator = iterate(vm, value) if walked is NULL else walked

    def __iter__(self) -> Iterator[Any]:
        """Return the iterator itself."""
        return self

    def __next__(self) -> Any:
        """Return the next item."""
        with self.vm.barrier():
            item = advance(self.vm, self.iterator)
        if item is STOP:
            raise StopIteration
        return item if self.change is None else self.change(item)


def _called(vm: Interpreter, function: Any, *items: Any) -> Any:
    with vm.barrier():
        return vm.call(function, items, {})


def _called_with_all(vm: Interpreter, function: Any, items: Any) -> Any:
    with vm.barrier():
        return vm.call(function, items if is_a(items, tuple) else vm.call(tuple, (items,), {}), {})


def _chosen(vm: Interpreter, function: Any, item: Any) -> bool:
    with vm.barrier():
        return decided(vm, item if function in (None, bool) else vm.call(function, (item,), {}))


Watch = Callable[..., Watched]


def _mapped(vm: Interpreter, watch: Watch, function: Any, *sources: Any) -> Any:
    return map(partial(_called, vm, function), *map(watch, sources))


def _spread(vm: Interpreter, watch: Watch, function: Any, source: Any) -> Any:
    return itertools.starmap(partial(_called_with_all, vm, function), watch(source, _alone))


def _alone(item: Any) -> tuple[Any]:
    return (item,)


def _choosing(kind: Any) -> Callable[..., Any]:
    return lambda vm, watch, function, source: kind(partial(_chosen, vm, function), watch(source))


def _compressed(vm: Interpreter, watch: Watch, data: Any, selectors: Any) -> Any:
    return itertools.compress(watch(data), watch(selectors, partial(_chosen, vm, None)))


def _accumulated(
    vm: Interpreter, watch: Watch, iterable: Any, func: Any = None, *, initial: Any = None
) -> Any:
    function = pinned_part(vm, polyfills.added) if func is None else func
    return itertools.accumulate(watch(iterable), partial(_called, vm, function), initial=initial)


def _flattened(vm: Interpreter, watch: Watch, source: Any) -> Any:
    return itertools.chain.from_iterable(watch(source, partial(Watched, vm)))


def _over(kind: Any) -> Callable[..., Any]:
    return lambda vm, watch, source, *rest: kind(watch(source), *map(vm.plain, rest))


CALLING: dict[Any, Callable[..., Any]] = {
    map: _mapped,
    itertools.starmap: _spread,
    itertools.compress: _compressed,
    itertools.pairwise: _over(itertools.pairwise),
    itertools.accumulate: _accumulated,
    itertools.chain.from_iterable: _flattened,
    **{
        kind: _choosing(kind)
        for kind in (filter, itertools.filterfalse, itertools.takewhile, itertools.dropwhile)
    },
}
"""Native that calls back -> ``make(vm, watch, *args, **kwargs)``, which gives what the native gives."""
TAKING: dict[Any, Callable[..., Any]] = {
    itertools.chain: lambda vm, watch, *sources: _flattened(vm, watch, sources),
    itertools.islice: _over(itertools.islice),
    itertools.cycle: _over(itertools.cycle),
    itertools.zip_longest: lambda vm, watch, *sources, **fill: itertools.zip_longest(
        *map(watch, sources), **fill
    ),
}
"""The same for natives that only take items: watched where taking one runs code of the program."""


def native_iterator(vm: Interpreter, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the iterator that a native gives; what it calls and takes is watched."""
    require_fitting(kind, args, kwargs)
    taken: list[Watched] = []
    token: set[Any] = set()  # it dies with the last that holds it

    def watch(value: Any, change: Callable[[Any], Any] | None = None) -> Watched:
        taken.append(Watched(vm, value, change, token))
        return taken[-1]

    made = (CALLING.get(kind) or TAKING[kind])(vm, watch, *args, **kwargs)
    if vm.recording:
        closes = any(closes_something(vm, each.iterator) for each in taken)
        hide(vm, made, token, closes=closes)
    return made


def runs_code(vm: Interpreter, kind: Any, args: tuple[Any, ...]) -> bool:
    """Say whether the iterator that `kind` gives of these arguments runs code of the program."""
    return kind in CALLING or (kind in TAKING and any(_runs_code(vm, item) for item in args))


def _runs_code(vm: Interpreter, value: Any) -> bool:
    if is_hidden(vm, value):
        return True
    known = is_constant(value) or is_a(value, list | tuple | dict | set | frozenset | deque)
    return not known and is_a(vm.heap.class_attribute(type(value), "__iter__"), types.FunctionType)
