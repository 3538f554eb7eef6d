"""Plans whose parts are found graphs: their kernels, simulated on a GPU or run on this CPU, are right."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from found_graphs import operands, require_right
from torch import nn

import ladder
from ladder import knobs
from ladder.api import compiler
from ladder.frontend.torch_fx import import_fx
from ladder.ir import evaluate
from ladder.lower.blocks import emitter_for
from ladder.runtime.fused import Lowering, constants_of
from ladder.runtime.model import found
from ladder.runtime.model.prepared import Prepared, from_data, prepare, to_data
from ladder.simulate import simulate_launch
from targets import get_device

H200 = get_device("cuda/sm_90a")


class NormProduct(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.norm, self.product = nn.RMSNorm(depth, eps=1e-6), nn.Linear(depth, width, bias=False)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(self.norm(x))  # type: ignore[no-any-return]


class PlainNormProduct(NormProduct):
    """Gains in float16 are multiplied into weights, which kernels do not do with packed ones."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__(depth, width)
        self.norm = nn.RMSNorm(depth, eps=1e-6, elementwise_affine=False)


class GatedMLP(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(depth, width, bias=False), nn.Linear(depth, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.gate(x)) * self.up(x)


class LoRA(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.whole, self.a = nn.Linear(depth, width, bias=False), nn.Linear(depth, 16, bias=False)
        self.b = nn.Linear(16, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(x) + self.b(self.a(x))  # type: ignore[no-any-return]


def model_of(make: type[nn.Module], depth: int, width: int, weight: str = "") -> nn.Module:
    torch.manual_seed(0)
    model = make(depth, width).half().eval().requires_grad_(False)
    return ladder.quantize_(model, weight, group_size=64) if weight else model


@pytest.fixture
def slow_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every part take a second, so that whatever is found is chosen; nothing is kept."""
    monkeypatch.setattr(found, "seconds_of", lambda part, device: 1.0)
    monkeypatch.setattr(found, "GRAPHS", 1)
    monkeypatch.setattr(found, "CHOICES", 1)
    with knobs.override(cache=False):
        yield


def prepared_for_h200(
    model: nn.Module,
    x: torch.Tensor | list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    search: float = 0.0,
) -> Prepared:
    """Return what a model is prepared to on an H200, weights side by side as there."""
    kept: list[Prepared] = []

    def prepared(module: Any, examples: list[Any], *_: Any, precise: bool, **options: Any) -> Prepared:
        program = import_fx(module, examples, join=True, packed_for=H200.name, precise=precise)
        kept.append(prepare(program, H200, search))
        raise KeyError("only prepared")

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(compiler, "prepared_for", prepared)
        with pytest.raises(KeyError):
            ladder.compile(model)(*([x] if isinstance(x, torch.Tensor) else x))
    return kept[0]


def require_right_when_simulated(prepared: Prepared) -> None:
    (part,) = [part for part in prepared.parts if part.kind == "found"]
    lowering, values, model = Lowering.parse(part.found), {}, {}
    arrays, _, meant = operands(lowering.graph, H200)
    sources = dict(part.roles)
    for node, own, value in zip(lowering.graph.inputs, arrays, meant, strict=True):
        values[node.name] = [array.contiguous().view(-1).numpy() for array in own]
        model[sources[node.name]] = value
    for node, plan in zip(lowering.blocks, lowering.schedules, strict=True):
        assert node.body is not None
        function = emitter_for(H200)(node.body, H200, plan, "k", constants_of(node, lowering.constants))
        outs = [np.full(tile.known_shape, np.nan, tile.ttype.name) for tile in node.tiles]
        taken = [array for value in node.inputs for array in values[value]]
        flat = [array.view(np.uint32) if array.dtype == np.int32 else array for array in taken]
        result = simulate_launch(
            function, [*flat, *(out.reshape(-1) for out in outs)], outputs=tuple(range(-len(outs), 0))
        )
        assert not result.findings, result.report()
        values.update({value: [out.reshape(-1)] for value, out in zip(node.values, outs, strict=True)})
    shapes = {value: part.graph.inputs[at].tile.known_shape for at, value in enumerate(part.inputs)}
    given = [model[v] if hasattr(model[v], "scale") else model[v].reshape(shapes[v]) for v in part.inputs]
    wanted = np.asarray(evaluate(part.graph, given), np.float64)
    require_right("plan", values[lowering.graph.outputs[0]][0].reshape(wanted.shape), wanted)


CASES = [
    (NormProduct, "norm, product", 3, ""),
    (PlainNormProduct, "norm without gain, product", 1, "int4"),
    (GatedMLP, "gated MLP", 1, ""),
    (GatedMLP, "gated MLP", 5, "int4"),
    (LoRA, "LoRA", 1, ""),
]


@pytest.mark.parametrize(("make", "name", "tokens", "weight"), CASES)
def test_found_kernels_of_plans_are_right_on_the_simulator(
    make: type[nn.Module],
    name: str,
    tokens: int,
    weight: str,
    slow_parts: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(1, tokens, 128).half()
    prepared = prepared_for_h200(model_of(make, 128, 128, weight), x, monkeypatch)
    (part,) = [part for part in prepared.parts if part.kind != "view"]
    assert part.kind == "found"
    assert f"found for {name}, equal but with probability" in part.reason
    assert "predicted" in part.reason
    assert {name for name, source in prepared.program.sources.items() if source.dense} == set()
    assert from_data(to_data(prepared) or {}) == prepared
    require_right_when_simulated(prepared)


@pytest.mark.parametrize(("tokens", "depth", "width"), [(1, 128, 131), (1, 131, 128), (0, 128, 128)])
def test_sizes_that_no_tiles_divide_stay_as_they_are(
    tokens: int, depth: int, width: int, slow_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(tokens, depth).half()
    prepared = prepared_for_h200(model_of(NormProduct, depth, width), x, monkeypatch)
    assert "found" not in [part.kind for part in prepared.parts]


def test_found_graphs_are_taken_only_where_they_are_predicted_to_be_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sizes at which a kernel of ours alone is about as fast as the weights can be loaded."""
    x, model = torch.randn(1, 128).half(), model_of(NormProduct, 128, 128)
    monkeypatch.setattr(found, "seconds_of", lambda part, device: 1e-9)
    prepared = prepared_for_h200(model, x, monkeypatch)
    assert [part.kind for part in prepared.parts if part.kind != "view"] != ["found"]
    with knobs.override(found_graphs=False):
        assert found.finder(H200) is None
    assert found.finder(get_device("rocm/gfx942")) is None


def test_models_of_open_sizes_stay_as_they_are(slow_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of the second length on are for all lengths: tokens, and what is summed over."""

    class Across(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return nn.functional.silu(x * 2.0 @ w.t()) / 2.0

    monkeypatch.setattr(found, "is_nvidia", lambda device: True)
    fast = ladder.compile(Across())
    with torch.no_grad():
        for depth in (32, 48, 64):
            x, w = torch.randn(16, depth).half(), torch.randn(64, depth).half()
            wanted = Across()(x.double(), w.double())
            require_right("plan", fast(x, w).numpy(), wanted.numpy())
    assert "found" not in fast.plan()


def test_weights_with_arrays_that_no_block_graph_reads_stay_as_they_are(
    slow_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales of whole rows are an array that belongs to the weight, and follows the product."""
    model = ladder.quantize_(model_of(NormProduct, 128, 128), "int8")
    prepared = prepared_for_h200(model, torch.randn(1, 128).half(), monkeypatch)
    assert "found" not in [part.kind for part in prepared.parts]


def test_values_that_others_read_are_kept(slow_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The normed rows are a result too: no graph of one result has them."""

    class Both(NormProduct):
        def forward(self, x: torch.Tensor) -> Any:
            normed = self.norm(x)
            return normed, self.product(normed)

    prepared = prepared_for_h200(model_of(Both, 128, 128), torch.randn(1, 128).half(), monkeypatch)
    assert "found" not in [part.kind for part in prepared.parts]


@pytest.mark.parametrize("weight", ["", "int4"])
def test_plans_run_saved_and_loaded_ones_too(
    weight: str, slow_parts: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On this CPU, where found graphs have kernels but are not offered."""
    monkeypatch.setattr(found, "is_nvidia", lambda device: True)
    model, x = model_of(NormProduct, 128, 96, weight), torch.randn(1, 3, 128).half()
    fast = ladder.compile(model)
    wide = copy.deepcopy(model).float()
    with torch.no_grad():
        columns = x.transpose(1, 2).contiguous().transpose(1, 2)
        _, y, _, turned = fast(x), fast(x), fast(columns), fast(columns)
        assert "ladder found" in fast.plan()
        wanted = np.asarray(wide(x.float()), np.float64)
        for result in (y, turned):  # columns are another plan, which rounds elsewhere
            require_right("plan", result.numpy(), wanted)
        loaded = ladder.load(fast.export(tmp_path / "model.ladder", x))
        assert torch.equal(loaded(x), y)


def test_a_search_finds_what_is_not_shipped_and_keeps_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Scaled(NormProduct):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.product(x * self.norm.weight)  # type: ignore[no-any-return]

    monkeypatch.setattr(found, "seconds_of", lambda part, device: 1.0)
    monkeypatch.setattr(found, "entries", dict)
    model, x = model_of(Scaled, 128, 128), torch.randn(1, 128).half()
    with knobs.override(cache_dir=tmp_path):
        for search in (0.0, 60.0, 0.0):
            prepared = prepared_for_h200(model, x, monkeypatch, search)
            kinds = [part.kind for part in prepared.parts if part.kind != "view"]
            assert (kinds == ["found"]) == (search > 0 or (tmp_path / "superopt").is_dir())
    assert "by a search" in next(part.reason for part in prepared.parts if part.kind == "found")
