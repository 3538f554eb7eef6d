"""Looking up, parsing, registering and printing types."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from tile_types import (
    Metadata,
    Tile,
    TType,
    get_type,
    group_scaled,
    list_types,
    register_type,
    type_names,
)
from tile_types.errors import ConversionError, LadderError, ShapeError, UnknownNameError, ValueRangeError

ISSUE_NAMES = frozenset(
    """float32 tfloat32 float16 bfloat16 fp8_e4m3 fp8_e5m2 fp8_e4m3fnuz fp8_e5m2fnuz
    int8 int7 int6 int5 int4 int3 int2 int1 uint8 uint7 uint6 uint5 uint4 uint3 uint2 uint1
    ternary nf4 fp4_e2m1 fp6_e2m3 fp6_e3m2 mxfp8_e4m3 mxfp8_e5m2 mxfp6_e2m3 mxfp6_e3m2 mxfp4 nvfp4 e8m0
    """.split()  # noqa: SIM905
)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [(f"int{bits}", -(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)]
    + [(f"uint{bits}", 0, (1 << bits) - 1) for bits in (8, 16, 32, 64)],
)
def test_integers_have_their_true_limits(name: str, least: int, most: int) -> None:
    ttype = get_type(name)
    assert (ttype.minimum, ttype.maximum, ttype.is_integer) == (least, most, True)
    if ttype.elem_bits > 32:
        with pytest.raises(ValueRangeError, match=f"{name} has no codes"):
            ttype.encode(np.zeros(3))
        return
    given = np.array([0, 1, least, most, 1e30, -1e30, 2.5])
    wanted = np.clip(np.rint(given), least, most)
    assert np.array_equal(ttype.decode_codes(ttype.encode(given)), wanted)
    assert np.array_equal(ttype.decode_array(torch.from_numpy(ttype.encode(given).astype(np.int64))), wanted)


@pytest.mark.parametrize("limits", [(0, 3), [0, 3], (3, 0), (0,), (0, "3"), 3])
def test_limits_are_two_numbers_of_many_bits(limits: Any) -> None:
    with pytest.raises(ValueRangeError, match="type odd: limits are the least and the largest value"):
        TType("odd", 4 if limits == (0, 3) else 20, lambda code, ops: ops.cast(code, "int32"), limits=limits)


@pytest.mark.parametrize("name", ["int16", "int64", "bool", "float64", "int4_g32", "uint4_g64_zf"])
def test_names_with_a_meaning_cannot_be_taken(name: str) -> None:
    """Programs would read masks by a type of 1 bit, products groups without scales."""
    with pytest.raises(ValueRangeError, match=f"type '{name}' exists already"):
        register_type(TType(name, 1, lambda code, ops: ops.cast(code, "int32")))
    assert get_type(name).elem_bits != 1
    assert register_type(replace(get_type("int4_g32"))) is get_type("int4_g32")


def test_a_type_does_not_stand_for_groups_of_one_that_follows() -> None:
    register_type(TType("before_g32", 3, lambda code, ops: ops.cast(code, "int32") - 4))
    register_type(TType("before", 4, lambda code, ops: ops.cast(code, "int32") - 8))
    assert group_scaled("before", 16).elem_bits == 4
    with pytest.raises(ValueRangeError, match="'before_g32' hides groups of 'before'"):
        group_scaled("before", 32)


def test_other_types_of_programs_have_their_true_limits() -> None:
    assert get_type("float64").maximum == -get_type("float64").minimum == np.finfo(np.float64).max
    assert (get_type("bool").minimum, get_type("bool").maximum) == (0, 1)
    assert not get_type("float64").is_integer


def test_the_library_has_every_name() -> None:
    assert set(type_names()) >= ISSUE_NAMES
    assert [t.name for t in list_types()] == list(type_names())


@pytest.mark.parametrize(
    ("name", "near"), [("nf5", "nf4"), ("itn4", "int4"), ("fp8_e4m4", "fp8_e4m3"), ("mxfp5", "mxfp4")]
)
def test_unknown_names_suggest_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=near):
        get_type(name)


@pytest.mark.parametrize("name", ["fp9_e4m4", "fp8_e0m7", "int4_g", "mxfp4_g32", "int4_g128_zq", ""])
def test_names_that_only_look_right_are_refused(name: str) -> None:
    with pytest.raises((UnknownNameError, ConversionError)):
        get_type(name)


@pytest.mark.parametrize(
    ("name", "bits", "largest"), [("fp5_e2m2", 5, 7.0), ("fp7_e3m3", 7, 30.0), ("fp3_e2m0", 3, 4.0)]
)
def test_any_small_float_by_name(name: str, bits: int, largest: float) -> None:
    ttype = get_type(name)
    assert (ttype.elem_bits, ttype.maximum) == (bits, largest)
    assert ttype is get_type(name)


@pytest.mark.parametrize(
    ("name", "element", "size", "scale", "zero"),
    [
        ("int4_g128", "int4", 128, "float16", "none"),
        ("uint4_g128_zi", "uint4", 128, "float16", "integer"),
        ("uint4_g64_zf", "uint4", 64, "float16", "float"),
        ("int3_g32_sbfloat16", "int3", 32, "bfloat16", "none"),
        ("uint2_g16_sfloat32_zf", "uint2", 16, "float32", "float"),
        ("fp4_e2m1_g32_se8m0", "fp4_e2m1", 32, "e8m0", "none"),
        ("fp5_e2m2_g32", "fp5_e2m2", 32, "float16", "none"),
        ("int8_g1", "int8", 1, "float16", "none"),
    ],
)
def test_group_scaled_names_round_trip(name: str, element: str, size: int, scale: str, zero: str) -> None:
    ttype = get_type(name)
    made = group_scaled(element, size, scale=scale, zero=zero)
    assert made == ttype
    assert hash(made) == hash(ttype)
    assert made.name == name
    metadata = ttype.metadata_named("scale")
    assert metadata is not None
    assert (ttype.element, ttype.shape, metadata.ttype, ttype.zero_kind) == (element, (size,), scale, zero)


@pytest.mark.parametrize(
    ("name", "element", "shape", "scale", "bits"),
    [
        ("mxfp4", "fp4_e2m1", (32,), "e8m0", 4.25),  # OCP MX v1.0, table 1: 32 elements, 8-bit scale
        ("mxfp6_e2m3", "fp6_e2m3", (32,), "e8m0", 6.25),
        ("mxfp8_e5m2", "fp8_e5m2", (32,), "e8m0", 8.25),
        ("nvfp4", "fp4_e2m1", (16,), "fp8_e4m3", 4.5),
        ("uint4_g64_zi", "uint4", (64,), "float16", 4 + 20 / 64),
    ],
)
def test_block_types(name: str, element: str, shape: tuple[int, ...], scale: str, bits: float) -> None:
    ttype = get_type(name)
    assert ttype.is_block
    assert ttype.element_type is get_type(element)
    assert ttype.shape == shape
    assert ttype.metadata[0] == Metadata("scale", scale)
    assert ttype.bits_per_element == bits
    np.testing.assert_array_equal(ttype.values(), get_type(element).values())


def test_nvfp4_has_a_scale_per_tensor() -> None:
    assert get_type("nvfp4").metadata_named("tensor_scale") == Metadata("tensor_scale", "float32", "tensor")


def test_a_new_type_in_a_few_lines() -> None:
    log4 = TType(
        "log4_of_tests",
        elem_bits=4,
        decode=lambda code, ops: (
            ops.select(code >= 8, -1.0, 1.0) * ops.exp2(ops.cast(code & 7, "float32") - 4.0)
        ),
    )
    assert register_type(log4) is get_type("log4_of_tests")
    assert register_type(log4) is log4
    assert (log4.minimum, log4.maximum, log4.smallest_positive) == (-8.0, 8.0, 0.0625)
    np.testing.assert_array_equal(log4.encode(np.array([0.99, -7.0, 100.0])), [4, 15, 7])
    assert get_type("log4_of_tests_g32").element_type is log4


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueRangeError, match="exists already"):
        register_type(TType("int4", 4, lambda code, ops: ops.cast(code, "int32")))
    first = register_type(_doubled(2.0))
    assert register_type(_doubled(2.0)) is first
    for other in (
        _doubled(3.0),
        replace(_doubled(2.0), exact=False),
        replace(_doubled(2.0), finite_codes=(0, 1)),
    ):
        with pytest.raises(ValueRangeError, match="exists already"):
            register_type(other)


def _doubled(factor: float) -> TType:
    """Return a type as a cell of a notebook makes it anew each time that it runs."""
    return TType("doubled_of_tests", 3, lambda code, ops: ops.cast(code, "float32") * factor)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"name": "Bad Name", "elem_bits": 4}, ValueRangeError),
        ({"name": "x", "elem_bits": 0}, ValueRangeError),
        ({"name": "x", "elem_bits": 129}, ValueRangeError),
        ({"name": "x", "elem_bits": 4, "element": "int4"}, ValueRangeError),
        ({"name": "x", "elem_bits": 4, "shape": (0,)}, ShapeError),
    ],
)
def test_unusable_definitions_are_refused(arguments: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        TType(decode=lambda code, ops: code, **arguments)  # type: ignore[arg-type]


def test_a_type_needs_a_decode_or_an_element() -> None:
    with pytest.raises(ValueRangeError, match="decode"):
        TType("x", 4)


CALLS = count(1.0)


@pytest.mark.parametrize(
    ("decode", "says"),
    [
        (lambda code, ops: None, "must return a number for each code"),
        (lambda code, ops: ops.cast(code, "float32") * np.nan, "must return a number for each code"),
        (lambda code, ops: [1.0, 2.0], r"one number per code, got shape \(2,\) for 16 codes"),
        (lambda code, ops: 1.0 if code > 3 else -1.0, "fails on an array of codes .*ops.select"),
        (lambda code, ops: ops.lookup([0.0, 1.0], code), "fails on an array of codes .*out of bounds"),
        (lambda code, ops: ops.cast(code, "float99"), "fails on an array of codes .*float99"),
        (lambda code: code, "fails on an array of codes .*positional argument"),
        (lambda code, ops: code - 8, "for code 0: codes count as uint32, .*wrap around; write ops.cast"),
        (lambda code, ops: ops.cast(-code, "float32") / 8, "for code 1: codes count as uint32"),
        (lambda code, ops: ops.cast(code, "float32") * next(CALLS), "other values when it is called again"),
    ],
)
def test_a_decode_that_does_not_work_is_not_registered(decode: Callable[..., Any], says: str) -> None:
    with pytest.raises(ValueRangeError, match=f"type undecodable.*{says}"):
        register_type(TType("undecodable", 4, decode))
    with pytest.raises(UnknownNameError):
        get_type("undecodable")


@pytest.mark.parametrize("entry", [1e76, -1e39, 1e-60])
def test_entries_beyond_float32_are_not_changed_silently(entry: float) -> None:
    """They became infinity, whose codes are never chosen, or 0."""
    with pytest.raises(ValueRangeError, match=r"entry 1 of the table, .*, is beyond float32"):
        register_type(TType("far", 1, lambda code, ops: ops.lookup((1.0, entry), code)))
    special = TType("special", 2, lambda code, ops: ops.lookup((0.0, np.inf, -np.inf, np.nan), code))
    assert len(special.valid_codes()) == 1


@pytest.mark.filterwarnings("error")
def test_infinities_and_signalling_nans_among_values_give_no_warnings() -> None:
    """Bits of float16 without its last seven: 2 of 4 NaN are signalling."""
    halves = TType("halves", 9, lambda code, ops: ops.bitcast(ops.cast(code << 7, "uint16"), "float16"))
    assert np.isnan(register_type(halves).values().astype(np.float32)).sum() == 14


@pytest.mark.parametrize("encoder", [lambda x: "a", lambda x: x * 0 + 9, lambda x: np.zeros(4, int)])
def test_an_encoder_gives_the_codes_of_values(encoder: Callable[..., Any]) -> None:
    """Codes of more bits than the type's stood for other values."""
    with pytest.raises(ValueRangeError, match="encoder"):
        register_type(TType("misled", 2, lambda code, ops: code & 3, encoder=encoder))


def test_a_type_of_one_value_has_it_at_each_code() -> None:
    np.testing.assert_array_equal(TType("ones", 2, lambda code, ops: 1.0).values(), np.ones(4))


def test_a_block_of_an_unknown_element_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="int4"):
        register_type(TType("blocked", 4, element="itn4", shape=(8,)))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"element": "int4", "group_size": 0}, ShapeError),
        ({"element": "int4", "group_size": 32, "scale": "int8"}, UnknownNameError),
        ({"element": "int4", "group_size": 32, "zero": "real"}, UnknownNameError),
        ({"element": "nf4", "group_size": 32, "zero": "integer"}, ConversionError),
        ({"element": "mxfp4", "group_size": 32}, ConversionError),
    ],
)
def test_group_scaled_refuses(arguments: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        group_scaled(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["int4", "fp8_e4m3", "mxfp4", "uint4_g64_zf", "fp5_e2m2"])
def test_types_pickle_and_copy_by_name(name: str) -> None:
    ttype = get_type(name)
    assert pickle.loads(pickle.dumps(ttype)) is ttype
    assert copy.deepcopy(ttype) is ttype


def test_the_invalid_code_of_ternary_is_never_encoded() -> None:
    ternary = get_type("ternary")
    np.testing.assert_array_equal(ternary.valid_codes(), [0, 1, 2])
    np.testing.assert_array_equal(np.unique(ternary.encode(np.linspace(-5, 5, 99))), [0, 1, 2])


@pytest.mark.parametrize(
    ("name", "shape", "nbytes"),
    [
        ("int4", (3, 10), 3 * 5),
        ("int3", (2, 11), 2 * 8),
        ("float16", (4, 4), 32),
        ("mxfp4", (2, 64), 2 * 32 + 2 * 2),
        ("nvfp4", (2, 40), 2 * 20 + 2 * 3 + 4),
        ("int4_g128", (3, 200), 3 * 100 + 3 * 2 * 2),
        ("int4", (0, 8), 0),
    ],
)
def test_tile_bytes(name: str, shape: tuple[int, ...], nbytes: int) -> None:
    assert Tile(get_type(name), shape).nbytes == nbytes


def test_tile_refuses_negative_extents() -> None:
    with pytest.raises(ShapeError):
        Tile(get_type("int4"), (4, -1))


def test_import_loads_neither_torch_nor_tvm() -> None:
    program = "import sys, tile_types; print(sorted({'torch', 'tvm'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "decode",
    [
        lambda code, ops: ops.cast(code - 8, "int32"),  # wraps, and back
        lambda code, ops: ops.cast(code * 0x9E3779B1 >> 28, "int32") - 8,
        lambda code, ops: ops.exp2(8.0 * ops.cast(code, "float32")),
        lambda code, ops: ops.bitcast(code << 27, "float32"),
    ],
)
def test_large_values_are_no_wrapped_ones(decode: Any) -> None:
    ttype = TType("large4", 4, decode)
    assert len(ttype.values()) == 16


@pytest.mark.parametrize(
    ("element", "metadata", "says"),
    [
        ("mxfp4", [("scale", "e8m0")], "element mxfp4 has blocks itself; name fp4_e2m1"),
        ("int4", [("scale", "float16"), ("scale", "e8m0")], "two of one name"),
        ("int4", [], "a block has a scale"),
        ("int4", [("zero", "int4")], "a block has a scale"),
        ("int4", [("scale", "fp6_e3m2")], "unknown scale type 'fp6_e3m2'"),
        ("uint4", [("scale", "float32"), ("zero", "float16")], "zero point is of the element's type or"),
    ],
)
def test_blocks_store_what_is_read(element: str, metadata: list[tuple[str, str]], says: str) -> None:
    """One of two scales was left out silently; others failed when a weight was quantized."""
    stored = tuple(Metadata(*part) for part in metadata)
    with pytest.raises(LadderError, match=says):
        register_type(TType("blocks_of_tests", 4, element=element, shape=(32,), metadata=stored))
    with pytest.raises(UnknownNameError):
        get_type("blocks_of_tests")
