"""Programs of classes, descriptors, iterators, context managers, exceptions and introspection."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import weakref

import torch
from capture_world import calls, normal, program
from torch import nn


@program
def getattr_setattr_proxy():
    """config object with __getattr__ fallback and __setattr__ log"""

    class Cfg:
        def __init__(self, **kw):
            object.__setattr__(self, "_d", kw)
            object.__setattr__(self, "log", [])

        def __getattr__(self, k):
            try:
                return self._d[k]
            except KeyError:
                raise AttributeError(k)

        def __setattr__(self, k, v):
            self.log.append(k)
            self._d[k] = v

    c = Cfg(scale=2, act="tanh")

    def fn(x):
        y = getattr(torch, c.act)(x) * c.scale
        c.last = y.shape[0]
        c.scale = c.scale + 1
        return y if hasattr(c, "missing") else y + 1

    return calls(fn, lambda: (normal(3),), lambda: (normal(3),), observe=lambda: (dict(c._d), list(c.log)))


@program
def property_and_setter():
    class S:
        def __init__(self):
            self._t = 1.0

        @property
        def temp(self):
            return self._t * 2

        @temp.setter
        def temp(self, v):
            self._t = max(v, 0.1)

    s = S()

    def fn(x):
        s.temp = s.temp - 0.5
        return x / s.temp

    return calls(fn, lambda: (normal(3),), lambda: (normal(3),), observe=lambda: s._t)


@program
def metaclass_registry_modules():
    """layers built through a metaclass registry; instances are created inside forward"""

    class Reg(type):
        table = {}

        def __new__(mcs, name, bases, ns):
            cls = super().__new__(mcs, name, bases, ns)
            mcs.table[name.lower()] = cls
            return cls

        def __call__(cls, *a, **k):
            o = super().__call__(*a, **k)
            o.made = True
            return o

    class Scale(metaclass=Reg):
        def __init__(self, k):
            self.k = k

        def __call__(self, x):
            return x * self.k

    class Shift(Scale):
        def __call__(self, x):
            return x + self.k

    def fn(x, spec):
        for name, k in spec:
            layer = Reg.table[name](k)
            x = layer(x) if layer.made else x
        return x

    return calls(fn, lambda: (normal(3), [("scale", 2), ("shift", 1)]), lambda: (normal(3), [("shift", 5)]))


@program
def isinstance_singledispatch():
    class Img:
        def __init__(self, t):
            self.t = t

    class Vid(Img):
        pass

    @functools.singledispatch
    def enc(o):
        raise TypeError(type(o).__name__)

    @enc.register(Img)
    def _(o):
        return o.t * 2

    @enc.register(list)
    def _(o):
        return sum(enc(i) for i in o)

    def fn(o):
        if isinstance(o, (Vid, list)) and type(o) is not Img:
            return enc(o) + 1
        return enc(o)

    return calls(
        fn,
        lambda: (Img(normal(3)),),
        lambda: (Vid(normal(3)),),
        lambda: ([Img(normal(3)), Vid(normal(3))],),
        lambda: ("str",),
    )


@program
def nnmodule_dynamic_getattr():
    """nn.Module that keeps layers as attributes 'layer%d' and overrides __getattr__"""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            for i in range(3):
                setattr(self, f"layer{i}", nn.Linear(4, 4))
            self.extra = dict(alpha=0.5)

        def __getattr__(self, k):
            try:
                return super().__getattr__(k)
            except AttributeError:
                if k in self.__dict__.get("extra", {}):
                    return self.extra[k]
                raise

        def forward(self, x):
            for i in range(3):
                x = getattr(self, "layer" + str(i))(x) * self.alpha
            return x

    m = M()
    return calls(m, lambda: (normal(2, 4),), lambda: (normal(3, 4),))


@program
def submodule_created_in_forward():
    """module builds a layer lazily on first call and registers it"""

    class M(nn.Module):
        def forward(self, x):
            if not hasattr(self, "proj"):
                torch.manual_seed(0)
                self.proj = nn.Linear(x.shape[-1], 2)
            return self.proj(x)

    m = M()
    return calls(
        m,
        lambda: (normal(2, 4),),
        lambda: (normal(2, 4, seed=3),),
        observe=lambda: [n for n, _ in m.named_parameters()],
    )


@program
def generator_as_argument():
    """a live generator is passed in and partly consumed: remaining state is visible outside"""

    def fn(x, g):
        return x * next(g) + next(g)

    def args():
        g = (i for i in [2, 3, 5, 7])
        args.last = g
        return (normal(3), g)

    return calls(fn, args, args, observe=lambda: list(args.last))


@program
def iterator_argument_consumed():
    def fn(x, it):
        for k in it:
            if k > 2:
                break
            x = x * k
        return x

    def args():
        it = iter([1, 2, 3, 4, 5])
        args.last = it
        return (normal(3), it)

    return calls(fn, args, args, observe=lambda: list(args.last))


@program
def functools_partial_reduce():
    def fn(x, ks):
        f = functools.partial(torch.clamp, min=-1.0, max=1.0)
        g = functools.reduce(lambda p, q: lambda t: q(p(t)), [f, torch.sin, functools.partial(torch.mul, 3)])
        return g(x) + functools.reduce(operator.mul, ks, 1)

    return calls(fn, lambda: (normal(3), [1, 2, 3]), lambda: (normal(3), [4]))


@program
def lru_cache_helper():
    """cached mask builder: cache statistics are state; the tensor must be the same object"""

    @functools.cache
    def mask(n):
        return torch.tril(torch.ones(n, n))

    def fn(x):
        m = mask(x.shape[0])
        return x * m, m

    return calls(
        fn,
        lambda: (normal(3, 3),),
        lambda: (normal(3, 3),),
        lambda: (normal(4, 4),),
        observe=lambda: mask.cache_info().currsize,
    )


@program
def grad_mode_and_autocast_ctx():
    def fn(x):
        with torch.no_grad():
            a = x * 2
        with torch.enable_grad():
            b = x * 3
        with torch.autocast("cpu", dtype=torch.bfloat16):
            c = x @ x
        return a, b, c, torch.is_grad_enabled()

    return calls(fn, lambda: (normal(3, 3).requires_grad_(),))


@program
def exception_propagates():
    """validation error raised to the caller, with partial side effects before it"""
    log = []

    def fn(x, n):
        log.append(n)
        if x.shape[0] != n:
            raise ValueError(f"expected {n} rows, got {x.shape[0]}")
        return x + n

    return calls(
        fn, lambda: (normal(3), 3), lambda: (normal(3), 4), lambda: (normal(3), 3), observe=lambda: list(log)
    )


@program
def frame_and_inspect():
    def who():
        return sys._getframe(1).f_code.co_name

    def fn(x, k=3):
        names = list(inspect.signature(fn).parameters)
        return x * len(who()), names, inspect.currentframe().f_code.co_name

    return calls(fn, lambda: (normal(3),))


@program
def id_hash_weakref():
    """identity keyed cache"""
    seen = {}

    def fn(x, key):
        r = weakref.ref(key)
        seen[id(key)] = seen.get(id(key), 0) + 1
        return x * seen[id(key)], r() is key

    class K:
        pass

    k1, k2 = K(), K()
    return calls(
        fn,
        lambda: (normal(3), k1),
        lambda: (normal(3), k1),
        lambda: (normal(3), k2),
        observe=lambda: sorted(seen.values()),
    )


@program
def sort_key_min_max_zip_map():
    def fn(xs, names):
        order = sorted(range(len(names)), key=lambda i: (-len(names[i]), names[i]))
        xs = [xs[i] for i in order]
        m = max(zip(map(len, names), names))
        f = list(filter(None, map(lambda p: p[0] if p[1] % 2 == 0 else None, zip(["a", "b", "c"], range(3)))))
        s = slice(None, None, -1)
        return (
            torch.stack(xs[s]),
            m,
            f,
            any(n == "b" for n in names),
            all(names),
            divmod(7, 2),
            list(reversed(names)),
            dict(enumerate(names, 1)),
        )

    return calls(fn, lambda: ([normal(2), normal(2, seed=1), normal(2, seed=2)], ["b", "aaa", "cc"]))


@program
def walrus_match_fstring_unpack():
    def fn(x, msg):
        match msg:
            case {"op": "scale", "k": k} if (n := k * 2) > 2:
                y = x * n
            case ["add", *vals]:
                y = x + sum(vals)
            case str() as s:
                y = x * len(s)
            case _:
                y = x
        return y, f"{msg!r:>10}", *[i for i in range(2)]

    return calls(
        fn,
        lambda: (normal(3), {"op": "scale", "k": 3}),
        lambda: (normal(3), ["add", 1, 2]),
        lambda: (normal(3), "abc"),
        lambda: (normal(3), 9),
    )


@program
def objects_written_as_text():
    class Counted:
        def __init__(s, count):
            s.count = count

        def __repr__(s):
            log.append(s.count)
            return f"Counted({s.count})"

    class Named(Counted):
        def __str__(s):
            return "named" if s.count % 2 else s.count  # no text

    held, log = Named(0), []

    def fn(x):
        held.count += 1
        try:
            text = str(held)
        except TypeError as error:
            text = f"{error}"
        made = Counted(x.shape[0])
        return x * held.count, text, repr(held), str(made), len(repr(nn.Linear(2, held.count)))

    return calls(fn, *[lambda size=size: (normal(size),) for size in (2, 2, 3, 4, 2)], observe=log.copy)
