"""Random numbers: the same as without capture, and the generators in the same state afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from capture_world import World, calls, normal, programs
from torch import nn


def _growing(function: Callable[..., Any]) -> World:
    return calls(function, *[lambda n=n: (normal(n, 4),) for n in (3, 3, 5, 7, 9, 4, 3)])


def _by_name(x: Any) -> Any:
    limits = {"from": -10, "to": 10}  # a name that code cannot spell
    return x.clone().random_(**limits), x.clone().uniform_(**limits)


def _late_use(x: Any) -> Any:
    first = torch.rand(4)
    second = torch.randn(x.shape)
    heavy = torch.softmax(x @ x.t(), -1) @ second
    third = torch.rand(4)
    return heavy * third, (second + first).exp()


def _branching(x: Any) -> Any:
    if x.sum() > 0:
        return x * torch.rand(4)
    return x - torch.randn(4) * torch.rand(4)


def _seeded_inside(x: Any) -> Any:
    torch.manual_seed(7)
    return x + torch.rand(4)


def _forked(x: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        inside = torch.rand(4)
    return x * inside + torch.rand(4)


def _looped(x: Any) -> Any:
    for _ in range(4):
        x = x + torch.rand(4) * torch.sigmoid(x)
    return x


def _state_read(x: Any) -> Any:
    before = torch.get_rng_state()
    y = x + torch.rand(4)
    torch.set_rng_state(before)
    return y, torch.rand(4)


def _unused(x: Any) -> Any:
    torch.rand(3)
    return x + 1, torch.rand(2)


def _failed_after_drawing(x: Any) -> Any:
    noise = torch.rand(4)
    try:
        return torch.cat([x, noise[None, :2]])
    except RuntimeError:
        return noise * torch.rand(4)


def _python_random(x: Any) -> Any:
    return x * random.random() + random.randint(0, 9), random.choice([1, 2, 3])


def _numpy_random(x: Any) -> Any:
    return x + torch.from_numpy(np.random.rand(4)).float()


def _by_generator() -> World:
    generator = torch.Generator().manual_seed(5)
    return calls(
        lambda x: x + torch.rand(4, generator=generator),
        *[lambda: (normal(3, 4),)] * 5,
        observe=lambda: generator.get_state().sum().item(),
    )


def _given_generator() -> World:
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    return calls(
        lambda x, g: torch.randn(4, generator=g) * x,
        *[lambda at=at: (normal(2, 4), generators[at]) for at in (0, 0, 1, 2, 0, 1)],
    )


def _training_modes() -> World:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.2)).requires_grad_(False)
    world = calls(module, *[lambda: (normal(3, 4),)] * 8)
    switches = (module.train, module.train, module.eval, module.train, module.eval, module.eval)
    world.steps = [(switch, make) for switch, (_, make) in zip((*switches, None, None), world.steps)]
    return world


def _probability_changes() -> World:
    module = nn.Dropout(0.5)

    def set_to(p: float) -> Callable[[], Any]:
        return lambda: setattr(module, "p", p)

    world = calls(lambda x: module(x) + 1, *[lambda: (normal(3, 4),)] * 7)
    world.steps = [
        (set_to(p), make) for p, (_, make) in zip((0.5, 0.5, 0.1, 0.9, 0.0, 1.0, 0.5), world.steps)
    ]
    return world


def _interrupted() -> World:
    def drawn(x: Any, ids: Any) -> Any:
        noise = torch.rand(4)
        return noise + functional.embedding(ids, x)

    return calls(drawn, *[lambda n=n: (normal(3, 4), torch.tensor([n])) for n in (0, 1, 5, 2, 7, 1)])


_of_one: dict[str, Callable[[Any], Any]] = {
    "rand": lambda x: x + torch.rand(x.shape),
    "rand_of_a_number": lambda x: x * torch.rand(4) - torch.rand(4),
    "randn_of_an_extent": lambda x: torch.randn(x.shape[0], 2).sum() + x,
    "randint": lambda x: x + torch.randint(0, 9, (x.shape[0], 1)),
    "randperm": lambda x: x[torch.randperm(x.shape[0])],
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)) * x,
    "multinomial": lambda x: torch.multinomial(torch.softmax(x, -1), 2),
    "normal_in_place": lambda x: torch.empty(x.shape[0], 4).normal_() + x,
    "exponential": lambda x: torch.empty_like(x).exponential_() + x,
    "dropout": lambda x: functional.dropout(x, 0.4) + functional.dropout(x, 0.4),
    "dropout_of_features": lambda x: functional.dropout1d(x[None], 0.4),
    "gumbel": lambda x: functional.gumbel_softmax(x),
    "attention": lambda x: functional.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None], dropout_p=0.5
    ),
    "distribution": lambda x: torch.distributions.Normal(x, 1.0, validate_args=False).sample(),
    "late_use": _late_use,
    "branching": _branching,
    "seeded_inside": _seeded_inside,
    "forked": _forked,
    "looped": _looped,
    "state_read": _state_read,
    "unused": _unused,
    "failed_after_drawing": _failed_after_drawing,
    "python": _python_random,
    "by_name": _by_name,
    "numpy": _numpy_random,
}
for _name, _function in _of_one.items():
    programs(**{f"random_{_name}": lambda function=_function: _growing(function)})  # type: ignore[misc]
programs(
    random_by_generator=_by_generator,
    random_given_generator=_given_generator,
    random_training_modes=_training_modes,
    random_probability_changes=_probability_changes,
    random_interrupted=_interrupted,
)
