"""ONNX models as exporters and optimizers write them, where the standard has it in another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser

import ladder
from benchmarks import onnx_suite
from ladder.frontend.onnx_file import open_onnx, restated
from ladder.runtime.model import build
from ladder.runtime.model.program import ImportRefused
from tile_types.errors import LadderError


@pytest.fixture(autouse=True)
def _without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_kernels", onnx_suite.without_kernels)


def model_of(body: str, versions: str = '"" : 14') -> Any:
    return parser.parse_model(f"<ir_version: 8, opset_import: [{versions}]> {body}")


def first_behind_all(graph: Any) -> None:
    """Move the first node of a graph behind all others."""
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.node]
    del graph.node[:]
    graph.node.extend([*nodes[1:], nodes[0]])


def run(model: Any, *arguments: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = ladder.compile(model)(*arguments)
    return found


X = torch.arange(6.0).reshape(2, 3)


def test_nodes_in_any_order() -> None:
    """Branches too, which read what a later node makes."""
    model = model_of(
        """g (float[2, 3] x, bool c) => (float[2, 3] y) {
            a = Neg(x)
            b = If (c) <then_branch = t () => (float[2, 3] r) { q = Exp(a)  r = Add(q, a) },
                        else_branch = e () => (float[2, 3] s) { s = Abs(a) }>
            y = Add(b, a) }"""
    )
    first_behind_all(model.graph)
    then = next(attribute.g for attribute in model.graph.node[0].attribute if attribute.name == "then_branch")
    first_behind_all(then)
    assert torch.allclose(run(model, X, torch.tensor(True)), torch.exp(-X) - 2 * X)
    assert torch.equal(run(model, X, torch.tensor(False)), torch.zeros(2, 3))


def test_a_ring_of_nodes_is_refused() -> None:
    model = model_of("g (float[2] x) => (float[2] y) { a = Add(x, b)  b = Neg(a)  y = Neg(b) }")
    with pytest.raises(ImportRefused, match="topologically sorted"):
        ladder.compile(model)


def test_a_model_that_keeps_to_the_standard_is_not_copied() -> None:
    model = model_of("g (float[2] x) => (float[2] y) { a = Neg(x)  y = Neg(a) }")
    assert restated(model) is model


def unnamed(model: Any) -> None:
    model.graph.name = ""


def without_ranks(model: Any) -> None:
    model.graph.input[0].type.tensor_type.ClearField("shape")


def in_full(model: Any) -> None:
    model.opset_import[0].domain = "ai.onnx"
    model.graph.node[0].domain = "ai.onnx"


def with_an_idle_node(model: Any) -> None:
    model.graph.node.append(onnx.helper.make_node("Neg", ["x"], []))


def with_wrong_ranks(model: Any) -> None:
    model.graph.output.append(onnx.helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, [7]))
    model.graph.output[0].type.tensor_type.shape.dim.add().dim_value = 7


@pytest.mark.parametrize(
    "change", [unnamed, without_ranks, in_full, with_an_idle_node, with_wrong_ranks], ids=lambda f: f.__name__
)
@pytest.mark.filterwarnings("ignore:.*what it gives is taken")
def test_other_spellings(change: Callable[[Any], None]) -> None:
    model = model_of("g (float[2, 3] x) => (float[2, 3] power) { a = Neg(x)  power = Exp(a) }")
    change(model)
    found: Any = run(model, X)
    assert torch.allclose(found[0] if isinstance(found, tuple) else found, torch.exp(-X))


def test_a_domain_without_a_version() -> None:
    model = model_of("g (float[2, 3] x) => (float[2, 3] y) { y = com.microsoft.Gelu (x) }")
    assert torch.allclose(run(model, X), torch.nn.functional.gelu(X), atol=1e-6)


@pytest.mark.parametrize("opset", [12, 14, 21])
def test_norms_that_onnxruntime_writes(opset: int) -> None:
    """As operators of ONNX's domain, in versions before the standard has them."""
    scale, bias = torch.randn(3), torch.randn(3)
    text = """g (float[n, 3] x, float[3] s, float[3] b) => (float[n, 3] y, float[n, 3] z) {
        y = LayerNormalization <axis: int = -1, epsilon: float = 0.001> (x, s, b)
        z = SimplifiedLayerNormalization <axis: int = -1, epsilon: float = 0.001> (x, s) }"""
    model = model_of(text, f'"" : {opset}')
    y, z = ladder.compile(model)(X, scale, bias)
    assert torch.allclose(y, torch.nn.functional.layer_norm(X, (3,), scale, bias, 0.001), atol=1e-6)
    assert torch.allclose(z, torch.nn.functional.rms_norm(X, (3,), scale, 0.001), atol=1e-6)
    assert {entry.domain for entry in open_onnx(model).model.opset_import} == {"", "com.microsoft"}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("channels", ["c", "?"])
def test_channels_are_as_many_as_a_stored_kernel_takes(channels: str, groups: int) -> None:
    picture = f"float[b, {channels}, h, w]"
    body = f"{{ y = Conv <group: int = {groups}> (x, k) z = Relu (x) }}"
    model = model_of(f"g ({picture} x) => ({picture} z) {body}")
    kernel = torch.randn(4, 3, 2, 2)
    model.graph.initializer.append(onnx.numpy_helper.from_array(kernel.numpy(), "k"))
    model.graph.output.append(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None))
    fast = ladder.compile(model)
    assert len(fast.staged.stages) == 1
    for batch, size in ((2, 5), (1, 7)):
        x = torch.randn(batch, 3 * groups, size, size)
        torch.testing.assert_close(fast(x)[1], torch.nn.functional.conv2d(x, kernel, groups=groups))
    with pytest.raises(LadderError):
        fast(torch.randn(1, 3 * groups + 1, 5, 5))


def test_embeddings_of_codes_are_those_of_their_values() -> None:
    """As onnxruntime's quantizer leaves the embeddings of an optimized BERT: one plan, for any batch."""
    draw, opset = np.random.default_rng(9), '"" : 17, "com.microsoft" : 1'
    sizes = {"w": (9, 8), "p": (6, 8), "k": (2, 8), "g": (8,), "b": (8,)}
    codes = {name: draw.integers(0, 256, size).astype(np.uint8) for name, size in sizes.items()}
    scale = {name: np.float32(draw.uniform(0.01, 0.1)) for name in sizes}
    zero = {name: np.uint8(draw.integers(100, 150)) for name in sizes}
    values = {name: (codes[name].astype("f4") - zero[name]) * scale[name] for name in sizes}

    def model(operator: str, results: str, tables: dict[str, Any], numbers: str, **more: Any) -> Any:
        body = f"e, m = com.microsoft.{operator}(i, s, w, p, k, g, b, {numbers}) y = Relu(e)"
        found = model_of(
            f"g (int32[n, 5] i, int32[n, 5] s, int32[n, 5] a) => ({results}) {{ {body} }}", opset
        )
        stored = {**tables, **more}
        found.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in stored.items())
        return ladder.compile(found)

    names = [f"{name}_s" for name in sizes] + [f"{name}_z" for name in sizes]
    given = dict(zip(names, [*scale.values(), *zero.values()], strict=True))
    stated = "a, " + ", ".join(names)
    fast = model("QEmbedLayerNormalization", "y, m", codes, stated, **given)
    usual = model("EmbedLayerNormalization", "y, m", values, "a")
    one = model("QEmbedLayerNormalization", "y", codes, stated, **given)
    assert len(one.staged.stages) == 1
    for rows in (3, 1):
        ids, kinds, mask = (torch.from_numpy(draw.integers(0, n, (rows, 5)).astype("i4")) for n in (9, 2, 2))
        for found, wanted in zip(fast(ids, kinds, mask), usual(ids, kinds, mask), strict=True):
            assert torch.allclose(found, wanted, atol=1e-5)
        assert torch.equal(one(ids, kinds, mask), fast(ids, kinds, mask)[0])


def test_convolutions_of_codes_whose_channels_come_last() -> None:
    """As onnxruntime's optimizer leaves them behind QLinearConv of ONNX: one plan, for any batch."""
    window = "strides: ints = [2, 1], pads: ints = [1, 0, 1, 0]"
    stored = {
        "s": np.float32(0.05), "z": np.uint8(20), "zw": np.int8(0), "t": np.float32(0.4),
        "w": torch.randint(-128, 128, (4, 3, 3, 2), dtype=torch.int8).numpy(),
        "b": np.arange(4, dtype=np.int32) * 100,
    }  # fmt: skip
    given = "(q, s, z, w, s, zw, t, z, b)"
    last = model_of(
        f"""g (uint8[n, 7, 6, 3] q) => (y)
        {{ r = com.microsoft.QLinearConv <channels_last: int = 1, {window}> {given}
        y = com.microsoft.NhwcMaxPool <kernel_shape: ints = [2, 2]> (r) }}""", '"" : 17, "com.microsoft" : 1'
    )  # fmt: skip
    first = model_of(
        f"""g (uint8[n, 3, 7, 6] q) => (y) {{ r = QLinearConv <{window}> {given}
        y = MaxPool <kernel_shape: ints = [2, 2]> (r) }}""", '"" : 17, "com.microsoft" : 1'
    )  # fmt: skip
    for model in (last, first):
        model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in stored.items())
    fast, usual = ladder.compile(last), ladder.compile(first)
    assert len(fast.staged.stages) == 1
    for rows in (2, 1):
        x = torch.randint(0, 256, (rows, 7, 6, 3), dtype=torch.uint8)
        assert torch.equal(fast(x).movedim(-1, 1), usual(x.movedim(-1, 1)))


def test_scales_of_groups() -> None:
    """GroupNormalization of opset 18, which the standard's checker refuses as deprecated."""
    model = model_of(
        """g (float[n, 6, 5] x, float[3] scale, float[3] bias) => (float[n, 6, 5] y) {
            z = GroupNormalization <num_groups: int = 3> (x, scale, bias)
            y = Relu(z)
        }""",
        '"" : 18',
    )
    x, scale, bias = torch.randn(2, 6, 5), torch.randn(3), torch.randn(3)
    plain = torch.nn.functional.group_norm(x, 3).unflatten(1, (3, 2))
    wanted = (plain * scale[:, None, None] + bias[:, None, None]).flatten(1, 2).relu()
    torch.testing.assert_close(run(model, x, scale, bias), wanted)
    assert run(model, x[:0], scale, bias).shape == (0, 6, 5)
