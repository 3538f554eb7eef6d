"""Attributes of modules under capture: their methods call what is captured, and look at signatures."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ladder.capture import Captured, capture


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


@pytest.mark.parametrize("of", ["attribute", "item", "list"])
def test_a_part_is_replaced_by_what_is_compiled(of: str) -> None:
    """What is captured stands for a module inside of others: calls, names, state, modes, copies."""
    torch.manual_seed(0)
    first, second = Stepper(), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model = nn.Sequential(first, nn.ModuleDict({"only": second})["only"]).eval()
    twin, x = copy.deepcopy(model), torch.randn(3, 4)
    before = [*model.state_dict()], [name for name, _ in model.named_modules()]
    if of == "attribute":
        model.add_module("1", capture(second))
    elif of == "item":
        model[1] = capture(second)
    else:
        model = nn.Sequential(*[capture(part) for part in model])
    part = model[1]
    assert isinstance(part, nn.Sequential)
    assert isinstance(part, Captured)
    assert not isinstance(capture(len), nn.Module)
    for _ in range(2):
        assert torch.equal(model(x), twin(x))
    assert part.outcome == "whole"
    assert ([*model.state_dict()], [name for name, _ in model.named_modules()]) == before
    assert model.train()[1] is part
    assert second[2].training
    assert torch.equal(model.eval().double()(x.double()), twin.double()(x.double()))
    with torch.no_grad():
        twin[1][0].weight.mul_(2)
    model.load_state_dict(twin.state_dict())
    for each in (model, copy.deepcopy(model), torch.compile(model, backend="eager"), capture(model)):
        assert torch.equal(each(x.double()), twin(x.double()))
    assert copy.deepcopy(model)[1].function is not second
    assert "BatchNorm1d" in repr(model)


class Progress:
    """Iterates, and closes when it dies, as bars of progress do."""

    def __init__(self, steps: int) -> None:
        self.steps = range(steps)

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __del__(self) -> None:
        self.steps = range(0)


class Sampler(nn.Module):
    """Cannot be captured as a whole; what it calls can, however deep it lies."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.levels = nn.ModuleList([nn.ModuleDict({"step": Wrapped(Stepper())}), nn.Linear(4, 4)])
        self.replaces = replaces

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in Progress(3):
            x = self.levels[1](torch.relu(self.levels[0]["step"](x)))
        if self.replaces:
            self.levels[0]["step"].forward = torch.relu
        return x


def sampling(model: nn.Module, of: str) -> Callable[..., Any]:
    """Return a program that cannot be captured as a whole, and calls a model."""
    if of == "function":

        @torch.no_grad()
        def sample(x: torch.Tensor) -> torch.Tensor:
            for _ in Progress(1):
                x = model(x)
            return x if isinstance(x, torch.Tensor) else later

        later = None
        del later
        return sample
    pipeline = types.SimpleNamespace(model=model)
    by_object = types.MethodType(lambda self, x: next(self.model(x) for _ in Progress(1)), pipeline)
    return {"module": model, "method": model.forward, "object": by_object}[of]


@pytest.mark.parametrize("of", ["module", "method", "object", "function"])
@pytest.mark.parametrize("replaces", [False, True])
def test_what_runs_as_it_is_calls_captured_parts(of: str, replaces: bool) -> None:
    torch.manual_seed(0)
    model, x = Sampler(replaces).requires_grad_(False), torch.randn(2, 4)
    twin = copy.deepcopy(model)
    fast = capture(sampling(model, of))
    for _ in range(5):
        assert torch.equal(fast(x), twin(x))
    step = model.levels[0]["step"]
    assert vars(step).get("forward") is (torch.relu if replaces else None)
    assert not any("forward" in vars(module) for module in model.modules() if module is not step)
    if not replaces:
        assert (fast.outcome, [record.split for record in fast.records]) == ("split", [""])
        assert fast.inside[step].calls["recorded"] == 1
        assert "has a finalizer" in fast.explain()
        assert "Wrapped.forward: whole" in fast.explain()
        assert "new" not in fast.explain()
