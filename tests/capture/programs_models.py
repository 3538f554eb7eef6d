"""Programs in the style of models: decoder with cache, training steps, recurrent nets, search."""

from __future__ import annotations

import collections
import math

import torch
import torch.nn.functional as F
from capture_world import World, calls, normal, program
from torch import nn


def seeded(make):
    torch.manual_seed(0)
    return make()


class RMS(nn.Module):
    def __init__(s, d):
        super().__init__()
        s.weight = nn.Parameter(torch.ones(d))
        s.eps = 1e-6

    def forward(s, x):
        t = x.dtype
        x = x.to(torch.float32)
        v = x.pow(2).mean(-1, keepdim=True)
        return s.weight * (x * torch.rsqrt(v + s.eps)).to(t)

    def extra_repr(s):
        return f"{tuple(s.weight.shape)}"


def rot(x):
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)


class Rope(nn.Module):
    def __init__(s, d):
        super().__init__()
        s.register_buffer("inv", 1.0 / (10000 ** (torch.arange(0, d, 2).float() / d)), persistent=False)
        s.max = 0
        s.cache = None

    def forward(s, x, pos):
        n = int(pos.max()) + 1
        if s.cache is None or n > s.max:
            s.max = n
            f = torch.outer(torch.arange(n).float(), s.inv)
            e = torch.cat((f, f), -1)
            s.cache = (e.cos(), e.sin())
        c, sn = s.cache
        return c[pos].to(x.dtype), sn[pos].to(x.dtype)


class Cache:
    def __init__(s):
        s.k = {}
        s.v = {}

    def update(s, k, v, i):
        if i in s.k:
            s.k[i] = torch.cat([s.k[i], k], 2)
            s.v[i] = torch.cat([s.v[i], v], 2)
        else:
            s.k[i], s.v[i] = k, v
        return s.k[i], s.v[i]

    @property
    def length(s):
        return s.k[0].shape[2] if s.k else 0


class Attn(nn.Module):
    def __init__(s, d, h, i):
        super().__init__()
        s.h = h
        s.i = i
        s.q = nn.Linear(d, d, bias=False)
        s.kv = nn.Linear(d, 2 * d // 2, bias=False)
        s.o = nn.Linear(d, d, bias=False)
        s.rope = Rope(d // h)
        s.hd = d // h

    def forward(s, x, mask=None, pos=None, cache=None, **kw):
        B, L, _ = x.size()
        q = s.q(x).view(B, L, s.h, s.hd).transpose(1, 2)
        k, v = s.kv(x).view(B, L, 2, -1, s.hd).unbind(2)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        c, sn = s.rope(v, pos)
        c, sn = c.unsqueeze(1), sn.unsqueeze(1)
        q = q * c + rot(q) * sn
        k = k * c + rot(k) * sn
        if cache is not None:
            k, v = cache.update(k, v, s.i)
        r = s.h // k.shape[1]
        k = k.repeat_interleave(r, 1)
        v = v[:, :, None].expand(-1, -1, r, -1, -1).reshape(*k.shape)
        a = q @ k.transpose(-2, -1) / math.sqrt(s.hd)
        if mask is not None:
            a = a + mask[:, :, :, : k.shape[-2]]
        return s.o(
            (F.softmax(a, dim=-1, dtype=torch.float32).to(q.dtype) @ v)
            .transpose(1, 2)
            .contiguous()
            .view(B, L, -1)
        )


class Layer(nn.Module):
    def __init__(s, d, h, i):
        super().__init__()
        s.n1, s.n2 = RMS(d), RMS(d)
        s.a = Attn(d, h, i)
        s.g, s.u, s.d = nn.Linear(d, 2 * d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(s, x, **kw):
        x = x + s.a(s.n1(x), **kw)
        h = s.n2(x)
        return x + s.d(F.silu(s.g(h)) * s.u(h))


@program
def llama_like():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.e = nn.Embedding(10, 8, padding_idx=0)
            s.ls = nn.ModuleList([Layer(8, 2, i) for i in range(2)])
            s.n = RMS(8)
            s.head = nn.Linear(8, 10, bias=False)
            s.head.weight = s.e.weight

        def forward(s, ids, cache=None, labels=None):
            past = cache.length if cache is not None else 0
            x = s.e(ids)
            L = ids.shape[1]
            pos = torch.arange(past, past + L, device=ids.device)[None]
            mask = (
                torch.full((L, past + L), torch.finfo(x.dtype).min, device=x.device).triu(past + 1)[
                    None, None
                ]
                if L > 1
                else None
            )
            hs = ()
            for l in s.ls:
                hs += (x,)
                x = l(x, mask=mask, pos=pos, cache=cache)
            lg = s.head(s.n(x))
            out = dict(logits=lg, hidden=hs, cache=cache)
            if labels is not None:
                out["loss"] = F.cross_entropy(
                    lg[:, :-1].reshape(-1, 10), labels[:, 1:].reshape(-1), ignore_index=0
                )
            return out

    m = seeded(M)
    c = Cache()
    ids = lambda *s, k=0: torch.randint(1, 10, s, generator=torch.Generator().manual_seed(k))
    return calls(
        m,
        lambda: (ids(1, 4), c),
        lambda: (ids(1, 1), c),
        lambda: (ids(1, 1, k=1), c),
        lambda: (ids(1, 1, k=2), c),
        lambda: (ids(2, 5), None, ids(2, 5)),
        lambda: (ids(2, 5), None, ids(2, 5, k=3)),
        observe=lambda: c.length,
    )


@program
def train_steps():
    torch.manual_seed(0)
    m = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(16, 3),
    )
    o = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)

    def fn(x, y):
        m.train()
        o.zero_grad(set_to_none=True)
        l = F.cross_entropy(m(x), y)
        l.backward()
        nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        o.step()
        return l.detach()

    return World(
        fn,
        [(lambda: torch.manual_seed(3), lambda: (normal(2, 1, 6, 6), torch.tensor([0, 2])))]
        + [(None, lambda: (normal(2, 1, 6, 6), torch.tensor([0, 2])))] * 3,
        observe=lambda: [p.detach().clone() for p in m.parameters()],
    )


@program
def rnns():
    torch.manual_seed(0)
    g = nn.GRU(3, 4, 2, bidirectional=True)
    c = nn.LSTMCell(3, 4)

    def fn(x):
        o, h = g(x)
        s = None
        outs = []
        for t in range(x.size(0)):
            s = c(x[t], s)
            outs.append(s[0])
        return o, h, torch.stack(outs)

    return calls(fn, lambda: (normal(3, 2, 3),), lambda: (normal(5, 2, 3),), lambda: (normal(3, 2, 3),))


@program
def containers_of_modules():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.d = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.ReLU()})
            s.p = nn.ParameterList([nn.Parameter(torch.ones(3) * i) for i in range(3)])
            s.pd = nn.ParameterDict({"z": nn.Parameter(torch.ones(3))})
            s.act = F.gelu

        def forward(s, x, order=("a", "b")):
            for k in order:
                x = s.d[k](x)
            for i, p in enumerate(s.p):
                x = x + p * i
            return (
                s.act(x) * s.pd["z"],
                len(s.d),
                [n for n, _ in s.named_modules()],
                "a" in s.d,
                s.d["a"].weight.shape,
            )

    m = seeded(M)
    return calls(m, lambda: (normal(2, 3),), lambda: (normal(2, 3), ("b", "a")), lambda: (normal(2, 3),))


@program
def functional_transforms():
    def loss(w, x):
        return (w * x).sum() ** 2

    def fn(w, x):
        return (
            torch.func.grad(loss)(w, x),
            torch.func.vmap(lambda a: a * 2)(x),
            torch.autograd.grad(loss(w.requires_grad_(), x), w)[0],
        )

    return calls(fn, lambda: (normal(3), normal(3)), lambda: (normal(3), normal(3, seed=1)))


@program
def checkpointing():
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    l = nn.Linear(3, 3)

    def fn(x):
        y = checkpoint(l, x, use_reentrant=False)
        y.sum().backward()
        g = l.weight.grad.clone()
        l.zero_grad()
        return y.detach(), g

    return calls(fn, lambda: (normal(2, 3),), lambda: (normal(2, 3, seed=1),))


@program
def ops_mix():
    def fn(x):
        v, i = x.topk(2)
        a = torch.einsum("ij,kj->ik", x, x)
        b = x.scatter(1, i, 0.0)
        c = torch.where(x > 0, x, -x).cumsum(1)
        d = F.interpolate(x[None, None], scale_factor=2)[0, 0]
        e = torch.gather(x, 1, i)
        f = x.argmax(-1)
        g = F.one_hot(f, x.size(1))
        h = x.sort(descending=True)
        q = x.chunk(2, 1)
        r = x.max(1)
        u = torch.stack([t for t in x.unbind()]).std()
        w = torch.meshgrid(x[0], x[1], indexing="ij")
        return (
            v,
            a,
            b,
            c,
            d,
            e,
            f,
            g,
            h.values,
            q[0],
            r.indices,
            r[0],
            u,
            w[0],
            x.amax(),
            torch.cat(q, 1),
            x.split([1, 3], 1)[1],
            x.var_mean(0),
            torch.linalg.norm(x),
            F.normalize(x),
            F.layer_norm(x, x.shape[-1:]),
            x.roll(1),
            x.flip(0),
            torch.triu(x),
            x.masked_fill(x > 0, 1),
            x.T @ x,
            x.mT,
            x[..., None],
            x[None],
            x[:, [0, 2]],
            x[-1],
            x.clamp_(min=-1),
        )

    return calls(fn, lambda: (normal(3, 4),), lambda: (normal(3, 4, seed=1),), lambda: (normal(5, 4),))


@program
def amp_and_dtypes():
    torch.manual_seed(0)
    l = nn.Linear(4, 4)

    def fn(x, dt):
        with torch.autocast("cpu", dtype=dt):
            y = l(x)
            z = y.float().softmax(-1)
        return (
            y.dtype,
            z,
            x.half().dtype,
            x.to(dt).sum(),
            y.type_as(x),
            torch.result_type(x, y),
            x.double().dtype.itemsize,
            torch.finfo(dt).eps,
        )

    return calls(
        fn,
        lambda: (normal(2, 4), torch.bfloat16),
        lambda: (normal(2, 4), torch.bfloat16),
        lambda: (normal(2, 4), torch.float16),
    )


@program
def module_apply_and_state():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def init(k):
        if isinstance(k, nn.Linear):
            nn.init.ones_(k.weight)
            k.bias.data.fill_(0.5)

    def fn(x):
        m.apply(init)
        sd = m.state_dict()
        sd["0.bias"] = sd["0.bias"] * 2
        m.load_state_dict(sd)
        return (
            m(x),
            sorted(sd),
            sum(p.numel() for p in m.parameters()),
            next(m.parameters()).device,
            m[0].bias.tolist(),
        )

    return calls(
        fn,
        lambda: (normal(2, 2),),
        lambda: (normal(2, 2, seed=1),),
        observe=lambda: [p.detach().clone() for p in m.parameters()],
    )


@program
def ema_and_momentum():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.register_buffer("avg", torch.zeros(3))
            s.steps = 0
            s.hist = collections.deque(maxlen=2)

        def forward(s, x):
            s.steps += 1
            m = min(0.9, s.steps / (s.steps + 10))
            s.avg.mul_(m).add_(x.detach().mean(0), alpha=1 - m)
            s.hist.append(float(m))
            if s.steps % 2 == 0:
                s.avg = s.avg.clone()
            return x - s.avg, len(s.hist)

    m = M()
    return calls(
        m,
        *[(lambda i=i: (normal(2, 3, seed=i),)) for i in range(7)],
        observe=lambda: (m.avg.clone(), m.steps, list(m.hist)),
    )


@program
def beam_search():
    torch.manual_seed(0)
    e = nn.Embedding(6, 4)
    l = nn.Linear(4, 6)

    @torch.no_grad()
    def fn(start, n):
        beams = [([start], 0.0)]
        for _ in range(n):
            c = []
            for s, sc in beams:
                lp = F.log_softmax(l(e(torch.tensor([s[-1]]))), -1)[0]
                v, i = lp.topk(2)
                for a, b in zip(v.tolist(), i.tolist()):
                    c.append((s + [b], sc + a))
            beams = sorted(c, key=lambda t: -t[1])[:2]
            if all(s[-1] == 0 for s, _ in beams):
                break
        return beams

    return calls(fn, lambda: (1, 3), lambda: (2, 2), lambda: (1, 3))


@program
def mixed_device_checks():
    def fn(x, dev=None):
        dev = torch.device(dev or x.device)
        y = x.to(dev, non_blocking=True)
        if torch.cuda.is_available() and y.is_cuda:
            y = y + 1
        return (
            y.to("cpu"),
            str(dev),
            dev.type == "cpu",
            y.device == x.device,
            x.is_floating_point(),
            torch.is_tensor(x),
            x.new_tensor([1, 2]),
            torch.tensor(x.shape),
            torch.tensor([[1.0, 2], [3, 4]]),
            torch.ones_like(x, dtype=torch.int64),
        )

    return calls(fn, lambda: (normal(3),), lambda: (normal(3), "cpu"), lambda: (normal(3),))
