"""What kernels for GPUs read at once: of rows that no lanes hold, slices of rows, columns that many read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_gpu_partition import DEVICE, on_gpu, planned, run  # noqa: F401

from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.ir.extents import product
from ladder.lower.chain import emit_chain
from ladder.movement.mapping import Mapping
from ladder.simulate import simulate_launch

Program = Callable[[torch.Tensor], torch.Tensor]


def shares(columns: int) -> Graph:
    g = GraphBuilder("chain")
    x = g.input("x", "float32", (3, columns))
    powers = g.add("exp", g.add("sub", x, g.add("reduce_max", x, axis=1)))
    return g.finish(g.add("div", powers, g.add("reduce_sum", powers, axis=1)))


@pytest.mark.parametrize("columns", [511, 512, 515, 1029, 2048, 2052])
def test_rows_read_again_are_read_several_vectors_at_once(columns: int) -> None:
    """Also where some turns have no item for every lane: what is beyond is read by itself."""
    graph = shares(columns)
    function = emit_chain(graph, DEVICE, "chain", Mapping(64))
    text, together = str(function.script()), (8 if columns % 4 else 2) * 64
    x = np.random.default_rng(0).normal(size=(3, columns)).astype(np.float32)
    x[1, :7] = -np.inf
    x[2, 5] = np.nan
    found = np.zeros_like(x)
    result = simulate_launch(function, [x, found], target=DEVICE, outputs=(1,))
    assert not result.findings, result.report()
    np.testing.assert_allclose(found, evaluate(graph, [x]), rtol=1e-5)
    turns = columns // (1 if columns % 4 else 4) // together
    assert turns < 2 or text.count(f"range({turns})") == 3, text


def between_heads(x: torch.Tensor) -> torch.Tensor:
    p = x.softmax(-1)
    return p[:, ::2] - 0.5 * p[:, 1::2]


def gated_halves(x: torch.Tensor) -> torch.Tensor:
    y = x - x.mean(-1, keepdim=True)
    a, b = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).chunk(2, 1)
    return a * torch.sigmoid(b)


def joined_apart(x: torch.Tensor) -> torch.Tensor:
    """Slices that are joined meet nowhere: each would be a kernel of its own."""
    y = x / x.abs().amax(1, keepdim=True)
    y = y / y.sum(-1, keepdim=True)
    return torch.cat([y[:, 1:] * 2, y[:, :1]], 1)


@pytest.mark.parametrize(("program", "kernels"), [(between_heads, 1), (gated_halves, 1), (joined_apart, 3)])
def test_slices_of_rows_are_reduced_alone(program: Program, kernels: int) -> None:
    x = torch.randn(2, 4, 64, 128, generator=torch.Generator().manual_seed(0))
    parts = planned(program, x)
    assert len(parts) == kernels
    (name,) = {value for part in parts for value in part.inputs if "arg" in value}
    values = {name: x.numpy()}
    run(parts, values)
    np.testing.assert_allclose(
        values[parts[-1].outputs[0]], program(x.double()).numpy(), rtol=3e-5, atol=3e-5
    )


def overlapping(x: torch.Tensor) -> torch.Tensor:
    p = x.softmax(-1)
    return p[:, :3] - p[:, 1:]


def test_slices_that_share_rows_read_what_is_stored() -> None:
    x = torch.randn(2, 4, 64, 128)
    assert sum(node.operator == "exp" for part in planned(overlapping, x) for node in part.graph.nodes) == 1


def collided(f: torch.Tensor) -> torch.Tensor:
    """Relax what nine directions carry towards what their moments say: much work for each column."""
    e = torch.tensor([0, 1, 0, -1, 0, 1, -1, -1, 1.0])[:, None, None]
    r = f.sum(0) + 20
    u = (f * e).sum(0) / r
    c = 3 * e * u
    return f - 0.6 * (f - r * (1 + c + 0.5 * c * c - 1.5 * (u * u + u.abs().sqrt() / r)))


def test_what_columns_are_computed_of_reductions_is_not_stored() -> None:
    parts = planned(collided, torch.randn(9, 512, 513))
    assert [part.graph.tile(part.outputs[0]).shape for part in parts] == [(9, 512, 513)]


def peaks(x: torch.Tensor) -> torch.Tensor:
    """Divide joined rows by their peaks: a block would take each of 16 rows twice."""
    y = torch.cat([x[:, :1], x[:, 1:] - 0.97 * x[:, :-1]], -1)
    return y / y.abs().amax(-1, keepdim=True)


def test_rows_that_no_block_holds_are_reduced_in_parts() -> None:
    parts = planned(peaks, torch.randn(16, 64000))
    reduced = [part for part in parts if any(node.operator == "reduce_max" for node in part.graph.nodes)]
    assert max(len(part.graph.tile(part.outputs[0]).shape) for part in reduced) == 2
    assert all(part.graph.tile(part.outputs[0]).shape != (16, 64000) for part in reduced)


@pytest.mark.parametrize("columns", [513, 514, 1027])
def test_vectors_of_one_row_read_its_numbers_once(columns: int) -> None:
    g = GraphBuilder("chain")
    x, low, most = (
        g.input("x", "float32", (2, 4, columns)),
        g.input("low", "float32", (4, 1)),
        g.input("most", "float32", (2, 1, 1)),
    )
    graph = g.finish(g.add("div", g.add("sub", x, low), most))
    rng = np.random.default_rng(0)
    inputs = [rng.uniform(1, 2, node.tile.known_shape).astype(np.float32) for node in graph.inputs]
    for mapping in (Mapping(), Mapping(num=4, threads=128)):
        function = emit_chain(graph, DEVICE, "chain", mapping)
        found = np.zeros((2, 4, columns), np.float32)
        result = simulate_launch(function, [*inputs, found], target=DEVICE, outputs=(3,))
        assert not result.findings, result.report()
        np.testing.assert_allclose(found, evaluate(graph, inputs), rtol=1e-6)
        assert "v4" in str(function.script())


def test_borders_are_left_to_the_blocks_that_have_some() -> None:
    """Of threads that take several elements, those beyond a border's end do not compute it."""
    g = GraphBuilder("chain")
    x = g.input("x", "float32", (32, 1025))
    ends = (
        g.add("slice", x, begin=(0, 1024), shape=(32, 1)),
        g.add("slice", x, begin=(0, 0), shape=(32, 1024)),
    )
    graph = g.finish(g.add("sub", x, g.add("concat", *ends, axis=1)))
    function = emit_chain(graph, DEVICE, "chain", Mapping(num=2))
    rows, found = (
        np.random.default_rng(0).normal(size=(32, 1025)).astype(np.float32),
        np.zeros((32, 1025), np.float32),
    )
    result = simulate_launch(function, [rows, found], target=DEVICE, outputs=(1,))
    assert not result.findings, result.report()
    np.testing.assert_array_equal(found, rows - np.roll(rows, 1, 1))
    assert "if v * 512 < 32:" in str(function.script())  # only blocks with elements of the border


@pytest.mark.parametrize(("rows", "columns"), [(3, 70001), (1, 131072)])
def test_places_of_maxima_are_found_with_them(rows: int, columns: int) -> None:
    """Once for each part: ties, and where all is NaN or infinite, included."""

    def best(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 0.5
        return y.argmax(-1), y.amax(-1)

    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    parts = planned(best, x)
    assert [part.kind for part in parts] == ["chain"] * 2
    x[0, [5, 40000, columns - 1]] = 7.0
    others = x.clone()
    others[0] = -torch.inf
    if rows > 1:
        x[1, 60000:] = torch.nan
        x[2] = torch.inf
        others[1, -1] = torch.nan
    for given in (x, others):
        (name,) = {value for part in parts for value in part.inputs if "arg" in value}
        values = {name: given.numpy()}
        run(parts, values)
        found = {values[value].dtype.kind: values[value].reshape(rows) for value in parts[-1].outputs}
        place, most = found["i"], found["f"]
        np.testing.assert_array_equal(place, best(given)[0].numpy())
        np.testing.assert_array_equal(most, best(given)[1].numpy())


def ring(x: torch.Tensor) -> torch.Tensor:
    return x + 0.1 * (x.roll(1, 1) + x.roll(-1, 1) + x.roll(1, 2) + x.roll(-1, 2) - 4 * x)


def edges(x: torch.Tensor) -> torch.Tensor:
    p = F.pad(x, (1, 1, 1, 1), mode="replicate")
    q = F.pad(x, (1, 2))
    return (
        (p[..., 1:-1, 2:] - p[..., 1:-1, :-2]).abs()
        + (p[..., 2:, 1:-1] - p[..., :-2, 1:-1]).abs()
        + q[..., 3:]
    )


def shifted(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:1].roll(1, 1), x[1:2].roll(-1, 2), x[2:].roll(2, 2)])


@pytest.mark.parametrize("program", [ring, edges, shifted])
@pytest.mark.parametrize(("columns", "kind"), [(64, torch.float32), (56, torch.float16)])
def test_vectors_take_thin_borders_along(program: Program, columns: int, kind: torch.dtype) -> None:
    x = torch.randn(3, 6, columns, generator=torch.Generator().manual_seed(0)).to(kind)
    (part,) = planned(program, x)
    text = str(emit_chain(part.graph, DEVICE, "chain", Mapping(threads=64)).script())
    assert text.count("T.ptx.st(") == 1  # and none of pieces
    assert '"v4"' in text
    values = {next(iter(part.inputs)): x.numpy()}
    run([part], values)
    (found,) = (values[value] for value in part.outputs)
    np.testing.assert_allclose(
        found, program(x).numpy(), rtol=1e-3, atol=1e-2 if kind == torch.float16 else 1e-6
    )


def factored(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both means read squares, which nothing stores."""
    squares = g * g + 1e-30
    return squares.mean(-1), squares.mean(0)


def spread_shares(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over rows of what each row has been divided into read the rows again, and two numbers of each."""
    p = x.float().softmax(-1)
    return p.sum(0), (p * p).sum(-1)


@pytest.mark.parametrize("program", [factored, spread_shares])
def test_what_is_computed_of_what_is_read_is_not_stored(program: Program) -> None:
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0)).half()
    parts = planned(program, x if program is spread_shares else x.float())
    assert all(
        product(tile.shape) < x.numel() for part in parts for tile in map(part.graph.tile, part.outputs)
    )
    values = {"arg0_1": (x if program is spread_shares else x.float()).numpy()}
    run(parts, values)
    ends = {tuple(values[value].shape): values[value] for part in parts for value in part.outputs}
    for wanted in program(x.double() if program is factored else x):
        np.testing.assert_allclose(ends[tuple(wanted.shape)], wanted.numpy(), rtol=1e-5)


def test_positions_of_64_bits_are_worked_out_in_32() -> None:
    """Remainders of 64 bits, of which each takes dozens of instructions, are of no position."""
    (part,) = planned(lambda x: x + torch.eye(37), torch.randn(37, 37))
    text = str(emit_chain(part.graph, DEVICE, "chain", Mapping()).script())
    assert "int64" not in text
    values = {next(iter(part.inputs)): np.ones((37, 37), np.float32)}
    run([part], values)
    np.testing.assert_array_equal(values[part.outputs[0]], 1 + np.eye(37))


def ranked_labels(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    t = x.gather(1, y[:, None])
    return (x > t).sum(-1), t[:, 0] * 2


def test_what_is_filled_up_to_be_summed_in_parts_is_not_stored() -> None:
    parts = planned(ranked_labels, torch.randn(16, 50257), torch.zeros(16, dtype=torch.int64))
    assert max(product(part.graph.tile(value).shape) for part in parts for value in part.outputs) < 16 * 100


def turned(a: torch.Tensor) -> torch.Tensor:
    """A curl: each part of the join has functions of its own, and rows and vectors at borders."""

    def along(x: torch.Tensor, axis: int) -> torch.Tensor:
        return (x.roll(-1, axis) - x.roll(1, axis)) * 0.5

    x, y, z = a
    parts = along(z, 1) - along(y, 2), along(x, 2) - along(z, 0), along(y, 0) - along(x, 1)
    return torch.stack([parts[0].exp() * x, parts[1].sin() + parts[1] * y, parts[2] * parts[2] * z])


def test_borders_of_vectors_within_parts_of_joins() -> None:
    x = torch.randn(3, 4, 5, 40, generator=torch.Generator().manual_seed(0))
    (part,) = planned(turned, x)
    values = {next(iter(part.inputs)): x.numpy()}
    run([part], values)
    found = values[part.outputs[0]].reshape(x.shape)
    np.testing.assert_allclose(found, turned(x.double()).numpy(), rtol=1e-5, atol=1e-6)
