"""Axes of a few positions, before the last, of whose elements one thread computes all, on both simulators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chain_targets import run_chain
from test_remainders import H200

from ladder.frontend.torch_fx import import_fx
from ladder.ir import Graph
from ladder.lower.chain import emit_chain
from ladder.movement.choose import machine_of, ranked
from ladder.movement.mapping import Mapping
from ladder.partition import partition, repeats
from ladder.runtime.model.prepared import simplified


def stacked(d: Any, u: Any, v: Any) -> Any:
    """Fluxes of a field, their differences between neighbours along both axes."""
    d = d + 1
    x = torch.stack([d * u, d * u * u + 4.9 * d * d, d * u * v, v / d])
    y = torch.stack([d * v, d * u * v, d * v * v + 4.9 * d * d, u / d])
    along = torch.roll(x, -1, 2) - torch.roll(x, 1, 2)
    return along + torch.roll(y, -1, 1) - torch.roll(y, 1, 1)


def coloured(x: Any, c: Any) -> Any:
    """Three channels of what their largest and least ones are."""
    top, low = x.amax(1), x.amin(1)
    share = torch.sigmoid((top - low) / (top.abs() + 1)) * torch.tanh(top)
    return top[:, None] - share[:, None] * (c[:, None, None] + share[:, None]).clamp(0, 1)


def spread(x: Any, y: Any) -> Any:
    """Two results of one shape that share what each reads for all positions."""
    share = torch.sigmoid(x[:, :1] / (x[:, 1:].abs() + 1)) * torch.tanh(x[:, :1])
    first = share * y + 1
    return first, (first - y) * share


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[int, int], list[tuple[int, ...]]], torch.dtype]] = {
    "stacked": (stacked, lambda h, w: [(h, w)] * 3, torch.float32),
    "coloured": (coloured, lambda h, w: [(2, 3, h, w), (3,)], torch.float32),
    "two results": (spread, lambda h, w: [(2, 2, h, w), (2, 4, h, w)], torch.float32),
    "halves": (spread, lambda h, w: [(2, 2, h, w), (2, 4, h, w)], torch.float16),
}


def graph_of(program: Callable[..., Any], inputs: list[torch.Tensor]) -> Graph:
    module = torch.fx.experimental.proxy_tensor.make_fx(program, pre_dispatch=True)(*inputs)
    graph = simplified(import_fx(module, inputs), H200).graph
    parts = partition(graph, device=H200)
    (part,) = (part for part in parts if part.kind != "view")
    assert part.kind == "chain"
    return part.graph


@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
@pytest.mark.parametrize("size", [(16, 32), (7, 13)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_thread_has_all_positions(
    name: str, size: tuple[int, int], target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bound, least in (("LEAST_ROWS", 1), ("LEAST_ROW", 1), ("WASTED", 1)):
        monkeypatch.setattr(repeats, bound, least)
    program, shapes, dtype = PROGRAMS[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes(*size)]
    inputs[0].view(-1)[:3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    wanted = program(*inputs)
    graph = graph_of(program, inputs)
    by_name = {node.name: inputs[int(node.name.rsplit("_", 2)[-2][3:])] for node in graph.inputs}
    given = [by_name[node.name].reshape(node.tile.known_shape) for node in graph.inputs]
    near = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    for found, want in zip(
        run_chain(graph, given, target), wanted if isinstance(wanted, tuple) else (wanted,), strict=True
    ):
        torch.testing.assert_close(found.reshape(want.shape), want, equal_nan=True, **near)


def test_threads_are_of_one_position_of_the_others() -> None:
    """What is stacked of 512 by 512 has a thread of each four elements of a field, not of a stack."""
    inputs = [torch.empty(512, 512) for _ in range(3)]
    graph = graph_of(stacked, inputs)
    text = str(emit_chain(graph, H200, "chain", Mapping()))
    assert f"cta_id([{512 * 512 // 4 // 256}])" in text


def pulled(p: Any, mass: Any) -> Any:
    """Forces between pairs of points: three axes share a pair's distance."""
    apart = p[None] - p[:, None]
    inverse = (apart.square().sum(-1) + 1e-2).rsqrt()
    return (apart * (mass[None] * inverse**3)[..., None]).sum(1)


@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
@pytest.mark.parametrize(("points", "axes"), [(257, 3), (300, 2)])
def test_a_lane_has_all_columns(points: int, axes: int, target: str) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(points, axes, generator=generator), torch.rand(points, generator=generator)]
    graph = graph_of(pulled, inputs)
    assert ranked(graph, machine_of(H200))[0].mapping.across == 1
    (found,) = run_chain(graph, inputs, target)
    torch.testing.assert_close(found, pulled(*inputs), rtol=1e-4, atol=1e-4)
