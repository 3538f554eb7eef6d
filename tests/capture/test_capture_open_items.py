"""Numbers that are left open stay so in containers, and where these go: calls, copies, loops, sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs_open_items import FIXED, OPEN, relay
from torch import Tensor

import ladder
from ladder.capture import capture


class Extents:
    """A backend whose graphs take extents and numbers that could be."""

    dynamic_shapes, numbers = True, False

    def __call__(self, module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        return module.forward


def alike(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and alike(list(found.values()), list(expected.values()))
    if isinstance(expected, list | tuple):
        same = type(found) is type(expected) and len(found) == len(expected)
        return same and all(map(alike, found, expected))
    return type(found) is type(expected) and bool(found == expected)


def _run(program: Callable[..., Any]) -> Any:
    fast = capture(lambda x, cache: program(x, cache.shape[0]))
    for length in (4, 5, 6, 9, 7, 12):
        x, cache = torch.arange(20.0), torch.ones(length)
        assert alike(fast(x, cache), program(x, length)), length
    return fast


@pytest.mark.parametrize("program", OPEN, ids=lambda program: program.__name__)
def test_open_numbers_stay_open(program: Callable[..., Any]) -> None:
    fast = _run(program)
    assert (fast.outcome, len(fast.records), fast.calls["eager"]) == ("whole", 2, 0), fast.explain()


@pytest.mark.parametrize("program", FIXED, ids=lambda program: program.__name__)
def test_what_natives_see_is_right(program: Callable[..., Any]) -> None:
    _run(program)


def test_open_numbers_from_outside() -> None:
    """Numbers in containers of the caller are left open from the third value on."""

    def program(x: Tensor, given: dict[str, int], sizes: list[int]) -> tuple[Any, ...]:
        total = x[given["start"] :].sum() + sum(sizes)
        for size in sizes:
            total = total + size
        return total, {**given, "end": 1}, relay(x, **given), relay(x, *sizes)

    fast = capture(program, backend=Extents())
    for number in (3, 5, 6, 9, 12):
        given, sizes = {"start": number, "end": 2 * number}, [number, 7]
        assert alike(fast(torch.arange(20.0), given, sizes), program(torch.arange(20.0), given, sizes))
    assert fast.outcome == "whole"
    assert len(fast.records) <= 4, fast.explain()


def test_a_counter_in_a_tuple_that_is_unpacked_and_replaced() -> None:
    class Mean:
        def __init__(self) -> None:
            self.state = torch.zeros(3), 2

        def __call__(self, x: Tensor) -> Tensor:
            total, count = self.state
            self.state = total + x, count + 1
            return total * count

    plain, counted = Mean(), Mean()
    fast = capture(counted)
    for number in range(6):
        x = torch.full((3,), number / 4)
        assert alike(fast(x), plain(x))
    assert alike(counted.state, plain.state)
    assert fast.calls == {"recorded": 3, "eager": 0}


def test_a_tuple_with_an_open_number_is_being_built_where_recording_ends() -> None:
    def program(x: Tensor, hosts: list[Any]) -> tuple[Any, ...]:
        return x.shape[0], *(part for host in hosts for part in (x.shape[0], str(id(host)))), x

    fast = capture(program)
    for hosts in ([], [], [object()], [object(), object()]):
        for length in (3, 4, 5):
            assert alike(fast(torch.ones(length), hosts), program(torch.ones(length), hosts))


@pytest.mark.parametrize(
    "number",
    [
        lambda size: size % 3,
        lambda size: size // 2 + 1,
        lambda size: [size, size + 1][1] % 4 * size,
    ],
)
def test_a_number_that_is_computed_of_a_size_which_no_argument_of_the_graph_shows(number: Any) -> None:
    def program(x: Tensor, cache: Tensor) -> Tensor:
        return torch.sin(x + number(cache.shape[0]))

    fast = ladder.compile(program)
    for length in (7, 8, 10, 11, 13, 20):
        x, cache = torch.arange(4.0), torch.ones(length)
        torch.testing.assert_close(fast(x, cache), program(x, cache))
    assert fast.calls["eager"] == 0, fast.explain()
    assert len(fast.records) == 2
    assert not fast.refused


MADE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "a time step": lambda x, number: x * torch.tensor([number], dtype=torch.long, device=x.device),
    "a scalar": lambda x, number: x + torch.tensor(number),
    "a tuple": lambda x, number: x + torch.as_tensor((number, 2 * number, 1)).sum(),
    "a list that grows": lambda x, number: (lambda made: (made.append(number), torch.tensor(made))[1])(
        [1, 2]
    ),
    "fractions": lambda x, number: torch.tensor([number, 0.5]),
    "large": lambda x, number: torch.tensor([number * 10**9], dtype=torch.float64),
}


@pytest.mark.parametrize("name", MADE)
def test_tensors_of_open_numbers(name: str) -> None:
    """They are made in the graph; 0, 1 and negative numbers have records of their own."""
    program = MADE[name]
    fast = capture(program, backend=Extents())
    for number in (3, 7, 5, 9, 11, 999, 40, 0, 1, -3, 2**20, 13):
        x = torch.ones(2)
        expected, found = program(x, number), fast(x, number)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found, expected), number
    assert fast.outcome == "whole"
    assert len(fast.records) <= 6, fast.explain()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bool])
def test_tensors_of_types_that_some_numbers_do_not_fit(dtype: torch.dtype) -> None:
    program = lambda x, number: x + torch.tensor([number], dtype=dtype)  # noqa: E731
    fast = capture(program, backend=Extents())
    for number in (3, 7, 5, 9, 11, 200):
        assert torch.equal(fast(torch.ones(1), number), program(torch.ones(1), number))
