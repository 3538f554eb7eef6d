"""Tensors whose ``data`` are set: what shares memory with them, versions, gradients, later calls."""

from __future__ import annotations

import torch
from capture_world import calls, normal, program, steps
from torch import nn


def _given(count=6):
    return [lambda seed=seed: (normal(3, 4, seed=seed),) for seed in range(count)]


@program
def data_of_a_parameter():
    lin = nn.Linear(4, 4)

    def fn(x):
        lin.weight.data = lin.weight.data * 0.9 + 0.1
        return lin(x)

    return calls(fn, *_given(), observe=lambda: (lin.weight, lin.weight._version, lin.weight.is_leaf))


@program
def data_of_a_parameter_without_gradients():
    lin = nn.Linear(4, 4)

    def fn(x):
        with torch.no_grad():
            lin.weight.data = torch.nn.functional.normalize(lin.weight.data, dim=1)
            return lin(x)

    return calls(fn, *_given(), observe=lambda: (lin.weight, lin.weight._version))


@program
def data_written_at_the_first_call():
    class ActNorm(nn.Module):
        def __init__(s):
            super().__init__()
            s.loc = nn.Parameter(torch.zeros(1, 4))
            s.scale = nn.Parameter(torch.ones(1, 4))
            s.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

        def forward(s, x):
            if s.initialized.item() == 0:
                with torch.no_grad():
                    m = x.mean(0, keepdim=True)
                    d = x.std(0, keepdim=True)
                    s.loc.data.copy_(-m)
                    s.scale.data.copy_(1 / (d + 1e-6))
                s.initialized.fill_(1)
            return s.scale * (x + s.loc)

    m = ActNorm()
    return calls(m, *_given(), observe=lambda: dict(m.state_dict()))


@program
def data_set_at_the_first_call():
    class ActNorm(nn.Module):
        def __init__(s):
            super().__init__()
            s.loc = nn.Parameter(torch.zeros(4))
            s.done = False

        def forward(s, x):
            if not s.done:
                s.loc.data = -x.mean(0)
                s.done = True
            return x + s.loc

    m = ActNorm()
    return calls(m, *_given(), observe=lambda: dict(m.state_dict()))


@program
def data_set_beside_aliases():
    w = torch.ones(3, 4)
    v = w.view(-1)
    d = w.detach()
    other = torch.zeros(3, 4)

    def fn(x):
        w.data = x
        w.add_(1)
        v.mul_(2)
        return w, v + 0, d + x, w.data.mul_(2)

    return calls(fn, *_given(), observe=lambda: (w, v, d, w._version, v._version, d._version))


@program
def data_that_are_an_argument():
    w = nn.Parameter(torch.ones(3, 4))

    def fn(x):
        w.data = x
        x.add_(1)
        return w * 2, x

    return calls(fn, *_given(), observe=lambda: (w, w._version))


@program
def data_of_other_shapes():
    w = torch.ones(3, 4)

    def fn(x):
        w.data = w.data[:, :-1] if w.shape[1] > 1 else torch.ones(3, 4)
        return w.sum(), w.shape, x.sum()

    return calls(fn, *_given(12), observe=lambda: (w, w._version))


@program
def data_of_other_types():
    w = torch.ones(3, 4)

    def fn(x):
        w.data = w.data.double() if w.dtype is torch.float32 else w.data.float()
        return w * 2, w.dtype

    return calls(fn, *_given(8), observe=lambda: (w, w._version))


@program
def data_that_move_on():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)

    def fn(x):
        for p_, q in zip(a.parameters(), b.parameters()):
            q.data = q.data * 0.9 + (1 - 0.9) * p_.data
        return b(x)

    return calls(fn, *_given(), observe=lambda: (list(b.parameters()), [q._version for q in b.parameters()]))


@program
def data_of_views():
    def fn(x):
        y, z = x.view_as(x), (x * 2).t()
        y.data = x > 0
        z.data = torch.arange(3)
        return y.logical_not(), z + 1, y.expand(2, 3, 4), z.unfold(0, 2, 1), x.nonzero().sum() + x.exp().sum()

    return calls(fn, *_given())


@program
def data_of_what_is_made_here():
    def fn(x):
        y = torch.zeros(3, 4)
        z = y.view(12)
        y.data = x * 2
        z.add_(1)
        return y, z, y * z.view(3, 4)

    return calls(fn, *_given())


@program
def data_that_change_places():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)

    def fn(x):
        tmp = a.weight.data
        a.weight.data = b.weight.data
        b.weight.data = tmp
        return a(x) - b(x), tmp

    return calls(fn, *_given(), observe=lambda: (a.weight, b.weight, a.weight._version))


@program
def data_set_after_they_were_saved():
    w = nn.Parameter(torch.ones(3, 4))
    kept = []

    def fn(x):
        y = (w * w).sum()
        w.data = w.data * 2
        kept[:] = [y + (w * x).sum()]
        return y

    def observe():
        w.grad = None
        kept[0].backward()
        return w.grad, w._version

    return calls(fn, *_given(), observe=observe)


@program
def data_that_do_not_fit():
    w = nn.Parameter(torch.ones(3, 4))

    def fn(x, bad):
        try:
            w.data = bad
        except (TypeError, RuntimeError) as e:
            return type(e).__name__, str(e)
        return w * x

    return calls(
        fn,
        *[
            lambda b=b: (normal(3, 4), b)
            for b in (
                None,
                torch.ones(3, 4, dtype=torch.int64),
                torch.ones(2),
                torch.ones(3, 4).requires_grad_() * 2,
                3,
            )
        ],
        observe=lambda: w,
    )


@program
def data_set_around_a_check():
    w = torch.ones(3, 4)

    def fn(x):
        w.data = w.data + x
        assert torch.isfinite(x).all()
        w.data = w.data * 2
        return w + 1

    return calls(
        fn, *_given(4), lambda: (normal(3, 4) * torch.nan,), *_given(3), observe=lambda: (w, w._version)
    )


@program
def data_of_an_argument():
    def fn(x):
        x.data = x.data.clone().t()
        return x.sum(0), x

    return calls(fn, *_given())


@program
def data_deleted():
    w = torch.ones(3)

    def fn(x):
        del w.data

    return calls(fn, *_given(2))


@program
def data_of_a_view():
    base = torch.ones(6, 4)
    v = base[:3]

    def fn(x):
        v.data = x
        base.add_(1)
        return v + base[:3]

    return calls(fn, *_given(), observe=lambda: (base, v, v._version, base._version, v._is_view()))


@program
def data_that_repeat():
    w = torch.ones(3, 4)

    def fn(x):
        w.data = x[:1].expand(3, 4)
        return w * 2

    return calls(fn, *_given(), observe=lambda: w)


@program
def data_set_to_themselves():
    layer = nn.Linear(4, 4)

    def fn(x):
        layer.weight.data = layer.weight.data.to(device=x.device, dtype=x.dtype)
        return layer(x), layer.weight.t()

    def grown():
        with torch.no_grad():
            layer.weight.add_(1)

    return steps(fn, None, None, grown, lambda: layer.double(), None, observe=lambda: layer.weight)


@program
def data_of_a_center():
    center = torch.zeros(1, 4)

    def fn(x, y):
        loss = (torch.softmax(x - center, -1) * torch.log_softmax(y, -1)).sum(-1).mean()
        center.data = center * 0.9 + x.mean(0, keepdim=True).detach() * 0.1
        return loss, (x - center).sum()

    made = [lambda n=n: (normal(n, 4, seed=n), normal(n, 4).requires_grad_()) for n in (3, 5, 3, 7, 6)]
    return calls(fn, *made, observe=lambda: (center, center._version))
