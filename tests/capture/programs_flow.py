"""Control flow, closures and modules."""

from __future__ import annotations

import collections
import functools
import math
import types

import torch
import torch.nn.functional as F
from capture_world import World, calls, normal, program
from torch import nn


@program
def numeric_tower():
    from decimal import Decimal
    from fractions import Fraction

    def fn(x, k):
        f = Fraction(k, 3) + Fraction(1, 6)
        d = Decimal(k) / Decimal(7)
        return (
            x * float(f),
            str(f),
            str(d),
            f.limit_denominator(2) == 1,
            round(d, 2),
            int(f),
            math.isclose(f, 0.5),
            complex(k, 1).conjugate(),
            (k).to_bytes(2, "big"),
            float.fromhex("0x1p3"),
            int("ff", 16),
            divmod(-7, k),
            -7 // k,
            -7 % k,
            7.5 // k,
            round(2.5),
            round(0.125, 2),
            1e308 * 10 * k,
            math.fsum([0.1] * 10),
            k.__class__(5),
        )

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (1, 2, 3, 4, 5, 2)])


@program
def module_lists_dicts_params():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.ls = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
            s.d = nn.ModuleDict({"a": nn.ReLU(), "b": nn.Tanh()})
            s.ps = nn.ParameterList([torch.ones(3)])
            s.pd = nn.ParameterDict({"k": torch.zeros(3)})

        def forward(s, x, act="a"):
            for i, l in enumerate(s.ls):
                x = l(x) if i != 1 else x + s.ls[i](x)
            for k, m in s.d.items():
                if k == act:
                    x = m(x)
            for n, p in s.named_parameters(recurse=True):
                x = x + p.sum() * 0
            return (
                x + s.ps[0] + s.pd["k"],
                len(s.ls),
                list(s.d.keys()),
                sum(p.numel() for p in s.parameters()),
                [type(m).__name__ for m in s.modules()],
            )

    m = M()
    A = lambda: (normal(2, 3),)
    return World(
        m,
        [
            (None, A),
            (None, lambda: (normal(2, 3), "b")),
            (lambda: m.ls.append(nn.Identity()) if len(m.ls) < 4 else None, A),
            (lambda: m.d.update({"a": nn.Sigmoid()}), A),
            (lambda: m.ps.append(torch.ones(3)), A),
            (lambda: m.pd.update({"k": torch.ones(3)}), A),
            (None, A),
        ],
    )


@program
def buffers_persist_and_alias():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.register_buffer("b", torch.zeros(4))
            s.v = s.b[:2]
            s.i = 0

        def forward(s, x):
            s.b[s.i % 4] = x.sum()
            s.i += 1
            s.v.mul_(2)
            w = s.b.view(2, 2)
            w[0] += 1
            return w, s.v, s.b.data_ptr() == s.v.data_ptr()

    m = M()
    return World(
        m,
        [(None, lambda: (normal(3),))] * 4
        + [(lambda: setattr(m, "b", torch.ones(4)), lambda: (normal(3),)), (None, lambda: (normal(3),))],
        observe=lambda: (m.b.clone(), m.v.clone(), m.i),
    )


@program
def train_loop_inside():
    m = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    opt = torch.optim.AdamW(m.parameters(), lr=0.01)
    sch = torch.optim.lr_scheduler.StepLR(opt, 2)

    def fn(x, y):
        m.train()
        ls = []
        for _ in range(2):
            opt.zero_grad()
            l = F.mse_loss(m(x), y)
            l.backward()
            opt.step()
            sch.step()
            ls.append(l.item())
        m.eval()
        with torch.no_grad():
            return ls, m(x), sch.get_last_lr(), opt.state_dict()["state"][0]["step"]

    return calls(
        fn,
        *[lambda: (normal(4, 3), normal(4, 1))] * 3,
        observe=lambda: [p.detach().clone() for p in m.parameters()],
    )


@program
def no_grad_forms():
    w = torch.ones(3, requires_grad=True)

    @torch.no_grad()
    def a(x):
        return x * w

    @torch.enable_grad()
    def b(x):
        return x * w

    gen_log = []

    @torch.no_grad()
    def g(x):
        for i in range(2):
            yield x * w * i

    def fn(x):
        with torch.no_grad():
            p = b(x)
            q = x * w
            with torch.enable_grad():
                r = x * w
        s = [t.requires_grad for t in g(x)]
        with torch.set_grad_enabled(False):
            t = x * w
        torch.set_grad_enabled(True)
        return [v.requires_grad for v in (a(x), p, q, r, t, x * w)], s, torch.is_grad_enabled()

    A = lambda: (normal(3),)
    return World(
        fn,
        [
            (None, A),
            (None, A),
            (lambda: torch.set_grad_enabled(False), A),
            (lambda: torch.set_grad_enabled(True), A),
        ],
    )


@program
def walrus_and_chains():
    log = []

    def t(v):
        log.append(v)
        return v

    def fn(x, n):
        if (m := n * 2) > 3 and t(1) or t(0):
            y = x * m
        else:
            y = x
        z = t(1) < t(n) < t(3) != t(9)
        a = b = []
        a.append(n)
        i = 0
        l = [0, 0]
        i, l[i] = 1, 5

        def f():
            return (yield)

        d = {**{"a": 1}, "a": 2}
        *p, q = range(4)
        x0 = y
        x0 += 1
        k = [n]
        k *= 2
        k[0] += 1
        k[1:] = [7, 8]
        del k[0]
        return (
            y,
            x0 is y,
            z,
            b,
            l,
            d,
            p,
            q,
            k,
            m,
            (lambda *a, k=1, **kw: (a, k, kw))(1, 2, k=3, z=4),
            [*range(2), *"ab"],
            not n,
            n if n else None,
            t(0) or t(2),
        )

    return calls(fn, *[lambda n=n: (normal(3), n) for n in (1, 2, 0, 3, 2)], observe=lambda: list(log))


@program
def try_flow():
    log = []

    def f(k):
        try:
            if k == 0:
                return "ret"
            if k == 1:
                raise KeyError("k")
            if k == 2:
                raise ValueError("v")
            if k == 3:
                raise RuntimeError("r")
        except (KeyError, ValueError) as e:
            log.append(type(e).__name__)
            if k == 2:
                raise TypeError("t") from e
        except RuntimeError:
            raise
        else:
            log.append("else")
            return "else"
        finally:
            log.append("fin")
        return "end"

    def fn(x, k):
        try:
            r = f(k)
        except TypeError as e:
            r = ("TE", repr(e.__cause__))
        for i in range(3):
            try:
                if i == k:
                    continue
                if i == 2:
                    break
            finally:
                log.append(i)
        try:
            e
        except NameError as er:
            r = (r, type(er).__name__)
        return x * k, r

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 2, 4, 3, 1)], observe=lambda: list(log))


@program
def getattr_fallback_order():
    log = []

    class A:
        x = 1

        def __getattr__(s, n):
            log.append(n)
            if n == "bad":
                raise AttributeError("bad!")
            return n

        @property
        def boom(s):
            raise AttributeError("inner")

    a = A()

    def fn(x, k):
        r = [a.x, a.foo, getattr(a, "bad", "dflt"), hasattr(a, "bad"), a.boom]
        if k:
            a.foo = "set"
        return x * k, r

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 0)], observe=lambda: list(log))


@program
def hashing_and_eq():
    log = []

    class K:
        def __init__(s, v):
            s.v = v

        def __hash__(s):
            log.append(("h", s.v))
            return s.v % 2

        def __eq__(s, o):
            log.append(("e", s.v))
            return isinstance(o, K) and s.v == o.v

    d = {}

    def fn(x, k):
        a = K(k)
        d[a] = x
        r = K(k) in d
        s = {K(1), K(3), K(1)}
        l = [K(1), K(2)]
        i = l.index(K(2))
        c = l.count(K(1))
        n = K(1) != K(2)
        return x * len(d), r, len(s), i, c, n, (K(1), 2) == (K(1), 2), d.get(K(99))

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (0, 1, 0, 2)], observe=lambda: list(log))


@program
def slices_and_index_objects():
    class I:
        def __init__(s, v):
            s.v = v

        def __index__(s):
            return s.v

    def fn(x, k):
        l = list(range(10))
        s = slice(k, None, 2)
        l[s] = [0] * len(l[s])
        del l[::3]
        return (
            x[I(1)],
            x[I(0) : I(2)],
            l,
            l[I(-1)],
            range(I(3)),
            s.indices(7),
            "abc"[I(1)],
            x[s],
            x[..., k:],
            torch.zeros(I(2)) if False else 0,
            [1] * I(2),
        )

    return calls(fn, *[lambda k=k: (normal(4), k) for k in (0, 1, 0, 2)])


@program
def inplace_operators_on_args():
    def fn(x, l, d, s):
        y = x
        y += 1
        y *= 2
        z = x
        z = z + 1
        m = l
        m += [1]
        m = m + [2]
        t = (1,)
        t += (2,)
        d |= {"k": 1}
        s |= {5}
        s -= {1}
        q = "a"
        q += "b"
        n = 5
        n **= 2
        n //= 3
        n %= 5
        n <<= 2
        n |= 1
        n ^= 3
        n &= 7
        n >>= 1
        x[0] += 10
        l[0] += 5
        d["k"] += 1
        return y is x, z, l, m, t, d, sorted(s), q, n

    return calls(fn, *[lambda: (normal(3), [1], {"z": 1}, {1, 2})] * 3)


@program
def deep_nesting_out():
    Pt = collections.namedtuple("Pt", "a b")

    def fn(x, d):
        r = {
            "l": [x, (x + 1, {"p": Pt(x * 2, [d])})],
            "s": types.SimpleNamespace(q=x, w=d),
            "t": (d, d),
            "e": [[]] * 2,
            "f": frozenset([1]),
            "dq": collections.deque([x], maxlen=2),
        }
        d["back"] = r["l"][0]
        return r

    return calls(fn, *[lambda: (normal(3), {"k": 1})] * 3)


@program
def closures_over_loop_tensors():
    def fn(xs):
        fs = []
        for i, x in enumerate(xs):

            def f(y, x=x):
                return y + x * i

            fs.append(f)
        return [f(xs[0]) for f in fs], [g(xs[-1]) for g in [functools.partial(f, x=xs[0]) for f in fs]]

    return calls(
        fn, lambda: ([normal(3), normal(3)],), lambda: ([normal(3)] * 3,), lambda: ([normal(3), normal(3)],)
    )


@program
def torch_cond():
    def fn(x):
        chosen = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos() + 1, (x,))
        return chosen, torch.cond(x.shape[0] > 3, lambda x: x + 1, lambda x: x - 1, [x])

    return calls(fn, *[lambda n=n, sign=sign: (sign * torch.ones(n),) for n in (3, 4, 5) for sign in (1, -1)])


@program
def decided_by_tensors_made_of_open_numbers():
    def fn(x, n):
        at = torch.tensor(0)
        while at < n:
            at = at + 1
        if torch.arange(n).sum() > 10:
            return x + at
        return x - torch.full((), n), at

    return calls(fn, *[lambda n=n: (normal(3), n) for n in (3, 7, 4, 2, 6, 5, 8, 3)])
