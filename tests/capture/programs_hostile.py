"""Programs made to be run wrongly: memory shared late, views of views, open numbers that meet, hooks."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import weakref
from collections import ChainMap, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from capture_world import World, calls, normal, program, programs
from torch import nn

SIZES = (3, 4, 5, 5, 1, 7, 2, 5, 12)


def _sizes(function: Callable[..., Any], make: Callable[[int], Any], **more: Any) -> World:
    """Return a world of nine calls with arguments of changing sizes."""
    return calls(function, *(functools.partial(make, size) for size in SIZES), **more)


def _nine(function: Callable[..., Any], *makes: Callable[[], Any], **more: Any) -> World:
    return calls(function, *(make for _, make in zip(range(9), itertools.cycle(makes), strict=False)), **more)


def _rows(n: int, seed: int = 0) -> torch.Tensor:
    return normal(n, 4, seed=seed)


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


# ---- numbers left open ------------------------------------------------------------------------------------
@program
def hostile_numbers_that_meet():
    """Two open numbers that are equal in some calls and not in others."""

    def f(x, a, b):
        same = a == b
        y = x[:, : a % 4] if a % 4 else x
        z = x[:, : b % 4] if b % 4 else x
        return (y + z if same else y.sum() - z.sum()), a is b, a - b, x * (a / (b or 1))

    pairs = ((3, 5), (4, 6), (5, 5), (1, 1), (0, 4), (300, 300), (2, 3), (7, 7), (-1, 2))
    return calls(f, *(lambda p=p: (_rows(2), *p) for p in pairs))


@program
def hostile_sizes_that_meet():
    def f(x, y):
        if x.shape[0] == y.shape[0]:
            return x + y
        if x.shape[0] == 1 or y.shape[0] == 1:
            return x * y
        return torch.cat([x, y])

    pairs = ((3, 4), (5, 6), (7, 7), (1, 5), (4, 1), (1, 1), (3, 3), (2, 9), (0, 1))
    return calls(f, *(lambda p=p: (_rows(p[0]), _rows(p[1], 1)) for p in pairs))


@program
def hostile_broadcast_where_a_size_is_one():
    def f(x, y):
        return x + y, torch.where(x > y, x, y), (x * y).sum(0), torch.maximum(x, y.expand_as(x * y))

    pairs = ((3, 3), (4, 4), (5, 5), (1, 4), (4, 1), (1, 1), (6, 6), (0, 0), (0, 1))
    return calls(f, *(lambda p=p: (_rows(p[0]), _rows(p[1], 1)) for p in pairs))


@program
def hostile_big_numbers():
    def f(x, n):
        return x * n, n * n % 7, (x.long() + n).sum(), n << 3, n >> 1, float(n) + 1 - n, -n // 3, n % -5

    numbers = (1, 2, 3, 2**31, 2**53 + 1, 2**62, -(2**40), 0, True)
    return calls(f, *(lambda n=n: (_rows(2), n) for n in numbers))


@program
def hostile_floats_of_every_kind():
    def f(x, s):
        return (
            x * s,
            torch.clamp(x, min=-abs(s)),
            s != s,
            x.masked_fill(x > s, s),
            math.copysign(1, s),
            s + 1 == 1,
        )

    numbers = (1.0, 2.0, 0.5, math.nan, math.inf, -0.0, 0.0, 1e-320, 1e308)
    return calls(f, *(lambda s=s: (_rows(2), s) for s in numbers))


@program
def hostile_kinds_of_numbers_change():
    def f(x, s):
        return x * s, type(s).__name__, x // (s or 1), torch.full((2,), s)

    numbers = (1, 2, 3.0, True, np.float32(2.5), np.int64(4), 5, False, 1.5)
    return calls(f, *(lambda s=s: (_rows(2), s) for s in numbers))


@program
def hostile_negative_slices():
    def f(x, a, b):
        return x[a:b], x[b:], x[:a].sum(0), x[-1 - abs(b) % len(x)], x.narrow(0, abs(a) % len(x), 1)

    bounds = ((0, 3), (1, 4), (2, -1), (-3, -1), (-9, 9), (4, 2), (9, 12), (-1, 1), (0, -12))
    return calls(f, *(lambda p=p: (_rows(6), *p) for p in bounds))


@program
def hostile_lengths_of_strings_and_lists():
    def f(x, text, items):
        y = x * len(text) + sum(items)
        return y[: len(items)], text * 2, items[::-1], f"{len(text):03d}{items}", y.repeat(1, len(items) + 1)

    cases = (
        ("a", [1]),
        ("ab", [1, 2]),
        ("abc", []),
        ("é", [0]),
        ("", [5, 6, 7]),
        ("ab", [2, 1]),
        ("z" * 9, [3] * 4),
    )
    return _nine(f, *(lambda c=c: (_rows(5), c[0], list(c[1])) for c in cases))


@program
def hostile_quotients_of_sizes():
    def f(x):
        n = x.shape[0]
        k = (n + 1) // 2
        y = x[:k].repeat(2, 1)[:n]
        z = F.pad(x, (0, 0, k, n - k))[k : k + n]
        pooled = F.adaptive_avg_pool1d(x.t()[None], k)[0].t()
        return y + z, pooled, x.unfold(0, k, 1).sum(-1), n / k, n % k

    return _sizes(f, lambda n: (_rows(n),))


@program
def hostile_arange_and_masks_of_open_sizes():
    def f(x, past):
        n = x.shape[0]
        at = torch.arange(past, past + n)
        mask = at[:, None] >= torch.arange(past + n)[None]
        scores = (x @ x.t()).repeat(1, 2)[:, :n].masked_fill(~mask[:, past:], -math.inf)
        return scores.softmax(-1) @ x, mask.sum(), at.float() / (past + 1)

    return _nine(
        f, *(lambda n=n, p=p: (_rows(n), p) for n, p in zip(SIZES, (0, 1, 2, 5, 3, 0, 9, 4, 1), strict=True))
    )


@program
def hostile_steps_of_ranges():
    def f(x, start, stop, step):
        total = x * 0
        for i in range(start, stop, step):
            total = total + x * i
        return total, torch.arange(start, stop, step) if (stop - start) * step > 0 else None

    cases = ((0, 4, 1), (1, 5, 2), (4, 0, -1), (3, 3, 1), (-2, 2, 3), (0, 7, 3), (5, 1, -2))
    return _nine(f, *(lambda c=c: (_rows(2), *c) for c in cases))


# ---- random state -----------------------------------------------------------------------------------------
@program
def hostile_random_in_a_branch():
    def f(x, keep):
        noise = torch.rand_like(x)
        if keep > 2:
            torch.rand(3)
        y = F.dropout(x, 0.5, training=keep % 2 == 0)
        return y + noise, torch.randint(keep + 1, (2,)), torch.randperm(x.shape[0])

    return _nine(
        f, *(lambda n=n, k=k: (_rows(n), k) for n, k in zip(SIZES, (1, 2, 3, 4, 0, 5, 2, 3, 6), strict=True))
    )


@program
def hostile_own_generators():
    made = torch.Generator().manual_seed(5)

    def f(x):
        y = torch.randn(x.shape, generator=made)
        again = torch.Generator().manual_seed(x.shape[0])
        z = torch.empty_like(x).normal_(generator=again)
        x.bernoulli_(0.5, generator=made)
        return y, z, x, made.initial_seed()

    return _sizes(f, lambda n: (_rows(n),), observe=lambda: made.get_state().sum())


@program
def hostile_seed_inside():
    def f(x, seed):
        torch.manual_seed(seed)
        a = torch.rand(2)
        with torch.random.fork_rng():
            torch.manual_seed(seed + 1)
            b = torch.rand(x.shape[0])
        return a, b, torch.rand(1), torch.initial_seed()

    return _nine(f, *(lambda n=n, s=s: (_rows(n), s) for n, s in zip(SIZES, range(9), strict=True)))


@program
def hostile_random_then_error():
    def f(x):
        y = torch.rand(2)
        if x.shape[0] == 5:
            raise ValueError(f"five rows, {x.shape[1]} columns")
        return y, torch.rand(1)

    return _sizes(f, lambda n: (_rows(n),))


# ---- exceptions -------------------------------------------------------------------------------------------
@program
def hostile_error_after_writes():
    log = []

    def f(x, n):
        log.append(n)
        x.add_(1)
        try:
            x[n].mul_(10)
        except IndexError as error:
            x.zero_()
            log.append(str(error))
        finally:
            x.sub_(0.5)
        return x.view(-1)[n]

    return _nine(
        f, *(lambda n=n: (_rows(3), n) for n in (0, 1, 2, 3, -3, -4, 11, 12, 2)), observe=lambda: list(log)
    )


@program
def hostile_errors_of_torch():
    def f(x, y):
        z = x * 2
        try:
            return x @ y
        except RuntimeError:
            return z.sum(), x + 1

    return _nine(
        f, lambda: (_rows(3), normal(4, 2)), lambda: (_rows(3), normal(3, 2)), lambda: (_rows(4), _rows(4))
    )


@program
def hostile_exception_groups_and_notes():
    def f(x, n):
        error = KeyError(n)
        error.add_note(f"note {n}")
        try:
            if n % 2:
                raise ExceptionGroup("two", [error, ValueError(n)])
            raise error
        except* ValueError as group:
            return_value = x * len(group.exceptions)
        except* KeyError:
            return_value = x + n
        return return_value

    return _nine(f, *(lambda n=n: (_rows(2), n) for n in range(9)))


@program
def hostile_return_in_finally():
    def f(x, n):
        y = x + n
        for i in range(3):
            try:
                if i == n % 3:
                    continue
                if n > 5:
                    raise RuntimeError(str(n))
                y = y * 2
            except RuntimeError:
                break
            finally:
                y = y - 1
        else:
            y = y + 100
        return y

    return _nine(f, *(lambda n=n: (_rows(2), n) for n in range(9)))


@program
def hostile_suppressed_and_closed():
    log = []

    class Guard(contextlib.ContextDecorator):
        def __enter__(self):
            log.append("in")
            return self

        def __exit__(self, kind, value, _):
            log.append(kind.__name__ if kind else "out")
            return kind is ZeroDivisionError

    @Guard()
    def f(x, n):
        with contextlib.suppress(KeyError), Guard():
            if n % 4 == 1:
                raise KeyError(n)
            x = x / (1 // (n % 4))
        return x + n

    return _nine(f, *(lambda n=n: (_rows(2), n) for n in range(9)), observe=lambda: list(log))


# ---- descriptors and protocols ---------------------------------------------------------------------------
class Counted:
    """A descriptor that counts its reads and scales by them."""

    def __set_name__(self, owner, name):
        self.key = "_" + name

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        instance.reads += 1
        return instance.__dict__[self.key] * instance.reads

    def __set__(self, instance, value):
        instance.__dict__[self.key] = value + 1


@program
def hostile_descriptors():
    class Holder:
        scale = Counted()

        def __init__(self):
            self.reads, self.scale = 0, 1

    holder = Holder()

    def f(x):
        y = x * holder.scale
        holder.scale = holder.scale % 5
        return y + holder.scale, "scale" in vars(holder)

    return _sizes(f, lambda n: (_rows(n),), observe=lambda: dict(vars(holder)))


@program
def hostile_descriptor_replaced():
    class Holder:
        rate = property(lambda self: 2.0)

    holder = Holder()

    def shadow():
        Holder.rate = property(lambda self: 3.0)

    def constant():
        Holder.rate = 4.0

    def own():
        holder.rate = 5.0

    def gone():
        del Holder.rate

    def back():
        Holder.rate = property(lambda self: 6.0)

    def f(x):
        return x * holder.rate

    ups = (None, None, shadow, None, constant, own, gone, None, back)
    return World(f, [(up, lambda: (_rows(2),)) for up in ups])


@program
def hostile_getattr_falls_back():
    class Lazy:
        def __init__(self):
            self.made = []

        def __getattr__(self, name):
            if name.startswith("w"):
                self.made.append(name)
                value = torch.full((4,), float(len(self.made)))
                object.__setattr__(self, name, value)
                return value
            raise AttributeError(name)

    lazy = Lazy()

    def forget():
        lazy.__dict__.pop("w1", None)

    def f(x, k):
        return x + getattr(lazy, f"w{k % 3}"), hasattr(lazy, "v"), getattr(lazy, "u", 7)

    steps = [(forget if k == 5 else None, functools.partial(lambda k: (_rows(2), k), k)) for k in range(9)]
    return World(f, steps, lambda: list(lazy.made))


@program
def hostile_mappings_that_look_elsewhere():
    first, second = {"a": 1.0}, {"a": 2.0, "b": 3.0}
    chain = ChainMap(first, second)
    made = defaultdict(lambda: len(made) + 0.5)

    def take():
        first.pop("a", None)

    def put():
        second["b"] = 9.0

    def f(x, k):
        return x * chain["a"] + chain["b"] + made[k], len(made), dict(chain)

    ups = (None, None, take, None, put, None, None, take, None)
    keys = (0, 1, 0, 1, 2, 2, 3, 0, 4)
    return World(
        f, [(up, lambda k=k: (_rows(2), k)) for up, k in zip(ups, keys, strict=True)], lambda: dict(made)
    )


@program
def hostile_operators_of_users():
    class Scale:
        def __init__(self, by):
            self.by, self.uses = by, 0

        def __rmul__(self, x):
            self.uses += 1
            return x * self.by + self.uses

        def __eq__(self, other):
            self.uses += 1
            return self.by == other

        __hash__ = None

        def __index__(self):
            return self.by

    scale = Scale(2)

    def change():
        scale.by += 1

    def f(x):
        y = x.__class__.__mul__(x, scale.by) if scale == 3 else scale.__rmul__(x)
        return y, x[:, scale], list(range(scale)), scale in (1, 2, 3)

    ups = (None, None, change, None, None, change.__call__, None, None, None)
    return World(f, [(up, lambda: (normal(3, 6),)) for up in ups], lambda: scale.uses)


@program
def hostile_module_with_call_replaced():
    class Layer(nn.Module):
        def forward(self, x):
            return x * 2

    layer = Layer()

    def forward():
        layer.forward = lambda x: x * 3

    def back():
        del layer.forward

    def of_class():
        Layer.__call__ = lambda self, x: x * 5

    def undo():
        del Layer.__call__

    def training():
        layer.train(not layer.training)

    def f(x):
        return layer(x) + layer.training

    ups = (None, None, forward, None, back, of_class, undo, training, None)
    return World(f, [(up, lambda: (_rows(2),)) for up in ups])


# ---- hooks ------------------------------------------------------------------------------------------------
@program
def hostile_hooks_come_and_go():
    layer, log, handles = nn.Linear(4, 4), [], []

    def before():
        handles.append(layer.register_forward_pre_hook(lambda m, args: (args[0] + 1,)))

    def after():
        handles.append(layer.register_forward_hook(lambda m, args, out: log.append(len(args)) or out * 2))

    def remove():
        handles.pop().remove()

    def everywhere():
        handles.append(nn.modules.module.register_module_forward_hook(lambda m, args, out: out - 1))

    def f(x):
        with torch.no_grad():
            return layer(x)

    ups = (None, None, before, after, None, remove, everywhere, remove, remove)
    return World(f, [(up, lambda: (_rows(2),)) for up in ups], lambda: list(log))


@program
def hostile_hook_that_removes_itself():
    layer, log = nn.Linear(4, 4), []

    def once():
        handle = layer.register_forward_hook(
            lambda m, args, out: (handle.remove(), log.append(1), out * 0)[2]
        )

    def f(x):
        with torch.no_grad():
            return layer(x), layer(x)

    ups = (None, None, once, None, None, once, once, None, None)
    return World(f, [(up, lambda: (_rows(2),)) for up in ups], lambda: list(log))


@program
def hostile_hook_writes_its_input():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    model[1].register_forward_pre_hook(
        lambda m, args: args[0].mul_(2) and None if False else args[0].mul_(2) * 0 + args[0]
    )
    model.register_forward_hook(lambda m, args, out: args[0].add_(1) * 0 + out)

    def f(x):
        with torch.no_grad():
            return model(x), x

    return _sizes(f, lambda n: (_rows(n),))


@program
def hostile_gradient_hooks():
    log = []

    def f(x):
        x = x.detach().requires_grad_()
        y = x * 3
        y.register_hook(lambda g: log.append(float(g.sum())) or g * 2)
        (y * y).sum().backward()
        return x.grad, y.detach()

    return _sizes(f, lambda n: (_rows(n),), observe=lambda: list(log))


@program
def hostile_parametrized_weights():
    from torch.nn.utils import parametrizations, parametrize

    layer = nn.Linear(4, 4)

    class Doubled(nn.Module):
        def forward(self, w):
            return w * 2

    def doubled():
        parametrize.register_parametrization(layer, "weight", Doubled())

    def removed():
        parametrize.remove_parametrizations(layer, "weight")

    def normed():
        parametrizations.weight_norm(layer)

    def f(x):
        with torch.no_grad():
            return layer(x)

    ups = (None, None, doubled, None, removed, None, normed, None, None)
    return World(f, [(up, lambda: (_rows(2),)) for up in ups])


# ---- state and lifetimes ----------------------------------------------------------------------------------
@program
def hostile_running_statistics():
    norm = nn.BatchNorm1d(4, momentum=None)

    def turn():
        norm.train(not norm.training)

    def reset():
        norm.reset_running_stats()

    def f(x):
        with torch.no_grad():
            return norm(x), norm.num_batches_tracked + 0

    ups = (None, None, turn, None, turn, reset, None, turn, turn)
    sizes = (3, 4, 5, 5, 2, 7, 2, 5, 12)
    return World(
        f,
        [(up, functools.partial(lambda n: (_rows(n),), n)) for up, n in zip(ups, sizes, strict=True)],
        lambda: {key: value.clone() for key, value in norm.state_dict().items()},
    )


@program
def hostile_cache_that_grows():
    class Cache:
        def __init__(self):
            self.rows = torch.empty(0, 4)

        def put(self, x):
            self.rows = torch.cat([self.rows, x])[-6:]
            return self.rows

    cache = Cache()

    def f(x):
        rows = cache.put(x)
        return (x @ rows.t()).softmax(-1) @ rows, rows[:1]

    return _sizes(f, lambda n: (_rows(n, n),), observe=lambda: cache.rows.clone())


@program
def hostile_static_cache_by_positions():
    store = torch.zeros(16, 4)

    def f(x, at):
        store.index_copy_(0, torch.arange(at, at + x.shape[0]), x)
        view = store[: at + x.shape[0]]
        view[-1] += 1
        return x @ view.t(), view

    places = (0, 3, 7, 1, 15, 0, 4, 2, 4)
    return calls(
        f, *(lambda n=n, p=p: (_rows(n, p), p) for n, p in zip(SIZES, places, strict=True)),
        observe=lambda: store.clone(),
    )  # fmt: skip


@program
def hostile_weak_references():
    alive = []

    def f(x):
        y = x * 2
        seen = weakref.ref(y)
        here = seen() is y
        z = y + 1
        del y
        alive.append(seen() is None)
        return z, here

    return _sizes(f, lambda n: (_rows(n),), observe=lambda: list(alive))


@program
def hostile_generators_kept_between_calls():
    def made():
        total = torch.zeros(4)
        while True:
            x = yield total
            total = total + x.sum(0)

    running = made()
    next(running)

    def f(x):
        return running.send(x) * 2

    return _sizes(f, lambda n: (_rows(n),))


@program
def hostile_globals_rebound():
    scale, space = 2.0, {}
    exec("def f(x):\n    global n\n    n += 1\n    return helper(x) * n\ndef helper(x): return x + 1", space)
    space["n"] = 0

    def helper():
        space["helper"] = lambda x: x - scale

    def builtin():
        space["abs"] = lambda x: x

    def gone():
        del space["helper"]

    ups = (None, None, helper, None, builtin, None, gone, None, helper)
    return World(space["f"], [(up, lambda: (_rows(2),)) for up in ups], lambda: space["n"])


@program
def hostile_closures_made_in_loops():
    kept = []

    def f(x, n):
        late = [lambda y: y * i for i in range(n % 4 + 1)]
        early = [lambda y, i=i: y + i for i in range(2)]
        kept.append(late[0])
        return functools.reduce(lambda y, g: g(y), late + early, x), kept[0](x)

    return _nine(f, *(lambda n=n: (_rows(2), n) for n in range(9)))


@program
def hostile_modes_left_on():
    def f(x, n):
        if n % 3 == 1:
            torch.set_default_dtype(torch.float64)
        y = torch.ones(2) * x[0, 0]
        torch.set_default_dtype(torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=n % 2 == 0):
            z = x @ x.t()
            w = z + 1
        return y, z, w, torch.is_grad_enabled()

    return _nine(f, *(lambda n=n: (_rows(3), n) for n in range(9)))


@program
def hostile_sorts_with_ties_and_nans():
    def f(x):
        y = (x * 2).round()
        y[0, 0] = math.nan
        values, places = y.sort(0, stable=True)
        return (
            values,
            places,
            y.argmax(1),
            y.topk(2, 1).values,
            y.unique().numel(),
            y.median(1).indices,
            y.cummax(0)[0],
        )

    return _sizes(f, lambda n: (_rows(n),))


@program
def hostile_indices_that_repeat():
    def f(x, at):
        y = x.clone()
        y.index_add_(0, at, x[: at.shape[0]])
        y[at, 1] = 5
        y.index_put_((at, at % 4), torch.ones(at.shape[0]), accumulate=True)
        z = torch.zeros_like(x).scatter_add_(0, at[:, None].expand(-1, 4), x[: at.shape[0]])
        return y, z, x[at], x[at, at % 4], x.take(at)

    cases = ([0, 0], [1, 1, 1], [2, 0, 2], [], [-1], [4, 4], [3], [0, 1, 2, 3, 4], [2, 2])
    return calls(f, *(lambda c=c: (_rows(5), torch.tensor(c, dtype=torch.long).remainder(5)) for c in cases))


@program
def hostile_booleans_as_indices():
    def f(x):
        mask = x > 0
        y = x.clone()
        y[mask] = -1
        y[mask[:, 0]] += 1
        y[~mask] *= x[~mask]
        return y, x[mask], mask.nonzero().shape, x.masked_scatter(mask, torch.ones(x.numel()))

    return _sizes(f, lambda n: (_rows(n, n),))


@program
def hostile_integer_results():
    def f(x, n):
        a = (x * 100).to(torch.int8)
        b = a * n + (a << 1)
        return (
            b,
            a.sum(),
            a.float().mean(),
            b // 3,
            b % 3,
            -b.abs(),
            a.to(torch.uint8) - 1,
            (a / 2).dtype,
            b.bitwise_not(),
        )

    return _nine(f, *(lambda n=n: (_rows(3), n) for n in (1, 2, 3, -3, 127, 0, 200 - 256, 5, 7)))


@program
def hostile_16_bit_inputs_in_place():
    def f(x, y):
        x += y
        x *= 1.1
        z = x + 1e-3
        z -= x
        return z, x.float() - y.float(), (x == x.float()).all(), x.sum(), torch.addcmul(x, y, y, value=0.3)

    kinds = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return _nine(f, *(lambda k=k: (_rows(3).to(k).contiguous(), _rows(3, 1).to(k)) for k in kinds))


@program
def hostile_zero_dimensional_promotions():
    def f(x, s):
        return (
            x + s,
            x * s.to(torch.float64),
            s + 1,
            x.int() + s,
            torch.stack([s, s]).sum(),
            (x > s).int() + s.int(),
            s.item(),
        )

    kinds = (torch.float32, torch.int64, torch.float64, torch.bfloat16, torch.int8)
    return _nine(f, *(lambda k=k: (_rows(2), torch.tensor(3, dtype=k)) for k in kinds))


@program
def hostile_nothing_and_one():
    def f(x):
        sums = x.sum(0), x.mean(1), x.prod(), x.std(0), x.var(unbiased=False), x.logsumexp(1), x.norm()
        rows = x.softmax(0), F.layer_norm(x, (4,)), x.cumsum(0), torch.cat([x, x[:0]]), x.flip(0)
        return sums, rows, x.reshape(-1, 2), x.t() @ x, x.any(), x.all()

    return calls(f, *(lambda n=n: (_rows(n),) for n in (2, 3, 0, 1, 0, 1, 4, 0, 6)))


@program
def hostile_partial_and_operator():
    def f(x, name, n):
        g = functools.partial(getattr(operator, name), x)
        h = functools.partial(torch.pow, exponent=n)
        return g(n), h(x.abs()), operator.itemgetter(0, -1)(x), operator.methodcaller("sum", n % 2)(x)

    names = ("add", "mul", "sub", "truediv", "floordiv", "mod", "gt", "eq", "pow")
    return calls(
        f,
        *(lambda n=n, k=k: (_rows(3), n, k) for n, k in zip(names, (1, 2, 3, 2, 2, 3, 0, 1, 2), strict=True)),
    )


@program
def hostile_numpy_between():
    def f(x):
        y = x * 2
        seen = y.numpy()
        seen[0] = 5
        z = torch.from_numpy(seen) + y
        seen += 1
        return y, z, seen.sum().item(), torch.as_tensor(seen).data_ptr() == y.data_ptr()

    return _sizes(f, lambda n: (_rows(n),))


# ---- rows with gaps: whether a reshape is a view or a copy ------------------------------------------------
LAID: tuple[Callable[[int], torch.Tensor], ...] = (
    _rows,
    lambda n: normal(2 * n, 4)[::2],
    lambda n: normal(n, 8)[:, :4],
    lambda n: normal(4, n).t(),
    lambda n: normal(n, 8)[:, ::2],
)
"""Four columns: dense, with gaps in three ways, turned."""

GAPPED = (((4, 3), (3, 4), (1, 1), (2, 3), (2, 2), (4, 1), (2, 5), (0, 4), (2, 4)),)
GAPPED += (((2, 3), (2, 4), (1, 2), (4, 4), (0, 2), (2, 5), (1, 4), (3, 3), (1, 5)),)
GAPPED += (((1, 5), (4, 5), (0, 3), (2, 2), (0, 5), (3, 2), (3, 5), (4, 3), (0, 2)),)
"""How the argument lies, and how many rows it has, in each call."""


def _writes_a_reshape(x):
    y = x.reshape(-1)
    y.add_(1)
    return y * 1, x + 1


def _writes_a_dense_one(x):
    y = x.contiguous()
    y.mul_(2)
    return x + 1, y is x


def _writes_a_flattened_part(x):
    y = torch.flatten(x, 0)[1:]
    y += 1
    z = x[:2].contiguous()
    z.zero_()
    return x * 1


def _copies_onto_itself(x):
    x.copy_(x.flip(0).reshape(-1).view(x.shape))
    x.reshape(-1).add_(1)
    return x * 2


def _gives_reshapes(x):
    return x.flatten(), x.contiguous() * 2, x.reshape(x.shape)


def _gives_a_dense_one(x):
    return x.contiguous()


def _reads_strides(x):
    y = x[:1]
    return y.is_contiguous(), y.reshape(-1).stride(), x[:2, :2].stride(), x + 1


for _function in (
    *(_writes_a_reshape, _writes_a_dense_one, _writes_a_flattened_part, _copies_onto_itself),
    *(_gives_reshapes, _gives_a_dense_one, _reads_strides),
):
    for _number, _calls in enumerate(GAPPED):
        programs(**{
            f"hostile_gapped{_function.__name__}_{_number}": functools.partial(
                calls, _function, *(lambda k=k, n=n: (LAID[k](n),) for k, n in _calls)
            )
        })  # fmt: skip
