"""Few rows of experts are not sorted: graphs that say the same, wherever the sort can be left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ladder.frontend.torch_fx import import_fx
from ladder.ir.graph import Graph
from ladder.rewrite import simplify
from ladder.runtime.model.grouped_calls import PRODUCT, SLOTTED, with_grouped_products
from ladder.runtime.model.nodes import node_run
from ladder.runtime.model.sizes import CallSizes
from ladder.runtime.model.unsorted_rows import are_few, with_unsorted_rows
from targets import get_device

EXPERTS, WIDTH, INNER = 16, 64, 32
DEVICE = get_device("cuda/sm_90a")
grouped_mm = torch.ops.aten._grouped_mm.default

Given = tuple[torch.Tensor, ...]
"""Rows ``[T, K]``, ids and weights ``[T, k]``, matrices ``[E, 2 I, K]``, ``[E, K, I]``, bias ``[E, 2 I]``."""


def by_hand(x: torch.Tensor, matrices: torch.Tensor, experts: torch.Tensor, whole: bool) -> torch.Tensor:
    rows = [row @ matrices[e] if 0 <= e < len(matrices) else row.new_zeros(matrices.shape[2])
            for row, e in zip(x, experts.tolist(), strict=True)]  # fmt: skip
    return torch.stack(rows)


def by_torch(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, whole: bool) -> torch.Tensor:
    found = torch.arange(len(x))[:, None] >= ends[None]
    return by_hand(x, matrices, found.sum(1), whole)


@pytest.fixture(autouse=True)
def _on_cpus() -> Iterator[None]:
    with torch.library._scoped_library("ladder", "IMPL") as library:
        library.impl("grouped_product", by_torch, "CPU")
        library.impl("named_product", by_hand, "CPU")
        yield


def given(tokens: int, chosen: int) -> Given:
    generator = torch.Generator().manual_seed(tokens)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(chosen).indices
    weights = torch.rand(tokens, chosen, generator=generator).bfloat16()
    matrices = drawn(EXPERTS, 2 * INNER, WIDTH), drawn(EXPERTS, WIDTH, INNER)
    return drawn(tokens, WIDTH), ids, weights, *matrices, drawn(EXPERTS, 2 * INNER)


def sorted_rows(ids: torch.Tensor) -> Given:
    flat, order = torch.sort(ids.reshape(-1))
    counts = torch.histc(flat.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    return flat, order, torch.cumsum(counts, dim=0, dtype=torch.int32)


def gated(rows: torch.Tensor) -> torch.Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def mixture(x: Any, ids: Any, weights: Any, up: Any, down: Any, bias: Any) -> torch.Tensor:
    """As transformers has it, bias included."""
    chosen = ids.size(-1)
    flat, order, ends = sorted_rows(ids)
    rows = grouped_mm(x[order // chosen], up.transpose(-2, -1), ends) + bias[flat]
    rows = grouped_mm(gated(rows), down.transpose(-2, -1), ends)
    rows = rows * weights.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.index_put(torch.empty_like(order), (order,), torch.arange(order.size(0)))
    return rows[inverse].view(x.size(0), chosen, -1).sum(dim=1)


def two_layers(x: Any, ids: Any, weights: Any, up: Any, down: Any, bias: Any) -> torch.Tensor:
    return mixture(mixture(x, ids, weights, up, down, bias), ids + 0, weights, up, down, bias)


def scattered(x: Any, ids: Any, weights: Any, up: Any, down: Any, bias: Any) -> torch.Tensor:
    """Rows of no expert are masked, results are put at their places."""
    flat, order, ends = sorted_rows(ids)
    rows = grouped_mm(x[order // ids.size(-1)], up.transpose(-2, -1), ends)
    rows = torch.where((flat < EXPERTS).unsqueeze(-1), rows, 0.0)
    return torch.empty_like(rows).index_copy_(0, order, rows * 2.0)


def graphs(program: Callable[..., Any], operands: Given) -> tuple[Graph, Graph]:
    """Return the graph of a program with products of ours, and what becomes of it."""
    module = torch.fx.symbolic_trace(program)
    imported = import_fx(module, list(operands), join=True)
    graph = with_grouped_products(simplify(imported.graph, DEVICE), DEVICE)
    return graph, with_unsorted_rows(graph)


def targets(graph: Graph) -> set[str]:
    return {str(dict(node.attributes)["target"]) for node in graph.nodes if node.operator == "call"}


def values(graph: Graph, operands: Given) -> torch.Tensor:
    found: dict[str, Any] = dict(zip((node.name for node in graph.inputs), operands, strict=True))
    for node in graph.nodes:
        if node.operator != "input":
            step = node_run(node, CallSizes(()), torch.device("cpu"))
            result = step(*(found[value] for value in node.inputs))
            found |= zip(node.values, result if len(node.values) > 1 else [result], strict=True)
    result = found[graph.outputs[0]]
    assert isinstance(result, torch.Tensor)
    return result


@pytest.mark.parametrize("program", [mixture, two_layers, scattered])
@pytest.mark.parametrize(("tokens", "chosen"), [(1, 4), (2, 3), (4, 1), (1, 1)])
def test_few_rows_stay_in_the_programs_order(program: Callable[..., Any], tokens: int, chosen: int) -> None:
    operands = given(tokens, chosen)
    graph, found = graphs(program, operands)
    assert PRODUCT in targets(graph)
    assert SLOTTED in targets(found)
    assert targets(found) <= {SLOTTED, "aten.index.Tensor"}, "nothing is sorted or counted"
    assert [node.name for node in found.inputs] == [node.name for node in graph.inputs]
    if program is scattered:
        operands[1][0, 0] = EXPERTS
    torch.testing.assert_close(values(found, operands), values(graph, operands), rtol=0, atol=0)


def in_order(x: Any, ids: Any, weights: Any, up: Any, down: Any, bias: Any) -> Any:
    """The sorted numbers are a result."""
    flat, order, ends = sorted_rows(ids)
    rows = grouped_mm(x[order // ids.size(-1)], up.transpose(-2, -1), ends)
    return torch.empty_like(rows).index_copy_(0, order, rows), flat


def by_place(x: Any, ids: Any, weights: Any, up: Any, down: Any, bias: Any) -> torch.Tensor:
    """A row of a sorted place is another than that of others."""
    _, order, ends = sorted_rows(ids)
    rows = grouped_mm(x[order // ids.size(-1)], up.transpose(-2, -1), ends)
    rows = rows * torch.arange(rows.size(0)).unsqueeze(-1)
    return torch.empty_like(rows).index_copy_(0, order, rows)


def first_rows(x: Any, ids: Any, weights: Any, up: Any, down: Any, bias: Any) -> torch.Tensor:
    _, order, ends = sorted_rows(ids)
    return grouped_mm(x[order // ids.size(-1)], up.transpose(-2, -1), ends)[:2] * 1.0


def summed(x: Any, ids: Any, weights: Any, up: Any, down: Any, bias: Any) -> torch.Tensor:
    _, order, ends = sorted_rows(ids)
    rows = grouped_mm(x[order // ids.size(-1)], up.transpose(-2, -1), ends).cumsum(0)
    return torch.empty_like(rows).index_copy_(0, order, rows)


def counted_otherwise(x: Any, ids: Any, weights: Any, up: Any, down: Any, bias: Any) -> torch.Tensor:
    flat, order, _ = sorted_rows(ids)
    counts = torch.histc(flat.float(), bins=EXPERTS, min=0, max=EXPERTS)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    rows = grouped_mm(x[order // ids.size(-1)], up.transpose(-2, -1), ends)
    return torch.empty_like(rows).index_copy_(0, order, rows)


def descending(x: Any, ids: Any, weights: Any, up: Any, down: Any, bias: Any) -> torch.Tensor:
    flat, order = torch.sort(ids.reshape(-1), descending=True)
    ends = torch.cumsum(torch.histc(flat.float(), bins=EXPERTS, min=0, max=EXPERTS - 1), 0, dtype=torch.int32)
    rows = grouped_mm(x[order // ids.size(-1)], up.transpose(-2, -1), ends)
    return torch.empty_like(rows).index_copy_(0, order, rows)


@pytest.mark.parametrize("program", [in_order, by_place, first_rows, summed, counted_otherwise, descending])
def test_programs_that_see_the_order_keep_it(program: Callable[..., Any]) -> None:
    graph, found = graphs(program, given(2, 2))
    assert PRODUCT in targets(graph)
    assert found == graph


def test_many_rows_are_sorted() -> None:
    graph, found = graphs(mixture, given(8, 4))
    assert found == graph
    assert are_few(8, 64)
    assert are_few(16, 64)
    assert not are_few(64, 64)
    assert are_few(1, 1)
    assert not are_few(2, 1)
