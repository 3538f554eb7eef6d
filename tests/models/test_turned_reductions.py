"""Long reductions of transposed values and of columns of exponentials: as they lie, and in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chain_targets import run_chain
from test_gpu_partition import DEVICE, on_gpu, planned

from ladder.ir import GraphBuilder
from ladder.ir.build import node_attributes
from ladder.movement import split
from ladder.movement.choose import machine_of, ranked
from ladder.movement.model import predicted
from ladder.partition import chains
from ladder.partition.subgraphs import Subgraph
from ladder.rewrite import turned_reductions
from ladder.rewrite.turned_reductions import as_they_lie

assert on_gpu


def both_ways(x: torch.Tensor) -> torch.Tensor:
    """Cross entropy along rows and along columns, as contrastive losses have it."""
    labels = torch.arange(x.shape[0])
    return F.cross_entropy(x, labels) + F.cross_entropy(x.t(), labels)


def turned_sums(x: torch.Tensor) -> torch.Tensor:
    return (x.t() * torch.arange(x.shape[0])).abs().sum(1)


def turned_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.transpose(-1, -2), -1)


def of_columns(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -2)


def logarithms(x: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(x.permute(2, 0, 1), -1)


@pytest.mark.parametrize(
    ("program", "most"), [(both_ways, 50), (turned_sums, 22), (turned_softmax, 60), (of_columns, 60)]
)
def test_columns_are_read_as_they_lie(program: Callable[..., Any], most: float) -> None:
    """most: predicted µs for 4096 by 4096; 95, 84, 94 and 93 if lanes read columns, or read them twice."""
    parts = planned(program, torch.zeros(4096, 4096))
    machine = machine_of(DEVICE)
    times = [predicted(ranked(part.graph, machine)[0], machine) for part in parts]
    assert sum(times) <= most * 1e-6


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small graphs take the ways of large ones."""
    for module in (split, chains):
        monkeypatch.setattr(module, "LONG_BLOCK", 1)
    monkeypatch.setattr(chains, "LARGE_WORK", 1)
    monkeypatch.setattr(split, "LEAST_PART", 2)
    monkeypatch.setattr(split, "HELD_COLUMNS", (8, 16))
    monkeypatch.setattr(split, "_seconds", lambda graph, machine: -float(len(str(graph))))
    monkeypatch.setattr(turned_reductions, "LEAST_LENGTH", 16)
    monkeypatch.setattr(turned_reductions, "LEAST_ROW", 16)
    monkeypatch.setattr(turned_reductions, "MUCH_READ", 64)


def special(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[..., 1], x[..., 5], x[..., 7] = -torch.inf, 3e38, -3e38
    x[..., ::2, 6], x[..., 2, 3], x[..., 5, 4] = -torch.inf, torch.inf, torch.nan
    return x


def run(parts: list[Subgraph], x: torch.Tensor) -> torch.Tensor:
    values = {"x": x}
    for part in parts:
        given = [values.get(value, x).contiguous() for value in part.inputs]
        values.update(zip(part.outputs, run_chain(part.graph, given, "cuda/sm_90a"), strict=True))
    return values[parts[-1].outputs[-1]]


@pytest.mark.parametrize("shape", [(48, 40), (50, 24)])
@pytest.mark.parametrize("program", [turned_sums, turned_softmax, of_columns])
@pytest.mark.usefixtures("small")
def test_parts_give_what_the_whole_does(program: Callable[..., Any], shape: tuple[int, ...]) -> None:
    for x in (torch.randn(shape), special(torch.randn(shape))):
        found, exact = run(planned(program, x), x), program(x).double()
        torch.testing.assert_close(
            found.double().reshape(exact.shape), exact, rtol=2e-6, atol=1e-7, equal_nan=True
        )


def keys_first(x: torch.Tensor) -> torch.Tensor:
    """A softmax whose maxima and sums are read along one more axis than one."""
    return torch.softmax(x.transpose(-1, -2), -2)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("program", [of_columns, logarithms, keys_first, turned_softmax])
def test_parts_of_inner_axes_are_right(program: Callable[..., Any], count: int) -> None:
    for x in (torch.randn(count, 40, 24), special(torch.randn(count, 40, 24))):
        found, exact = run(planned(program, x), x), program(x).double()
        torch.testing.assert_close(
            found.double().reshape(exact.shape), exact, rtol=2e-6, atol=1e-7, equal_nan=True
        )


def channel_means(x: torch.Tensor) -> torch.Tensor:
    return x.mean((1, 2))


def channel_maxima(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1, 2).amax(1, keepdim=True)


@pytest.mark.parametrize("channels", [3, 8, 16])
def test_few_columns_are_read_in_vectors(channels: int) -> None:
    """Single elements of three channels took 26 µs by the model, four times the time of their bytes."""
    parts = planned(channel_means, torch.zeros(32, 224, 224, channels))
    best = [ranked(part.graph, machine_of(DEVICE))[0] for part in parts]
    assert best[0].mapping.across * best[0].mapping.num >= 32
    assert predicted(best[0], machine_of(DEVICE)) <= 1.3 * 32 * 224 * 224 * channels * 4 / 4.25e12


@pytest.mark.parametrize("channels", [2, 3, 5])
@pytest.mark.parametrize("program", [channel_means, channel_maxima])
@pytest.mark.usefixtures("small")
def test_parts_of_few_columns_are_right(program: Callable[..., Any], channels: int) -> None:
    x = torch.randn(2, 12, 10, channels)
    x[0, 3, 4, 1], x[1, 11, 9, 0] = torch.nan, -torch.inf
    parts = planned(program, x)
    assert len(parts) == 2
    found, exact = run(parts, x), program(x.double())
    torch.testing.assert_close(
        found.double().reshape(exact.shape), exact, rtol=2e-6, atol=1e-7, equal_nan=True
    )


def test_rows_and_columns_of_one_length_are_apart() -> None:
    """A square matrix over its rows' and its columns' norms: one loop would read columns by rows."""

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x / x.norm(dim=1, keepdim=True) / x.norm(dim=0, keepdim=True)

    parts = planned(normed, torch.zeros(2048, 2048))
    times = (predicted(ranked(part.graph, machine_of(DEVICE))[0], machine_of(DEVICE)) for part in parts)
    assert sum(times) <= 25e-6


def test_only_long_reductions_that_lie_apart_are_turned() -> None:
    for shape, order, axis, turned in (
        ((2048, 512), (1, 0), 1, True),
        ((512, 2048), (1, 0), 1, False),  # short
        ((512, 2048), (1, 0), 0, True),  # rows of the source
        ((2048, 512), (1, 0), 0, False),
        ((4, 8, 2048, 64), (0, 1, 3, 2), 3, True),
        ((4, 2048, 8, 64), (0, 2, 1, 3), 2, False),  # along an axis before the last in both
    ):
        g = GraphBuilder("turned")
        value = g.add("abs", g.add("transpose", g.input("x", "float32", shape), permutation=order))
        graph = as_they_lie(g.finish(g.add("reduce_sum", value, axis=axis)))
        (node,) = (node for node in graph.nodes if node.operator == "reduce_sum")
        below = graph.producer(graph.producer(node.inputs[0]).inputs[0])
        assert (below.operator == "input") is turned
        assert graph.tile(graph.outputs[0]).shape == g.tile("reduce_sum").shape
        assert node_attributes(node)["axis"] == (order[axis] if turned else axis)


def columns_normed(x: torch.Tensor) -> torch.Tensor:
    """As images' channels are normed, channels first: by rows of the turned one."""
    return F.layer_norm(x.transpose(-1, -2), (x.shape[-2],))


def test_deviations_are_computed_again_by_what_turns_them() -> None:
    """94 µs were predicted where they are stored in float32."""
    parts = planned(columns_normed, torch.zeros(4, 4096, 1024, dtype=torch.float16))
    assert len(parts) == 3
    machine = machine_of(DEVICE)
    assert sum(predicted(ranked(part.graph, machine)[0], machine) for part in parts) <= 60e-6


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("shape", [(48, 40), (3, 40, 24), (2, 33, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_of_columns_are_right(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).to(dtype)
    odd = x.clone()
    odd[..., 1, 0], odd[..., 2, 1], odd[..., 3] = torch.nan, torch.inf, 5
    for given in (x, odd):
        found, exact = run(planned(columns_normed, given), given), columns_normed(given.double())
        bound = 2e-3 if dtype is torch.float16 else 2e-5
        torch.testing.assert_close(
            found.double().reshape(exact.shape), exact, rtol=bound, atol=bound, equal_nan=True
        )
