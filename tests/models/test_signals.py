"""Exceptions of signal handlers, as timeouts raise them: the program gets them, and no record keeps them."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ladder
from ladder import interrupts, knobs
from ladder.capture.interpreter.opcodes import HANDLERS

NUMBER = signal.SIGUSR1


class Late(Exception):
    pass


def late(*_: object) -> None:
    raise Late("too late")


class Handler:
    """An object that handles signals."""

    def __call__(self, number: int, frame: object) -> None:
        late()

    def method(self, number: int, frame: object) -> None:
        late()


class Due:
    """Sends the signal where it is asked, as often as was said."""

    def __init__(self) -> None:
        self.times = 0

    def ask(self) -> None:
        if self.times:
            self.times -= 1
            signal.raise_signal(NUMBER)


@pytest.fixture
def due() -> Iterator[Due]:
    before = signal.signal(NUMBER, late)
    yield Due()
    signal.signal(NUMBER, before)


@pytest.fixture
def in_operator(due: Due) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """An operator during which the signal may come, and not during its fake."""
    with torch.library._scoped_library("signals", "FRAGMENT") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: (due.ask(), x * 2)[1], "CPU")
        library.impl("doubled", lambda x: torch.empty_like(x), "Meta")
        yield torch.ops.signals.doubled.default


@pytest.fixture
def in_fake(due: Due) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """An operator whose fake is asked when the signal may come."""
    with torch.library._scoped_library("signals", "FRAGMENT") as library:
        library.define("tripled(Tensor x) -> Tensor")
        library.impl("tripled", lambda x: x * 3, "CPU")
        library.impl("tripled", lambda x: (due.ask(), torch.empty_like(x))[1], "Meta")
        yield torch.ops.signals.tripled.default


def interrupted_at(monkeypatch: pytest.MonkeyPatch, due: Due, name: str) -> None:
    """Let the signal come while an instruction is interpreted."""
    real = HANDLERS[name]

    def handler(*given: Any) -> Any:
        due.ask()
        return real(*given)

    monkeypatch.setitem(HANDLERS, name, handler)


def test_what_a_program_does_with_a_timeout_is_not_what_it_always_does(
    monkeypatch: pytest.MonkeyPatch, due: Due
):
    def program(x):
        try:
            return torch.tanh(x) * 2
        except Late:
            return torch.zeros(3)

    fast, x = ladder.compile(program), torch.ones(3)
    interrupted_at(monkeypatch, due, "BINARY_OP")
    due.times = 1
    assert torch.equal(fast(x), torch.zeros(3))
    for _ in range(3):
        torch.testing.assert_close(fast(x), torch.tanh(x) * 2)
    assert fast.outcome == "whole"


@pytest.mark.parametrize("kind", [Late, KeyboardInterrupt])
def test_a_timeout_is_raised_once(monkeypatch: pytest.MonkeyPatch, due: Due, kind: type[BaseException]):
    def raising(*_: object) -> None:
        raise kind

    signal.signal(NUMBER, raising)
    fast, x = ladder.compile(lambda x: torch.tanh(x) * 2), torch.ones(3)
    interrupted_at(monkeypatch, due, "BINARY_OP")
    due.times = 1
    with pytest.raises(kind):
        fast(x)
    for _ in range(3):
        torch.testing.assert_close(fast(x), torch.tanh(x) * 2)
    assert fast.outcome == "whole"


@pytest.mark.parametrize("handler", [late, Handler(), Handler().method, functools.partial(late, 1)])
def test_a_timeout_in_a_fake_is_no_reason_to_leave_the_operator_out(due: Due, in_fake, handler: Any):
    signal.signal(NUMBER, handler)
    fast = ladder.compile(lambda x: torch.tanh(in_fake(x)))
    for rows in (2, 3):
        x = torch.randn(rows, 3)
        due.times = 1
        try:
            fast(x)
        except Late:
            pass
        else:
            assert due.times, "the timeout was lost"
        due.times = 0
        torch.testing.assert_close(fast(x), torch.tanh(x * 3))
    assert fast.outcome == "whole"


@pytest.mark.parametrize("strict", [True, False])
def test_a_timeout_while_a_plan_runs_ends_the_call(due: Due, in_operator, strict: bool):
    fast, x = ladder.compile(lambda x: torch.tanh(in_operator(x)) + 1), torch.randn(3)
    with knobs.override(strict=strict):
        for _ in range(3):
            fast(x)
        due.times = 1
        with pytest.raises(Late):
            fast(x)
        torch.testing.assert_close(fast(x), torch.tanh(x * 2) + 1)


def test_errors_of_the_program_are_no_handlers():
    with pytest.raises(ValueError, match="its own") as raised:
        raise ValueError("its own")
    assert interrupts.asynchronous(raised.value) is None
