"""ONNX models that torch runs in part: against the suite's results and the standard's reference."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

import ladder
from benchmarks import onnx_suite
from ladder import knobs
from ladder.frontend.onnx_stages import NodeStage
from ladder.runtime.model import build
from ladder.runtime.model.program import ImportRefused
from ladder.runtime.onnx_ops.evaluate import CONTROL, Body, NodeFailed, schema_of
from ladder.runtime.onnx_ops.operation import Operation
from ladder.runtime.onnx_ops.table import TABLE
from tile_types.errors import ShapeError

RANDOM = np.random.default_rng(3)
SAMPLE = 60
"""Models of ONNX's backend suite, drawn by a fixed seed."""


def floats(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_kernels", onnx_suite.without_kernels)


def test_a_sample_of_the_backend_suite(without_kernels: None) -> None:
    found = [onnx_suite.outcome(case) for case in random.Random(19).sample(onnx_suite.cases(), SAMPLE)]
    assert [row for row in found if row["result"] != "right" and not row["aside"]] == []
    assert sum(row["result"] == "right" for row in found) > 0.95 * SAMPLE


def model_of(text: str, opset: int = 18, **stored: Any) -> onnx.ModelProto:
    """Return a model written in ONNX's own syntax, with further stored tensors."""
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]> {text}')
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()
    )
    return model


MODELS: dict[str, tuple[onnx.ModelProto, dict[str, np.ndarray]]] = {
    "a shape from values": (
        model_of(
            "g (float[n, 6] x, int64[2] shape) => (y) { r = Relu(x)  t = Reshape(r, shape)  y = Mul(t, t) }"
        ),
        {"x": floats(4, 6), "shape": np.array([3, 8], np.int64)},
    ),
    "what is chosen by values": (
        model_of(
            """g (float[n, 6] x) => (y, k) {
            zero = Constant <value_float: float = 0.0> ()  m = Greater(x, zero)  i = NonZero(m)
            t = Transpose(i)  v = GatherND(x, t)  s = Sqrt(v)  y = Add(s, s)  k = Shape(y) }"""
        ),
        {"x": floats(4, 6)},
    ),
    "a branch and a loop": (
        model_of(
            """g (float[3] x, int64 n) => (y) {
            zero = Constant <value_float: float = 0.0> ()  s = ReduceSum <keepdims: int = 0> (x)
            c = Greater(s, zero)
            b = If (c) <then_branch = t () => (p) { p = Neg(x) }, else_branch = e () => (p) { p = Exp(x) }>
            one = Constant <value: tensor = bool {1}> ()
            y = Loop (n, one, b) <body = l (int64 i, bool a, float[3] u) => (a2, u2) {
                a2 = Identity(a)  u2 = Mul(u, x) }> }"""
        ),
        {"x": floats(3), "n": np.array(3, np.int64)},
    ),
    "a recurrent layer": (
        model_of(
            "g (float[t, b, 4] x) => (y) { l, h, c = LSTM <hidden_size: int = 5> (x, w, r)  y = Tanh(l) }",
            w=floats(1, 20, 4), r=floats(1, 20, 5),
        ),
        {"x": floats(6, 2, 4)},
    ),
    "quantised": (
        model_of(
            """g (float[2, 8] x) => (y) { q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z)
            b = DequantizeLinear(w, s, z)  p = MatMul(a, b)  y = Relu(p) }""",
            s=np.float32(0.05), z=np.int8(3), w=RANDOM.integers(-9, 9, (8, 4)).astype(np.int8), opset=21,
        ),
        {"x": floats(2, 8)},
    ),
    "a picture": (
        model_of(
            """g (float[1, 3, h, w] x) => (y) { c = Conv <pads: ints = [1, 1, 1, 1]> (x, k)  s = HardSwish(c)
            u = Resize <mode: string = "linear"> (s, , f)  p = Pad <mode: string = "reflect"> (u, n)
            y = MaxPool <kernel_shape: ints = [2, 2]> (p) }""",
            k=floats(4, 3, 3, 3), f=np.array([1, 1, 2, 2], np.float32),
            n=np.array([0, 0, 1, 1] * 2, np.int64),
        ),
        {"x": floats(1, 3, 5, 6)},
    ),
    "of an old version": (
        model_of(
            """g (float[2, 3, 4] x) => (y) {
            u = Unsqueeze <axes: ints = [0]> (x)  s = Squeeze <axes: ints = [0]> (u)
            c = Clip <min: float = -0.5, max: float = 0.5> (s)  t = Softmax <axis: int = 2> (c)
            p = Pad <pads: ints = [0, 0, 1, 0, 0, 0]> (t)  y = ReduceSum <axes: ints = [2]> (p) }""",
            opset=9,
        ),
        {"x": floats(2, 3, 4)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_small_models(name: str, tmp_path: Path) -> None:
    """Kernels of ours, steps of torch and nodes between plans give what the reference gives."""
    model, feeds = MODELS[name]
    expected = ReferenceEvaluator(model).run(None, feeds)
    with knobs.override(strict=True):
        fast = ladder.compile(model)
        found = fast(**{key: torch.from_numpy(np.array(value)) for key, value in feeds.items()})
    results = found if isinstance(found, tuple) else (found,)
    for value, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(value.numpy(), wanted, rtol=1e-4, atol=1e-5)
    assert fast.plan()


def test_stages_are_for_what_a_plan_cannot_be() -> None:
    """A step of known shape stays in the plan; a shape from values ends it, and says so."""
    whole, _ = MODELS["a picture"]
    assert ladder.compile(whole).staged.single is not None
    fast = ladder.compile(MODELS["what is chosen by values"][0])
    assert [s.node.op_type for s in fast.staged.stages if isinstance(s, NodeStage)] == ["NonZero"]
    for action in (lambda: fast.export("m"), lambda: fast.to_onnx("m"), lambda: fast.imported):
        with pytest.raises(ImportRefused, match="no single plan, since NonZero"):
            action()


def test_sizes_of_several_stages() -> None:
    """Sizes that a stage makes are those of later plans, of any extent, 0 and 1 too."""
    fast = ladder.compile(MODELS["what is chosen by values"][0])
    for x in (torch.ones(2, 6), -torch.ones(2, 6), torch.eye(6)[:1], torch.randn(7, 6)):
        found, shape = fast(x)
        assert torch.allclose(found, 2 * x[x > 0].sqrt())
        assert shape.tolist() == list(found.shape)


def test_plans_with_steps_of_torch_are_files(tmp_path: Path) -> None:
    model, feeds = MODELS["a picture"]
    fast, x = ladder.compile(model), torch.from_numpy(feeds["x"])
    assert torch.equal(ladder.load(fast.export(tmp_path / "m.ladder"))(x), fast(x))
    for other in (x, "cpux"):
        with pytest.raises(ladder.DeviceError, match="no example inputs"):
            fast.export(tmp_path / "m.ladder", other)
    again = ladder.compile(fast.to_onnx(tmp_path / "m.onnx"))
    assert again.graph == fast.graph
    assert torch.equal(again(x), fast(x))


def test_errors_of_calls_name_the_node() -> None:
    fast = ladder.compile(MODELS["a shape from values"][0])
    with pytest.raises(NodeFailed, match=r"Reshape that computes 't'.*float32\[4, 6\]"):
        fast(torch.randn(4, 6), torch.tensor([5, 5]))
    with pytest.raises(ladder.DTypeError, match="'x'"):
        fast(torch.randn(4, 6).double(), torch.tensor([3, 8]))
    with pytest.raises(ladder.ShapeError, match=r"'x'.*\[n, 6\]"):
        fast(torch.randn(4, 5), torch.tensor([4, 5]))


def test_types_that_torch_lacks() -> None:
    text = """g (float[3] x, float s) => (q, y) {
        q = QuantizeLinear <output_dtype: int = 22> (x, s)  y = DequantizeLinear(q, s) }"""
    q, y = ladder.compile(model_of(text, 21))(torch.tensor([-9.0, 0.4, 2.6]), torch.tensor(1.0))
    assert q.dtype.name == "int4"
    assert y.tolist() == [-8.0, 0.0, 3.0]


def test_sequences_and_optional_values() -> None:
    text = """g (float[2] x, float[3] z) => (s, n, y) { s = SequenceConstruct(x, z, x)  n = SequenceLength(s)
        y = ConcatFromSequence <axis: int = 0> (s) }"""
    x, z = torch.randn(2), torch.randn(3)
    parts, count, y = ladder.compile(model_of(text))(x, z)
    assert [part.tolist() for part in parts] == [x.tolist(), z.tolist(), x.tolist()]
    assert (int(count), y.tolist()) == (3, [*x.tolist(), *z.tolist(), *x.tolist()])


def test_random_numbers_are_drawn_at_every_call() -> None:
    fast = ladder.compile(model_of("g (float[n] x) => (y) { r = RandomUniformLike(x)  y = Add(x, r) }"))
    x = torch.zeros(64)
    assert not torch.equal(fast(x), fast(x))
    seeded = "g () => (y) { y = RandomNormal <shape: ints = [4], seed: float = 7.0> () }"
    assert torch.equal(ladder.compile(model_of(seeded))(), ladder.compile(model_of(seeded))())


def packed(codes: np.ndarray) -> np.ndarray:
    """Return numbers of 4 bits two to a byte, the first in the low bits."""
    return (codes[..., ::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


@pytest.mark.parametrize("stated", [False, True])
def test_products_of_4_bits(stated: bool) -> None:
    """Against the product with the weight that the codes mean."""
    n, k, block = 6, 32, 16
    codes, scale = RANDOM.integers(0, 16, (n, k // block, block)), np.abs(floats(n, k // block)) + 0.1
    zero = RANDOM.integers(0, 16, (n, k // block)) if stated else np.full((n, k // block), 8)
    weight = ((codes - zero[..., None]) * scale[..., None]).reshape(n, k)
    extra = {"z": packed(zero).reshape(-1)} if stated else {}
    node = f"MatMulNBits <K: int = {k}, N: int = {n}, bits: int = 4, block_size: int = {block}>"
    text = f"g (float[b, {k}] x) => (y) {{ y = com.microsoft.{node} (x, w, s{', z' if stated else ''}) }}"
    x = floats(3, k)
    found = ladder.compile(model_of(text, w=packed(codes), s=scale.reshape(-1), **extra))(torch.from_numpy(x))
    np.testing.assert_allclose(found.numpy(), x @ weight.T.astype(np.float32), rtol=2e-4, atol=2e-4)


def test_attention_to_kept_keys() -> None:
    """Steps of one token with a cache give what attention to all tokens at once gives."""
    run, heads, kept, size = TABLE["com.microsoft::GroupQueryAttention"], 4, 2, 8
    op = Operation("com.microsoft::GroupQueryAttention", 1, {"num_heads": heads, "kv_num_heads": kept}, 3)
    q, k, v = (torch.randn(1, 5, n * size) for n in (heads, kept, kept))
    parts = [x.reshape(1, 5, -1, size).transpose(1, 2) for x in (q, k, v)]
    whole = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
    cache: list[Any] = [None, None]
    for step in range(5):
        rows = [x[:, step : step + 1] for x in (q, k, v)]
        lengths, total = torch.tensor([step], dtype=torch.int32), torch.tensor(step + 1)
        y, *cache = run(op, *rows, *cache, lengths, total)
        assert torch.allclose(y[0, 0], whole[0, :, step].reshape(-1), atol=1e-5)


@pytest.mark.parametrize("chunks", [[1] * 12, [4, 1, 7], [12]])
@pytest.mark.parametrize("capacity", [3, 5, 20])
def test_caches_of_a_window_keep_their_latest_rows_in_order(capacity: int, chunks: list[int]) -> None:
    run, window = TABLE["com.microsoft::GroupQueryAttention"], 3
    given = {"num_heads": 4, "kv_num_heads": 2, "local_window_size": window}
    op = Operation("com.microsoft::GroupQueryAttention", 1, {**given, "sliding_window_cache": 1}, 3)
    parts = [torch.randn(1, 12, n * 8) for n in (4, 2, 2)]
    bias = torch.randn(1, 4, 12, 12)
    end = torch.tensor([11]), torch.tensor(12)
    whole, keys, _ = run(Operation(op.name, 1, given, 3), *parts, None, None, *end, None, None, None, bias)
    cache, done = [torch.zeros(1, 2, capacity, 8)] * 2, 0
    for chunk in chunks:
        rows = slice(done, done := done + chunk)
        end = torch.tensor([done - 1]), torch.tensor(done)
        new = (x[:, rows] for x in parts)
        y, *cache = run(op, *new, *cache, *end, None, None, None, bias[:, :, rows, :done])
        torch.testing.assert_close(y, whole[:, rows])
    room = capacity - window + 1
    kept = 12 - room * math.ceil(max(12 - capacity, 0) / room)
    assert torch.equal(cache[0][:, :, :kept], keys[:, :, 12 - kept :])


def test_a_bias_spans_what_is_filled_of_a_cache() -> None:
    op = Operation("com.microsoft::GroupQueryAttention", 1, {"num_heads": 4, "kv_num_heads": 2}, 3)
    parts, end = [torch.randn(2, 6, n * 8) for n in (4, 2, 2)], (torch.tensor([5, 3]), torch.tensor(6))
    wide, last = [torch.zeros(2, 2, 9, 8)] * 2, (*end, None, None, None, torch.randn(1, 1, 6, 6))
    found, wanted = (TABLE[op.name](op, *parts, *cache, *last)[0] for cache in (wide, (None, None)))
    torch.testing.assert_close(found, wanted)


def test_forms_of_attention_that_are_not_supported_are_named() -> None:
    given = {"num_heads": 1, "kv_num_heads": 1, "causal": 0, "local_window_size": 2}
    op = Operation("com.microsoft::GroupQueryAttention", 1, given)
    operands = [*[torch.zeros(1, 1, 8)] * 3, None, None, torch.tensor([0]), torch.tensor(1)]
    with pytest.raises(ShapeError, match="with local_window_size=2 is not supported"):
        TABLE[op.name](op, *operands)


@pytest.mark.parametrize("count", [1, 2])
def test_windows_larger_than_volumes_find_nothing(count: int) -> None:
    given = {"kernel_shape": [3, 3, 3], "dilations": [2, 2, 2], "strides": [2, 2, 2]}
    op = Operation("MaxPool", 22, given, count)
    for dtype in (torch.int8, torch.float32):
        found = TABLE["MaxPool"](op, torch.ones(1, 2, 6, 6, 4, dtype=dtype))
        assert [x.shape for x in ([found] if count == 1 else found)] == [(1, 2, 1, 1, 0)] * count


def test_operators_of_other_domains_are_named() -> None:
    for text, message in (
        ("y = com.microsoft.Nothing(x)", "unknown ONNX operator 'com.microsoft::Nothing'"),
        ("y = com.microsoft.Gelus(x)", "did you mean 'com.microsoft::"),
    ):
        with pytest.raises(ImportRefused, match=message):
            ladder.compile(model_of(f"g (float[n] x) => (y) {{ {text} }}"))


def test_all_operators_of_the_standard_run() -> None:
    """Each has a row, a definition by others, or runs graphs."""
    newest = onnx.defs.onnx_opset_version()
    names = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    without = {
        name
        for name in names - set(TABLE) - set(CONTROL)
        if not (s := schema_of("", name, newest)).has_function and not s.has_context_dependent_function
    }
    assert without == set()


def test_paddles_open_extents() -> None:
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [-1, 3]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", infos[:1], infos[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=7)
    fast = ladder.compile(model)
    for rows in (1, 5):
        assert fast(torch.ones(rows, 3)).shape == (rows, 3)
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_value == -1


@pytest.mark.parametrize("group", [1, 2])
def test_pictures_that_no_window_fits_into(group: int) -> None:
    """They are refused before anything runs; what fits afterwards is computed."""
    text = f"""g (float[1, 4, h, 6] x) => (c, y) {{ c = Conv <group: int = {group}> (x, k)
        p = MaxPool <kernel_shape: ints = [1, 2]> (c)  y = Relu(p) }}"""
    fast = ladder.compile(model_of(text, k=floats(4, 4 // group, 3, 3)))
    with pytest.raises(ladder.LadderError, match="needs 3 <= h"):
        fast(torch.ones(1, 4, 2, 6))
    assert [tuple(value.shape) for value in fast(torch.ones(1, 4, 5, 6))] == [(1, 4, 3, 4), (1, 4, 3, 3)]


def test_shapes_of_open_sizes_by_values() -> None:
    """What a shape copies from a size is known; rules for places do not take sizes."""
    text = """g (float[n, 6] x, float[m, 4] z) => (y) { s = Shape(z)  r = Reshape(w, s)  y = Add(z, r) }"""
    fast = ladder.compile(model_of(text, w=np.arange(8, dtype=np.float32)))
    z = torch.randn(2, 4)
    assert torch.allclose(fast(torch.ones(3, 6), z), z + torch.arange(8.0).reshape(2, 4))


def test_rules_take_the_defaults_that_the_standard_states() -> None:
    """A one-sided transform of a known length has half as many rows."""
    window, x = floats(8), torch.randn(1, 16)
    model = model_of("g (float[1, 16] x) => (y) { y = STFT(x, h, w) }", h=np.int64(4), w=window)
    found = ladder.compile(model)(x)
    frames = np.stack([x.numpy()[0, at : at + 8] * window for at in (0, 4, 8)])
    wanted = np.fft.rfft(frames)
    np.testing.assert_allclose(found[0, ..., 0].numpy(), wanted.real, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[0, ..., 1].numpy(), wanted.imag, rtol=1e-4, atol=1e-5)


def test_transforms_in_16_bits() -> None:
    """They are computed in float32 and rounded: torch has none."""
    window, x = floats(8), torch.randn(1, 16)
    text = """g (float[1, 16] x) => (y, z) { c = Cast <to = 10> (x)  y = STFT(c, h, w)
        u = Unsqueeze(c, last)  z = DFT <axis = 1> (u) }"""
    stored = {"h": np.int64(4), "last": np.array([2])}
    half = ladder.compile(model_of(text, **stored, w=window.astype(np.float16)))(x)
    wide = ladder.compile(model_of(text.replace("10", "1"), **stored, w=window))(x)
    for narrow, wanted in zip(half, wide, strict=True):
        assert narrow.dtype == torch.float16
        torch.testing.assert_close(narrow.float(), wanted, rtol=1e-2, atol=2e-2)


def test_softmax_of_old_versions_takes_all_axes_from_one_on() -> None:
    x = torch.randn(2, 3, 4)
    found = ladder.compile(model_of("g (float[2, 3, 4] x) => (y) { y = Softmax <axis: int = 1> (x) }", 11))(x)
    assert torch.allclose(found, x.flatten(1).softmax(-1).reshape(x.shape))


def test_bodies_run_alone() -> None:
    model, feeds = MODELS["a branch and a loop"]
    body = Body(model.graph, {"": 18})
    (found,) = body([], {name: torch.from_numpy(np.array(value)) for name, value in feeds.items()})
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float", "float16", "double", "int32"])
def test_sign_of_what_is_no_number(dtype: str) -> None:
    """NaN in the standard's reference (and in onnxruntime, but for its float16)."""
    model = model_of(f"g ({dtype}[n] x) => (y) {{ s = Sign(x)  y = Neg(s) }}")
    x = torch.tensor([math.nan, 0.0, -0.0, math.inf, -math.inf, 1e-7, -2.0, 3.0])
    given = x.nan_to_num(4, 5, -5).int() if dtype == "int32" else x.to(getattr(torch, dtype))
    compiled = ladder.compile(model)
    (expected,) = ReferenceEvaluator(model).run(None, {"x": given.numpy()})
    for _ in range(2):
        np.testing.assert_array_equal(compiled(given).numpy(), expected)
