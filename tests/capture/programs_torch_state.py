"""The state of torch and values read from tensors in all places."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from capture_world import World, calls, normal, program
from torch import nn


def awkward(log):
    class P:
        @property
        def v(s):
            return s.t.sum().item()

        def __init__(s, t):
            s.t = t
            s.n = float(t[0])

        def __len__(s):
            return int(abs(s.t[0])) + 1

        def __getitem__(s, i):
            return s.t[i].item()

        def __iter__(s):
            for v in s.t:
                yield v.item()

        def __contains__(s, o):
            return bool((s.t == o).any())

        def __add__(s, o):
            return P(s.t + o.t.sum().item())

        def __eq__(s, o):
            return bool((s.t == o.t).all())

        def __hash__(s):
            return 1

        def __bool__(s):
            return bool(s.t[0] > 0)

        def __format__(s, f):
            return f"{s.t[0].item():.2f}"

        def __call__(s, x):
            return x * s.t[1].item()

        def __enter__(s):
            return s.t[0].item()

        def __exit__(s, *a):
            log.append(s.t.sum().item())

        def __getattr__(s, n):
            if n.startswith("__"):
                raise AttributeError(n)
            return n + str(s.t[2].item())

        def __setitem__(s, i, v):
            s.t[i] = v + s.t[0].item()

        def __lt__(s, o):
            return s.n < o.n

    return P


@program
def saved_tensor_hooks():
    log = []

    def pack(t):
        log.append("p")
        return t

    def unpack(t):
        log.append("u")
        return t

    def fn(x):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = (x * x).sum()
        y.backward()
        return y

    return calls(fn, *[lambda: (normal(3).requires_grad_(),)] * 3, observe=lambda: list(log))


@program
def tensor_hooks():
    log = []

    def fn(x):
        y = x * 2
        y.register_hook(lambda g: log.append("h"))
        x.register_hook(lambda g: g * 10)
        y.retain_grad()
        (y * y).sum().backward()
        return y.grad, x.grad

    return calls(fn, *[lambda: (normal(3).requires_grad_(),)] * 3, observe=lambda: list(log))


@program
def module_hooks_all():
    log = []
    m = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    handles = []
    A = lambda: (normal(2, 3),)

    def pre():
        handles.append(m[0].register_forward_pre_hook(lambda mod, a: (log.append("pre"), (a[0] + 1,))[1]))

    def post():
        handles.append(m.register_forward_hook(lambda mod, a, o: log.append("post") or o * 2))

    def kw():
        handles.append(
            m.register_forward_hook(lambda mod, a, k, o: log.append("kw"), with_kwargs=True, always_call=True)
        )

    def bw():
        handles.append(m.register_full_backward_hook(lambda mod, gi, go: log.append("bw")))

    def glob():
        handles.append(
            nn.modules.module.register_module_forward_hook(lambda mod, a, o: log.append(type(mod).__name__))
        )

    def rm():
        handles.pop().remove()

    def fn(x):
        y = m(x)
        y.sum().backward()
        return y

    return World(
        fn,
        [
            (None, A),
            (pre, A),
            (post, A),
            (None, A),
            (kw, A),
            (bw, A),
            (None, A),
            (rm, A),
            (rm, A),
            (glob, A),
            (None, A),
            (rm, A),
            (rm, A),
            (rm, A),
            (None, A),
        ],
        observe=lambda: list(log),
    )


@program
def module_state_updates():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.register_buffer("ema", torch.zeros(3))
            s.register_buffer("none", None)
            s.steps = 0
            s.w = nn.Parameter(torch.ones(3))
            s.hist = []
            s.cfg = {"k": 1}

        def forward(s, x):
            s.steps += 1
            s.ema = s.ema * 0.9 + x * 0.1
            s.ema.mul_(1.5)
            if s.none is None and s.steps > 1:
                s.none = x.clone()
            s.hist.append(s.steps)
            s.cfg["k"] *= 2
            if s.steps == 3:
                s.register_buffer("late", torch.ones(3))
            if s.steps == 4:
                del s.late
            if s.training:
                s.tr = True
            return x * s.w * s.steps + s.ema + (0 if s.none is None else s.none)

    m = M()
    A = lambda: (normal(3),)
    return World(
        m,
        [
            (None, A),
            (None, A),
            (m.eval, A),
            (None, A),
            (m.train, A),
            (lambda: m.double(), lambda: (normal(3).double(),)),
            (lambda: m.requires_grad_(False), lambda: (normal(3).double(),)),
        ],
        observe=lambda: (m.steps, m.ema.clone(), list(m.hist), dict(m.cfg), sorted(m.state_dict())),
    )


@program
def rng_states():
    def fn(x, k):
        if k == 0:
            torch.manual_seed(3)
        a = torch.rand(3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            b = torch.rand(2)
        s = torch.get_rng_state()
        c = torch.randn(2)
        torch.set_rng_state(s)
        d = torch.randn(2)
        g = torch.Generator().manual_seed(5)
        e = torch.randn(2, generator=g)
        r = random.Random(1).random()
        return (
            a + x,
            b,
            c,
            d,
            e,
            r,
            torch.initial_seed(),
            F.dropout(x, 0.5),
            torch.randperm(4),
            torch.bernoulli(torch.full((3,), 0.5)),
            x.new_empty(3).uniform_(),
            torch.multinomial(torch.ones(4), 2),
        )

    return World(
        fn,
        [
            (lambda: torch.manual_seed(0), lambda: (normal(3), 1)),
            (None, lambda: (normal(3), 1)),
            (None, lambda: (normal(3), 0)),
            (None, lambda: (normal(3), 1)),
            (lambda: torch.manual_seed(0), lambda: (normal(3), 1)),
        ],
        observe=lambda: torch.get_rng_state()[:50].clone(),
    )


@program
def weird_constants():
    def fn(x):
        return (
            x * float("nan"),
            x.clamp(max=float("inf")),
            x - float("-inf"),
            torch.full((2,), -0.0),
            x * complex(1, -0.0),
            x * 1e300,
            x + (1 << 40),
            x[..., None],
            x[None],
            x[True],
            x[[0, 1]],
            x[-1:0:1],
            x[torch.tensor([0, 2])],
            x[np.array([1, 0])],
            x[x > 0],
            x * np.float32(2),
            np.float64(3) * x,
            x * np.int64(2),
            x ** np.float64(2),
            torch.tensor([1, 2.5]),
            torch.tensor(np.arange(3)),
            torch.as_tensor([x.dim()]),
            x.to("cpu", torch.float16),
            torch.zeros((2,), dtype=torch.int8),
            x.masked_fill(x > 0, -float("inf")),
            torch.where(x > 0, x, 0.0),
            torch.where(x > 0, 1, 2).dtype,
            x.sum(dtype=torch.float64),
            x.view(torch.int32),
            x.expand(2, -1),
        )

    return calls(fn, *[lambda: (normal(3),)] * 3)


@program
def return_types_whole():
    def fn(x):
        m = torch.max(x, 0)
        s = x.sort(descending=True)
        v, i = x.topk(2)
        q = torch.linalg.svd(x)
        return (
            m,
            m.values,
            type(m).__name__,
            s,
            v,
            i,
            torch.std_mean(x),
            x.split(1),
            x.unbind(),
            torch.meshgrid(x[0], x[1], indexing="ij"),
            x.aminmax(),
            torch.frexp(x),
            m._fields if hasattr(m, "_fields") else len(m),
            x.chunk(2, 1),
        )

    return calls(fn, *[lambda: (normal(3, 3),)] * 3)


@program
def item_branches_nested():
    log = []

    class Ctx:
        def __enter__(s):
            log.append("in")
            return s

        def __exit__(s, *a):
            log.append("out")

    def sub(x, k):
        with Ctx():
            for i in range(3):
                try:
                    if x.sum().item() > k + i:
                        x = x - 1
                    elif bool((x < -3).any()):
                        raise ValueError("low")
                    else:
                        x = x + 0.5
                except ValueError:
                    return [float(v) for v in x]
                finally:
                    log.append(i)
        return x

    def fn(x, k):
        f = lambda y: sub(y, k)
        a = f(x)
        return [a, int(x.argmax()), x.tolist(), max(x.tolist()), {int(i): float(v) for i, v in enumerate(x)}]

    return calls(
        fn,
        *[lambda k=k, m=m: (normal(3, seed=k) * m, k) for k, m in ((0, 1), (1, 5), (2, -9), (0, 1), (3, 8))],
        observe=lambda: list(log),
    )


@program
def split_within_everything():
    log = []
    P = awkward(log)

    def fn(x):
        p = P(x.clone())
        q = p + P(x * 2)
        p[1] = 3.0
        with p as w:
            z = x * w
        return (
            p.v,
            len(p),
            p[0],
            list(p),
            3.0 in p,
            q.t,
            p == q,
            bool(p),
            f"{p}",
            p(x),
            z,
            p.foo,
            sorted([p, q])[0].n,
            [*map(p, [x, x])],
            [y for y in p if y > 0],
            max(p, q).n,
            p if p else q is None,
            {p: 1}[p],
            not p,
            p and 1,
            any(v > 0 for v in p),
            (lambda **k: k["a"].v)(a=p),
        )

    return calls(fn, *[lambda k=k: (normal(3, seed=k),) for k in range(4)], observe=lambda: list(log))


@program
def autograd_inside_things():
    w = nn.Parameter(torch.ones(3))
    opt = torch.optim.SGD([w], lr=0.1, momentum=0.9)

    def fn(x, k):
        opt.zero_grad(set_to_none=bool(k % 2))
        loss = ((w * x) ** 2).sum()
        loss.backward(retain_graph=k > 1)
        nn.utils.clip_grad_norm_([w], 0.5)
        opt.step()
        (g,) = torch.autograd.grad((w * x).sum(), w, create_graph=True)
        return loss.detach(), g, w.grad.clone()

    return calls(fn, *[lambda k=k: (normal(3), k) for k in range(4)], observe=lambda: w.detach().clone())


@program
def double_backward_and_function():
    class Sq(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, k):
            ctx.save_for_backward(x)
            ctx.k = k
            return x * x * k

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * 2 * x * ctx.k, None

    def fn(x, k):
        y = Sq.apply(x, k)
        (g,) = torch.autograd.grad(y.sum(), x)
        return y, g, y.grad_fn is not None, y.requires_grad, y.is_leaf

    return calls(fn, *[lambda k=k: (normal(3).requires_grad_(), k) for k in (2, 3, 2)])


@program
def tensor_subclass_args():
    log = []

    class T(torch.Tensor):
        @classmethod
        def __torch_function__(cls, f, t, a=(), k=None):
            log.append(getattr(f, "__name__", "?"))
            return super().__torch_function__(f, t, a, k or {})

    class Par(nn.Parameter):
        pass

    pp = Par(torch.ones(3))

    def fn(x):
        return (x + 1).sum(), x * pp, isinstance(x, T), type(x * 2).__name__

    return calls(
        fn,
        lambda: (normal(3),),
        lambda: (normal(3).as_subclass(T),),
        lambda: (nn.Parameter(normal(3)),),
        lambda: (normal(3).as_subclass(T),),
        lambda: (normal(3),),
        observe=lambda: list(log),
    )


@program
def numpy_interplay():
    shared = np.zeros(3, dtype=np.float32)

    def fn(x):
        a = x.numpy()
        a += 1
        t = torch.from_numpy(shared)
        t.add_(x)
        b = np.zeros(3)
        b[1] = x[0].item()
        b *= 2
        c = torch.from_numpy(b) * 2
        return x, t, b, c, np.asarray(x).sum(), a is a, float(np.mean(a)), x.numpy().dtype, np.dot(a, a)

    return calls(fn, *[lambda: (normal(3),)] * 3, observe=lambda: shared.copy())


@program
def strided_channels_last():
    c = nn.Conv2d(3, 4, 3)
    return calls(
        lambda x: (c(x), c(x).is_contiguous(memory_format=torch.channels_last), x.stride()),
        lambda: (normal(1, 3, 5, 5),),
        lambda: (normal(1, 3, 5, 5).to(memory_format=torch.channels_last),),
        lambda: (normal(1, 3, 5, 5)[..., ::1],),
        lambda: (normal(1, 3, 5, 10)[..., ::2],),
    )
