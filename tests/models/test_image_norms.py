"""Norms over space on GPUs: statistics by parts of an image, joined, in three kernels, channels last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from test_channel_padding import parts_of as parts_of_model
from test_gpu_chains import simulated
from torch import nn

from ladder.frontend.aten_models import MODEL_ROWS
from ladder.frontend.image_norms import HELD_ROW, PART_ROW, parts_of, row_parts_of
from ladder.frontend.importer import Importer
from ladder.ir import GraphBuilder, evaluate
from ladder.ir.graph import Graph
from ladder.lower.chain import emit_chain
from ladder.movement.choose import machine_of, ranked
from ladder.partition import partition
from ladder.partition.subgraphs import Subgraph
from ladder.rewrite import simplify
from targets import get_device

H200 = get_device("cuda/sm_90a")
TYPES = {"float16": np.float16, "float32": np.float32}


def norm(
    shape: Sequence[Any], groups: int, ttype: str = "float16", last: bool = True, affine: bool = True
) -> Graph:
    """Return the graph of a group norm and a ReLU as GPUs have it; ``last``: how channels lie in memory."""
    im = Importer("norm")
    images, channels, *space = shape
    stored = (images, *space, channels) if last else tuple(shape)
    rank = len(stored)
    x = given = im.g.input("x", ttype, stored)
    if last:
        x = im.permute(given, (0, rank - 1, *range(1, rank - 1)))
    vectors = [im.g.input(name, ttype, (channels,)) if affine else None for name in "wb"]
    size = space[0] * space[1] if all(isinstance(e, int) for e in space) else f"{space[0]}*{space[1]}"
    row = MODEL_ROWS["native_group_norm.default"]
    value = im.cast(row(im, ttype, x, *vectors, images, channels, size, groups, 1e-5)[0], "float32")
    value = im.cast(im.g.add("relu", value), ttype)
    return im.g.finish(im.permute(value, (0, *range(2, rank), 1)) if last else value)


def parts_for(graph: Graph, target: str = "cuda/sm_90a") -> tuple[Graph, list[Subgraph]]:
    device = get_device(target)
    graph = simplify(graph, device)
    return graph, partition(graph, device=device)


def executed(graph: Graph, arrays: Sequence[np.ndarray], target: str = "cuda/sm_90a") -> np.ndarray:
    """Return what the kernels of a plan give, one after the other on the simulator."""
    graph, parts = parts_for(graph, target)
    known = dict(zip((node.name for node in graph.inputs), arrays, strict=True))
    for part in parts:
        given = [np.ascontiguousarray(known[value]) for value in part.inputs]
        if part.kind == "view":
            (value,) = part.outputs
            known[value] = known[part.inputs[0]].reshape(part.graph.tile(part.graph.outputs[0]).known_shape)
            continue
        assert part.kind == "chain", part
        made = [
            np.full(part.graph.tile(v).known_shape, np.nan, TYPES[part.graph.tile(v).ttype.name])
            for v in part.graph.outputs
        ]
        function = emit_chain(part.graph, get_device(target), "chain")
        places = tuple(range(len(given), len(given) + len(made)))
        result = simulated(function, target, [*given, *made], places)
        assert not result.findings, result.report()
        known.update(zip(part.outputs, made, strict=True))
    return known[graph.outputs[0]]


def reference(arrays: Sequence[np.ndarray], groups: int, last: bool) -> np.ndarray:
    x, *vectors = (torch.from_numpy(np.asarray(each)).double() for each in arrays)
    x = x.movedim(-1, 1) if last else x
    found = nn.functional.group_norm(x, groups, *vectors).relu()
    return (found.movedim(1, -1) if last else found).numpy()


def drawn(graph: Graph, mean: float) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    kinds = [(node.tile.known_shape, TYPES[node.tile.ttype.name]) for node in graph.inputs]
    first, *rest = [rng.normal(size=shape).astype(kind) for shape, kind in kinds]
    return [(first + mean).astype(first.dtype), *rest]


CASES: dict[str, tuple[tuple[int, ...], int, bool, bool]] = {
    "groups of two": ((1, 64, 32, 32), 32, True, True),
    "one group, images": ((2, 40, 30, 28), 1, True, True),
    "instances": ((2, 36, 32, 31), 36, True, False),
    "channels first": ((2, 48, 32, 24), 12, False, True),
    "instances, channels first": ((1, 33, 32, 64), 33, False, False),
    "long groups, channels first": ((1, 6, 97, 101), 3, False, True),
    "odd groups, channels first": ((3, 15, 9, 11), 5, False, True),
    "one channel of odd size": ((2, 3, 7, 13), 3, False, True),
}


@pytest.mark.parametrize("ttype", TYPES)
@pytest.mark.parametrize("case", CASES)
def test_statistics_by_parts(case: str, ttype: str) -> None:
    shape, groups, last, affine = CASES[case]
    graph = norm(shape, groups, ttype, last, affine)
    mean = 1000.0 if ttype == "float32" else 3.0
    arrays = drawn(graph, mean)
    exact = reference(arrays, groups, last)
    found = executed(graph, arrays).astype(np.float64)
    assert np.linalg.norm(found - exact) < (3e-4 if ttype == "float32" else 1e-3) * np.linalg.norm(exact)


@pytest.mark.costly
@pytest.mark.parametrize("target", ["rocm/gfx942", "rocm/gfx1100", "cuda/sm_80"])
def test_on_other_gpus(target: str) -> None:
    graph = norm((1, 64, 32, 33), 16)
    arrays = drawn(graph, 3.0)
    exact = reference(arrays, 16, True)
    assert np.linalg.norm(executed(graph, arrays, target) - exact) < 1e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_group(special: float) -> None:
    """Wherever it lies: also where it is what a part's sums are of differences from."""
    graph = norm((1, 64, 32, 32), 32)
    for row in (0, 5):
        arrays = drawn(graph, 0.0)
        arrays[0][0, row, 0, 6] = special
        exact, found = reference(arrays, 32, True), executed(graph, arrays)
        assert np.isnan(exact[..., 6:8]).all()
        assert np.array_equal(np.isnan(found), np.isnan(exact))


def test_one_large_element_does_not_hide_the_others() -> None:
    """First of its part, so that all differences are of its size."""
    graph = norm((1, 64, 32, 32), 64, "float32")
    arrays = drawn(graph, 0.0)
    arrays[0][0, ::2, 0] = 3e4
    exact = reference(arrays, 64, True)
    assert np.linalg.norm(executed(graph, arrays) - exact) < 1e-4 * np.linalg.norm(exact)


def kinds(graph: Graph) -> list[str]:
    """Return the kinds of a plan's parts; a view at its end computes nothing."""
    _, parts = parts_for(graph)
    return [part.kind for part in parts if part.kind != "view"]


def test_three_kernels_read_images_twice() -> None:
    for shape in ((2, 320, 64, 64), (1, 1280, 16, 16), (1, 128, 512, 512)):
        _, parts = parts_for(norm(shape, 32))
        assert [part.kind for part in parts] == ["chain"] * 3
        images = [part for part in parts if "x" in part.inputs]
        assert len(images) == 2
        stored = [part.graph.tile(v).known_shape for part in parts[:2] for v in part.graph.outputs]
        assert all(np.prod(each) <= np.prod(shape) // 32 for each in stored)


def test_groups_as_they_are_written_are_rows() -> None:
    """A block holds one, of up to `HELD_ROW` elements; longer ones are in parts, of which few are stored."""
    assert kinds(norm((4, 320, 64, 64), 32, last=False)) == ["chain"]
    assert kinds(norm((16, 35, 33, 47), 5, last=False)) == ["chain"]
    for shape, groups in (((1, 64, 200, 304), 8), ((2, 128, 256, 256), 32)):
        _, parts = parts_for(norm(shape, groups, last=False))
        assert len([part for part in parts if "x" in part.inputs]) == 2
        stored = [part.graph.tile(v).known_shape for part in parts[:-1] for v in part.graph.outputs]
        assert all(np.prod(each) <= np.prod(shape) // PART_ROW for each in stored)


def test_instances_as_they_are_written_are_one_kernel() -> None:
    """Their positions are neighbours: a block reads a channel of an image once."""
    for last, kernels in ((False, 1), (True, 3)):
        assert kinds(norm((8, 64, 128, 128), 64, last=last, affine=False)) == ["chain"] * kernels


def test_parts_are_of_one_size() -> None:
    assert parts_of(4, 64, 1 << 16) == 128
    assert parts_of(2, 320, 4096) == 64
    assert parts_of(1, 64, 4099) == 1  # a prime number
    assert parts_of("n", 64, 4096) > 1
    assert parts_of(1, 64, "s") == 0
    assert parts_of(1, 8, 64) == 0  # few elements
    assert row_parts_of(4, 32, 40960) == 1
    assert row_parts_of(1, 8, 64 * 200 * 304 // 8) > 1
    assert row_parts_of(64, 32, HELD_ROW + 64) > 1
    for size in (HELD_ROW + 1, HELD_ROW + 2, 8 * 76 * 4, 1 << 20, 486400, 65537):
        assert size % row_parts_of(1, 1, size) == 0
    for size in range(1024, 1100):
        assert size % parts_of(3, 96, size) == 0


@pytest.mark.parametrize("shape", [("n", 64, 32, 32), (2, 64, "h", "w"), (1, 8, 4, 4)])
def test_open_sizes_and_few_elements(shape: tuple[Any, ...]) -> None:
    graph = norm(shape, 8, "float32")
    sizes = {"n": 2, "h": 24, "w": 48}
    known = [sizes.get(e, e) for e in shape]
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=(known[0], *known[2:], known[1])), rng.normal(size=64), rng.normal(size=64)]
    arrays[1:] = [each[: known[1]] for each in arrays[1:]]
    exact = reference(arrays, 8, True)
    assert np.allclose(evaluate(graph, arrays), exact, atol=1e-9)
    assert np.allclose(evaluate(simplify(graph, H200), arrays), exact, atol=1e-9)


class Between(nn.Module):
    """Norms between convolutions, as in CycleGAN and in networks of diffusion."""

    def __init__(self, norm: nn.Module, channels: int) -> None:
        super().__init__()
        convolutions = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.first, self.last = convolutions
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.silu(self.norm(self.first(x))))  # type: ignore[no-any-return]


NORMS = {
    "group": nn.GroupNorm(8, 64),
    "instance": nn.InstanceNorm2d(64),
    "instance, affine": nn.InstanceNorm2d(64, affine=True),
}


@pytest.mark.parametrize("name", NORMS)
def test_nothing_is_copied_between_convolutions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms are added by the product before, which stores its type; the next product reads what is stored."""
    monkeypatch.setattr(Importer, "on_cpu", property(lambda _: False, lambda _, value: None), raising=False)
    torch.manual_seed(0)
    model, x = Between(NORMS[name], 64).half().eval().requires_grad_(False), torch.randn(2, 64, 32, 32).half()
    found = parts_of_model(model, x)
    products = [at for at, part in enumerate(found) if "contract" in part.operators]
    assert len(products) == 2
    first, last = products
    assert "add" in found[first].operators
    assert [part.kind for part in found[first + 1 : last]] == ["chain"] * 3
    image = found[first].graph.tile(found[first].graph.outputs[0])
    assert image.ttype.name == "float16"
    assert found[last].inputs[0] == found[last - 1].outputs[0]


def test_integers_are_summed_as_integers() -> None:
    g = GraphBuilder("chain")
    graph = g.finish(g.add("reduce_sum", g.input("x", "int32", (2, 256, 64)), axis=1, keep=False))
    x = np.random.default_rng(0).integers(-(2**20), 2**20, (2, 256, 64)).astype(np.int32)
    y = np.zeros((2, 64), np.int32)
    result = simulated(emit_chain(graph, H200, "chain"), "cuda/sm_90a", [x, y], (1,))
    assert not result.findings, result.report()
    assert np.array_equal(y, x.sum(1))


def instances_then(activation: str, shape: tuple[int, ...], affine: bool) -> Graph:
    """Return an instance norm and what programs write behind it, of several operands."""
    im = Importer("norm")
    x = im.g.input("x", "float16", shape)
    value = im.cast(x, "float32")
    value = im.normalised(value, range(2, len(shape)), 1e-5)
    if affine:
        value = im.g.add(
            "mul", value, im.along(im.cast(im.g.input("w", "float16", shape[1:2]), "float32"), 1, 4)
        )
    if activation == "leaky":
        number = im.number(0.2, "float32")
        less = im.g.add("less", value, im.number(0.0, "float32"))
        value = im.g.add("select", less, im.g.add("mul", value, number), value)
    return im.g.finish(im.cast(value, "float16"))


def two_axes(shape: tuple[int, ...]) -> Graph:
    """Return a layer norm over two axes, with weights of both."""
    im = Importer("norm")
    value = im.normalised(im.cast(im.g.input("x", "float16", shape), "float32"), [1, 2], 1e-5)
    for operator in ("mul", "add"):
        value = im.g.add(operator, value, im.cast(im.g.input(operator, "float16", shape[1:]), "float32"))
    return im.g.finish(im.cast(value, "float16"))


@pytest.mark.parametrize(
    "graph",
    [
        instances_then("leaky", (2, 6, 24, 20), False),
        instances_then("none", (2, 6, 9, 7), True),
        two_axes((40, 16, 24)),
        two_axes((40, 17, 13)),
        two_axes((40, 1, 13)),
    ],
)
def test_norms_over_several_axes_hold_their_rows(graph: Graph) -> None:
    """Their columns are one axis, also where what follows has several: lanes keep a row in registers."""
    arrays = drawn(graph, 1.0)
    simple, parts = parts_for(graph)
    wide = [each.astype(np.float64) for each in arrays]
    assert np.allclose(evaluate(simple, wide), evaluate(graph, wide), rtol=1e-12)
    (chain,) = (part for part in parts if part.kind != "view")
    assert ranked(chain.graph, machine_of(H200))[0].mapping.num
    exact = evaluate(graph, wide)
    assert np.linalg.norm(executed(graph, arrays) - exact) < 1e-3 * np.linalg.norm(exact)
