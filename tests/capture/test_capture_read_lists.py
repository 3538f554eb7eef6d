"""Lists of numbers that a program reads from tensors (``Tensor.tolist``), and names that are made of some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.capture import capture
from ladder.capture.values.tensors import MOST_NUMBERS


def split(x: Tensor, sizes: Tensor) -> Any:
    parts = x.split(sizes.tolist())
    return [part.sum(0) for part in parts]


def kept(x: Tensor, sizes: Tensor) -> Any:
    """What the program does with its list changes no later call's."""
    numbers = sizes.tolist()
    numbers.append(len(numbers))
    return x * numbers[0], numbers


def nested(x: Tensor, sizes: Tensor) -> Any:
    rows = torch.stack([sizes, sizes + 1]).tolist()
    rows[0].append(7)
    return [x[:height] * width for height, width, *_ in rows], rows


def single(x: Tensor, sizes: Tensor) -> Any:
    return x * sizes.sum().tolist(), sizes[:0].tolist(), sizes.sum().reshape(1).tolist()


def kinds(x: Tensor, sizes: Tensor) -> Any:
    special = torch.tensor([float("nan"), float("inf"), -0.0, 0.0])
    return x, (sizes > 1).tolist(), (special * sizes[0]).tolist()


def counted(x: Tensor, sizes: Tensor) -> Any:
    """As many numbers as a value says, as the lengths of images that a vision tower splits its rows by."""
    ends = torch.repeat_interleave(sizes, torch.ones_like(sizes) + (sizes > 2)).cumsum(0)
    ends = torch.nn.functional.pad(ends[ends <= 6], (1, 0))
    return [part.sum(0) for part in x.split([*(ends[1:] - ends[:-1]).tolist(), 6 - int(ends[-1])])]


class Chosen(torch.nn.Module):
    """Looks experts up by names that values make up, as switch transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleDict({f"expert_{k}": torch.nn.Linear(2, 2) for k in range(6)})
        self.scales = {f"scale{k}": k for k in range(4)}
        for k in range(6):
            setattr(self, f"shift{k}", float(k))

    def forward(self, x: Tensor, sizes: Tensor) -> Any:
        found, names = torch.zeros_like(x), dict[str, int]()
        for size in sizes:
            name = f"scale{size}"
            scale = self.scales.get(name, -1) + (name in self.scales)
            found = found + self.experts[f"expert_{size}"](x) * scale + getattr(self, f"shift{size}")
            names[name] = scale
        return found, names, hasattr(self, f"shift{sizes[0] + 3}")


CHOSEN = Chosen().requires_grad_(False)


@pytest.mark.parametrize("program", [split, kept, nested, single, kinds, counted, CHOSEN])
def test_lists_of_tensors(program: Callable[[Tensor, Tensor], Any]) -> None:
    """They are what the tensor holds in each call, also where it holds others than before."""
    fast, x = capture(program), torch.arange(12.0).reshape(6, 2)
    whole = False
    for sizes in ([2, 3, 1], [2, 3, 1], [1, 1, 4], [2, 3, 1], [0, 5, 1], [4, 1, 1], [3, 2, 1], [2, 3, 1]):
        given = torch.tensor(sizes)
        torch.testing.assert_close(fast(x, given), program(x, given), rtol=0, atol=0, equal_nan=True)
        whole |= fast.outcome == "whole"
    assert whole, fast.explain()


def test_the_sign_of_a_zero_is_compared() -> None:
    fast = capture(lambda x: (x + 1, [repr(item) for item in x.tolist()]))
    for sign in (1.0, -1.0, 1.0):
        assert fast(torch.zeros(2) * sign)[1] == [repr(0.0 * sign)] * 2


@pytest.mark.parametrize("count", [MOST_NUMBERS, MOST_NUMBERS + 1])
def test_many_numbers_break_the_graph(count: int) -> None:
    fast, x = capture(lambda x: (x * 2, x.tolist())), torch.randn(count)
    for _ in range(3):
        assert fast(x)[1] == x.tolist()
    assert fast.outcome == ("whole" if count == MOST_NUMBERS else "split"), fast.explain()


@pytest.mark.parametrize("counts", [(3, 4, 5, 6, 0, 1, 7), (3, 4, 5, 5, 4)])
def test_extents_that_change(counts: tuple[int, ...]) -> None:
    fast = capture(lambda x: (x * 2, x.tolist()))
    for count in counts:
        x = torch.randn(count)
        assert fast(x)[1] == x.tolist()
    assert fast.outcome == "whole", fast.explain()


def test_instances_of_properties_made_in_a_call() -> None:
    """As torch.distributions makes them to look at its own attributes."""

    class Lazy(property):
        def __init__(self, wrapped: Any) -> None:
            super().__init__(wrapped)

    def program(x: Tensor) -> Tensor:
        found = Lazy(lambda self: 3)
        return x + isinstance(found, property) + found.fget(None)  # type: ignore[misc]

    fast, x = capture(program), torch.randn(3)
    for _ in range(3):
        assert torch.equal(fast(x), program(x))


def test_distributions() -> None:
    def program(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = torch.distributions.Categorical(logits=logits, validate_args=True)
        drawn = found.sample()
        return drawn, found.log_prob(drawn), found.entropy()

    fast = capture(program)
    for seed in range(4):
        logits = torch.randn(3 + seed % 2, 5)
        torch.manual_seed(seed)
        expected = program(logits)
        torch.manual_seed(seed)
        torch.testing.assert_close(fast(logits), expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="invalid values"):
        fast(torch.full((3, 5), float("nan")))
