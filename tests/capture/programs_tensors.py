"""Programs of views, changes in place, gradients, shapes and numbers that vary."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from capture_world import World, calls, normal, program
from torch import nn


@program
def view_alias_mutation():
    def fn(x):
        v = x[1:]
        v.mul_(3)
        w = x.view(-1)
        w[0] = 7
        return v, w, x.t() if x.dim() == 2 else x

    return calls(fn, lambda: (normal(4),), lambda: (normal(4, seed=2),))


@program
def backward_inside():
    l = nn.Linear(3, 1)
    with torch.no_grad():
        l.weight.fill_(1.0)
        l.bias.fill_(0.0)

    def fn(x):
        loss = l(x).sum()
        loss.backward()
        with torch.no_grad():
            for p in l.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        return loss.detach()

    return calls(
        fn, *[lambda: (normal(2, 3),)] * 4, observe=lambda: [p.detach().clone() for p in l.parameters()]
    )


@program
def optimizer_step():
    torch.manual_seed(0)
    l = nn.Linear(3, 1)
    o = torch.optim.Adam(l.parameters(), lr=0.1)

    def fn(x):
        o.zero_grad()
        loss = l(x).pow(2).mean()
        loss.backward()
        o.step()
        return loss.item()

    return calls(
        fn, *[lambda: (normal(2, 3),)] * 4, observe=lambda: [p.detach().clone() for p in l.parameters()]
    )


@program
def batchnorm_training():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2))
    return calls(
        m,
        *[lambda: (normal(2, 2, 8, 8),)] * 3,
        observe=lambda: (m[1].running_mean.clone(), int(m[1].num_batches_tracked)),
    )


@program
def shape_dependent():
    def fn(x):
        b, *r = x.shape
        if b > 2:
            x = x[:2]
        return x.reshape(x.shape[0], -1).sum(-1), b, r

    return calls(
        fn,
        lambda: (normal(3, 2, 2),),
        lambda: (normal(1, 2, 2),),
        lambda: (normal(5, 4, 1),),
        lambda: (normal(2, 2, 2),),
    )


@program
def contiguity_identity():
    def fn(x):
        y = x.contiguous()
        return y is x, y, x.to(torch.float32) is x, x.float()

    return calls(fn, lambda: (normal(3, 3),), lambda: (normal(3, 3).t(),), lambda: (normal(3, 3).double(),))


@program
def nonzero_shapes():
    def fn(x):
        i = x.nonzero()
        n = i.shape[0]
        y = x[x > 0]
        return y.sum() * n, len(y), i.size(0) * 2

    return calls(
        fn,
        lambda: (torch.tensor([1.0, 0, -1]),),
        lambda: (torch.tensor([1.0, 3, -1]),),
        lambda: (torch.tensor([0.0, 0, 0]),),
    )


@program
def item_in_shape():
    def fn(x, n):
        k = int(n.item())
        return torch.zeros(k) + x[:k], list(range(k))

    return calls(
        fn,
        lambda: (normal(5), torch.tensor(2)),
        lambda: (normal(5), torch.tensor(4)),
        lambda: (normal(5), torch.tensor(2)),
    )


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
def tensor_list_iteration():
    def fn(x):
        tot = 0
        for row in x:
            tot = tot + row.sum()
        a, b = x
        return tot, a - b, [r for r in x], list(x.unbind(1)), x.tolist(), [t.item() for t in x[0]]

    return calls(fn, lambda: (normal(2, 3),), lambda: (normal(2, 3, seed=4),))


@program
def metadata_in_place():
    def fn(x):
        x.unsqueeze_(0)
        s = x.shape
        x.squeeze_(0)
        x.t_() if x.dim() == 2 else None
        y = x.resize_(2) if x.numel() < 5 else x
        return s, y.shape, y is x, y * 1

    return calls(fn, lambda: (normal(4),), lambda: (normal(3, 3),), lambda: (normal(4),))


@program
def out_argument():
    def fn(x, o):
        torch.add(x, 1, out=o)
        torch.mul(o, 2, out=o)
        return o.sum(), o

    return calls(
        fn,
        lambda: (normal(3), normal(3)),
        lambda: (normal(3), normal(3)),
        lambda: (normal(3), torch.empty(0)),
    )


@program
def setitem_mask():
    def fn(x, m):
        x[m] = 0
        x[0] += 5
        x[1:] = x[1:] * 2
        del m
        return x[x > 0], (x > 0).any().item()

    return calls(
        fn,
        lambda: (normal(4), torch.tensor([True, False, True, False])),
        lambda: (normal(4), torch.tensor([False, False, False, False])),
    )


@program
def tensors_in_python_containers():
    def fn(x, y):
        l = [x, y]
        d = {x: 1, y: 2}
        return (
            d[x],
            sum(l),
            max(x.sum(), y.sum()),
            x in [x],
            l.index(x),
            {id(x): 1}[id(x)],
            sorted(l, key=lambda t: t.sum().item())[0],
        )

    return calls(fn, lambda: (normal(3), normal(3, seed=1)), lambda: (normal(3, seed=2), normal(3, seed=1)))


@program
def value_dependent_len():
    def fn(x):
        i = torch.where(x > 0)[0]
        out = []
        for j in i:
            out.append(int(j) * 2)
        return out, x[i], torch.unique(x).shape, x.masked_select(x > 0).numel()

    return calls(
        fn,
        lambda: (torch.tensor([1.0, -1, 2]),),
        lambda: (torch.tensor([-1.0, -1, 2]),),
        lambda: (torch.tensor([-1.0, -1, -2]),),
        lambda: (torch.tensor([1.0, -1, 2]),),
    )


@program
def kv_in_module_buffer():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.register_buffer("k", torch.zeros(8, 2))
            s.pos = 0

        def forward(s, x):
            s.k[s.pos] = x
            s.pos += 1
            return s.k[: s.pos].sum(0)

    m = M()
    return calls(
        m, *[(lambda i=i: (normal(2, seed=i),)) for i in range(6)], observe=lambda: (m.k.clone(), m.pos)
    )


@program
def numpy_mixed():
    def fn(x, a, s):
        y = x.numpy() * 2 if not x.requires_grad else None
        return torch.as_tensor(a) + x, a.dtype, a.shape, s + 1, np.asarray([1, 2])[0], y.sum(), float(a[0])

    return calls(
        fn,
        lambda: (normal(3), np.ones(3), np.float32(2)),
        lambda: (normal(3), np.zeros(3, dtype=np.float32), np.float64(2)),
        lambda: (normal(3), np.ones(3), np.int32(2)),
    )


@program
def lifted_slices_and_shapes():
    def fn(x, n):
        return (
            x[:n],
            x[n:],
            x.narrow(0, 0, n),
            torch.zeros(n),
            x.view(-1)[n - 1],
            torch.arange(n),
            x.new_full((n,), n),
            F.pad(x, (0, n)),
            x.repeat(n).shape,
        )

    return calls(fn, *[(lambda i=i: (normal(8), i)) for i in (1, 2, 3, 4, 5, 3)])


@program
def varying_float_neg_zero():
    def fn(x, a):
        return x * a, math.copysign(1, a), a > 0, f"{a:.2f}"

    return calls(
        fn,
        *[
            (lambda v=v: (normal(3), v))
            for v in (1.0, 2.0, 3.0, 0.0, -0.0, 5.0, float("inf"), float("nan"), 7.0)
        ],
    )


@program
def varying_int_types():
    def fn(x, a):
        return (
            x * a,
            a // 2,
            a % 3,
            a**2,
            -a,
            a & 1,
            a << 1,
            str(a),
            a == 3,
            x[:a].shape if 0 <= a < 3 else None,
        )

    return calls(fn, *[(lambda v=v: (normal(3), v)) for v in (1, 2, 3, 4, 5, True, 2.0, 7, -3, 10**20, 2)])


@program
def float_identity_nan():
    def fn(x, a):
        return x * a, a == a, a if a != a else 0, [a] == [a]

    return calls(
        fn,
        lambda: (normal(3), float("nan")),
        lambda: (normal(3), 0.0),
        lambda: (normal(3), -0.0),
        lambda: (normal(3), 1.5),
    )


@program
def mixed_scalars_lifted():
    def fn(x, i, f):
        k = i + 1
        y = x * f if k > 3 else x + k
        return y, k, f * 2, [k, f], {"k": k}, (k, (f,)), i % 2 == 0

    return calls(fn, *[(lambda i=i: (normal(3), i, i / 3)) for i in (0, 1, 2, 3, 4, 5, 6, 2, 0)])


@program
def lifted_in_heap():
    st = {"n": 0}
    hist = []

    def fn(x, step):
        st["n"] = step * 2
        hist.append(step + 1)
        return x * step, st["n"], hist[-1]

    return calls(
        fn,
        *[(lambda i=i: (normal(3), i)) for i in (1, 2, 3, 4, 5, 300, 301, 302)],
        observe=lambda: (dict(st), list(hist)),
    )


@program
def many_iterations():
    def fn(x, n):
        for i in range(n):
            x = torch.tanh(x * 1.01 + i * 0.001)
        return x

    return calls(fn, lambda: (normal(3), 100), lambda: (normal(3), 100), lambda: (normal(3), 50))


@program
def whole_numbers_rounded():
    """Beyond 2**53, where no float has them."""

    def given():
        return (torch.tensor([2**63 - 1, -(2**63), 2**62 + 1, 5]),)

    return calls(lambda x: (x.floor(), x.round(), x.floor() + x), *[given] * 3)


@program
def narrow_constants_stored():
    def fn(x):
        narrow = x.to(torch.bfloat16)
        narrow[1:] = 255
        return narrow

    return calls(fn, *[lambda: (torch.arange(40.0),)] * 3)


@program
def indices_that_are_known():
    def fn(x):
        x.narrow(-1, 0, 1).zero_()
        return x.index_fill(0, x.flatten()[:2].long().abs() % 8, 3)

    return calls(fn, *[lambda: (torch.arange(64, dtype=torch.int32).view(8, 8),)] * 3)


@program
def convolved_with_itself():
    return calls(
        lambda x: torch.nn.functional.conv1d(x, x), *[lambda: (torch.arange(8.0).view(2, 2, 2),)] * 3
    )


@program
def without_tensors():
    def fn(n):
        y, z = torch.full((), float(n)), torch.arange(n)
        y[y > 2] = 1.5
        return y, z[z > 2].sum(), torch.unique(z // 2), z.remainder(3).nonzero(), z * y

    return calls(fn, *[lambda n=n: (n,) for n in (1, 4, 4, 5, 6, 7)])
