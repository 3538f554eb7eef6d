"""How programs become kernels for a GPU, planned without one: none has few blocks, or is left to torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ladder
from ladder.frontend import importer
from ladder.frontend.torch_fx import import_fx
from ladder.ir import GraphBuilder
from ladder.lower.chain import emit_chain
from ladder.movement.choose import machine_of, ranked
from ladder.movement.decompose import decompose
from ladder.movement.instantiate import instantiate
from ladder.movement.mapping import Mapping
from ladder.movement.rewrite import MOST_STEPS, rewrite
from ladder.partition import partition
from ladder.partition.chains import blocks_of
from ladder.partition.subgraphs import Subgraph
from ladder.runtime.model.prepared import simplified
from ladder.simulate import simulate_launch
from targets import get_device

DEVICE = get_device("cuda/sm_90a")


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the frontend see a GPU, though inputs are on the CPU."""
    monkeypatch.setattr(
        importer.Importer, "on_cpu", property(lambda self: False, lambda self, value: None), False
    )


def planned(program: Callable[..., Any], *inputs: torch.Tensor) -> list[Subgraph]:
    """Return the parts of a program for the device; views have no kernel."""
    found: list[Any] = []

    def backend(module: torch.fx.GraphModule, examples: Sequence[Any]) -> torch.fx.GraphModule:
        found.append(import_fx(module, examples))
        return module

    with torch.no_grad():
        ladder.compile(program, backend=backend)(*inputs)
    parts = [
        p
        for each in found
        for p in partition(simplified(each, DEVICE).graph, device=DEVICE, side_by_side=True)
    ]
    return [part for part in parts if part.kind != "view"]


def run(parts: Sequence[Subgraph], values: dict[str, Any]) -> None:
    """Run chains on the simulator, each in its first mapping; `values` takes their results."""
    for part in parts:
        graph = part.graph
        tiles = [graph.tile(value) for value in graph.outputs]
        results = [np.zeros(tile.known_shape or 1, tile.ttype.name) for tile in tiles]
        inputs = [np.ascontiguousarray(values[part.outside[node.name]]) for node in graph.inputs]
        function = emit_chain(graph, DEVICE, "chain")
        places = tuple(range(len(inputs), len(inputs) + len(results)))
        found = simulate_launch(function, [*inputs, *results], target=DEVICE, outputs=places)
        assert not found.findings, found.report()
        values.update(zip(part.outputs, results, strict=True))


def decays(g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sums along an axis that others follow; the last one of each part is read by all."""
    g = g.view(2, 4, 8, 3, 16).cumsum(2)
    return g.exp().view(2, 32, 3, 16), (g[:, :, -1:] - g).exp()


def rolled_window(state: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    state = torch.cat([state[..., 1:], x[..., None]], -1)
    return (state * weight).sum(-1), state


def pairs(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    distances = ((x[:, :, None] - y[:, None]) ** 2).sum(-1)
    return distances.amin(2), distances.amin(1)


def both_ways(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.relu(), x.relu().t().contiguous()


def spread(x: torch.Tensor) -> torch.Tensor:
    """A deviation over all axes but the first, which are one."""
    return x * x.std((1, 2, 3), keepdim=True)


def encoded(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([f(x * 2.0**k) for k in range(4) for f in (torch.sin, torch.cos)], -1)


def extremes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.masked_fill(x > 1.5, float("nan")).round()
    largest, at = x.max(-1)
    return at.float(), x.argmin(0).float(), x[1].argmax().float(), largest.nan_to_num()


def spaced(x: torch.Tensor) -> torch.Tensor:
    return x * torch.linspace(-1, 1, 40) + torch.arange(4, 0, -0.1, dtype=torch.float32)


def complete_iou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What boxes have in common, less how far apart and how alike they are: more than a hundred operators."""
    (ax, ay, aw, ah), (bx, by, bw, bh) = a.abs().unbind(-1), b.abs().unbind(-1)
    edges = ((ax, aw, bx, bw), (ay, ah, by, bh))
    inner = [torch.min(x + w / 2, u + v / 2) - torch.max(x - w / 2, u - v / 2) for x, w, u, v in edges]
    outer = [torch.max(x + w / 2, u + v / 2) - torch.min(x - w / 2, u - v / 2) for x, w, u, v in edges]
    common = inner[0].clamp(0) * inner[1].clamp(0)
    iou = common / (aw * ah + bw * bh - common + 1e-7)
    apart = ((bx - ax) ** 2 + (by - ay) ** 2) / (outer[0] ** 2 + outer[1] ** 2 + 1e-7)
    alike = 4 / torch.pi**2 * (torch.atan(bw / bh) - torch.atan(aw / ah)) ** 2
    return iou - (apart + alike * alike / (alike - iou + 1 + 1e-7))


def thinned(x: torch.Tensor, bias: torch.Tensor, column: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of what is computed, a part is read, also where operands are broadcast."""
    blurred = (x[:, 1:] + x[:, :-1]) * 0.5
    return (x * bias + column)[1:, ::3, 5:13], blurred[:, ::2], x.exp()[..., :20] + bias[:20]


def diffused(u: torch.Tensor) -> torch.Tensor:
    """Rows of 40 whose neighbours come from the other end."""
    around = sum(torch.roll(u, step, axis) for axis in (-1, -2) for step in (-1, 1))
    return u + 0.1 * (around - 4 * u)


def turned(x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Normalized heads, each with its halves turned against each other."""
    x = F.rms_norm(x, (32,), weight, 1e-6)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def symmetrized(x: torch.Tensor) -> torch.Tensor:
    return (x + x.T) * (1 - torch.eye(x.shape[0]))


def rotations(q: torch.Tensor) -> torch.Tensor:
    r, x, y, z = torch.nn.functional.normalize(q, dim=-1).unbind(-1)
    found = [1 - 2 * (y * y + z * z), x * y - r * z, x * z + r * y, x * y + r * z, 1 - 2 * (x * x + z * z)]
    found += [y * z - r * x, x * z - r * y, y * z + r * x, 1 - 2 * (x * x + y * y)]
    return torch.stack(found, -1).view(-1, 3, 3)


KERNELS: dict[Callable[..., Any], tuple[int, tuple[tuple[int, ...], ...]]] = {
    decays: (2, ((2, 32, 3, 16),)),
    rolled_window: (1, ((4, 33, 4), (4, 33), (33, 4))),
    pairs: (1, ((2, 200, 3), (2, 200, 3))),
    both_ways: (2, ((64, 96),)),
    spread: (1, ((3, 2, 4, 8),)),
    encoded: (1, ((50, 3),)),
    extremes: (2, ((17, 40),)),
    spaced: (1, ((3, 40),)),
    rotations: (1, ((777, 4),)),
    complete_iou: (1, ((50, 4), (50, 4))),
    thinned: (3, ((3, 7, 40), (40,), (7, 1))),
    diffused: (1, ((3, 5, 40),)),
    turned: (1, ((2, 6, 32), (32,), (6, 32), (6, 32))),
    symmetrized: (1, ((24, 24),)),
}
"""Program -> kernels, and the shapes of its inputs."""


@pytest.mark.parametrize("program", KERNELS, ids=lambda program: program.__name__)
def test_kernels_of_programs(program: Callable[..., Any]) -> None:
    count, shapes = KERNELS[program]
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
    parts = planned(program, *inputs)
    assert [part.kind for part in parts] == ["chain"] * count, [part.reason for part in parts]
    names = dict.fromkeys(value for part in parts for value in part.inputs if "arg" in value)
    values = {name: x.numpy() for name, x in zip(sorted(names), inputs, strict=True)}
    run(parts, values)
    wanted = program(*inputs)
    made = [value for part in parts for value in part.outputs]
    found = [values[value].reshape(-1) for value in made]
    for one in wanted if isinstance(wanted, tuple) else (wanted,):
        flat = one.contiguous().numpy().reshape(-1)
        near = [np.allclose(flat, other, atol=2e-5, rtol=2e-5) for other in found if other.size == flat.size]
        assert any(near), program.__name__


def test_rows_joined_of_parts_are_one_thread_each() -> None:
    """What nine elements are made of is divided, and loaded, once for all of them."""
    (part,) = planned(rotations, torch.randn(777, 4))
    found = [moves.mapping for moves in ranked(part.graph, machine_of(DEVICE))]
    assert {(mapping.lanes, mapping.tile) for mapping in found} == {(1, (0, 0))}
    script = emit_chain(part.graph, DEVICE, "chain", found[0]).script()
    assert script.count('func_call("ladder_by_inverse"') == 4
    assert script.count("buffer[v_") <= 2 + 4 + 1  # to be squared, to be divided, and what is prefetched


def counts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x != 0).sum(), torch.isfinite(x).all(), x.to(torch.int32).amax()


def advantage(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A long row whose statistics are read again."""
    x = (x - x.mean()) / (x.std() + 1e-8)
    return torch.min(x * y, x.clamp(0.8, 1.2)).mean()


@pytest.mark.parametrize(("program", "shapes"), [(counts, [(1024, 512)]), (advantage, [(65536,)] * 2)])
def test_reductions_to_numbers_have_many_blocks(program: Callable[..., Any], shapes: Sequence[Any]) -> None:
    for part in planned(program, *(torch.randn(shape) for shape in shapes)):
        assert part.kind == "chain", part.reason
        read = max(int(np.prod(node.tile.known_shape)) for node in part.graph.inputs)
        assert read <= 1 << 13 or blocks_of(part.graph, part.outputs, spread=True) >= 64


def test_rows_of_a_deviation_are_one_axis() -> None:
    """Axes that lie side by side are reduced as one, whatever lies between in the graph."""
    (part,) = planned(spread, torch.randn(3, 2, 4, 8))
    shapes = {part.graph.tile(n.inputs[0]).shape for n in part.graph.nodes if n.operator == "reduce_sum"}
    assert shapes == {(3, 64)}


def covariances(s: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Products of pairs of elements that take many operations: these are stored first."""
    r, x, y, z = (q / q.exp().sum(-1, keepdim=True)).unbind(-1)
    rows = torch.stack([1 - 2 * (y * y + z * z), x * y - r * z, x * z + r * y, 1 - x * x], -1).view(-1, 2, 2)
    rows = rows * s.exp()[:, None]
    return (rows[:, :, None] * rows[:, None]).sum(-1)


def test_what_takes_long_is_stored_before_many_read_it() -> None:
    parts = planned(covariances, torch.randn(300000, 2), torch.randn(300000, 4))
    assert len(parts) == 2
    assert parts[0].reason == "what takes long is stored before many read it"
    few = planned(covariances, torch.randn(30, 2), torch.randn(30, 4))
    assert parts[0].reason not in [part.reason for part in few]


def labelled(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(x, labels, reduction="none").flatten() * 2


def deviations(x: torch.Tensor) -> torch.Tensor:
    windows = x.unfold(1, 32, 1)
    return (x[:, 31:] - windows.mean(-1)) / (windows.std(-1) + 1e-6)


def pooled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x, w = x.view(2, 16, 2, 64), w.view(2, 16, 2, 1)
    return (x * w).sum(2) / w.sum(2)


BUSY: dict[Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]]] = {
    labelled: lambda: (torch.randn(8, 21, 128, 128), torch.randint(0, 21, (8, 128, 128))),
    deviations: lambda: (torch.randn(64, 4096),),
    pooled: lambda: (torch.randn(2, 32, 64), torch.rand(2, 32, 1)),
}


@pytest.mark.parametrize("program", BUSY, ids=lambda program: program.__name__)
def test_threads_that_reduce_alone_are_beside_each_other(program: Callable[..., Any]) -> None:
    """Many reductions of few elements along other axes are one for each thread, and are emitted."""
    (part,) = planned(program, *BUSY[program]())
    mapping = ranked(part.graph, machine_of(DEVICE))[0].mapping
    assert mapping.lanes == 1
    assert "launch" in emit_chain(part.graph, DEVICE, "chain", mapping).script()


def test_borders_of_short_rows_are_decided_for_each_element() -> None:
    """One piece of code serves whole rows: borders have none of their own."""
    (part,) = planned(diffused, torch.randn(3, 5, 40))
    text = emit_chain(part.graph, DEVICE, "chain", ranked(part.graph, machine_of(DEVICE))[0].mapping).script()
    assert text.count("T.ptx.st(") == 1


def test_what_nobody_reads_is_not_computed() -> None:
    parts = planned(thinned, torch.randn(3, 7, 40), torch.randn(40), torch.randn(7, 1))
    shapes = sorted(part.graph.tile(value).shape for part in parts for value in part.graph.outputs)
    assert shapes == [(2, 3, 8), (3, 3, 40), (3, 7, 20)], shapes


def test_halves_that_a_row_reads_elsewhere_come_in_vectors() -> None:
    """A reduction over the row changes nothing about that; its factor is made once for all elements."""
    shapes = ((2, 6, 32), (32,), (6, 32), (6, 32))
    (part,) = planned(turned, *map(torch.randn, shapes))
    text = emit_chain(part.graph, DEVICE, "chain", ranked(part.graph, machine_of(DEVICE))[0].mapping).script()
    loads = [line for line in text.splitlines() if "T.ptx.ld(" in line]
    assert loads
    assert all('"v4"' in line for line in loads), loads
    assert text.count("sqrt(") == 1


@pytest.mark.parametrize("divisor", [0.1, 3.0, 448.0, 1e-40, 1e38, 0.0, -0.7])
def test_divided_by_a_number_as_eager_does_on_gpus(divisor: float) -> None:
    """PyTorch's GPU kernel multiplies by the rounded reciprocal (div_true_kernel_cuda)."""
    x = torch.tensor([0.3, -0.0, 0.0, 1.0, 2.7, float("inf"), float("nan"), 1e30, -5.5, 0.7, 448.0, 3.0])
    (part,) = planned(lambda x: torch.floor(x / divisor), x)
    values = {next(iter(part.inputs)): x.numpy()}
    run([part], values)
    with np.errstate(all="ignore"):
        wanted = np.floor(x.numpy() * (np.float32(1) / np.float32(divisor)))
    np.testing.assert_array_equal(values[part.outputs[0]], wanted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_extremes_of_integers_whose_last_part_is_filled_up(dtype: torch.dtype) -> None:
    """What fills it is no more than any of the type."""
    x = torch.randint(5, 100, (131101,), generator=torch.Generator().manual_seed(0))
    x = (x if dtype == torch.uint8 else -x * (1 << (8 * dtype.itemsize - 8))).to(dtype)
    parts = planned(lambda x: x.amax(), x)
    values = {next(iter(parts[0].inputs)): x.numpy()}
    run(parts, values)
    assert int(values[parts[-1].outputs[0]].item()) == int(x.max())


def test_quotients_by_numbers_are_rounded_by_themselves() -> None:
    """A product that is added in one step would not be rounded as eager's quotient is."""
    (part,) = planned(lambda x: x / 0.1 - 3.0, torch.randn(64))
    text = emit_chain(part.graph, DEVICE, "chain", ranked(part.graph, machine_of(DEVICE))[0].mapping).script()
    assert "ladder_product" in text


def test_places_of_extremes_of_rounded_products_take_no_kernel_to_round() -> None:
    """What is rounded to the type that a product stores costs no kernel."""

    def chosen(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (h @ w).view(1, 1, -1)[:, -1:].argmax(-1)

    parts = planned(chosen, torch.randn(1, 8).half(), torch.randn(8, 128256).half())
    assert [part.kind for part in parts].count("chain") == 2, [part.operators for part in parts]


def test_bytes_are_turned_through_shared_memory() -> None:
    build = GraphBuilder("chain")
    codes = build.input("x", "uint8", (64, 128))
    graph = build.finish(build.add("transpose", codes, permutation=(1, 0)))
    x = np.random.default_rng(0).integers(0, 256, (64, 128)).astype(np.uint8)
    for moves in ranked(graph, machine_of(DEVICE)):
        result = np.zeros((128, 64), np.uint8)
        function = emit_chain(graph, DEVICE, "chain", moves.mapping)
        found = simulate_launch(function, [x, result], target=DEVICE, outputs=(1,))
        assert not found.findings, (moves.mapping, found.report())
        np.testing.assert_array_equal(result, x.T)
    assert any(moves.mapping.tile[0] for moves in ranked(graph, machine_of(DEVICE)))


def test_rows_of_three_are_one_threads() -> None:
    """A turned point's coordinates have most of their work in common."""

    def turned(q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        q = F.normalize(q, dim=-1)
        t = 2 * torch.linalg.cross(q[:, 1:], p)
        return p + q[:, :1] * t + torch.linalg.cross(q[:, 1:], t)

    generator = torch.Generator().manual_seed(0)
    q, p = torch.randn(70, 4, generator=generator), torch.randn(70, 3, generator=generator)
    (part,) = planned(turned, q, p)
    assert ranked(part.graph, machine_of(DEVICE))[0].mapping.lanes == 1
    values = dict(zip(part.inputs, (q.numpy(), p.numpy()), strict=True))
    run([part], values)
    np.testing.assert_allclose(values[part.outputs[0]], turned(q, p).numpy(), rtol=1e-5, atol=1e-6)


def heads_of(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x.view(6, 4, 16), (16,), eps=1e-6).reshape(6, 64)


GATED: dict[str, tuple[Callable[..., Any], int]] = {
    "gate": (lambda x, z: heads_of(x) * F.silu(z), 1),
    "vector and numbers": (lambda x, z: heads_of(x) * z[0] + z[:, :1] - 3.0, 1),
    "rows of both": (lambda x, z: heads_of(x) * F.rms_norm(z, (64,), eps=1e-6), 2),
}


@pytest.mark.parametrize("name", GATED)
def test_what_follows_norms_of_heads_is_computed_with_them(name: str) -> None:
    program, count = GATED[name]
    generator = torch.Generator().manual_seed(0)
    x, z = (torch.randn(6, 64, generator=generator) for _ in range(2))
    parts = planned(program, x, z)
    assert len(parts) == count, [part.operators for part in parts]
    (tile,) = (parts[-1].graph.tile(value) for value in parts[-1].outputs)
    values: dict[str, Any] = {}
    for part in parts:
        for value in part.inputs:
            values.setdefault(value, {"x": x, "z": z}["z" if "1" in value.split("_")[0] else "x"].numpy())
    run(parts, values)
    found = values[parts[-1].outputs[0]].reshape(6, 64)
    np.testing.assert_allclose(found, program(x, z).numpy(), rtol=1e-5, atol=1e-5)
    assert tile.shape in ((6, 4, 16), (6, 64))


def distances(x: torch.Tensor) -> torch.Tensor:
    """Few functions, each of a row's elements."""
    d = x.square().sum(-1).sqrt()
    return torch.exp(-(d[..., None] - torch.arange(32.0)).square()) * torch.cos(d)[..., None]


def decibels(x: torch.Tensor) -> torch.Tensor:
    d = (x[:, 0].square() + x[:, 1].square()).log10()
    return torch.maximum(d, d.amax((1, 2), keepdim=True) - 80)


def distortion(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = (x - x.mean(-1, keepdim=True) for x in (a, b))
    t = (a * b).sum(-1, keepdim=True) / b.square().sum(-1, keepdim=True) * b
    return t.square().sum(-1) / (a - t).square().sum(-1)


def peaks(x: torch.Tensor) -> torch.Tensor:
    y = x.float() / 128
    y = y - y.mean(-1, keepdim=True)
    return y / y.abs().amax(-1, keepdim=True)


STORED: dict[Callable[..., Any], tuple[list[Any], list[Any]]] = {
    distances: ([(256, 64, 3)], [(256, 64, 32)]),
    decibels: ([(8, 2, 400, 300)], [(8, 1), (8, 120000)]),
    peaks: ([(16, 96000)], [(16, 1), (16, 1), (16, 96000)]),
    distortion: ([(16, 96000)] * 2, [(16,), (16, 1), (16, 1), (16, 1)]),
}


@pytest.mark.parametrize("program", STORED, ids=lambda program: program.__name__)
def test_little_is_stored_between_kernels(program: Callable[..., Any]) -> None:
    """Neither what few elements are read by, nor a value in two shapes, nor differences of what is read."""
    shapes, wanted = STORED[program]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    parts = planned(program, *inputs)
    made = [part.graph.tile(value).shape for part in parts for value in part.outputs]
    read = {value for part in parts for value in part.inputs if not value.startswith("arg")}
    assert read <= {value for part in parts for value in part.outputs}
    parts_of_rows = [shape for shape in made if len(shape) == 2 and 1 < shape[1] < 256]
    assert sorted(shape for shape in made if shape not in parts_of_rows) == wanted, made


def test_results_of_the_same_arguments_are_one_launch() -> None:
    """As a sample and the noise in it are; arguments of few elements, as tables are, join no chains."""

    def sample(x: torch.Tensor, v: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a[:, None] * x - v, a[:, None] * v + x

    (part,) = planned(sample, *(torch.randn(16, 1024) for _ in range(2)), torch.randn(16))
    assert len(part.outputs) == 2
    assert len(planned(sample, *(torch.randn(16, 64) for _ in range(2)), torch.randn(16))) == 2


def test_rows_of_groups_of_channels_are_summed_before_the_channels_of_a_group() -> None:
    """Ten of each place lie side by side, and other groups between its rows."""
    of_groups, of_planes = (
        planned(lambda x, axes=axes: x.sum(axes), torch.zeros(shape))
        for axes, shape in (((1, 3), (8, 4096, 32, 10)), ((2, 3), (8, 320, 64, 64)))
    )
    sums = [node for part in of_groups for node in part.graph.nodes if node.operator == "reduce_sum"]
    assert int(np.prod(sums[0].tile.known_shape)) % (8 * 32 * 10) == 0
    assert len(of_planes) == 1


def test_what_needs_means_is_summed_together() -> None:
    """Third and fourth powers of deviations: the means come first, then all sums read the columns once."""
    x = torch.randn(16384, 256)

    def moments(x: torch.Tensor) -> Any:
        d = x - x.mean(0)
        return d.square().mean(0), d.pow(3).mean(0), d.pow(4).mean(0)

    parts = planned(moments, x)
    assert sum(bool({"x", "arg0_1"} & set(part.inputs)) or "sub" in part.operators for part in parts) == 2


def test_neighbours_of_neighbours_are_planned_in_time() -> None:
    """Differences of joined fluxes, each of which reads its neighbours, are made anew only so often."""

    def fluxes(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = torch.stack([u, u * v, v * v])
        f = torch.stack([u * v, u + v, u - v])
        for axis in (1, 2):
            q = torch.roll(q, 1, axis) + torch.roll(q, -1, axis)
            f = torch.roll(f, 1, axis) - torch.roll(f, -1, axis)
        return q - f

    (part,) = planned(fluxes, torch.randn(64, 64), torch.randn(64, 64))
    moves = instantiate(decompose(part.graph), Mapping())
    most: list[int] = []
    rewrite(moves, lambda rule, graph: most.append(len(graph.steps)))
    assert max(most) <= max(MOST_STEPS, len(moves.steps))


def test_parts_of_sums_do_not_compute_anew_what_takes_long() -> None:
    """Logarithms that are a result are stored once, and their errors summed of what is stored."""
    x = torch.rand(32, 81920)

    def companded(x: torch.Tensor) -> Any:
        code = torch.log1p(255 * x.abs()) / 5.5
        back = (torch.exp(code.abs() * 5.5) - 1) / 255
        return back, (back - x).square().mean(-1)

    parts = planned(companded, x)
    assert sum("exp" in part.operators for part in parts) == 1


def test_lanes_hold_rows_of_eight_that_are_read_several_times() -> None:
    """One thread would wait for each element, in each of its loops."""
    parts = planned(lambda x: torch.logsumexp(torch.log_softmax(x, -1) - x, -1), torch.randn(65536, 8))
    (mapping, *_) = (moves.mapping for moves in ranked(parts[0].graph, machine_of(DEVICE)))
    assert mapping.lanes > 1
    assert mapping.num
