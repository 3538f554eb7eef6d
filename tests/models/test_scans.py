"""Scans along rows on GPUs (sums, products, maxima): right, in bounds, with what is computed of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from test_column_reductions import run, run_parts

import ladder
from ladder.frontend import aten_reductions, importer
from ladder.frontend.torch_fx import import_fx
from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.movement.choose import machine_of, ranked
from ladder.partition import partition
from ladder.partition.rows import row_axes
from ladder.rewrite import simplify
from ladder.runtime.model.prepared import simplified
from targets import get_device

H200 = get_device("cuda/sm_90a")
TARGETS = ("cuda/sm_90a", "rocm/gfx942", "rocm/gfx1100")
OPERATORS = ("scan_sum", "scan_max", "scan_product", "scan_logsumexp")


def scanned(shape: Sequence[Any], operator: str = "scan_sum", ttype: str = "float32") -> Graph:
    g = GraphBuilder("chain")
    x = g.input("x", ttype, tuple(shape))
    x = g.add("convert", x, type="float32") if ttype == "float16" else x
    return g.finish(g.add(operator, x, axis=len(shape) - 1))


def shares(shape: Sequence[Any], operator: str, ttype: str) -> Graph:
    """Return sums of probabilities up to each, and how many are small: reductions before and after a scan."""
    g = GraphBuilder("chain")
    last = len(shape) - 1
    x = g.add("convert", g.input("x", ttype, tuple(shape)), type="float32")
    powers = g.add("exp", g.add("sub", x, g.add("reduce_max", x, axis=last)))
    parts = g.add("div", powers, g.add("reduce_sum", powers, axis=last))
    sums = g.add(operator, parts, axis=last)
    before = g.add("sub", sums, parts)
    small = g.add(
        "convert", g.add("less", before, g.add("constant", value=0.5, type="float32")), type="float32"
    )
    return g.finish(g.add("mul", small, parts), g.add("reduce_sum", small, axis=last, keep=False))


def twice(shape: Sequence[Any], operator: str, ttype: str) -> Graph:
    g = GraphBuilder("chain")
    x = g.add("convert", g.input("x", ttype, tuple(shape)), type="float32")
    return g.finish(g.add("scan_max", g.add(operator, x, axis=len(shape) - 1), axis=len(shape) - 1))


def exact_of(graph: Graph, x: Any) -> list[Any]:
    found = evaluate(graph, [np.asarray(x, np.float64)])
    return list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("shape", [(3, 128), (5, 77), (2, 3, 1000), (1, 4099), (70, 5), (4, 1), (9,)])
def test_rows(shape: tuple[int, ...], operator: str, target: str) -> None:
    graph = scanned(shape, operator)
    x = (1 + 0.05 * np.random.default_rng(0).normal(size=shape)).astype(np.float32)
    found = [moves.mapping for moves in ranked(graph, machine_of(get_device(target)))]
    for mapping in {found[0], found[len(found) // 2], found[-1]}:
        (made,) = run(graph, [x], target, mapping)
        (exact,) = exact_of(graph, x)
        assert np.allclose(made, exact, rtol=2e-5, atol=0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("make", [shares, twice])
def test_what_is_computed_of_scans(make: Callable[..., Graph], target: str) -> None:
    graph = make((6, 520), "scan_sum", "float16")
    assert row_axes(graph, graph.outputs) == 1
    x = np.random.default_rng(1).normal(size=(6, 520)).astype(np.float16)
    for mapping in [moves.mapping for moves in ranked(graph, machine_of(get_device(target)))][::3]:
        for made, exact in zip(run(graph, [x], target, mapping), exact_of(graph, x), strict=True):
            assert np.allclose(made, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
def test_integers_and_numbers_that_are_none(target: str) -> None:
    """Of 64 bits exactly; NaN and infinities pass to all that follows, and to nothing before."""
    x = np.random.default_rng(0).integers(-(2**40), 2**40, (3, 300))
    for operator, exact in (("scan_sum", x.cumsum(1)), ("scan_max", np.maximum.accumulate(x, 1))):
        graph = scanned((3, 300), operator, "int64")
        for mapping in [moves.mapping for moves in ranked(graph, machine_of(get_device(target)))][::2]:
            assert np.array_equal(run(graph, [x], target, mapping)[0], exact)
    x = np.ones((4, 200), np.float32)
    x[0, 70], x[1, 130], x[2, 5], x[2, 150], x[3, :3] = np.nan, np.inf, -np.inf, np.inf, -0.0
    for operator in OPERATORS:
        graph = scanned(x.shape, operator)
        with np.errstate(invalid="ignore"):
            (exact,) = exact_of(graph, x)
        for mapping in [moves.mapping for moves in ranked(graph, machine_of(get_device(target)))]:
            (made,) = run(graph, [x], target, mapping)
            assert np.allclose(made, exact, 1e-6 if operator == "scan_logsumexp" else 0, 0, equal_nan=True)


def test_what_reads_other_columns_is_another_chain() -> None:
    """Differences of neighbours, rows of two lengths, sums that others share: a loop each."""
    for make in (
        lambda g, y: g.add("slice", y, begin=(0, 1), shape=(8, 63)),
        lambda g, y: g.add("reduce_sum", y, axis=0),
        lambda g, y: g.add("add", y, g.input("z", "float32", (3, 8, 64))),
        lambda g, y: g.add("transpose", y, permutation=(1, 0)),
    ):
        g = GraphBuilder("chain")
        y = g.add("scan_sum", g.input("x", "float32", (8, 64)), axis=1)
        graph = g.finish(make(g, y))
        assert row_axes(graph, graph.outputs) is None
        parts = partition(simplify(graph, H200), device=H200)
        assert ("scan_sum",) in [part.operators for part in parts]
    g = GraphBuilder("chain")
    graph = g.finish(g.add("scan_sum", g.input("x", "float32", (8, "n")), axis=1))
    assert row_axes(graph, graph.outputs) is None


PROGRAMS: dict[str, tuple[Callable[[torch.Tensor], Any], tuple[int, ...]]] = {
    "last axis": (lambda x: x.cumsum(-1), (3, 200)),
    "first axis": (lambda x: x.cumsum(0) * 2, (40, 6)),
    "between": (lambda x: x.float().cumprod(1), (2, 33, 5)),
    "mask": (lambda x: (x > 0).cumsum(1) * (x > 0), (4, 96)),
    "largest": (lambda x: x.cummax(1).values, (4, 96)),
    "long": (lambda x: x.float().cumsum(-1), (2, 1000)),
    "logarithms": (lambda x: x.float().logcumsumexp(-1), (3, 160)),
    "long, logarithms": (lambda x: x.logcumsumexp(-1), (1, 1024)),
    "long, odd": (lambda x: x.float().cumsum(-1), (1, 1013)),
    "long, largest": (lambda x: x.cummax(-1).values, (2, 1001)),
    "long, product": (lambda x: (1 + x.float() / 100).cumprod(-1), (1, 1024)),
    "probabilities": (lambda x: x.softmax(-1).cumsum(-1) < 0.9, (3, 160)),
}


CUT: dict[str, Callable[..., torch.Tensor]] = {
    "padded": lambda x: (torch.nn.functional.pad(x, (1, 0)) * 2).cumsum(-1) + 1,
    "turned": lambda x: (x.flip(-1) + 1).cumsum(-1),
    "joined": lambda x: torch.cat([x[:, 3:], x * 2], -1).cummax(-1).values,
    "least": lambda x: x.roll(1, -1).cummin(-1).values,
    "numbered": lambda x: x.gather(1, (x > 0).long()).cumsum(-1).exp(),
}
"""Programs that scan pieces of rows, of which one kernel is made."""


@pytest.mark.parametrize("name", CUT)
def test_what_is_scanned_may_be_cut_into_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(importer.Importer, "on_cpu", never, raising=False)
    x, found = torch.rand((3, 61), generator=torch.Generator().manual_seed(0)) - 0.25, list[Any]()

    def backend(module: Any, examples: Any) -> Any:
        found.append(simplified(import_fx(module, examples), H200))
        return module

    with torch.no_grad():
        ladder.compile(CUT[name], backend=backend)(x)
    graph = found[0].graph
    parts = partition(graph, device=H200)
    assert [part.kind for part in parts] == ["chain"]
    (made,) = run_parts(graph, parts, [x])
    torch.testing.assert_close(made, CUT[name](x.double()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch gives them, of parts where rows are long, kernel by kernel on the simulator."""
    program, shape = PROGRAMS[name]
    if name.startswith("long"):
        monkeypatch.setattr(aten_reductions, "most_scanned", lambda length, bits: 256)
        monkeypatch.setattr(aten_reductions, "PART", 256)
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(importer.Importer, "on_cpu", never, raising=False)
    torch.manual_seed(0)
    x, found = torch.randn(shape).half(), list[Any]()

    def backend(module: Any, examples: Any) -> Any:
        found.append(simplified(import_fx(module, examples), H200))
        return module

    with torch.no_grad():
        ladder.compile(program, backend=backend)(x)
        exact = program(x.double() if name != "mask" else x)
    graph = found[0].graph
    (made,) = run_parts(graph, partition(graph, device=H200), [x])
    assert made.shape == exact.shape
    assert (made - exact.double()).abs().max() <= 2e-3 * exact.double().abs().max()
