"""Whole models as files: loaded where there is neither their source nor a compiler; and damaged files."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import model_zoo as zoo
import pytest
import torch
from test_models import IDS, MASK, PHOTO, built, error
from torch import Tensor, nn

import ladder
from ladder.ir.build import GraphBuilder
from ladder.ir.graph import Graph
from ladder.partition.subgraphs import Subgraph
from ladder.runtime import archive
from ladder.runtime.model import saved
from ladder.runtime.model.saved import save_model
from tile_types.errors import ArtifactError

pytestmark = pytest.mark.usefixtures("one_schedule")

ROOT = Path(ladder.__file__).parents[1]


LOADED = """
    import sys

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("tvm", "model_zoo", "onnx"):
                raise ImportError(f"{name} is blocked")

    sys.meta_path.insert(0, Blocker())
    import torch, ladder
    model = ladder.load(sys.argv[1])
    torch.save(model(*torch.load(sys.argv[2])), sys.argv[3])
    with open("/proc/self/maps") as maps:
        assert "libtvm_compiler" not in maps.read()
"""


def elsewhere(path: Path, arguments: tuple[Tensor, ...], number: int = 0) -> Callable[[], Any]:
    """Start a process without compiler, cache and source; returns what waits for its result."""
    given, result = path.parent / f"in{number}.pt", path.parent / f"out{number}.pt"
    torch.save(arguments, given)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LOADED), *map(str, (path, given, result))],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PATH": "/nonexistent",
            "LADDER_CACHE_DIR": str(path.parent / f"cache{number}"),
        },
        stderr=subprocess.PIPE,
        text=True,
    )

    def wait() -> Any:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        return torch.load(result)

    return wait


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "llama int4": (lambda: ladder.quantize(built(lambda: zoo.Llama(layers=1)), group_size=32), (IDS,)),
    "bert int8 x int8": (
        lambda: ladder.quantize(built(lambda: zoo.Bert(layers=1)), weight="int8", activation="int8"),
        (IDS, MASK),
    ),
    "resnet": (lambda: built(lambda: zoo.ResNet((1,), 8, 10)), (PHOTO[..., :32, :32],)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_run_without_source_and_compiler(name: str, tmp_path: Path) -> None:
    make, arguments = MODELS[name]
    model = make()
    with torch.no_grad():
        expected = model(*arguments)
        path = ladder.compile(model).export(tmp_path / "model.ladder", *arguments)
        waiting = [elsewhere(path, arguments, number) for number in range(2 if name == "resnet" else 1)]
        assert all(error(wait(), expected) < 1e-5 for wait in waiting)  # two processes at once
        loaded = ladder.load(path)
        assert error(loaded(*arguments), expected) < 1e-5
        assert "torch.embedding" in loaded.plan() or name == "resnet"
        weights = sum(parameter.nbytes for parameter in model.parameters())
        assert name == "resnet" or loaded.nbytes < 1.2 * weights + sum(b.nbytes for b in model.buffers())


class Step(nn.Module):
    """A model with state, whose arguments and results are nested."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, parts: dict[str, Tensor], scale: float = 1.0) -> tuple[Tensor, dict[str, object]]:
        self.total.add_(parts["x"].sum(0))
        return self.total * scale, {"mean": [parts["x"].mean(0), parts["y"]], "name": "step"}


def test_state_and_structure(tmp_path: Path) -> None:
    model, x, y = Step(), torch.randn(3, 4), torch.randn(2)
    with torch.no_grad():
        path = ladder.compile(model).export(tmp_path / "step.ladder", {"x": x, "y": y}, scale=2.0)
        assert torch.equal(model.total, torch.zeros(4))
        loaded = ladder.load(path)
        for _ in range(2):
            expected = model({"x": x, "y": y}, scale=2.0)
            found = loaded(parts={"x": x, "y": y}, scale=2.0)
            assert found[1]["name"] == "step"
            assert found[1]["mean"][1] is y
            assert torch.allclose(found[0], expected[0])
            assert torch.allclose(found[1]["mean"][0], expected[1]["mean"][0])
    with pytest.raises(ladder.ShapeError, match=r"scale must be 2\.0"):
        loaded({"x": x, "y": y}, 3.0)
    with pytest.raises(ladder.ShapeError, match=r"parts must be a dict of \['x', 'y'\]"):
        loaded({"x": x}, 2.0)
    with pytest.raises(ladder.ShapeError, match=r"\[3, 4\], got \[2, 4\]"):
        loaded({"x": x[:2], "y": y}, 2.0)
    with pytest.raises(ladder.ShapeError, match="no state"):
        ladder.compile(model).to_onnx(tmp_path / "step.onnx", {"x": x, "y": y}, scale=2.0)


def test_copies_of_a_loaded_model_have_state_of_their_own(tmp_path: Path) -> None:
    x, y = torch.ones(3, 4), torch.randn(2)
    with torch.no_grad():
        loaded = ladder.load(ladder.compile(Step()).export(tmp_path / "step.ladder", {"x": x, "y": y}))
        assert loaded({"x": x, "y": y})[0].tolist() == [3.0] * 4
        other, same = copy.deepcopy(loaded), copy.copy(loaded)
        assert other({"x": x, "y": y})[0].tolist() == [6.0] * 4
        assert same({"x": x, "y": y})[0].tolist() == [6.0] * 4
        assert loaded({"x": x, "y": y})[0].tolist() == [9.0] * 4
    with pytest.raises(ladder.DTypeError, match="keep its file"):
        pickle.dumps(loaded)
    with pytest.raises(ladder.DTypeError, match=r"sparse_coo: give its to_dense"):
        loaded({"x": x.to_sparse(), "y": y})


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64, bias=False)
            self.second = nn.Linear(64, 64, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    torch.manual_seed(0)
    model, x = Tied(), torch.randn(2, 64)
    with torch.no_grad():
        loaded = ladder.load(ladder.compile(model).export(tmp_path / "tied.ladder", x))
        assert error(loaded(x), model(x)) < 1e-5
    assert loaded.nbytes == 64 * 64 * 4


def test_what_a_model_holds_is_returned_though_nothing_reads_it(tmp_path: Path) -> None:
    """As a quantizer of vectors does, whose loss is 0 unless it is trained."""

    class Quantizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Linear(4, 4)
            self.register_buffer("zero", torch.tensor(0.0), persistent=False)

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"y": self.table(x), "losses": [self.zero, self.zero], "bias": self.table.bias}

    class Elsewhere(Quantizer):
        def forward(self, x: Tensor) -> Any:
            return self.table(x), constant

    torch.manual_seed(0)
    model, constant, x = Quantizer(), torch.ones(2), torch.randn(2, 4)
    with torch.no_grad():
        found = ladder.load(ladder.compile(model).export(tmp_path / "a.ladder", x))(x + 1)
        assert error(found["y"], model(x + 1)["y"]) < 1e-5
        assert found["losses"] == [0, 0]
        assert torch.equal(found["bias"], model.table.bias)
        with pytest.raises(ladder.ShapeError, match="argument or a parameter"):
            ladder.compile(model).to_onnx(tmp_path / "a.onnx", x)
        with pytest.raises(ladder.ShapeError, match=r"result\[1\] is a tensor that the graph"):
            ladder.compile(Elsewhere()).export(tmp_path / "a.ladder", x)


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    def prints(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * 2
        return x.numpy()

    def many(*tensors: Tensor) -> Tensor:
        return tensors[0] + tensors[1]

    x = torch.ones(3)
    with torch.no_grad():
        with pytest.raises(ladder.LadderError, match="one graph"):
            ladder.compile(prints).export(tmp_path / "a.ladder", x)
        with pytest.raises(ladder.ShapeError, match="any number of arguments"):
            ladder.compile(many).export(tmp_path / "a.ladder", x, x + 1)
        with pytest.raises(ladder.ShapeError, match="also another argument"):
            ladder.compile(lambda a, b: a + b).export(tmp_path / "a.ladder", x, x)
        with pytest.raises(ladder.ShapeError, match="does not name its parameters"):
            ladder.compile(torch.add).export(tmp_path / "a.ladder", x, x + 1)
        with pytest.raises(TypeError, match=r"'b': .* arguments of an example call, \(a, b\)"):
            ladder.compile(lambda a, b: a + b).export(tmp_path / "a.ladder", x)
        fast = ladder.compile(torch.nn.Identity())
        for write in (fast.export, fast.to_onnx):
            with pytest.raises(TypeError, match="must be a path, got Tensor"):
                write(x, tmp_path / "a.ladder")  # the wrong order
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "small.ladder"
    with torch.no_grad():
        return ladder.compile(lambda x: (x * 2).softmax(-1)).export(path, torch.randn(3, 8))


def test_damaged_files(small: Path, tmp_path: Path) -> None:
    data, path = small.read_bytes(), tmp_path / "broken.ladder"
    for size in (0, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ladder.ArtifactError, match="truncated or no Ladder artefact"):
            ladder.load(path)
    at = data.index(b"\x7fELF") + 4096
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(ladder.ArtifactError, match=r"\.so does not match"):
        ladder.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda/sm_90a", "family": "cuda"}, r"is for cuda/sm_90a; this machine has"),
        ({"features": ["avx9"]}, "lacks avx9"),
        ({"tvm": "0.12.0"}, r"exported with tvm 0\.12\.0"),
        ({"format": 9}, "has format 9"),
        ({"parts": {}}, r"manifest\.json does not fit this version .*manifest\.parts is"),
        ({"parts": []}, "does not fit this version"),
        ({"graph": "kernel f { return }"}, "does not fit this version"),
        ({"bindings": {"x": 7}}, "does not fit this version"),
        ({"results": [3]}, "goes beyond"),
        ({"parameters": {"x": {"tensor": True}}}, "does not fit this version"),
        ({"returns": {"list": [{"list": []}], "tuple": []}}, "does not fit this version"),
    ],
)
def test_files_for_others(small: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    manifest, members = archive.read(small)
    content = {name: value for name, value in manifest.items() if name not in ("signed", "members")}
    path = archive.write(tmp_path / "other.ladder", content | changes, members)
    if changes.get("family") == "cuda" and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(ladder.ArtifactError, match=message):
        ladder.load(path)


def test_onnx_models_with_symbolic_sizes(tmp_path: Path) -> None:
    import onnx

    text = """<ir_version: 10, opset_import: ["" : 18]>
    agraph (float[batch, 8] x) => (float[batch, 8] y) { a = Exp(x)  b = Softmax(a)  y = Add(b, x) }"""
    model = ladder.compile(onnx.parser.parse_model(text))
    loaded = ladder.load(model.export(tmp_path / "model.ladder"))
    for count in (1, 3):
        x = torch.randn(count, 8)
        assert error(loaded(x=x), x.exp().softmax(-1) + x) < 1e-6
    with pytest.raises(ladder.ArtifactError, match="copy that file"):
        save_model(loaded, tmp_path / "again.ladder")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bindings", {"x": 2}),
        ("bindings", {"x": -1}),
        ("packs", {"w": [0, 2]}),
        ("sizes", {"n": (2, 0)}),
        ("results", [1]),
        ("updates", [(2, 0)]),
        ("updates", [(0, 1)]),
        ("returns", {"tensor": 3}),
    ],
)
def test_positions_are_those_of_tensors(field: str, value: Any) -> None:
    """Of a model that takes one tensor, keeps one and has one result."""
    manifest: dict[str, Any] = {
        "parameters": {"x": {"tensor": 0}}, "returns": {"tensor": 0}, "bindings": {"x": 0},
        "packs": {"w": [1]}, "sizes": {}, "results": [0], "updates": [],
    }  # fmt: skip
    graph = SimpleNamespace(inputs=[SimpleNamespace(name="x"), SimpleNamespace(name="w")])
    plan, stored = SimpleNamespace(steps=[], outputs=["y"]), [torch.ones(1)]
    saved._check_positions(manifest, graph, plan, stored)
    with pytest.raises(ArtifactError, match=field):
        saved._check_positions({**manifest, field: value}, graph, plan, stored)


def test_parts_fit_the_graph() -> None:
    """Types and shapes of a part's ends are those of the values that it stands for."""

    def chain(name: str, ttype: str, shape: tuple[int, ...]) -> Graph:
        g = GraphBuilder(name)
        return g.finish(g.add("neg", g.input("x", ttype, shape)))

    whole = chain("whole", "float32", (4, 6))
    for inner, fits in (
        (("float32", (4, 6)), True),
        (("float32", (6, 4)), False),
        (("float16", (4, 6)), False),
    ):
        part = Subgraph("chain", chain("part", *inner), ("x",), whole.outputs)
        if fits:
            saved._check_part(whole, part, {"x"}, "part")
            continue
        with pytest.raises(ArtifactError, match="the graph has"):
            saved._check_part(whole, part, {"x"}, "part")


class Reading(nn.Module):
    """Reads numbers of what `of` gives."""

    def __init__(self, of: Callable[..., Any]) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor([3.0, 1.0]))
        self.of = of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.of(self, x)


INPUTS: dict[str, Callable[..., Any]] = {
    "item": lambda model, x: x.sum().item(),
    "int": lambda model, x: int(x[0, 0]) + 1,
    "branch": lambda model, x: 2 if float(x.sum()) > 0 else 3,
    "list": lambda model, x: x.tolist()[0][0],
    "beside a buffer": lambda model, x: (x[0, 0] * model.steps).max().item(),
}


@pytest.mark.parametrize("name", INPUTS)
def test_no_file_holds_numbers_that_were_read_of_an_input(name: str, tmp_path: Path) -> None:
    """The file gave what the example's numbers give, for every input."""
    model, x = ladder.compile(Reading(INPUTS[name])), torch.ones(2, 3)
    for write in (model.export, model.to_onnx):
        with pytest.raises(ladder.LadderError, match="reads numbers of its inputs"):
            write(tmp_path / "model", x)


def test_numbers_of_buffers_are_in_the_file(tmp_path: Path) -> None:
    model = Reading(lambda model, x: model.steps.tolist()[0] + model.steps.sum().item())
    path = ladder.compile(model).export(tmp_path / "model.ladder", torch.ones(2, 3))
    x = torch.randn(2, 3)
    torch.testing.assert_close(ladder.load(path)(x), model(x))
