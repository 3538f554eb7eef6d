"""What classes define to be called by the interpreter."""

from __future__ import annotations

import abc
import functools
import gc
import typing
import weakref

from capture_world import World, calls, normal, program


@program
def getattribute_counts():
    log = []

    class O:
        def __init__(s):
            object.__setattr__(s, "v", 2)

        def __getattribute__(s, n):
            log.append(n)
            return object.__getattribute__(s, n)

        def __setattr__(s, n, v):
            log.append(("set", n))
            object.__setattr__(s, n, v)

        def __delattr__(s, n):
            log.append(("del", n))
            object.__delattr__(s, n)

    o = O()

    def fn(x):
        o.v = o.v + 1
        o.t = x
        y = o.t * o.v
        del o.t
        return y, hasattr(o, "t"), getattr(o, "zz", 5)

    return calls(fn, *[lambda: (normal(3),)] * 4, observe=lambda: list(log))


@program
def property_side_effects():
    class P:
        def __init__(s):
            s.n = 0
            s._v = 1

        @property
        def v(s):
            s.n += 1
            return s._v * s.n

        @v.setter
        def v(s, a):
            s._v = a
            s.n = -1

        @v.deleter
        def v(s):
            s._v = 100

        @functools.cached_property
        def c(s):
            s.n += 10
            return s.n

        @classmethod
        def k(cls):
            return cls.__name__

        @staticmethod
        def z(a):
            return a + 1

    p = P()

    def fn(x, k):
        a = p.v + p.v
        if k:
            p.v = k
        if k == 5:
            del p.v
        return x * a, p.c, p.k(), P.k(), p.z(1), p.v

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 0, 5, 0)], observe=lambda: (p.n, p._v))


@program
def data_descriptors():
    log = []

    class D:
        def __set_name__(s, o, n):
            s.n = "_" + n

        def __get__(s, i, o=None):
            if i is None:
                return s
            log.append(("get", s.n))
            return i.__dict__.get(s.n, 7)

        def __set__(s, i, v):
            log.append(("set", s.n))
            i.__dict__[s.n] = v

        def __delete__(s, i):
            log.append("del")
            i.__dict__.pop(s.n, None)

    class N:
        def __get__(s, i, o=None):
            return (i is None, o.__name__)

    class A:
        d = D()
        e = D()
        n = N()

    a = A()

    def fn(x, k):
        y = x * a.d
        a.d = k
        a.e += 1
        r = (a.n,)
        if k == 2:
            del a.d
        if k == 3:
            a.n = 5
        return y + a.d, r, a.n

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 2, 3, 0, 3)], observe=lambda: list(log))


@program
def class_swapped():
    class A:
        k = 2

        def f(s, x):
            return x * s.k

    class B(A):
        k = 5

        def f(s, x):
            return x - s.k

    o = A()

    def fn(x, k):
        y = o.f(x)
        if k:
            o.__class__ = B if type(o) is A else A
        return y + o.k, type(o).__name__

    return World(
        fn,
        [
            (None, lambda: (normal(3), 0)),
            (None, lambda: (normal(3), 1)),
            (None, lambda: (normal(3), 0)),
            (lambda: setattr(o, "__class__", A), lambda: (normal(3), 0)),
            (None, lambda: (normal(3), 1)),
            (None, lambda: (normal(3), 1)),
        ],
        observe=lambda: type(o).__name__,
    )


@program
def slots_unset():
    class S:
        __slots__ = ("a", "b", "__weakref__")

    s = S()
    s.a = 1

    def fn(x, k):
        try:
            v = s.b
        except AttributeError:
            v = -1
        if k == 1:
            s.b = k + 10
        if k == 2 and hasattr(s, "b"):
            del s.b
        s.a += 1
        return x * v

    return calls(
        fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 0, 2, 0, 1)], observe=lambda: (s.a, hasattr(s, "b"))
    )


@program
def del_effects():
    log = []

    class T:
        def __init__(s, n):
            s.n = n

        def __del__(s):
            log.append(s.n)

    def fn(x, k):
        t = T(k)
        y = x * t.n
        del t
        log.append("after")
        u = T(k + 100)
        return y

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 0, 2)], observe=lambda: list(log))


@program
def weakref_dies_inside():
    class T:
        pass

    log = []

    def fn(x):
        t = T()
        r = weakref.ref(t)
        a = r() is t
        del t
        b = r() is None
        s = weakref.WeakSet()
        v = weakref.WeakValueDictionary()
        u = T()
        s.add(u)
        v["u"] = u
        n = (len(s), len(v))
        del u
        m = (len(s), len(v))
        return x * 2, a, b, n, m

    return calls(fn, *[lambda: (normal(3),)] * 3)


@program
def weakref_callback():
    class T:
        pass

    log = []

    def fn(x):
        t = T()
        r = weakref.ref(t, lambda _: log.append("dead"))
        f = weakref.finalize(t, log.append, "final")
        del t
        log.append("end")
        return x * 2

    return calls(fn, *[lambda: (normal(3),)] * 3, observe=lambda: list(log))


@program
def weakref_target_dropped_between():
    class T:
        def __init__(s):
            s.k = 3

    h = {"o": T()}
    ref = {"r": weakref.ref(h["o"])}

    def fn(x):
        t = ref["r"]()
        if t is None:
            return x, "gone"
        return x * t.k, "there"

    def drop():
        h["o"] = None
        gc.collect()

    A = lambda: (normal(3),)
    return World(fn, [(None, A), (None, A), (drop, A), (None, A)], observe=lambda: ref["r"]() is None)


@program
def global_object_freed_between():
    log = []

    class T:
        def __init__(s):
            s.k = 3

        def __del__(s):
            log.append("freed")

    h = {"o": T()}

    def fn(x):
        o = h["o"]
        return x * (o.k if o else 1)

    def drop():
        h["o"] = None
        gc.collect()

    A = lambda: (normal(3),)
    return World(fn, [(None, A), (None, A), (drop, A), (None, A)], observe=lambda: list(log))


@program
def abc_register_between():
    class Base(abc.ABC):
        pass

    class Impl:
        pass

    o = Impl()

    def fn(x):
        return (x * 2 if isinstance(o, Base) else x * 3), issubclass(Impl, Base)

    A = lambda: (normal(3),)
    return World(fn, [(None, A), (None, A), (lambda: Base.register(Impl), A), (None, A)])


@program
def runtime_protocol():
    @typing.runtime_checkable
    class Has(typing.Protocol):
        def go(self): ...

    class O:
        pass

    o = O()

    def fn(x):
        return x * 2 if isinstance(o, Has) else x * 3

    A = lambda: (normal(3),)
    return World(
        fn,
        [
            (None, A),
            (None, A),
            (lambda: setattr(o, "go", lambda: 1), A),
            (None, A),
            (lambda: vars(o).pop("go", None), A),
        ],
    )


@program
def subclasshook():
    flag = {"v": False}

    class B(abc.ABC):
        @classmethod
        def __subclasshook__(c, k):
            return NotImplemented if not flag["v"] else True

    class M(type):
        def __instancecheck__(c, i):
            flag["n"] = flag.get("n", 0) + 1
            return flag["v"]

    class K(metaclass=M):
        pass

    def fn(x):
        return x * 2 if isinstance(x, K) else x * 3

    A = lambda: (normal(3),)
    return World(
        fn, [(None, A), (None, A), (lambda: flag.update(v=True), A), (None, A)], observe=lambda: dict(flag)
    )


@program
def function_attributes():
    def fn(x):
        fn.calls = getattr(fn, "calls", 0) + 1
        fn.last = x
        return x * fn.calls

    return calls(fn, *[lambda: (normal(3),)] * 4, observe=lambda: fn.calls)
