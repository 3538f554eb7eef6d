"""When objects die, what classes become, and what functions keep."""

from __future__ import annotations

import dataclasses
import enum
import functools
import threading
import types
import weakref

import torch
from capture_world import World, calls, normal, program


def everything():
    class V:
        def __init__(s, t):
            s.t = t

        def __add__(s, o):
            return type(s)(s.t + (o.t if hasattr(o, "t") else o))

        def __radd__(s, o):
            return type(s)(o + s.t * 10)

        def __iadd__(s, o):
            s.t = s.t + o
            return s

        def __mul__(s, o):
            return NotImplemented

        def __rmul__(s, o):
            return type(s)(s.t * o)

        def __neg__(s):
            return type(s)(-s.t)

        def __getitem__(s, i):
            return s.t[i]

        def __len__(s):
            return len(s.t)

        def __bool__(s):
            return False

        def __contains__(s, i):
            return i == 3

        def __eq__(s, o):
            return "eq"

        def __lt__(s, o):
            return True

        def __call__(s, *a, **k):
            return len(a) + len(k)

    return V


def numbers(V):
    class W(V):
        def __iter__(s):
            return iter([1, 2])

        def __index__(s):
            return 1

        def __matmul__(s, o):
            return "mm"

        def __hash__(s):
            return 5

        def __format__(s, f):
            return "F" + f

        def __int__(s):
            return 4

        def __float__(s):
            return 4.5

        def __abs__(s):
            return "abs"

        def __round__(s, n=None):
            return ("r", n)

        def __divmod__(s, o):
            return "dm"

        def __pow__(s, o, m=None):
            return "pow"

        def __invert__(s):
            return "inv"

    return W


@program
def operator_protocol():
    V = numbers(everything())
    v0 = V(torch.ones(3))

    def fn(x):
        v = V(x)
        w = v + 1
        u = 1 + v
        w2 = v
        w2 += 2
        out = [
            w.t,
            u.t,
            v.t,
            (-v).t,
            v[0],
            len(v),
            bool(v),
            3 in v,
            4 in v,
            v == 1,
            v < 1,
            v(1, 2, a=3),
            list(v),
            [10, 20, 30][v],
            v @ 1,
            hash(v),
            f"{v:>3}",
            int(v),
            float(v),
            abs(v),
            round(v),
            round(v, 2),
            divmod(v, 1),
            v**2,
            ~v,
            (2 * v).t,
            v != 1,
        ]
        a, b = v
        try:
            v * 3
        except TypeError as e:
            out.append(str(e))
        return out, a, b, {v: 1}[v], x[v], v0 + 1 is v0, not v, v or 3, [*v], (lambda *q: q)(*v)

    return calls(
        lambda x: (
            fn(x)[0][:20] + list(fn(x)[1:])
            if False
            else [getattr(i, "t", i) for i in fn(x)[0]] + list(fn(x)[1:])
        ),
        *[lambda: (normal(3),)] * 3,
    )


@program
def tuple_item_iadd():
    def fn(x, t):
        try:
            t[0] += [1]
        except TypeError as e:
            return x * len(t[0]), str(e)

    return calls(fn, *[lambda: (normal(3), ([],))] * 3)


@program
def init_subclass_and_class_getitem():
    log = []

    class B:
        def __init_subclass__(cls, **k):
            log.append((cls.__name__, k))

        def __class_getitem__(cls, i):
            return (cls.__name__, i)

    def fn(x):
        class C(B, flag=1):
            z = 3

            def f(s):
                return s.z

        return x * C().f(), B[int], C["a"]

    return calls(fn, *[lambda: (normal(3),)] * 3, observe=lambda: list(log))


@program
def recursive_captured():
    from ladder.capture import capture

    def fact(n, x):
        return x if n == 0 else box["f"](n - 1, x * n)

    box = {"f": fact}
    box["f"] = capture(fact)

    def fn(x, n):
        return box["f"](n, x)

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (3, 1, 3, 2)])


@program
def captured_inside_captured():
    from ladder.capture import capture

    inner = capture(lambda x: x.relu() + 1)
    n = []

    def fn(x):
        n.append(1)
        return inner(x) * 2

    return calls(fn, *[lambda: (normal(3),)] * 4, observe=lambda: list(n))


@program
def thread_local_and_threads():
    loc = threading.local()
    loc.v = 1
    out = []

    def fn(x):
        loc.v += 1

        def work():
            out.append(getattr(loc, "v", "unset"))

        t = threading.Thread(target=work)
        t.start()
        t.join()
        return x * loc.v

    return calls(fn, *[lambda: (normal(3),)] * 3, observe=lambda: list(out))


@program
def counters_everywhere():
    class C:
        total = 0

        def __init__(s):
            type(s).total += 1
            s.n = 0

    glob = {"n": 0}

    def fn(x):
        c = C()
        c.n += 1
        glob["n"] += C.total
        return x * glob["n"] + c.n

    return calls(fn, *[lambda: (normal(3),)] * 4, observe=lambda: (C.total, dict(glob)))


@program
def getattr_module_level():
    m = types.ModuleType("zz")
    m.a = 2
    exec("def __getattr__(n):\n    return len(n)", m.__dict__)

    def fn(x):
        return x * m.a * m.abc

    A = lambda: (normal(3),)
    return World(fn, [(None, A), (None, A), (lambda: setattr(m, "abc", 9), A), (None, A)])


@program
def dataclass_kinds():
    @dataclasses.dataclass(frozen=True, order=True)
    class P:
        a: int
        b: tuple = ()
        c: list = dataclasses.field(default_factory=list, compare=False)

        def __post_init__(s):
            object.__setattr__(s, "d", s.a * 2)

    @dataclasses.dataclass(slots=True)
    class Q:
        t: torch.Tensor
        n: int = 0

    def fn(x, k):
        p = P(k)
        q = Q(x, k)
        q.n += 1
        p.c.append(q.n)
        r = dataclasses.replace(p, a=k + 1)
        try:
            p.a = 3
        except dataclasses.FrozenInstanceError as e:
            m = str(e)
        return (
            x * p.d,
            p < r,
            p == P(k),
            hash(P(1)) == hash(P(1)),
            repr(P(k)),
            dataclasses.asdict(p),
            [f.name for f in dataclasses.fields(q)],
            q.n,
            m,
            q,
            p,
        )

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (3, 1, 3, 2)])


@program
def kwargs_default_mutations():
    def f(x, /, a, *rest, k=[], **kw):
        k.append(a)
        kw["z"] = len(rest)
        kw.setdefault("y", []).append(1)
        return x * len(k), kw, rest

    def fn(x, d):
        return f(x, 1, 2, 3, **d), f(x, *[4, 5], q=2), f(x, **{"a": 1, **d}), d

    return calls(
        fn,
        *[lambda: (normal(3), {"y": [0], "w": 2})] * 3,
        lambda: (normal(3), {"w": 1}),
        observe=lambda: f.__kwdefaults__["k"],
    )


@program
def defaults_changed_between():
    def f(x, a=1, *, b=2):
        return x * a + b

    def fn(x):
        return f(x)

    A = lambda: (normal(3),)

    def d1():
        f.__defaults__ = (5,)

    def d2():
        f.__kwdefaults__ = {"b": 9}

    def d3():
        f.__code__ = (lambda x, a=1, *, b=2: x - a - b).__code__

    return World(fn, [(None, A), (None, A), (d1, A), (d2, A), (d3, A), (None, A)])


@program
def bound_methods_kept():
    class C:
        def __init__(s):
            s.n = 0

        def inc(s, x):
            s.n += 1
            return x * s.n

    c = C()
    f = c.inc
    g = functools.partial(c.inc)

    def fn(x):
        return f(x) + g(x), f == c.inc, f is c.inc, f.__self__ is c

    return calls(fn, *[lambda: (normal(3),)] * 3, observe=lambda: c.n)


@program
def enum_types():
    class E(enum.IntEnum):
        A = 1
        B = 2

    class S(str, enum.Enum):
        X = "x"

    class Fl(enum.Flag):
        P = enum.auto()
        Q = enum.auto()

    class N(int):
        def __add__(s, o):
            return N(int(s) + o + 100)

    def fn(x, e, s):
        return (
            x * e,
            e + 1,
            e == 1,
            s == "x",
            s.value.upper(),
            Fl.P | Fl.Q,
            N(3) + 1,
            type(N(3)).__name__,
            f"{e}",
            E(2).name,
            E["A"],
            [m.name for m in E],
        )

    return calls(
        fn,
        lambda: (normal(3), E.A, S.X),
        lambda: (normal(3), E.B, S.X),
        lambda: (normal(3), 1, "x"),
        lambda: (normal(3), True, "x"),
        lambda: (normal(3), E.A, S.X),
    )


@program
def proxies_of_what_a_variable_holds():
    def fn(x):
        held = functools.partial(int, base=16)
        proxy = weakref.proxy(held)
        function = held.func

        class Breaks:
            pass

        try:
            x = x + (function is proxy.func)
        except ReferenceError:
            x = x - 100
        held = None
        return x, isinstance(held, Breaks), weakref.getweakrefcount(fn)

    return calls(fn, *[lambda: (normal(3),)] * 3)
