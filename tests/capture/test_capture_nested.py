"""Compiled functions that compiled functions call are parts of their graphs."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable, Iterable, Sized
from typing import Any

import pytest
import torch

import ladder
from ladder.capture import capture


def scaled(x: torch.Tensor, factor: float, *, more: float = 0.0) -> torch.Tensor:
    return torch.relu(x) * factor + more


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Stack(torch.nn.Module):
    """Blocks of which each is compiled in one way."""

    def __init__(self, wrap: Callable[[Block], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = [wrap(Block()) for _ in range(3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x + 1


def forward_compiled(block: Block) -> Block:
    block.forward = ladder.compile(block.forward)
    return block


class Decorated(torch.nn.Module):
    @ladder.compile
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 2


WAYS: dict[str, Callable[[Block], Any]] = {
    "module": ladder.compile,
    "forward": forward_compiled,
    "method of a class": lambda block: Decorated(),
    "twice": lambda block: ladder.compile(ladder.compile(block)),
}


@pytest.mark.parametrize("way", WAYS)
def test_they_are_one_graph(way: str) -> None:
    model, x = Stack(WAYS[way]), torch.randn(2, 8)
    fast = ladder.compile(model)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x))
    assert fast.outcome == "whole"
    assert len(fast.records) == 1


def test_functions_with_keywords_and_effects() -> None:
    inner = ladder.compile(scaled)
    seen: list[torch.Tensor] = []

    def keeps(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x - 1

    inner_keeps = ladder.compile(keeps)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner_keeps(inner(x, 2.0, more=1.0) + inner(x, factor=3.0))

    fast = ladder.compile(outer)
    for number in range(3):
        x = torch.full((4,), float(number))
        torch.testing.assert_close(fast(x), torch.relu(x) * 5.0)
        assert len(seen) == number + 1
        torch.testing.assert_close(seen[-1], torch.relu(x) * 5.0 + 1)
    assert fast.outcome == "whole"


def test_another_function_is_noticed() -> None:
    holder: list[Any] = [ladder.compile(lambda x: x + 1)]

    def outer(x: torch.Tensor) -> torch.Tensor:
        return holder[0](x) * 2

    fast, x = ladder.compile(outer), torch.ones(3)
    assert torch.equal(fast(x), torch.full((3,), 4.0))
    holder[0] = ladder.compile(lambda x: x + 2)
    assert torch.equal(fast(x), torch.full((3,), 6.0))
    holder[0].function = lambda x: x + 3
    assert torch.equal(fast(x), torch.full((3,), 8.0))


def add(x: torch.Tensor, y: Any) -> Any:
    return x + y


@pytest.mark.parametrize("way", ["called", "kept", "returned", "wrong"])
def test_methods_that_are_made(way: str) -> None:
    kept: list[Any] = []

    def outer(x: torch.Tensor) -> Any:
        if way == "wrong":
            try:
                return types.MethodType(add, None)
            except TypeError as error:
                return str(error)
        method = types.MethodType(add, x * 2)
        if way == "kept":
            kept.append(method)
        return method if way == "returned" else method(1) + method(x)

    fast = ladder.compile(outer)
    for number in range(3):
        x = torch.full((2,), float(number))
        want, found = outer(x), fast(x)
        if way == "returned":
            assert type(found) is types.MethodType
            assert found.__func__ is add
            want, found = want(3), found(3)
        if way == "kept":
            assert len(kept) == 2
            assert torch.equal(kept.pop()(1), kept.pop()(1))
        assert found == want if way == "wrong" else torch.equal(found, want)


def test_one_that_raises_raises_the_same() -> None:
    def refuses(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2:
            raise ValueError("too long")
        return x

    inner = ladder.compile(refuses)

    def outer(x: torch.Tensor) -> Any:
        try:
            return inner(x) + 1
        except ValueError as error:
            return str(error)

    fast = ladder.compile(outer)
    for _ in range(2):
        assert fast(torch.ones(3)) == "too long"
        assert torch.equal(fast(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize("other", ["precise", "backend"])
def test_other_options_stay_calls_of_their_own(other: str) -> None:
    graphs: list[torch.fx.GraphModule] = []
    inner: Any = ladder.compile(scaled, precise=True)
    if other == "backend":
        inner = capture(scaled, backend=lambda graph, _: graphs.append(graph) or graph.forward)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x, 2.0) + 1

    fast, x = ladder.compile(outer), torch.randn(5)
    for _ in range(3):
        torch.testing.assert_close(fast(x), outer(x))
    assert inner.calls["recorded"] >= 1
    assert len(graphs) == (1 if other == "backend" else 0)


class Named(torch.nn.ModuleDict):
    """A container with a program of its own, and a context manager."""

    def __enter__(self) -> str:
        return "entered"

    def __exit__(self, *_: object) -> None:
        self["left"] = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.values():
            x = block(x)
        return x


def test_what_stands_for_a_container_is_one() -> None:
    torch.manual_seed(0)
    stack = torch.nn.Sequential(Block(), Block(), Block())
    fast, x = ladder.compile(stack), torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x), stack(x))
        fast[1] = Block()
        torch.testing.assert_close(fast(x), stack(x))
        del fast[0]
        torch.testing.assert_close(fast(x), stack(x))
    assert (len(fast), fast[-1], list(fast)) == (2, stack[1], list(stack))
    named = ladder.compile(Named({"a": Block()}))
    with named as found:
        assert (found, "a" in named, "left" in named) == ("entered", True, False)
    assert list(named) == ["a", "left"]
    assert not ladder.compile(torch.nn.Sequential())
    for again in (copy.deepcopy(named), pickle.loads(pickle.dumps(named))):
        assert (type(again), list(again)) == (type(named), ["a", "left"])
        torch.testing.assert_close(again(x), named(x))


@pytest.mark.parametrize("made", [scaled, Block()])
def test_what_stands_for_no_container_is_none(made: Any) -> None:
    fast = ladder.compile(made)
    assert fast
    assert not isinstance(fast, Sized | Iterable)
    with pytest.raises(TypeError, match="no len"):
        len(fast)
