"""Functions that are wrapped, managed, cached and bound, as libraries do it inside of a model's call."""

from __future__ import annotations

import contextlib
import functools
import itertools

import torch
from capture_world import World, calls, normal, program
from torch import nn


class Shape:
    """What a cache keeps by a pattern, and another cache is asked for."""

    def __init__(self, pattern):
        self.order = [int(digit) for digit in pattern]


@functools.lru_cache
def shape_of(pattern):
    return Shape(pattern)


@functools.lru_cache
def transposed(shape, sizes):
    return tuple(sizes[at] for at in shape.order)


@functools.lru_cache
def halves(count, extra=0):
    return count // 2, count - count // 2 + extra


@functools.lru_cache
def growing(count):
    return [count]


def doubled(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        first = next(item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor))
        return function(*args, **kwargs) + first

    return inner


SIZES = [lambda size=size: (normal(size, 4),) for size in (3, 3, 5, 6, 3)]


@program
def layers_in_pairs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            pairs = [nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)]) for _ in range(2)]
            self.layers = nn.ModuleList(pairs)

        def forward(self, x):
            for linear, norm in self.layers:
                x = norm(linear(x)) + x
            (first, *_), last = self.layers
            return first(x), len(last)

    return calls(Model().eval(), *SIZES)


@program
def mapped_over_chunks():
    def fn(x):
        q, k = map(lambda part: part.transpose(0, 1) * 2, x.chunk(2, dim=-1))
        first, *others = {"a": q, "b": k, "c": x}.values()
        return q @ k.transpose(0, 1), first, len(others)

    return calls(fn, *SIZES)


@program
def asserted_of_open_extents():
    def fn(x):
        torch._assert(x.shape[0] % 7 > 0, f"{x.shape[0]} rows are whole weeks")
        return x.sin() * x.shape[0]

    return calls(fn, *SIZES, lambda: (normal(14, 4),), lambda: (normal(8, 4),))


@program
def calls_of_generic_classes():
    def fn(x):
        counts, rows = dict[str, int](two=2), list[int]((1, x.shape[0]))
        rows.append(3)
        return x * counts["two"] + len(rows), rows, set[int](rows[:1]), tuple[int, ...](rows)

    return calls(fn, *SIZES)


@program
def wrapped_inside():
    def fn(x):
        def local(y: torch.Tensor, scale: int = 3) -> torch.Tensor:
            "What it says."
            return y * scale

        made = doubled(local)
        return made(x), made.__name__, made.__doc__, sorted(made.__annotations__), made.__wrapped__ is local

    return calls(fn, *SIZES)


@program
def generators_as_managers():
    log = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 1

        @contextlib.contextmanager
        def scaled(self, by, **others):
            before = self.scale
            self.scale = by
            try:
                yield before
            finally:
                self.scale = before
                log.append(by)

        def forward(self, x):
            with self.scaled(3, other=1) as before, self.scaled(5):
                y = x * self.scale + before
            with self.scaled(2):
                return y * self.scale, self.scale

    return calls(Model(), *SIZES, observe=lambda: list(log))


@program
def managers_that_meet_errors():
    @contextlib.contextmanager
    def forgiving(log):
        try:
            yield
        except ZeroDivisionError as error:
            log.append(type(error).__name__)

    def fn(x):
        log = []
        with forgiving(log):
            x = x + 1 // (x.dim() - 2)
        try:
            with forgiving(log):
                raise ValueError("other")
        except ValueError as error:
            log.append(str(error))
        return x * 2, log

    return calls(fn, *SIZES)


@program
def managers_that_stay():
    kept = []

    @contextlib.contextmanager
    def counted():
        kept.append(1)
        yield len(kept)
        kept.append(2)

    def fn(x):
        manager = counted()
        with manager as count:
            y = x * count
        held = counted()
        kept.append(held)
        return y

    return calls(fn, *SIZES, observe=lambda: [item if type(item) is int else "manager" for item in kept])


@program
def bound_modules():
    torch.manual_seed(0)
    linear = nn.Linear(4, 4)

    def fn(x):
        block = functools.partial(linear)
        norm = functools.partial(nn.functional.layer_norm, normalized_shape=(4,))
        return functools.partial(norm, eps=1e-3)(block(x))

    return calls(fn, *SIZES)


@program
def caches_by_what_caches_keep():
    def fn(x):
        return x.reshape(*transposed(shape_of("10"), tuple(x.shape))) * halves(x.shape[0], extra=1)[1]

    def forget():
        shape_of.cache_clear()
        transposed.cache_clear()

    return World(fn, [(forget if at == 3 else None, make) for at, make in enumerate(SIZES)])


@program
def cached_lists_that_grow():
    growing.cache_clear()

    def fn(x):
        found = growing(x.shape[0])
        found.append(x.dim())
        return x * len(found), list(found)

    return calls(fn, *SIZES)


@program
def wrapped_generators_in_chains():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))

    def scaled(x):
        yield x
        yield x * 2

    def fn(x):
        kind = next(itertools.chain(model.parameters(), model.buffers())).dtype
        chained = iter(itertools.chain(scaled(x), [x], scaled(x + 1)))
        y = next(chained) + sum(itertools.islice(chained, 1, None, 2))
        z = list(itertools.islice(itertools.chain.from_iterable(scaled(each) for each in (x, y)), 3))
        turns = [a * b for a, b in zip(itertools.cycle(scaled(x)), (1, 2, 3))]
        return x.to(kind), y, z, turns

    return calls(fn, *[lambda size=size: (normal(size, 3),) for size in (2, 2, 4)])


class Alike:
    """Equal to all of its kind."""

    def __eq__(self, other):
        return type(other) is Alike

    def __hash__(self):
        return 5


@program
def wrapped_sets_of_modules_and_of_what_is_equal():
    modules = [nn.Identity() for _ in range(3)]

    def fn(x, more):
        seen, named = set(), {}
        for item in (*modules, *modules[:1], *more):
            x = x + (item in seen) + 2 * (item in named)
            seen.add(item)
            named[item] = len(seen)
        seen.update(more)
        seen.discard(modules[0])
        return x, len(seen), [*named.values()], modules[0] in seen, *(item in seen for item in more)

    alike = [Alike(), Alike()]
    return calls(
        fn,
        *[
            lambda more=more: (normal(3), more)
            for more in ([], [nn.Identity()], alike, [*alike, modules[1]], [])
        ],
    )
