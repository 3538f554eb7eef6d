"""Programs that move numbers, which may be left open, from container to container."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Pair(NamedTuple):
    start: int
    end: int


@dataclass
class Place:
    start: int
    shape: Any = None


def _numbers(x: Tensor, start: int = 0, end: int = 1, **more: int) -> Tensor:
    return x[start // 2 :] + torch.arange(start, start + x.shape[0])[start // 2 :] + end + sum(more.values())


def relay(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _numbers(x, *args, **kwargs)


def keywords(x, n):
    return relay(x, **{"start": n, "end": 2})


def more_keywords(x, n):
    return relay(x, start=n, end=n + 1, other=n)


def merged_keywords(x, n):
    given = {"start": n}
    return relay(x, **given, **{"end": n - 1}), relay(x, **{**given, "end": 3})


def positional(x, n):
    given = [n, n + 1]
    return relay(x, *given), relay(x, *(n, 1)), relay(x, *[1, *given][1:2])


def made_dictionary(x, n):
    given = dict(start=n)
    given["end"] = n + 1
    copied = given.copy()
    copied.update({"start": n - 1})
    copied.update(end=n)
    return relay(x, **dict(given, end=n)), relay(x, **copied), copied, len(given)


def taken_out(x, n):
    given = {"start": n, "left": 2, "end": n}
    start, left = given.pop("start"), given.pop("left", None)
    return relay(x, start, **given) * left, given.get("end", 0) + given.get("none", n), given.pop("none", n)


def lists(x, n):
    sizes = [n]
    sizes.append(n + 1)
    sizes.extend([n + 2, 4])
    sizes.extend((n, n))
    sizes += [n * 2]
    sizes[1] = n * 3
    sizes[-1] = n * 4
    first, *rest = sizes
    return x + sizes[0] + sizes[-1] + sizes[3], sizes, first, rest


def comprehensions(x, n):
    sizes = {name: size for name, size in zip("ab", (n, n + 1))}
    twice = {name: 2 * size for name, size in sizes.items()}
    return x + twice["a"], [size + 1 for size in x.shape], [*sizes.values()], [name for name in sizes]


def loops(x, n):
    total = 0
    for at, size in enumerate(x.shape):
        total = total + at + size
    for left, right in zip(x.shape, (n, 2)):
        total = total + left * right
    for size in [n, n + 1]:
        total += size
    for name, size in {"a": n}.items():
        total += size + len(name)
    return x + total


def changed_while_looped_over(x, n):
    sizes, seen = {"a": n, "b": 1}, []
    for name in sizes.keys():
        sizes[name] = n + 1
        seen.append(sizes[name])
    queue = [n]
    for size in queue:
        if len(queue) < 4:
            queue.append(size + 1)
    return x + queue[-1], seen, sizes, queue


def broken_in_a_loop(x, n):
    total = x
    for at, size in {"a": n, "b": n + 1}.items():
        total = total + torch.tensor([float(size)] * len(at)).numpy().sum().item()
    for size in (n, n + 1):
        total = total + eval("size", {"size": size})
    for size in [n, n + 1]:
        total = total + eval("size", {"size": size})
    return total


def grown_dictionary(x, n):
    sizes = {"a": n}
    try:
        for name in sizes.items():
            sizes["b"] = n
    except RuntimeError as error:
        return x + n, str(error)


def named_tuples(x, n):
    pair = Pair(n, end=n + 2)
    start, end = pair
    moved = pair._replace(end=n + 1)
    return relay(x, *pair), relay(x, pair.start, pair[1]), start + end, moved, isinstance(pair, tuple)


def objects(x, n):
    place, space = Place(n, x.shape), SimpleNamespace(n=n, pair=(n, 1))
    return relay(x, place.start), x.new_zeros(place.shape), space.n + space.pair[0], place.start


def shapes(x, n):
    size = torch.Size([n, *x.shape])
    rows = list(x.shape)
    rows[0] = n
    return (
        x.new_ones([n, 2]),
        x.new_ones(tuple([n, *rows])),
        x.new_ones(size),
        x.new_ones(list(x.shape[:0]) + [n]),
        math.prod(x.shape) + sum(x.shape) + sum([n, 1], 2) + max(x.shape) + min((n, 100)),
    )


def nested(x, n):
    given = {"inner": {"start": n}, "sizes": (n, [n])}
    return relay(x, **given["inner"]), x + given["sizes"][0] + given["sizes"][1][0]


def known_beside_open(x, n):
    lengths: list[Any] = [None] * 3
    for axis, length in ((0, n), (2, 4)):
        lengths[axis] = length
    lengths[1] = n // lengths[2]
    lengths.append(1)
    lengths.insert(0, 2)
    last = lengths.pop()
    lengths.reverse()
    del lengths[0]
    lengths += [last]
    return x[: lengths[1]] * lengths[0] + lengths[2], lengths


def known_for_open(x, n):
    sizes, rows = [n, n + 1, 5], [1, 2, 3]
    at = sizes.pop(-2)
    sizes.insert(-1, at)
    sizes[-1] = 3
    rows[1:] = [n, 5]
    rows[:1] = [7]
    return x[:at] * sizes[-1] + rows[1], sizes, rows, len(rows)


def keys_beside_open(x, n):
    sizes = {"a": n, "b": n + 1}
    found = sizes.setdefault("a", 3), sizes.setdefault("c", 4)
    del sizes["a"]
    sizes["a"] = 2
    return x[: sizes["b"]] * found[1] + found[0] + sizes["a"], sizes


def product_of(sizes):
    result = 1
    for size in sizes:
        result *= size
    return result


def known_times_open(x, n):
    total, part = 2, 10.0
    total += n
    part /= n
    return x.new_ones([product_of([n, 2]), product_of((n,))]), x[:total] * part, total


def failing_beside_open(x, n):
    sizes = [n]
    try:
        sizes[4] = 2
    except IndexError:
        sizes.append(1)
    sizes[:1], rest = (n - 1, 2), iter([3, n])
    sizes[1:] = rest
    return x[: sizes[0]] * sizes[1], sizes


def given_to_natives(x, n):
    sizes = {"a": n, "b": (n, 2)}
    return x + sorted([n, 1])[0], repr(sizes), [n] == [n], (n, 2) in [(n, 2)], str([n])


def grown_while_looped_over(x: Tensor, number: int) -> tuple[Any, ...]:
    known, met = {"a": number, "b": 1, "c": 2}, []
    try:
        for key, item in known.items():
            met.append((key, item))
            if key == "b":
                known["d"] = 3
                str(id(object()))  # breaks the graph
                met.append(number)
    except RuntimeError as error:
        met.append(str(error))
    return x * number, met


def extended_behind_a_break(x: Tensor, number: int) -> tuple[Any, ...]:
    """What a display held before a break is no constant of what follows."""
    first = (number, *(len(str(id(object()))[:2]), x * 2))
    second = (number, *(x.numel(),), *(len(str(id(object()))[:2]), x + 1))
    return first, second, [number, *(len(str(id(object()))[:2]),)]


def exchanged_while_looped_over(x: Tensor, number: int) -> tuple[Any, ...]:
    known, met = {"a": number, "b": 1, "c": 2}, []
    for key in known:
        met.append(key)
        if key == "b":
            known["d"] = known.pop("c")
    return x * number, met


def emptied_while_looped_over(x: Tensor, number: int) -> tuple[Any, ...]:
    items, met = [number, 1, 2, 3], []
    for item in items:
        met.append(item)
        if item == 1:
            items.clear()
            str(id(object()))
            items.extend((7, 8, 9))
            str(id(object()))
    return x * number, met, items


def generators_among_open_numbers(x: Tensor, number: int) -> tuple[Any, ...]:
    def parts() -> Any:
        yield number
        yield (item for item in (1, 2))
        yield number + 1

    made = (0, *parts())
    return len(made), made[1], [*made[2]], made[3] * x


OPEN: list[Callable[..., Any]] = [
    *(keywords, more_keywords, merged_keywords, positional, made_dictionary, taken_out, lists),
    *(comprehensions, loops, changed_while_looped_over, named_tuples, objects, shapes, nested),
    *(known_beside_open, known_for_open, keys_beside_open, known_times_open),
]
FIXED: list[Callable[..., Any]] = [
    *(given_to_natives, broken_in_a_loop, grown_dictionary, failing_beside_open),
    *(grown_while_looped_over, exchanged_while_looped_over, emptied_while_looped_over),
    *(generators_among_open_numbers, extended_behind_a_break),
]
