"""Memory while a segment is recorded: what the program lets go of is given back, what it reaches is left."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import ladder
from ladder.capture.trace import idle

NORM = torch.nn.LayerNorm(16).requires_grad_(False)
LINEAR = torch.nn.Linear(16, 16).requires_grad_(False)
"""Of three axes it gives a view of a matrix that the program never sees."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look after every result, however small."""
    monkeypatch.setattr(idle, "LEAST_BYTES", 1)
    monkeypatch.setattr(idle, "BETWEEN_LOOKS", 1)


def layers(x: torch.Tensor) -> torch.Tensor:
    for _ in range(20):
        a, b = torch.sin(NORM(x)).chunk(2, -1)
        x = x + LINEAR(torch.cat([b, a * 0.5], -1).view(2, -1, 16)).transpose(0, 1).transpose(0, 1).reshape(
            -1, 16
        )
    return x


class Options:
    """What has no attribute of a name says so by an error of the program's own code."""

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


OPTIONS = Options()


def asking(x: torch.Tensor) -> torch.Tensor:
    def norm(y: torch.Tensor) -> torch.Tensor:
        z = NORM(y).sin()
        return z * getattr(OPTIONS, "gain", 0.5) if not hasattr(OPTIONS, "bias") else z

    for _ in range(20):
        x = x + norm(x)
    return x


GAIN = torch.nn.Parameter(torch.full((40, 16), 0.5))


def of_parameters(x: torch.Tensor) -> torch.Tensor:
    """A view of a parameter requires gradients also where none are kept."""
    gain = GAIN.view(-1, 16)
    for _ in range(20):
        x = x + (gain * x.sin()).cos()
    return x


@pytest.mark.parametrize("program", [layers, asking, of_parameters])
def test_recording_takes_little_more_memory_than_eager(program: Callable[..., torch.Tensor]) -> None:
    x, held = torch.randn(40, 16), []

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == x.shape]
        held.append(sum(bool(each.untyped_storage().nbytes()) for each in tensors))
        return module

    with torch.no_grad():
        expected = program(x)
        assert torch.equal(ladder.compile(program, backend=backend)(x), expected)
    assert held == [pytest.approx(4, abs=4)]  # of 60 to 140


def views(x: torch.Tensor) -> Any:
    y = x.sin()
    first, y = y[0], y.cos()
    return first, torch.sin(y)


def in_containers(x: torch.Tensor) -> Any:
    kept: dict[str, Any] = {"all": [], "pair": ()}
    for _ in range(4):
        x = x.sin()
        kept["all"].append(x)
        kept["pair"] = (x, kept["pair"][:1])
    return torch.stack(kept["all"]).sum(0) + kept["pair"][1][0]


def in_closures(x: torch.Tensor) -> Any:
    def made(y: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: y + 1

    first = made(x.sin())
    x = x.cos().exp()
    return first() + x


class Held:
    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


def in_objects(x: torch.Tensor) -> Any:
    held = Held(x.sin())
    x = x.cos().exp()
    return held.y + x


def in_generators(x: torch.Tensor) -> Any:
    def powers(y: torch.Tensor) -> Any:
        for _ in range(3):
            y = y.sin()
            yield y

    total = x
    for y in powers(x):
        total = total + y.exp().cos()
    return total


def by_storage(x: torch.Tensor) -> Any:
    y = x.sin()
    memory = y.untyped_storage()
    y = x.cos().exp()
    return torch.empty(0).set_(memory, 0, (4, 8)) + y.sum()


def by_numpy(x: torch.Tensor) -> Any:
    array = x.sin().numpy()
    y = x.cos().exp()
    return torch.from_numpy(array) + y


def by_weak_reference(x: torch.Tensor) -> Any:
    y = x.sin()
    reference = weakref.ref(y)
    z = x.cos().exp()
    return reference() + z + y


def in_place(x: torch.Tensor) -> Any:
    y = torch.zeros_like(x)
    for row in y:
        row.add_(x.sum()).sin_()
    return y.exp().cos()


def gradients(x: torch.Tensor) -> Any:
    with torch.enable_grad():
        w = x.sin().requires_grad_()
        y = (w * x.cos()).exp().sin()
        (found,) = torch.autograd.grad(y.sum(), w)
    return found


def tangents(x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.exp(), x.sin())
        return forward_ad.unpack_dual(dual.cos().sin()).tangent


def over_rows(x: torch.Tensor) -> Any:
    return torch.vmap(lambda row: (row.sin() * row.cos()).exp().sum())(x)


class Owner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(4, 8))

    def forward(self, x: torch.Tensor) -> Any:
        self.w.grad = x.sin()
        y = x.cos().exp().tanh()
        return y + self.w.grad


PROGRAMS = [
    views, in_containers, in_closures, in_objects, in_generators, by_storage, by_numpy, by_weak_reference,
    in_place, gradients, tangents, over_rows, Owner(),
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: getattr(each, "__name__", "attributes"))
def test_what_the_program_reaches_stays(program: Callable[[torch.Tensor], Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    fast = ladder.compile(program)
    with torch.no_grad():
        expected = program(x)
        for _ in range(3):
            torch.testing.assert_close(fast(x), expected)


def test_arguments_of_unknown_libraries_stay() -> None:
    """They may have been taken, where no count of Python's shows it."""
    taken = torch.randn(8)
    values = idle.Idle()
    values.values = [type("Value", (), {"obj": taken})()]
    values.keep(torch.ops.aten.sin.default, [taken])
    assert values.values
    values.keep(type("Op", (), {"namespace": "theirs"})(), [taken])
    assert not values.values
