"""ONNX models that break the standard's rules or our limits are refused before anything is computed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import ladder
from ladder.api.problem import gemm_for
from ladder.frontend.onnx_check import check_model
from ladder.frontend.onnx_import import import_onnx

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def model_of(*nodes: Any, opset: int = 17, shape: Any = (2, 4), **stored: Any) -> Any:
    """Return a model of one input ``x`` whose result is ``y``."""
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", FLOAT, shape)],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def node(operator: str, inputs: list[str], outputs: str = "y", **given: Any) -> Any:
    return helper.make_node(operator, inputs, outputs.split(), **given)


REFUSED: dict[str, tuple[Any, str]] = {
    "attributes of an older version": (model_of(node("Clip", ["x"], min=0.0, max=1.0)), "attribute.* Clip"),
    "axes as an attribute": (model_of(node("Unsqueeze", ["x"], axes=[0])), "Unsqueeze"),
    "split as an attribute": (model_of(node("Split", ["x"], "y z", axis=1, split=[1, 3])), "split"),
    "parts that do not add up": (model_of(node("Split", ["x", "s"], "y z", axis=1), s=[1, 1]), "Split"),
    "outputs that do not divide": (model_of(node("Split", ["x"], "y z q", axis=1)), "Split"),
    "an axis that is no 1": (model_of(node("Squeeze", ["x", "a"]), a=[1]), "Squeeze"),
    "an axis out of range": (model_of(node("Softmax", ["x"], axis=7)), "Softmax"),
    "types that differ": (model_of(node("Add", ["x", "w"]), w=[1, 2, 3, 4]), "Add"),
    "too few operands": (model_of(node("MatMul", ["x"])), "MatMul"),
    "a name given twice": (model_of(node("Relu", ["x"]), node("Neg", ["x"])), "'?y'?"),
    "an unknown version": (model_of(node("Relu", ["x"]), opset=40), "opset 40"),
    "an index out of range": (model_of(node("Gather", ["x", "i"]), i=[5]), "outside of axis 0 of 2"),
    "no group": (
        model_of(node("Conv", ["x", "w"], group=0), shape=(1, 1, 4), w=np.ones((1, 1, 3), np.float32)),
        "0 groups",
    ),
    "a huge input": (model_of(node("Relu", ["x"]), shape=(1 << 40, 1 << 20)), "elements"),
    "extents below 0": (model_of(node("Relu", ["x"]), shape=(-3, 2)), r"\[-3, 2\]"),
    "a huge constant": (
        model_of(node("ConstantOfShape", ["s"], "c"), node("Add", ["x", "c"]), s=[1 << 40, 1 << 20, 2, 4]),
        "elements",
    ),
    "a huge expansion": (
        model_of(
            node("Tile", ["w", "r"], "c"),
            node("Add", ["x", "c"]),
            w=np.ones((1, 1, 1), np.float32),
            r=[1 << 40, 1, 1],
        ),
        "elements",
    ),
    "a huge range": (
        model_of(node("Range", ["a", "b", "d"], "c"), node("Gather", ["x", "c"]), a=0, b=1 << 40, d=1),
        "elements",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_breaks_a_rule_is_refused(case: str) -> None:
    model, message = REFUSED[case]
    with pytest.raises(ladder.LadderError, match=message):
        import_onnx(model, gemm_for)


def test_too_many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    from ladder.frontend import onnx_check

    monkeypatch.setattr(onnx_check, "MOST_NODES", 1)
    with pytest.raises(ladder.LadderError, match="2 nodes, at most 1"):
        import_onnx(model_of(node("Relu", ["x"], "r"), node("Neg", ["r"])), gemm_for)


def external(folder: Path, **stated: str) -> Path:
    """Write a model whose weight lies where ``stated`` says."""
    model = model_of(node("Mul", ["x", "w"]), w=np.ones(4, np.float32))
    (weight,) = model.graph.initializer
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in stated.items():
        entry = weight.external_data.add()
        entry.key, entry.value = key, value
    onnx.save(model, str(folder / "m.onnx"))
    return folder / "m.onnx"


def test_functions_that_stand_for_too_many_nodes() -> None:
    """Each calls the next one twice: they are counted before any takes its call's place."""
    own = '<domain: "l", opset_import: ["" : 21, "l" : 1]>'
    bodies = (f"f{n} (a) => (b) {{ c = l.f{n + 1} (a) b = l.f{n + 1} (c) }}" for n in range(40))
    calls = " ".join(f"{own} {body}" for body in bodies)
    last = '<domain: "l", opset_import: ["" : 21]> f40 (a) => (b) { b = Relu (a) }'
    head = '<ir_version: 10, opset_import: ["" : 21, "l" : 1]> g (float[3, 4] x) => (y) { y = l.f0 (x) }'
    with pytest.raises(ladder.LadderError, match="131072 nodes with those of its functions"):
        ladder.compile(onnx.parser.parse_model(f"{head} {calls} {last}"))


def test_external_data_is_read_from_the_models_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in (folder / "w.data", tmp_path / "secret"):
        name.write_bytes(np.arange(8, dtype=np.float32).tobytes())
    (folder / "link").symlink_to(tmp_path / "secret")
    assert import_onnx(external(folder, location="w.data", offset="16", length="16"), gemm_for)
    for place in ("../secret", str(tmp_path / "secret"), "link", "", "../model/../secret"):
        with pytest.raises(ladder.ArtifactError, match="in the model's folder"):
            import_onnx(external(folder, location=place), gemm_for)
    for stated in ({"offset": "20"}, {"length": "12"}, {"offset": "-4"}, {"offset": "x"}):
        with pytest.raises(ladder.ArtifactError, match="'w' cannot be read"):
            import_onnx(external(folder, location="w.data", **stated), gemm_for)
    os.mkfifo(folder / "pipe")
    with pytest.raises(ladder.ArtifactError, match="pipe is no file"):
        import_onnx(external(folder, location="pipe"), gemm_for)
    with pytest.raises(ladder.ArtifactError, match="is no file"):
        import_onnx(folder, gemm_for)


def test_annotated_products_pass_the_check() -> None:
    model = model_of(node("MatMul", ["x", "w"], weight_ttype="int8"), w=np.ones((4, 8), np.float32))
    assert len(import_onnx(model, gemm_for).weights) == 1


def test_long_vectors_are_not_followed() -> None:
    """ONNX's rules that follow values take memory for each element of a sum: a refusal comes before that."""
    text = """<ir_version: 9, opset_import: ["" : 18]> agraph (float[1] x, float[{n}] t) => (float[{n}] y)
    {{ y = Add(x, t) }}"""
    with pytest.raises(ladder.LadderError, match="has extents"):
        ladder.compile(onnx.parser.parse_model(text.format(n=1 << 40)))
    model = onnx.parser.parse_model(text.format(n=1 << 21))
    with mock.patch.object(
        onnx.shape_inference, "infer_shapes", wraps=onnx.shape_inference.infer_shapes
    ) as infer:
        check_model(model, "the model")
    assert not any(call.kwargs.get("data_prop") for call in infer.call_args_list)


def test_huge_pads_of_open_sizes_are_refused() -> None:
    """What is asked of memory is known where the size itself is not."""
    weight = np.ones((1, 2, 3), np.float32)
    conv = node("Conv", ["x", "w"], pads=[0, 1 << 50])
    with pytest.raises(ladder.LadderError, match=r"has extents .* more than \d+ elements"):
        ladder.compile(model_of(conv, shape=(1, 2, "N"), w=weight))


def test_a_mode_that_there_is_not_is_one_error() -> None:
    model = model_of(
        node("GridSample", ["x", "g"], mode="nonsense"),
        shape=(1, 2, 3, 4),
        g=np.zeros((1, 3, 3, 2), np.float32),
    )
    with pytest.raises(ladder.LadderError, match=r"GridSample.*nonsense"):
        ladder.compile(model)(torch.zeros(1, 2, 3, 4))


def test_types_that_the_body_of_a_rule_refuses() -> None:
    """The body of MeanVarianceNormalization adds a float32 number to inputs of any type."""
    model = model_of(node("MeanVarianceNormalization", ["x"], axes=[1]))
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.elem_type = TensorProto.FLOAT16
    x = torch.tensor([[1.0, 2.0, 3.0, 6.0], [-2.0, 0.0, 0.0, 2.0]])
    wanted = (x - x.mean(1, keepdim=True)) / x.var(1, correction=0, keepdim=True).sqrt()
    found = ladder.compile(model)(x.half())
    assert found.dtype == torch.float16
    assert torch.allclose(found.float(), wanted, atol=2e-3)
