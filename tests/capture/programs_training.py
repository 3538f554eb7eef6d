"""Steps of training and what surrounds them: optimizers, labels for profilers."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from capture_world import World, calls, normal, program, programs
from torch import nn
from torch.profiler import record_function


@program
def labels_of_profilers():
    class Part(nn.Module):
        label = record_function("kept")

        @record_function("whole")
        def forward(self, x):
            with record_function("first") as first:
                y = x * 2
            with self.label, record_function("second", "args"):
                return y + 1, first.name

    return calls(Part(), *[lambda: (normal(3),)] * 2, lambda: (normal(5),))


@program
def labels_where_recording_ends():
    label = record_function("kept")

    def fn(x):
        with label, record_function("inner"):
            if x.sum() > 0:  # changes nothing behind it that is not another side
                label.note = "more"
            y = x.tolist()
        return y, x + 1

    return calls(fn, *(lambda sign=sign: (normal(80).abs() * sign,) for sign in (1, -1, 1)))


@program
def labels_that_errors_leave():
    label = record_function("kept")

    def fn(x):
        try:
            with label, record_function("inner"):
                y = x * 2
                if x.shape[0] == 2:
                    raise ValueError("two")
        except ValueError as error:
            return str(error), x
        with label:
            return y, x.reshape(7)

    return calls(fn, *(lambda size=size: (normal(size),) for size in (2, 3, 7, 2)))


@program
def labels_that_profilers_see():
    """A profiler begins and ends between the calls: it sees the labels of the call inside."""
    seen, open_ones = [], []
    label = record_function("kept")

    def begin():
        open_ones.append(torch.autograd.profiler.profile().__enter__())

    def end():
        profiler = open_ones.pop()
        profiler.__exit__(None, None, None)
        seen.append(sorted({e.name for e in profiler.function_events} & {"one", "kept"}))

    def fn(x):
        with record_function("one"):
            y = x * 2
        with label:
            return y + 1

    make = lambda: (normal(3),)
    return World(fn, [(None, make), (begin, make), (end, make), (begin, make), (end, make)], lambda: [*seen])


def _trained(kind, **given):
    """Steps of an optimizer: what it computes is the same, and so is what it keeps."""

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))
        optimizer = kind(model.parameters(), lr=0.01, **given)

        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        given_step = [lambda seed=seed: (normal(5, 3, seed=seed), torch.arange(5) % 2) for seed in range(5)]
        return calls(step, *given_step, observe=lambda: (model.state_dict(), optimizer.state_dict()))

    return make


OPTIMIZERS = {
    "adam": (torch.optim.Adam, {}),
    "adam_at_once": (torch.optim.Adam, {"foreach": True, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {"foreach": True}),
    "adamax": (torch.optim.Adamax, {}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True}),
    "adafactor": (torch.optim.Adafactor, {}),
}
programs(**{f"steps_of_{name}": _trained(kind, **given) for name, (kind, given) in OPTIMIZERS.items()})


def _changing(state, x, step):
    """What training computes of a number of steps: rates that decay, biases that are corrected."""
    rate = 0.1 * 0.9**step / (1 - 0.5**step)
    state["mean"].lerp_(x, 1 - 0.9**step)
    state["mean"].addcdiv_(x, x.abs() + 1, value=-rate)
    return torch.clamp(torch.add(x, state["mean"], alpha=rate), max=rate) * rate


@program
def counts_of_steps_that_change():
    """A number that each call finds changed, behind a graph break: of a counter, of a tensor."""
    count, state = itertools.count(1), {"mean": torch.zeros(3), "step": torch.tensor(0.0)}

    def fn(x):
        state["step"] += 1
        return _changing(state, x, next(count)), _changing(state, x, state["step"].item())

    given = [lambda seed=seed: (normal(3, seed=seed),) for seed in range(12)]
    return calls(fn, *given, observe=lambda: (state["mean"], state["step"]))
