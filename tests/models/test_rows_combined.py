"""Sums, largest and least of rows by number on GPUs: in memory, in place, each time from the same start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import ladder
from ladder.frontend import importer
from ladder.frontend.torch_fx import import_fx
from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.lower.chain import emit_chain
from ladder.partition import Subgraph, partition
from ladder.partition.scatter import written
from ladder.runtime.model.library import RUNS
from ladder.runtime.model.plan import make_plan
from ladder.runtime.model.prepared import simplified
from ladder.runtime.model.sizes import CallSizes
from ladder.simulate import simulate_launch
from targets import get_device

H200 = get_device("cuda/sm_90a")
TYPES = {
    "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64,
    "int32": np.int32, "int64": np.int64,
}  # fmt: skip

FORMS = [
    ((10, 64), 0, 50, "add", {}),
    ((10,), 0, 50, "add", {"from_end": True}),
    ((3, 10), 1, 50, "add", {"along": True}),
    ((10, 6), 0, 21, "add", {"along": True}),
    ((4, 9, 3), 1, 5, "add", {}),
]
"""Shape, axis, rows, how they are combined, other attributes."""


def combined(kind: str, shape: Sequence[int], axis: int, rows: int, combine: str, given: Any) -> Graph:
    g = GraphBuilder("chain")
    read = (*shape[:axis], rows, *shape[axis + 1 :])
    base, x = g.input("base", kind, tuple(shape)), g.input("x", kind, read)
    ids = g.input("ids", "int64", read if given.get("along") else (rows,))
    return g.finish(g.add("put", base, ids, g.add("add", x, x), axis=axis, combine=combine, **given))


def launch(graph: Graph, base: Any, x: Any, ids: Any) -> tuple[Any, set[str]]:
    """Return what a kernel makes of a base, and what the simulator finds but for rows that none goes to."""
    made = base.copy()
    function = emit_chain(graph, H200, "chain")
    found = simulate_launch(function, [x, ids, made], outputs=(2,), target=H200)
    return made, {finding.kind for finding in found.findings} - {"unwritten"}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]} {form[4]}")
def test_sums(form: Any, kind: str) -> None:
    check(kind, *form)


@pytest.mark.parametrize("kind", ["float32", "int32", "int64"])
@pytest.mark.parametrize("combine", ["max", "min"])
@pytest.mark.parametrize("given", [{}, {"along": True}, {"from_end": True}], ids=str)
def test_largest_and_least(kind: str, combine: str, given: Any) -> None:
    check(kind, (10, 12), 0, 33, combine, given)


def check(kind: str, shape: Any, axis: int, rows: int, combine: str, given: Any) -> None:
    """Compare with the reference, and the reference with torch's."""
    graph, rng = combined(kind, shape, axis, rows, combine, given), np.random.default_rng(0)
    base, x = (rng.integers(-9, 9, n.tile.known_shape).astype(TYPES[kind]) for n in graph.inputs[:2])
    low = -shape[axis] if given.get("from_end") else 0
    ids = rng.integers(low, shape[axis], graph.inputs[2].tile.known_shape)
    made, found = launch(graph, base, x, ids)
    exact = np.asarray(evaluate(graph, [base.astype(np.float64), x.astype(np.float64), ids]))
    assert not found
    assert np.array_equal(made.astype(np.float64), exact)
    if kind == "int64":
        (put,) = [node for node in graph.nodes if node.operator == "put"]
        positive = ids % shape[axis] if combine != "add" else ids
        operands = map(torch.from_numpy, (base, positive, 2 * x))
        assert np.array_equal(RUNS["put"](put, CallSizes(()))(*operands).numpy(), exact)


def test_numbers_that_are_none_and_zeros_of_two_signs() -> None:
    """NaN is the largest and the least, as in torch, whatever comes after it."""
    values = np.array([[np.nan, -np.inf, -0.0, 5, -5, 1e-45]] * 2 + [[1, -1, 0.0, np.inf, -np.nan, -1e-45]])
    for combine, start in (("max", -np.inf), ("min", np.inf)):
        g = GraphBuilder("chain")
        base, x = g.input("base", "float32", (2, 6)), g.input("x", "float32", (3, 6))
        graph = g.finish(g.add("put", base, g.input("ids", "int64", (3,)), x, axis=0, combine=combine))
        for order in ([0, 1, 2], [2, 1, 0]):
            x_now = values[order].astype(np.float32)
            made, found = launch(graph, np.full((2, 6), start, np.float32), x_now, np.zeros(3, np.int64))
            assert not found
            exact = np.maximum.reduce(x_now) if combine == "max" else np.minimum.reduce(x_now)
            assert np.array_equal(made[0], exact, equal_nan=True)
            assert (made[1] == start).all()


@pytest.mark.parametrize("number", [-1, 10, 1 << 32])
def test_numbers_of_no_row_are_errors(number: int) -> None:
    graph = combined("float32", (10, 8), 0, 5, "add", {})
    ids = np.array([0, 3, number, 4, 9])
    _, found = launch(graph, np.zeros((10, 8), np.float32), np.ones((5, 8), np.float32), ids)
    assert found == {"out of bounds"}


# ---- programs ----------------------------------------------------------------------------------------------
@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(importer.Importer, "on_cpu", never, raising=False)


def planned(
    program: Callable[..., Any], *inputs: torch.Tensor
) -> tuple[Graph, list[Subgraph], dict[str, torch.Tensor]]:
    """Return a program's graph, its parts, and the arguments by name."""
    found: list[Any] = []

    def backend(module: Any, examples: Any) -> Any:
        found.extend((simplified(import_fx(module, examples), H200), examples))
        return module

    with torch.no_grad():
        ladder.compile(program, backend=backend)(*inputs)
    made, examples = found
    given = {name: examples[source.at[0]] for name, source in made.sources.items()}
    return made.graph, partition(made.graph, device=H200, side_by_side=True), given


def run(
    graph: Graph, parts: Sequence[Subgraph], inputs: Mapping[str, torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield what the parts give, chains by the simulator; what is written in place begins with its base."""
    known: dict[str, Any] = {name: x.numpy() for name, x in inputs.items()}
    for part in parts:
        if part.kind == "view":
            made: Any = evaluate(part.graph, [known[value] for value in part.inputs])
            (value,) = part.outputs
            known[value] = np.asarray(made).astype(TYPES[graph.tile(value).ttype.name])
            continue
        assert part.kind == "chain", part.reason
        bases = written(part)
        read = [np.ascontiguousarray(known[v]) for v in part.inputs if v not in bases.values()]
        results = [
            known[bases[v]] if v in bases else np.zeros(tile.known_shape or 1, TYPES[tile.ttype.name])
            for v in part.outputs
            for tile in (graph.tile(v),)
        ]
        places = tuple(range(len(read), len(read) + len(results)))
        function = emit_chain(part.graph, H200, "chain")
        found = simulate_launch(function, [*read, *results], outputs=places, target=H200)
        assert {finding.kind for finding in found.findings} <= {"unwritten"}, found.report()
        known.update(zip(part.outputs, results, strict=True))
    for value in graph.outputs:
        yield torch.from_numpy(np.asarray(known[value])).reshape(graph.tile(value).known_shape)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


PROGRAMS: dict[str, tuple[Callable[..., Any], int]] = {
    "messages": (lambda x, s, t: zeros(9, 8).index_add(0, t, x[s] * x[t]), 2),
    "scaled": (lambda x, s, t: zeros(9, 8).index_add(0, t, x[s], alpha=0.5), 2),
    "means": (
        lambda x, s, t: zeros(9, 8).scatter_add(0, t[:, None].expand(20, 8), x[s])
        / zeros(9).scatter_add(0, t, torch.ones(20)).clamp(min=1)[:, None],
        4,
    ),
    "by element": (lambda x, s, t: zeros(9, 9).scatter_add(1, s[:9, None].expand(9, 3) % 3, x[:, :3]), 3),
    "two numbers": (lambda x, s, t: zeros(9, 9, 8).index_put((s, t - 9), x[s], accumulate=True), 3),
    "softmax of neighbours": (
        lambda x, s, t: (x[s] - torch.full((9, 8), -1e30).scatter_reduce(
            0, t[:, None].expand(20, 8), x[s], "amax")[t]).exp(),
        3,
    ),
    "onto what is computed": (lambda x, s, t: (x * 2).index_add(0, t, x[s]).relu(), 3),
    "one after the other": (lambda x, s, t: zeros(9, 8).index_add(0, t, x[s]).index_add(0, s, x[t]) + 1, 4),
    "the same zeros twice": (
        lambda x, s, t: (zeros(9, 8).index_add(0, t, x[s]), zeros(9, 8).index_add(0, s, x[t])), 3,
    ),
    "the same rows twice": (
        lambda x, s, t: (
            zeros(9, 8).index_add(0, s[:9], x),
            torch.full((9, 8), -9.0).scatter_reduce(0, s[:9, None].expand(9, 8), x, "amax"),
        ), 3,
    ),
    "equal rows twice": (
        lambda x, s, t: (zeros(9, 8).index_add(0, s[:9], x * 2), zeros(20, 8).index_add(0, t[:9], x * 2)), 2,
    ),
    "without self": (
        lambda x, s, t: tuple(
            (x - 7).scatter_reduce(0, t[:, None].expand(20, 8), x[s], kind, include_self=False)
            for kind in ("amax", "amin", "sum", "mean")
        ), 8,
    ),
    "means of elements": (
        lambda x, s, t: zeros(9, 9).scatter_reduce(1, t[:9, None].expand(9, 3), x[:, :3], "mean"), 4,
    ),
    "integers without self": (
        lambda x, s, t: tuple(
            x.long().scatter_reduce(1, s[:18].view(9, 2) % 8, 3 * x.long(), kind, include_self=False)
            for kind in ("amax", "amin", "sum")
        ), 5,
    ),
    "marked": (lambda x, s, t: x.masked_fill(torch.zeros_like(x, dtype=torch.bool).scatter(
        1, s[:18].view(9, 2) % 8, True), -1e9), 4),
    "a number": (lambda x, s, t: x.scatter(0, s[:3, None].expand(3, 8), -0.5) * 2, 3),
    "of two axes": (lambda x, s, t: x.view(9, 2, 4)[:, s % 2, t % 4 - 4] + 1, 1),
    "of axes apart": (lambda x, s, t: x.view(9, 2, 4)[s[:, None], :, t % 4], 1),
    "of all axes": (lambda x, s, t: -x[torch.arange(9), t[:9] - 1].mean(), 2),
    "counts": (lambda x, s, t: torch.zeros(9, dtype=torch.int64).scatter_add(0, t, torch.ones_like(t)), 2),
}  # fmt: skip
"""Program -> most kernels."""


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    program, kernels = PROGRAMS[name]
    random = torch.Generator().manual_seed(0)
    x = torch.randint(-4, 5, (9, 8), generator=random).float()
    s, t = (torch.randint(0, 9, (20,), generator=random) for _ in range(2))
    graph, parts, given = planned(program, x, s, t)
    assert sum(part.kind == "chain" for part in parts) <= kernels
    exact = program(x, s, t)
    for made, each in zip(
        run(graph, parts, given), exact if isinstance(exact, tuple) else (exact,), strict=True
    ):
        torch.testing.assert_close(made.to(each.dtype), each)


@pytest.mark.usefixtures("on_gpu")
def test_what_is_added_to_is_made_anew_in_each_call() -> None:
    """It is no constant, and lives as long as the sums."""
    x, t = torch.ones(20, 8), torch.arange(20) % 9
    graph, parts, _ = planned(lambda x, t: zeros(9, 8).index_add(0, t, x) * 2, x, t)
    plan = make_plan(graph, parts, {}, "cuda")
    ((sums, base),) = plan.in_place.items()
    (maker,) = [step for step in plan.steps if base in step.part.outputs]
    assert not maker.constant
    assert plan.last_use[base] >= plan.last_use[sums]


@pytest.mark.usefixtures("on_gpu")
def test_what_others_read_is_not_written() -> None:
    """Arguments, and what is read again, are copied by torch."""
    x, t = torch.ones(20, 8), torch.arange(20) % 9

    def read_again(x: torch.Tensor, t: torch.Tensor) -> Any:
        base = x[:9] * 2
        return base.index_add(0, t, x) * base

    for program in (lambda x, t: x[:9].index_add(0, t, x), read_again):
        _, parts, _ = planned(program, x, t)
        assert [part.operators for part in parts if part.kind == "library"] == [("put",)]


@pytest.mark.usefixtures("on_gpu")
def test_sums_of_floats_are_torchs_where_their_order_counts() -> None:
    x, t = torch.ones(20, 8), torch.arange(20) % 9
    torch.use_deterministic_algorithms(True)
    try:
        _, parts, _ = planned(lambda x, t: zeros(9, 8).index_add(0, t, x), x, t)
        _, counts, _ = planned(lambda x, t: torch.zeros(9, dtype=torch.int64).index_add(0, t, t), x, t)
    finally:
        torch.use_deterministic_algorithms(False)
    assert any(part.kind == "library" for part in parts)
    assert all(part.kind == "chain" for part in counts)


@pytest.mark.usefixtures("on_gpu")
def test_bytes_as_numbers_are_stored_before_they_are_read() -> None:
    """A kernel that converts them, too, has them nowhere in memory."""
    places = torch.randint(0, 16, (24, 30), generator=torch.Generator().manual_seed(0)).to(torch.uint8)

    def counted(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.zeros(24, 16, dtype=torch.int32).scatter_add(1, x.long(), torch.ones_like(x).int())

    def binned(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.int64).scatter_add(0, x.flatten().long(), x.flatten().long())

    for program in (counted, binned):
        graph, parts, given = planned(program, places, torch.arange(3), torch.arange(3))
        (found,) = run(graph, parts, given)
        assert torch.equal(found.to(program(places).dtype), program(places))
