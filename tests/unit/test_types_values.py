"""Values and rounding of every type against ml_dtypes and the constants of the standards."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tile_types import Metadata, TType, get_type, register_type, type_names
from tile_types.errors import LadderError, ValueRangeError

REFERENCE = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "fp8_e3m4": ml_dtypes.float8_e3m4,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "int8": np.int8,
    "int4": ml_dtypes.int4,
    "int2": ml_dtypes.int2,
    "int1": ml_dtypes.int1,
    "uint8": np.uint8,
    "uint4": ml_dtypes.uint4,
    "uint2": ml_dtypes.uint2,
    "uint1": ml_dtypes.uint1,
}

BITSANDBYTES_NF4 = (
    *[-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453],
    *[-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0],
    *[0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224],
    *[0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
)
"""QLoRA (arXiv 2305.14314), appendix E, as bitsandbytes publishes them."""


@pytest.mark.parametrize("name", REFERENCE)
def test_every_code_has_the_value_of_ml_dtypes(name: str) -> None:
    dtype = np.dtype(REFERENCE[name])
    ttype = get_type(name)
    codes = np.arange(1 << ttype.elem_bits, dtype=f"u{dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        expected = codes.view(dtype).astype(np.float64)
    got = ttype.values()
    np.testing.assert_array_equal(got, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(expected)[numbers])


@pytest.mark.parametrize("name", [name for name in REFERENCE if "int" not in name])
def test_encode_rounds_like_an_ml_dtypes_cast(name: str) -> None:
    ttype = get_type(name)
    grid = np.unique(ttype.probe_values()).astype(np.float32)
    middle = ((grid[1:].astype(np.float64) + grid[:-1]) / 2).astype(np.float32)
    noise = np.random.default_rng(0).standard_normal(4000).astype(np.float32) * (grid.max() / 8)
    points = [
        grid,
        middle,
        np.nextafter(middle, np.float32(np.inf)),
        np.nextafter(middle, -np.float32(np.inf)),
    ]
    values = np.concatenate([*points, noise])
    values = values[(values >= grid.min()) & (values <= grid.max())]
    if name == "e8m0":  # ml_dtypes truncates float32 subnormals here; the MX scale never rounds
        values = values[values >= np.finfo(np.float32).tiny]
    expected = values.astype(REFERENCE[name]).astype(np.float64)
    np.testing.assert_array_equal(ttype.decode_codes(ttype.encode(values)), expected)


@pytest.mark.parametrize(
    ("name", "code", "value"),
    [
        ("fp4_e2m1", 0, 0.0),  # OCP MX v1.0, 5.3.3
        ("fp4_e2m1", 1, 0.5),
        ("fp4_e2m1", 2, 1.0),
        ("fp4_e2m1", 7, 6.0),
        ("fp4_e2m1", 15, -6.0),
        ("fp6_e2m3", 0x1F, 7.5),  # 5.3.2
        ("fp6_e2m3", 1, 0.125),
        ("fp6_e3m2", 0x1F, 28.0),
        ("fp6_e3m2", 1, 0.0625),
        ("fp8_e4m3", 0x7E, 448.0),  # OFP8, table 1
        ("fp8_e4m3", 1, 2.0**-9),
        ("fp8_e4m3", 0x7F, np.nan),
        ("fp8_e5m2", 0x7B, 57344.0),
        ("fp8_e5m2", 1, 2.0**-16),
        ("fp8_e5m2", 0x7C, np.inf),
        ("fp8_e5m2", 0xFF, np.nan),
        ("fp8_e4m3fnuz", 0x80, np.nan),
        ("fp8_e4m3fnuz", 0x7F, 240.0),
        ("fp8_e5m2fnuz", 0x7F, 57344.0),
        ("e8m0", 127, 1.0),  # MX 5.4.1
        ("e8m0", 0, 2.0**-127),
        ("e8m0", 254, 2.0**127),
        ("e8m0", 255, np.nan),
        ("nf4", 0, -1.0),
        ("nf4", 1, -0.6961928009986877),
        ("nf4", 7, 0.0),
        ("nf4", 15, 1.0),
        ("ternary", 0, -1.0),
        ("ternary", 1, 0.0),
        ("ternary", 2, 1.0),
        ("int4", 8, -8.0),
        ("int3", 7, -1.0),
        ("int1", 1, -1.0),
        ("uint3", 7, 7.0),
        ("fp3_e1m1", 1, 0.5 * 2),  # bias 2**0 - 1 = 0: subnormal 2**(1-0) * 1/2
        ("fp5_e3m1", 1, 0.125),  # bias 3: 2**(1-3) * 1/2
        ("fp5_e3m1", 15, 24.0),
        ("tfloat32", 0x3F800000 >> 13, 1.0),
        ("tfloat32", (0x3F800000 >> 13) + 1, 1 + 2.0**-10),
    ],
)
def test_constants_of_the_standards(name: str, code: int, value: float) -> None:
    np.testing.assert_array_equal(get_type(name).decode_codes([code]), [value])


def test_e8m0_is_a_power_of_two_for_every_code() -> None:
    expected = 2.0 ** (np.arange(255) - 127.0)
    np.testing.assert_array_equal(get_type("e8m0").values()[:255], expected)


def test_nf4_is_the_published_codebook() -> None:
    np.testing.assert_array_equal(get_type("nf4").values(), np.float32(BITSANDBYTES_NF4))


@pytest.mark.parametrize("bits", range(1, 9))
def test_integers_of_every_width(bits: int) -> None:
    codes = np.arange(1 << bits)
    np.testing.assert_array_equal(get_type(f"uint{bits}").values(), codes)
    np.testing.assert_array_equal(
        get_type(f"int{bits}").values(), np.where(codes >> (bits - 1), codes - 2**bits, codes)
    )


@pytest.mark.parametrize(("name", "shift"), [("float32", 0), ("tfloat32", 13)])
def test_wide_floats_are_the_upper_bits_of_float32(name: str, shift: int) -> None:
    bits = (
        np.random.default_rng(1).integers(0, 2**32, 2000, dtype=np.uint64).astype(np.uint32) >> shift << shift
    )
    with np.errstate(invalid="ignore"):
        expected = bits.view(np.float32).astype(np.float64)
    np.testing.assert_array_equal(get_type(name).decode_codes(bits >> shift), expected)


def test_float32_encode_is_the_identity_on_floats() -> None:
    values = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    np.testing.assert_array_equal(get_type("float32").encode(values), values.view(np.uint32))


@pytest.mark.parametrize(
    "name", [*REFERENCE, "nf4", "ternary", "tfloat32", "fp5_e2m2", "fp8_e7m0", "fp3_e1m1"]
)
def test_encode_inverts_decode(name: str) -> None:
    ttype = get_type(name)
    values = ttype.probe_values()
    codes = ttype.encode(values)
    np.testing.assert_array_equal(ttype.decode_codes(codes), values)
    assert np.isin(codes, ttype.valid_codes()).all()


@pytest.mark.parametrize(
    "name", ["fp4_e2m1", "fp8_e4m3", "int4", "float16", "bfloat16", "ternary", "fp8_e5m2"]
)
def test_encode_saturates(name: str) -> None:
    ttype = get_type(name)
    codes = ttype.encode(np.array([1e300, -1e300]))
    np.testing.assert_array_equal(ttype.decode_codes(codes), [ttype.maximum, ttype.minimum])


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [("int4", 0.5, 0), ("int4", 1.5, 2), ("int4", -2.5, -2), ("fp4_e2m1", 0.25, 0), ("fp4_e2m1", 0.75, 1),
     ("fp4_e2m1", 2.5, 2), ("fp4_e2m1", 3.5, 4), ("fp4_e2m1", 5.0, 4), ("fp4_e2m1", -1.25, -1)],
)  # fmt: skip
def test_ties_go_to_even_in_value_space(name: str, value: float, nearest: float) -> None:
    ttype = get_type(name)
    assert ttype.decode_codes(ttype.encode(np.array([value])))[0] == nearest


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp4_e2m1", "float16", "bfloat16", "float32"])
def test_zero_gets_the_code_of_positive_zero(name: str) -> None:
    np.testing.assert_array_equal(get_type(name).encode(np.array([-0.0, 0.0, -1e-60])), [0, 0, 0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_encode_names_the_position_of_what_is_not_finite(bad: float) -> None:
    values = np.zeros((4, 5))
    values[2, 3] = bad
    with pytest.raises(ValueRangeError, match=r"\[2, 3\]"):
        get_type("fp8_e5m2").encode(values)


def test_values_of_a_32_bit_type_are_not_listed() -> None:
    with pytest.raises(ValueRangeError, match="decode_codes"):
        get_type("float32").values()


def test_values_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        get_type("int4").values()[0] = 1


@pytest.mark.parametrize(
    "given",
    [
        {"shape": 3},
        {"shape": (2.0,)},
        {"metadata": 3},
        {"metadata": ("scale",)},
        {"finite_codes": 3},
        {"finite_codes": (0, 8)},
        {"finite_codes": (0.5,)},
        {"shape": (2,)},
        {"shape": ()},
        {"decode": None, "element": "int3", "shape": (2, 16)},
        {"metadata": (Metadata("scale", "float16"),)},
        {"elem_bits": 3.0},
    ],
)
def test_descriptions_that_cannot_be(given: dict[str, Any]) -> None:
    """Said where the type is described, not where its values are first needed."""
    facts = {"name": "wrong3", "elem_bits": 3, "decode": lambda code, ops: code, **given}
    with pytest.raises(LadderError, match="type wrong3: "):
        TType(**facts)


@pytest.mark.parametrize(("name", "scope"), [("scale2", "block"), ("micro", "pair"), ("scale", "tensor")])
def test_metadata_that_nothing_would_read(name: str, scope: str) -> None:
    with pytest.raises(ValueRangeError, match="scale per block, zero per block, tensor_scale per tensor"):
        Metadata(name, "float16", scope)


def test_codes_of_blocks_are_as_wide_as_their_elements() -> None:
    with pytest.raises(ValueRangeError, match="has 3 bits, its element int4 4"):
        register_type(
            TType("narrow", 3, element="int4", shape=(8,), metadata=(Metadata("scale", "float16"),))
        )


def numbers_around(points: Any) -> Any:
    """Return numbers, their neighbours, zeros, subnormal and the largest numbers, and some at random."""
    ends = np.array([0.0, -0.0, 5e-324, -5e-324, 1.7e308, -1.7e308])
    near = [np.nextafter(points, to) for to in (-np.inf, np.inf)]
    drawn = np.random.default_rng(0).standard_normal(500) * np.abs(points).max()
    return np.concatenate([points, *near, ends, drawn])


@pytest.mark.parametrize(
    "name", [name for name in type_names() if not get_type(name).is_block and get_type(name).elem_bits <= 16]
)
def test_codes_are_those_of_the_thresholds_below(name: str) -> None:
    grid = get_type(name)._grid
    values = numbers_around(np.concatenate([grid.thresholds, grid.values]))
    expected = grid.codes[np.searchsorted(grid.thresholds, values, side="right")]
    for given in (values, torch.from_numpy(values), torch.from_numpy(np.repeat(values, 2))[::2]):
        np.testing.assert_array_equal(np.asarray(grid.encode(given)), expected)
    for shape in ((0,), ()):
        assert np.asarray(grid.encode(np.zeros(shape))).shape == shape


@pytest.mark.parametrize(
    ("name", "found"), [("nf4", True), ("fp8_e4m3", True), ("fp8_e3m4", True), ("float16", False)]
)
def test_few_values_are_found_without_a_search(name: str, found: bool) -> None:
    assert (get_type(name)._grid._buckets is not None) == found
