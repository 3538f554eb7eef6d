"""Operators of ONNX that were for trial, rare ones, and operands that do not fit, as in onnxruntime."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F

import ladder
from ladder.runtime.onnx_ops.operation import Operation
from ladder.runtime.onnx_ops.table import TABLE
from tile_types.errors import ShapeError


def run(name: str, version: int, given: dict[str, Any], *operands: Any) -> Any:
    return TABLE[name](Operation(name, version, given), *operands)


@pytest.mark.parametrize("across", [0, 1])
@pytest.mark.parametrize("scaled", [0, 1])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 4), (3, 2)], ids=str)
def test_mean_variance_normalization_had_other_axes(across: int, scaled: int, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    axes = [axis for axis in range(len(shape)) if axis != 1 or across]
    wanted = x - x.mean(axes, keepdim=True)
    wanted = wanted / x.var(axes, keepdim=True, unbiased=False).sqrt() if scaled else wanted
    given = {"across_channels": across, "normalize_variance": scaled}
    torch.testing.assert_close(run("MeanVarianceNormalization", 1, given, x), wanted)


def test_scale_and_dynamic_slice() -> None:
    x = torch.arange(24.0).reshape(4, 6)
    assert torch.equal(run("Scale", 1, {"scale": 0.5}, x), x / 2)
    assert torch.equal(run("Scale", 1, {}, x), x)
    starts, ends, axes = torch.tensor([1, -4]), torch.tensor([99, -1]), torch.tensor([0, -1])
    assert torch.equal(run("DynamicSlice", 1, {}, x, starts, ends, axes), x[1:, -4:-1])
    assert torch.equal(run("DynamicSlice", 1, {}, x, starts[:1], ends[:1]), x[1:])


@pytest.mark.parametrize(
    ("border", "scale"),
    [
        ([1, 2, 3], None),
        ([5, 0, 4, 0], None),
        ([0, 4, 0, 3], None),
        ([-1, 0, 0, 0], None),
        ([0, 0, 0, 0], [2]),
        ([0, 0, 0, 0], []),
        ([0, 0, 0, 0], [7, 2]),
        ([2**62, 0, 2**62, 0], None),
    ],
    ids=str,
)
def test_crops_that_do_not_fit_are_one_error(border: list[int], scale: list[int] | None) -> None:
    given = {"border": border} if scale is None else {"border": border, "scale": scale}
    with pytest.raises(ShapeError, match="Crop of"):
        run("Crop", 1, given, torch.zeros(1, 1, 6, 8))
    assert run("Crop", 1, {"border": [4, 0, 4, 0]}, torch.zeros(1, 1, 6, 8)).shape == (1, 1, 6, 0)


def test_transposed_convolutions_take_pads_in_the_call() -> None:
    x, w, bias = torch.randn(2, 4, 5, 6), torch.randn(4, 3, 3, 3), torch.randn(3)
    name = "com.microsoft::ConvTransposeWithDynamicPads"
    found = run(name, 1, {"strides": [2, 2]}, x, w, torch.tensor([1, 1, 1, 1]), bias)
    torch.testing.assert_close(found, F.conv_transpose2d(x, w, bias, 2, 1))
    torch.testing.assert_close(run(name, 1, {}, x, w), F.conv_transpose2d(x, w))
    with pytest.raises(ShapeError, match=r"filters \[3, 3\] of images"):
        run(name, 1, {}, x, w[0, 0])
    with pytest.raises(ShapeError, match=r"filters \[\] of images"):
        run("Conv", 11, {}, x, torch.tensor(1.0))


@pytest.mark.parametrize("unsigned", [True, False])
@pytest.mark.parametrize(("version", "axis"), [(11, None), (13, None), (13, 1)])
def test_softmax_of_codes(version: int, axis: int | None, unsigned: bool) -> None:
    """Its default axis is that of the stated version; one over the scale is cut off to a whole number."""
    kind, zero = (torch.uint8, 3) if unsigned else (torch.int8, -100)
    x = torch.randint(0, 100, (2, 3, 4), generator=torch.Generator().manual_seed(7)).to(kind)
    scale, zeros = torch.tensor(0.05), torch.tensor(zero, dtype=kind)
    out = torch.tensor(1 / 200.9)
    given = {"opset": version} if axis is None else {"opset": version, "axis": axis}
    value = scale * (x.float() - zero)
    flat = value.flatten(1).softmax(1).reshape(value.shape)
    wanted = flat if version < 13 else value.softmax(-1 if axis is None else axis)
    found = run("com.microsoft::QLinearSoftmax", 1, given, x, scale, zeros, out, zeros)
    assert torch.equal(found, ((wanted * 200).round() + zero).to(kind))


def test_matrices_of_experts_lie_as_they_always_did() -> None:
    """Older files state ``[K, N]`` of memory that is ``[N, K]``."""
    x, router = torch.randn(5, 4), torch.randn(5, 2)
    w1, w2, w3 = torch.randn(2, 6, 4), torch.randn(2, 4, 6), torch.randn(2, 6, 4)
    given = {"k": 1, "activation_type": "silu"}
    wanted = run("com.microsoft::MoE", 1, given, x, router, w1, None, w2, None, w3)
    older = [w.reshape(2, w.shape[2], w.shape[1]) for w in (w1, w2, w3)]
    found = run("com.microsoft::MoE", 1, given, x, router, older[0], None, older[1], None, older[2])
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("source", "current", "at", "predicted", "tokens", "place"),
    [
        ([1, 2, 3, 4], [9], 0, [1, 2, 7, 8, 9], [9, 1, 2, 7], -1),
        ([1, 2, 3, 4], [9], 2, [3, 4, 5], [9, 3, 4, 5], -1),
        ([1, 5, 2, 5, 3], [2, 5], 0, None, [2, 5], 4),
        ([1, 5, 2, 1, 5, 3], [1, 5], 0, None, [1, 5], -1),
        ([4, 5], [3, 5], 0, None, [3, 5], 2),
        ([], [], 0, [7], [7], -1),
    ],
)
def test_predictions_are_taken_up_to_their_first_difference(
    source: list[int], current: list[int], at: int, predicted: list[int] | None, tokens: list[int], place: int
) -> None:
    name = "com.microsoft::BifurcationDetector"
    operands = [
        None if each is None else torch.tensor(each, dtype=torch.int64)
        for each in (source, current, [at], predicted)
    ]
    found, where = run(name, 1, {}, *operands)
    assert (found.tolist(), where.tolist()) == (tokens, [place])
    with pytest.raises(ShapeError, match="BifurcationDetector"):
        run(name, 1, {}, *operands[:2], torch.tensor([-1]), torch.tensor([1]))
    with pytest.raises(ShapeError, match="BifurcationDetector"):
        run(name, 1, {}, torch.tensor(1), *operands[1:])


@pytest.mark.parametrize("name", ["RNN", "GRU", "LSTM"])
def test_sequences_of_no_elements_end_at_zero(name: str) -> None:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[name]
    x, w, r = torch.randn(4, 3, 2), torch.randn(1, gates * 5, 2), torch.randn(1, gates * 5, 5)
    states = [torch.randn(1, 3, 5) for _ in range(2 if name == "LSTM" else 1)]
    lengths = torch.tensor([4, 0, 1], dtype=torch.int32)
    given = {"hidden_size": 5, "direction": "reverse"}
    y, *ends = run(name, 14, given, x, w, r, None, lengths, *states)
    assert all(not end[0, 1].any() and end[0, 0].any() and end[0, 2].any() for end in ends)
    assert not y[:, 0, 1].any()


def test_weights_of_ngrams_are_in_the_order_of_the_pool() -> None:
    given = {
        "mode": "TFIDF", "min_gram_length": 1, "max_gram_length": 1, "max_skip_count": 0,
        "ngram_counts": [0], "ngram_indexes": [0, 4, 1], "pool_int64s": [7, 8, 9],
    }  # fmt: skip
    words = torch.tensor([8, 8, 9, 1])
    assert run("TfIdfVectorizer", 9, {**given, "weights": [1.0, 2.0, 3.0]}, words)[0].tolist() == [
        0,
        3,
        0,
        0,
        4,
    ]
    assert run("TfIdfVectorizer", 9, given, words)[0].tolist() == [0, 1, 0, 0, 2]


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_attention_of_heads_that_are_apart_may_state_their_number(softcap: float) -> None:
    """The standard's own function would join them."""
    text = f"""<ir_version: 10, opset_import: ["" : 24]>
        g (float[2, 4, 3, 8] q, float[2, 2, 5, 8] k, float[2, 2, 5, 8] v, float[3, 5] m) => (y) {{
        y = Attention <q_num_heads=4, kv_num_heads=2, softcap={softcap}> (q, k, v, m) }}"""
    operands = [torch.randn(2, 4, 3, 8), *(torch.randn(2, 2, 5, 8) for _ in range(2)), torch.randn(3, 5)]
    named = ladder.compile(onnx.parser.parse_model(text))(*operands)
    plain = text.replace("q_num_heads=4, kv_num_heads=2, ", "")
    torch.testing.assert_close(named, ladder.compile(onnx.parser.parse_model(plain))(*operands))
    assert named.shape == (2, 4, 3, 8)


def test_layers_that_share_keys_bring_none() -> None:
    q, none = torch.randn(2, 1, 32), torch.zeros(2, 0, 16)
    keys, values = torch.randn(2, 2, 8, 8), torch.randn(2, 2, 8, 8)
    ends, total = torch.tensor([7, 4], dtype=torch.int32), torch.tensor(8)
    name, given = "com.microsoft::GroupQueryAttention", {"num_heads": 4, "kv_num_heads": 2}
    y, k, v = run(name, 1, given, q, none, none, keys, values, ends, total)
    heads = q.reshape(2, 1, 4, 8).transpose(1, 2)
    for at, end in enumerate((8, 5)):
        shared = [x[at : at + 1, :, :end].repeat_interleave(2, 1) for x in (keys, values)]
        wanted = F.scaled_dot_product_attention(heads[at : at + 1], *shared)
        torch.testing.assert_close(y[at].reshape(4, 8), wanted.reshape(4, 8))
    assert torch.equal(k, keys)
    assert torch.equal(v, values)


@pytest.mark.parametrize("ends", [[-1, 3], [3, 99], [3], [3, 3, 3]], ids=str)
def test_sequences_end_within_their_caches(ends: list[int]) -> None:
    x = torch.randn(2, 1, 16)
    cache, places = torch.zeros(2, 1, 8, 8), torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(ShapeError, match="GroupQueryAttention"):
        run(
            "com.microsoft::GroupQueryAttention", 1, {"num_heads": 2, "kv_num_heads": 1},
            *(x, x[..., :8], x[..., :8], cache, cache, places, torch.tensor(4)),
        )  # fmt: skip


def test_positions_that_no_table_has_are_one_error() -> None:
    table = torch.randn(4, 4)
    for place in (-1, 4):
        with pytest.raises(ShapeError, match="positions"):
            run(
                "com.microsoft::RotaryEmbedding", 1, {},
                *(torch.randn(1, 1, 8), torch.tensor([[place]]), table, table),
            )  # fmt: skip
    with pytest.raises(ShapeError, match="TensorScatter"):
        run(
            "TensorScatter",
            24,
            {"mode": "circular"},
            torch.zeros(1, 4, 2),
            torch.ones(1, 1, 2),
            torch.tensor([-2]),
        )
    given = {"kernel_shape": [2, 2], "strides": [2, 2]}
    with pytest.raises(ShapeError, match="MaxUnpool"):
        run("MaxUnpool", 11, given, torch.ones(1, 1, 1, 1), torch.tensor([[[[-1]]]]))


def test_ranges_of_one_step() -> None:
    found = run("com.microsoft::Range", 1, {}, torch.tensor(2), torch.tensor(5))
    assert found.tolist() == [2, 3, 4]


def test_counters_of_loops_may_be_vectors() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (int64[1] n, bool[1] c) => (y) {
        y = Loop (n, c) <body = b (int64[1] i, bool[1] going) => (bool[1] on, int64[1] out) {
            on = Identity (going)  out = Add (i, i) }> }"""
    fast = ladder.compile(onnx.parser.parse_model(text))
    for _ in range(3):
        assert fast(torch.tensor([3]), torch.tensor([True])).tolist() == [[0], [2], [4]]


def test_more_is_cut_off_than_there_is() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    for pads in ([0, -3, 0, -3], [0, -9, 0, 0], [0, 0, 0, -9]):
        assert run("Pad", 18, {}, x, torch.tensor(pads)).shape == (3, 0)
    assert torch.equal(run("Pad", 18, {}, x, torch.tensor([1, -1, 0, -1])), F.pad(x, (-1, -1, 1, 0)))


@pytest.mark.parametrize("version", [9, 14, 15])
def test_vectors_are_normed_as_one_channel(version: int) -> None:
    x, given = torch.randn(6), {"training_mode": 1} if version > 9 else {}
    scale, bias, mean, variance = (torch.rand(1) for _ in range(4))
    y, *moments = TABLE["BatchNormalization"](
        Operation("BatchNormalization", version, given, 3), x, scale, bias, mean, variance
    )
    now, spread = (x.mean(), x.var(unbiased=False)) if given else (mean, variance)
    torch.testing.assert_close(y, (x - now) / (spread + 1e-5).sqrt() * scale + bias)
    torch.testing.assert_close(moments[0], mean * 0.9 + now * 0.1)
    torch.testing.assert_close(moments[1], variance * 0.9 + spread * 0.1)


def test_thresholds_before_the_standard_had_them() -> None:
    text = """<ir_version: 3, opset_import: ["" : 7]> g (float[n] x) => (float[n] y) {
        y = ThresholdedRelu <alpha = 0.5> (x) }"""
    fast = ladder.compile(onnx.parser.parse_model(text))
    x = torch.tensor([0.5, 0.6, -1.0, float("inf"), 2.0])
    assert torch.equal(fast(x), torch.where(x > 0.5, x, 0))
    assert "torch onnx" not in fast.plan()
