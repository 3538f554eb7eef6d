"""Runs that fail leave tensors as the program leaves them; what is only overwritten is not copied first."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ladder.capture import capture
from ladder.capture.interpreter import emit
from ladder.capture.values.saved import restore_memory, saved_memory

ROWS, WIDTH = 6, 4
State = dict[str, Tensor]


def puts_by_one_index(s: State, ids: Tensor, at: Tensor) -> Tensor:
    x = torch.nn.functional.embedding(ids, s["table"])
    s["keys"].index_copy_(0, at, x)
    s["values"].index_copy_(0, at, x * 2)
    return s["keys"].sum(0) + s["values"].sum(0)


def puts_by_two_indices(s: State, ids: Tensor, at: Tensor) -> Tensor:
    s["keys"].index_copy_(0, at, torch.ones(len(at), WIDTH))
    s["values"].index_copy_(0, ids, torch.ones(len(ids), WIDTH))
    return s["keys"] + s["values"]


def layers(s: State, ids: Tensor, at: Tensor) -> Tensor:
    """The index of the second layer is one of its own; what it puts depends on the first."""
    x = torch.nn.functional.embedding(ids, s["table"])
    s["keys"].index_copy_(0, at, x)
    x = x + s["keys"].mean(0)
    s["values"].index_copy_(0, at + s["count"], x)
    s["count"].add_(0)
    return x + s["values"].sum(0)


def read_before(s: State, ids: Tensor, at: Tensor) -> Tensor:
    x = s["keys"].sum(0) + torch.zeros(len(at), WIDTH)
    s["keys"].index_copy_(0, at, x)
    return torch.nn.functional.embedding(ids, s["table"]) + s["keys"].sum(0)


def counted(s: State, ids: Tensor, at: Tensor) -> Tensor:
    s["count"].add_(1)
    return torch.nn.functional.embedding(ids, s["table"]) + s["count"]


def written_after_what_may_fail(s: State, ids: Tensor, at: Tensor) -> Tensor:
    x = torch.nn.functional.embedding(ids, s["table"])
    s["keys"].copy_(torch.full((ROWS, WIDTH), 2.0))
    return x + s["keys"].sum(0)


def shown_before(s: State, ids: Tensor, at: Tensor) -> Tensor:
    """A view reads nothing."""
    turned = s["keys"].t()
    x = torch.nn.functional.embedding(ids, s["table"])
    s["keys"].index_copy_(0, at, x)
    return turned.sum(1) + x


def written_through_a_view(s: State, ids: Tensor, at: Tensor) -> Tensor:
    s["keys"][0].copy_(torch.full((WIDTH,), 3.0))
    x = torch.nn.functional.embedding(ids, s["table"])
    return x + s["keys"].sum(0)


def of_itself(s: State, ids: Tensor, at: Tensor) -> Tensor:
    s["keys"].index_copy_(0, at, s["keys"][: len(at)] + 1)
    return torch.nn.functional.embedding(ids, s["table"]) + s["keys"].sum(0)


def written_twice(s: State, ids: Tensor, at: Tensor) -> Tensor:
    s["keys"].fill_(1.0)
    s["values"].copy_(s["keys"])
    s["keys"].fill_(2.0)
    return torch.nn.functional.embedding(ids, s["table"]) + s["keys"].sum(0) + s["values"].sum(0)


KEPT: dict[Callable[[State, Tensor, Tensor], Tensor], set[str]] = {
    puts_by_one_index: set(),
    puts_by_two_indices: {"values"},
    layers: {"count"},
    read_before: {"keys"},
    counted: {"count"},
    written_after_what_may_fail: {"keys"},
    shown_before: set(),
    written_through_a_view: set(),
    of_itself: {"keys"},
    written_twice: {"keys"},
}
"""Program -> what it writes that must be put back."""

GOOD = torch.tensor([1, 2])
CALLS = {
    "right": (GOOD, GOOD),
    "other numbers": (torch.tensor([0, 5]), torch.tensor([3, 4])),
    "a bad row of the table": (torch.tensor([1, ROWS]), GOOD),
    "a bad place": (GOOD, torch.tensor([ROWS, 0])),
    "right again": (GOOD, GOOD),
}


@pytest.mark.parametrize("program", KEPT, ids=lambda program: program.__name__)
def test_a_failed_run_leaves_what_the_program_leaves(
    program: Callable[[State, Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = list[Tensor]()

    def saved(written: tuple[Tensor, ...], counted: tuple[Tensor, ...]) -> object:
        copied.extend(written)
        return kept_by(written, counted)

    kept_by = emit.saved_memory
    monkeypatch.setattr(emit, "saved_memory", saved)
    drawn = torch.Generator().manual_seed(1)
    want = {
        "table": torch.randn(ROWS, WIDTH, generator=drawn),
        "keys": torch.randn(ROWS, WIDTH, generator=drawn),
        "values": torch.randn(ROWS, WIDTH, generator=drawn),
        "count": torch.zeros((), dtype=torch.int64),
    }
    found, fast = copy.deepcopy(want), capture(program)
    for what, (ids, at) in CALLS.items():
        results: list[object] = []
        for function, state in ((program, want), (fast, found)):
            try:
                results.append(function(state, ids.clone(), at.clone()))
            except (IndexError, RuntimeError) as error:
                results.append(type(error))
        if isinstance(results[0], Tensor):
            torch.testing.assert_close(results[1], results[0])
        else:
            assert results[1] is results[0], what
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, msg=f"{name} after {what}")
    names = {name for name, value in found.items() if any(value is each for each in copied)}
    assert names == KEPT[program]


def test_memory_of_all_kinds_is_put_back_and_no_version_grows() -> None:
    base, turned = torch.arange(10.0), torch.arange(6.0).view(2, 3).t()
    both = torch.tensor([1 + 2j])
    written = [
        *(
            base[2:5],
            turned,
            both,
            both.imag,
            torch.tensor(3.0),
            torch.zeros(0),
            torch.nn.Parameter(torch.ones(3)),
        ),
        *(torch.tensor([each]) for each in range(4)),
    ]
    before = [tensor.detach().clone() for tensor in written]
    versions = [tensor._version for tensor in written]
    saved = saved_memory(written, (*written,))
    with torch.no_grad():
        for tensor in (base, *written[1:]):
            tensor.mul_(2).add_(1)
    restore_memory(saved)
    for tensor, value in zip(written, before, strict=True):
        torch.testing.assert_close(tensor.detach(), value, rtol=0, atol=0)
    assert [tensor._version for tensor in written] == versions


@pytest.mark.parametrize(("probability", "draws"), [(0.0, False), (0.5, True)])
def test_random_states_are_kept_only_where_numbers_are_drawn(probability: float, draws: bool) -> None:
    """Attention has the tag of operators that draw, whatever it drops."""
    x = torch.ones(1, 1, 4, 4)
    captured = capture(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q, None, probability))
    captured(x)
    assert ("states = " in captured.records[0].source) == draws
