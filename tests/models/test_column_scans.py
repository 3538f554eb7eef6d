"""Scans along axes before the last on GPUs: right, in bounds, in turns, with what is computed of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from test_column_reductions import run, run_parts

import ladder
from ladder.frontend import importer
from ladder.frontend.torch_fx import import_fx
from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.partition import partition
from ladder.partition.rows import column_axes, row_axes
from ladder.runtime.model.nodes import graph_run
from ladder.runtime.model.prepared import simplified
from ladder.runtime.model.sizes import CallSizes
from targets import get_device

H200 = get_device("cuda/sm_90a")
TARGETS = ("cuda/sm_90a", "rocm/gfx942", "rocm/gfx1100")
OPERATORS = ("scan_sum", "scan_max", "scan_product", "scan_logsumexp")


def scanned(
    shape: Sequence[int], axis: int, operator: str, ttype: str = "float32", exclusive: bool = False
) -> Graph:
    g = GraphBuilder("chain")
    return g.finish(g.add(operator, g.input("x", ttype, tuple(shape)), axis=axis, exclusive=exclusive))


def exact_of(graph: Graph, x: Any) -> list[Any]:
    with np.errstate(invalid="ignore"):
        found = evaluate(graph, [np.asarray(x, np.float64)])
    return list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("shape", "axis"), [((2, 40, 24), 1), ((700, 33), 0), ((2, 5, 3, 8), 1), ((1, 16), 0), ((3, 300, 40), 1)]
)
def test_columns(shape: tuple[int, ...], axis: int, operator: str, target: str) -> None:
    graph = scanned(shape, axis, operator)
    assert column_axes(graph, graph.outputs) == (axis, len(shape) - 1 - axis)
    assert row_axes(graph, graph.outputs) is None
    x = (1 + 0.05 * np.random.default_rng(0).normal(size=shape)).astype(np.float32)
    (made,) = run(graph, [x], target, None)
    assert np.allclose(made, exact_of(graph, x)[0], rtol=2e-5, atol=0)


@pytest.mark.parametrize("target", TARGETS)
def test_integers_and_numbers_that_are_none(target: str) -> None:
    """Of 64 bits exactly; NaN and infinities pass to what follows in their columns, to nothing else."""
    x = np.random.default_rng(0).integers(-(2**40), 2**40, (300, 16))
    for operator, exact in (("scan_sum", x.cumsum(0)), ("scan_max", np.maximum.accumulate(x, 0))):
        assert np.array_equal(run(scanned(x.shape, 0, operator, "int64"), [x], target, None)[0], exact)
    x = np.ones((600, 9), np.float32)
    x[70, 0], x[530, 1], x[5, 2], x[550, 2], x[:3, 3] = np.nan, np.inf, -np.inf, np.inf, -0.0
    for operator in OPERATORS:
        graph = scanned(x.shape, 0, operator)
        (made,) = run(graph, [x], target, None)
        bound = 1e-6 if operator == "scan_logsumexp" else 0
        assert np.allclose(made, exact_of(graph, x)[0], bound, 0, equal_nan=True)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("shape", "axis"), [((2, 300, 24), 1), ((700, 9), 0), ((5, 77), 1), ((2, 2000), 1), ((3, 1), 1)]
)
def test_what_is_before_each(shape: tuple[int, ...], axis: int, operator: str) -> None:
    """Elements are not of what they come to; before the first there is nothing."""
    graph = scanned(shape, axis, operator, exclusive=True)
    x = (1 + 0.05 * np.random.default_rng(0).normal(size=shape)).astype(np.float32)
    (made,) = run(graph, [x], "cuda/sm_90a", None)
    exact = exact_of(graph, x)[0]
    assert np.allclose(made, exact, rtol=2e-5, atol=0)
    by_torch = graph_run(graph, CallSizes(()), torch.device("cpu"))(torch.from_numpy(x))
    assert np.allclose(by_torch.numpy(), exact, rtol=2e-5, atol=0)


def ones(x: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x[:, :1])


BEFORE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "joined, then scanned": lambda x: torch.cat([ones(x), 1 - x], 1).cumprod(1)[:, :-1] * x,
    "scanned, then joined": lambda x: torch.cat([ones(x), (1 - x).cumprod(1)[:, :-1]], 1) * x,
    "padded, then scanned": lambda x: torch.nn.functional.pad(x, (1, 0)).cumsum(1)[:, :-1] + x,
    "scanned, then padded": lambda x: torch.nn.functional.pad(x.cumsum(1)[:, :-1], (1, 0)) + x,
}
OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another number": lambda x: torch.cat([2 * ones(x), 1 - x], 1).cumprod(1)[:, :-1] * x,
    "read whole": lambda x: torch.cat([ones(x), 1 - x], 1).cumprod(1)[:, 1:] * x,
    "behind": lambda x: torch.nn.functional.pad(x, (0, 1)).cumsum(1)[:, :-1] + x,
}
"""Programs that look alike."""


@pytest.mark.parametrize("name", [*BEFORE, *OTHERS])
def test_programs_of_what_is_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, x = (BEFORE | OTHERS)[name], torch.rand((3, 129), generator=torch.Generator().manual_seed(0))
    graph = imported(program, x, monkeypatch)
    parts = partition(graph, device=H200)
    assert any(dict(n.attributes).get("exclusive") for n in graph.nodes) == (name in BEFORE)
    assert len(parts) == 1 or name in OTHERS
    (made,) = run_parts(graph, parts, [x])
    torch.testing.assert_close(made, program(x.double()), rtol=1e-5, atol=1e-6)


def imported(program: Callable[..., Any], x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Graph:
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(importer.Importer, "on_cpu", never, raising=False)
    found = list[Any]()

    def backend(module: Any, examples: Any) -> Any:
        found.append(simplified(import_fx(module, examples), H200))
        return module

    with torch.no_grad():
        ladder.compile(program, backend=backend)(x)
    return found[0].graph  # type: ignore[no-any-return]


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "integral": (lambda x: x.cumsum(-1).cumsum(-2), (2, 40, 24)),
    "recurrence": (lambda x: x.cumsum(1).exp() * (x * (-x.cumsum(1)).exp()).cumsum(1), (2, 33, 16)),
    "shifted": (lambda x: torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1].cumsum(1) + x, (2, 70, 8)),
    "least": (lambda x: x.cummin(0).values * 2, (40, 4, 8)),
    "shared factor": (lambda x: (x * x[:, :1]).cumprod(1) / x.shape[1], (2, 20, 16)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_scanned_where_they_lie(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, shape = PROGRAMS[name]
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 0.5
    graph = imported(program, x, monkeypatch)
    parts = partition(graph, device=H200)
    assert [part.kind for part in parts] == ["chain"] * (2 if name == "integral" else 1)
    assert all("transpose" not in part.operators for part in parts)
    (made,) = run_parts(graph, parts, [x])
    torch.testing.assert_close(made, program(x.double()), rtol=1e-5, atol=1e-6)


def test_what_reads_other_places_is_another_chain() -> None:
    """Neighbours along the axis, sums of columns, scans along two axes: a loop each."""
    for make in (
        lambda g, y: g.add("slice", y, begin=(1, 0), shape=(63, 16)),
        lambda g, y: g.add("reduce_sum", y, axis=0),
        lambda g, y: g.add("scan_sum", y, axis=1),
        lambda g, y: g.add("transpose", y, permutation=(1, 0)),
    ):
        g = GraphBuilder("chain")
        y = g.add("scan_sum", g.input("x", "float32", (64, 16)), axis=0)
        graph = g.finish(make(g, y))
        assert column_axes(graph, graph.outputs) is None
        assert row_axes(graph, graph.outputs) is None
