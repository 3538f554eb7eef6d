"""Python equivalents of builtins that call back: interpreted, so that the callback is seen too.

Each behaves as the builtin it stands for does with arguments that the builtin accepts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

_MISSING = object()


def sum_(items: Iterable[Any], /, start: Any = 0) -> Any:
    """Stand for `sum`."""
    total = start
    for item in items:
        total = total + item
    return total


def any_(items: Iterable[Any], /) -> bool:
    """Stand for `any`."""
    for item in items:  # noqa: SIM110 this is what the builtin does
        if item:
            return True
    return False


def all_(items: Iterable[Any], /) -> bool:
    """Stand for `all`."""
    for item in items:  # noqa: SIM110
        if not item:
            return False
    return True


def map_(function: Any, /, *iterables: Iterable[Any]) -> Iterator[Any]:
    """Stand for `map`."""
    for items in zip(*iterables):  # noqa: B905 `map` stops at the shortest
        yield function(*items)


def filter_(function: Any, items: Iterable[Any], /) -> Iterator[Any]:
    """Stand for `filter`."""
    for item in items:
        if function(item) if function is not None else item:
            yield item


def starmap_(function: Any, items: Iterable[Any], /) -> Iterator[Any]:
    """Stand for `itertools.starmap`."""
    for item in items:
        yield function(*item)


def filterfalse_(function: Any, items: Iterable[Any], /) -> Iterator[Any]:
    """Stand for `itertools.filterfalse`."""
    for item in items:
        if not (function(item) if function is not None else item):
            yield item


def takewhile_(function: Any, items: Iterable[Any], /) -> Iterator[Any]:
    """Stand for `itertools.takewhile`."""
    for item in items:
        if not function(item):
            return
        yield item


def dropwhile_(function: Any, items: Iterable[Any], /) -> Iterator[Any]:
    """Stand for `itertools.dropwhile`."""
    dropping = True
    for item in items:
        if dropping and function(item):
            continue
        dropping = False
        yield item


def compress_(data: Iterable[Any], selectors: Iterable[Any]) -> Iterator[Any]:
    """Stand for `itertools.compress`."""
    for item, chosen in zip(data, selectors):  # noqa: B905 it stops at the shorter
        if chosen:
            yield item


def pairwise_(items: Iterable[Any], /) -> Iterator[Any]:
    """Stand for `itertools.pairwise`."""
    before = _MISSING
    for item in items:
        if before is not _MISSING:
            yield before, item
        before = item


def stream(iterator: Iterator[Any], /) -> Iterator[Any]:
    """Yield what an iterator gives, without a call of its ``__iter__``."""
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


def reversed_(sequence: Any, /) -> Iterator[Any]:
    """Stand for `reversed` of an object with ``__len__`` and ``__getitem__``."""
    return _backwards(sequence, len(sequence))


def _backwards(sequence: Any, end: int) -> Iterator[Any]:
    for index in range(end - 1, -1, -1):
        try:
            item = sequence[index]
        except (IndexError, StopIteration):
            return
        yield item


def reduce_(function: Any, items: Iterable[Any], /, *initial: Any) -> Any:
    """Stand for `functools.reduce`."""
    stream = iter(items)
    if initial:
        total = initial[0]
    else:
        total = next(stream, _MISSING)
        if total is _MISSING:
            raise TypeError("reduce() of empty iterable with no initial value")
    for item in stream:
        total = function(total, item)
    return total


def order(keys: list[Any], reverse: bool) -> list[int]:
    """Return the indices of `keys` in sorted order; not interpreted, so `keys` must be plain data."""
    return sorted(range(len(keys)), key=keys.__getitem__, reverse=reverse)


def sorted_(items: Iterable[Any], /, *, key: Any = None, reverse: bool = False) -> list[Any]:
    """Stand for `sorted` with a key."""
    values = list(items)
    keys = [value if key is None else key(value) for value in values]
    return [values[index] for index in order(keys, reverse)]


def min_(*items: Any, key: Any, **default: Any) -> Any:
    """Stand for `min` with a key."""
    best = best_key = _MISSING
    for item in items if len(items) > 1 else items[0]:
        now = key(item)
        if best_key is _MISSING or now < best_key:
            best, best_key = item, now
    if best is _MISSING:
        return min((), **default)
    return best


def max_(*items: Any, key: Any, **default: Any) -> Any:
    """Stand for `max` with a key."""
    best = best_key = _MISSING
    for item in items if len(items) > 1 else items[0]:
        now = key(item)
        if best_key is _MISSING or now > best_key:
            best, best_key = item, now
    if best is _MISSING:
        return max((), **default)
    return best
