"""Names, built-in functions and the world around that change between calls."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import io
import math
import operator

import torch
import torch.nn.functional as F
from capture_world import World, calls, normal, program
from torch import nn


def seq(fn, shape=lambda n: (n, 4), observe=None, extra=lambda n: ()):
    return calls(fn, *[lambda n=n: (normal(*shape(n)), *extra(n)) for n in SEQ], observe=observe)


REL = F.relu


@program
def monkeypatched_builtins_and_math():
    real = len
    rs = math.sqrt
    rt = torch.tanh

    def fn(x):
        return x * len([1, 2]) * math.sqrt(4), torch.tanh(x), F.relu(x), abs(-2)

    A = lambda: (normal(3),)
    return World(
        fn,
        [
            (None, A),
            (None, A),
            (lambda: fn.__globals__.update(len=lambda v: 9), A),
            (lambda: fn.__globals__.pop("len", None), A),
            (lambda: setattr(math, "sqrt", lambda v: v * 7), A),
            (lambda: setattr(math, "sqrt", rs), A),
            (lambda: setattr(torch, "tanh", lambda v: v - 1), A),
            (lambda: setattr(torch, "tanh", rt), A),
            (lambda: setattr(F, "relu", torch.sigmoid), A),
            (lambda: setattr(F, "relu", REL), A),
        ],
    )


@program
def tensor_method_patched():
    old = torch.Tensor.relu

    def fn(x):
        return x.relu(), x.sum(), x + 1

    A = lambda: (normal(3),)

    def undo():
        if "relu" in vars(torch.Tensor):
            del torch.Tensor.relu
        if not hasattr(torch.Tensor, "relu"):
            torch.Tensor.relu = old

    oa = torch.Tensor.__add__
    return World(
        fn,
        [
            (None, A),
            (None, A),
            (lambda: setattr(torch.Tensor, "relu", lambda s: s * 5), A),
            (undo, A),
            (lambda: setattr(torch.Tensor, "__add__", lambda s, o: s * 100), A),
            (lambda: setattr(torch.Tensor, "__add__", oa), A),
        ],
    )


@program
def recursion_deep():
    def f(x, n):
        return x if n == 0 else f(x * 1.01, n - 1) + n

    def tree(d):
        return {"l": tree(d - 1), "r": [tree(d - 1)]} if d else 1

    def walk(t):
        return (
            sum(walk(v) for v in (t.values() if isinstance(t, dict) else t)) if not isinstance(t, int) else t
        )

    def boom(n):
        return boom(n + 1)

    def fn(x, n):
        try:
            boom(0)
        except RecursionError as e:
            r = "deep"
        return f(x, n), walk(tree(3)), r

    return calls(fn, *[lambda n=n: (normal(3), n) for n in (3, 70, 3, 90)])


@program
def sequence_protocols():
    class L(list):
        def append(s, v):
            super().append(v)
            super().append(v)

        def __getitem__(s, i):
            return super().__getitem__(i) if not isinstance(i, str) else i

        def __len__(s):
            return 99

    class D(dict):
        def __missing__(s, k):
            s[k] = k * 2
            return s[k]

        def __setitem__(s, k, v):
            super().__setitem__(k, (v,))

    class T(tuple):
        def __getitem__(s, i):
            return "T"

    def fn(x, l, d):
        l.append(x)
        d["k"] = 1
        d.update(j=2)
        a = d["miss"]
        b = d.get("none")
        t = T((1, 2))
        u, v = t
        l.extend([1])
        l += [2]
        return (
            x * 2,
            len(l),
            list.__len__(l),
            l["s"],
            l[0] is x,
            a,
            b,
            d,
            t[0],
            u,
            v,
            list(t),
            [i for i in l][1:],
            "miss" in d,
            dict(d),
            l[-1],
            {**d},
        )

    return calls(fn, *[lambda: (normal(3), L(), D())] * 2, lambda: (normal(3), L([5]), D(miss=1)))


@program
def deque_set_bytes():
    dq = collections.deque(maxlen=3)
    st = set()
    ba = bytearray(b"ab")
    ct = collections.Counter()
    cm = collections.ChainMap({}, {"a": 1})
    dd = collections.defaultdict(list)

    def fn(x, k):
        dq.append(k)
        dq.rotate(1)
        st.add(k)
        st.discard(k - 1)
        ba.append(65 + k)
        ct.update([k, k])
        cm["b"] = k
        dd[k].append(x)
        ct[k] -= 1
        return (
            x * len(dq),
            sum(dq),
            sorted(st),
            bytes(ba),
            ct.most_common(1),
            cm["a"],
            len(dd),
            list(dq),
            ct[99],
            k in st,
            dd.get(50),
            dq[0],
            ct + collections.Counter([k]),
        )

    return calls(
        fn,
        *[lambda k=k: (normal(3), k) for k in (1, 2, 3, 1, 4)],
        observe=lambda: (
            list(dq),
            sorted(st),
            bytes(ba),
            dict(ct),
            dict(cm),
            {k: len(v) for k, v in dd.items()},
        ),
    )


@program
def partial_and_callable_args():
    class C:
        def __init__(s, k):
            s.k = k

        def __call__(s, x):
            s.k += 1
            return x * s.k

    def g(x, y, z=1):
        return x * y + z

    c = C(1)
    fs = [
        c,
        functools.partial(g, y=2),
        functools.partial(g, y=3),
        functools.partial(functools.partial(g, z=5), y=4),
        c,
        C(7),
        torch.relu,
        nn.ReLU(),
        lambda x: x * 3,
        lambda x: x * 3,
        g.__get__(torch.ones(3)),
        operator.methodcaller("mul", 4),
        operator.neg,
        torch.Tensor.abs,
        C(1).__call__,
    ]
    return calls(
        lambda x, f: f(x) if f is not fs[10] else f(x),
        *[lambda i=i: (normal(3), fs[i]) for i in [*range(15), 0, 1, 2]],
        observe=lambda: c.k,
    )


@program
def modeloutput_like():
    @dataclasses.dataclass
    class Out(collections.OrderedDict):
        logits: torch.Tensor = None
        hidden: tuple = None

        def __post_init__(s):
            for f in dataclasses.fields(s):
                v = getattr(s, f.name)
                if v is not None:
                    s[f.name] = v

        def __getitem__(s, k):
            return dict(s.items())[k] if isinstance(k, str) else s.to_tuple()[k]

        def __setattr__(s, n, v):
            if n in s.keys() and v is not None:
                super().__setitem__(n, v)
            super().__setattr__(n, v)

        def __setitem__(s, k, v):
            super().__setitem__(k, v)
            super().__setattr__(k, v)

        def to_tuple(s):
            return tuple(s[k] for k in s.keys())

    def fn(x, flag):
        o = Out(logits=x * 2, hidden=(x, x + 1) if flag else None)
        o.logits = o.logits + 1
        o["extra"] = x
        return o, o[0], o["logits"], o.to_tuple()[1:], len(o), list(o), o.hidden is None

    return calls(fn, *[lambda f=f: (normal(3), f) for f in (True, False, True, False)])


@program
def context_vars_env_time():
    import contextvars
    import os
    import time
    import uuid

    v = contextvars.ContextVar("v", default=1)

    def fn(x):
        t = time.perf_counter()
        os.environ["CAPX"] = str(int(os.environ.get("CAPX", "0")) + 1)
        tok = v.set(v.get() + 1)
        r = x * v.get(), os.environ["CAPX"], time.perf_counter() >= t, uuid.uuid4() != uuid.uuid4()
        if int(os.environ["CAPX"]) % 2:
            v.reset(tok)
        return r

    def clean():
        os.environ.pop("CAPX", None)

    A = lambda: (normal(3),)
    return World(fn, [(clean, A), (None, A), (None, A), (None, A)], observe=lambda: v.get())


@program
def files_and_stringio():
    buf = io.StringIO()

    def fn(x, k):
        buf.write(f"{k};")
        with contextlib.redirect_stdout(buf):
            print("in", k)
        with contextlib.suppress(KeyError):
            {}[k]
        with contextlib.ExitStack() as s:
            s.callback(buf.write, "cb")
            s.enter_context(contextlib.nullcontext(k))
        return x * k, buf.tell()

    return calls(fn, *[lambda k=k: (normal(3), k) for k in (1, 2, 1)], observe=buf.getvalue)


@program
def copy_and_pickle():
    import pickle

    class N:
        def __init__(s, v):
            s.v = v
            s.me = s
            s.l = [v]

        def __deepcopy__(s, m):
            return N(s.v + 1)

    n = N(1)

    def fn(x, d):
        a = copy.copy(d)
        b = copy.deepcopy(d)
        c = copy.deepcopy(n)
        p = pickle.loads(pickle.dumps({"a": [1]}))
        q = copy.copy(n)
        a["l"].append(1)
        b["l"].append(2)
        return (
            x * c.v,
            a,
            b,
            d,
            p,
            q.l is n.l,
            q.me is n,
            copy.deepcopy(x) is x,
            copy.copy(x).data_ptr() == x.data_ptr(),
        )

    return calls(fn, *[lambda: (normal(3), {"l": []})] * 3)
