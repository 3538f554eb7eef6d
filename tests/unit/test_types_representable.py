"""Which cores hold which types, against casts of numpy and ml_dtypes."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from tile_types import (
    TType,
    core_values,
    get_type,
    list_types,
    representable,
    representable_cores,
    require_representable,
)
from tile_types.errors import ConversionError, UnknownNameError
from tile_types.representable import significant_bits, unheld_codes

CASTS = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "int8": np.int8,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
ELEMENTS = [t.name for t in list_types() if not t.is_block and t.elem_bits <= 16 and t.exact]


def survives(values: np.ndarray, core: str) -> bool:
    """Cast with numpy and back."""
    with np.errstate(all="ignore"):
        if core == "int8" and (np.abs(values) > 128).any():
            return False
        return bool(np.array_equal(values.astype(np.float32).astype(CASTS[core]).astype(np.float64), values))


@pytest.mark.parametrize("core", CASTS)
@pytest.mark.parametrize("name", ELEMENTS)
def test_agrees_with_casting_every_value(name: str, core: str) -> None:
    assert representable(name, core) == survives(get_type(name).probe_values(), core)


@pytest.mark.parametrize("core", CASTS)
@pytest.mark.parametrize("name", [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 9)])
def test_integer_zero_points_need_every_difference(name: str, core: str) -> None:
    values = get_type(name).values()
    differences = np.unique(values[:, None] - values[None, :])
    assert representable(name, core, "integer") == survives(differences, core)


@pytest.mark.parametrize(
    ("name", "core", "zero", "answer"),
    [
        ("uint8", "int8", "none", False),
        ("uint7", "int8", "none", True),
        ("int8", "int8", "none", True),
        ("int8", "int8", "integer", False),
        ("int5", "fp8_e4m3", "none", True),
        ("int6", "fp8_e4m3", "none", False),
        ("uint4", "fp8_e4m3", "integer", True),
        ("uint4", "fp8_e5m2", "none", False),
        ("fp8_e5m2", "fp8_e4m3", "none", False),
        ("fp6_e2m3", "fp8_e5m2", "none", False),
        ("fp4_e2m1", "int8", "none", False),
        ("mxfp4", "fp8_e4m3", "none", True),
        ("nf4", "bfloat16", "none", True),
        ("nf4", "fp8_e4m3", "none", False),
        ("nf4", "int8", "none", False),
        ("nf4", "float16", "integer", False),
        ("uint4", "float16", "float", True),
        ("uint4", "int8", "float", False),
        ("uint4", "fp8_e4m3", "float", False),
        ("bfloat16", "float16", "none", False),
        ("float16", "bfloat16", "none", False),
        ("float32", "tfloat32", "none", False),
        ("tfloat32", "float32", "none", True),
        ("float32", "float32", "none", True),
        ("e8m0", "bfloat16", "none", True),
        ("e8m0", "float16", "none", False),
    ],
)
def test_named_cases(name: str, core: str, zero: str, answer: bool) -> None:
    assert representable(name, core, zero) is answer


def test_every_library_element_up_to_8_bits_fits_some_16_bit_core() -> None:
    for ttype in list_types():
        if ttype.elem_bits <= 8:
            assert {"float16", "bfloat16"} & set(representable_cores(ttype)), ttype.name


def test_the_error_names_a_core_that_can() -> None:
    with pytest.raises(ConversionError, match="uint8 does not fit in int8 without loss; use float16"):
        require_representable("uint8", "int8")
    steps = TType("steps_of_three_of_tests", 3, lambda code, ops: 3 * ops.cast(code, "int32") - 56)
    for ttype in ("nf4", steps):  # that values may be rounded would not help
        with pytest.raises(ConversionError, match=r"other than consecutive integers.*use zero='float'"):
            require_representable(ttype, "float16", "integer")
    with pytest.raises(ConversionError, match="uint8 with integer zero points does not fit in int8"):
        require_representable("uint8", "int8", "integer")
    eleven_bits = TType("eleven_bits_of_tests", 11, lambda code, ops: ops.cast(code, "float32") * 2.0**90)
    with pytest.raises(ConversionError, match="loss; use float32,"):  # no product takes tfloat32
        require_representable(eleven_bits, "float16")
    require_representable("uint7", "int8", "integer")


@pytest.mark.parametrize("arguments", [("int4", "float15"), ("itn4", "float16"), ("int4", "float16", "real")])
def test_unknown_names(arguments: tuple[str, ...]) -> None:
    with pytest.raises(UnknownNameError):
        representable(*arguments)


@pytest.mark.parametrize(
    ("core", "bits"),
    [
        ("float16", 11),
        ("bfloat16", 8),
        ("tfloat32", 11),
        ("float32", 24),
        ("int8", 7),
        ("fp8_e4m3", 4),
        ("fp8_e5m2", 3),
    ],
)
def test_precision_of_cores(core: str, bits: int) -> None:
    assert significant_bits(core) == bits


def test_core_values_are_a_cast() -> None:
    expected = get_type("nf4").values().astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(core_values("nf4", "bfloat16"), expected)
    assert np.isnan(core_values("fp8_e4m3", "float16")[0x7F])


def test_codes_whose_values_a_core_lacks() -> None:
    """NaN, infinity and codes that encode does not produce, of types that otherwise fit."""
    table = (0.0, 1.0, -1.0, np.nan, np.inf, 1e6, 2.0, -2.0)
    ttype = TType("lacking_of_tests", 3, lambda c, ops: ops.lookup(table, c), finite_codes=(0, 1, 2, 6, 7))
    lacking = {"int8": [3, 4, 5], "fp8_e4m3": [4, 5], "fp8_e5m2": [5], "float16": [5], "float32": []}
    for core, codes in lacking.items():
        assert representable(ttype, core)
        assert np.flatnonzero(unheld_codes(ttype, core)).tolist() == codes
    for name in ELEMENTS:
        cores = [core for core in representable_cores(name) if not unheld_codes(name, core).any()]
        assert cores == list(representable_cores(name))


def test_a_type_of_rounded_values_may_say_so() -> None:
    thirds = TType("thirds_of_tests", 4, lambda code, ops: (ops.cast(code, "float32") - 8) / 3)
    with pytest.raises(ConversionError, match=r"use float32, or TType.*exact=False"):
        require_representable(thirds, "float16")
    require_representable(replace(thirds, name="rounded_thirds_of_tests", exact=False), "float16")
