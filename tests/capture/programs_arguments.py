"""Arguments of many types, scalars and shapes."""

from __future__ import annotations

import collections
import inspect
import math

import numpy as np
import torch
import torch.nn.functional as F
from capture_world import calls, normal, program
from torch import nn


@program
def async_not_run():
    async def co(x):
        return x * 2

    async def ag():
        yield 1

    def fn(x):
        c = co(x)
        try:
            c.send(None)
        except StopIteration as e:
            return e.value, inspect.iscoroutine(c)

    return calls(fn, *[lambda: (normal(3),)] * 3)


@program
def inspect_and_names():
    class A:
        "doc"

        def f(s, a, b=1):
            "fdoc"
            return a

    def fn(x):
        return (
            x * 2,
            A.__doc__,
            A.f.__doc__,
            A().f.__name__,
            fn.__name__,
            A.__name__,
            str(inspect.signature(A.f)),
            type(x).__name__,
            A.__module__,
            fn.__code__.co_name,
            A.f.__qualname__,
            (lambda: 0).__name__,
            x.__class__ is torch.Tensor,
        )

    return calls(fn, *[lambda: (normal(3),)] * 3)


@program
def type_checks_on_changing_args():
    def fn(x, v):
        if isinstance(v, bool):
            return x, "bool"
        if isinstance(v, (int, float)):
            return x * v, type(v).__name__
        if callable(v):
            return v(x), "call"
        if isinstance(v, dict):
            return {k: x for k in v}, "dict"
        if isinstance(v, collections.abc.Sequence):
            return [x] * len(v), type(v) is str
        if v is None:
            return x
        if torch.is_tensor(v):
            return x + v
        if hasattr(v, "shape"):
            return v.shape
        return type(v)

    vs = [
        True,
        1,
        2.5,
        torch.relu,
        {"a": 1},
        [1, 2],
        "ab",
        (1,),
        None,
        torch.ones(3),
        np.ones(2),
        object(),
        1,
        False,
        collections.UserList([1]),
        range(3),
        {1},
        b"z",
    ]
    return calls(fn, *[lambda v=v: (normal(3), v) for v in vs + vs[:6]])


@program
def nan_inf_scalars_vary():
    def fn(x, a):
        return (
            x * a,
            a == a,
            a > 0,
            max(a, 0.0),
            min(0.0, a),
            a if a else "z",
            math.copysign(1, a),
            str(a),
            [a] == [a],
            a in [a],
            hash(a) == hash(a),
        )

    vals = [1.0, float("nan"), float("inf"), -0.0, 0.0, -float("inf"), 1e-320, float("nan"), 2.0, -0.0, 3]
    return calls(fn, *[lambda a=a: (torch.ones(3), a) for a in vals])


@program
def bool_int_alternate():
    def fn(x, a, b):
        return (
            x * a,
            a + b,
            a is True,
            a == 1,
            type(a + b),
            [0, 1][a],
            a and b,
            {a: b},
            f"{a}{b}",
            isinstance(a, bool),
            a * 2.0,
        )

    return calls(
        fn,
        *[
            lambda a=a, b=b: (torch.ones(3), a, b)
            for a, b in (
                (True, 1),
                (1, True),
                (0, False),
                (False, 0),
                (True, True),
                (1, 1),
                (2, 3),
                (True, 0),
            )
        ],
    )


@program
def shape_polymorphic_module():
    m = nn.Sequential(
        nn.Conv1d(3, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.AdaptiveAvgPool1d(2),
        nn.Flatten(),
        nn.Linear(8, 2),
    )

    def fn(x):
        b, c, t = x.shape
        y = m(x)
        return (
            y.view(b, -1),
            F.interpolate(x, size=t * 2),
            x.reshape(b * c, t).sum(1).view(b, c),
            torch.arange(t).expand(b, t),
            y.new_zeros(b, t),
            (x - x.mean(-1, keepdim=True)) / t**0.5,
        )

    return calls(
        fn,
        *[
            lambda b=b, t=t: (normal(b, 3, t),)
            for b, t in ((1, 4), (2, 4), (2, 5), (3, 6), (4, 7), (1, 9), (5, 4), (2, 8), (1, 1))
        ],
    )
