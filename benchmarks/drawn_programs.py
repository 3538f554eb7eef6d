"""Chains of graph networks, physics, sound, losses, sampling, optimisers and pictures."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.drawn_cases import bf, case, f, h, i, m


# ---- graph networks
@case("gcn: degrees' square roots, messages summed, relu", f(10000, 128), i(10000, 80000), i(10000, 80000))
def gcn(x: Any, s: Any, t: Any) -> Any:
    degree = torch.zeros(10000, device=x.device, dtype=x.dtype).index_add(
        0, t, torch.ones_like(t, dtype=x.dtype)
    )
    norm = (degree + 1).rsqrt()
    return F.relu(
        torch.zeros_like(x).index_add(0, t, x[s] * (norm[s] * norm[t])[:, None]) + x * norm.square()[:, None]
    )


@case("gat: softmax over the edges of a node", f(60000, 4), i(8000, 60000))
def gat(score: Any, t: Any) -> Any:
    at = t[:, None].expand_as(score)
    top = torch.full((8000, 4), -1e30, device=score.device, dtype=score.dtype).scatter_reduce(
        0, at, score, "amax"
    )
    e = torch.exp(score - top[t])
    total = torch.zeros(8000, 4, device=score.device, dtype=score.dtype).scatter_add(0, at, e)
    return e / total[t]


@case("radial basis with a cosine cutoff of edges", f(20000, 3), i(20000, 120000), i(20000, 120000))
def radial(p: Any, s: Any, t: Any) -> Any:
    d = (p[s] - p[t]).norm(dim=-1)
    centre = torch.linspace(0, 5, 16, device=p.device, dtype=p.dtype)
    cut = 0.5 * (torch.cos(d * math.pi / 5) + 1) * (d < 5)
    return torch.exp(-4 * (d[:, None] - centre).square()) * cut[:, None]


@case("pair norm of nodes", f(30000, 64))
def pair_norm(x: Any) -> Any:
    x = x - x.mean(0)
    return x / (1e-6 + x.square().sum(1).mean()).sqrt()


@case("readout of graphs: sums, maxima of sorted batches", f(32768, 96), i(256, 32768))
def readout(x: Any, batch: Any) -> Any:
    total = torch.zeros(256, 96, device=x.device, dtype=x.dtype).index_add(0, batch, x)
    top = torch.full((256, 96), -1e30, device=x.device, dtype=x.dtype).scatter_reduce(
        0, batch[:, None].expand_as(x), x, "amax"
    )
    return torch.cat([total, top], 1)


# ---- physics
@case("heat equation, five points, fixed borders", f(8, 1024, 1024))
def heat(t: Any) -> Any:
    inner = t[:, 1:-1, 1:-1]
    lap = t[:, 2:, 1:-1] + t[:, :-2, 1:-1] + t[:, 1:-1, 2:] + t[:, 1:-1, :-2] - 4 * inner
    return F.pad(inner + 0.1 * lap, (1, 1, 1, 1))


@case("wave equation of three axes, periodic", f(160, 160, 160), f(160, 160, 160))
def wave(u: Any, before: Any) -> Any:
    lap = sum(torch.roll(u, k, a) for a in range(3) for k in (1, -1)) - 6 * u
    return 2 * u - before + 0.1 * lap


@case("lattice boltzmann d2q9: collide", f(9, 512, 1024, positive=True))
def lattice(p: Any) -> Any:
    w = torch.tensor([4 / 9] + [1 / 9] * 4 + [1 / 36] * 4, device=p.device, dtype=p.dtype)
    cx = torch.tensor([0.0, 1, 0, -1, 0, 1, -1, -1, 1], device=p.device, dtype=p.dtype)
    cy = torch.tensor([0.0, 0, 1, 0, -1, 1, 1, -1, -1], device=p.device, dtype=p.dtype)
    rho = p.sum(0)
    ux, uy = (p * cx[:, None, None]).sum(0) / rho, (p * cy[:, None, None]).sum(0) / rho
    cu = 3 * (cx[:, None, None] * ux + cy[:, None, None] * uy)
    eq = rho * w[:, None, None] * (1 + cu + 0.5 * cu * cu - 1.5 * (ux * ux + uy * uy))
    return p - 0.6 * (p - eq)


@case("burgers with upwind differences", f(512, 8192))
def burgers(u: Any) -> Any:
    left = u - torch.roll(u, 1, 1)
    right = torch.roll(u, -1, 1) - u
    return u - 0.01 * torch.where(u > 0, u * left, u * right)


@case("boris push of charged particles", f(500000, 3), f(500000, 3), f(500000, 3), f(500000, 3))
def boris(x: Any, v: Any, e: Any, b: Any) -> Any:
    v = v + 0.05 * e
    t = 0.05 * b
    s = 2 * t / (1 + t.square().sum(-1, keepdim=True))
    v = v + torch.linalg.cross(v + torch.linalg.cross(v, t), s) + 0.05 * e
    return x + 0.1 * v, v


@case("ising energies and flips of a checkerboard", f(16, 512, 512), f(16, 512, 512, positive=True))
def ising(x: Any, draw: Any) -> Any:
    spin = torch.where(x > 0, 1.0, -1.0).to(x.dtype)
    near = torch.roll(spin, 1, 1) + torch.roll(spin, -1, 1) + torch.roll(spin, 1, 2) + torch.roll(spin, -1, 2)
    delta = 2 * spin * near
    return torch.where(draw < torch.exp(-0.44 * delta), -spin, spin), -(spin * near).mean((1, 2)) / 2


# ---- signals
@case("hann frames, windowed and their energies", f(16, 160000))
def frames(x: Any) -> Any:
    w = 0.5 - 0.5 * torch.cos(torch.arange(400, device=x.device, dtype=x.dtype) * (2 * math.pi / 400))
    y = x.unfold(-1, 400, 160) * w
    return y.square().sum(-1).clamp(min=1e-10).log()


@case("power spectrum to decibels, floor of eighty", f(16, 513, 400), f(16, 513, 400))
def decibels(re: Any, im: Any) -> Any:
    p = (re * re + im * im).clamp(min=1e-10)
    d = 10 * torch.log10(p)
    return torch.maximum(d, d.amax((1, 2), keepdim=True) - 80)


@case("cepstral mean and variance over a sliding pool", f(16, 1500, 80))
def cmvn(x: Any) -> Any:
    y = x.transpose(1, 2)
    mean = F.avg_pool1d(y, 301, 1, 150, count_include_pad=False)
    return (y - mean).transpose(1, 2)


@case("fir of seventeen taps", f(64, 65536), f(17))
def fir(x: Any, taps: Any) -> Any:
    y = F.pad(x, (16, 0))
    return sum(y[:, k : k + 65536] * taps[k] for k in range(17))


@case("envelopes: rectified, decimated by eight, in decibels", f(128, 65536))
def envelopes(x: Any) -> Any:
    return 20 * torch.log10(x.abs().view(128, 8192, 8).amax(-1) + 1e-5)


@case("autocorrelation at sixteen lags", f(256, 4096))
def autocorrelation(x: Any) -> Any:
    x = x - x.mean(-1, keepdim=True)
    c = torch.stack([(x[:, : 4096 - k] * x[:, k:]).sum(-1) for k in range(16)], -1)
    return c / c[:, :1]


# ---- losses
@case("dice and cross entropy of four classes", f(4, 4, 256, 512), i(4, 4, 256, 512))
def dice(x: Any, t: Any) -> Any:
    p = torch.softmax(x, 1)
    one = F.one_hot(t, 4).permute(0, 3, 1, 2).to(p.dtype)
    inter, both = (p * one).sum((0, 2, 3)), (p + one).sum((0, 2, 3))
    return 1 - (2 * inter / (both + 1e-6)).mean() + F.cross_entropy(x, t)


@case("supervised contrast of a batch", f(2048, 2048), i(100, 2048))
def contrast(s: Any, y: Any) -> Any:
    eye = torch.eye(2048, device=s.device, dtype=torch.bool)
    same = (y[:, None] == y[None]) & ~eye
    s = s / 0.1
    log = s - torch.logsumexp(s.masked_fill(eye, -1e9), 1, keepdim=True)
    return -((log * same).sum(1) / same.sum(1).clamp(min=1)).mean()


@case("sliced wasserstein of sorted, huber", f(4096, 1024), f(4096, 1024))
def huber(a: Any, b: Any) -> Any:
    return F.huber_loss(a, b, delta=0.5)


@case("charbonnier and gradients of images", f(8, 3, 512, 512), f(8, 3, 512, 512))
def charbonnier(a: Any, b: Any) -> Any:
    d = a - b
    e = torch.sqrt(d * d + 1e-6).mean()
    gx = (d[..., 1:] - d[..., :-1]).abs().mean()
    gy = (d[..., 1:, :] - d[..., :-1, :]).abs().mean()
    return e + 0.1 * (gx + gy)


@case(
    "dpo: chosen, rejected log likelihoods, masked",
    f(16, 1024, 2, scale=2.0),
    f(16, 1024, 2),
    m(0.8, 16, 1024, 2),
)
def dpo(policy: Any, reference: Any, mask: Any) -> Any:
    each = ((policy - reference) * mask).sum(1)
    margin = 0.1 * (each[:, 0] - each[:, 1])
    return -F.logsigmoid(margin), (margin > 0).to(policy.dtype).mean()


@case("distillation: divergence of two temperatures", f(2048, 8000, dtype=bf), f(2048, 8000, dtype=bf))
def distill(s: Any, t: Any) -> Any:
    p = torch.log_softmax(s.float() / 2, -1)
    q = torch.softmax(t.float() / 2, -1)
    return (q * (torch.log(q + 1e-9) - p)).sum(-1).mean() * 4


@case("generalized advantages by masks", f(64, 2048), f(64, 2048), m(0.9, 64, 2048))
def advantages(a: Any, ratio: Any, mask: Any) -> Any:
    k = mask.sum()
    mean = (a * mask).sum() / k
    var = ((a - mean).square() * mask).sum() / k
    z = (a - mean) * (var + 1e-8).rsqrt()
    r = torch.exp(ratio * 0.1)
    return -(torch.minimum(r * z, r.clamp(0.8, 1.2) * z) * mask).sum() / k


# ---- tokens, masks
@case("documents' causal mask of packed texts, additive", i(12, 4, 2048))
def packed_mask(doc: Any) -> Any:
    at = torch.arange(2048, device=doc.device)
    keep = (doc[:, :, None] == doc[:, None]) & (at[:, None] >= at)
    return torch.where(keep, 0.0, -1e9).to(torch.float16)[:, None]


@case("positions within packed texts by running maxima", m(0.02, 16, 8192))
def positions(start: Any) -> Any:
    at = torch.arange(8192, device=start.device)
    return at - torch.where(start, at, 0).cummax(-1).values


@case("labels shifted, padding ignored, counts", i(32000, 32, 4096))
def labels(ids: Any) -> Any:
    lab = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    lab = torch.where(lab < 50, -100, lab)
    return lab, (lab != -100).sum(-1)


@case("relative position buckets of T5", i(4, 1024))
def buckets(p: Any) -> Any:
    d = (
        p[None, :]
        - p[:, None]
        + torch.arange(1024, device=p.device)[None]
        - torch.arange(1024, device=p.device)[:, None]
    )
    n = d.abs()
    large = 8 + (torch.log(n.clamp(min=1).float() / 8) / math.log(16) * 8).to(torch.int64)
    return (d > 0).to(torch.int64) * 16 + torch.where(n < 8, n, large.clamp(max=15))


# ---- sampling
@case("repetition penalty, temperature, bans", f(64, 32000), m(0.03, 64, 32000), m(0.01, 64, 32000))
def penalties(x: Any, seen: Any, ban: Any) -> Any:
    x = torch.where(seen, torch.where(x > 0, x / 1.2, x * 1.2), x) / 0.8
    return torch.log_softmax(x.masked_fill(ban, -math.inf).clamp(min=-1e30), -1)


@case("min p: below a share of the likeliest", f(128, 32000, dtype=bf))
def min_p(x: Any) -> Any:
    p = torch.softmax(x.float(), -1)
    kept = torch.where(p < 0.05 * p.amax(-1, keepdim=True), 0, p)
    return kept / kept.sum(-1, keepdim=True)


@case("gumbel noise, the best token", f(256, 32000), f(256, 32000, positive=True))
def gumbel(x: Any, u: Any) -> Any:
    return (x - torch.log(-torch.log(u.clamp(1e-6, 0.999999)))).argmax(-1)


@case("classifier free guidance of logits", f(64, 50304, dtype=h), f(64, 50304, dtype=h))
def guidance(c: Any, u: Any) -> Any:
    c, u = torch.log_softmax(c.float(), -1), torch.log_softmax(u.float(), -1)
    return u + 1.5 * (c - u)


@case("speculative acceptance: ratios and residuals", f(32, 8, 32000), f(32, 8, 32000))
def speculative(p: Any, q: Any) -> Any:
    p, q = torch.softmax(p, -1), torch.softmax(q, -1)
    rest = (p - q).clamp(min=0)
    return rest / rest.sum(-1, keepdim=True).clamp(min=1e-9)


@case("frequency penalty by counts of tokens", f(64, 32000), i(32000, 64, 512))
def frequency(x: Any, ids: Any) -> Any:
    count = torch.zeros_like(x).scatter_add(1, ids, torch.ones_like(ids, dtype=x.dtype))
    return x - 0.3 * count - 0.2 * (count > 0)


# ---- quantizers
@case("int4 groups of 128, two to a byte", f(4096, 4096, dtype=h))
def int4_pack(x: Any) -> Any:
    g = x.float().view(4096, 32, 128)
    scale = (g.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-8)
    q = (torch.round(g / scale).clamp(-8, 7) + 8).to(torch.uint8).view(4096, 4096)
    return q[:, ::2] | (q[:, 1::2] << 4), scale.squeeze(-1).half()


@case("int8 by columns, rounded to even, error", f(8192, 2048))
def int8_columns(x: Any) -> Any:
    scale = x.abs().amax(0).clamp(min=1e-8) / 127
    q = torch.round(x / scale).clamp(-127, 127)
    return q.to(torch.int8), scale, (q * scale - x).square().mean()


@case("mxfp8: shared exponents of 32", f(4096, 4096, dtype=bf))
def mxfp8(x: Any) -> Any:
    g = x.float().view(4096, 128, 32)
    e = torch.floor(torch.log2(g.abs().amax(-1, keepdim=True).clamp(min=1e-30))) - 8
    return (g * torch.exp2(-e)).to(torch.float8_e4m3fn).view(4096, 4096), (e + 127).clamp(0, 255).to(
        torch.uint8
    ).squeeze(-1)


@case("ternary by the mean magnitude, absmean", f(4096, 4096, dtype=bf))
def ternary(x: Any) -> Any:
    scale = x.float().abs().mean().clamp(min=1e-5)
    return (x.float() / scale).round().clamp(-1, 1).to(torch.int8), scale


@case("smooth scales of channels, then int8 of tokens", f(4096, 4096, dtype=h), f(4096, positive=True))
def smooth(x: Any, s: Any) -> Any:
    y = x.float() / (s + 0.5)
    scale = y.abs().amax(-1, keepdim=True) / 127
    return torch.round(y / scale).to(torch.int8), scale


@case("learned step size, straight through", f(64, 256, 1024), f(256, positive=True))
def lsq(x: Any, step: Any) -> Any:
    s = (step + 0.1)[:, None]
    v = (x / s).clamp(-8, 7)
    return (v.round() - v).detach() * s + v * s


# ---- optimisers
@case(
    "adamw of bfloat16 weights with float copies",
    f(2 << 20),
    f(2 << 20, dtype=bf),
    f(2 << 20),
    f(2 << 20, positive=True),
)
def adamw(w: Any, g: Any, mean: Any, var: Any) -> Any:
    g = g.float()
    mean = mean.lerp(g, 0.1)
    var = var * 0.999 + g * g * 0.001
    w = w * (1 - 1e-4) - 1e-3 * (mean / 0.1) / ((var / 0.001).sqrt() + 1e-8)
    return w, w.to(bf), mean, var


@case("lion: signs of interpolated momenta", f(4096, 2048), f(4096, 2048), f(4096, 2048))
def lion(w: Any, g: Any, mean: Any) -> Any:
    u = torch.sign(mean * 0.9 + g * 0.1)
    return w * 0.9999 - 1e-4 * u, mean.lerp(g, 0.01)


@case("lamb: trust ratio of a matrix", f(2048, 2048), f(2048, 2048), f(2048, 2048, positive=True))
def lamb(w: Any, mean: Any, var: Any) -> Any:
    u = mean / (var.sqrt() + 1e-6) + 0.01 * w
    return w - 1e-3 * (w.norm() / u.norm().clamp(min=1e-6)) * u


@case("muon: momentum, normed by its norm", f(4096, 1024, dtype=bf), f(4096, 1024, dtype=bf))
def muon(g: Any, mean: Any) -> Any:
    mean = mean.lerp(g, 0.05)
    u = g.lerp(mean, 0.95).float()
    return (u / (u.norm() + 1e-7)).to(bf), mean


# ---- geometry
@case("quaternions to matrices, points turned", f(200000, 4), f(200000, 3))
def quaternions(q: Any, p: Any) -> Any:
    q = q / q.norm(dim=-1, keepdim=True)
    w, v = q[:, :1], q[:, 1:]
    t = 2 * torch.linalg.cross(v, p)
    return p + w * t + torch.linalg.cross(v, t)


@case("camera: points projected, distorted, visible", f(4, 200000, 3), f(4, 3, 4))
def camera(p: Any, c: Any) -> Any:
    y = (p[:, :, None] * c[:, None, :, :3]).sum(-1) + c[:, None, :, 3]
    z = y[..., 2].abs() + 1
    uv = y[..., :2] / z[..., None]
    r = uv.square().sum(-1, keepdim=True)
    return uv * (1 + 0.1 * r + 0.01 * r * r), (uv.abs() < 1).all(-1)


@case("intersections of boxes, pairs", f(1500, 4, positive=True), f(1500, 4, positive=True))
def boxes(a: Any, b: Any) -> Any:
    a, b = torch.cat([a[:, :2], a[:, :2] + a[:, 2:]], 1), torch.cat([b[:, :2], b[:, :2] + b[:, 2:]], 1)
    lt, rb = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:], b[None, :, 2:])
    inter = (rb - lt).clamp(min=0).prod(-1)
    first, second = ((x[:, 2] - x[:, 0]) * (x[:, 3] - x[:, 1]) for x in (a, b))
    return inter / (first[:, None] + second[None] - inter)


@case("chamfer distances of two clouds", f(4, 2048, 3), f(4, 2048, 3))
def chamfer(a: Any, b: Any) -> Any:
    d = (a[:, :, None] - b[:, None]).square().sum(-1)
    return d.amin(2).mean() + d.amin(1).mean()


@case("normals of a height field", f(8, 1024, 1024))
def normals(z: Any) -> Any:
    dx = F.pad((z[:, :, 2:] - z[:, :, :-2]) / 2, (1, 1))
    dy = F.pad((z[:, 2:] - z[:, :-2]) / 2, (0, 0, 1, 1))
    n = torch.stack([-dx, -dy, torch.ones_like(z)], -1)
    return n / n.norm(dim=-1, keepdim=True)


# ---- images
@case("cutmix of two batches by a box, halves", f(32, 3, 224, 224, dtype=h), i(224, 32), i(224, 32))
def cutmix(x: Any, top: Any, left: Any) -> Any:
    at = torch.arange(224, device=x.device)
    rows = (at >= top[:, None]) & (at < top[:, None] + 80)
    cols = (at >= left[:, None]) & (at < left[:, None] + 80)
    return torch.where((rows[:, :, None] & cols[:, None])[:, None], x.flip(0), x)


@case("autocontrast of pictures of bytes", i(256, 32, 3, 256, 256, dtype=torch.uint8))
def autocontrast(x: Any) -> Any:
    y = x.float()
    low, high = y.amin((2, 3), keepdim=True), y.amax((2, 3), keepdim=True)
    return ((y - low) * (255 / (high - low).clamp(min=1))).clamp(0, 255).to(torch.uint8)


@case("vignette and grain", f(8, 3, 512, 768, positive=True), f(8, 1, 512, 768))
def vignette(x: Any, noise: Any) -> Any:
    y = torch.linspace(-1, 1, 512, device=x.device, dtype=x.dtype)[:, None]
    z = torch.linspace(-1, 1, 768, device=x.device, dtype=x.dtype)[None]
    return (x * torch.exp(-0.7 * (y * y + z * z)) + 0.02 * noise).clamp(0, 1)


@case("dilated and eroded masks: gradients", f(16, 1, 512, 512))
def morphology(x: Any) -> Any:
    return F.max_pool2d(x, 3, 1, 1) + F.max_pool2d(-x, 3, 1, 1)


# ---- statistics
@case("skewness and kurtosis of columns", f(32768, 256))
def moments(x: Any) -> Any:
    d = x - x.mean(0)
    v = d.square().mean(0)
    return d.pow(3).mean(0) / v.pow(1.5), d.pow(4).mean(0) / v.square()


@case("correlation of matching columns", f(65536, 128), f(65536, 128))
def correlation(a: Any, b: Any) -> Any:
    a, b = a - a.mean(0), b - b.mean(0)
    return (a * b).sum(0) / (a.square().sum(0) * b.square().sum(0)).sqrt()


@case("exponentially weighted ranks: pairs won", f(32, 512))
def ranks(x: Any) -> Any:
    return torch.sigmoid(10 * (x[:, :, None] - x[:, None])).sum(-1)


# ---- positions
@case("rope of two axes for patches", f(16, 12, 1024, 64, dtype=h), f(1024, 64), f(1024, 64))
def rope2(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.view(16, 12, 1024, 2, 2, 16).unbind(-2)
    turned = torch.stack([-b, a], -2).reshape(x.shape)
    return (x * cos + turned * sin).to(h)


@case("alibi added, causal, softmax", f(2, 16, 1024, 1024, dtype=h))
def alibi(s: Any) -> Any:
    slope = torch.exp2(-0.5 * torch.arange(1, 17, device=s.device, dtype=torch.float32))[:, None, None]
    at = torch.arange(1024, device=s.device)
    d = (at - at[:, None]).clamp(max=0)
    x = s.float() + slope * d
    return torch.softmax(x.masked_fill(at > at[:, None], -1e9), -1).half()


@case("fourier features of points", f(100000, 3), f(3, 32))
def fourier(p: Any, b: Any) -> Any:
    y = 2 * math.pi * (p[:, :, None] * b).sum(1)
    return torch.cat([y.sin(), y.cos()], -1)
