"""Python equivalents of natives that give iterators: generators, interpreted like those of `polyfills`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

_MISSING = object()


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


def chain_(*iterables: Iterable[Any]) -> Iterator[Any]:
    """Stand for `itertools.chain`."""
    for items in iterables:
        for item in items:  # noqa: UP028 the generator takes no values
            yield item


def flattened(iterables: Iterable[Iterable[Any]], /) -> Iterator[Any]:
    """Stand for `itertools.chain.from_iterable`."""
    for items in iterables:
        for item in items:  # noqa: UP028
            yield item


def islice_(items: Iterable[Any], /, *bounds: int | None) -> Iterator[Any]:
    """Stand for `itertools.islice`."""
    chosen = slice(*bounds)
    stream, taken, ahead = iter(items), 0, chosen.start or 0
    while True:
        while taken < ahead:
            if next(stream, _MISSING) is _MISSING:
                return
            taken += 1
        if chosen.stop is not None and taken >= chosen.stop:
            return
        item = next(stream, _MISSING)
        if item is _MISSING:
            return
        taken += 1
        ahead += chosen.step or 1
        if chosen.stop is not None and ahead > chosen.stop:
            ahead = chosen.stop
        yield item


def cycle_(items: Iterable[Any], /) -> Iterator[Any]:
    """Stand for `itertools.cycle`."""
    kept = []
    for item in items:
        kept.append(item)
        yield item
    while kept:
        for item in kept:
            yield item


def _filled(items: Iterable[Any], live: list[int], fillvalue: Any) -> Iterator[Any]:
    for item in items:  # noqa: UP028
        yield item
    live[0] -= 1
    while live[0]:
        yield fillvalue


def zip_longest_(*iterables: Iterable[Any], fillvalue: Any = None) -> Iterator[Any]:
    """Stand for `itertools.zip_longest`."""
    live = [len(iterables)]
    for items in zip(*(_filled(each, live, fillvalue) for each in iterables)):  # noqa: B905, UP028
        yield items


def accumulate_(iterable: Iterable[Any], func: Any = None, *, initial: Any = None) -> Iterator[Any]:
    """Stand for `itertools.accumulate`."""
    items = iter(iterable)
    total = next(items, _MISSING) if initial is None else initial
    if total is _MISSING:
        return
    yield total
    for item in items:
        total = total + item if func is None else func(total, item)
        yield total
