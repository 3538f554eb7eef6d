"""`quantize`: scaling rules against formulas in float64, edge shapes, and every refusal."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tile_types import Metadata, TType, get_type, group_scaled, list_types, quantize, register_type
from tile_types.errors import (
    ConversionError,
    DTypeError,
    LadderError,
    ShapeError,
    UnknownNameError,
    ValueRangeError,
)

RNG = np.random.default_rng(3)
WEIGHTS = RNG.standard_normal((7, 100)).astype(np.float32)
ELEMENTS = [t.name for t in list_types() if not t.is_block and t.elem_bits <= 8 and t.minimum < 0 < t.maximum]
BLOCKS = [t.name for t in list_types() if t.is_block]
CONSTANT = TType("constant", 2, lambda code, ops: ops.lookup([1.0] * 4, code))
OPTIONS: list[dict[str, Any]] = [
    {},
    {"group_size": 32},
    {"granularity": "tensor"},
    {"block": (4, 32)},
    {"group_size": 48, "zero": "float"},
    {"group_size": 16, "scaling": "hqq"},
    {"group_size": 32, "scale_type": "e8m0"},
    {"group_size": 100, "scale_type": "float32"},
]


def groups(values: np.ndarray, size: int) -> list[np.ndarray]:
    """Cut along K; the last group may be short."""
    return [values[:, i : i + size] for i in range(0, values.shape[1], size)]


def relative_error(values: np.ndarray, quantized: Any) -> float:
    """Frobenius."""
    wide = values.astype(np.float64)
    return float(np.linalg.norm(quantized.dequantize() - wide) / np.linalg.norm(wide))


@pytest.mark.parametrize(
    ("name", "largest"), [("int4", 7), ("int8", 127), ("int2", 1), ("fp4_e2m1", 6), ("nf4", 1)]
)
def test_absmax_scales(name: str, largest: float) -> None:
    got = quantize(WEIGHTS, name, group_size=32).scale
    expected = np.stack([np.abs(g).max(1).astype(np.float64) / largest for g in groups(WEIGHTS, 32)], 1)
    np.testing.assert_array_equal(got, expected.astype(np.float16))


def test_int4_codes_are_rounded_quotients_of_the_rounded_scale() -> None:
    quantized = quantize(WEIGHTS, "int4", group_size=25)
    scale = np.repeat(quantized.scale.astype(np.float64), 25, axis=1)
    expected = np.clip(np.rint(WEIGHTS / scale), -8, 7)
    np.testing.assert_array_equal(get_type("int4").values()[quantized.codes()], expected)
    np.testing.assert_array_equal(quantized.dequantize(), expected * scale)


def test_integer_zero_points_follow_the_affine_formula() -> None:
    quantized = quantize(WEIGHTS, "uint4", group_size=20, zero="integer")
    low = np.stack([np.minimum(g.min(1), 0) for g in groups(WEIGHTS, 20)], 1).astype(np.float64)
    high = np.stack([np.maximum(g.max(1), 0) for g in groups(WEIGHTS, 20)], 1).astype(np.float64)
    scale = ((high - low) / 15).astype(np.float16)
    zero = np.clip(np.rint(-low / scale.astype(np.float64)), 0, 15)
    np.testing.assert_array_equal(quantized.scale, scale)
    np.testing.assert_array_equal(quantized.zero, zero)
    assert quantized.zero.dtype == np.uint8
    assert quantized.zero_kind == "integer"


def test_types_of_a_wide_range_are_scaled_so_that_sums_of_their_values_fit_in_float32() -> None:
    quantized = quantize(np.abs(WEIGHTS), "e8m0", group_size=50)
    values = get_type("e8m0").values()[np.asarray(quantized.codes())]
    assert values.max() == 2.0**15
    assert quantized.scale_type == "float16"


def test_absmax_with_an_integer_zero_point_is_symmetric_about_the_middle() -> None:
    quantized = quantize(WEIGHTS, "uint4", group_size=50, zero="integer", scaling="absmax")
    assert (quantized.zero == 8).all()
    np.testing.assert_array_equal(
        quantized.dequantize(), quantize(WEIGHTS, "int4", group_size=50).dequantize()
    )


def test_float_zero_points_are_real_numbers() -> None:
    quantized = quantize(WEIGHTS, "uint2", group_size=25, zero="float")
    assert quantized.zero.dtype == np.float16
    assert (quantized.zero != np.rint(quantized.zero.astype(np.float32))).any()
    step = np.repeat(quantized.scale.astype(np.float64), 25, axis=1)
    zero_error = 3 * 2.0**-11  # rounding of a zero point up to 3 and of the scale, in steps
    assert (np.abs(quantized.dequantize() - WEIGHTS) <= step * (0.5 + 2 * zero_error)).all()


def test_hqq_lowers_the_norm_it_minimises() -> None:
    values = RNG.standard_t(3, (32, 256)).astype(np.float32) * 0.02
    start, refined = (
        quantize(values, "uint3", group_size=64, zero="float", scaling=s) for s in ("minmax", "hqq")
    )
    np.testing.assert_array_equal(start.scale, refined.scale)
    norms = [
        np.abs((q.dequantize() - values) / np.repeat(q.scale.astype(np.float64), 64, 1)) ** 0.7
        for q in (start, refined)
    ]
    before, after = (n.reshape(32, 4, 64).sum(2) for n in norms)
    assert (after <= before * (1 + 1e-9)).all()
    assert after.sum() < 0.99 * before.sum()


def test_ternary_uses_the_mean_magnitude() -> None:
    quantized = quantize(WEIGHTS, "ternary", granularity="tensor")
    mean = np.abs(WEIGHTS.astype(np.float64)).mean()
    np.testing.assert_array_equal(quantized.scale, [[np.float16(mean)]])
    expected = np.clip(np.rint(WEIGHTS / float(np.float16(mean))), -1, 1)
    np.testing.assert_array_equal(quantized.codes(), expected + 1)


@pytest.mark.parametrize(
    ("name", "emax"),
    [("mxfp4", 2), ("mxfp6_e2m3", 2), ("mxfp6_e3m2", 4), ("mxfp8_e4m3", 8), ("mxfp8_e5m2", 15)],
)  # OCP MX v1.0, table 1 and section 6.3
def test_mx_scales_are_powers_of_two(name: str, emax: int) -> None:
    quantized = quantize(WEIGHTS, name)
    largest = np.stack([np.abs(g).max(1) for g in groups(WEIGHTS, 32)], 1).astype(np.float64)
    np.testing.assert_array_equal(
        quantized.scale.astype(np.float64), 2.0 ** (np.floor(np.log2(largest)) - emax)
    )
    assert quantized.scale.dtype == ml_dtypes.float8_e8m0fnu
    assert quantized.block == (1, 32)


def test_nvfp4_has_e4m3_scales_under_a_tensor_scale() -> None:
    quantized = quantize(WEIGHTS, "nvfp4")
    tensor_scale = np.float32(np.abs(WEIGHTS).max().astype(np.float64) / (6 * 448))
    assert quantized.tensor_scale == float(tensor_scale)
    largest = np.stack([np.abs(g).max(1) for g in groups(WEIGHTS, 16)], 1).astype(np.float64)
    expected = (largest / 6 / float(tensor_scale)).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(quantized.scale, expected)
    assert float(quantized.scale.astype(np.float32).max()) == 448


@pytest.mark.parametrize("block", [(4, 32), (128, 128), (-1, 10), (3, -1)])
def test_two_dimensional_blocks(block: tuple[int, int]) -> None:
    height, width = (block[0] if block[0] > 0 else 7), (block[1] if block[1] > 0 else 100)
    quantized = quantize(WEIGHTS, "fp8_e4m3", block=block, scale_type="float32")
    rows = [WEIGHTS[i : i + height] for i in range(0, 7, height)]
    expected = [[np.abs(g).max() / 448.0 for g in groups(r, width)] for r in rows]
    np.testing.assert_array_equal(quantized.scale, np.float32(expected))
    assert quantized.block == (height, width)


@pytest.mark.parametrize("name", [*ELEMENTS, *BLOCKS])
def test_zeros_decode_to_zero(name: str) -> None:
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        quantized = quantize(np.zeros((2, 40), dtype), name)
        scale = quantized.scale.astype(np.float64)
        assert (scale > 0).all()
        assert np.isfinite(scale).all()
        np.testing.assert_array_equal(quantized.dequantize(), np.zeros((2, 40)))


@pytest.mark.parametrize("zero", ["integer", "float"])
def test_a_zero_group_beside_others_decodes_to_zero(zero: str) -> None:
    values = WEIGHTS.copy()
    values[3, 20:40] = 0
    quantized = quantize(values, "uint4", group_size=20, zero=zero)
    np.testing.assert_array_equal(quantized.dequantize()[3, 20:40], np.zeros(20))


@pytest.mark.parametrize("shape", [(1, 1), (1, 37), (5, 1), (3, 131)])
@pytest.mark.parametrize(
    "name", ["int4", "int3", "nf4", "mxfp4", "nvfp4", "uint4_g64_zf", "uint4_g128_zi", "int1_g32_zi"]
)
def test_shapes_that_divide_nothing(name: str, shape: tuple[int, int]) -> None:
    values = np.random.default_rng(5).standard_normal(shape)
    quantized = quantize(values, name)
    assert quantized.shape == shape
    assert quantized.codes().shape == shape
    assert np.isfinite(quantized.dequantize()).all()


def test_a_partial_last_group_ignores_what_is_not_there() -> None:
    whole = quantize(WEIGHTS[:, 64:], "ternary", group_size=36)
    padded = quantize(WEIGHTS, "ternary", group_size=64)
    np.testing.assert_array_equal(padded.scale[:, 1:], whole.scale)
    np.testing.assert_array_equal(padded.codes()[:, 64:], whole.codes())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "name", ["int4", "int8", "int3", "fp4_e2m1", "fp6_e3m2", "fp8_e5m2", "nf4", "ternary"]
)
def test_numpy_and_torch_agree(name: str, options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        theirs = torch.from_numpy(WEIGHTS).to(getattr(torch, dtype))
        ours = WEIGHTS.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        a, b = quantize(ours, name, **options), quantize(theirs, name, **options).numpy()
        np.testing.assert_array_equal(a.codes(), b.codes())
        np.testing.assert_array_equal(a.scale.view(np.uint8), b.scale.view(np.uint8))
        assert (a.zero is None) == (b.zero is None)
        np.testing.assert_array_equal(a.dequantize(), b.dequantize())


@pytest.mark.parametrize("name", BLOCKS)
def test_numpy_and_torch_agree_on_block_types(name: str) -> None:
    torch = pytest.importorskip("torch")
    a, b = quantize(WEIGHTS, name), quantize(torch.from_numpy(WEIGHTS), name).numpy()
    np.testing.assert_array_equal(a.storage, b.storage)
    np.testing.assert_array_equal(a.scale.view(np.uint8), b.scale.view(np.uint8))
    assert a.tensor_scale == b.tensor_scale


def test_a_parameter_that_requires_grad_is_accepted() -> None:
    torch = pytest.importorskip("torch")
    quantized = quantize(torch.nn.Parameter(torch.ones(2, 8)), "int4")
    assert not quantized.scale.requires_grad
    np.testing.assert_allclose(quantized.dequantize().numpy(), 1, rtol=2.0**-11)  # float16 scale


@pytest.mark.parametrize(
    ("dtype", "scale_type"),
    [
        (np.float32, "float16"),
        (np.float64, "float16"),
        (np.float16, "float16"),
        (ml_dtypes.bfloat16, "bfloat16"),
    ],
)
def test_default_scale_type(dtype: Any, scale_type: str) -> None:
    assert quantize(WEIGHTS.astype(dtype), "int4").scale_type == scale_type


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "tfloat32"])
def test_wide_types_are_stored_unscaled(name: str) -> None:
    quantized = quantize(WEIGHTS, name)
    assert quantized.scale is None
    assert quantized.scale_type == "none"
    bits = {"float16": 11, "bfloat16": 8, "float32": 24, "tfloat32": 11}[name]
    assert (np.abs(quantized.dequantize() - WEIGHTS) <= np.abs(WEIGHTS) * 2.0**-bits).all()


def test_scaling_none_keeps_integers() -> None:
    values = RNG.integers(-8, 8, (3, 9)).astype(np.float32)
    np.testing.assert_array_equal(quantize(values, "int4", scaling="none").dequantize(), values)


def test_tiny_weights_do_not_lose_their_scale() -> None:
    quantized = quantize(WEIGHTS * np.float32(2e-8), "int4", group_size=50)
    assert (quantized.scale > 0).all()
    assert float(quantized.scale.max()) == 2.0**-24  # float16's smallest
    assert np.isfinite(quantized.dequantize()).all()


def test_a_group_far_from_zero_keeps_its_float_zero_point_precise() -> None:
    values = (1000 + WEIGHTS * 1e-3).astype(np.float32)
    for scale_type, spacing in (("float16", 2.0**-11), ("bfloat16", 2.0**-8)):
        quantized = quantize(values, "uint4", group_size=20, zero="float", scale_type=scale_type)
        assert np.abs(quantized.dequantize() - values).max() <= 1000 * 2 * spacing


@pytest.mark.parametrize(
    ("name", "bound"),
    [("int8", 0.01), ("int4", 0.14), ("nf4", 0.11), ("mxfp4", 0.13), ("nvfp4", 0.11), ("fp8_e4m3", 0.04)],
)
def test_error_on_normal_weights(name: str, bound: float) -> None:
    assert relative_error(WEIGHTS, quantize(WEIGHTS, name)) < bound


def test_group_type_names_equal_the_options() -> None:
    named = quantize(WEIGHTS, group_scaled("uint4", 32, zero="integer"))
    said = quantize(WEIGHTS, "uint4", group_size=32, zero="integer")
    np.testing.assert_array_equal(named.storage, said.storage)
    assert (named.type_name, said.type_name) == ("uint4_g32_zi", "uint4")
    assert named.ttype is said.ttype


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_not_finite_weights_name_their_position(bad: float, dtype: Any) -> None:
    torch = pytest.importorskip("torch")
    values = WEIGHTS.copy()
    values[4, 77] = bad
    with pytest.raises(ValueRangeError, match=r"position \[4, 77\]"):
        quantize(values.astype(dtype), "int4")
    for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        with pytest.raises(ValueRangeError, match=r"position \[4, 77\]"):
            quantize(torch.from_numpy(values).to(kind), "int4", group_size=10)


@pytest.mark.parametrize("scaling", ["minmax", "hqq"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_float_zero_points_of_a_wide_range_are_held(scaling: str, sign: float) -> None:
    """Zero points were float16's largest, far from what was meant, and the weights nonsense."""
    steps = sign * np.ldexp(1.0 + np.arange(256) % 4 / 4, np.arange(256) // 4 - 32)
    ttype = TType("wide_fractions", 8, lambda code, ops: ops.lookup(steps, code))
    held = quantize(WEIGHTS, ttype, group_size=20, zero="float", scaling=scaling).dequantize("float64")
    assert np.linalg.norm(held - WEIGHTS) <= 0.2 * np.linalg.norm(WEIGHTS)


@pytest.mark.parametrize("name", ["uint4", "uint1", "int1", "e8m0"])
def test_clipping_half_the_weights_must_be_asked_for(name: str) -> None:
    kinds = [zero for zero in ("integer", "float") if zero == "float" or get_type(name).is_integer]
    with pytest.raises(ValueRangeError, match="use " + " or ".join(f"zero='{kind}'" for kind in kinds)):
        quantize(WEIGHTS, name, group_size=20)
    assert quantize(WEIGHTS, name, group_size=20, scaling="absmax").zero is None
    one_sided = np.abs(WEIGHTS) if get_type(name).minimum >= 0 else -np.abs(WEIGHTS)
    assert quantize(one_sided, name, group_size=20).zero is None


@pytest.mark.parametrize(
    ("ttype", "options", "error", "message"),
    [
        ("itn4", {}, UnknownNameError, "int4"),
        ("int4", {"group_size": 0}, ShapeError, "1 to K=100|1..K=100"),
        ("int4", {"group_size": -2}, ShapeError, "group_size"),
        ("int4", {"group_size": 101}, ShapeError, "K=100"),
        ("int4", {"block": (0, 8)}, ShapeError, "block"),
        ("int4", {"block": (4,)}, ShapeError, "block"),
        ("int4", {"block": (4, 8), "group_size": 8}, ShapeError, "contradict"),
        ("int4", {"granularity": "tensor", "group_size": 8}, ShapeError, "contradict"),
        ("int4", {"granularity": "group"}, ShapeError, "needs a group_size"),
        ("int4", {"granularity": "rows"}, UnknownNameError, "granularity"),
        ("int4", {"scale_type": "float8"}, UnknownNameError, "scale type"),
        ("int4", {"zero": "real"}, UnknownNameError, "zero point"),
        ("int4", {"scaling": "absmx"}, UnknownNameError, "absmax"),
        ("mxfp4", {"group_size": 16}, ConversionError, "fixes block"),
        ("mxfp4", {"scale_type": "float16"}, ConversionError, "fixes scale_type"),
        ("int4_g32", {"zero": "integer"}, ConversionError, "fixes zero"),
        ("nf4", {"zero": "integer"}, ConversionError, "other than consecutive integers"),
        ("uint4", {"scaling": "minmax", "zero": "none"}, ConversionError, "needs a zero point"),
        ("uint4", {"scaling": "hqq", "zero": "integer"}, ConversionError, "float"),
        ("uint4", {"scaling": "hqq", "granularity": "tensor"}, ConversionError, "within a row"),
        ("uint4", {"zero": "float", "scale_type": "e8m0"}, ConversionError, "float zero point"),
        ("int4", {"scaling": "mx", "zero": "integer"}, ConversionError, "symmetric"),
        ("constant", {"scaling": "minmax"}, ConversionError, "one value only"),
        ("int4", {"zero": True}, UnknownNameError, "zero point True"),
        (8, {}, UnknownNameError, "unknown type 8"),
        ("float16", {"group_size": 20}, ConversionError, "unscaled|no scale"),
        ("float16", {"scaling": "absmax"}, ConversionError, "unscaled"),
        ("int4", {"scaling": "none", "zero": "integer"}, ConversionError, "no scale"),
    ],
)
def test_refused_options(ttype: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    assert issubclass(error, LadderError)
    ttype = CONSTANT if ttype == "constant" else ttype
    with pytest.raises(error, match=message):
        quantize(WEIGHTS, ttype, **options)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (np.ones((4, 4), np.int32), DTypeError, "int32"),
        (np.ones((4, 4), np.bool_), DTypeError, "bool"),
        ([[1.0]], DTypeError, "list"),
        (np.ones(4), ShapeError, "1 dimensions"),
        (np.ones((2, 2, 2)), ShapeError, "3 dimensions"),
        (np.ones((0, 4)), ShapeError, "N >= 1"),
        (np.ones((4, 0)), ShapeError, "K >= 1"),
    ],
)
def test_refused_values(values: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize(values, "int4")


def test_refused_torch_dtype() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(DTypeError, match="int64"):
        quantize(torch.ones(4, 4, dtype=torch.int64), "int4")


def test_a_tensor_scale_that_overflows_is_refused() -> None:
    with pytest.raises(ValueRangeError, match="overflows float32"):
        quantize(np.full((2, 32), 1e300), "nvfp4")


@pytest.mark.parametrize("scale", ["e8m0", "bfloat16", "float32"])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_scales_of_wide_types_under_a_tensor_scale_leave_room_for_sums(scale: str, size: float) -> None:
    """Scales at the end of float32's range made infinities of sums of products of x."""
    stored = (Metadata("scale", scale), Metadata("tensor_scale", "float32", scope="tensor"))
    register_type(TType("wide", 4, shape=(16,), element="fp4_e2m1", metadata=stored))
    values = WEIGHTS.astype(np.float64) * size
    quantized = quantize(values, "wide")
    assert relative_error(values, quantized) < 0.2
    assert 2.0**14 <= np.asarray(quantized.scale, np.float64).max() <= 2.0**16


def test_a_scale_that_overflows_says_what_to_do() -> None:
    with pytest.raises(ValueRangeError, match="overflows float16"):
        quantize(WEIGHTS * np.float32(1e7), "int4")
    assert (
        relative_error(WEIGHTS * 1e7, quantize(WEIGHTS * np.float32(1e7), "int4", scale_type="float32"))
        < 0.14
    )


def test_descriptions_that_are_none_are_named() -> None:
    for bits in (4.0, True, "4"):
        with pytest.raises(ShapeError, match="elem_bits must be a whole number"):
            TType("wrong", bits, lambda code, ops: code)  # type: ignore[arg-type]
    with pytest.raises(ValueRangeError, match="type name None"):
        TType(None, 4, lambda code, ops: code)  # type: ignore[arg-type]
    with pytest.raises(ValueRangeError, match="must return real numbers"):
        quantize(WEIGHTS, TType("imaginary", 4, lambda code, ops: code * 1j))
    with pytest.raises(DTypeError, match="takes a TType, got str"):
        register_type("int4")  # type: ignore[arg-type]


@pytest.mark.parametrize("xp", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("name", "scale_type", "size"),
    [
        ("int4", "float16", 1e-9),
        ("int4", "fp8_e4m3", 1e-4),
        ("mxfp4", "e8m0", 1e-42),
        ("nvfp4", "fp8_e4m3", 1e-43),
    ],
)
def test_weights_below_every_scale_are_refused(xp: str, name: str, scale_type: str, size: float) -> None:
    weights: Any = np.full((2, 64), size)
    weights[1] = 0
    given = torch.from_numpy(weights) if xp == "torch" else weights
    options = {} if get_type(name).is_block else {"group_size": 32, "scale_type": scale_type}
    with pytest.raises(ValueRangeError, match=rf"underflow .* with {scale_type} .* would all become 0"):
        quantize(given, name, **options)
    given[1, 40] = 1.0  # beside others, they are 0 to within a step of the smallest scale
    found = np.asarray(quantize(given, name, **options).dequantize("float64"))
    assert np.abs(found[0]).max() <= get_type(scale_type).smallest_positive * 4


def test_small_weights_of_a_type_without_zero_are_refused_in_any_block() -> None:
    halves = TType("halves", 2, lambda code, ops: ops.cast(code, "float32") - 1.5)
    weights = np.full((2, 64), 0.5)
    weights[1, 40] = 1e-9
    assert quantize(weights, halves, group_size=32).codes().max() == 3
    weights[1] = 1e-9
    with pytest.raises(ValueRangeError, match=r"underflow halves with float16 .* would become far larger"):
        quantize(weights, halves, group_size=32)
    quantize(weights, halves, group_size=32, scale_type="float32")


@pytest.mark.parametrize("block", [3, ("a", 1), (1.5, 2), (1,), (0, 1), (1, True)])
def test_blocks_that_are_no_two_extents(block: object) -> None:
    with pytest.raises((ShapeError, DTypeError), match="block"):
        quantize(WEIGHTS, "int4", block=block)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("kind", [np.matrix, np.ma.masked_array])
def test_arrays_that_are_more_than_values(kind: Any) -> None:
    """The mask of a masked array would be lost."""
    with pytest.raises(DTypeError, match="plain array"):
        quantize(kind(WEIGHTS), "int4")


@pytest.mark.parametrize(("zero", "kind"), [("uint4", "integer"), ("float16", "float")])
@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_zero_points_are_in_units_of_both_scales(zero: str, kind: str, size: float) -> None:
    """They left the tensor's scale out: all were at the end of their range."""
    stored = (
        Metadata("scale", "float16"),
        Metadata("zero", zero),
        Metadata("tensor_scale", "float32", "tensor"),
    )
    ttype = TType(f"both_scales_{kind}_of_tests", 4, element="uint4", shape=(20,), metadata=stored)
    quantized = quantize(WEIGHTS * size, ttype)
    alone = quantize(WEIGHTS.astype(np.float64), "uint4", group_size=20, zero=kind, scale_type="float32")
    error, least = (
        np.abs(q.dequantize() - WEIGHTS * s).max() / s for q, s in ((quantized, size), (alone, 1))
    )
    assert error <= 1.01 * least


def test_float_zero_points_of_large_steps_do_not_overflow() -> None:
    """Weights of -5 became -0.08: their zero points ended at float16's largest number."""
    wide = TType("wide_steps_of_tests", 8, lambda code, ops: ops.cast(code, "float32") * 400.0)
    for weights in ([-5.0], [5.0], [-5.0, -4.0], [-5.0, 3.0]):
        values = np.array([weights])
        found = quantize(values, wide, zero="float").dequantize()
        assert np.abs(found - values).max() <= 0.06
    far = TType("far_of_tests", 1, lambda code, ops: 1e6 + ops.cast(code, "float32") * 1e5)
    with pytest.raises(ValueRangeError, match="overflow float16"):
        quantize(np.array([[1.0, 2.0]]), far, zero="float")
