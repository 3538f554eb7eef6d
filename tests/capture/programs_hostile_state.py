"""Programs made to be run wrongly: state and lifetimes, rows with gaps."""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F
from capture_world import World, calls, normal, program, programs
from hostile_worlds import SIZES
from hostile_worlds import nine as _nine
from hostile_worlds import rows as _rows
from hostile_worlds import sizes as _sizes
from torch import nn


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
