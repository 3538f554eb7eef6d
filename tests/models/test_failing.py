"""Operators that raise for some values: in plans as in torch, also where nothing uses their results."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ladder

X = torch.arange(6.0).reshape(2, 3)
EYE, SINGULAR = torch.eye(2), torch.tensor([[1.0, 2.0], [2.0, 4.0]])
GOOD, BAD = torch.tensor([1]), torch.tensor([5])

Case = tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]


def _put(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    written = x.clone()
    written[i] = 3
    return written


CASES: Mapping[str, Case] = {
    "index": (lambda x, i: x[i], (X, GOOD), (X, BAD)),
    "index_select": (lambda x, i: x.index_select(0, i), (X, GOOD), (X, BAD)),
    "embedding": (lambda x, i: F.embedding(i, x), (X, GOOD), (X, BAD)),
    "gather": (lambda x, i: x.gather(0, i[None]), (X, GOOD), (X, BAD)),
    "scatter": (lambda x, i: x.scatter(0, i[None], 1.0), (X, GOOD), (X, BAD)),
    "index_add": (lambda x, i: x.index_add(0, i, x[:1]), (X, GOOD), (X, -GOOD)),
    "index_put": (_put, (X, GOOD), (X, BAD)),
    "cross_entropy": (lambda x, i: F.cross_entropy(x[:1], i), (X, GOOD), (X, BAD)),
    "binary_cross_entropy": (lambda x: F.binary_cross_entropy(x, x), (EYE,), (-EYE,)),
    "floor_divide": (lambda x, i: x.int() // i, (X, GOOD), (X, GOOD * 0)),
    "remainder": (lambda x, i: x.int() % i, (X, GOOD), (X, GOOD * 0)),
    "cholesky": (torch.linalg.cholesky, (EYE,), (-EYE,)),
    "inv": (torch.linalg.inv, (EYE,), (SINGULAR,)),
    "solve": (torch.linalg.solve, (EYE, 2 * EYE), (SINGULAR, 2 * EYE)),
    "assertion": (lambda x: torch._assert_async(x.sum() > 0, "sum") or x, (EYE,), (-EYE,)),
}
"""Name -> a function, arguments for which it returns, arguments for which it raises."""


def error_of(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[type[Exception], str]:
    with pytest.raises(Exception) as raised, torch.no_grad():  # noqa: PT011  eager says which
        function(*arguments)
    return raised.type, str(raised.value).splitlines()[0]


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_plans_raise_what_torch_raises(name: str, used: bool) -> None:
    function, good, bad = CASES[name]

    def program(*arguments: Any) -> Any:
        found = function(*arguments)
        return (found if used else arguments[0]) * 2

    compiled = ladder.compile(program)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(compiled(*good), program(*good))
    assert error_of(compiled, bad) == error_of(program, bad)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*good), program(*good))
    assert not compiled.refused
    assert compiled.outcome == "whole"


def test_loaded_plans_raise_too(tmp_path: Path) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        torch.linalg.inv(x)
        return torch.linalg.cholesky(x) + 1

    loaded = ladder.load(ladder.compile(program).export(tmp_path / "m.ladder", EYE))
    torch.testing.assert_close(loaded(EYE), program(EYE))
    assert error_of(program, (-EYE,))[1] in error_of(loaded, (-EYE,))[1]


def test_what_cannot_raise_is_dropped() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x.tanh().matmul(x)
        return x * 2

    compiled = ladder.compile(program)
    with torch.no_grad():
        compiled(EYE)
    assert "tanh" not in compiled.plan()
    assert "mm" not in compiled.plan()


OF_SOME_NUMBERS: Mapping[str, Callable[..., Any]] = {
    "an element": lambda x, i: x[i] * 2,
    "a view": lambda x, i: x.view(i, -1) + 1,
    "rows of a table": lambda x, i: F.embedding(torch.tensor([i]), x[:, None]),
    "a sum": lambda x, i: x + torch.arange(i),
    "an element of a list": lambda x, i: x * [1, 2, 3][i],
}


@pytest.mark.parametrize("name", OF_SOME_NUMBERS)
def test_an_error_for_some_numbers_and_sizes_is_none_for_others(name: str) -> None:
    program = OF_SOME_NUMBERS[name]
    compiled = ladder.compile(program)
    for size, number in [
        (8, 0),
        (8, 1),
        (8, 2),
        (8, 9),
        (8, 4),
        (8, 2),
        (2, 2),
        (3, 7),
        (9, 7),
        (7, 7),
        (8, 1),
    ]:
        x = torch.arange(float(size))
        try:
            wanted = program(x, number)
        except (IndexError, RuntimeError) as error:
            with pytest.raises(type(error), match=re.escape(str(error))):
                compiled(x, number)
        else:
            assert torch.equal(compiled(x, number), wanted)


def quotient_behind_a_branch(x: torch.Tensor) -> Any:
    part = x[1:]
    if part.any() > 0:  # noqa: SIM108 -- the branch is joined as a statement
        moved = part + 1
    else:
        moved = part - 1
    quotient = 255 // moved
    return part * 2, moved, quotient


def halves_that_may_not_fit(x: torch.Tensor) -> Any:
    halves = x * 2
    halves.chunk(2, -1)[0].copy_(halves.chunk(2, -1)[-1])
    return (halves,)


QUOTIENTS = (
    [[-5, 0, -2, 1], [3, -5, 4, -4], [-5, 5, 3, -2], [-2, 1, 1, -4]],
    [[4, -5, 4, 4], [0, 3, -3, -2], [0, 1, -1, 2], [-3, -5, -5, -2]],
    [[-2, 4], [-3, 2]],
    [[1, 1, -3, 2], [4, 2, 3, 4], [-4, 1, 0, -4], [2, -2, 3, -3]],
)
HALVES = [1, 2, 3, 4], [4, 3, 2, 1], [1, 2, 3, 4, 5, 6, 7], [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("program", "given"), [(quotient_behind_a_branch, QUOTIENTS), (halves_that_may_not_fit, HALVES)]
)
def test_what_fails_in_one_call_is_right_in_the_next(program: Any, given: Any) -> None:
    fast = ladder.compile(program)
    for numbers in given:
        with torch.no_grad():
            found, expected = (called(run, torch.tensor(numbers)) for run in (fast, program))
        torch.testing.assert_close(found, expected)


def called(run: Any, x: torch.Tensor) -> Any:
    try:
        return run(x)
    except RuntimeError as error:
        return [torch.empty(0), len(str(error))]
