"""Settings of torch that programs change, and what numbers, truth values and arguments of all kinds mean."""

from __future__ import annotations

import contextlib
import decimal
import enum
import fractions
import functools
import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from capture_world import World, calls, normal, normals, programs_of, steps
from torch import nn


def normals_of(n: int) -> Any:
    return lambda: (normal(3), n)


def _default_types() -> World:
    def function(x: Any, n: int) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype((torch.float32, torch.float64, torch.float16)[n])
        try:
            y = torch.ones(3) * x + torch.tensor(0.5) + torch.arange(3) / 2
            return y, torch.full((2,), 1.0), torch.tensor([1j]).dtype, torch.get_default_dtype(), before
        finally:
            if n != 2:
                torch.set_default_dtype(before)

    def back() -> None:
        torch.set_default_dtype(torch.float32)

    order = (0, 1, 2, 0, 1)
    return World(
        function, [(back if n else None, lambda n=n: (normal(3), n)) for n in order] + [(back, normals_of(0))]
    )


def _type_set_between() -> World:
    def function(x: Any) -> Any:
        return (
            x + torch.linspace(0, 1, 3),
            torch.zeros(2),
            torch.tensor(2.0) * 3,
            x.to(torch.get_default_dtype()),
        )

    def put(kind: Any) -> Any:
        return lambda: torch.set_default_dtype(kind)

    return steps(
        function, *(None, None, put(torch.float64), None, put(torch.bfloat16), put(torch.float32), None)
    )


def _deterministic_algorithms() -> World:
    def put(on: bool) -> Any:
        return lambda: torch.use_deterministic_algorithms(on)

    def function(x: Any) -> Any:
        empty = torch.empty(3)
        filled = x.new_empty(2, 2) if torch.are_deterministic_algorithms_enabled() else torch.zeros(2, 2)
        grown = x.clone().resize_(5)[3:] if torch.are_deterministic_algorithms_enabled() else None
        return x.index_add(0, torch.tensor([0, 0]), x[:2]), filled, grown, empty.shape

    return steps(function, *(None, put(True), None, put(False), put(True), put(False)))


def _random_state_put_back() -> World:
    generator = torch.Generator().manual_seed(3)

    def function(x: Any, n: int) -> Any:
        state, held = torch.get_rng_state(), generator.get_state()
        first = torch.rand(3)
        if n == 1:
            torch.set_rng_state(state)
        elif n == 2:
            generator.set_state(held)
            torch.manual_seed(generator.initial_seed() + n)
        with torch.random.fork_rng(devices=[]):
            inside = torch.randn_like(x) + torch.rand(3, generator=generator)
        if n == 3:
            generator.set_state(held)
        return first, torch.rand(3), inside, functional.dropout(x, 0.5), generator.initial_seed()

    return calls(
        function,
        *[lambda n=n: (normal(3), n) for n in (0, 1, 2, 3, 1, 0)],
        observe=lambda: generator.get_state().sum().item(),
    )


def _small_numbers_flushed() -> World:
    def function(x: Any) -> Any:
        return x * 0.5, x + 0, torch.relu(x) * 2

    def tiny() -> Any:
        return (torch.tensor([1e-39, -2e-38, 1.0, 3e-45]),)

    def put(on: bool) -> Any:
        return lambda: torch.set_flush_denormal(on) and None

    return World(function, [(set_up, tiny) for set_up in (None, None, put(True), None, put(False), None)])


def _numbers_of_other_kinds() -> World:
    class Scale:
        def __init__(self, value: float) -> None:
            self.value = value

        def __radd__(self, other: Any) -> Any:
            return other * self.value

        def __rmatmul__(self, other: Any) -> Any:
            return "matmul", other.sum()

        def __float__(self) -> float:
            return self.value

        def __index__(self) -> int:
            return int(self.value)

    def function(x: Any, v: Any) -> Any:
        found = []
        for compute in (
            lambda: x + v,
            lambda: x * v,
            lambda: v * x,
            lambda: x @ v,
            lambda: x[: v % 3 if isinstance(v, int) else v],
            lambda: torch.full((2,), v),
            lambda: x.new_tensor([v]),
            lambda: x**v,
        ):
            try:
                found.append(compute())
            except Exception as error:
                found.append(type(error).__name__)
        return found

    values = (
        2,
        True,
        2.5,
        np.float64(1.5),
        np.float32(1.5),
        np.int8(3),
        Scale(2.0),
        fractions.Fraction(1, 2),
    )
    values += (
        decimal.Decimal("1.5"),
        enum.IntEnum("E", {"A": 2}).A,
        1 + 2j,
        np.array([1.0, 2.0, 3.0]),
        torch.Size([3]),
    )
    return calls(function, *[lambda v=v: (normal(3), v) for v in values])


def _integers_that_wrap() -> World:
    def function(x: Any, n: int) -> Any:
        found = []
        for compute in (
            *(lambda: x + n, lambda: x * n, lambda: x // n, lambda: x % n, lambda: x << n, lambda: x >> n),
            *(lambda: -x, lambda: x.abs(), lambda: x.sum(), lambda: x.prod(), lambda: x / n, lambda: x == n),
            *(lambda: x.float() ** n, lambda: x.pow(2), lambda: x.clamp(-n, n), lambda: x ^ n),
            lambda: torch.div(x, n, rounding_mode="trunc"),
        ):
            try:
                found.append(compute())
            except Exception as error:
                found.append(type(error).__name__)
        return found

    kinds = (torch.int8, torch.uint8, torch.int16, torch.int64, torch.int32, torch.int8)
    return calls(
        function,
        *[
            lambda k=k, n=n: (torch.tensor([-128 if k != torch.uint8 else 0, 127, 3, 0, 100], dtype=k), n)
            for k, n in zip(kinds, (3, 5, 7, -3, 1, -1), strict=True)
        ],
    )


def _truth_of_tensors() -> World:
    def function(x: Any, n: int) -> Any:
        found = []
        for compute in (
            lambda: x or n,
            lambda: x and x + 1,
            lambda: not x,
            lambda: 0 < x < n,
            lambda: 0 < x.sum() <= n,
            lambda: x.sum() == n != x.max(),
            lambda: n in x,
            lambda: x in [n, x],
            lambda: [n, n + 1][x.sum() > 0],
            lambda: "abc"[x.argmax()],
            lambda: [*range(int(x.abs().sum()) % 4)],
            lambda: x[: x.argmax()],
            lambda: x[x.argmax() : x.numel() : torch.tensor(2)],
            lambda: min(x, key=lambda v: -v) if x.dim() else x,
            lambda: max(x.sum(), n),
            lambda: sorted(x.view(-1))[0],
            lambda: sum(x, start=n),
            lambda: round(float(x.sum()), 1),
            lambda: divmod(x, n + 3),
            lambda: f"{x.sum():.2f} {x.shape} {x.dtype}",
            lambda: bool(x.any()) + int(x.all()),
            lambda: (y := x + 1) * y.sum(),
            lambda: x if (total := x.sum()) > n else total,
        ):
            try:
                found.append(compute())
            except Exception as error:
                found.append(type(error).__name__)
        return found

    makers = (
        normals(3),
        normals(1),
        normals(3),
        normals(0),
        lambda: (torch.tensor(2.0),),
        lambda: (torch.tensor([[0.0]]),),
    )
    return calls(function, *[lambda m=m, n=n: (*m(), n) for n, m in enumerate(makers)])


def _star_arguments() -> World:
    def inner(*parts: Any, first: Any = None, **named: Any) -> Any:
        return torch.stack(parts).sum(0) * (1 if first is None else first), [*named], len(parts)

    def function(x: Any, n: int) -> Any:
        named = {"first": x[0]} if n % 2 else {"other": n}
        (head, *tail), last = x, x[-1]
        one = inner(*x, **named)
        two = inner(*tail, last, *x.unbind(), **{**named, "extra": 1})
        try:
            inner(*x, first=1, **named, **{"first": 2} if n == 1 else {})
        except TypeError as error:
            return one, two, str(error)
        return one, two, head

    return calls(function, *[lambda n=n: (normal(2 + n % 3, 3), n) for n in (0, 1, 2, 3, 1)])


def _keywords_that_no_call_takes() -> World:
    callees = [dict, functools.partial(dict), lambda **named: named, Keywords(), Keywords().method]

    def function(x: Any, n: int) -> Any:
        given = ({"first": 1}, {1: n}, {"other": n, 1: 2})[n]
        said = []
        for callee in callees:
            try:
                callee(**{"first": n}, **given)
            except TypeError as error:
                said.append(str(error))
        return x + n, said

    return calls(function, *[lambda n=n: (normal(3), n) for n in (0, 1, 2, 0)])


class Keywords:
    def __call__(self, **named: Any) -> Any:
        return named

    def __repr__(self) -> str:
        return "Keywords()"

    def method(self, **named: Any) -> Any:
        return named


def _warnings_caught() -> World:
    def function(x: Any, n: int) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always" if n % 2 else "error")
            try:
                warnings.warn(f"n is {n}", UserWarning, stacklevel=1)
                y = x + 1
            except UserWarning as error:
                y = x * len(str(error))
        return y, [str(item.message) for item in caught], len(warnings.filters) > 0

    return calls(function, *[lambda n=n: (normal(3), n) for n in (0, 1, 1, 2, 3)])


def _code_made_of_text() -> World:
    space: dict[str, Any] = {"torch": torch, "scale": 2.0}

    def function(x: Any, text: str) -> Any:
        exec(f"def made(x):\n    return {text}", space)
        y = eval("made(x) + scale", space, {"x": x})
        return y, sorted(key for key in locals() if len(key) == 1), "made" in space

    texts = ("x + 1", "torch.relu(x)", "x + 1", "x * scale", "x - x.mean()")
    return calls(function, *[lambda t=t: (normal(3), t) for t in texts], observe=lambda: len(space))


def _functions_of_functions() -> World:
    def inner(x: Any, w: Any) -> Any:
        return (x * w).sin().sum()

    layer = nn.Linear(3, 1)

    def function(x: Any, n: int) -> Any:
        w = torch.ones(3) * n
        g = torch.func.grad(inner)(x, w)
        many = torch.func.vmap(inner, (0, None))(x.expand(4, 3) * torch.arange(4.0)[:, None], w)
        called = torch.func.functional_call(layer, {"weight": w.view(1, 3)}, (x,))
        value, tangent = torch.func.jvp(lambda v: inner(v, w), (x,), (w,))
        return g, many, called.detach(), value, tangent

    return calls(function, *[lambda n=n: (normal(3), n) for n in (1, 2, 2, 3)])


def _contexts_entered_by_hand() -> World:
    def function(x: Any, n: int) -> Any:
        with contextlib.ExitStack() as stack:
            if n:
                stack.enter_context(torch.no_grad())
            if n > 1:
                stack.callback(x.mul_, 2)
            if n > 2:
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            y = x @ x.t()
            kept = stack.pop_all() if n == 4 else None
        grad = torch.is_grad_enabled()
        if kept:
            kept.close()
        return y, grad, x, torch.is_autocast_enabled("cpu")

    return calls(function, *[lambda n=n: (normal(3, 3), n) for n in (0, 1, 2, 3, 4, 0)])


def _own_gradients() -> World:
    class Clamped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, low: float) -> Any:
            ctx.save_for_backward(x)
            ctx.low = low
            ctx.mark_dirty(x)
            return x.clamp_(min=low)

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            (x,) = ctx.saved_tensors
            return g * (x > ctx.low), None

    def function(x: Any, low: float) -> Any:
        leaf = x.clone().requires_grad_(low < 1)
        y = Clamped.apply(leaf * 2 if leaf.requires_grad else leaf, low)
        if y.requires_grad:
            y.sum().backward()
        return y.detach(), leaf.grad, leaf.detach()

    return calls(function, *[lambda v=v: (normal(4), v) for v in (0.0, 0.5, 1.0, 0.0, 2.0)])


programs_of(globals(), "setting")
