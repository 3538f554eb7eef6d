"""Attributes of modules under capture: their methods call what is captured, and look at signatures."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from ladder.capture import capture


class Stepper(nn.Module):
    """Calls itself, as models that generate do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.limit = 3

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0
    ) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) * scale
        return y if mask is None else y * mask

    @torch.no_grad()
    def generate(self, x: torch.Tensor) -> torch.Tensor:
        takes_mask = "mask" in inspect.signature(self.forward).parameters
        for _ in range(self.limit):
            x = self(x, mask=torch.ones_like(x)) if takes_mask else self(x) * 0
        return x


def test_methods_of_a_module_call_what_is_captured() -> None:
    model, x = Stepper(), torch.randn(2, 4)
    fast = capture(model)
    expected = model.generate(x)
    for _ in range(2):
        assert torch.equal(fast.generate(x), expected)
    assert fast.within is not None
    assert (fast.outcome, len(fast.records), fast.within.calls["recorded"]) == ("whole", 1, 1)
    assert "forward" not in vars(model)
    first, *rest = fast.explain().splitlines()
    assert "calls: 1 recorded, 0 eager" in first
    assert any(line.startswith("Stepper.forward: whole") for line in rest)


def test_a_captured_forward_has_its_signature() -> None:
    model, x = Stepper(), torch.randn(2, 4)
    expected = model.generate(x)
    model.forward = capture(model.forward)  # type: ignore[method-assign]
    assert torch.equal(model.generate(x), expected)
    assert [*inspect.signature(model.forward).parameters] == ["x", "mask", "scale"]


def test_attributes_are_those_of_the_module() -> None:
    model = Stepper()
    fast = capture(model)
    fast.limit = 1
    x = torch.randn(2, 4)
    assert fast.layer is model.layer
    assert fast.eval() is fast
    assert not model.training
    assert torch.equal(fast.generate(x), model(x))


def test_an_error_leaves_the_module_as_it_was() -> None:
    model = Stepper()
    with pytest.raises(RuntimeError):
        capture(model).generate(torch.randn(2, 5))
    assert "forward" not in vars(model)
    with pytest.raises(AttributeError, match="no attribute 'generate'"):
        _ = capture(len).generate


class Wrapped(nn.Module):
    """Passes calls on to another module, as models with adapters do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base = nn.ModuleDict({"model": model})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base["model"](x)
        return y

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base["model"].generate(x * 2)
        return y

    def chat(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base["model"].generate(x - 1)
        return y


def test_methods_that_pass_calls_on_call_what_is_captured() -> None:
    model, x = Wrapped(Stepper()), torch.randn(2, 4)
    fast = capture(model)
    expected = model.generate(x)
    for _ in range(2):
        assert torch.equal(fast.chat(x), model.chat(x))
        assert torch.equal(fast.generate(x), expected)
    inner = fast.inside[model.base["model"]]
    assert (fast.outcome, len(fast.records), inner.calls["recorded"]) == ("whole", 1, 1)
    assert "Stepper.forward: whole" in fast.explain()
    assert torch.equal(fast(x), model(x))
    assert not any("forward" in vars(module) for module in model.modules())
    assert fast.eval() is fast
    assert len(fast.inside) == 2


def test_a_part_is_compiled_by_its_forward() -> None:
    model, x = Wrapped(Stepper()), torch.randn(2, 4)
    expected = model(x)
    part = model.base["model"]
    part.forward = capture(part.forward)  # type: ignore[method-assign]
    for _ in range(2):
        assert torch.equal(model(x), expected)
    assert (part.forward.outcome, part.forward.calls["recorded"]) == ("whole", 1)
    fast = capture(model)
    for _ in range(2):
        assert torch.equal(fast(x), expected)
    assert fast.outcome == "whole"
