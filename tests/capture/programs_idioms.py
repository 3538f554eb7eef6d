"""Statements and idioms of Python at large."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import sys
import types

import torch
from capture_world import calls, normal, program
from torch import nn


@program
def match_statements():
    @dataclasses.dataclass
    class Pt:
        x: int
        y: int

    class Q:
        __match_args__ = ("a",)

    def fn(x, v):
        match v:
            case 0 | 1 as k:
                return x * k
            case {"op": "add", "n": n, **rest} if n > 2:
                return x + n, rest
            case {"op": str() as o}:
                return x, o
            case [a, (b, c), *r]:
                return x * a + b * c, r
            case Pt(x=0, y=yy):
                return x * yy
            case Pt(px, py):
                return x * px - py
            case Q(7):
                return x * 7
            case Q(a=a):
                return x * a
            case [] | ():
                return "empty"
            case str(s) if s.startswith("z"):
                return s
            case "lit" | b"by":
                return 5
            case float(f):
                return x * f
            case None:
                return None
            case torch.Tensor(shape=sh):
                return sh
            case _:
                return "other", type(v).__name__

    q = Q()
    q.a = 7
    r = Q()
    r.a = 3
    vs = [
        0,
        1,
        {"op": "add", "n": 3, "z": 1},
        {"op": "add", "n": 1},
        [2, (3, 4), 5, 6],
        (2, [3, 4]),
        Pt(0, 4),
        Pt(2, 3),
        q,
        r,
        [],
        (),
        "zed",
        "lit",
        b"by",
        2.5,
        None,
        torch.ones(2),
        object,
        True,
        {"op": 3},
    ]
    return calls(fn, *[lambda v=v: (normal(3), v) for v in vs + vs])


@program
def comprehensions_and_closures():
    def fn(x, n):
        fs = [lambda y, i=i: y * i for i in range(n)]
        gs = [lambda y: y * i for i in range(n)]
        k = 0

        def inc():
            nonlocal k
            k += 1
            return k

        vals = [inc() for _ in range(n)]
        d = {i: j for i, j in zip("abc", vals)}
        s = {v % 2 for v in vals}
        total = sum(v for v in vals if (w := v) > 1)
        nested = [[a * b for a in range(2)] for b in range(n)]
        g = (inc() for _ in range(2))
        next(g)
        return (
            [f(x) for f in fs],
            [g(x) for g in gs] if n else 0,
            vals,
            d,
            s,
            total,
            w if n > 1 else None,
            nested,
            k,
            list(g),
            k,
        )

    return calls(fn, *[lambda n=n: (normal(3), n) for n in (3, 1, 2, 0, 3)])


@program
def closure_shared_state():
    def make():
        n = 0
        hist = []

        def inc(x):
            nonlocal n
            n += 1
            hist.append(n)
            return x * n

        def reset():
            nonlocal n, hist
            n = 0
            hist = []

        def get():
            return n, hist

        return inc, reset, get

    inc, reset, get = make()

    def fn(x, k):
        y = inc(x)
        if k == 1:
            reset()
        if k == 2:
            return y, make()[0](x)
        return y, get()

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (0, 0, 1, 0, 2, 0, 1)], observe=lambda: get())


@program
def dict_semantics():
    def fn(x, d):
        d["new"] = x
        d.pop("a", None)
        d["a"] = 1
        e = {**d, "z": 2} | {"y": 3}
        keys = d.keys() & {"a", "q"}
        items = sorted(k for k in d)
        d2 = dict(reversed(list(d.items())))
        first = next(iter(d))
        last = d.popitem()
        for k in list(d):
            if d[k] is None:
                del d[k]
        try:
            for k in d:
                d[k + "!"] = 1
                break
            for k in d:
                d.pop(k)
        except RuntimeError as er:
            msg = str(er)
        else:
            msg = ""
        return (
            e,
            sorted(keys),
            items,
            list(d2),
            first,
            last[0],
            d,
            msg,
            1 in {True: 2},
            dict([(1, "a"), (True, "b"), (1.0, "c")]),
            d.setdefault("s", []) is d["s"],
        )

    return calls(
        fn,
        lambda: (normal(3), {"a": 0}),
        lambda: (normal(3), {"b": None, "a": 2}),
        lambda: (normal(3), {}),
        lambda: (normal(3), {"a": 0}),
        lambda: (normal(3), collections.OrderedDict(a=1)),
    )


@program
def iterator_state_shared():
    it = iter(range(100))
    z = itertools.count(5)
    cyc = itertools.cycle([1, 2, 3])
    rev = reversed([1, 2, 3, 4, 5, 6, 7, 8])
    en = enumerate("abcdefghijk")
    fi = open("/dev/null")

    def fn(x):
        a = next(it) + next(it)
        b = next(z)
        c = next(cyc)
        r = next(rev, None)
        e = next(en)
        for i in it:
            if i % 7 == 0:
                break
        return x * a, b, c, r, e, i, list(itertools.islice(z, 2)), [q for q, _ in zip("ab", cyc)]

    return calls(fn, *[lambda: (normal(3),)] * 3)


@program
def user_iterators_and_len_hints():
    log = []

    class It:
        def __init__(s, n):
            s.n = n
            s.i = 0

        def __iter__(s):
            log.append("iter")
            return s

        def __next__(s):
            s.i += 1
            log.append(s.i)
            if s.i > s.n:
                raise StopIteration(s.n)
            return s.i

        def __length_hint__(s):
            log.append("hint")
            return 3

    class Sq:
        def __getitem__(s, i):
            log.append(("gi", i))
            if i > 2:
                raise IndexError
            return i * i

        def __len__(s):
            log.append("len")
            return 3

    def fn(x, n):
        it = It(n)
        a, *b = It(3)
        return (
            [x * i for i in it],
            list(It(2)),
            tuple(Sq()),
            sum(It(n)),
            max(It(2)),
            dict(zip(It(2), Sq())),
            a,
            b,
            list(reversed(Sq())),
            3 in Sq(),
            [*It(1)],
            sorted(It(3), key=lambda v: -v),
            list(map(str, It(2))),
            list(enumerate(Sq())),
            "".join(str(i) for i in It(2)),
            set(It(2)),
            next(It(0), "d"),
        )

    return calls(fn, *[lambda n=n: (normal(3), n) for n in (2, 3, 2, 0)], observe=lambda: list(log))


@program
def strings_and_prints():
    class R:
        n = 0

        def __repr__(s):
            R.n += 1
            return f"R{R.n}"

        def __str__(s):
            return "S"

        def __format__(s, f):
            return "F" + f

    r = R()

    def fn(x, k):
        print("k", k, x.shape, sep="|", end="!\n")
        print(f"{k:>4}{k!r}{x.dim()=}", file=sys.stdout)
        print(r, [r], f"{r}{r!r}{r!s}{r:>3}", "%s %r" % (r, r), "{!r}".format(r))
        print(x.sum().item() > 0, x.dtype, x.requires_grad, tuple(x.shape), type(x).__name__)
        return (
            x * k,
            f"{tuple(x.shape)}",
            "a,b".split(","),
            " ".join(map(str, x.shape)),
            str(x.dtype),
            repr(x.device),
            "x".join(["a"] * k),
            f"{k:{k}d}" if k else "",
        )

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (1, 2, 0, 3, 1)], observe=lambda: R.n)


@program
def default_args_and_kwonly():
    def inner(a, b=[], /, c={}, *, d=set(), **kw):
        b.append(a)
        c[a] = len(b)
        d.add(a)
        return len(b), dict(c), sorted(d), kw

    def fn(x, k):
        return x * k, inner(k), inner(k, [], d=set()), inner(k, z=k, y=x.dim())

    return calls(
        fn,
        *[lambda k=k: (normal(3), k) for k in (1, 2, 1, 3)],
        observe=lambda: (inner.__defaults__, inner.__kwdefaults__),
    )


@program
def args_kwargs_forwarding():
    class M(nn.Module):
        def forward(s, x, *args, scale=1, **kw):
            return x * scale * len(args), sorted(kw), args, kw

    m = M()

    def deco(f):
        @functools.wraps(f)
        def w(*a, **k):
            k.setdefault("extra", 0)
            return f(*a, **k)

        return w

    f = deco(m)

    def fn(x, *a, **k):
        return f(x, *a, **k), f.__name__ if hasattr(f, "__name__") else None

    return calls(
        lambda *a: fn(a[0], *a[1], **a[2]),
        lambda: (normal(3), (1, 2), {"scale": 2}),
        lambda: (normal(3), (), {}),
        lambda: (normal(3), (1,), {"b": 1, "a": 2}),
        lambda: (normal(3), (1,), {"a": 2, "b": 1}),
    )


@program
def global_and_module_variables():
    m = types.ModuleType("gm")
    exec(
        """
N=0
L=[]
def bump(x):
    global N, NEW
    N+=1; L.append(N); NEW=x
    if N==3:
        del NEW
    return x*N
def has():
    try: return NEW.sum()
    except NameError as e: return str(e)
""",
        m.__dict__,
    )

    def fn(x):
        y = m.bump(x)
        m.X = m.N
        return y, m.has(), m.X, len(m.L), "NEW" in vars(m)

    return calls(fn, *[lambda: (normal(3),)] * 5, observe=lambda: (m.N, list(m.L)))
