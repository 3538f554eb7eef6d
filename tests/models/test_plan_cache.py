"""Models that were compiled before: a new compiler imports nothing, and nothing stale or broken is used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import model_zoo as zoo
import pytest
import torch
from torch import Tensor, nn

import ladder
from ladder import knobs
from ladder.api import plan_cache
from ladder.frontend.fx_facts import facts_of
from ladder.runtime import compile as runtime_compile
from ladder.runtime.cache import seal
from ladder.runtime.model import build, prepared
from ladder.runtime.model.prepared import Prepared, from_data, to_data
from tile_types.errors import LadderError


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("kept-cache")
    with knobs.override(cache_dir=folder):
        yield folder


class Counted:
    """Counts the calls of functions that stay as they are."""

    def __init__(self, patch: pytest.MonkeyPatch, *places: tuple[Any, str]) -> None:
        self.calls: dict[str, int] = {}
        for owner, name in places:
            patch.setattr(owner, name, self.counting(name, getattr(owner, name)))

    def counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        self.calls[name] = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return function(*args, **kwargs)

        return counted


STAGES = (
    *((plan_cache, "import_fx"), (prepared, "simplify"), (prepared, "partition")),
    *((build, "request_for"), (runtime_compile, "_choose")),
)


class Block(nn.Module):
    """A chain with a reduction, a product, and a chain that joins them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = zoo.RMSNorm(64), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def blocks(count: int) -> nn.Module:
    """Return equal layers, quantized."""
    torch.manual_seed(0)
    return ladder.quantize_(nn.Sequential(*(Block() for _ in range(count))).eval(), "int8")


def result(fast: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        fast(x)
        found = fast(x)
    assert not fast.refused
    assert isinstance(found, Tensor)
    return found


def test_equal_layers_cost_one_schedule_each_and_a_second_start_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts are those of calls: whatever the number of layers, and none but look-ups the second time."""
    seen, x = {}, torch.randn(2, 64)
    for layers in (2, 5):
        model = blocks(layers)
        with monkeypatch.context() as patch:
            cold = Counted(patch, *STAGES)
            first = ladder.compile(model)
            expected = result(first, x)
        runtime_compile.forget()
        with monkeypatch.context() as patch:
            warm = Counted(patch, *STAGES)
            second = ladder.compile(model)
            assert torch.equal(result(second, x), expected)
        assert second.plan() == first.plan()
        assert warm.calls == {**dict.fromkeys(cold.calls, 0), "request_for": cold.calls["request_for"]}
        seen[layers] = cold.calls, set(first.models[0].kernels)
    (few, kernels), (many, same) = seen[2], seen[5]
    assert kernels == same
    assert few["import_fx"] == few["simplify"] == few["partition"] == few["request_for"] == 1
    assert many == few | {"_choose": 0}  # what the policy chose for the smaller model is in its notes


def note(folder: Path) -> Path:
    (path,) = (folder / "models").iterdir()
    return path


@pytest.mark.parametrize("harm", ["truncated", "changed", "sealed nonsense", "empty"])
def test_what_is_broken_is_made_again(tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x) * x

    x = torch.randn(4, 8)
    with knobs.override(cache_dir=tmp_path):
        expected = result(ladder.compile(function), x)
        path = note(tmp_path)
        whole = path.read_text()
        path.write_text(
            {
                "truncated": whole[: len(whole) // 2],
                "changed": whole.replace("mul", "add"),
                "sealed nonsense": seal({"graph": [1, 2]}),
                "empty": "",
            }[harm]
        )
        caplog.clear()
        assert torch.equal(result(ladder.compile(function), x), expected)
        assert "again" in caplog.text
        assert note(tmp_path).read_text() == whole


CHILD = """
import torch, ladder
x = torch.linspace(-1, 1, 32).reshape(4, 8)
fast = ladder.compile(lambda x: torch.nn.functional.silu(x) * x)
with torch.no_grad():
    fast(x)
    assert torch.allclose(fast(x), torch.nn.functional.silu(x) * x) and not fast.refused
"""


def test_two_processes_at_once(one_cache: Path) -> None:
    exec(CHILD, {})  # the kernel is there then
    shutil.rmtree(one_cache / "models")
    given = {**os.environ, "LADDER_CACHE_DIR": str(one_cache)}
    running = [subprocess.Popen([sys.executable, "-c", CHILD], env=given) for _ in range(2)]
    assert [child.wait() for child in running] == [0, 0]
    assert note(one_cache).is_file()


def traced(function: Callable[..., Any], *examples: Any) -> Any:
    """Return the facts of the graph that capture hands over."""
    got: list[Any] = []

    def backend(module: torch.fx.GraphModule, given: list[Any]) -> Any:
        got.append(facts_of(module, given))
        return module.forward

    with torch.no_grad():
        ladder.compile(function, backend=backend)(*examples)
    (found,) = got
    return found


def test_facts_feel_everything() -> None:
    def scaled(x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(x * 2) + y

    x, y = torch.randn(4, 6), torch.randn(4, 6)
    facts = traced(scaled, x, y)
    assert traced(scaled, x + 1, y + 1) == facts  # values of tensors are no facts
    others = [
        traced(scaled, x.double(), y),
        traced(scaled, x[:2], y[:2]),
        traced(scaled, x.t().contiguous().t(), y),
        traced(scaled, x, x),
        traced(scaled, x, x.view(-1).view(4, 6)),
        traced(scaled, torch.randn(5, 6)[1:], y),
        traced(scaled, nn.Parameter(x, requires_grad=False), y),
        traced(lambda x, y: torch.relu(x * 3) + y, x, y),
        traced(lambda x, y: torch.relu(x * 2.0) + y, x, y),
        traced(lambda x, y: torch.relu(x * True) + y, x, y),
        traced(lambda x, y: torch.tanh(x * 2) + y, x, y),
        traced(lambda x, y: torch.relu(x * 2) - y, x, y),
        traced(lambda x, y: y + torch.relu(x * 2), x, y),
        traced(lambda x, y: (torch.relu(x * 2) + y)[1:], x, y),
        traced(lambda x, y: (torch.relu(x * 2) + y)[..., 1:], x, y),
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        others.append(traced(scaled, x, y))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        others.append(traced(scaled, x, y))
    finally:
        torch.set_default_dtype(before)
    everything = [facts, *others]
    assert None not in everything
    assert all(a != b for at, a in enumerate(everything) for b in everything[:at])


def test_what_has_no_name_elsewhere_is_not_kept() -> None:
    library = torch.library.Library("kept_test", "DEF")  # type: ignore[no-untyped-call]
    library.define("double(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("double", lambda x: x * 2, "CPU")  # type: ignore[no-untyped-call]

    def own(x: Tensor) -> Tensor:
        return x * 2

    x = torch.randn(3)
    held = torch.fx.Graph()
    given = held.placeholder("x")
    held.output(held.call_function(torch.add, (given, held.get_attr("kept"))))
    calling = torch.fx.Graph()
    calling.output(calling.call_function(own, (calling.placeholder("x"),)))
    root = nn.Module()
    root.kept = nn.Parameter(x)
    for module in (torch.fx.GraphModule(root, held), torch.fx.GraphModule(root, calling)):
        assert facts_of(module, [x]) is None
    registered = torch.fx.Graph()
    registered.output(
        registered.call_function(torch.ops.kept_test.double.default, (registered.placeholder("x"),))
    )
    assert facts_of(torch.fx.GraphModule(root, registered), [x]) is None


def test_plans_of_open_sizes_and_with_tensors_of_their_own_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def joined(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            start = torch.tensor([]).reshape(0, 6)
        return torch.cat([start, torch.tanh(x) * y.shape[0], y])

    given = [[torch.randn(rows, 6) for rows in pair] for pair in ((4, 5), (3, 7), (8, 2))]
    with knobs.override(cache_dir=tmp_path):
        for imports in (2, 0):
            fast = ladder.compile(joined)
            with monkeypatch.context() as patch, torch.no_grad():
                counted = Counted(patch, (plan_cache, "import_fx"))
                for pair in given:
                    assert torch.allclose(fast(*pair), joined(*pair), atol=1e-6)
            assert not fast.refused
            assert counted.calls["import_fx"] == imports


def test_facts_feel_symbols() -> None:
    def facts(x: Tensor, **how: Any) -> Any:
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

        mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
        kinds = [DimDynamic.DYNAMIC if axis in how.get("axes", ()) else DimDynamic.STATIC for axis in (0, 1)]
        fake = mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))
        for decided in how.get("decided", ()):
            assert decided(fake)
        return facts_of(torch.fx.symbolic_trace(nn.ReLU()), [fake])

    x = torch.randn(4, 6)
    everything = [
        facts(x),
        facts(nn.Parameter(x)),
        *(facts(x, axes=axes) for axes in ((0,), (1,), (0, 1))),
        facts(x[:3], axes=(0,)),
        facts(x, axes=(0, 1), decided=(lambda y: y.shape[0] < y.shape[1],)),
        facts(x, axes=(0,), decided=(lambda y: y.shape[0] % 2 == 0,)),
    ]
    assert None not in everything
    assert facts(x, axes=(0,)) == everything[2]
    assert all(a != b for at, a in enumerate(everything) for b in everything[:at])


MODELS: dict[str, Any] = {
    "bert": (lambda: zoo.Bert(layers=1), (torch.arange(18).reshape(2, 9) + 1, torch.ones(2, 9).long())),
    "resnet": (lambda: zoo.ResNet((1, 1), 8, 10), (torch.randn(1, 3, 32, 32),)),
    "llama": (zoo.Llama, (torch.arange(18).reshape(2, 9),)),
    "quantized": (lambda: blocks(1), (torch.randn(2, 64),)),
}


@pytest.mark.usefixtures("one_schedule")
@pytest.mark.parametrize("name", MODELS)
def test_models_read_back_equal(name: str) -> None:
    make, arguments = MODELS[name]
    got: list[Prepared] = []

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        got.append(plan_cache.prepared_for(module, examples, torch.device("cpu")))
        return module.forward

    with torch.no_grad():
        ladder.compile(make().eval(), backend=backend)(*arguments)
    (found,) = got
    data = to_data(found)
    assert data is not None
    assert from_data(json.loads(json.dumps(data))) == found
    with pytest.raises((LadderError, LookupError, TypeError, ValueError)):
        from_data({**data, "parts": [{}]})
