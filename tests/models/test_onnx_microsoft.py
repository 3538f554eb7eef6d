"""Operators of com.microsoft that have kernels of ours, and attention as its definition has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper, parser

import ladder
from benchmarks import onnx_suite
from ladder.frontend.onnx_stages import Imported
from ladder.runtime.model import build
from ladder.runtime.onnx_ops.operation import Operation
from ladder.runtime.onnx_ops.table import TABLE
from tests.models.test_onnx_torch import packed
from tile_types.errors import LadderError, ShapeError
from tile_types.library import get_type
from tile_types.packing import pack_codes

pytestmark = pytest.mark.usefixtures("one_schedule")

RANDOM = np.random.default_rng(5)


def floats(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def model_of(text: str, **stored: Any) -> Any:
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 17, "com.microsoft" : 1]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in stored.items())
    return model


ATTENTION = {
    "groups": (
        "GroupQueryAttention <num_heads: int = 4, kv_num_heads: int = 2> (e, , , p, p, n, t)",
        "e = com.microsoft.GatherBlockQuantized <block_size: int = 16, quantize_axis: int = 1> (table, i, s)",
    ),
    "heads": ("MultiHeadAttention <num_heads: int = 4> (x, x, x)", ""),
    "one weight": ("Attention <num_heads: int = 4> (x, w3, b3)", ""),
}
"""Node of attention, with what comes before it."""


@pytest.mark.parametrize("form", ATTENTION)
def test_what_follows_attention_is_a_plan(form: str) -> None:
    node, before = ATTENTION[form]
    stored = {
        "table": RANDOM.integers(0, 256, (9, 32)).astype(np.uint8),
        "s": floats(9, 4),
        "w": floats(32, 8),
        "w3": floats(32, 96),
        "b3": floats(96),
    }
    inputs = "float[b, l, 32] x"
    if form == "groups":
        inputs = "int64[b, l] i, float[b, 2, p, 8] p, int32[b] n, int32 t"
    text = f"g ({inputs}) => (y) {{ {before} a = com.microsoft.{node} z = MatMul (a, w) y = Relu (z) }}"
    model = model_of(text, **{name: value for name, value in stored.items() if name in text})
    after = ladder.compile(model).staged.stages[-1]
    assert isinstance(after, Imported)
    assert {"matmul", "relu"} <= {one.operator for one in after.program.graph.nodes}


@pytest.mark.parametrize("form", ["middle", "bytes", "floats", "8 bits", "short"])
def test_stored_weights_of_few_bits_are_multiplied_by_kernels(form: str, tmp_path: Path) -> None:
    """Against the product with the weight that the codes mean; exported, and written and read, alike."""
    n, block, bits = 6, 16, 8 if form == "8 bits" else 4
    k = 40 if form == "short" else 48
    blocks = -(-k // block)
    codes = RANDOM.integers(0, 1 << bits, (n, blocks, block))
    scale, zero = np.abs(floats(n, blocks)) + 0.1, np.full((n, blocks), 1 << (bits - 1), np.float32)
    stored: dict[str, Any] = {
        "w": codes.astype(np.uint8) if bits == 8 else packed(codes),
        "s": scale.reshape(-1),
    }
    if form == "bytes":
        zero = RANDOM.integers(0, 16, (n, blocks))
        stored["z"] = packed(np.pad(zero, ((0, 0), (0, blocks % 2)))).reshape(-1)
    if form == "floats":
        zero = RANDOM.uniform(0, 15, (n, blocks)).astype(np.float32)
        stored["z"] = zero.reshape(-1)
    weight = ((codes - zero[..., None]) * scale[..., None]).reshape(n, -1)[:, :k]
    node = f"MatMulNBits <K: int = {k}, N: int = {n}, bits: int = {bits}, block_size: int = {block}>"
    names = ", ".join(["x", *stored])
    model = ladder.compile(
        model_of(f"g (float[b, 2, {k}] x) => (y) {{ y = com.microsoft.{node} ({names}) }}", **stored)
    )
    x = floats(3, 2, k)
    found = model(torch.from_numpy(x))
    np.testing.assert_allclose(found.numpy(), x @ weight.T.astype(np.float32), rtol=2e-4, atol=2e-4)
    assert "onnx." not in model.plan()
    if form == "bytes":
        exported = ladder.load(model.export(str(tmp_path / "m.ladder")))
        written = ladder.compile(model.to_onnx(str(tmp_path / "m.onnx")))
        for other in (exported, written):
            assert torch.equal(other(torch.from_numpy(x)), found)


FUNCTIONS = {
    "Gelu": ("(x)", lambda x, z, s: F.gelu(x)),
    "BiasGelu": ("(x, s)", lambda x, z, s: F.gelu(x + s)),
    "FastGelu": ("(x, s)", lambda x, z, s: F.gelu(x + s, approximate="tanh")),
    "QuickGelu": ("<alpha: float = 1.5> (x)", lambda x, z, s: x * torch.sigmoid(1.5 * x)),
    "BiasAdd": ("(x, s, z)", lambda x, z, s: x + s + z),
    "SkipLayerNormalization": (
        "<epsilon: float = 0.001> (x, z, s, s, s)",
        lambda x, z, s: F.layer_norm(x + z + s, (8,), s, s, 0.001),
    ),
    "SkipSimplifiedLayerNormalization": (
        "<epsilon: float = 0.001> (x, z, s, s)",
        lambda x, z, s: F.rms_norm(x + z + s, (8,), s, 0.001),
    ),
    "FusedMatMul": ("<transB: int = 1, alpha: float = 0.5> (x, z)", lambda x, z, s: x @ z.mT / 2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_tile_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_kernels", onnx_suite.without_kernels)
    body, wanted = FUNCTIONS[name]
    text = f"g (float[b, 5, 8] x, float[b, 5, 8] z, float[8] s) => (y) {{ y = com.microsoft.{name} {body} }}"
    x, z, s = (torch.from_numpy(floats(*shape)) for shape in ((2, 5, 8), (2, 5, 8), (8,)))
    model = ladder.compile(model_of(text))
    assert torch.allclose(model(x, z, s), wanted(x, z, s), atol=2e-6)
    assert "onnx." not in model.plan()


@pytest.mark.parametrize("sides", [("A",), ("B",), ("A", "B")])
@pytest.mark.parametrize("turned", [0, 1])
def test_batches_behind_rows(sides: tuple[str, ...], turned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What onnxruntime's optimizer makes of attention keeps the heads where they lay."""
    monkeypatch.setattr(build, "build_kernels", onnx_suite.without_kernels)
    given = ", ".join([*(f"transBatch{side}: int = 1" for side in sides), f"transB: int = {turned}"])
    a, b = torch.randn(2, 3, 4, 6), torch.randn(2, 3, 6, 4)
    operands = {"A": a, "B": b.mT if turned else b}
    behind = [x.movedim(-2, 0).contiguous() if side in sides else x for side, x in operands.items()]
    first, second = (", ".join(map(str, x.shape)) for x in behind)
    body = f"y = com.microsoft.FusedMatMul <{given}> (a, b)"
    text = f"g (float[{first}] a, float[{second}] b) => (y) {{ {body} }}"
    model = ladder.compile(model_of(text))
    assert torch.allclose(model(*behind), a @ b, atol=1e-5)
    assert "onnx." not in model.plan()
    assert "with the shapes of a call" not in model.plan()


@pytest.mark.parametrize(
    ("name", "numbers", "activation"),
    [
        ("Clip", [-0.5, 0.25], lambda x: x.clamp(-0.5, 0.25)),
        ("HardSigmoid", [0.25, 0.4], lambda x: (0.25 * x + 0.4).clamp(0, 1)),
        ("LeakyRelu", [0.3], lambda x: F.leaky_relu(x, 0.3)),
        ("HardSwish", [], F.hardswish),
    ],
)
def test_convolutions_with_activations(
    name: str, numbers: list[float], activation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With numbers of their own, as onnxruntime's optimizer writes them: one plan."""
    monkeypatch.setattr(build, "build_kernels", onnx_suite.without_kernels)
    given = f'activation: string = "{name}"' + (f", activation_params: floats = {numbers}" if numbers else "")
    body = f"y = com.microsoft.FusedConv <{given}> (x, w)"
    text = f"g (float[b, 3, 8, 8] x, float[4, 3, 3, 3] w) => (y) {{ {body} }}"
    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    model = ladder.compile(model_of(text))
    assert torch.allclose(model(x, w), activation(F.conv2d(x, w)), atol=1e-5)
    assert "onnx." not in model.plan()
    assert "with the shapes of a call" not in model.plan()


@pytest.mark.parametrize("added", [False, True])
def test_convolutions_whose_channels_come_last(added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As optimizers for GPUs write them, with weights alike unless a sum is fused."""
    monkeypatch.setattr(build, "build_kernels", onnx_suite.without_kernels)
    body = "NhwcConv <group: int = 2, dilations: ints = [2, 1]> (x, w, c)"
    if added:
        body = body.replace("Conv <", 'FusedConv <activation: string = "Relu", ').replace("c)", "c, z)")
    text = f"g (float[b, 8, 8, 4] x, float[b, 4, 6, 6] z) => (y) {{ y = com.microsoft.{body} }}"
    w, c = floats(6, 2, 3, 3), floats(6)
    stored = {"w": w if added else np.ascontiguousarray(w.transpose(0, 2, 3, 1)), "c": c}
    x, z = torch.randn(2, 8, 8, 4), torch.randn(2, 4, 6, 6)
    first, bias = torch.from_numpy(w), torch.from_numpy(c)
    wanted = F.conv2d(x.movedim(-1, 1), first, bias, groups=2, dilation=(2, 1)).movedim(1, -1)
    model = ladder.compile(model_of(text, **stored))
    for rows in (2, 1):
        found = model(x[:rows], z[:rows])
        assert torch.allclose(found, F.relu(wanted + z)[:rows] if added else wanted[:rows], atol=1e-5)
    assert "with the shapes of a call" not in model.plan()


@pytest.mark.parametrize(
    ("name", "activation"), [("Relu", torch.relu), ("LeakyRelu", lambda x: F.leaky_relu(x, 0.3))]
)
def test_a_product_with_an_activation(name: str, activation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With numbers of its own, which `FusedGemm` states one by one."""
    monkeypatch.setattr(build, "build_kernels", onnx_suite.without_kernels)
    given = f'activation: string = "{name}", activation_alpha: float = 0.3, transB: int = 1'
    body = f"y = com.microsoft.FusedGemm <{given}> (x, z, s)"
    text = f"g (float[n, 8] x, float[5, 8] z, float[5] s) => (y) {{ {body} }}"
    x, z, s = (torch.from_numpy(floats(*shape)) for shape in ((2, 8), (5, 8), (5,)))
    assert torch.allclose(ladder.compile(model_of(text))(x, z, s), activation(x @ z.T + s), atol=1e-5)


def attention(q: torch.Tensor, *more: Any, **given: Any) -> Any:
    op = Operation("com.microsoft::MultiHeadAttention", 1, {"num_heads": 2, **given}, 1)
    return TABLE["com.microsoft::MultiHeadAttention"](op, q, *more)[0]


def test_masks_of_attention() -> None:
    """Numbers of keys, ends and starts, and keys; a column holds for none; packed operands are the parts."""
    q, k, v = (torch.randn(2, 5, 8) for _ in range(3))
    ends, starts = torch.tensor([3, 5]), torch.tensor([0, 2])
    places = torch.arange(5)
    kept = (places < ends[:, None]) & (places >= starts[:, None])
    heads = [x.reshape(2, 5, 2, 4).transpose(1, 2) for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*heads, attn_mask=kept[:, None, None]).transpose(1, 2).flatten(2)
    for mask in (torch.cat([ends, starts]), kept.int(), kept[:, None].expand(2, 5, 5).int()):
        assert torch.allclose(attention(q, k, v, None, mask.int()), wanted, atol=1e-5)
    plain = attention(q, k, v)
    assert torch.equal(attention(q, k, v, None, torch.zeros(2, 1, dtype=torch.int32)), plain)
    by_head = [x.reshape(2, 5, 2, 4) for x in (q, k, v)]
    assert torch.equal(attention(torch.stack(by_head, 3)), plain)
    assert torch.equal(attention(q, torch.stack(by_head[1:], 3)), plain)


@pytest.mark.parametrize("before", [0, 3])
def test_causal_masks_begin_at_the_first_key_that_is_new(before: int) -> None:
    """A query sees those kept before and as many new ones as its number; the last one sees all."""
    q, k, v = (torch.randn(2, rows, 8) for rows in (4, 6, 6))
    kept = [torch.randn(2, 2, before, 4) for _ in range(2)] if before else []
    wanted = [x.reshape(2, -1, 2, 4).transpose(1, 2) for x in (q, k, v)]
    if kept:
        wanted[1:] = [torch.cat([old, x], 2) for old, x in zip(kept, wanted[1:], strict=True)]
    seen = torch.arange(6 + before) <= torch.tensor([0, 1, 2, 5])[:, None] + before
    found = F.scaled_dot_product_attention(*wanted, attn_mask=seen).transpose(1, 2).flatten(2)
    given = attention(q, k, v, None, None, None, *kept, unidirectional=1)
    assert torch.allclose(given, found, atol=1e-5)
    assert attention(q[:, :0], k, v, unidirectional=1).shape == (2, 0, 8)


@pytest.mark.parametrize("positions", [[0], [[0, 1, 2]]])
def test_positions_of_rotations(positions: list[Any]) -> None:
    """By a first position or one of each row; batches without rows keep their shape."""
    table = torch.rand(8, 2)
    op = Operation("com.microsoft::RotaryEmbedding", 1, {"num_heads": 2})
    x = torch.randn(1, 3, 8)
    found = TABLE[op.name](op, x, torch.tensor(positions), table, table)
    left, right = x.reshape(1, 3, 2, 4).split(2, -1)
    angle = table[:3, None]
    wanted = torch.cat([left * angle - right * angle, left * angle + right * angle], -1).flatten(2)
    assert torch.allclose(found, wanted, atol=1e-6)
    none = torch.zeros(1, 0, dtype=torch.int64)
    assert TABLE[op.name](op, x[:, :0], none, table, table).shape == (1, 0, 8)
    packed = Operation(op.name, 1, {"num_heads": 2, "is_packed_batching": 1})  # rows of several sequences
    assert torch.equal(TABLE[op.name](packed, x, torch.tensor(positions), table, table), found)


def test_inverses_of_halves_are_computed_in_float32() -> None:
    x = torch.tensor([[[4.0, 7.0], [2.0, 6.0]]])
    found = TABLE["com.microsoft::Inverse"](Operation("com.microsoft::Inverse", 1, {}), x.half())
    assert found.dtype == torch.float16
    assert torch.equal(found, torch.linalg.inv(x).half())


def test_rows_behind_those_that_a_buffer_holds() -> None:
    """With the number of rows that are filled, as with the rows themselves; the buffer is returned."""
    q, k, v = (torch.randn(1, 1, 8) for _ in range(3))
    buffers = [torch.randn(1, 2, 6, 4) for _ in range(2)]
    op = Operation("com.microsoft::DecoderMaskedMultiHeadAttention", 1, {"num_heads": 2}, 3)
    run = TABLE[op.name]
    filled = [x[:, :, :3] for x in buffers]
    wanted, keys, _ = run(op, q, k, v, None, None, *filled)
    found, kept, _ = run(op, q, k, v, None, None, *buffers, torch.tensor([3]))
    assert torch.allclose(found, wanted, atol=1e-6)
    assert torch.equal(kept, torch.cat([keys, buffers[0][:, :, 4:]], 2))


def by_tokens(name: str, operands: list[Any], **given: Any) -> tuple[Any, Any]:
    """Return what an operator gives of all tokens at once, and of one after the other with its state."""
    op = Operation(f"com.microsoft::{name}", 1, given, 2)
    axis, run = (2 if name == "CausalConvWithState" else 1), TABLE[f"com.microsoft::{name}"]
    state, rows = None, []
    for at in range(operands[0].shape[axis]):
        step = [
            x.narrow(axis, at, 1) if x is not None and x.ndim == 3 and x.shape[1] > 1 else x for x in operands
        ]
        found, state = run(op, *step[:3], state, *step[3:])
        rows.append(found)
    whole, last = run(op, *operands[:3], None, *operands[3:])
    assert torch.allclose(last, state, atol=1e-5)
    return whole, torch.cat(rows, axis)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_linear_attention(rule: str) -> None:
    """Against the recurrence as matrices; token by token as at once."""
    q, k, v = torch.randn(1, 4, 6), torch.randn(1, 4, 6) / 2, torch.randn(1, 4, 10)
    decay, beta = -torch.rand(1, 4, 2), torch.rand(1, 4, 2)
    given = [decay if "gated" in rule else None, beta if "delta" in rule else None]
    whole, rows = by_tokens(
        "LinearAttention", [q, k, v, *given], q_num_heads=2, kv_num_heads=2, update_rule=rule, scale=0.5
    )
    assert torch.allclose(whole, rows, atol=1e-6)
    state = torch.zeros(3, 5)
    for at in range(4):
        key, value = k[0, at, :3], v[0, at, :5]
        state = state * decay[0, at, 0].exp() if "gated" in rule else state
        state = state + torch.outer(
            key, beta[0, at, 0] * (value - state.T @ key) if "delta" in rule else value
        )
        assert torch.allclose(whole[0, at, :5], q[0, at, :3] @ state / 2, atol=1e-5)


def test_causal_convolutions_keep_what_they_need() -> None:
    x, weight, bias = torch.randn(1, 3, 7), torch.randn(3, 1, 3), torch.randn(3)
    whole, rows = by_tokens("CausalConvWithState", [x, weight, bias], dilation=2, activation="silu")
    assert torch.allclose(whole, rows, atol=1e-6)
    wanted = F.silu(F.conv1d(F.pad(x, [4, 0]), weight, bias, dilation=2, groups=3))
    assert torch.allclose(whole, wanted, atol=1e-6)
    with pytest.raises(ShapeError, match="ndim=2 is not supported"):
        by_tokens("CausalConvWithState", [x, weight, bias], ndim=2)


@pytest.mark.parametrize(("kind", "book"), [(0, "bnb_fp4"), (1, "nf4")])
@pytest.mark.parametrize("k", [32, 24])  # whole blocks in a row, and blocks across rows
def test_products_with_weights_of_bitsandbytes(kind: int, book: str, k: int) -> None:
    """onnxruntime's `MatMulBnb4`: two codes a byte, the high half first, a scale for each 16."""
    n, x = 10, torch.from_numpy(floats(3, k))
    octets, scales = RANDOM.integers(0, 256, n * k // 2).astype(np.uint8), np.abs(floats(n * k // 16))
    given = f"<K: int = {k}, N: int = {n}, block_size: int = 16, quant_type: int = {kind}>"
    text = f"g (float[m, {k}] x) => (y) {{ y = com.microsoft.MatMulBnb4 {given} (x, w, s) }}"
    found = ladder.compile(model_of(text, w=octets, s=scales))(x)
    codes = np.stack([octets >> 4, octets & 15], 1).reshape(-1, 16)
    values = np.asarray(get_type(book).decode_array(codes), np.float64) * scales[:, None]
    torch.testing.assert_close(found, (x.double() @ torch.from_numpy(values.reshape(n, k)).T).float())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("zeros", [False, True])
def test_experts_of_few_bits(bits: int, groups: int, zeros: bool) -> None:
    """onnxruntime's `QMoE` is `MoE` with the values of its codes, the lowest bits of a byte first."""
    given = {"k": 2, "activation_type": "silu", "normalize_routing_weights": 1}
    x, router, stored, plain = floats(5, 8), floats(5, 3), [], []
    for n, k in ((4, 8), (8, 4)):
        codes = RANDOM.integers(0, 1 << bits, (3, n, k)).astype(np.uint8)
        scale = np.abs(floats(3, n, groups))
        zero = RANDOM.integers(0, 1 << bits, (3, n, groups)).astype(np.uint8)
        middle = zero.astype(np.float32) if zeros else np.float32(1 << (bits - 1))
        values = (codes.reshape(3, n, groups, -1) - np.expand_dims(middle, -1)) * scale[..., None]
        plain.append(values.reshape(3, n, k).astype(np.float32))
        by_rows = [array.reshape(3, n) if groups == 1 else array for array in (scale, zero)]
        stored.append([pack_codes(codes, bits), by_rows[0], pack_codes(by_rows[1], bits) if zeros else None])
    (w1, s1, z1), (w2, s2, z2) = stored
    op = Operation("com.microsoft::QMoE", 1, {**given, "expert_weight_bits": bits})
    tensors = [x, router, w1, s1, None, w2, s2, None, None, None, None, z1, z2]
    found = TABLE[op.name](op, *(None if a is None else torch.from_numpy(np.asarray(a)) for a in tensors))
    op = Operation("com.microsoft::MoE", 1, given)
    x, router, first, second = map(torch.from_numpy, (x, router, *plain))
    torch.testing.assert_close(found, TABLE[op.name](op, x, router, first, None, second))


def test_experts_with_gelu() -> None:
    """onnxruntime takes its approximation by tanh."""
    x, first, second = torch.randn(5, 4), torch.randn(1, 6, 4), torch.randn(1, 4, 6)
    op = Operation("com.microsoft::MoE", 1, {"k": 1, "activation_type": "gelu"})
    found = TABLE[op.name](op, x, torch.zeros(5, 1), first, None, second)
    torch.testing.assert_close(found, F.gelu(x @ first[0].T, approximate="tanh") @ second[0].T)


@pytest.mark.parametrize("fusion", [1, 2])
def test_experts(fusion: int) -> None:
    """Against each row's own networks."""
    x, router = torch.randn(5, 4), torch.randn(5, 3)
    first, second = torch.randn(3, 12, 4), torch.randn(3, 4, 6)
    op = Operation("com.microsoft::MoE", 1, {"k": 2, "activation_type": "swiglu", "swiglu_fusion": fusion})
    found = TABLE[op.name](op, x, router, first, None, second)
    for row, shares, y in zip(x, router.softmax(-1), found, strict=True):
        wanted = torch.zeros(4)
        for expert in shares.topk(2).indices.tolist():
            inner = first[expert] @ row
            gate, value = (inner[::2], inner[1::2]) if fusion == 1 else inner.chunk(2)
            wanted += shares[expert] * (second[expert] @ (F.silu(gate) * value))
        assert torch.allclose(y, wanted, atol=1e-5)


def test_what_no_key_is_left_for() -> None:
    """A row without keys is the mean of all values that scores are alike for, as onnxruntime has it."""
    q, v = torch.zeros(1, 3, 8), torch.randn(1, 3, 8)
    found = attention(q, q, v, None, torch.zeros(1, 3, dtype=torch.int32))
    assert torch.allclose(found, v.mean(1, keepdim=True).expand(1, 3, 8), atol=1e-6)


def test_norms_of_float16_by_a_scale_of_float32() -> None:
    """onnxruntime writes casts into norms: their result has the scale's type."""
    text = """g (float16[2, 8] x, float[8] s) => (float[2, 8] y, float[2, 8] z) {
        y = com.microsoft.LayerNormalization (x, s)
        z = com.microsoft.SimplifiedLayerNormalization (x, s) }"""
    x, s = torch.from_numpy(floats(2, 8)).half(), torch.from_numpy(floats(8))
    y, z = ladder.compile(model_of(text))(x, s)
    assert torch.allclose(y, F.layer_norm(x.float(), (8,), s), atol=1e-5)
    assert torch.allclose(z, F.rms_norm(x.float(), (8,), s, 1e-5), atol=1e-5)


def test_labels_of_version_1() -> None:
    op = Operation("ai.onnx.ml::LabelEncoder", 1, {"classes_strings": ["a", "b"], "default_int64": -7})
    run = TABLE[op.name]
    assert run(op, np.array(["b", "c", "a"], object)).tolist() == [1, -7, 0]
    assert run(op, torch.tensor([1, 5])).tolist() == ["b", "_Unused"]


def test_results_that_no_row_gives_are_named() -> None:
    body = "y, k, v, q, s = com.microsoft.MultiHeadAttention <num_heads: int = 2> (x, x, x)"
    text = f"g (float[2, 1, 8] x) => (y, k, v, q, s) {{ {body} }}"
    with pytest.raises(LadderError, match="does not compute 's'"):
        ladder.compile(model_of(text))(torch.zeros(2, 1, 8))


def test_pictures_are_cropped() -> None:
    x = torch.arange(48.0).reshape(1, 1, 6, 8)
    run = TABLE["Crop"]
    assert torch.equal(run(Operation("Crop", 1, {"border": [1, 2, 3, 1]}), x), x[:, :, 2:5, 1:5])
    assert torch.equal(
        run(Operation("Crop", 1, {"border": [1, 2, 0, 0], "scale": [2, 3]}), x), x[:, :, 2:4, 1:4]
    )


TABLES = {
    "int4": (ml_dtypes.int4, -8, 0),
    "uint4": (ml_dtypes.uint4, 0, 0),
    "bytes of two codes": (np.uint8, 0, 8),
    "bytes": (np.uint8, 0, 128),
}
"""How a table is stored -> type, least number, and the zero point where none is given."""


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("columns", [32, 20])
@pytest.mark.parametrize("form", TABLES)
def test_rows_of_stored_tables(form: str, columns: int, zeros: bool) -> None:
    """onnxruntime's definition: bytes have a zero point in the middle unless they are given others."""
    kind, least, middle = TABLES[form]
    bits = 8 if form == "bytes" else 4
    codes, zero = (RANDOM.integers(least, least + 2**bits, (9, n)) for n in (columns, 2))
    stored = {"table": codes, "zero": zero} if zeros else {"table": codes}
    if form == "bytes of two codes":
        stored = {name: array[:, ::2] | array[:, 1::2] << 4 for name, array in stored.items()}
    stored = {name: array.astype(kind) for name, array in stored.items()}
    scale, at = floats(9, 2), np.array([[3, 0], [8, 3]])
    given = f"<block_size: int = 16, quantize_axis: int = 1, bits: int = {bits}>"
    node = f"com.microsoft.GatherBlockQuantized {given} (table, i, s{', zero' if zeros else ''})"
    text = f"g (int64[b, l] i) => (y) {{ y = {node} }}"
    found = ladder.compile(model_of(text, s=scale, **stored))(torch.from_numpy(at))
    zero, factor = (np.repeat(x, 16, -1)[:, :columns] for x in (zero, scale))
    wanted = (codes - (zero if zeros else middle)) * factor
    assert np.array_equal(found.numpy(), wanted[at].astype(np.float32))


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("taken", "divided"), [(0, 0), (1, 0), (2, 1), (-1, 0), (1, -1), (0, -1)])
@pytest.mark.parametrize("form", ["int4", "uint4"])
def test_stored_tables_are_taken_along_any_axis(form: str, taken: int, divided: int, zeros: bool) -> None:
    """Where it is the axis of blocks, too, an element has the scale of its own block."""
    kind, least, _ = TABLES[form]
    shape = [18, 20, 33]
    few = [-(-n // 16) if axis == divided % 3 else n for axis, n in enumerate(shape)]
    codes, zero = (RANDOM.integers(least, least + 16, extents) for extents in (shape, few))
    stored = {"table": codes.astype(kind)} | ({"zero": zero.astype(kind)} if zeros else {})
    scale, at = floats(*few), np.array([[3, 0, -1], [8, 3, 17]])
    given = f"<block_size: int = 16, gather_axis: int = {taken}, quantize_axis: int = {divided}>"
    node = f"com.microsoft.GatherBlockQuantized {given} (table, i, s{', zero' if zeros else ''})"
    model = ladder.compile(model_of(f"g (int64[b, l] i) => (y) {{ y = {node} }}", s=scale, **stored))
    zero, factor = (np.repeat(x, 16, divided).take(range(shape[divided]), divided) for x in (zero, scale))
    wanted = (codes - (zero if zeros else 0)) * factor
    found = model(torch.from_numpy(at))
    assert np.array_equal(found.numpy(), wanted.take(at, taken).astype(np.float32))
    with pytest.raises(LadderError, match="out of bounds"):
        model(torch.from_numpy(at - 40))


def test_attention_of_bytes_is_that_of_their_values() -> None:
    """Its results are of the type of the scales, also where the file does not say so."""
    codes = RANDOM.integers(-128, 128, (16, 48)).astype(np.int8)
    x = torch.from_numpy(RANDOM.integers(0, 256, (2, 3, 16)).astype(np.uint8))
    stored = {
        "b": floats(48),
        "w": codes,
        "sx": np.float32(0.02),
        "sw": np.float32(0.01),
        "zx": np.uint8(120),
    }
    node = "com.microsoft.QAttention <num_heads: int = 2, unidirectional: int = 1> (x, w, b, sx, sw, , zx)"
    found = ladder.compile(model_of(f"g (uint8[b, l, 16] x) => (y) {{ y = {node} }}", **stored))(x)
    plain = "com.microsoft.Attention <num_heads: int = 2, unidirectional: int = 1> (x, w, b)"
    model = model_of(
        f"g (float[b, l, 16] x) => (y) {{ y = {plain} }}", b=stored["b"], w=codes * np.float32(0.01)
    )
    wanted = ladder.compile(model)((x.float() - 120) * 0.02)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


FUSED = {
    "Elu": ({"alpha": 0.3}, lambda x: F.elu(x, 0.3)),
    "Selu": ({"alpha": 0.5, "gamma": 1.5}, lambda x: 1.5 * F.elu(x, 0.5)),
    "Softplus": ({}, F.softplus),
    "Softsign": ({}, F.softsign),
    "ThresholdedRelu": ({"alpha": 0.7}, lambda x: F.threshold(x, 0.7, 0.0)),
}


@pytest.mark.parametrize("name", FUSED)
def test_products_fused_with_functions(name: str) -> None:
    numbers, function = FUSED[name]
    given = "".join(f", activation_{key}: float = {value}" for key, value in numbers.items())
    node = f'com.microsoft.FusedGemm <activation: string = "{name}"{given}> (x, w, b)'
    w, b, x = floats(4, 5), floats(5), torch.from_numpy(floats(3, 4))
    found = ladder.compile(model_of(f"g (float[n, 4] x) => (y) {{ y = {node} }}", w=w, b=b))(x)
    torch.testing.assert_close(found, function(x @ torch.from_numpy(w) + torch.from_numpy(b)))
