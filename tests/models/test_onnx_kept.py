"""What `benchmarks.onnx_kept` says of models that are written and read again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from benchmarks.onnx_kept import WAYS, kept, same


def saved(path: Path, activation: str) -> Path:
    """Write a model of a product and an activation, of any number of rows."""
    weight = numpy_helper.from_array(np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node(activation, ["a"], ["y"])]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "product", [given], [result], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path


def test_a_model_is_the_same_in_every_way(tmp_path: Path) -> None:
    given = {"x": np.ones((3, 8), np.float32)}
    assert kept(saved(tmp_path / "m.onnx", "Relu"), given, WAYS) == dict.fromkeys(WAYS, "equal")
    assert "no model" in kept(saved(tmp_path / "n.onnx", "NonZero0"), given, WAYS)


def test_results_are_the_same_bit_for_bit() -> None:
    x = torch.tensor([0.0, torch.nan])
    assert same(x, x.clone())
    assert not same(x, torch.tensor([-0.0, torch.nan]))
    assert not same(x, (x, x))
    assert not same(x, x.double())


def staged(path: Path, by_values: bool) -> Path:
    """Write a model of several stages: a value counts rows, or calls alone show what broadcasts."""
    end = "k" if by_values else "all"
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        cuts (float[n, 4] x, float[m, 4] z, int64[1] k) => (float[p, 4] y)
        <int64[1] zero = {{0}}, int64[1] two = {{2}}, int64[1] all = {{9223372036854775807}}> {{
            r = Relu(x)  s = Slice(z, zero, {end}, zero, two)  y = Add(r, s)
        }}""")
    onnx.save(model, path)
    return path


def test_a_model_that_is_one_plan_for_its_shapes_is_written_for_these(tmp_path: Path) -> None:
    given = {"x": np.ones((3, 4), np.float32), "z": np.ones((6, 4), np.float32), "k": np.array([6])}
    ways = ("export", "to_onnx")
    assert kept(staged(tmp_path / "v.onnx", True), given, ways) == dict.fromkeys(ways, "stages")
    found = kept(staged(tmp_path / "s.onnx", False), given, ways)
    assert found == dict.fromkeys(ways, "equal, for these shapes")
