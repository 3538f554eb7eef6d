"""Calls that are made while their caller handles an exception: the program may raise, read and extend it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ladder.capture import capture


def raising(x: torch.Tensor) -> Any:
    raise ValueError(len(x))


def raising_in_handlers(x: torch.Tensor) -> Any:
    try:
        return {}["a"]
    except KeyError:
        try:
            return [][2]
        except IndexError:
            raise TypeError("t")  # noqa: B904 the context is looked at


def raising_again(x: torch.Tensor) -> Any:
    raise


def reading(x: torch.Tensor) -> Any:
    return repr(sys.exc_info()[1]), x + 1


def reading_the_context(x: torch.Tensor) -> Any:
    try:
        raise KeyError(2)
    except KeyError as error:
        kept = error
    return repr(kept.__context__), x + 1


def failing_in_torch(x: torch.Tensor) -> Any:
    return x @ torch.ones(7)


PROGRAMS = (raising, raising_in_handlers, raising_again, reading, reading_the_context, failing_in_torch)


def chain(error: BaseException | None) -> list[str]:
    return [] if error is None else [repr(error), *chain(error.__context__)]


def told(function: Callable[[torch.Tensor], Any]) -> Any:
    try:
        return repr(function(torch.ones(2)))
    except Exception as error:
        return chain(error)


def told_in_handlers(function: Callable[[torch.Tensor], Any]) -> list[Any]:
    """Call a function outside of a handler, in one, and in one of an error that has a context."""
    found = []
    for number in (1, 0, 1, 0, 2, 2, 0):
        try:
            if number:
                raise OSError("first")
            found.append(told(function))
        except OSError:
            try:
                if number == 2:
                    raise LookupError("second")
                found.append(told(function))
            except LookupError:
                found.append(told(function))
    return found


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_the_caller_handles_is_seen(program: Callable[..., Any]) -> None:
    assert told_in_handlers(capture(program)) == told_in_handlers(program)


def test_no_record_holds_what_the_caller_handles() -> None:
    captured = capture(raising)
    assert told_in_handlers(captured) == told_in_handlers(raising)
    assert len(captured.records) == 1
    assert captured.outcome == "whole"
