"""Which generators do something when they are dropped before their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ladder.capture import capture
from ladder.capture.python.frames import guards_yields


def plain() -> Iterator[int]:
    yield 1


def for_one_kind() -> Iterator[int]:
    try:
        yield 1
    except IndexError:
        return


def for_two_kinds() -> Iterator[int]:
    try:
        try:
            yield 1
        except (KeyError, ValueError):
            print()
    except IndexError as error:
        print(error)
    except TypeError:
        print()


def for_any_kind() -> Iterator[int]:
    try:
        yield 1
    except BaseException:
        print()
        raise


def bare() -> Iterator[int]:
    try:
        yield 1
    except:
        print()
        raise


def with_an_end() -> Iterator[int]:
    try:
        try:
            yield 1
        except IndexError:
            return
    finally:
        print()


def in_a_context() -> Iterator[int]:
    with nullcontext():
        yield 1


def for_its_own_kind() -> Iterator[int]:
    try:
        yield 1
    except GeneratorExit:
        print()


@pytest.mark.parametrize("generator", [plain, for_one_kind, Sequence.__iter__])
def test_nothing_is_done(generator: Any) -> None:
    assert not guards_yields(generator.__code__)


@pytest.mark.parametrize(
    "generator", [for_any_kind, bare, with_an_end, in_a_context, for_its_own_kind, for_two_kinds]
)
def test_something_is_done(generator: Callable[[], Iterator[int]]) -> None:
    """Of several kinds of exceptions in one clause it is not looked which they are."""
    assert guards_yields(generator.__code__)


class Layers(Sequence[int]):
    """Is read by the iterator of `Sequence`."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, at: Any) -> Any:
        if at >= 3:
            raise IndexError(at)
        return at


def test_a_sequence_is_left_before_its_end() -> None:
    def program(x: torch.Tensor, layers: Layers) -> torch.Tensor:
        for name, layer in zip(["a", "b"], layers, strict=False):
            x = x * layer + len(name)
        return x

    fast = capture(program)
    for _ in range(2):
        assert torch.equal(fast(torch.ones(2), Layers()), program(torch.ones(2), Layers()))
    assert fast.outcome == "whole"


def noted(log: list[str]) -> Iterator[int]:
    try:
        yield from (1, 2)
    finally:
        log.append("closed")


def in_a_loop(x: torch.Tensor, log: list[str]) -> None:
    for number in noted(log):
        raise KeyError(x.sum() + number)


def in_a_variable(x: torch.Tensor, log: list[str]) -> None:
    numbers = noted(log)
    raise KeyError(x.sum() + next(numbers))


def beside_an_end(x: torch.Tensor, log: list[str]) -> None:
    numbers = noted(log)
    try:
        raise KeyError(x.sum() + next(numbers))
    finally:
        log.append("left")


def behind_a_break(x: torch.Tensor, log: list[str]) -> None:
    numbers = noted(log)
    next(numbers)
    if x.sum() > 0:
        raise KeyError(1)


@pytest.mark.parametrize("inner", [in_a_loop, in_a_variable, beside_an_end, behind_a_break])
def test_a_generator_is_closed_when_an_exception_leaves_it_behind(inner: Callable[..., None]) -> None:
    """What a loop goes through is dropped at once; a variable's value lives as long as the exception."""

    def program(x: torch.Tensor, log: list[str]) -> torch.Tensor:
        try:
            inner(x, log)
        except KeyError:
            log.append("caught")
        log.append("behind")
        return x * len(log)

    fast = capture(program)
    for _ in range(4):
        expected, found = list[str](), list[str]()
        assert torch.equal(program(torch.ones(2), expected), fast(torch.ones(2), found))
        assert found == expected
