"""Yet more programs against the assumptions of capture: what a wrong guard or mock would get wrong."""

from __future__ import annotations

import random
import warnings

import numpy as np
import torch
from capture_world import World, calls, normal, program
from torch import nn


@program
def descriptor_and_class_state():
    class Cnt:
        def __set_name__(self, o, n):
            self.n = "_" + n

        def __get__(self, i, o):
            return getattr(i, self.n, 0)

        def __set__(self, i, v):
            setattr(i, self.n, v + 1)

    class A:
        c = Cnt()
        total = 0
        reg = []

    a = A()

    def fn(x):
        a.c = a.c + 1
        A.total += 1
        A.reg.append(a.c)
        return x * a.c

    return calls(fn, *[lambda: (normal(3),)] * 3, observe=lambda: (a._c, A.total, list(A.reg)))


@program
def tensor_setattr_data():
    def fn(x):
        x.data = x.data * 2
        x.requires_grad_(True)
        y = (x * x).sum()
        y.backward()
        return x.grad.clone(), y.detach()

    return calls(fn, lambda: (normal(3),), lambda: (normal(3, seed=1),))


@program
def inplace_and_value_read():
    def fn(x):
        x.add_(1)
        if x.sum() > 0:
            x.mul_(2)
            return x, "pos"
        x.mul_(3)
        return x, "neg"

    return calls(
        fn,
        lambda: (torch.ones(3),),
        lambda: (-3 * torch.ones(3),),
        lambda: (torch.ones(3),),
        lambda: (-3 * torch.ones(3),),
    )


@program
def rng_interleave():
    def fn(x):
        a = torch.rand(3)
        b = random.random()
        c = torch.randn(2)
        d = np.random.rand()
        return a, b, c, d, x + torch.randint(0, 9, (3,))

    def seed():
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)

    return World(
        fn,
        [
            (seed, lambda: (normal(3),)),
            (None, lambda: (normal(3),)),
            (None, lambda: (normal(3),)),
            (seed, lambda: (normal(3),)),
        ],
        observe=lambda: (torch.get_rng_state().sum().item(), random.getstate()[1][:3]),
    )


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
def args_alias_lists():
    def fn(a, b, x):
        a.append(1)
        b.append(2)
        return x * len(a), a is b, a == b

    def same():
        l = []
        return (l, l, normal(3))

    return calls(fn, lambda: ([], [], normal(3)), same, lambda: ([], [], normal(3)), same)


@program
def arg_is_global():
    store = {"l": []}

    def fn(l, x):
        l.append(1)
        store["l"].append(2)
        return x * len(l)

    return calls(
        fn,
        lambda: (store["l"], normal(3)),
        lambda: ([], normal(3)),
        lambda: (store["l"], normal(3)),
        observe=lambda: list(store["l"]),
    )


@program
def instance_dict_alias():
    class O:
        pass

    o = O()
    o.k = 1

    def fn(d, x):
        d["k"] = 5
        return x * o.k

    return calls(fn, lambda: ({}, normal(3)), lambda: (vars(o), normal(3)), lambda: ({}, normal(3)))


@program
def warn_and_stacklevel():
    def fn(x):
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            warnings.warn("hm", stacklevel=1)
            return x, str(w[0].message), w[0].lineno > 0, w[0].filename.endswith(".py")

    return calls(fn, lambda: (normal(3),), lambda: (normal(3),))


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
def multihead():
    torch.manual_seed(0)
    m = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    m.eval()
    return calls(m, lambda: (normal(2, 3, 8),), lambda: (normal(2, 5, 8),), lambda: (normal(2, 3, 8),))


@program
def multihead_train():
    torch.manual_seed(0)
    m = nn.MultiheadAttention(8, 2, batch_first=True)
    return calls(
        lambda q: m(q, q, q),
        lambda: (normal(2, 3, 8),),
        lambda: (normal(2, 5, 8),),
        lambda: (normal(2, 3, 8),),
    )


@program
def custom_autograd():
    class Sq(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0]

    def fn(x):
        y = Sq.apply(x).sum()
        y.backward()
        return y.detach(), x.grad

    return calls(fn, lambda: (normal(3).requires_grad_(),), lambda: (normal(3, seed=1).requires_grad_(),))


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
def assert_fails():
    def fn(x, n):
        assert n < 3, f"bad {n}"
        return x * n

    w = calls(fn, lambda: (normal(3), 1), lambda: (normal(3), 2))
    return w


@program
def tensor_list_iteration():
    def fn(x):
        tot = 0
        for row in x:
            tot = tot + row.sum()
        a, b = x
        return tot, a - b, [r for r in x], list(x.unbind(1)), x.tolist(), [t.item() for t in x[0]]

    return calls(fn, lambda: (normal(2, 3),), lambda: (normal(2, 3, seed=4),))


@program
def delattr_reappear():
    class O:
        pass

    o = O()
    o.a = 1

    def fn(x):
        if hasattr(o, "a"):
            del o.a
            o.b = [x]
        else:
            o.a = 2
            del o.b
        return x * len(vars(o)), sorted(vars(o))

    return calls(fn, *[lambda: (normal(3),)] * 4, observe=lambda: dict(vars(o)))
