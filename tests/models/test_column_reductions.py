"""Reductions along axes before the last, and of few results in two steps: right, in bounds, NaN too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from test_gpu_chains import simulated

from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.lower.chain import emit_chain
from ladder.movement import split
from ladder.movement.choose import machine_of, ranked
from ladder.movement.mapping import Mapping
from ladder.movement.model import predicted
from ladder.movement.split import split_reductions
from ladder.partition import chains, partition
from ladder.partition.subgraphs import Subgraph
from ladder.rewrite import simplify
from targets import get_device, host_cpu
from tile_types.errors import ScheduleError

H200 = get_device("cuda/sm_90a")
TARGETS = ("cuda/sm_90a", "rocm/gfx942", "rocm/gfx1100")
TYPES: dict[str, Any] = {"float16": np.float16, "float32": np.float32, "int32": np.int32}
TYPES |= {"int64": np.int64, "float64": np.float64, "bool": np.bool_}


def wide(g: GraphBuilder, shape: Sequence[Any], ttype: str, name: str = "x") -> str:
    """Add an input, and its elements as they are computed with."""
    x = g.input(name, ttype, tuple(shape))
    return g.add("convert", x, type="float32") if ttype == "float16" else x


def summed(shape: Sequence[Any], axis: int, ttype: str, operator: str = "reduce_sum") -> Graph:
    g = GraphBuilder("chain")
    return g.finish(g.add(operator, wide(g, shape, ttype), axis=axis, keep=False))


def largest(shape: Sequence[Any], axis: int, ttype: str) -> Graph:
    return summed(shape, axis, ttype, "reduce_max")


def spread(shape: Sequence[Any], axis: int, ttype: str) -> Graph:
    """Return a deviation and the largest distance from the mean: both are made of a mean."""
    g = GraphBuilder("chain")
    x = wide(g, shape, ttype)
    count = g.add("constant", value=float(shape[axis]), type="float32")
    apart = g.add("sub", x, g.add("div", g.add("reduce_sum", x, axis=axis, keep=True), count))
    squares = g.add("reduce_sum", g.add("square", apart), axis=axis, keep=False)
    deviation = g.add("sqrt", g.add("div", squares, count))
    return g.finish(deviation, g.add("reduce_max", g.add("abs", apart), axis=axis, keep=False))


def ends(shape: Sequence[Any], axis: int, ttype: str) -> Graph:
    """Return what is computed of two reductions of other positions, in one result."""
    g = GraphBuilder("chain")
    x = wide(g, shape, ttype)
    low = tuple(1 if at == axis else 0 for at in range(len(shape)))
    cut = tuple(extent - 1 if at == axis else extent for at, extent in enumerate(shape))
    rest = g.add("slice", x, begin=low, shape=cut)
    total = g.add("reduce_sum", x, axis=axis, keep=False)
    return g.finish(g.add("sub", total, g.add("reduce_max", rest, axis=axis, keep=False)))


def twice(shape: Sequence[Any], axis: int, ttype: str) -> Graph:
    """Return sums along two neighbouring axes."""
    g = GraphBuilder("chain")
    inner = g.add("reduce_sum", wide(g, shape, ttype), axis=axis, keep=False)
    return g.finish(g.add("reduce_sum", inner, axis=axis - 1, keep=False))


def softmax(shape: Sequence[Any], axis: int, ttype: str) -> Graph:
    """Return shares, which lie where their operands do, and the logarithm of their sum."""
    g = GraphBuilder("chain")
    x = wide(g, shape, ttype)
    largest = g.add("reduce_max", x, axis=axis, keep=True)
    powers = g.add("exp", g.add("sub", x, largest))
    total = g.add("reduce_sum", powers, axis=axis, keep=True)
    shares = g.add("convert", g.add("div", powers, total), type=ttype, exact=False)
    return g.finish(shares, g.add("add", largest, g.add("log", total)))


def normal(shape: Sequence[Any], axis: int, ttype: str) -> Graph:
    """Return what has mean 0 over two axes, and deviation 1, scaled by vectors of the columns."""
    g = GraphBuilder("chain")
    x, w = wide(g, shape, ttype), g.input("w", "float32", tuple(shape[-1:]))
    count = g.add("constant", value=float(shape[axis] * shape[axis - 1]), type="float32")

    def mean(value: str) -> str:
        inner = g.add("reduce_sum", value, axis=axis, keep=True)
        return g.add("div", g.add("reduce_sum", inner, axis=axis - 1, keep=True), count)

    apart = g.add("sub", x, mean(x))
    scale = g.add("rsqrt", g.add("add", mean(g.add("square", apart)), count))
    return g.finish(g.add("mul", g.add("mul", apart, scale), w))


CASES: dict[str, tuple[Callable[..., Graph], tuple[int, ...], int]] = {
    "rows": (summed, (301, 40), 0),
    "odd columns": (summed, (77, 33), 0),
    "one column more than a block": (largest, (65, 129), 0),
    "images": (largest, (2, 3, 65, 64), 2),
    "between": (spread, (3, 77, 130), 1),
    "odd, in two phases": (spread, (130, 7), 0),
    "other positions": (ends, (50, 24), 0),
    "two axes": (twice, (2, 9, 15, 20), 2),
    "one row": (summed, (1, 70), 0),
    "one column": (spread, (200, 2), 0),
    "softmax": (softmax, (3, 77, 40), 1),
    "softmax of a matrix": (softmax, (130, 33), 0),
    "softmax of few": (softmax, (2, 3, 5, 136), 2),
    "softmax of one": (softmax, (2, 1, 9), 1),
    "softmax of channels": (softmax, (2, 21, 3, 10), 1),
    "softmax of channels, odd": (softmax, (2, 5, 7, 9), 1),
    "largest of channels": (largest, (2, 70, 3, 10), 1),
    "norm of two axes": (normal, (2, 9, 15, 20), 2),
    "norm of all but columns": (normal, (31, 7, 130), 1),
}


def run(graph: Graph, arrays: Sequence[Any], target: str, mapping: Mapping | None) -> list[Any]:
    """Return what a kernel stores, on the simulator."""
    tiles = [graph.tile(value) for value in graph.outputs]
    made = [np.full(tile.known_shape, 77).astype(TYPES[tile.ttype.name]) for tile in tiles]
    function = emit_chain(graph, get_device(target), "chain", mapping)
    places = tuple(range(len(arrays), len(arrays) + len(made)))
    result = simulated(function, target, [*arrays, *made], places)
    assert not result.findings, result.report()
    return made


def run_parts(graph: Graph, parts: Sequence[Subgraph], inputs: Sequence[torch.Tensor]) -> list[Any]:
    """Return what the parts give, kernel by kernel on the simulator."""
    known: dict[str, Any] = {node.name: x.numpy() for node, x in zip(graph.inputs, inputs, strict=True)}
    for part in parts:
        assert part.kind in ("chain", "view"), part.reason
        arrays = [np.ascontiguousarray(known[value]) for value in part.inputs]
        if part.kind == "view":
            made = evaluate(part.graph, arrays)
            made = list(made) if isinstance(made, tuple) else [made]
        else:
            made = run(part.graph, arrays, "cuda/sm_90a", None)
        known.update(zip(part.outputs, made, strict=True))
    return [torch.from_numpy(np.asarray(known[value], np.float64)) for value in graph.outputs]


def of_columns(graph: Graph, target: str) -> list[Mapping]:
    found = [moves.mapping for moves in ranked(graph, machine_of(get_device(target)))]
    return [mapping for mapping in found if mapping.across]


def exact_of(graph: Graph, arrays: Sequence[Any]) -> list[Any]:
    found = evaluate(graph, [np.asarray(each, np.float64) for each in arrays])
    return list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("ttype", ["float16", "float32"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_columns_of_blocks(case: str, target: str, ttype: str) -> None:
    make, shape, axis = CASES[case]
    graph = make(shape, axis, ttype)
    rng = np.random.default_rng(0)
    tiles = [node.tile for node in graph.inputs]
    given = [rng.normal(1.0, 1.0, tile.known_shape).astype(TYPES[tile.ttype.name]) for tile in tiles]
    candidates = of_columns(graph, target)
    assert candidates
    for mapping in (candidates[0], candidates[len(candidates) // 2], candidates[-1]):
        for found, exact in zip(run(graph, given, target, mapping), exact_of(graph, given), strict=True):
            bound = 1e-5 if found.dtype == np.float32 else 5e-4
            assert np.linalg.norm(found - exact) <= bound * np.linalg.norm(exact) + 1e-12


@pytest.mark.parametrize("columns", [64, 37])
def test_what_is_read_of_few_positions_stays_in_registers(columns: int) -> None:
    """Vectors of columns, and single elements where rows do not begin with one: each is loaded once."""
    graph = softmax((3, 96, columns), 1, "float16")
    mapping = Mapping(256, 4 if columns == 64 else 1, across=8)
    text = emit_chain(graph, H200, "chain", mapping).script()
    assert text.count("T.ptx.ld(") == 3  # 96 positions by 32 lanes


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_no_number_stays_in_its_column(target: str) -> None:
    for make, special in ((summed, np.nan), (largest, np.nan), (largest, np.inf), (spread, np.inf)):
        graph = make((67, 20), 0, "float32")
        x = np.random.default_rng(1).normal(size=(67, 20)).astype(np.float32)
        x[66, 3] = special
        plain = x.copy()
        plain[66, 3] = 1.0
        for mapping in (None, *of_columns(graph, target)[:1]):
            for found, usual in zip(
                run(graph, [x], target, mapping), run(graph, [plain], target, mapping), strict=True
            ):
                assert np.array_equal(np.delete(found, 3), np.delete(usual, 3))
                assert (found[3] == np.inf) if make is largest and special == np.inf else np.isnan(found[3])


def counted(shape: Sequence[int]) -> Graph:
    """Return how many elements of a column are above zero, their sum, and the largest: 64 bits beside 32."""
    g = GraphBuilder("chain")
    x = g.input("x", "float32", tuple(shape))
    above = g.add("less", g.add("constant", value=0.0, type="float32"), x)
    count = g.add("reduce_sum", g.add("convert", above, type="int64"), axis=0, keep=False)
    return g.finish(
        count,
        g.add("reduce_sum", x, axis=0, keep=False),
        g.add("reduce_max", g.add("convert", x, type="float64"), axis=0, keep=False),
    )


@pytest.mark.parametrize("target", TARGETS)
def test_columns_are_reduced_in_64_bits(target: str) -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(130, 24)).astype(np.float32)
    large = rng.integers(-(2**45), 2**45, (77, 12))  # whose sums float64 holds
    graphs = [(counted(x.shape), x)]
    graphs += [(make(large.shape, 0, "int64"), large) for make in (summed, largest)]
    graphs += [(make(x.shape, 0, "float64"), x.astype(np.float64)) for make in (summed, largest)]
    for graph, given in graphs:
        candidates = of_columns(graph, target)
        for mapping in (candidates[0], candidates[-1]):
            made = run(graph, [given], target, mapping)
            for found, exact in zip(made, exact_of(graph, [given]), strict=True):
                bound = 1e-6 if found.dtype == np.float32 else 1e-15 if found.dtype == np.float64 else 0
                np.testing.assert_allclose(found, exact, rtol=0, atol=bound * np.abs(given).sum())


def test_the_largest_of_nothing_but_infinities() -> None:
    graph = largest((70, 24), 0, "float16")
    x = np.full((70, 24), -np.inf, np.float16)
    (found,) = run(graph, [x], "cuda/sm_90a", of_columns(graph, "cuda/sm_90a")[0])
    assert (found == -np.inf).all()


@pytest.mark.parametrize("target", TARGETS)
def test_integers(target: str) -> None:
    x = np.random.default_rng(0).integers(-(2**20), 2**20, (300, 44)).astype(np.int32)
    for make, exact in ((summed, x.sum(0)), (largest, x.max(0))):
        graph = make((300, 44), 0, "int32")
        (found,) = run(graph, [x], target, of_columns(graph, target)[0])
        assert np.array_equal(found, exact)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("make", [summed, spread])
def test_open_rows(target: str, make: Callable[..., Graph]) -> None:
    """A kernel for any number of images, and of what is reduced."""
    for shape, axis in ((("n", 45, 24), 1), (("n", 24), 0)):
        if make is spread and axis == 0:
            continue  # its graph names the number
        graph = make(shape, axis, "float16")
        mapping = of_columns(graph, target)[0]
        function = emit_chain(graph, get_device(target), "chain", mapping)
        for n in (1, 3, 70):
            x = np.random.default_rng(n).normal(size=[n, *shape[1:]]).astype(np.float16)
            exact = exact_of(graph, [x])
            made = [np.full(each.shape, np.nan, np.float32) for each in exact]
            places = tuple(range(2, 2 + len(made)))
            result = simulated(function, target, [n, x, *made], places)
            assert not result.findings, result.report()
            for found, wanted in zip(made, exact, strict=True):
                assert np.allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())


def test_other_forms_are_refused() -> None:
    """Reductions of other columns than the result's; what is reduced twice with a function between."""
    for of_all in (True, False):
        g = GraphBuilder("chain")
        x = g.input("x", "float32", (40, 8, 8))
        inner = g.add("reduce_sum", x, axis=2 if of_all else 1, keep=False)
        inner = inner if of_all else g.add("square", inner)
        graph = g.finish(g.add("reduce_sum", inner, axis=0, keep=False))
        with pytest.raises(ScheduleError):
            run(graph, [np.ones((40, 8, 8), np.float32)], "cuda/sm_90a", Mapping(128, 1, across=2))


# ---- which mapping, and how many parts ---------------------------------------------------------------
def test_blocks_take_columns_where_neighbours_are_columns() -> None:
    for shape, axis in (((50, 400, 513), 1), ((64, 300, 130), 1), ((384, 3000), 0)):
        best = ranked(summed(shape, axis, "float16"), machine_of(H200))[0].mapping
        assert best.across * best.num * 2 >= 32  # bytes


def test_numbers_of_rows_cost_what_their_rows_do() -> None:
    """Whether a result keeps an axis of one element changes no kernel, and so no prediction."""
    g = GraphBuilder("chain")
    x = g.add("convert", g.input("x", "float16", (2048, 3136)), type="float32")
    kept = g.finish(g.add("reduce_sum", x, axis=1, keep=True))
    gone = summed((2048, 3136), 1, "float16")
    machine = machine_of(H200)
    first, second = ranked(kept, machine)[0], ranked(gone, machine)[0]
    assert first.mapping == second.mapping
    assert predicted(first, machine) == pytest.approx(predicted(second, machine), rel=1e-3)
    assert predicted(first, machine) < 10e-6  # 12.8 MB


def parts_of(graph: Graph) -> list[Any]:
    graph = split_reductions(simplify(graph, H200), H200)
    return [part for part in partition(graph, device=H200) if part.kind != "view"]


@pytest.mark.parametrize(
    ("shape", "axis", "kernels"),
    [
        ((20000, 513), 0, 2),
        ((9973, 768), 0, 2),
        ((5, 2000003), 1, 2),
        ((1 << 22,), 0, 2),
        ((7919, 130), 0, 2),
        ((634578,), 0, 2),
        ((99999,), 0, 2),
        ((60000,), 0, 1),
        ((4096, 4096), 1, 1),
    ],
)
def test_reductions_of_few_results_take_two_steps(shape: tuple[int, ...], axis: int, kernels: int) -> None:
    found = parts_of(summed(shape, axis, "float16"))
    assert [part.kind for part in found] == ["chain"] * kernels


def test_what_is_read_again_stays_in_one_kernel() -> None:
    g = GraphBuilder("chain")
    x = g.add("convert", g.input("x", "float16", (64, 50257)), type="float32")
    powers = g.add("exp", g.add("sub", x, g.add("reduce_max", x, axis=1)))
    graph = g.finish(g.add("div", powers, g.add("reduce_sum", powers, axis=1)))
    assert len(parts_of(graph)) == 1


@pytest.mark.parametrize("operator", ["reduce_sum", "reduce_max"])
@pytest.mark.parametrize(("shape", "axis"), [((301, 24), 0), ((3, 1000), 1), ((2, 700, 5), 1)])
def test_two_steps_give_the_same(
    shape: tuple[int, ...], axis: int, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the last part is shorter too; NaN and infinities pass both steps, what fills it counts not."""
    monkeypatch.setattr(split, "LONG_BLOCK", 1)
    monkeypatch.setattr(chains, "LONG_BLOCK", 1)
    monkeypatch.setattr(split, "LEAST_PART", 2)
    monkeypatch.setattr(chains, "LARGE_WORK", 1)
    monkeypatch.setattr(split, "_seconds", lambda graph, machine: -float(len(str(graph))))
    whole = summed(shape, axis, "float16", operator)
    graph = split_reductions(whole, H200)
    assert [node.operator for node in graph.nodes].count(operator) == 2
    rng = np.random.default_rng(2)
    x = (rng.normal(size=shape) - 5).astype(np.float16)
    for special in (None, np.nan, np.inf, -np.inf):
        if special is not None:
            x[(-1,) * len(shape)] = special
        known = {"x": x}
        for part in partition(graph, device=H200):
            given = [np.ascontiguousarray(known[value]) for value in part.inputs]
            known.update(zip(part.outputs, run(part.graph, given, "cuda/sm_90a", None), strict=True))
        exact = x.astype(np.float64).sum(axis) if operator == "reduce_sum" else x.max(axis)
        assert np.allclose(known[graph.outputs[0]], exact, rtol=1e-5, equal_nan=True)


def test_what_has_no_elements_is_left() -> None:
    for shape in ((0, 513), ("n", 513), (20000, 0)):
        graph = summed(shape, 0, "float16")
        assert split_reductions(graph, H200) == graph
    integers = split_reductions(summed((20000, 513), 0, "int32"), H200)
    assert [node.operator for node in integers.nodes].count("reduce_sum") == 2  # these are divided too
    assert split_reductions(summed((20000, 513), 0, "float16"), host_cpu()) == summed(
        (20000, 513), 0, "float16"
    )


# ---- tiles ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ttype", ["float16", "float32"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "shape", [(77, 136), (136, 77), (77, 133), (3, 45, 67), (2, 35, 64), (1, 65), (130, 66)]
)
def test_tiles_of_odd_rows_and_columns(shape: tuple[int, ...], target: str, ttype: str) -> None:
    """What is added to a transposed matrix; edges of tiles, single elements where nothing is aligned."""
    order = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    g = GraphBuilder("chain")
    x, y = g.input("x", ttype, tuple(shape[at] for at in order)), g.input("y", ttype, shape)
    graph = g.finish(g.add("relu", g.add("add", x, g.add("transpose", y, permutation=order))))
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=[shape[at] for at in order]), rng.normal(size=shape)]
    arrays = [each.astype(TYPES[ttype]) for each in arrays]
    exact = np.maximum(arrays[0] + arrays[1].transpose(order), 0)
    for mapping in (Mapping(tile=(64, 64)), Mapping(tile=(32, 64)), Mapping(tile=(64, 40), threads=160)):
        if mapping.threads % get_device(target).warp == 0:
            (found,) = run(graph, arrays, target, mapping)
            assert np.array_equal(found, exact)


# ---- chains of several reductions ----------------------------------------------------------------------
def test_an_inner_softmax_is_one_kernel_where_blocks_are_enough() -> None:
    """Over a middle axis; over channels, where columns have two axes; not of few columns."""
    for shape, axis, kernels in (((21, 105, 300), 1, 1), ((8, 19, 64, 64), 1, 1), ((40000, 24), 0, 3)):
        g = GraphBuilder("chain")
        x = wide(g, shape, "float16")
        powers = g.add("exp", g.add("sub", x, g.add("reduce_max", x, axis=axis)))
        graph = g.finish(g.add("div", powers, g.add("reduce_sum", powers, axis=axis)))
        assert (len(parts_of(graph)) == 1) == (kernels == 1)
    assert (
        ranked(parts_of(softmax((8, 19, 64, 64), 1, "float16"))[0].graph, machine_of(H200))[0].mapping.axes
        == 2
    )


def test_reductions_of_one_value_are_one_kernel() -> None:
    """Of an input, and of what one chain computes: each alone would read it, or it would be stored."""
    for computed in (False, True):
        g = GraphBuilder("chain")
        x, y = wide(g, (512, 4096), "float16"), wide(g, (512, 4096), "float16", "y") if computed else ""
        values = [g.add("mul", x, y), x, g.add("square", y)] if computed else [x, x]
        operators = ["reduce_sum", "reduce_max", "reduce_sum"]
        sums = [g.add(o, v, axis=1, keep=False) for o, v in zip(operators, values, strict=False)]
        assert len(parts_of(g.finish(*sums))) == 1


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(37, 16), (131, 8), (70, 2), (200, 4), (65, 3)])
def test_narrow_rows_have_few_lanes(shape: tuple[int, ...], target: str) -> None:
    """However many rows there are: the last block has fewer than the others."""

    def shares(rows: int) -> Graph:
        g = GraphBuilder("chain")
        x = wide(g, (rows, shape[1]), "float16")
        powers = g.add("exp", g.add("sub", x, g.add("reduce_max", x, axis=1)))
        return g.finish(
            g.add("convert", g.add("div", powers, g.add("reduce_sum", powers, axis=1)), type="float16")
        )

    graph, machine = shares(shape[0]), machine_of(get_device(target))
    mapping = ranked(shares(200001), machine)[0].mapping
    assert mapping.lanes <= 4
    given = np.random.default_rng(0).normal(size=shape).astype(np.float16)
    (found,) = run(graph, [given], target, mapping)
    assert np.allclose(found, exact_of(graph, [given])[0], atol=1e-3)
