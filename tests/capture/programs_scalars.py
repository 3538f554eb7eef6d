"""Scalars and extents that change from call to call."""

from __future__ import annotations

import math
import operator
import types

import torch
import torch.nn.functional as F
from capture_world import calls, normal, program
from torch import nn

SEQ = [3, 4, 5, 6, 7, 2, 9, 1, 4, 12, 0, 5, 8]


def seq(fn, shape=lambda n: (n, 4), observe=None, extra=lambda n: ()):
    return calls(fn, *[lambda n=n: (normal(*shape(n)), *extra(n)) for n in SEQ], observe=observe)


@program
def extent_everything_python():
    def fn(x):
        n = x.shape[0]
        return (
            x * 1,
            n + 1,
            n * 2.5,
            n / 2,
            n // 2,
            n % 3,
            -n,
            ~n,
            n**2,
            n << 1,
            n >> 1,
            n & 3,
            n | 8,
            n ^ 1,
            divmod(n, 3),
            abs(-n),
            round(n / 3),
            int(n * 0.5),
            float(n),
            str(n),
            repr(n),
            bool(n),
            not n,
            n and 3,
            n or 5,
            n == 4,
            n != 4,
            n < 5,
            n is None,
            isinstance(n, int),
            type(n),
            hash(n),
            min(n, 4),
            max(n, 4, 2),
            sum([n, 1]),
            sorted([n, 3]),
            [n] * 2,
            (n,) * 2,
            {n: 1},
            {n},
            n in (3, 4, 5),
            f"{n:03d}",
            "%d" % n,
            "a" * n,
            [0] * n,
            list(range(n)),
            n.bit_length(),
            n.real,
            math.sqrt(n),
            math.log2(n + 1),
            math.ceil(n / 2),
            complex(n),
            slice(n),
            n if n > 4 else -n,
            bin(n),
            chr(65 + n),
            bytes(n),
            n.__add__(1),
            operator.index(n),
            pow(n, 2, 7),
            (lambda k=n: k)(),
            [i for i in range(n) if i % 2],
            "x" if n > 3 else "y",
            3 - n,
            2**n,
            1.5 * n,
            n == n,
            n is n,
            7 if 2 < n < 6 else 8,
        )

    return seq(fn)


@program
def extent_tensor_args():
    def fn(x):
        n = x.shape[0]
        return (
            x * n,
            n * x,
            n - x,
            x + n,
            x / max(n, 1),
            x**n,
            torch.full((n,), n),
            torch.arange(n),
            torch.arange(n, 0, -1),
            torch.zeros(n, n + 1),
            torch.ones(2 * n),
            x.new_zeros(n),
            F.pad(x, (0, n)),
            x.expand(2, n, 4),
            x.reshape(n * 4),
            x.view(4 * n),
            x.repeat(2, 1),
            torch.linspace(0, 1, n),
            torch.eye(n),
            x.sum() / (n + 1),
            x > n,
            torch.tensor(n),
            torch.tensor([n, 1]),
            x.clamp(max=n),
            torch.cat([x, x]).shape[0],
            x.t().shape,
            x.flatten(),
            x.unsqueeze(0).shape,
            x.roll(n // 2, 0),
            torch.stack([x] * 2).shape,
            x.new_full((n,), n / 2),
            torch.empty(n).fill_(n),
            x.narrow(0, 0, n),
            x[: n // 2],
            x[n // 2 :],
            x[..., :2].shape,
            x.mean(1),
            x.tril(n),
            torch.tensor(float(n)),
        )

    return seq(fn)


@program
def extent_split_chunk():
    def fn(x):
        n = x.shape[0]
        if n < 2:
            return x
        return (
            x.split(n // 2),
            x.chunk(2),
            x.split([1, n - 1]),
            x.tensor_split(2),
            x.unfold(0, 2, 1),
            x[n - 1],
            x[-n],
            x[n // 2],
            x.index_select(0, torch.arange(n // 2)),
            x.unbind()[n - 1],
            len(x.unbind()),
        )

    return seq(fn)


@program
def extent_stored():
    class S:
        pass

    s = S()
    d = {}
    l = []
    glob = {"n": 0}
    cell = [0]

    def fn(x):
        nonlocal cell
        n = x.shape[0]
        s.n = n
        d[n] = d.get(n, 0) + n
        l.append(n)
        s.shape = x.shape
        d["t"] = (n, x.shape)
        glob["n"] += n
        cell = [n]

        def clo():
            return n + 1

        return (
            x * s.n,
            clo(),
            clo,
            dict(a=n),
            [n, *x.shape],
            x.shape,
            x.size(),
            tuple(x.shape),
            list(x.shape),
            torch.Size([n, 2]),
            x.shape + (1,),
            x.numel(),
            x.stride(),
            len(x),
            x.shape == (n, 4),
            x.shape[-1],
            x.shape.numel(),
            x.dim(),
            x.nbytes,
        )

    return calls(
        lambda x: [v if not callable(v) else v() for v in fn(x)],
        *[lambda n=n: (normal(n, 4),) for n in SEQ],
        observe=lambda: (vars(s), dict(d), list(l), dict(glob), list(cell)),
    )


@program
def extent_loops():
    def fn(x):
        n, c = x.shape
        y = x
        k = 0
        while n > 1:
            n //= 2
            y = y * 2
            k += 1
        for i in range(x.shape[0]):
            y = y + i
        for i, row in enumerate(x):
            if i == 3:
                break
            y = y + row
        else:
            k += 100
        return y, k, [r.sum() for r in x], list(zip(x, range(c)))[:2]

    return seq(fn)


@program
def extent_branches():
    def fn(x, y):
        if x.shape[0] == y.shape[0]:
            z = x + y
        elif x.shape[0] > y.shape[0]:
            z = x[: y.shape[0]] + y
        else:
            z = torch.cat([x, y])
        if x.shape[0] % 2 == 0:
            z = z * 2
        if x.shape != y.shape:
            z = z - 1
        if x.numel() > 16 and len(y) < 7:
            z = z.relu()
        return z

    return seq(fn, extra=lambda n: (normal(max(1, 8 - n), 4) if n % 3 else normal(n, 4),))


@program
def extents_equal_then_not():
    def fn(x, y):
        return x @ y.t() if x.shape == y.shape else x.sum() + y.sum(), x.shape[0] * y.shape[0]

    return calls(
        fn,
        *[
            lambda a=a, b=b: (normal(a, 4), normal(b, 4))
            for a, b in ((3, 3), (4, 4), (5, 5), (6, 6), (6, 7), (7, 7), (3, 4), (1, 1), (1, 5), (5, 1))
        ],
    )


@program
def extents_two_dims_swap():
    def fn(x):
        return (
            x.t().contiguous(),
            x.shape[0] - x.shape[1],
            x.view(-1).shape,
            x.reshape(x.shape[1], x.shape[0]),
        )

    return calls(
        fn,
        *[
            lambda a=a, b=b: (normal(a, b),)
            for a, b in ((3, 4), (4, 3), (5, 6), (6, 5), (7, 2), (2, 2), (1, 3), (3, 1), (9, 9))
        ],
    )


@program
def kv_cache_generate():
    class Cache:
        def __init__(s):
            s.k = []
            s.seen = 0

        def update(s, k, i):
            if len(s.k) <= i:
                s.k.append(k)
            else:
                s.k[i] = torch.cat([s.k[i], k], 1)
            if i == 0:
                s.seen += k.shape[1]
            return s.k[i]

    ls = [nn.Linear(4, 4) for _ in range(2)]

    def fn(x, cache, *, use=True):
        pos = torch.arange(cache.seen, cache.seen + x.shape[1])
        for i, l in enumerate(ls):
            k = cache.update(l(x), i) if use else l(x)
            a = torch.softmax(x @ k.transpose(1, 2) + pos[:, None], -1)
            x = a @ k
        return x, cache.seen

    c = Cache()
    return calls(
        fn,
        lambda: (normal(1, 5, 4), c),
        *[lambda i=i: (normal(1, 1, 4, seed=i), c) for i in range(9)],
        lambda: (normal(1, 3, 4), Cache()),
        lambda: (normal(1, 1, 4), c),
        observe=lambda: ([k.detach().clone() for k in c.k], c.seen),
    )


@program
def generate_whole():
    emb = nn.Embedding(10, 4)
    head = nn.Linear(4, 10)

    def step(ids, past):
        h = emb(ids)
        h = h if past is None else torch.cat([past, h], 1)
        return head(h.mean(1)), h

    @torch.no_grad()
    def fn(ids, n, eos=-1):
        past = None
        cur = ids
        out = [ids]
        for _ in range(n):
            logits, past = step(cur, past)
            cur = logits.argmax(-1, keepdim=True)
            out.append(cur)
            if (cur == eos).all():
                break
        return torch.cat(out, 1), past.shape

    return calls(
        fn,
        *[
            lambda n=n, e=e: (torch.tensor([[1, 2, 3]]), n, e)
            for n, e in ((3, -1), (4, -1), (5, -1), (3, 7), (6, 3), (2, -1))
        ],
    )


@program
def scalars_lifted_mixed():
    st = {"t": 1.0}

    def fn(x, a, b, flag=False, name="n"):
        st["t"] *= 0.5
        s = a * b + 1 if a > 2 else a - b
        y = x * s if s else x
        return (
            y,
            s,
            a / max(b, 1e-3),
            f"{name}{a}",
            a == b,
            min(a, b),
            type(s),
            -a,
            a if flag else b,
            x[:a] if isinstance(a, int) and a > 0 else x,
            [a] * 2,
            math.floor(s),
            st["t"],
        )

    vals = [
        (1, 2),
        (2, 3),
        (3, 4),
        (4, 5),
        (5, 5),
        (0, 0),
        (-1, 2),
        (2.0, 3),
        (3.5, 1.5),
        (1.0, 2),
        (True, 2),
        (float("nan"), 1),
        (-0.0, 1),
        (0.0, 1),
        (float("inf"), 2),
        (10**20, 1),
    ]
    return calls(
        lambda x, a, b: (
            lambda: (
                fn(x, a, b) if not (isinstance(a, float) and (a != a or a in (math.inf,))) else (x * a, a * b)
            )
        )(),
        *[lambda a=a, b=b: (normal(4), a, b) for a, b in vals],
        observe=lambda: dict(st),
    )


@program
def global_step_counter_lr():
    st = types.SimpleNamespace(step=0, lr=0.1, hist=[])

    def fn(x):
        st.step += 1
        warm = min(1.0, st.step / 4)
        if st.step % 3 == 0:
            st.hist.append((st.step, warm))
        st.lr = st.lr * 0.9 if st.step > 2 else st.lr
        return x * (st.lr * warm) ** 0.5 + st.step

    return calls(fn, *[lambda: (normal(3),)] * 12, observe=lambda: vars(st))


@program
def loops_with_counts():
    def fn(x, n):
        acc = []
        for i in range(n):
            x = torch.tanh(x) * 0.5 + i
            acc.append(x.sum())
        return x, torch.stack(acc) if acc else None

    return calls(fn, *[lambda n=n: (normal(3), n) for n in (3, 4, 5, 2, 7, 0, 1, 3)])


@program
def loops_matching_bodies():
    w = [normal(3, 3, seed=i) for i in range(6)]

    def fn(x):
        for i in range(40):
            x = torch.relu(x @ w[0]) + 0.1 * x
        for l in w:
            x = x @ l
        n = 0
        while n < 10:
            x = x * 0.9
            n += 1
        return x, n

    return calls(fn, *[lambda: (normal(3),)] * 3)


@program
def tensor_branch_pure():
    def fn(x):
        if x.sum() > 0:
            y = x * 2
        else:
            y = x - 1
        z = y.relu() if (y > 0.5).any() else y.tanh()
        return z

    return calls(fn, *[lambda s=s: (normal(3) * s,) for s in (1, -1, 5, -5, 1, 0)])


@program
def tensor_branch_different_kinds():
    log = []

    def fn(x):
        if x.max() > 1:
            return x * 2, "a"
        if x.min() < -1:
            log.append("neg")
            return {"x": x}
        if torch.isnan(x).any():
            raise ValueError("nan")
        return x.double()

    return calls(
        fn,
        *[
            lambda v=v: (torch.tensor(v),)
            for v in (
                [2.0, 0],
                [-2.0, 0],
                [0.0, 0],
                [float("nan"), 0],
                [2.0, 0],
                [-3.0, 1],
                [float("nan"), 0],
            )
        ],
        observe=lambda: list(log),
    )
