"""Chains that were slower than torch.compile when they were first met, and scans."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.drawn_cases import bf, case, f, h, i


@case(
    "neighbours weighted, summed into their nodes",
    f(20000, 64),
    i(20000, 100000),
    i(20000, 100000),
    f(100000),
)
def messages(x: Any, source: Any, target: Any, weight: Any) -> Any:
    return torch.zeros_like(x).index_add(0, target, x[source] * weight[:, None])


@case("edges scattered into degrees and means", f(160000, 32), i(20000, 160000))
def scatter_means(e: Any, target: Any) -> Any:
    total = torch.zeros(20000, 32, device=e.device, dtype=e.dtype).scatter_add(
        0, target[:, None].expand_as(e), e
    )
    count = torch.zeros(20000, device=e.device, dtype=e.dtype).scatter_add(
        0, target, torch.ones_like(e[:, 0])
    )
    return total / count.clamp(min=1)[:, None]


@case("index_put accumulated into a grid", i(512, 200000), i(512, 200000), f(200000))
def splat(y: Any, x: Any, v: Any) -> Any:
    grid = torch.zeros(512, 512, device=v.device, dtype=v.dtype)
    return grid.index_put((y, x), v, accumulate=True)


@case("scatter_reduce maxima of segments", f(100000, 32), i(10000, 100000))
def segment_max(e: Any, target: Any) -> Any:
    base = torch.full((10000, 32), -1e30, device=e.device, dtype=e.dtype)
    return base.scatter_reduce(0, target[:, None].expand_as(e), e, "amax")


@case("histogram of bytes by bincount", i(256, 4, 1 << 20))
def histogram(x: Any) -> Any:
    return (
        torch.bincount(x.reshape(-1), minlength=256)
        if False
        else torch.zeros(4, 256, dtype=torch.int64, device=x.device).scatter_add(1, x, torch.ones_like(x))
    )


@case("gradient of an embedding", i(32000, 8, 1024), f(8, 1024, 256))
def embedding_gradient(ids: Any, g: Any) -> Any:
    return torch.zeros(32000, 256, device=g.device, dtype=g.dtype).index_add(
        0, ids.reshape(-1), g.reshape(-1, 256)
    )


@case("integral of pictures", f(8, 3, 1024, 1200))
def integral(x: Any) -> Any:
    return x.cumsum(-1).cumsum(-2)


@case("shallow water, lax friedrichs", f(1024, 1024, positive=True), f(1024, 1024), f(1024, 1024))
def shallow_water(d: Any, u: Any, v: Any) -> Any:
    g, dt = 9.81, 0.01
    d = d + 1
    q = torch.stack([d, d * u, d * v])
    fx = torch.stack([d * u, d * u * u + 0.5 * g * d * d, d * u * v])
    fy = torch.stack([d * v, d * u * v, d * v * v + 0.5 * g * d * d])
    left, right = torch.roll(q, 1, 2), torch.roll(q, -1, 2)
    up, down = torch.roll(q, 1, 1), torch.roll(q, -1, 1)
    mean = (left + right + up + down) * 0.25
    dx = torch.roll(fx, -1, 2) - torch.roll(fx, 1, 2)
    dy = torch.roll(fy, -1, 1) - torch.roll(fy, 1, 1)
    return mean - 0.5 * dt * (dx + dy)


@case(
    "colours along rays by their transmittance",
    f(8192, 128, positive=True),
    f(8192, 128, 3),
    f(8192, 128, positive=True),
)
def rays(density: Any, colour: Any, step: Any) -> Any:
    alpha = 1 - torch.exp(-density * step)
    through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
    weight = alpha * through
    return (weight[..., None] * torch.sigmoid(colour)).sum(1), weight.sum(1)


@case("fp8 of blocks of 128 by 128, scales", f(4096, 3584, dtype=bf))
def blocks(x: Any) -> Any:
    tiles = x.view(32, 128, 28, 128).float()
    scale = tiles.abs().amax((1, 3), keepdim=True).clamp(min=1e-4) / 448
    return (tiles / scale).to(torch.float8_e4m3fn).view(4096, 3584), scale.view(32, 28)


@case("mu law and back, its error", f(32, 81920, scale=0.3))
def mu_law(x: Any) -> Any:
    mu = 255.0
    x = x.clamp(-1, 1)
    code = ((x.sign() * torch.log1p(mu * x.abs()) / 5.545177444479562 + 1) / 2 * mu + 0.5).to(torch.int64)
    y = code.to(x.dtype) / mu * 2 - 1
    back = y.sign() * (torch.exp(y.abs() * 5.545177444479562) - 1) / mu
    return back, (back - x).square().mean(-1)


@case("means and deviations of columns, absent left out", f(50000, 128))
def absent(x: Any) -> Any:
    there = x > -1
    count = there.sum(0).clamp(min=1)
    mean = torch.where(there, x, 0).sum(0) / count
    var = torch.where(there, (x - mean).square(), 0).sum(0) / (count - 1).clamp(min=1)
    return torch.where(there, (x - mean) / (var + 1e-6).sqrt(), 0)


@case("gravity of 2048 bodies", f(2048, 3), f(2048, positive=True))
def gravity(p: Any, mass: Any) -> Any:
    d = p[None] - p[:, None]
    inverse = (d.square().sum(-1) + 1e-2).rsqrt()
    return (d * (mass[None] * inverse**3)[..., None]).sum(1)


@case(
    "group norm of channels last, silu",
    f(8, 320, 64, 64, dtype=h, last=True),
    f(320, dtype=h),
    f(320, dtype=h),
)
def group_norm_last(x: Any, w: Any, b: Any) -> Any:
    return F.silu(F.group_norm(x, 32, w, b))


@case("mixture of eight gaussians, log likelihood", f(65536, 8), f(65536, 8), f(65536, 8), f(65536))
def gaussians(logit: Any, mean: Any, log_scale: Any, x: Any) -> Any:
    z = (x[:, None] - mean) * torch.exp(-log_scale)
    each = torch.log_softmax(logit, -1) - 0.5 * z * z - log_scale - 0.9189385
    return torch.logsumexp(each, -1)


@case("vicreg: deviations of columns, invariance", f(4096, 2048), f(4096, 2048))
def vicreg(a: Any, b: Any) -> Any:
    invariance = F.mse_loss(a, b)
    std_a = (a.var(0) + 1e-4).sqrt()
    std_b = (b.var(0) + 1e-4).sqrt()
    return invariance + F.relu(1 - std_a).mean() + F.relu(1 - std_b).mean()


@case("eight best of 64, others zero, normalized", f(8192, 64))
def eight_best(x: Any) -> Any:
    p = torch.softmax(x, -1)
    v, at = p.topk(8, -1)
    return torch.zeros_like(p).scatter(1, at, v / v.sum(-1, keepdim=True))


@case(
    "batch norm while training, running statistics, relu",
    f(32, 96, 32, 40),
    f(96),
    f(96),
    f(96),
    f(96, positive=True),
)
def batch_norm(x: Any, w: Any, b: Any, mean: Any, var: Any) -> Any:
    m = x.mean((0, 2, 3))
    v = x.var((0, 2, 3), unbiased=False)
    y = (x - m[:, None, None]) * (v + 1e-5).rsqrt()[:, None, None] * w[:, None, None] + b[:, None, None]
    return y.relu(), mean * 0.9 + m * 0.1, var * 0.9 + v * 0.1


@case(
    "gated linear recurrence's gates, log decay",
    f(2048, 2048, dtype=h),
    f(2048, 2048, dtype=h),
    f(2048, 2048, dtype=h),
    f(2048),
)
def gates(x: Any, r: Any, k: Any, a: Any) -> Any:
    log = -8.0 * F.softplus(a) * torch.sigmoid(r.float())
    decay = torch.exp(log)
    return decay.half(), (torch.sqrt(1 - torch.exp(2 * log)) * torch.sigmoid(k.float()) * x.float()).half()


@case("hue turned through hsv", f(8, 3, 512, 256, positive=True))
def hue(x: Any) -> Any:
    r, g, b = x.unbind(1)
    top, low = x.amax(1), x.amin(1)
    span = top - low + 1e-8
    hh = (
        torch.where(
            top == r, (g - b) / span % 6, torch.where(top == g, (b - r) / span + 2, (r - g) / span + 4)
        )
        / 6
    )
    hh = (hh + 0.1) % 1.0
    s, v = span / (top + 1e-8), top
    k = (torch.tensor([5.0, 3.0, 1.0], device=x.device, dtype=x.dtype)[:, None, None] + hh[:, None] * 6) % 6
    return v[:, None] - (v * s)[:, None] * torch.minimum(k, 4 - k).clamp(0, 1)


@case("unsharp mask of three by three", f(4, 3, 723, 723))
def unsharp(x: Any) -> Any:
    w = torch.tensor([1.0, 2.0, 1.0], device=x.device, dtype=x.dtype)
    w = (w[:, None] * w[None] / 16).expand(3, 1, 3, 3)
    blurred = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), w, groups=3)
    return (x + 0.7 * (x - blurred)).clamp(-3, 3)


@case(
    "pixels unshuffled by two, then norm of channels, first",
    f(16, 24, 112, 112, dtype=h),
    f(96, dtype=h),
    f(96, dtype=h),
)
def unshuffled(x: Any, w: Any, b: Any) -> Any:
    y = F.pixel_unshuffle(x, 2)
    u = y.mean(1, keepdim=True)
    s = (y - u).pow(2).mean(1, keepdim=True)
    return (y - u) / torch.sqrt(s + 1e-6) * w[:, None, None] + b[:, None, None]


@case("derivative and its zero crossings, prime length", f(64, 100003))
def derivative(x: Any) -> Any:
    d = x[:, 1:] - x[:, :-1]
    return d, ((d[:, 1:] * d[:, :-1]) < 0).sum(-1)


@case(
    "class token joined, positions added",
    f(64, 196, 384, dtype=h),
    f(1, 1, 384, dtype=h),
    f(1, 197, 384, dtype=h),
)
def class_token(x: Any, token: Any, position: Any) -> Any:
    return torch.cat([token.expand(64, -1, -1), x], 1) + position


@case("peaks of sound that is joined", f(16, 48000), f(16, 48000))
def peaks(a: Any, b: Any) -> Any:
    x = torch.cat([a, b], 1)
    top = x.abs().amax(1, keepdim=True)
    return x / (top + 1e-8)


@case("rwkv token shift, lerp", f(8, 1024, 1024, dtype=h), f(5, 1024, dtype=h))
def rwkv(x: Any, mix: Any) -> Any:
    before = F.pad(x, (0, 0, 1, -1))
    return tuple(torch.lerp(x, before, mix[k]) for k in range(5))


@case("norm of channels, first", f(16, 96, 56, 56, dtype=h), f(96, dtype=h), f(96, dtype=h))
def channel_norm(x: Any, w: Any, b: Any) -> Any:
    u = x.mean(1, keepdim=True)
    s = (x - u).pow(2).mean(1, keepdim=True)
    return w[:, None, None] * ((x - u) / torch.sqrt(s + 1e-6)) + b[:, None, None]


@case("cumulative sums along an inner axis", f(16, 512, 512))
def cumulative_inner(x: Any) -> Any:
    return x.cumsum(1)


# ---- state spaces
@case(
    "discretized state space: decays and inputs",
    f(4, 512, 512, dtype=h),
    f(512, 16),
    f(4, 512, 16, dtype=h),
    f(4, 512, 512, dtype=h),
)
def discretize(delta: Any, a: Any, b: Any, x: Any) -> Any:
    d = F.softplus(delta.float())[..., None]
    return torch.exp(-d * torch.exp(a)).half(), (d * b.float()[:, :, None] * x.float()[..., None]).half()


@case("segment sums of log decays, exponentials", f(16, 32, 64, 64))
def segsum(a: Any) -> Any:
    c = a[..., 0].cumsum(-1)
    d = c[..., :, None] - c[..., None, :]
    low = torch.ones(64, 64, device=a.device, dtype=torch.bool).tril()
    return torch.exp(d.masked_fill(~low, -1e9))


@case("linear recurrence by cumulative products", f(64, 512, 256), f(64, 512, 256))
def recurrence(a: Any, x: Any) -> Any:
    log = F.logsigmoid(a + 3).cumsum(1)
    return torch.exp(log) * (x * torch.exp(-log)).cumsum(1)


@case(
    "gated deltanet: keys normed, decays, betas",
    f(8, 1024, 8, 64, dtype=bf),
    f(8, 1024, 8, dtype=bf),
    f(8),
    f(8),
)
def delta_net(k: Any, a: Any, log: Any, bias: Any) -> Any:
    k = k.float()
    k = (k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(bf)
    return k, -torch.exp(log) * F.softplus(a.float() + bias)
