"""ONNX operators on codes of 8 bits: exact sums, zero points of every form, rounding."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

import ladder
from benchmarks import onnx_suite
from ladder.runtime import byte_products
from ladder.runtime.model import build
from ladder.runtime.onnx_ops import integers
from ladder.runtime.onnx_ops.evaluate import operation_of
from ladder.runtime.onnx_ops.integers import whole_convolution, whole_product
from ladder.runtime.onnx_ops.operation import Operation
from ladder.runtime.onnx_ops.quantized import dynamic
from ladder.runtime.onnx_ops.table import TABLE
from ladder.runtime.stored_codes import stays
from schedules.row_panels import registers_of
from targets import get_device

BYTES = (torch.uint8, torch.int8)
DRAW = np.random.default_rng(5)


@pytest.fixture(params=["bytes", "kernels", "kernels of pairs", "floats"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by the processor's products of bytes, by kernels of ours, for AVX2 alone too, and by neither."""
    if request.param == "bytes" and not integers.has_dot_products():
        pytest.skip("this processor has no products of bytes")
    if request.param.startswith("kernels") and not byte_products.has_kernels():
        pytest.skip("this processor has no AVX2")
    if request.param == "kernels of pairs":
        monkeypatch.setattr(byte_products, "host_depth", lambda: 2)
    monkeypatch.setattr(integers, "has_dot_products", lambda: request.param == "bytes")
    monkeypatch.setattr(integers, "has_kernels", lambda: request.param.startswith("kernels"))


def codes(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    low = torch.iinfo(dtype).min
    found = torch.from_numpy(DRAW.integers(low, low + 256, shape)).to(dtype)
    if found.numel() > 2:
        found.view(-1)[:2] = torch.tensor([low, low + 255]).to(dtype)
    return found


def exact(a: Any, a_zero: Any, b: Any, b_zero: Any) -> Any:
    left, right = a.long(), b.long()
    left = left if a_zero is None else left - (a_zero.long()[:, None] if a_zero.ndim else a_zero.long())
    right = right if b_zero is None else right - b_zero.long()
    return left @ right


@pytest.mark.parametrize("b_type", BYTES, ids=str)
@pytest.mark.parametrize("a_type", BYTES, ids=str)
def test_products(instructions: None, a_type: torch.dtype, b_type: torch.dtype) -> None:
    for m, k, n in ((1, 1, 1), (3, 37, 5), (1, 600, 17), (40, 64, 33), (0, 4, 3), (2, 0, 3)):
        a, b = codes(a_type, m, k), codes(b_type, k, n)
        for a_zero in (None, codes(a_type), codes(a_type, m)):
            for b_zero in (None, codes(b_type), codes(b_type, n), torch.zeros((), dtype=b_type)):
                found = whole_product(a, b, a_zero, b_zero)
                assert found.dtype == torch.int32
                assert torch.equal(found.long(), exact(a, a_zero, b, b_zero)), (m, k, n, a_zero, b_zero)


def test_products_of_batches_and_extremes(instructions: None) -> None:
    a, b = codes(torch.uint8, 2, 3, 5, 40), codes(torch.int8, 40, 6)
    assert torch.equal(whole_product(a, b, codes(torch.uint8) * 0 + 7), ((a.int() - 7) @ b.int()))
    many = codes(torch.int8, 2, 3, 40, 6)
    assert torch.equal(whole_product(a, many), a.int() @ many.int())
    assert torch.equal(whole_product(a[0, 0, 0], many[0, 0]), a[0, 0, 0].int() @ many[0, 0].int())
    high, low = torch.full((2, 3000), 255, dtype=torch.uint8), torch.full((3000, 2), -128, dtype=torch.int8)
    assert torch.equal(whole_product(high, low), torch.full((2, 2), -255 * 128 * 3000, dtype=torch.int32))


CONVOLUTIONS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 9, 8), (4, 3, 3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 1]}),
    ((1, 4, 7, 7), (4, 1, 3, 3), {"group": 4, "pads": [0, 1, 2, 1]}),
    ((1, 5, 6, 11), (6, 5, 1, 1), {}),
    ((1, 6, 5, 5), (4, 3, 2, 2), {"group": 2, "dilations": [2, 2]}),
    ((1, 3, 5), (2, 3, 2), {}),
    ((1, 2, 2, 2), (2, 2, 3, 3), {}),
    ((2, 5, 7, 21), (9, 5, 2, 3), {"pads": [0, 4, 1, 3], "strides": [1, 3], "dilations": [1, 2]}),
    ((1, 3, 6, 40), (5, 3, 3, 2), {"pads": [-1, -2, 2, -1], "strides": [1, 2]}),
    ((1, 6, 17), (6, 2, 5), {"group": 3, "pads": [4, 0], "strides": [2]}),
    ((0, 2, 4, 4), (2, 2, 3, 3), {}),
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolutions(instructions: None, case: Any) -> None:
    shape, window, given = case
    op = Operation("ConvInteger", 10, given)
    for x_type in BYTES:
        for w_type in BYTES:
            x, w = codes(x_type, *shape), codes(w_type, *window)
            for x_zero in (None, codes(x_type)):
                for w_zero in (None, codes(w_type), codes(w_type, window[0])):
                    left = x.double() - (0 if x_zero is None else x_zero.double())
                    shift = 0 if w_zero is None else w_zero.double()
                    right = w.double() - (shift.reshape(-1, *[1] * (w.ndim - 1)) if w_zero is not None else 0)
                    wanted = TABLE["Conv"](op, left, right)
                    found = whole_convolution(op, x, w, x_zero, w_zero)
                    assert torch.equal(found.double(), wanted)


def test_convolutions_of_sums_beyond_float32(instructions: None) -> None:
    x = torch.full((1, 700, 3, 3), 255, dtype=torch.uint8)
    w = torch.full((2, 700, 3, 3), 127, dtype=torch.int8)
    w[1, 0, 0, 0] = 126
    wanted = [255 * 127 * 6300, 255 * 127 * 6300 - 255]
    assert TABLE["ConvInteger"](Operation("ConvInteger", 10), x, w).reshape(-1).tolist() == wanted


def test_what_is_kept_of_a_matrix_follows_its_changes() -> None:
    a, b = codes(torch.uint8, 4, 20), codes(torch.int8, 20, 3)
    zero, other = torch.tensor(9, dtype=torch.uint8), torch.zeros(3, dtype=torch.int8)
    stays(b)
    stays(other)
    for _ in range(3):
        assert torch.equal(whole_product(a, b, zero, other).long(), exact(a, zero, b, other))
        b[3], other[1] = 5 - b[3], other[1] + 1


def test_dynamic_ranges() -> None:
    """As the standard's reference: ties to even, 0 in the range, all equal, empty."""
    for array in ([0.5, 1.5, 2.5, 255.0], [-3.0, -1.0], [0.0, -0.0], [7.0], [-1.5, 2.0, 0.25]):
        x = np.array(array, np.float32)
        node = helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])
        if x.any():
            reference = ReferenceEvaluator(node).run(None, {"x": x})
            for found, wanted in zip(dynamic(torch.from_numpy(x)), reference, strict=True):
                np.testing.assert_array_equal(found.numpy(), wanted)
    assert [value.tolist() for value in dynamic(torch.zeros(2))] == [[0, 0], 0.0, 0]
    for size in (3, 40):
        x = torch.arange(float(size))
        x[1] = float("nan")
        assert dynamic(x)[1].isnan()
    assert dynamic(torch.zeros(0))[0].shape == (0,)


# models ------------------------------------------------------------------------------------------------


def model_of(text: str, opset: int = 19, **stored: Any) -> onnx.ModelProto:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]> {text}')
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()
    )
    return model


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_codes_and_back(dtype: Any, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties, ends of the range, infinities, NaN and -0, with one scale and with one per channel."""
    if not kernels:
        monkeypatch.setattr(build, "build_kernels", onnx_suite.without_kernels)
    low = int(np.iinfo(dtype).min)
    model = model_of(
        """g (float[n, 3] x) => (q, y, v) { q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z)
        p = QuantizeLinear <axis: int = 1> (x, t, u)  v = DequantizeLinear <axis: int = 1> (p, t, u) }""",
        s=np.float32(0.1), z=dtype(low + 100), t=np.array([0.5, 1.0, 0.3], np.float32),
        u=np.array([low, low + 255, low + 128], dtype),
    )  # fmt: skip
    steps = np.arange(-400, 400, dtype=np.float32) * np.float32(0.05)
    x = np.concatenate([steps, [np.inf, -np.inf, np.nan, -0.0, 1e30]]).astype(np.float32)
    given = np.stack([x, x * 5, x * 3], 1)
    inside = np.nan_to_num(given, nan=-1e6).clip(-1e6, 1e6)  # the reference passes through int32
    wanted = ReferenceEvaluator(model).run(None, {"x": inside})
    for found, array in zip(ladder.compile(model)(torch.from_numpy(given)), wanted, strict=True):
        np.testing.assert_array_equal(found.numpy(), array)


@pytest.mark.parametrize("dtype", ["uint16", "int16", "uint4", "int4"])
def test_codes_that_plans_do_not_have(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by conversions back alone, in ONNX's domain or onnxruntime's, they leave the model one plan."""
    monkeypatch.setattr(build, "build_kernels", onnx_suite.without_kernels)
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    info = ml_dtypes.iinfo(kind)
    model = model_of(
        """g (float[n, 3] x) => (y, v) { q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z)
        v = DequantizeLinear(q, t, z) }""",
        opset=21, s=np.float32(0.1), t=np.array([3], np.float32), z=np.array(int(info.min) + 5).astype(kind),
    )  # fmt: skip
    steps = np.arange(-70, 71, dtype=np.float32).reshape(-1, 3) * np.float32(0.05)
    x = np.concatenate([steps, [[5e3, -5e3, -0.0], [1e4, -1e4, -1e4]]]).astype(np.float32)
    wanted = ReferenceEvaluator(model).run(None, {"x": x})
    x[-1] = np.inf, -np.inf, np.nan  # the reference passes through int32
    theirs = onnx.ModelProto.FromString(model.SerializeToString())
    for node in theirs.graph.node:
        node.domain = "com.microsoft"
    for each in (model, theirs):
        fast = ladder.compile(each)
        assert len(fast.staged.stages) == 1
        for found, array in zip(fast(torch.from_numpy(x)), wanted, strict=True):
            np.testing.assert_array_equal(found.numpy(), array)


def test_codes_that_others_read_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of 16 bits that are a result, or that another operator reads, are codes."""
    monkeypatch.setattr(build, "build_kernels", onnx_suite.without_kernels)
    model = model_of(
        """g (float[n, 3] x) => (q, y, c) { q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z)
        p = QuantizeLinear(x, s, z)  c = Cast <to = 6> (p) }""",
        opset=21, s=np.float32(0.1), z=np.uint16(9),
    )  # fmt: skip
    x = DRAW.standard_normal((4, 3)).astype(np.float32)
    wanted = ReferenceEvaluator(model).run(None, {"x": x})
    for found, array in zip(ladder.compile(model)(torch.from_numpy(x)), wanted, strict=True):
        np.testing.assert_array_equal(found.numpy(), array)
        assert found.numpy().dtype == array.dtype


def test_codes_of_a_product_in_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a product is rounded to has a reader of its own: the product's part must not end beyond it."""
    weight = DRAW.standard_normal((16, 8)).astype(np.float32)
    model = model_of(
        """g (float[n, 4, 16] x) => (y) { r = Reshape(x, rows)  p = MatMul(r, w)  q = QuantizeLinear(p, s, z)
        d = DequantizeLinear(q, s, z)  t = Reshape(d, back)  y = Add(t, b) }""",
        rows=np.array([-1, 16]), back=np.array([-1, 4, 8]), w=weight, s=np.float32(0.02), z=np.int8(3),
        b=DRAW.standard_normal(8).astype(np.float32),
    )  # fmt: skip
    x = DRAW.standard_normal((3, 4, 16)).astype(np.float32)
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(ladder.compile(model)(torch.from_numpy(x)).numpy(), wanted, atol=0.0201)


@pytest.mark.skipif(not integers.has_dot_products(), reason="this processor has no products of bytes")
@pytest.mark.parametrize("most", [0, 1 << 30])
@pytest.mark.parametrize("zero", [0, 7])
def test_products_by_the_library_and_by_kernels(
    most: int, zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal, whichever a product's size chooses: of codes as they come, and of others in another order."""
    monkeypatch.setattr("ladder.runtime.model.codes.MOST_PRODUCTS", most)
    weight = codes(torch.int8, 24, 40)
    model = model_of(
        """g (uint8[n, 24, 5] x, uint8 z) => (y, t) { c = Transpose <perm = [0, 2, 1]> (x)
        y = MatMulInteger(c, w, z, v)  t = MatMulInteger(c, w) }""",
        w=weight.numpy(), v=np.int8(zero),
    )  # fmt: skip
    fast = ladder.compile(model)
    for rows in (1, 3, 3):
        x = codes(torch.uint8, rows, 24, 5)
        left = x.transpose(1, 2).long()
        y, t = fast(x, torch.tensor(130, dtype=torch.uint8))
        assert torch.equal(y.long(), (left - 130) @ (weight.long() - zero))
        assert torch.equal(t.long(), left @ weight.long())


@pytest.mark.skipif(not byte_products.has_kernels(), reason="this processor has no AVX2")
def test_rounding_of_what_does_not_lie_together() -> None:
    x = torch.randn(1, 1, 7, 2)[..., 0]
    for found, wanted in zip(byte_products.rounded(x), byte_products.rounded(x.clone()), strict=True):
        assert torch.equal(found, wanted)


def _of_codes(name: str, given: dict[str, Any], *operands: Any) -> torch.Tensor:
    return TABLE[f"com.microsoft::{name}"](Operation(f"com.microsoft::{name}", 1, given), *operands)


def test_functions_of_codes() -> None:
    """Each is its function of what the codes stand for, rounded to codes again."""
    x, other = codes(torch.uint8, 2, 3, 4, 4), codes(torch.uint8, 2, 3, 4, 4)
    s, t, y = torch.tensor(0.02), torch.tensor(0.03), torch.tensor(0.013)
    z, u, v = (torch.tensor(n, dtype=torch.uint8) for n in (120, 7, 60))
    value, second = (x.int() - 120) * s, (other.int() - 7) * t

    def coded(found: torch.Tensor) -> torch.Tensor:
        return ((found / y).round() + 60).clamp(0, 255).to(torch.uint8)

    chosen = codes(torch.uint8, 2, 3, 4, 4) > 99
    times = torch.tensor(76.0) * y  # onnxruntime multiplies by the whole part of 1 / 0.013
    cases = [
        ("QLinearSigmoid", {}, (), torch.sigmoid(value)),
        ("QLinearLeakyRelu", {"alpha": 0.1}, (), torch.where(value < 0, value * 0.1, value)),
        ("QLinearSoftmax", {"axis": 1, "opset": 13}, (), torch.softmax(value, 1) * times),
        ("QLinearReduceMean", {"axes": [1], "keepdims": 0}, (), value.mean(1)),
        ("QLinearGlobalAveragePool", {}, (), value.mean((2, 3), keepdim=True)),
        ("QLinearAveragePool", {"kernel_shape": [2, 2]}, (), torch.nn.functional.avg_pool2d(value, 2, 1)),
    ]
    for name, given, more, wanted in cases:
        assert torch.equal(_of_codes(name, given, x, s, z, y, v, *more), coded(wanted)), name
    last = _of_codes("QLinearGlobalAveragePool", {"channels_last": 1}, x.movedim(1, -1), s, z, y, v)
    assert torch.equal(last.movedim(-1, 1), coded(value.mean((2, 3), keepdim=True)))
    assert torch.equal(_of_codes("QLinearAdd", {}, x, s, z, other, t, u, y, v), coded(value + second))
    assert torch.equal(_of_codes("QLinearMul", {}, x, s, z, other, t, u, y, v), coded(value * second))
    joined = _of_codes("QLinearConcat", {"axis": 1}, y, v, x, s, z, other, t, u)
    assert torch.equal(joined, coded(torch.cat([value, second], 1)))
    found = _of_codes("QLinearWhere", {}, chosen, x, s, z, other, t, u, y, v)
    assert torch.equal(found, coded(torch.where(chosen, value, second)))


def test_products_of_matrices_of_codes() -> None:
    a, b, c = codes(torch.uint8, 5, 9), codes(torch.int8, 4, 9), torch.arange(4, dtype=torch.int32) * 900
    a_s, b_s, y_s = torch.tensor(0.02), torch.tensor([0.01, 0.02, 0.03, 0.04]), torch.tensor(0.4)
    a_z, b_z, y_z = (
        torch.tensor(99, dtype=torch.uint8),
        torch.zeros(4, dtype=torch.int8),
        torch.tensor(3, dtype=torch.uint8),
    )
    value = (((a.int() - 99) @ b.int().T) + c).float() * (a_s * b_s)
    given = {"transB": 1}
    assert torch.equal(_of_codes("QGemm", given, a, a_s, a_z, b, b_s, b_z, c), value)
    found = _of_codes("QGemm", given, a, a_s, a_z, b, b_s, b_z, c, y_s, y_z)
    assert torch.equal(found, ((value / y_s).round() + 3).clamp(0, 255).to(torch.uint8))


def test_models_of_codes_are_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types and shapes of what onnxruntime's quantizer writes are known at import."""
    monkeypatch.setattr(build, "build_kernels", onnx_suite.without_kernels)
    model = model_of(
        """g (float[n, 6] x) => (y) { q = QuantizeLinear(x, s, z)
        p = com.microsoft.QGemm <transB: int = 1> (q, s, z, w, s, zw, , s, z)
        a = com.microsoft.QLinearSigmoid (p, s, z, t, z)
        c = com.microsoft.QLinearConcat <axis: int = 1> (t, z, a, t, z, p, s, z)
        m = com.microsoft.QLinearMul (c, t, z, c, t, z, t, z)  y = DequantizeLinear(m, t, z) }""",
        s=np.float32(0.05), t=np.float32(0.01), z=np.uint8(20), zw=np.int8(0),
        w=codes(torch.int8, 4, 6).numpy(),
    )  # fmt: skip
    fast = ladder.compile(model)
    assert len(fast.staged.stages) == 1
    for rows in (3, 1):
        assert fast(torch.randn(rows, 6)).shape == (rows, 8)


# LSTM of codes -----------------------------------------------------------------------------------------


def layer(hidden: int, direction: str, dtype: Any, columns: bool, given: tuple[str, ...]) -> onnx.ModelProto:
    """Return a layer of 12 inputs, whose zero points are not 0 unless scales are one per column."""
    count, low = 1 + (direction == "bidirectional"), int(np.iinfo(dtype).min)
    form = (count, 4 * hidden) if columns else (count,)
    zero = np.full(form, low + 128 if columns else low + 125, dtype)
    stored = {
        "w": codes(torch.int8, count, 12, 4 * hidden).numpy().view(dtype), "w_z": zero,
        "r": codes(torch.int8, count, hidden, 4 * hidden).numpy().view(dtype), "r_z": zero,
        "w_s": (DRAW.random(form) * 0.01 + 0.002).astype("f4"),
        "r_s": (DRAW.random(form) * 0.01 + 0.002).astype("f4"),
        "b": (DRAW.standard_normal((count, 8 * hidden)) * 0.2).astype("f4"),
    }  # fmt: skip
    shapes = {"lengths": ["n"], "h": [count, "n", hidden], "c": [count, "n", hidden]}
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["t", "n", 12])] + [
        helper.make_tensor_value_info(
            name, TensorProto.INT32 if name == "lengths" else TensorProto.FLOAT, shapes[name]
        )
        for name in given
    ]
    optional = [name if name in given else "" for name in ("lengths", "h", "c")]
    node = helper.make_node(
        "DynamicQuantizeLSTM", ["x", "w", "r", "b", *optional, "", "w_s", "w_z", "r_s", "r_z"],
        ["y", "y_h", "y_c"], domain="com.microsoft", hidden_size=hidden, direction=direction,
    )  # fmt: skip
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output]
    tensors = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    graph = helper.make_graph([node], "layer", infos, results, tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


LAYERS = [
    (37, "bidirectional", np.int8, False, ("lengths", "h", "c")),
    (16, "reverse", np.uint8, False, ("lengths",)),
    (20, "forward", np.int8, True, ()),
]


def arguments(model: onnx.ModelProto, steps: int, batch: int) -> dict[str, torch.Tensor]:
    found = {}
    for info in model.graph.input:
        shape = [
            {"t": steps, "n": batch}.get(d.dim_param, d.dim_value) for d in info.type.tensor_type.shape.dim
        ]
        found[info.name] = torch.from_numpy(DRAW.standard_normal(shape).astype("f4"))
    if "lengths" in found:
        found["lengths"] = (steps - 2 * torch.arange(batch, dtype=torch.int32)).clamp(min=0)
    return found


def by_steps(model: onnx.ModelProto, given: dict[str, torch.Tensor]) -> Any:
    node = model.graph.node[0]
    stored = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in model.graph.initializer}
    op = operation_of(node, {"": 17, "com.microsoft": 1})
    return TABLE["com.microsoft::DynamicQuantizeLSTM"](op, *({**stored, **given}.get(n) for n in node.input))


def test_unsigned_codes_where_torch_takes_signed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few bits, so that no processor's sums saturate."""
    monkeypatch.setattr(integers, "has_dot_products", lambda: True)
    monkeypatch.setattr(integers, "takes_unsigned", lambda: False)
    a = torch.randint(100, 160, (2, 3, 9), dtype=torch.uint8)
    b = torch.randint(-9, 9, (9, 5), dtype=torch.int8)
    for zero in (None, torch.tensor(120, dtype=torch.uint8)):
        expected = (a.int() - (0 if zero is None else 120)) @ b.int()
        assert torch.equal(whole_product(a, b, zero), expected)


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: f"{case[1]} of {case[0]}")
def test_layers_of_codes(case: Any) -> None:
    """The kernel beside torch's steps; batches share the range of their states, none may be left."""
    model = layer(*case)
    fast = ladder.compile(model)
    for steps, batch in ((5, 3), (1, 1), (9, 2), (0, 2), (4, 0)):
        given = arguments(model, steps, batch)
        for found, wanted in zip(fast(**given), by_steps(model, given), strict=True):
            torch.testing.assert_close(found, wanted, atol=3e-6, rtol=1e-5)
    if registers_of(get_device("cpu")) is not None:
        assert "ladder recurrent" in fast.plan()


def test_lost_numbers_in_a_layer_of_codes() -> None:
    """A state that is no number makes the range none, so all of the batch is lost."""
    model = layer(16, "forward", np.int8, False, ("h", "c"))
    given = arguments(model, 2, 2)
    given["h"][0, 0, 3] = float("nan")
    for found, wanted in zip(ladder.compile(model)(**given), by_steps(model, given), strict=True):
        assert torch.equal(found.isnan(), wanted.isnan())
    assert by_steps(model, given)[0].isnan().all()


def _rounded(x: np.ndarray, seen: np.ndarray) -> np.ndarray:
    low, high = min(float(seen.min(initial=0)), 0.0), max(float(seen.max(initial=0)), 0.0)
    scale = np.float32((high - low) / 255) or np.float32(1)
    zero = np.rint(np.clip(-low / scale, 0, 255))
    return (np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale


def test_ranges_of_sequences_that_end() -> None:
    """Written from the definition in float64: a sequence counts for one step after its end (onnxruntime)."""
    model = layer(8, "reverse", np.int8, False, ("lengths",))
    given = arguments(model, 7, 3)
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    w, r = ((stored[n][0].astype("f8") - stored[f"{n}_z"][0]) * stored[f"{n}_s"][0] for n in "wr")
    x, lengths = given["x"].numpy().astype("f8"), given["lengths"].numpy()
    gates = _rounded(x, x) @ w + stored["b"][0].reshape(2, -1).sum(0)
    h, c, wanted = np.zeros((3, 8)), np.zeros((3, 8)), np.zeros((7, 3, 8))
    for step in range(7):
        rows = np.maximum(lengths - 1 - step, 0)
        total = gates[rows, np.arange(3)] + _rounded(h, h[step <= lengths]) @ r
        i, o, f, n = np.split(total, 4, 1)
        new_c = c / (1 + np.exp(-f)) + np.tanh(n) / (1 + np.exp(-i))
        live = step < lengths
        h = np.where(live[:, None], np.tanh(new_c) / (1 + np.exp(-o)), h)
        c = np.where(live[:, None], new_c, c)
        for row in np.flatnonzero(live):
            wanted[rows[row], row] = h[row]
    y, last_h, last_c = by_steps(model, given)
    for found, array in ((y[:, 0], wanted), (last_h[0], h), (last_c[0], c)):
        np.testing.assert_allclose(found.numpy(), array, atol=2e-6)


@pytest.mark.skipif(not byte_products.has_kernels(), reason="this processor has no AVX2")
def test_calls_on_codes_are_bound_once(tmp_path: Any) -> None:
    """Steps of constants and of what is none, of sizes that change, saved and loaded: as the reference."""
    text = """g (float[N, 5, H, 11] x, uint8[6, 5, 3, 3] v)
        => (int32[N, 6, A, B] y, int32[N, 6, A, B] z, int32[C, 7] p)
    {
        c, s, o = DynamicQuantizeLinear(x)
        y = ConvInteger<pads: ints = [1, 0, 2, 1], strides: ints = [2, 1]>(c, w, o, w_zero)
        z = ConvInteger<pads: ints = [1, 0, 2, 1], strides: ints = [2, 1]>(c, v, o)
        rows = Reshape(c, shape)
        p = MatMulInteger(rows, m, o, m_zero)
    }"""
    stored = {
        "w": DRAW.integers(-128, 128, (6, 5, 3, 3)).astype(np.int8),
        "w_zero": DRAW.integers(-128, 128, 6).astype(np.int8),
        "m": DRAW.integers(0, 256, (55, 7)).astype(np.uint8),
        "m_zero": np.uint8(131),
        "shape": np.array([-1, 55]),
    }
    model = model_of(text, **stored)
    fast, reference = ladder.compile(model), ReferenceEvaluator(model)
    for path in (None, tmp_path / "model.ladder"):
        if path is not None:
            fast = ladder.load(fast.export(path))
        for n, h in ((1, 6), (1, 6), (2, 9), (1, 6)):
            x = DRAW.standard_normal((n, 5, h, 11)).astype(np.float32)
            v = DRAW.integers(0, 256, (6, 5, 3, 3)).astype(np.uint8)
            found = fast(x=torch.from_numpy(x), v=torch.from_numpy(v))
            for a, b in zip(found, reference.run(None, {"x": x, "v": v}), strict=True):
                np.testing.assert_array_equal(a.numpy(), b)
