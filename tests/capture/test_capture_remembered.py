"""Operators on fakes that repeat are run once, and what differs is told apart."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.capture import capture
from ladder.capture.values.remembered import Unknown
from ladder.capture.values.shapes import Shapes


def opened(*extents: int) -> tuple[Shapes, Tensor]:
    shapes = Shapes()
    shapes.lift("v0", torch.randn(*extents), {0: "v0_0"})
    return shapes, shapes.fakes["v0"]


def test_what_repeats_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, x = opened(6, 4)
    runs: list[Any] = []
    run = shapes.run_once
    monkeypatch.setattr(shapes, "run_once", lambda f, *rest: (runs.append(f), run(f, *rest))[1])
    y = shapes.run(torch.tanh, (x,), {})
    assert shapes.run(torch.tanh, (y,), {}).shape == x.shape
    assert len(runs) == 1
    others = [
        (torch.exp, (x,), {}),
        (torch.sum, (x, 0), {}),
        (torch.sum, (x, 1), {}),
        (torch.sum, (x, 1), {"keepdim": True}),
        (torch.mul, (x, 2), {}),
        (torch.mul, (x, 2.0), {}),
        (torch.tanh, (x.t(),), {}),
        (torch.tanh, (x.double(),), {}),
        (torch.reshape, (x, (x.shape[0], 2, 2)), {}),
        (torch.reshape, (x, (2, x.shape[0], 2)), {}),
    ]
    for number, (function, args, kwargs) in enumerate(others):
        shapes.run(function, args, kwargs)
        assert len(runs) == number + 2
        shapes.run(function, args, kwargs)
        assert len(runs) == number + 2


def test_how_one_of_several_lies_is_not_changed() -> None:
    shapes, x = opened(6, 4)
    y, z = (shapes.run(torch.tanh, (x,), {}) for _ in range(2))
    assert shapes.run(torch.Tensor.add_, (y, 1), {}).shape == x.shape
    with pytest.raises(Unknown):
        shapes.run(torch.Tensor.t_, (z,), {})


def test_programs_that_lay_tensors_otherwise_in_place() -> None:
    def turned(x: Tensor) -> Tensor:
        y, z = torch.tanh(x), torch.tanh(x)
        y.t_()
        z.unsqueeze_(0).mul_(2)
        return y.sum(0) + z.sum((0, 2)) + torch.tanh(x).sum(1)

    fast = capture(turned)
    with torch.no_grad():
        for rows in (4, 5, 7, 4):
            x = torch.randn(rows, 3)
            assert torch.allclose(fast(x), turned(x))


def test_what_changes_elements_in_place_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, x = opened(6, 4)
    runs: list[Any] = []
    run = shapes.run_once
    monkeypatch.setattr(shapes, "run_once", lambda f, *rest: (runs.append(f), run(f, *rest))[1])
    y, z = x + 1, torch.randn(4)
    other = shapes.closed_fake(z)
    with torch.no_grad():
        for function, args, kwargs in (
            (operator.iadd, (y, x), {}),
            (torch.Tensor.add_, (y, other), {}),
            (torch.nn.functional.relu, (y,), {"inplace": True}),
        ):
            assert [shapes.run(function, args, kwargs) is y for _ in range(3)] == [True] * 3
        assert runs == [operator.iadd, torch.Tensor.add_, torch.nn.functional.relu]
        for _ in range(2):
            assert shapes.run(operator.setitem, (y, 0, 1.0), {}) is None
            assert shapes.run(torch.Tensor.add_, (y, 1), {}) is y
            with pytest.raises(RuntimeError):
                shapes.run(torch.Tensor.add_, (y, shapes.closed_fake(torch.randn(3))), {})
    assert [*map(runs.count, (operator.setitem, torch.Tensor.add_))] == [2, 4]
    for _ in range(2):
        shapes.run(operator.iadd, (y, x), {})
    assert runs.count(operator.iadd) == 3


def test_gradients_of_what_is_changed_in_place_are_asked_for() -> None:
    shapes, x = opened(6, 4)
    weight = shapes.closed_fake(torch.nn.Parameter(torch.randn(4)))
    for _ in range(2):
        y = x + 1
        assert shapes.run(torch.Tensor.mul_, (y, weight), {}).requires_grad
