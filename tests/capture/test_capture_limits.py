"""Records, guards and stack are bounded: beyond the limits functions run as they are, with one warning."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ladder import knobs
from ladder.capture import Captured, capture, records, run
from ladder.capture.heap import guard_lines
from ladder.capture.operations import containers
from ladder.capture.values.kinds import is_constant
from ladder.faults import LadderWarning


def same(captured: Captured, function: Callable[..., Any], *calls: tuple[Any, ...]) -> None:
    for given in calls:
        assert torch.equal(captured(*given), function(*given))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [item.getMessage() for item in caplog.records if item.name == "ladder.capture"]


def test_a_word_of_many_values(caplog):
    def function(x, word):
        return x * len(word) + (word == "word7")

    captured = capture(function)
    with caplog.at_level(logging.WARNING):
        same(captured, function, *((torch.ones(2), f"word{n}") for n in range(records.MAX_RECORDS + 20)))
    assert len(captured.records) == records.MAX_RECORDS
    assert captured.calls["eager"] == 20
    assert len(warnings_of(caplog)) == 1


class _Told(torch.nn.Module):
    """A method whose first argument lies in a cell, or is gone where the graph breaks first."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        return self.in_a_cell(x) if self.cell else self.gone(x)

    def in_a_cell(self, x):
        def told(step):
            return len(self._modules) + step

        for step in range(8):
            os.getpid()
            x = x + told(step)
        return x

    def gone(self, x):
        for step in range(8):
            os.getpid()
            x = x + step
        return x


@pytest.mark.parametrize("cell", [True, False])
def test_methods_in_which_graphs_break_often_are_left_out_for_good(cell):
    """As ``nn.Module._call_impl`` with hooks: followed anew in every call, all records were dropped."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), _Told(cell), torch.nn.Linear(4, 4))
    captured = capture(model)
    with torch.no_grad():
        same(captured, model, *[(torch.randn(2, 4),) for _ in range(6)])
    assert captured.calls == {"recorded": 2, "eager": 0}
    assert captured.outcome == "split"


def test_a_thousand_splits_in_a_loop(caplog):
    def function(x, n):
        for step in range(n):
            x = x + os.getpid() * 0 + step
        return x

    captured = capture(function)
    with caplog.at_level(logging.WARNING):
        same(captured, function, *[(torch.ones(2), 1000)] * 3)
    assert captured.records == []
    assert captured.calls == {"recorded": 1, "eager": 2}
    assert len(warnings_of(caplog)) == 1


def test_misses_between_records_that_match_take_no_stack(monkeypatch):
    """Where runs and recordings take turns, each begins where the one before was called."""
    count = 30
    lines = [
        f"    x = x + os.getpid() * 0 if flags.at_{n} else x - os.getpid() * 0 + 1" for n in range(count)
    ]
    home: dict[str, Any] = {"os": os}
    exec("\n".join(["def function(x, flags):", *lines, "    return x"]), home)
    captured = capture(home["function"])
    depth = len(list(_stack()))
    before = sys.getrecursionlimit()
    monkeypatch.setattr(run, "ROOM", contextlib.nullcontext())
    sys.setrecursionlimit(depth + 300)
    try:
        for period in (1, 2, 3, 2):
            flags = SimpleNamespace(**{f"at_{n}": n % period == 0 for n in range(count)})
            same(captured, home["function"], (torch.ones(2), flags))
    finally:
        sys.setrecursionlimit(before)
    assert captured.outcome == "split"


def _stack():
    frame = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


class Countdown:
    """Properties that call one another: each call goes through many functions of the interpreter."""

    def __init__(self, left: int) -> None:
        self.left = left

    @property
    def following(self) -> int:
        return Countdown(self.left - 1).value if self.left else 0

    @property
    def value(self) -> int:
        return self.following + 1


def test_calls_as_deep_as_they_may_be_fit_on_the_stack_of_a_caller_that_is_deep():
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + Countdown(80).value

    def deeper(levels: int) -> torch.Tensor:
        return deeper(levels - 1) if levels else captured(torch.ones(2))

    captured, limit = capture(function), sys.getrecursionlimit()
    for _ in range(2):
        assert torch.equal(deeper(200), torch.full((2,), 82.0))
    assert sys.getrecursionlimit() == limit


def test_code_that_is_made_anew_in_every_call(caplog, monkeypatch):
    monkeypatch.setattr(records, "MAX_POINTS", 10)

    def function(x):
        home: dict[str, Any] = {}
        build("import os\ndef inner(x): return x * os.getpid() + 1", home)
        return home["inner"](x) * 2

    build = exec
    captured = capture(function)
    with caplog.at_level(logging.WARNING):
        same(captured, function, *[(torch.ones(2),)] * 16)
    assert len(captured.sites) <= 11
    assert len(captured.records) <= 40
    assert len(warnings_of(caplog)) <= 1


def test_a_guard_of_too_many_conditions(monkeypatch):
    monkeypatch.setattr(guard_lines, "MAX_CHECKS", 200)

    def function(x, numbers):
        return x * sum(numbers)

    captured = capture(function)
    same(captured, function, *[(torch.ones(2), list(range(300)))] * 3, (torch.ones(2), [1, 2]))
    assert all(len(record.checks) <= 200 for record in captured.records)


def test_a_fault_in_making_a_record_is_told_and_the_call_goes_on(monkeypatch):
    def broken(steps, uses):
        raise KeyError("s7")

    monkeypatch.setattr("ladder.capture.interpreter.emit.live_steps", broken)
    with knobs.override(strict=False), pytest.warns(LadderWarning, match="KeyError at ladder/capture"):
        assert capture(lambda x: x + 1)(torch.ones(2)).sum() == 4
    with knobs.override(strict=True), pytest.raises(KeyError):
        capture(lambda x: x + 1)(torch.ones(2))


def test_what_values_decide_is_right_bounded_and_told_with_its_line():
    """The number of rows above a threshold is how often a loop runs."""

    def heads(pictures, few):
        found = []
        for scores in pictures:
            kept = scores[scores > 0.5]
            parts = [kept[at] * at for at in range(min(few, kept.size(0)))]
            found.append({"scores": kept, "parts": torch.stack([scores[0], *parts])})
        return found

    captured = capture(heads)
    for seed in range(24):
        pictures = torch.rand(3, 7, generator=torch.Generator().manual_seed(seed))
        for one, other in zip(captured(pictures, 3), heads(pictures, 3), strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)
    line = heads.__code__.co_firstlineno + 4
    assert captured.outcome == "split"
    assert f"{__file__}:{line} heads: size of a tensor whose shape depends on values" in captured.explain()
    assert len(captured.records) <= 24
    assert captured.calls["recorded"] <= 8


def pasted(mask):
    return torch.relu(mask) + os.getpid() * 0


def all_pasted(masks):
    return torch.stack([pasted(mask) for mask in masks])


def test_a_function_in_which_the_graph_breaks_again_and_again_runs_as_it_is():
    """As masks of a detector are pasted: something is read for each, and little is computed with it."""

    def function(masks):
        return all_pasted(masks.sigmoid() * 2).sum() + 1

    captured = capture(function)
    same(captured, function, *((torch.randn(9, size),) for size in (4, 4, 5, 6, 7, 8)))
    same(captured, function, *((torch.randn(7, size),) for size in (4, 4, 5, 6, 7, 8)))
    assert len(captured.records) <= 8
    assert "in which the graph broke again and again" in captured.explain()
    assert captured.calls["recorded"] <= 5


def test_a_function_that_computes_much_between_its_graph_breaks_is_followed():
    def layers(x, n):
        for step in range(n):
            for _ in range(20):
                x = torch.sin(x) + step
            x = x + os.getpid() * 0
        return x

    captured = capture(lambda x: layers(x, 6) * 2)
    same(captured, captured.function, *[(torch.ones(2),)] * 3)
    assert len(captured.records) == 7
    assert captured.calls["recorded"] == 1


def test_what_a_set_of_many_modules_holds_is_looked_at_once(monkeypatch):
    asked = []
    monkeypatch.setattr(containers, "is_constant", lambda value: asked.append(value) or is_constant(value))

    def questions(count):
        model = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(count))
        asked.clear()
        captured = capture(lambda x: x + sum(part.shape[0] for part in model.parameters()))
        assert captured(torch.ones(1)) == 2 * count + 1
        assert captured.outcome in ("new", "whole")
        return len(asked)

    assert questions(60) <= 2.2 * questions(30)
