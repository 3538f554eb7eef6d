"""Graphs some of whose tensors lie on another device than their arguments."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ladder
from ladder.api.elsewhere import without_results
from ladder.capture.values.aliasing import Aliasing, aliasing_of
from ladder.integrations import dynamo

PROGRAMS: dict[str, Callable[[torch.Tensor, str], Any]] = {
    "moved": lambda x, place: ((x + 1).to(place), x * 2),
    "made": lambda x, place: (torch.zeros(3, device=place), x * 2),
    "made like another": lambda x, place: (torch.ones_like(x, device=place) * 2, x * 2),
    "in between": lambda x, place: (x + torch.ones(3, device=place).shape[0], x * 2),
}


def check(way: Callable[[Any], Any], name: str, x: torch.Tensor, place: str) -> None:
    """Compare devices and values of three calls."""
    program = PROGRAMS[name]
    expected, fast = program(x, place), way(program)
    for _ in range(3):
        for one, other in zip(expected, fast(x, place), strict=True):
            if isinstance(one, torch.Tensor):
                assert other.device == one.device
                assert one.is_meta or torch.equal(one, other)
            else:
                assert one == other


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("way", [ladder.compile, lambda f: torch.compile(f, backend=dynamo.backend)])
def test_results_lie_where_the_program_has_them(way: Callable[[Any], Any], name: str) -> None:
    with torch.no_grad():
        check(way, name, torch.randn(3), "meta")


def _cache_on(place: str) -> Callable[[torch.Tensor], Any]:
    """Return a program that makes an object with a number on another device, as caches of transformers do."""

    def program(x: torch.Tensor) -> Any:
        kept = SimpleNamespace(window=torch.tensor(63, device=place), both=[torch.zeros(2, device=place)] * 2)
        return x * 2 + 1, kept

    return program


def test_numbers_made_elsewhere_leave_the_plan_of_all_else() -> None:
    program, x = _cache_on("meta"), torch.randn(3, 4)
    fast = ladder.compile(program)
    with torch.no_grad():
        for _ in range(3):
            found, kept = fast(x)
            assert torch.equal(found, program(x)[0])
            assert kept.window.is_meta
            assert kept.window.dtype is torch.int64
            assert kept.both[0] is kept.both[1]
            assert kept.both[0].is_meta
    assert fast.models
    assert not fast.refused


def test_numbers_that_are_copied_here_are_made_here() -> None:
    graph, here = torch.fx.Graph(), torch.device("cuda", 0)
    x = graph.placeholder("x")
    number = graph.call_function(torch.tensor, (5,))
    results = (number, graph.call_method("to", (number, here)), graph.call_function(torch.neg, (x,)))
    graph.output(results)
    devices = torch.device("cpu"), here, here
    lies = Aliasing((0, 1, 2, 3), (0, 1, 2, 3), False, (None,) * 3, (0,) * 4, devices, *((False,) * 3,) * 2)
    found = without_results(torch.fx.GraphModule({}, graph), lies, here)
    assert found is not None
    rest, joined = found
    made = [node for node in rest.graph.nodes if node.op.startswith("call")]
    assert [(node.target, node.kwargs) for node in made] == [
        (torch.tensor, {"device": here}),
        (torch.neg, {}),
    ]
    assert rest.meta["aliasing"].devices == (here, here)
    assert joined(lambda *_: ["there", "plan"])()[0].equal(torch.tensor(5))


def test_numbers_that_the_graph_changes_are_not_taken_out() -> None:
    graph, here = torch.fx.Graph(), torch.device("cuda", 0)
    number = graph.call_function(torch.tensor, (5,))
    graph.call_method("add_", (number, 1))
    graph.output((number,))
    lies = Aliasing((0,), (0,), False, (None,), (0,), (torch.device("cpu"),), (False,), (False,))
    assert without_results(torch.fx.GraphModule({}, graph), lies, here) is None


def test_equal_numbers_share_no_memory() -> None:
    x = torch.ones(2)
    found = aliasing_of((300, x, 300), [x, 300])
    assert found.memory == found.objects == (0, 1, 2, 1, 4)
