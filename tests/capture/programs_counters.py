"""Numbers that change in every call, wherever they are kept, and operators of one's own."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import math
import operator
import string
import types

import torch
from capture_world import World, calls, normal, program
from torch import nn


def shifted(number, size=3):
    """Return a call's arguments: one tensor whose sum changes its sign from call to call."""
    return lambda: ((normal(size, seed=number) * (1 if number % 2 else -1) + (number % 3 - 1)),)


def tensor(number=0, size=3):
    return lambda: normal(size, seed=number)


def given(*makers):
    return lambda: tuple(make() if callable(make) else make for make in makers)


@program
def counters_in_many_places():
    class C:
        k = 0

    c = C()
    d = {"n": 0}
    g = [0]
    q = collections.Counter()
    box = types.SimpleNamespace(v=0.5)

    def fn(x):
        c.k += 1
        d["n"] = d["n"] + c.k
        q["a"] += d["n"]
        box.v *= 2
        g[0] += 1
        return x * c.k + d["n"] - q["a"], box.v, c.k % 2 == 0, f"{c.k}", [c.k, d["n"]], dict(d), vars(box)

    return calls(
        fn, *[given(tensor(i)) for i in range(12)], observe=lambda: (c.k, dict(d), g, dict(q), box.v, C.k)
    )


@program
def counter_read_back_by_natives():
    class C:
        def __init__(s):
            s.n = 0
            s.hist = []

        def __repr__(s):
            return f"C({s.n})"

        def __eq__(s, o):
            return s.n == o.n

        __hash__ = object.__hash__

    c = C()

    def fn(x):
        c.n += 1
        a = repr(c)
        b = copy.copy(c)
        e = c == b
        s = {c.n: 1}
        m = max([c.n, 2])
        l = sorted([c.n, 0])
        c.hist.append(c.n)
        setattr(c, "m", c.n * 2)
        k = getattr(c, "m")
        v = vars(c)["n"]
        w = c.__dict__["m"]
        return (
            x * c.n,
            a,
            b.n,
            e,
            s,
            m,
            l,
            k,
            v,
            w,
            str(c.n),
            hash(c.n) == hash(k // 2),
            isinstance(c.n, int),
            type(c.n),
            c.n.bit_length(),
            divmod(c.n, 3),
        )

    return calls(fn, *[given(tensor(i)) for i in range(8)], observe=lambda: vars(c))


@program
def counter_then_exception():
    class C:
        n = 0

    c = C()
    log = []

    def fn(x):
        c.n += 1
        try:
            if c.n % 3 == 0:
                raise ValueError(c.n)
            r = x / c.n
        except ValueError as e:
            log.append(e.args)
            r = -x
        finally:
            c.last = c.n
        return r, c.last

    return calls(fn, *[given(tensor(i)) for i in range(9)], observe=lambda: (c.n, list(log)))


@program
def counter_in_cell_and_default():
    def make():
        total = 0.0
        n = 0

        def add(v):
            nonlocal total, n
            n += 1
            total += v * n
            return total / n

        return add

    add = make()
    h = {}

    def fn(x, v):
        m = add(v)
        h[v] = m
        h["last"] = m
        return x * m, m, dict(h), len(h)

    return calls(
        fn,
        *[given(tensor(i), v) for i, v in enumerate((1.5, 1.5, 1.5, 2.5, 2.5, 3.5, 1.5, 1.5, 1.5))],
        observe=lambda: dict(h),
    )


@program
def counter_swapped_types():
    class C:
        pass

    c = C()
    c.n = 1

    def fn(x):
        c.n = c.n * 2
        return x + c.n, type(c.n).__name__

    def f():
        c.n = 0.25

    def b():
        c.n = True

    def big():
        c.n = 10**20

    A = given(tensor())
    return World(
        fn,
        [
            (None, A),
            (None, A),
            (None, A),
            (None, A),
            (f, A),
            (None, A),
            (b, A),
            (None, A),
            (big, A),
            (None, A),
            (None, A),
        ],
        observe=lambda: c.n,
    )


@program
def step_dependent_schedule():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.step = 0
            s.lr = 1.0
            s.w = nn.Parameter(torch.ones(3))

        def forward(s, x):
            s.step += 1
            if s.step > 4:
                s.lr = s.lr * 0.5
            y = x * s.w * s.lr
            if s.step % 4 == 0:
                with torch.no_grad():
                    s.w.sub_(0.1)
            return y, s.lr

    m = M()
    return calls(m, *[given(tensor(i)) for i in range(10)], observe=lambda: (m.step, m.lr, m.w))


@program
def operator_overloads_inplace():
    class V:
        def __init__(s, t):
            s.t = t

        def __iadd__(s, o):
            s.t = s.t + o
            return s

        def __radd__(s, o):
            return V(o + s.t)

        def __getitem__(s, k):
            return s.t[k]

        def __setitem__(s, k, v):
            s.t[k] = v

        def __call__(s, *a):
            return s.t * sum(a)

        def __contains__(s, k):
            return k == 3

        def __len__(s):
            return 7

        def __bool__(s):
            return False

        def __neg__(s):
            return V(-s.t)

        def __matmul__(s, o):
            return s.t @ o

        def __eq__(s, o):
            return isinstance(o, V)

        __hash__ = None

    def fn(x):
        v = V(x.clone())
        w = v
        v += 1
        v[0] = 5
        return v.t, w is v, v[1:], v(1, 2), 3 in v, len(v), bool(v), (-v).t, v @ x, (2 + v).t, v == w, v != w

    return calls(fn, *[given(tensor(i)) for i in range(3)])


@program
def itertools_all():
    def fn(xs, n):
        a = list(itertools.chain.from_iterable([[1], [2, 3]]))
        b = list(itertools.accumulate([1, 2, 3], operator.mul))
        c = list(itertools.groupby("aabbc"))
        d = [list(g) for k, g in itertools.groupby([1, 1, 2])]
        e = list(itertools.pairwise(xs))
        f = list(itertools.takewhile(lambda k: k < n, [1, 2, 3, 4]))
        g = list(itertools.starmap(torch.add, zip(xs, xs)))
        h = list(itertools.islice(itertools.count(n, 2), 3))
        i = list(itertools.zip_longest([1], [2, 3], fillvalue=0))
        t1, t2 = itertools.tee(xs)
        j = list(itertools.compress(xs, [1, 0, 1]))
        k = list(itertools.filterfalse(None, [0, 1, ""]))
        l = list(itertools.dropwhile(lambda q: q < 2, range(n)))
        return (
            a,
            b,
            len(c),
            d,
            e,
            f,
            g,
            h,
            i,
            list(t1),
            next(t2),
            j,
            k,
            l,
            list(itertools.product("ab", repeat=2)),
            list(itertools.combinations(range(n), 2)),
        )

    return calls(
        fn, *[lambda n=n: ([normal(2), normal(2, seed=1), normal(2, seed=2)], n) for n in (3, 3, 4, 4)]
    )


@program
def string_formatting_many():
    def fn(x, k):
        s = f"{k:>5}|{k!r}|{x.shape}|{k=}|{'a':*^5}|{1.5:.2f}"
        t = "%s %d %.1f" % ("q", k, 2.25)
        u = "{} {a[0]} {b.real}".format(k, a=[1], b=3)
        return (
            s,
            t,
            u,
            string.Template("$a").substitute(a=k),
            s.split("|")[0].strip(),
            x * len(s),
            ",".join(map(str, range(k))),
        )

    return calls(
        fn,
        given(tensor(), 1),
        given(tensor(), 1),
        given(tensor(), 2),
        given(tensor(), 3),
        given(tensor(), 12),
    )


@program
def varargs_mix():
    def inner(a, /, b, *c, d=4, **e):
        return a * b + sum(c) * d + sum(e.values()), sorted(e)

    def fn(x, args, kw):
        return inner(x, *args, **kw)

    return calls(
        fn,
        given(tensor(), [2], {}),
        given(tensor(), [2, 3, 4], {"d": 5}),
        given(tensor(), (1,), {"z": 1, "y": 2}),
        given(tensor(), [2, 3, 4], {"d": 5}),
        given(tensor(), [], {}),
        given(tensor(), [], {"b": 2, "q": 7}),
    )


@program
def property_chain_setter():
    class A:
        def __init__(s):
            s._v = 0
            s.log = []

        @property
        def v(s):
            s.log.append("r")
            return s._v

        @v.setter
        def v(s, k):
            if k > 6:
                raise ValueError("big")
            s._v = k

        @v.deleter
        def v(s):
            s._v = 0

    a = A()

    def fn(x):
        a.v += 2
        if a.v > 5:
            del a.v
        return x * a.v

    return calls(fn, *[given(tensor(i)) for i in range(9)], observe=lambda: (a._v, list(a.log)))


@program
def caches_lru_and_dict():
    hits = []

    @functools.lru_cache(maxsize=2)
    def f(k):
        hits.append(k)
        return k * 2

    @functools.cache
    def mask(n):
        hits.append(("m", n))
        return torch.tril(torch.ones(n, n))

    memo = {}

    def fn(x, k):
        if k not in memo:
            memo[k] = x.sum() * 0 + k
        return x * f(k) + memo[k], mask(k), mask(k) is mask(k), f.cache_info().hits

    return calls(
        fn,
        *[given(tensor(i), k) for i, k in enumerate((1, 1, 2, 2, 3, 1, 1))],
        observe=lambda: (list(hits), sorted(memo)),
    )


@program
def float_corner_cases():
    def fn(x, k):
        return x * k, k == k, k != k, math.copysign(1, k), str(k), {k: 1}.get(k), k in [k], -k, abs(k)

    return calls(
        fn, *[given(tensor(), k) for k in (0.0, -0.0, float("nan"), float("inf"), 0, False, -0.0, 1e-320)]
    )
