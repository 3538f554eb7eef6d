"""Checks that fail before, between and after changes: what is left is what is left without capture."""

from __future__ import annotations

import random

import torch
from capture_world import World, normal, program
from torch import nn

GOOD = (True, True, True, False, True, False, False, False, False, True, False)


def _checked(function, observe=None, given=None) -> World:
    """Return a world of calls whose last argument is finite in some only."""

    def arguments(holds, seed):
        last = normal(3, 4, seed=seed) * (1.0 if holds else torch.nan)
        return lambda: (*(given() if given else ()), last.clone())

    return World(function, [(None, arguments(*item)) for item in zip(GOOD, range(20))], observe)


@program
def checks_between_changes():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))
            self.norm, self.drop, self.calls, self.log = nn.BatchNorm1d(4), nn.Dropout(0.5), 0, []

        def forward(self, x):
            self.seen += 1
            self.calls += 1
            self.log.append(self.norm(self.drop(x)).sum())
            x.add_(1)
            assert torch.isfinite(x).all(), f"of call {self.calls}"
            self.seen.mul_(2)
            self.log.append(self.norm(x) + random.random())
            return x.mul_(3) * torch.rand(4)

    layer = Layer()

    def observe():
        states = layer.state_dict().values()
        return [*states], [state._version for state in states], layer.calls, list(layer.log)

    return _checked(layer, observe)


@program
def checks_that_are_handled():
    log, state = [], torch.zeros(1)

    def fn(x):
        out = x
        try:
            log.append("try")
            x.mul_(2)
            assert torch.isfinite(x).all(), "not finite"
            out = x + state.add_(10)
        except AssertionError as error:
            log.append(str(error))
            out = torch.rand(3) + x.zero_().sum()
        else:
            log.append("else")
        finally:
            log.append("finally")
            state.mul_(2)
        return out

    return _checked(fn, lambda: (list(log), state, state._version))


@program
def checks_around_writes_with_history():
    weight, kept = nn.Parameter(torch.ones(3, 4)), []

    def given():
        kept[:] = [weight * 2, (weight * weight).sum()]
        return kept[:1]

    def fn(made, x):
        made.mul_(2)
        assert torch.isfinite(x).all(), "not finite"
        made.mul_(3)
        with torch.no_grad():
            weight.mul_(2)
        return made

    def observe():
        weight.grad = None
        kept[0].sum().backward()
        return weight.grad.clone(), weight, weight._version, kept[0]._version

    return _checked(fn, observe, given)


@program
def checks_before_writes_of_what_autograd_has_saved():
    weight, kept = nn.Parameter(torch.ones(3, 4)), []

    def given():
        kept[:] = [(weight * weight).sum()]
        return ()

    def fn(x):
        assert torch.isfinite(x).all(), "not finite"
        with torch.no_grad():
            weight.mul_(2)
        return x

    def observe():
        weight.grad = None
        try:
            kept[0].backward()
        except RuntimeError:
            return weight._version
        return weight.grad.clone(), weight._version

    return _checked(fn, observe, given)


@program
def checks_before_gradients_are_asked_for():
    kept = []

    def given():
        kept[:] = [torch.ones(3)]
        return kept

    def fn(made, x):
        y = x.sum()
        assert not torch.isnan(y), "not a number"
        return made.requires_grad_() * y

    return _checked(fn, lambda: kept[0].requires_grad, given)


@program
def checks_and_tensors_that_share_memory():
    base = torch.zeros(6, 4)
    view, other = base[:3], base.detach()

    def fn(x):
        view.add_(1)
        other.mul_(2)
        assert torch.isfinite(x).all(), "not finite"
        base[3:].copy_(x)
        return x + view

    return _checked(fn, lambda: (base, base._version, view._version, other._version))
