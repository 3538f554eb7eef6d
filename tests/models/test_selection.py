"""The largest of rows in comparisons, against torch's operators; kernels for GPUs on the simulator."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from chain_targets import run_chain
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import ladder
from ladder.frontend import selection
from ladder.frontend.selection import MOST_PAIRS, argmax, by_parts, chosen, first_largest, places, taken, topk
from ladder.frontend.torch_fx import import_fx
from ladder.ir import evaluate
from ladder.lower.chain import emit_chain
from ladder.movement.choose import machine_of, ranked
from ladder.movement.mapping import held_width
from ladder.partition.partition import partition
from ladder.rewrite import simplify
from targets import get_device
from tests.models.test_gpu_chains import check, simulated

H200 = get_device("cuda/sm_90a")
NAN, INF = float("nan"), float("inf")
ROWS = {
    "random": torch.randn(5, 37),
    "ties": torch.tensor([[1.0, 3, 3, 2, 3, 1, 2]]),
    "special": torch.tensor([[NAN, 1, -INF, INF, NAN, -0.0, 0.0], [-INF] * 6 + [NAN]]),
    "half": torch.randn(2, 3, 16).half(),
    "integers": torch.tensor([[5, -7, 5, 2**40, -(2**40)]]),
    "bytes": torch.tensor([[5, 0, 255, 7, 0]], dtype=torch.uint8),
    "one": torch.randn(4, 1),
    "no rows": torch.randn(0, 8),
}


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("name", ROWS)
def test_values_are_those_of_torch(name: str, largest: bool) -> None:
    x = ROWS[name]
    for k in {1, min(3, x.shape[-1]), x.shape[-1]}:
        values, indices = chosen(x, places(x, largest), k)
        wanted = torch.topk(x, k, -1, largest)
        assert torch.allclose(values, wanted.values, rtol=0, atol=0, equal_nan=True)
        assert (values.dtype, indices.dtype) == (x.dtype, torch.int64)
        assert torch.equal(x.gather(-1, indices).isnan(), values.isnan())
        assert torch.allclose(x.gather(-1, indices), values, rtol=0, atol=0, equal_nan=True)
        assert all(len(set(row)) == k for row in indices.reshape(-1, k).tolist())


@pytest.mark.parametrize("name", [name for name, x in ROWS.items() if x.is_floating_point()])
def test_taking_one_after_the_other_is_choosing_by_places(name: str) -> None:
    x = ROWS[name]
    for k in {1, min(3, x.shape[-1]), x.shape[-1]}:
        for found, wanted in zip(taken(x, k), chosen(x, places(x, largest=True), k), strict=True):
            assert found.dtype == wanted.dtype
            assert torch.allclose(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_of_equal_ones_the_first_comes_first() -> None:
    x = ROWS["ties"]
    assert places(x, largest=True).tolist() == [[5, 0, 1, 3, 2, 6, 4]]
    assert torch.equal(places(x), x.argsort(stable=True).argsort())


def test_what_stays_a_call_of_torch() -> None:
    assert topk(torch.randn(3, 8), 2) is NotImplemented  # CPUs have a better one
    elsewhere = torch.empty(3, 8, device="meta")
    assert topk(elsewhere, 2)[0].shape == (3, 2)
    assert topk(elsewhere, 2, 0)[1].shape == (2, 8)
    for x, k in ((elsewhere, 9), (elsewhere, 0), (elsewhere.new_empty(1, 1 + int(MOST_PAIRS**0.5)), 1)):
        assert topk(x, k) is NotImplemented
    assert topk(elsewhere.new_empty(()), 1) is NotImplemented
    assert argmax(torch.randn(1, 8192)) is NotImplemented
    for shape in ((), (1, 8), (400, 8192), (0, 8192), (1, 1 << 32)):
        assert argmax(elsewhere.new_empty(shape), -1 if shape else None) is NotImplemented


LONG = {
    "random": torch.randn(2, 96),
    "ties": torch.tensor([[1.0, 5, 2] * 32]),
    "equal": torch.zeros(1, 96),
    "NaN": torch.tensor([[INF, 0, 7] * 20 + [NAN, INF, NAN] * 12]),
    "-inf": torch.full((1, 96), -INF),
    "half": torch.randn(3, 96).bfloat16(),
    "integers": torch.randint(-9, 9, (2, 96)),
}


@pytest.mark.parametrize("width", [12, 7, 95])
@pytest.mark.parametrize("name", LONG)
def test_the_largest_of_a_long_row_is_the_first(name: str, width: int) -> None:
    """Parts of 7 and 95 do not divide the row: the last one is filled up."""
    x = LONG[name]
    assert torch.equal(by_parts(x, width), x.argmax(-1))


@pytest.mark.parametrize("extent", [8192, 8191, 50257])
def test_a_long_row_is_read_once(extent: int) -> None:
    """By parts in one kernel; another ends it. 8191 is a prime, 50257 the size of GPT-2's vocabulary."""
    x = torch.randn(1, extent)
    width = 224 if extent > 8192 else 128
    graph = simplify(import_fx(make_fx(partial(by_parts, width=width))(x), [x]).graph, H200)
    first, last = partition(graph, device=H200)
    assert [part.kind for part in (first, last)] == ["chain", "chain"]
    rows = {node.tile.shape for node in first.graph.nodes if node.operator == "reduce_max"}
    assert rows == {(1, -(-extent // width))}


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("dim", [None, 0, -1])
def test_shapes_of_where_the_largest_is(
    dim: int | None, keepdim: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "MOST_ROWS", 1 << 20)
    x = torch.empty(8192, 4096, device="meta")
    found, wanted = argmax(x, dim, keepdim), x.argmax(dim, keepdim)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)


def likely(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how likely each is, and its place."""
    ratio = torch.softmax(x, -1)
    return ratio, places(ratio, largest=True).float()


def below_largest(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return places of whole numbers, and how far they are below the row's largest: each finds it again."""
    gap = x.floor() - x.floor().amax(-1, keepdim=True)
    return places(gap, largest=True).float() + 64 * gap


def sorted_weights(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return rows times numbers less their sum, in the order of the experts that they belong to."""
    weights = x[0].floor() - x[0].floor().sum()
    place = places(x[1].floor()) == torch.arange(3)[:, None]
    return y.floor() * torch.where(place, weights, 0).sum(1)[:, None]


def test_what_is_computed_again_is_little() -> None:
    """Kernels of GPUs compute short sums once more for each row; elsewhere they are kernels of their own."""
    for rows, kernels in ((1, 1), (3, 2)):
        x = torch.randn(rows, 128)
        graph = simplify(import_fx(make_fx(likely)(x), [x]).graph)
        for device, count in ((get_device("cuda/sm_90a"), kernels), (None, 2)):
            parts = partition(graph, device=device)
            assert [part.kind for part in parts].count("chain") == count


def routed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return shares of the four largest of a row in their sum, and where they are."""
    values, at = taken(x, 4)
    return (values / values.sum(-1, keepdim=True)).half(), at


def routed_to_slots(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what `routed` does and, along one axis, whether each choice is an expert of this device's."""
    shares, at = routed(x)
    return shares, at, at.flatten() < 64


SPECIAL = {
    "numbers": torch.randn(3, 128),
    "one NaN": torch.randn(3, 128).index_fill(1, torch.tensor([70]), NAN),
    "NaN and inf": torch.tensor([[INF, 0, 7, NAN] * 32, [NAN] * 127 + [1.0], [-INF] * 126 + [2.0, -0.0]]),
    "signs": torch.tensor([[-1.0, -0.0, -3, -2.5] * 16, [0.0, -0.0] * 32]),
}


@pytest.mark.parametrize("target", ["cuda/sm_90a", "cuda/sm_75", "rocm/gfx942"])
@pytest.mark.parametrize("name", SPECIAL)
def test_a_router_is_one_kernel(name: str, target: str) -> None:
    """It holds a row in registers; what it takes of rows with special values is what torch has there."""
    x = SPECIAL[name]
    graph = simplify(import_fx(make_fx(routed)(x), [x]).graph)
    (part,) = partition(graph, device=get_device(target), side_by_side=True)
    mapping = ranked(part.graph, machine_of(get_device(target)))[0].mapping
    assert mapping.num
    shares, at = np.zeros((len(x), 4), np.float16), np.zeros((len(x), 4), np.int64)
    found = dict(zip(graph.outputs, (shares, at), strict=True))
    function = emit_chain(part.graph, get_device(target), "chain")
    result = simulated(function, target, [x.numpy(), *map(found.__getitem__, part.outputs)], (1, 2))
    assert not result.findings, result.report()
    assert ("redux.sync" in function.script()) == ("redux" in get_device(target).features)
    wanted, places_wanted = routed(x)
    np.testing.assert_array_equal(at, places_wanted.numpy())
    np.testing.assert_allclose(shares, wanted.numpy(), rtol=2e-3)


def test_a_token_is_routed_in_registers_where_results_have_other_axes() -> None:
    """Results are (1, 4) and (4,); where the row is read for each choice, it takes twenty times the time."""
    device = get_device("cuda/sm_90a")
    for x in SPECIAL["numbers"].split(1):
        graph = simplify(import_fx(make_fx(routed_to_slots)(x), [x]).graph)
        (part,) = partition(graph, device=device, side_by_side=True)
        assert ranked(part.graph, machine_of(device))[0].mapping.num
        wanted = [value.numpy() for value in routed_to_slots(x)]
        found = dict(zip(graph.outputs, map(np.zeros_like, wanted), strict=True))
        given = [x.numpy(), *map(found.__getitem__, part.outputs)]
        result = simulated(emit_chain(part.graph, device, "chain"), "cuda/sm_90a", given, (1, 2, 3))
        assert not result.findings, result.report()
        for value, expected in zip(found.values(), wanted, strict=True):
            np.testing.assert_allclose(value.astype(np.float32), expected.astype(np.float32), rtol=2e-3)


@pytest.mark.parametrize("rows", [1, 133])
def test_each_lane_has_its_share_of_a_routers_row(rows: int) -> None:
    device, x = get_device("cuda/sm_90a"), torch.randn(rows, 128)
    graph = simplify(import_fx(make_fx(routed)(x), [x]).graph)
    (part,) = partition(graph, device=device, side_by_side=True)
    mapping = ranked(part.graph, machine_of(device))[0].mapping
    assert (held_width(part.graph), mapping.lanes, mapping.num) == (4, 32, 1)


@pytest.mark.parametrize(
    "given", [(9, -1, -1), (10, 0, -3), (9, 0, -3), (-2, -9, -2), (0, 10, 3), (5, 5, -1)]
)
def test_counts_go_down_as_well(given: tuple[int, int, int]) -> None:
    def counted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + torch.arange(*given, dtype=torch.int32), torch.arange(*given)

    x = torch.ones(1)
    graph = simplify(import_fx(make_fx(counted)(x), [x]).graph)
    assert all(node.operator != "call" for node in graph.nodes)
    for found, wanted in zip(evaluate(graph, [x.numpy()]), counted(x), strict=True):
        np.testing.assert_array_equal(found, wanted.numpy())
    found = run_chain(graph, [x], "cuda/sm_90a") if found.size else []
    assert all(map(torch.equal, found, counted(x)))


PARTS = {
    "below the largest": below_largest,
    "sorted weights": sorted_weights,
    "places": lambda x, y: places(x + y, largest=True).float(),
    "values": lambda x, y: chosen(x, y.floor().long(), 2)[0],
    "indices": lambda x, y: chosen(x, y.floor().long(), 2)[1].float(),
    "largest": lambda x, y: first_largest(x, x.amax(-1), torch.arange(16, dtype=torch.int32)).float(),
}
"""Chains of two inputs; places may be any numbers."""


@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
@pytest.mark.parametrize("part", PARTS)
def test_on_the_simulator(part: str, target: str) -> None:
    function = PARTS[part]
    x = torch.randn(3, 16)
    graph = simplify(import_fx(make_fx(function)(x, x), [x, x]).graph)
    np.testing.assert_array_equal(evaluate(graph, [x.numpy(), x.numpy()]), function(x, x).numpy())
    for moves in ranked(graph, machine_of(get_device(target)))[:2]:
        check(graph, np.float32, moves.mapping, target)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("power", [1, 2])
def test_margin_losses_pass_over_what_is_no_number(power: int, reduction: str) -> None:
    x = torch.tensor([[1, INF, 2], [INF, INF, 0], [-INF, 1, 2], [NAN, 1, 2], [0, NAN, 1], [0.1, 0.5, 0.2]])
    target, weight = torch.tensor([0, 1, 0, 1, 1, 2]), torch.tensor([0.5, 2, INF])

    def loss(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return functional.multi_margin_loss(x, target, power, 0.7, weight, reduction=reduction)

    fast = ladder.compile(loss)
    for rows, given in ((6, weight), (6, None), (4, None), (1, None)):
        taken = x[-rows:], target[-rows:], given
        for _ in range(2):
            assert torch.allclose(fast(*taken), loss(*taken), equal_nan=True)
