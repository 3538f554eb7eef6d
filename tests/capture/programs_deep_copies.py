"""Deep copies of tensors that share memory, or may: the copies share it too."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from capture_world import World, calls, normal, program


def views(x: Any) -> dict[str, Any]:
    return {"x": x, "rows": [x.view(2, 3), x], "rest": (x[1:],)}


@program
def deep_copies_of_views():
    def fn(x):
        made = copy.deepcopy(views(x))
        made["x"].fill_(7.0)
        return made, x

    return calls(fn, *[lambda: (normal(6),)] * 4)


@program
def deep_copies_of_what_the_program_computes():
    def fn(x):
        y = torch.relu(x) + 1
        made = copy.deepcopy([y, set(), y.untyped_storage(), y.view(3, 2)])
        made[0].mul_(2)
        return made[0], made[2].data_ptr() == made[0].data_ptr(), made[3], y

    return calls(fn, *[lambda: (normal(6),)] * 4)


@program
def deep_copies_with_one_memo():
    def fn(x):
        memo: dict[Any, Any] = {}
        first, second = copy.deepcopy(x, memo), copy.deepcopy(x[1:], memo)
        first.fill_(3.0)
        return first, second, copy.deepcopy(x[2:])

    return calls(fn, *[lambda: (normal(6),)] * 4)


def _shared_later(x: Any, y: Any) -> Any:
    made = copy.deepcopy(SimpleNamespace(x=x, inside={"y": y}))
    made.x.fill_(1.0)
    return made.x, made.inside["y"], copy.deepcopy(y)


@program
def deep_copies_of_arguments_that_share_memory_later() -> World:
    def apart() -> tuple[Any, Any]:
        return normal(6), normal(2, 3)

    def shared() -> tuple[Any, Any]:
        x = normal(6)
        return x, x.view(2, 3)

    return calls(_shared_later, apart, apart, shared, apart, shared, shared)


class Keeps:
    """An object whose copies keep a tensor that they share with what is around them."""

    def __init__(self, x: Any) -> None:
        self.x, self.y = x, x[:3]

    def __deepcopy__(self, memo: Any) -> Keeps:
        made = Keeps.__new__(Keeps)
        memo[id(self)] = made
        made.x, made.y = copy.deepcopy(self.x, memo), copy.deepcopy(self.y, memo)
        return made


@program
def deep_copies_by_methods_of_the_program():
    def fn(x):
        made = copy.deepcopy([Keeps(x), Keeps(x * 2)])
        made[0].x.fill_(5.0)
        made[1].y.add_(1)
        return [(each.x, each.y) for each in made], x

    return calls(fn, *[lambda: (normal(6),)] * 4)


class Holds(torch.nn.Module):
    """A module two of whose buffers show one memory; its parameter is copied apart."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(6))
        self.register_buffer("whole", torch.ones(6))
        self.register_buffer("part", self.whole[:2])
        self.register_buffer("shown", self.weight.data[:2])


@program
def deep_copies_of_modules_whose_buffers_share_memory():
    model = Holds()

    def fn(x):
        made = copy.deepcopy(model)
        made.whole.add_(x)
        made.weight.data.add_(1)
        return made.part, made.shown, model.part

    return calls(fn, *[lambda: (normal(6),)] * 4)
