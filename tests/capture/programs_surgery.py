"""Getters, modules, functions and context managers that are changed between calls."""

from __future__ import annotations

import contextlib
import functools
import operator
import types
from typing import Any

import torch
from capture_world import World, calls, normal, programs_of, steps
from torch import nn


def _getters() -> World:
    held = types.SimpleNamespace(inner=types.SimpleNamespace(scale=2.0), items=[1.0, 2.0, 3.0])
    get, at = operator.attrgetter("inner.scale"), operator.itemgetter(0, -1)
    call = operator.methodcaller("add", 1.0)
    return steps(
        lambda x: call(x) * get(held) + sum(at(held.items)),
        *(None, None, lambda: setattr(held.inner, "scale", 3.0), lambda: held.items.append(9.0), None),
        lambda: setattr(held, "inner", types.SimpleNamespace(scale=0.5)),
    )


def _module_surgery() -> World:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.ReLU()}).requires_grad_(False)

    def run(x: Any) -> Any:
        for name, layer in model.items():
            x = layer(x) + len(name)
        return x, sum(p.numel() for p in model.parameters()), [n for n, _ in model.named_buffers()]

    return steps(
        run,
        *(None, None, lambda: model.update({"cc": nn.Tanh()}), None, lambda: model.pop("b")),
        *(lambda: model["a"].register_buffer("extra", torch.ones(1)), None),
        lambda: setattr(model["a"], "bias", None),
    )


def _parameter_replaced() -> World:
    layer = nn.Linear(4, 4).requires_grad_(False)
    other = nn.Parameter(normal(4, 4, seed=5), requires_grad=False)
    tied = nn.Linear(4, 4).requires_grad_(False)
    return steps(
        lambda x: tied(layer(x)),
        *(None, None, lambda: setattr(layer, "weight", other), None, lambda: setattr(tied, "weight", other)),
        *(
            lambda: other.mul_(2),
            lambda: setattr(other, "data", normal(4, 4, seed=9)),
            lambda: layer.double().float(),
        ),
    )


def _state_of_a_function() -> World:
    def counted(x: Any) -> Any:
        counted.calls += 1
        counted.last = x
        return x * counted.calls

    counted.calls, counted.last = 0, None
    return steps(counted, *[None] * 5, observe=lambda: (counted.calls, counted.last))


def _replaced_code() -> World:
    def inner(x: Any, scale: float = 2.0) -> Any:
        return x * scale

    def other(x: Any, scale: float = 2.0) -> Any:
        return x + scale * 100

    return steps(
        lambda x: inner(x) + 1,
        *(None, None, lambda: setattr(inner, "__defaults__", (7.0,)), None),
        lambda: setattr(inner, "__code__", other.__code__),
        None,
    )


def _module_getattr() -> World:
    module = types.ModuleType("changing")
    module.scale = 2.0
    return steps(
        lambda x: x * module.scale,
        *(None, None, lambda: setattr(module, "scale", 4.0), None, lambda: delattr(module, "scale")),
        lambda: setattr(module, "__getattr__", lambda name: 6.0),
        None,
    )


def _context_class() -> World:
    log: list[Any] = []

    class Guard(contextlib.ContextDecorator):
        def __init__(self, swallow: bool) -> None:
            self.swallow = swallow

        def __enter__(self) -> Guard:
            log.append("in")
            return self

        def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
            log.append(str(error))
            return self.swallow

    def function(x: Any, n: int) -> Any:
        with Guard(n > 1) as guard:
            if n:
                raise ValueError(f"n is {n}")
            x = x + 1
        return x * 2, guard.swallow

    return calls(
        function, *[lambda n=n: (normal(3), n) for n in (0, 2, 0, 3, 1, 2, 0)], observe=lambda: list(log)
    )


def _wrapped() -> World:
    log: list[str] = []

    def logged(tag: str) -> Any:
        def around(function: Any) -> Any:
            @functools.wraps(function)
            def inner(*args: Any, **kwargs: Any) -> Any:
                log.append(f"{tag}:{function.__name__}:{len(args)}")
                return function(*args, **kwargs) * inner.factor

            inner.factor = 2
            return inner

        return around

    @logged("outer")
    @logged("inner")
    def run(x: Any, *, shift: float = 1.0) -> Any:
        return x + shift

    return steps(
        lambda x: run(x, shift=2.0),
        *(
            None,
            None,
            lambda: setattr(run, "factor", 5),
            None,
            lambda: setattr(run.__wrapped__, "factor", 0.5),
        ),
        observe=lambda: list(log),
    )


programs_of(globals(), "class")
