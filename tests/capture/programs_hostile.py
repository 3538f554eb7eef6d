"""Programs made to be run wrongly: memory shared late, views of views, arguments that share."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from capture_world import World, normal, program
from hostile_worlds import SIZES
from hostile_worlds import nine as _nine
from hostile_worlds import rows as _rows
from hostile_worlds import sizes as _sizes
from torch import nn


# ---- memory ----------------------------------------------------------------------------------------------
@program
def hostile_view_of_a_result_written():
    def f(x):
        y = torch.relu(x) * 2
        first = y[0]
        first.add_(1)
        turned = y.t()
        turned[1:].mul_(first[:1])
        return y, first, turned.contiguous() - y.t()

    return _sizes(f, lambda n: (_rows(n),))


@program
def hostile_reshape_that_may_copy():
    """Whether reshape copies is a matter of strides: the write is seen or not."""

    def f(x):
        y = x * 1.5
        z = y.t().reshape(-1)
        z.add_(10)
        w = y.reshape(-1)
        w.mul_(2)
        return y, z, w

    return _sizes(f, lambda n: (_rows(n),))


@program
def hostile_reshape_of_an_argument_that_may_copy():
    def f(x):
        x.reshape(-1)[1:].add_(1)
        x.flatten()[0].mul_(3)
        return x.sum(), x

    return _nine(
        f, lambda: (_rows(3),), lambda: (_rows(3).t(),), lambda: (_rows(6)[::2],), lambda: (_rows(1).t(),)
    )


@program
def hostile_diagonal_and_unbind():
    def f(x):
        y = x @ x.t()
        y.diagonal().add_(5)
        rows = y.unbind(1)
        rows[0].sub_(rows[-1])
        y.diagonal(1).zero_() if y.shape[0] > 1 else None
        return y, rows[0], torch.stack(rows, 1)

    return _sizes(f, lambda n: (_rows(n),))


@program
def hostile_split_in_place():
    def f(x):
        y = torch.tanh(x)
        a, b = y.split([1, y.shape[1] - 1], 1)
        a += b[:, :1]
        b -= a
        c, d = y.chunk(2, 1)
        c.copy_(d)
        return y, a, b

    return _sizes(f, lambda n: (_rows(n),))


@program
def hostile_overlap_of_copy():
    def f(x):
        y = x + 0
        y[1:] = y[:-1].clone()
        y[:, 1:] += y[:, :-1] * 0.5
        return y

    return _sizes(f, lambda n: (_rows(n),))


@program
def hostile_swap_by_tuple():
    def f(x):
        y = x * 2
        y[:, 0], y[:, 1] = y[:, 1], y[:, 0]
        y[[0, -1]] = y[[-1, 0]]
        return y

    return _sizes(f, lambda n: (_rows(n),))


@program
def hostile_argument_written_then_returned_as_view():
    def f(x, y):
        x.mul_(y)
        v = x[:, 1:3]
        x.add_(1)
        return v, x.view(-1), y - x

    return _sizes(f, lambda n: (_rows(n), _rows(n, 1)))


@program
def hostile_result_fed_back():
    held = {}

    def f(x):
        y = x.cumsum(0)
        y[0] -= held["last"].sum() if "last" in held else 0
        held["last"] = y[-1]
        y.mul_(0.5)
        return y, held["last"]

    return _sizes(f, lambda n: (_rows(n),), observe=lambda: dict(held))


@program
def hostile_result_kept_and_written_outside():
    held = []

    def f(x):
        y = torch.exp(x) + 1
        z = y.view(-1)
        held.append(y)
        return z * 2, z

    def spoil():
        for y in held:
            y.fill_(7)

    return World(f, [(spoil, functools.partial(lambda n: (_rows(n),), n)) for n in SIZES], lambda: list(held))


@program
def hostile_parameter_is_a_view_of_a_buffer():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("flat", torch.arange(16.0))
            self.weight = self.flat[4:].view(3, 4)

        def forward(self, x):
            y = x @ self.weight.t()
            self.flat.mul_(0.5)
            return y, x @ self.weight.t(), self.flat[5]

    model = Tied()
    return _sizes(model, lambda n: (_rows(n),), observe=lambda: (model.flat.clone(), model.weight.clone()))


@program
def hostile_weights_exchanged():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def exchange():
        a, b = model[0].weight.data, model[2].weight.data
        model[0].weight.data, model[2].weight.data = b, a

    def written():
        with torch.no_grad():
            model[0].weight[0, 0] += 1

    def shared():
        model[0].weight = model[2].weight

    def f(x):
        with torch.no_grad():
            return model(x)

    ups = (None, None, exchange, None, written, None, shared, written, None)
    return World(
        f, [(up, functools.partial(lambda n: (_rows(n),), n)) for up, n in zip(ups, SIZES, strict=True)]
    )


@program
def hostile_expanded_result_written_after_copy():
    def f(x):
        y = x.sum(0, keepdim=True).expand(x.shape[0], -1)
        z = y.clone()
        z[0] += 1
        w = y.contiguous()
        w[-1] -= 1
        return z, w, y.stride()

    return _sizes(f, lambda n: (_rows(n),))


@program
def hostile_same_storage_other_types():
    def f(x):
        y = x * 1
        bits = y.view(torch.int32)
        bits.bitwise_and_(0x7FFFFFFF)
        half = y.view(torch.float16)
        return y, bits, half.shape, (y == x.abs()).all()

    return _sizes(f, lambda n: (_rows(n),))


@program
def hostile_real_and_imaginary():
    def f(x):
        z = torch.complex(x, x.flip(0))
        z.real.mul_(2)
        torch.view_as_real(z)[..., 1].add_(1)
        return z, z.conj().imag, (z * z.conj()).real

    return _sizes(f, lambda n: (_rows(n),))


@program
def hostile_slices_with_steps_written():
    def f(x):
        y = x.sin()
        y[::2] += y[:1]
        y[1::2, ::3] = 0
        y.t()[::2].neg_()
        return y, y[::2], y.t()[1::2]

    return _sizes(f, lambda n: (_rows(n),))


@program
def hostile_attention_result_written():
    def f(x):
        q = x.view(x.shape[0], 2, 2).transpose(0, 1)[None]
        o = F.scaled_dot_product_attention(q, q, q)
        o.transpose(1, 2).reshape(x.shape[0], -1).add_(1)
        return o, o.transpose(1, 2).flatten(2).stride()

    return _sizes(f, lambda n: (_rows(n),))


@program
def hostile_channels_last_results_written():
    convolution = nn.Conv2d(2, 3, 3, padding=1)

    def f(x):
        with torch.no_grad():
            y = convolution(x)
            y.permute(0, 2, 3, 1).reshape(-1)[::2].zero_()
            return y, y.view(-1) if y.is_contiguous() else y.stride()

    plain = lambda: (normal(2, 2, 4, 5),)
    last = lambda: (normal(2, 2, 4, 5).contiguous(memory_format=torch.channels_last),)
    return _nine(f, plain, last, plain, last, lambda: (normal(1, 2, 1, 5),))


@program
def hostile_pooled_and_normed_results_written():
    norm = nn.GroupNorm(2, 4).eval()

    def f(x):
        with torch.no_grad():
            y = norm(F.max_pool2d(x, 2, 1, 1))
            y.transpose(1, 3).reshape(-1)[:3].add_(100)
            return y, y.stride()

    plain = lambda: (normal(2, 4, 4, 4),)
    last = lambda: (normal(2, 4, 4, 4).to(memory_format=torch.channels_last),)
    return _nine(f, plain, last, lambda: (normal(2, 4, 4, 4).transpose(2, 3),))


# ---- arguments that share ---------------------------------------------------------------------------------
@program
def hostile_arguments_that_begin_to_overlap():
    def f(a, b, c):
        a.add_(b)
        c.mul_(a)
        return a + b + c, b - c

    apart = lambda: tuple(_rows(3, s) for s in range(3))

    def overlapping():
        base = normal(5, 4)
        return base[:3], base[1:4], base[2:]

    def same():
        base = _rows(3)
        return base, base, base.view(3, 4)

    def turned():
        base = normal(4, 4)
        return base, base.t(), base.flip(0)

    return _nine(f, apart, apart, overlapping, apart, same, turned, overlapping, same, turned)


@program
def hostile_argument_is_a_weight():
    layer = nn.Linear(4, 4, bias=False)

    def f(x):
        with torch.no_grad():
            y = layer(x)
            x.mul_(0.5)
            return y, layer(x)

    own = lambda: (layer.weight.data,)
    part = lambda: (layer.weight.data[1:3],)
    return _nine(f, lambda: (_rows(4),), lambda: (_rows(4),), own, part, lambda: (_rows(2),))


@program
def hostile_argument_in_a_list_and_alone():
    def f(x, xs, named):
        xs[0].add_(1)
        named["k"].mul_(2)
        xs.append(x)
        return x * 1, sum(xs), named["k"]

    def same():
        x = _rows(2)
        return x, [x, x], {"k": x}

    def apart():
        return _rows(2), [_rows(2, 1), _rows(2, 2)], {"k": _rows(2, 3)}

    def half():
        x = _rows(4)
        return x[:2], [x[2:], x[1:3]], {"k": x[:2]}

    return _nine(f, apart, apart, same, half, apart, half)


@program
def hostile_out_is_an_operand():
    def f(x, y):
        torch.add(x, y, out=x)
        torch.mul(x[:, :2], y[:, 2:], out=y[:, :2])
        return x, y

    def same():
        x = _rows(3)
        return x, x

    def shifted():
        x = normal(4, 4)
        return x[:3], x[1:]

    return _nine(f, lambda: (_rows(3), _rows(3, 1)), same, shifted)
