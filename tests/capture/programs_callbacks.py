"""Generators that are dropped, natives that call back, and classes edited while they are used."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import threading

import torch
from capture_world import World, calls, normal, program


@program
def abandoned_generator_finally():
    log = []

    def g(n):
        try:
            for i in range(n):
                yield i
        finally:
            log.append(("fin", n))

    def fn(x, n):
        for v in g(n):
            if v == 1:
                break
        log.append("after loop")
        it = g(5)
        next(it)
        del it
        log.append("after del")
        a, b = itertools.islice(g(9), 2)
        log.append("after slice")
        z = next(g(3))
        log.append("end")
        return x * v

    return calls(fn, *[lambda n=n: (normal(3), n) for n in (3, 1, 3, 5)], observe=lambda: list(log))


@program
def abandoned_generator_with_item():
    log = []

    @contextlib.contextmanager
    def cm():
        log.append("in")
        try:
            yield 1
        finally:
            log.append("out")

    def g(x):
        with cm():
            for i in range(5):
                yield x.sum().item() + i

    def fn(x):
        for v in g(x):
            if v > 1:
                break
        log.append("x")
        return x * v

    return calls(fn, *[lambda n=n: (torch.ones(3) * n,) for n in (0, 1, 0)], observe=lambda: list(log))


@program
def infinite_unpack():
    c = itertools.count()

    def fn(x):
        try:
            a, b = c
        except ValueError as e:
            m = str(e)
        d = next(c)
        try:
            a, b, *r = iter([1])
        except ValueError as e:
            m2 = str(e)
        (p, q), *_ = [(1, 2), 3]
        h, *t = "abc"
        return x * d, m, m2, p, q, h, t

    return calls(fn, *[lambda: (normal(3),)] * 3)


@program
def sort_with_key_side_effects():
    log = []

    class K:
        def __init__(s, v):
            s.v = v

        def __lt__(s, o):
            log.append((s.v, o.v))
            return s.v < o.v

    def key(v):
        log.append(v)
        return -v

    def fn(x):
        l = [3, 1, 2]
        l.sort(key=key)
        m = [K(2), K(1)]
        m.sort()
        s = sorted([3, 1, 2], key=key, reverse=True)
        mm = max([1, 5, 2], key=key), min(K(3), K(2)).v
        n = functools.cmp_to_key(lambda a, b: (log.append("c"), a - b)[1])
        o = sorted([2, 1], key=n)
        return x * l[0], m[0].v, s, mm, o

    return calls(fn, *[lambda: (normal(3),)] * 3, observe=lambda: list(log))


@program
def re_json_callbacks():
    import json
    import re

    log = []

    def rep(m):
        log.append(m.group())
        return m.group().upper()

    class Enc(json.JSONEncoder):
        def default(s, o):
            log.append("def")
            return 1

    def fn(x, k):
        return (
            x * k,
            re.sub("[a-c]", rep, "abcd"),
            json.dumps({"a": object()}, cls=Enc),
            json.dumps([1, {"b": k}], default=str),
            json.loads("[1]", parse_int=lambda s: (log.append(s), int(s) + 1)[1]),
            re.compile("(?P<n>.)").match("z").groupdict(),
        )

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (1, 2, 1)], observe=lambda: list(log))


@program
def nested_data_descr_super():
    log = []

    class A:
        def __init__(s, **k):
            log.append(("A", sorted(k)))
            super().__init__()

        def f(s, x):
            log.append("A.f")
            return x + 1

        @property
        def p(s):
            return "A.p"

        @classmethod
        def c(cls):
            return [cls.__name__]

    class B(A):
        def __init__(s, b=0, **k):
            super().__init__(b=b, **k)
            log.append("B")

        def f(s, x):
            return super().f(x) * 2

        @property
        def p(s):
            return super().p + "B"

        @classmethod
        def c(cls):
            return super().c() + ["B"]

    class C(A):
        def f(s, x):
            return super(C, s).f(x) - 3

    class D(B, C):
        def __init__(s):
            B.__init__(s, b=2, z=3)

        def f(s, x):
            return [f(s, x) for f in (super().f.__func__,)][0] if False else super().f(x)

    def fn(x):
        d = D()
        return d.f(x), d.p, D.c(), [k.__name__ for k in D.__mro__], isinstance(d, C), D.__bases__[0] is B

    return calls(fn, *[lambda: (normal(3),)] * 3, observe=lambda: list(log))


@program
def dunder_dict_manipulation():
    class A:
        k = 1

    a = A()

    def fn(x, m):
        a.__dict__["z"] = m
        vars(a).update(y=2)
        if m == 2:
            a.__dict__ = {"k": 50}
        if m == 3:
            a.__dict__.clear()
        d = dict(vars(a))
        setattr(a, f"n{m}", m)
        return x * a.k, sorted(vars(a)), d, getattr(a, f"n{m}")

    return calls(fn, *[lambda m=m: (normal(3), m) for m in (1, 2, 1, 3, 1, 2)], observe=lambda: dict(vars(a)))


@program
def class_level_mutation():
    class A:
        reg = {}
        lst = []
        n = 0

        def __init_subclass__(cls):
            A.reg[cls.__name__] = cls

    class B(A):
        pass

    def fn(x, k):
        A.n += 1
        B.lst.append(k)
        B.n2 = k
        A.reg["x"] = k
        if k == 2:
            B.n = 100
        if k == 3:
            del B.n
        return x * B.n, A.n, B.lst is A.lst, sorted(A.reg), type("Dyn", (B,), {"v": k})().v

    return calls(
        fn,
        *[lambda k=k: (normal(3), k) for k in (1, 2, 1, 3, 1)],
        observe=lambda: (A.n, B.n, list(A.lst), sorted(A.reg)),
    )


@program
def function_objects_edited():
    def g(x, k=1):
        return x * k

    def h(x, k=2):
        return x - k

    def fn(x, m):
        r = g(x)
        if m == 1:
            g.__defaults__ = (g.__defaults__[0] + 1,)
        if m == 2:
            g.__code__ = h.__code__
        g.tag = getattr(g, "tag", 0) + 1
        return r, g.tag, g.__name__

    return calls(
        fn, *[lambda m=m: (normal(3), m) for m in (0, 1, 0, 1, 2, 0)], observe=lambda: (g.__defaults__, g.tag)
    )


@program
def global_torch_defaults_inside():
    def fn(x, k):
        old = torch.get_default_dtype()
        if k:
            torch.set_default_dtype(torch.float64)
        try:
            y = torch.ones(2)
            n = torch.get_num_threads()
        finally:
            torch.set_default_dtype(old)
        return x + 1, y.dtype, torch.zeros(1).dtype

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 0, 1)])


@program
def exceptions_from_operators():
    log = []

    def fn(x, y):
        log.append(1)
        try:
            z = x @ y
        except RuntimeError as e:
            log.append(str(e)[:20])
            z = x.sum() + y.sum()
        try:
            w = x.view(7)
        except RuntimeError:
            w = x
        try:
            torch.cat([x, y], 5)
        except IndexError as e:
            log.append("ix")
        return z, w

    return calls(
        fn,
        lambda: (normal(2, 3), normal(3, 2)),
        lambda: (normal(2, 3), normal(2, 3)),
        lambda: (normal(2, 3), normal(3, 2)),
        lambda: (normal(2, 3), normal(2, 3)),
        lambda: (normal(7), normal(7)),
        observe=lambda: list(log),
    )


@program
def context_manager_state_leaks():
    class G:
        def __enter__(s):
            s.prev = torch.is_grad_enabled()
            torch.set_grad_enabled(False)
            return s

        def __exit__(s, *a):
            torch.set_grad_enabled(s.prev)
            return True

    def fn(x, k):
        g = G()
        with g:
            y = x * 2
            if k:
                raise ValueError
            z = y.requires_grad
        return y.requires_grad, torch.is_grad_enabled(), x * 3

    return calls(fn, *[lambda k=k: (normal(3).requires_grad_(), k) for k in (0, 1, 0, 1)])


@program
def threads_share():
    lock = threading.Lock()
    total = [0]
    ev = threading.Event()

    def fn(x):
        def work(i):
            with lock:
                total[0] += i

        ts = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        [t.start() for t in ts]
        [t.join() for t in ts]
        ev.set()
        q = __import__("queue").Queue()
        q.put(x)
        return q.get() * total[0], ev.is_set(), threading.current_thread().name

    return calls(fn, *[lambda: (normal(3),)] * 3, observe=lambda: total[0])


@program
def callbacks_stored_and_called_later():
    subs = []

    class Bus:
        def on(s, f):
            subs.append(f)
            return f

        def emit(s, x):
            return [f(x) for f in subs]

    b = Bus()

    def fn(x, k):
        if k < 2:

            @b.on
            def cb(y, k=k, x=x):
                return y * k + x.sum()

        r = b.emit(x)
        return r, len(subs)

    return calls(
        fn,
        *[lambda k=k: (normal(3), k) for k in (0, 1, 5, 1, 5)],
        observe=lambda: [f(torch.ones(2)) for f in subs],
    )


@program
def returned_closure_state():
    def fn(x):
        n = 0
        buf = [x]

        def step(d=1):
            nonlocal n
            n += d
            buf.append(n)
            return x * n

        step()

        class Acc:
            def __init__(s):
                s.c = step

            def __call__(s):
                return s.c(2)

        return step, Acc(), buf

    def use(x):
        s, a, b = fn(x)
        return s(), a(), s(), list(b[1:]), b[0] is x

    return World(use, [(None, lambda: (normal(3),))] * 3)


@program
def returned_closure_from_captured():
    made = []

    def fn(x):
        n = 0

        def step():
            nonlocal n
            n += 1
            return x * n

        step()
        made.append(step)
        return step

    return World(lambda x: fn(x), [(None, lambda: (normal(3),))] * 3, observe=lambda: [m() for m in made])


@program
def ordered_and_counter_ops():
    od = collections.OrderedDict(a=1, b=2)

    def fn(x, k):
        od.move_to_end("a")
        od[k] = x
        p = od.popitem(last=False) if len(od) > 4 else None
        c = collections.Counter("abca")
        c.subtract({"a": 5})
        c["z"]
        return (
            x * len(od),
            list(od),
            p and p[0],
            +c,
            c.total(),
            list(c.elements()),
            dict(c | collections.Counter("q")),
        )

    return calls(
        fn, *[lambda k=k: (normal(3), k) for k in ("a", "c", "d", "c", "e", "f")], observe=lambda: list(od)
    )


@program
def default_dict_closure_factory():
    n = [0]

    def fac():
        n[0] += 1
        return [n[0]]

    d = collections.defaultdict(fac)

    def fn(x, k):
        d[k].append(k)
        a = d.get("none")
        b = "none" in d
        d.default_factory = None if k == 3 else fac
        try:
            c = d["fresh" + str(k)]
        except KeyError as e:
            c = str(e)
        return x * len(d), a, b, c

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (1, 2, 3, 1, 2)], observe=lambda: (dict(d), n[0]))
