"""Graphs whose shapes depend on values: which of their pieces get plans, and for which sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx

import ladder
from ladder.api.pieces import FEWEST_STEPS, Pieces
from ladder.capture.captured import run_as_is


def graph_with(count: int) -> torch.fx.GraphModule:
    """Return a graph that selects rows, computes `count` times, with views, selects again, uses ``other``."""
    graph = torch.fx.Graph()
    x, other = graph.placeholder("x"), graph.placeholder("other")
    found = graph.call_method("nonzero", (x,))
    for _ in range(count):
        found = graph.call_function(torch.add, (found, graph.call_method("view_as", (found, found))))
    again = graph.call_method("nonzero", (found,))
    graph.output((again, graph.call_function(torch.neg, (other,))))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(("count", "plans"), [(FEWEST_STEPS - 1, 0), (FEWEST_STEPS, 2)])
def test_short_pieces_run_as_they_are_and_plans_are_for_the_sizes_of_what_they_read(
    count: int, plans: int
) -> None:
    made: list[Any] = []

    def make(module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        made.append(examples)
        return run_as_is(module, examples)

    module = graph_with(count)
    pieces = Pieces(module, make, lambda _: None)
    for rows, others in ((3, 1), (3, 2), (5, 3), (3, 4), (5, 5)):
        given = torch.ones(rows), torch.ones(others)
        torch.testing.assert_close(pieces(*given), module(*given))
    assert len(made) == plans
    kept = sum(len(steps) for found in pieces.steps for steps in found.values())
    assert kept == (plans + 3 if plans else 3)  # each selection, what is between them, and what follows


def test_values_without_fake_tensors_are_read_in_torch() -> None:
    """Quantized and nested tensors have no fakes: the steps that read them run as they are."""

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        scales, zeros = torch.full((3,), 0.1), torch.zeros(3, dtype=torch.int64)
        coarse = torch.quantize_per_channel(x, scales, zeros, 1, torch.qint8)
        nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, len(x)]))
        return [coarse.dequantize().relu(), *[part.sum(0) for part in (nested * 2).unbind()]]

    fast = ladder.compile(program)
    with torch.no_grad():
        for rows in (3, 3, 2, 5, 3):
            x = torch.randn(rows, 3)
            for expected, found in zip(program(x), fast(x), strict=True):
                torch.testing.assert_close(found, expected)


def counted_behind(x: torch.Tensor, rounds: int) -> torch.Tensor:
    y = x[x[:, 0] > 0]
    for _ in range(rounds):
        y = (y * y.sum(0) + 1).tanh() @ torch.ones(4, 4)
    return y


@pytest.mark.parametrize("rounds", [0, 1, 6])  # no plan, and one of a piece alone
def test_what_runs_piece_by_piece_is_not_exported(rounds: int, tmp_path: Path) -> None:
    """The plan of a piece is not the model's: a file of it took what the model computes for an argument."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return counted_behind(x, rounds)

    fast, x = ladder.compile(program), torch.randn(9, 4)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), program(x))
        with pytest.raises(ladder.LadderError, match=r"one plan.*runs in torch"):
            fast.export(tmp_path / "m.ladder", x)


def test_what_lies_between_moves_to_another_device_gets_plans() -> None:
    """A table that lies elsewhere, as transformers' VideoMAE has one, left the whole graph to torch."""
    table = torch.randn(5, 4)

    def program(x: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(FEWEST_STEPS):
            x = torch.sin(x) * 2
        behind = x + table.to(there.device, copy=True).new_ones((5, 4), device=x.device)
        return behind, there + 1

    fast = ladder.compile(program)
    with torch.no_grad():
        for _ in range(3):
            x, there = torch.randn(5, 4), torch.empty(3, device="meta")
            found, elsewhere = fast(x, there)
            torch.testing.assert_close(found, program(x, there)[0])
            assert elsewhere.device.type == "meta"
            assert elsewhere.shape == (3,)
    (built,) = fast.models
    assert built.plan.steps
    assert not fast.refused


def test_quantized_models_with_results_on_another_device_have_plans() -> None:
    """Caches of sliding windows that no layer filled keep a number on the CPU of a model on a GPU."""
    layer = ladder.Linear.from_linear(torch.nn.Linear(64, 32), "int4", group_size=32)

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.softmax(layer(x) * 2, -1), torch.tensor(7, device="meta")

    fast = ladder.compile(program)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(5, 64)
            found, elsewhere = fast(x)
            torch.testing.assert_close(found, program(x)[0])
            assert (elsewhere.device.type, elsewhere.dtype, elsewhere.shape) == ("meta", torch.int64, ())
    assert not fast.refused
    assert fast.models
