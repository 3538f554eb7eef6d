"""ONNX models: imported, run on the CPU, written with tTypes and read back; and what is wrong with files."""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path

import model_zoo as zoo
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from test_models import BOUNDS, IDS, MASK, MODELS, PHOTO, built, error
from torch import Tensor, nn

import ladder
from ladder.frontend import onnx_export
from ladder.runtime.model.program import ImportRefused

BOUND = BOUNDS[torch.float32]


pytestmark = pytest.mark.usefixtures("one_schedule")


def exported(
    model: nn.Module, arguments: tuple[Tensor, ...], opset: int = 17, **options: object
) -> onnx.ModelProto:
    """Return a model as torch's exporter that needs no further package writes it."""
    file = io.BytesIO()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, arguments, file, dynamo=False, opset_version=opset, **options)
    return onnx.load_from_string(file.getvalue())


def product(rows: int = 3, k: int = 64, n: int = 32, **annotations: object) -> onnx.ModelProto:
    """Return a model of one product by a stored weight, and a function of one number."""
    weight = np.random.default_rng(0).standard_normal((k, n)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], **annotations),
        helper.make_node("Relu", ["p"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, n])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


@pytest.mark.parametrize("name", ["vit", "shufflenet", "conformer", "gpt2"])
def test_models_of_torchs_exporter(name: str, tmp_path: Path) -> None:
    """The result is the model's, and what is written with tTypes is the same graph."""
    make, arguments = MODELS[name]
    model = built(make)
    fast = ladder.compile(exported(model, arguments))
    with torch.no_grad():
        assert error(fast(*arguments), model(*arguments)) < BOUND
    again = ladder.compile(fast.to_onnx(tmp_path / "again.onnx"))
    assert again.graph == fast.graph
    assert error(again(*arguments), fast(*arguments)) == 0


def test_the_standards_own_reference() -> None:
    model = exported(built(lambda: zoo.Bert(layers=1)), (IDS, MASK), input_names=["ids", "mask"])
    expected = ReferenceEvaluator(model).run(None, {"ids": IDS.numpy(), "mask": MASK.numpy()})
    found = ladder.compile(model)(mask=MASK, ids=IDS)
    assert error(found, [torch.from_numpy(value) for value in expected]) < BOUND


@pytest.mark.parametrize("opset", [13])
def test_opsets(opset: int) -> None:
    make, arguments = MODELS["resnet"]
    model = built(make)
    with torch.no_grad():
        assert error(ladder.compile(exported(model, arguments, opset))(*arguments), model(*arguments)) < BOUND


SYMBOLIC = {
    "bert": (lambda: zoo.Bert(layers=1), (IDS, MASK), {"ids": ("batch", "seq"), "mask": ("batch", "seq")}),
    "gpt2": (zoo.GPT2, (IDS,), {"ids": ("batch", "seq")}),
    "resnet": (lambda: zoo.ResNet((1,), 8, 10), (PHOTO,), {"photo": ("batch",)}),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_sizes(name: str) -> None:
    """One plan for several batches and lengths."""
    make, arguments, names = SYMBOLIC[name]
    model = built(make)
    axes = {name: dict(enumerate(sizes)) for name, sizes in names.items()}
    fast = ladder.compile(exported(model, arguments, dynamic_axes=axes, input_names=list(axes)))
    fewer = [x[:1, :5] if x.ndim == 2 else x[:1] for x in arguments]
    more = [x.repeat(3, *[1] * (x.ndim - 1)) for x in arguments]
    with torch.no_grad():
        for given in (arguments, fewer, more):
            assert error(fast(*given), model(*given)) < BOUND
    if name == "bert":
        with pytest.raises(ladder.ShapeError, match="batch=2"):
            fast(IDS, MASK[:1])


@pytest.mark.parametrize(
    ("annotations", "bound"),
    [
        ({"weight_ttype": "int4", "group_size": 32}, 0.2),
        ({"weight_ttype": "nf4", "group_size": 32}, 0.2),
        ({"weight_ttype": "int8"}, 0.02),
        ({"weight_ttype": "mxfp4"}, 0.3),
        ({"weight_ttype": "int8", "activation_ttype": "int8"}, 0.05),
        ({"weight_ttype": "int4", "activation_ttype": "int8"}, 0.2),
    ],
)
def test_annotated_weights(annotations: dict[str, object], bound: float, tmp_path: Path) -> None:
    """An attribute names the weight's tType; the product becomes one kernel and keeps its type in files."""
    torch.manual_seed(0)
    x = torch.randn(3, 64)
    (expected,) = ReferenceEvaluator(product()).run(None, {"x": x.numpy()})
    fast = ladder.compile(product(**annotations))
    assert 1e-4 < error(fast(x), torch.from_numpy(expected)) < bound
    assert [step.part.kind for step in fast.on("cpu").steps.steps].count("gemm") == 1
    assert "relu" in fast.plan()
    again = ladder.compile(fast.to_onnx(tmp_path / "packed.onnx"))
    assert again.graph == fast.graph
    assert torch.equal(again(x), fast(x))
    assert (tmp_path / "packed.onnx").stat().st_size < 64 * 32 * 4


def test_tensors_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, x = ladder.compile(product()), torch.randn(3, 64)
    path = fast.to_onnx(tmp_path / "model.onnx", external=True)
    assert path.stat().st_size < 4096 < Path(f"{path}.data").stat().st_size
    assert torch.equal(ladder.compile(path)(x), fast(x))
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    with monkeypatch.context() as patched:
        patched.setattr(onnx_export, "_apart", lambda *_: os.write(os.open("/dev/full", os.O_WRONLY), b"0"))
        with pytest.raises(ladder.ArtifactError, match="No space left"):
            fast.to_onnx(path, external=True)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before
    Path(f"{path}.data").write_bytes(b"\0" * 16)
    with pytest.raises(ladder.ArtifactError, match=r"model\.onnx\.data"):
        ladder.compile(path)
    Path(f"{path}.data").unlink()
    with pytest.raises(ladder.ArtifactError, match="external data"):
        ladder.compile(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with pytest.raises(ladder.ArtifactError, match="does not exist"):
        ladder.compile(path)
    data = product().SerializeToString()
    for size in (0, 4, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ladder.ArtifactError, match="truncated or no ONNX model"):
            ladder.compile(str(path))
    path.write_bytes(b"no model at all" * 9)
    with pytest.raises(ladder.ArtifactError, match="truncated or no ONNX model"):
        ladder.compile(path)


def test_versions_that_are_not_known() -> None:
    new = product()
    new.opset_import[0].version = 1000
    with pytest.raises(ImportRefused, match="opset 1000, opsets 1 to"):
        ladder.compile(new)
    ours = product()
    ours.opset_import.append(helper.make_opsetid("ladder", 2))
    with pytest.raises(ImportRefused, match="version 2 of Ladder"):
        ladder.compile(ours)
    other = product()
    other.graph.node[1].domain = "com.example"
    with pytest.raises(ImportRefused, match=r"com\.example"):
        ladder.compile(other)


def test_calls_that_do_not_fit() -> None:
    fast, x = ladder.compile(product()), torch.randn(3, 64)
    with pytest.raises(ladder.ShapeError, match=r"\[3, 64\], got \[2, 64\]"):
        fast(x[:2])
    with pytest.raises(ladder.DTypeError, match="float32"):
        fast(x.double())
    with pytest.raises(ladder.UnknownNameError, match="unknown input 'y'"):
        fast(y=x)
    with pytest.raises(ladder.ShapeError, match="also takes x"):
        fast()
    with pytest.raises(ImportRefused, match="int44"):
        ladder.compile(product(weight_ttype="int44"))


def test_functions_of_the_file() -> None:
    """Local functions, as newer exporters write them, are taken apart."""
    text = """<ir_version: 10, opset_import: ["" : 18, "mine" : 1]>
    agraph (float[3, 4] x) => (float[3, 4] y) { y = mine.twice(x) }
    <domain: "mine", opset_import: ["" : 18]> twice (a) => (b) { b = Add(a, a) }"""
    x = torch.randn(3, 4)
    assert torch.equal(ladder.compile(onnx.parser.parse_model(text))(x), x + x)
