"""Programs of the language itself: iterators, generators, classes, patterns, containers."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum

import torch
from capture_world import calls, normal, program
from torch import nn


@program
def loop_with_print():
    torch.manual_seed(0)
    ls = [nn.Linear(3, 3) for _ in range(3)]

    def fn(x):
        for i, l in enumerate(ls):
            x = l(x)
            print("layer", i, float(x.sum()) > 0)
        return x

    return calls(fn, lambda: (normal(2, 3),), lambda: (normal(2, 3, seed=1),))


@program
def returns_closure():
    def fn(x):
        y = x + 1

        def g(z):
            return y * z

        return g(x), g

    return calls(fn, lambda: (normal(3),), lambda: (normal(3, seed=1),))


@program
def returns_generator():
    def fn(x):
        return (x * i for i in range(3))

    def outer(x):
        return list(fn(x)), sum(fn(x))

    return calls(outer, lambda: (normal(3),), lambda: (normal(3, seed=1),))


@program
def live_generator_returned():
    def gen(x):
        for i in range(3):
            yield x * i

    def fn(x):
        g = gen(x)
        first = next(g)
        return first, g

    w = calls(
        lambda x: (lambda r: (r[0], list(r[1])))(fn(x)), lambda: (normal(3),), lambda: (normal(3, seed=1),)
    )
    return w


@program
def live_generator_returned2():
    def gen(x):
        for i in range(3):
            yield x * i

    hold = []

    def fn(x):
        g = gen(x)
        first = next(g)
        hold.append(g)
        return first

    return calls(
        fn, lambda: (normal(3),), lambda: (normal(3, seed=1),), observe=lambda: [list(g) for g in hold]
    )


@program
def mutate_while_iterating():
    def fn(x, l):
        for e in l:
            if e < 3:
                l.append(e + 1)
        d = {k: k * 2 for k in l}
        for k in list(d):
            if k % 2:
                del d[k]
        return x * len(l), d

    return calls(fn, lambda: (normal(3), [1]), lambda: (normal(3), [1]), lambda: (normal(3), [2, 5]))


@program
def enum_flags():
    class C(enum.Enum):
        A = 1
        B = 2

        def scale(self):
            return self.value * 10

    def fn(x, c):
        return x * c.scale(), c is C.A, C(2), c.name

    return calls(fn, lambda: (normal(3), C.A), lambda: (normal(3), C.B))


@program
def slots_class():
    class S:
        __slots__ = ("a", "b")

        def __init__(self, a):
            self.a = a

        def __eq__(self, o):
            return isinstance(o, S) and self.a == o.a

        def __hash__(self):
            return hash(self.a)

        def __add__(self, o):
            return S(self.a + (o.a if isinstance(o, S) else o))

        __radd__ = __add__

        def __bool__(self):
            return self.a > 0

        def __len__(self):
            return 3

        def __getitem__(self, i):
            return self.a + i

        def __contains__(self, i):
            return i == self.a

        def __call__(self, x):
            return x * self.a

        def __iter__(self):
            return iter([self.a, self.a + 1])

    s = S(2)

    def fn(x, n):
        s.b = n
        t = s + n + s
        u = 1 + s
        q = [*t]
        return t(x), t == S(t.a), len(t), t[2], n in t, bool(t), hasattr(s, "zz"), u.a, q, {s: 1}[S(2)]

    return calls(
        fn, lambda: (normal(3), 1), lambda: (normal(3), 2), lambda: (normal(3), -9), observe=lambda: s.b
    )


@program
def nested_functions_defaults():
    def fn(x, *a, k=2, **kw):
        def g(y, /, z=3, *, w=k):
            return y * z + w

        return g(x, *a), g(x, w=1), kw, a

    return calls(fn, lambda: (normal(3),), lambda: (normal(3), 5))


@program
def list_ops():
    def fn(x, l):
        l += [x]
        l.extend(range(2))
        l.insert(0, "a")
        l.reverse()
        q = l.pop()
        l[1:2] = [7, 8]
        del l[0]
        m = l * 2
        n = l + [1]
        m.sort(key=str)
        return l, q, len(m), n[::2], m.count(7), [1, 2] == [1, 2], l.index(7)

    return calls(fn, lambda: (normal(3), [1, 2]), lambda: (normal(3), [1, 2]), lambda: (normal(3), []))


@program
def dict_ops():
    def fn(x, d):
        d |= {"z": 1}
        e = {**d, "q": x}
        for k in sorted(d):
            e[k] = d[k]
        e.pop("q")
        return (
            list(e.items()),
            d.get("nope", 5),
            e.setdefault("s", []),
            e,
            min(d.values()),
            "z" in d,
            dict.fromkeys("ab", 0),
            [*d],
            e.keys() & {"z"},
            d.popitem(),
        )

    return calls(
        fn,
        lambda: (normal(3), {"a": 1}),
        lambda: (normal(3), {"a": 1}),
        lambda: (normal(3), {"b": 1, "a": 3}),
    )


@program
def str_ops():
    def fn(x, s):
        return (
            x * len(s.split(",")),
            s.upper().encode().decode(),
            "%s-%d" % (s, 3),
            "{}{a}".format(1, a=2),
            s[::-1],
            ",".join(c for c in s if c != ","),
            s.startswith("a"),
            s * 2,
            s in "abc",
        )

    return calls(fn, lambda: (normal(3), "a,b"), lambda: (normal(3), "abc"))


@program
def super_and_mro():
    class A:
        def f(self, x):
            return x + 1

        @classmethod
        def make(cls, k):
            o = cls()
            o.k = k
            return o

        @staticmethod
        def st(x):
            return x * 3

    class B(A):
        def f(self, x):
            return super().f(x) * 2

    class C(A):
        def f(self, x):
            return super().f(x) - 5

    class D(B, C):
        def f(self, x):
            return super().f(x) + self.k

    def fn(x, k):
        d = D.make(k)
        return D.st(d.f(x)), type(d) is D, isinstance(d, A)

    return calls(fn, lambda: (normal(3), 1), lambda: (normal(3), 2))


@program
def recursion():
    def f(x, n):
        return x if n == 0 else f(x * 2, n - 1) + 1

    return calls(
        lambda x, n: f(x, n),
        lambda: (normal(3), 3),
        lambda: (normal(3), 5),
        lambda: (normal(3), 90),
        lambda: (normal(3), 90),
    )


@program
def kwargs_module():
    class M(nn.Module):
        def forward(self, x, *, scale=1, mask=None):
            y = x * scale
            return y if mask is None else y.masked_fill(mask, 0)

    m = M()

    class W:
        def __call__(self, x, s, mk):
            return m(x, scale=s, mask=mk)

    return calls(
        lambda x, s, mk: m(x, scale=s, mask=mk),
        lambda: (normal(3), 1, None),
        lambda: (normal(3), 2, torch.tensor([True, False, True])),
    )


@program
def comprehension_scopes():
    def fn(x, n):
        a = [i * j for i in range(n) for j in range(i)]
        b = {i: [k for k in range(i)] for i in range(n)}
        c = {i % 2 for i in range(n)}
        f = [lambda i=i: i for i in range(n)]
        g = [(lambda: i) for i in range(n)]
        return x * sum(a), b, c, [q() for q in f], [q() for q in g]

    return calls(fn, lambda: (normal(3), 3), lambda: (normal(3), 2))


@program
def yield_from_and_send():
    def inner():
        got = yield 1
        yield got * 2
        return 5

    def outer():
        r = yield from inner()
        yield r

    def fn(x):
        g = outer()
        a = next(g)
        b = g.send(10)
        c = next(g)
        try:
            next(g)
        except StopIteration:
            d = 1
        return x * (a + b + c + d)

    return calls(fn, lambda: (normal(3),), lambda: (normal(3),))


@program
def weird_identity_returns():
    def fn(x, t, s, f):
        return t, s, f, x, (x, t), [t, t]

    return calls(
        fn,
        lambda: (normal(3), (1, 2), "longish string", 1.25),
        lambda: (normal(3), (1, 2), "longish string", 1.25),
    )


@program
def copies():
    class O:
        def __init__(s, t):
            s.t = t
            s.l = [t]

    def fn(x):
        o = O(x)
        p = copy.copy(o)
        q = copy.deepcopy(o)
        q.t.add_(1)
        p.l.append(1)
        return o.t, p.t is o.t, q.t, q.l[0] is q.t, len(o.l)

    return calls(fn, lambda: (normal(3),), lambda: (normal(3, seed=1),))


@program
def prints_everything():
    class R:
        def __repr__(s):
            return "R!"

    def fn(x, o):
        print(x, x.shape, f"{x.sum():.2f} {o!r} {x.dtype}", o, sep="|")
        return str(x), repr(o), "%s" % x.dim(), f"{o}"

    return calls(fn, lambda: (normal(2), R()), lambda: (normal(2, seed=1), R()))


@program
def match_classes():
    @dataclasses.dataclass
    class P:
        x: int
        y: object

    def fn(t, o):
        match o:
            case P(1, y):
                return t * 1, y
            case P(x=xx, y=[a, *r]):
                return t * xx, a, r
            case {"k": [1, {"z": zz}], **rest}:
                return t * zz, rest
            case (1, 2) | [3, 4]:
                return t * 5
            case int(n) | float(n) if n > 3:
                return t * n
            case None | True:
                return t * 7
            case str():
                return o
            case _:
                return "other"

    return calls(
        fn,
        *[
            (lambda o=o: (normal(2), o))
            for o in (
                P(1, 2),
                P(2, [3, 4, 5]),
                {"k": [1, {"z": 4}], "m": 1},
                (1, 2),
                [3, 4],
                5,
                4.5,
                None,
                True,
                "s",
                1,
                P(2, 3),
                {"k": 1},
            )
        ],
    )


@program
def local_classes():
    def fn(x, k):
        class A:
            z = k

            def f(s, x):
                return x * s.z + super().__sizeof__() * 0

        @dataclasses.dataclass
        class B:
            t: object
            l: list = dataclasses.field(default_factory=list)

        N = collections.namedtuple("N", "a b")
        b = B(x)
        b.l.append(1)
        return A().f(x), b.t, b.l, N(1, x)._replace(a=2).a

    return calls(fn, lambda: (normal(3), 1), lambda: (normal(3), 2))
