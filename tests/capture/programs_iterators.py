"""Programs of iterators, container subclasses and what else is special about them."""

from __future__ import annotations

import collections
import itertools
import time
from typing import NamedTuple

import torch
from capture_world import calls, normal, program
from torch.utils._pytree import tree_map


@program
def iterators_given():
    def args(mk):
        def a():
            it = mk()
            args.last = it
            return (normal(3), it)

        return a

    def fn(x, it):
        a = next(it)
        for i, (b, c) in enumerate(zip(it, [10, 20])):
            x = x + b * c + i
        return x * a, list(itertools.islice(it, 1))

    return calls(
        fn,
        args(lambda: iter([1, 2, 3, 4, 5])),
        args(lambda: iter((1, 2, 3, 4, 5))),
        args(lambda: iter(range(9))),
        args(lambda: (i for i in range(7))),
        args(lambda: itertools.count(3)),
        args(lambda: map(abs, [-1, -2, -3, -4])),
        args(lambda: iter({1: 2, 3: 4, 5: 6, 7: 8})),
        observe=lambda: [next(args.last, None) for _ in range(2)],
    )


@program
def user_iterators():
    class It:
        def __init__(s):
            s.n = 0

        def __iter__(s):
            return s

        def __next__(s):
            s.n += 1
            if s.n > 3:
                raise StopIteration
            return s.n

    g = It()

    def fn(x):
        t = 0
        for i in g:
            t += i
        return x * t, sum(It()), list(It()), [*It()], max(It()), dict(zip("abc", It())), 2 in It()

    return calls(fn, lambda: (normal(3),), lambda: (normal(3),), observe=lambda: g.n)


@program
def container_subclasses():
    log = []

    class L(list):
        def append(s, v):
            log.append(v)
            super().append(v)

        def __iter__(s):
            log.append("it")
            return super().__iter__()

        def __len__(s):
            return 42

    class D(dict):
        def __getitem__(s, k):
            log.append(k)
            return dict.__getitem__(s, k)

        def __contains__(s, k):
            return True

        def keys(s):
            log.append("keys")
            return super().keys()

    def fn(x, l, d):
        l.append(1)
        return (
            x * len(l),
            [i for i in l],
            list(l),
            d["a"],
            "zz" in d,
            dict(d),
            {**d},
            sorted(d),
            [*l],
            bool(l),
        )

    return calls(
        fn,
        lambda: (normal(3), L([5]), D(a=1)),
        lambda: (normal(3), L([5]), D(a=1, b=2)),
        observe=lambda: list(log),
    )


@program
def default_dicts():
    log = []

    def mk():
        log.append("mk")
        return []

    def fn(x, d):
        d["a"].append(1)
        d["b"].append(x)
        c = collections.defaultdict(int)
        c["q"] += 1
        return x * len(d), c, d.get("zz"), "zz" in d

    return calls(
        fn,
        lambda: (normal(3), collections.defaultdict(mk)),
        lambda: (normal(3), collections.defaultdict(mk, a=[0])),
        lambda: (normal(3), collections.defaultdict(mk)),
        observe=lambda: list(log),
    )


@program
def times_and_ids():
    t = [0.0]

    def clock():
        t[0] += 1.5
        return t[0]

    def fn(x):
        a = clock()
        y = x * 2
        b = clock()
        u = time.perf_counter()
        return y * (b - a), u > 0, b

    return calls(fn, *[lambda: (normal(3),)] * 5, observe=lambda: t[0])


@program
def tuple_key_and_frozen():
    cache = {}

    def fn(x):
        key = (tuple(x.shape), x.dtype)
        if key not in cache:
            cache[key] = torch.arange(x.shape[0]).float()
        return x + cache[key], len(cache)

    return calls(
        fn,
        lambda: (normal(3),),
        lambda: (normal(3),),
        lambda: (normal(4),),
        lambda: (normal(3),),
        observe=lambda: [list(cache), [v.clone() for v in cache.values()]],
    )


@program
def accumulated():
    def fn(x):
        steps = itertools.accumulate([x, x + 1, x * 2])
        products = itertools.accumulate((x, x - 1), func=lambda a, b: a * b, initial=x)
        return list(steps), sum(products), list(itertools.accumulate([], initial=3))

    return calls(fn, *[lambda: (normal(3),)] * 3)


@program
def tuples_of_operators_made_and_walked():
    class Parts(NamedTuple):
        keys: torch.Tensor
        values: torch.Tensor

    def fn(x):
        made = torch.return_types.max((x, x + 1))
        found = tree_map(lambda part: part * 2, {"max": torch.max(x, 0), "made": made, "own": Parts(x, -x)})
        return made, found, [part.sum() for part in Parts(x, x * 3)]

    return calls(fn, *[lambda: (normal(3, 2),)] * 3)


@program
def filled_by_generators_that_read_them():
    class Doubled(list):
        def __init__(s, x):
            super().__init__(x + len(s) for _ in range(2))
            s += (s[-1] * 2 for _ in range(2))

    def until_full(parts):
        for _ in range(3):
            yield parts[-1] * 2 + len(parts)
        raise ValueError("full")

    def fn(x, kept):
        parts, ends, seen = [x, x + 1], collections.deque([x], maxlen=3), {1}
        parts.extend(part * 2 for part in (parts[-1] for _ in range(3)))
        parts[1:2] = (parts[-1] + len(parts) for _ in range(2))
        ends.extendleft(ends[0] + len(ends) for _ in range(4))
        named = collections.OrderedDict(a=x)
        named.update(((str(len(named)), named["a"] * len(named)) for _ in range(2)), b=x)
        named |= ((str(len(named)), x) for _ in range(2))
        seen.update(map(lambda n: n + len(seen), (3, 4, 5)))
        counted = collections.Counter(a=1)
        counted.update(str(len(counted)) for _ in range(2))
        kept.extend(filter(lambda n: n not in kept, [1, 2, 2, 3]))
        try:
            parts += until_full(parts)
        except ValueError:
            parts.append(x - 1)
        return parts, list(ends), named, sorted(seen), counted, Doubled(x)

    return calls(fn, *[lambda: (normal(3), [0])] * 2, lambda: (normal(4), [2]))


@program
def zipped_to_the_longest():
    layers = torch.nn.ModuleList([torch.nn.Tanh(), torch.nn.ReLU(), torch.nn.Identity()])
    more = torch.nn.ModuleList([torch.nn.Sigmoid()])

    def drawn(count, log):
        for number in range(count):
            log.append(number)
            yield number

    def fn(x, log):
        for at, layer, other in itertools.zip_longest(range(2), reversed(layers), more):
            x = layer(x) * (at or 3) + (1 if other is None else other(x))
        for layer in itertools.chain(layers, more):
            x = layer(x)
        for layer, other in itertools.product(layers, more):
            x = x + layer(other(x))
        pairs = list(
            itertools.zip_longest(drawn(2, log), drawn(4, log), (x * k for k in (1, 2)), fillvalue=7)
        )
        return x, pairs, list(itertools.zip_longest()), list(itertools.zip_longest([], drawn(0, log)))

    return calls(fn, *[lambda: (normal(3), [])] * 3)
