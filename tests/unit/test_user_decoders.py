"""Decoders of types that users register: proven over all codes, of few instructions."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from user_types import FLOATS, FORMS, SELECTED, SPACED, user_type

from ladder.cli.decoders import decoder_rows
from ladder.ir.gemm import Gemm
from ladder.lower.gpu.decode import make_decoder
from ladder.lower.gpu.decode_codebook import Table
from ladder.lower.gpu.proof import prove
from ladder.lower.gpu.proven import packed_order, proven_recipes, table_sizes
from ladder.lower.gpu.recipes import Conversion
from ladder.runtime.packed import pack
from schedules.codes import table_bytes
from targets import get_device
from tile_types import TType, core_values, register_type, representable
from tile_types.errors import ConversionError, VerificationError
from tile_types.forms import affine_forms, is_arithmetic, wirings
from tile_types.held import held
from tile_types.quantized import QuantizedTensor

HOPPER = get_device("cuda/sm_90a")
CORES = ("float16", "bfloat16")

MOST = {True: {4: 44, 5: 66, 6: 69, 7: 73, 8: 56}, False: {3: 41, 4: 32, 5: 99, 6: 98, 7: 101, 8: 80}}
"""Instructions by which 32 codes of a width become operands at most, by arithmetic or not, without scales."""


def decoder(name: str, core: str, zero: str = "none", **options: Any) -> Any:
    problem = Gemm(64, 64, user_type(name).name, core, zero=zero, group_size=32)
    return make_decoder(problem, HOPPER, gains=True, table=table_bytes(problem), **options)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("name", [*FORMS, *FLOATS])
def test_decoders_of_users_types_are_short(name: str, core: str) -> None:
    ttype = user_type(name)
    assert representable(ttype, core)
    arithmetic = is_arithmetic(held(ttype).ttype)
    for zero in ("none", "integer", "float"):
        if representable(ttype, core, zero):
            chosen = decoder(name, core, zero)
            assert chosen.choice.strategy != "reference"
            tabled = not arithmetic and (name, core) not in SELECTED
            assert (chosen.table_words > 0) == tabled
            most = MOST[arithmetic][ttype.elem_bits] + 16 * (zero != "none")
            most += 32 * (name in SPACED)  # codes as floats, then times their step
            assert chosen.choice.cost.instructions <= most


@pytest.mark.parametrize("name", ["random3", "random5", "posit6", "log7", "random8"])
def test_a_planted_wrong_entry_of_a_table_is_rejected(name: str) -> None:
    ttype = user_type(name)
    conversion = Conversion(ttype, "float16", order=packed_order(ttype, "float16"))
    tables = [p.recipe for p in proven_recipes(conversion) if isinstance(p.recipe, Table)]
    assert tables
    for table in tables:
        wrong = replace(table, values=(*table.values[:-1], table.values[-1] ^ 1))
        with pytest.raises(VerificationError, match=f"of {name}"):
            prove(wrong, conversion)


@pytest.mark.parametrize("device", ["cpu", "cuda/sm_90a"])
def test_codes_that_are_no_number_of_the_operand_type_are_not_packed(device: str) -> None:
    table = (0.0, 1.0, -1.0, float("nan"))
    ttype = register_type(TType("three_of_four", 2, lambda code, ops: ops.lookup(table, code)))
    codes = torch.tensor([[0, 1, 2, 1] * 8] * 4)
    for activation in ("int8", "float16"):
        problem = Gemm(4, 32, ttype.name, activation, group_size=32, scale=False)
        pack(problem, get_device(device), QuantizedTensor.from_codes(codes, ttype, (1, 32)))
    with_nan = QuantizedTensor.from_codes(codes + 1, ttype, (1, 32))
    pack(problem, get_device(device), with_nan)
    with pytest.raises(ConversionError, match=r"values \(nan\) do not exist in int8"):
        pack(replace(problem, activation="int8", output="float32"), get_device(device), with_nan)


@pytest.mark.parametrize("code", [0x7C, 0xFC, 0x7E])
def test_codes_that_arithmetic_reads_as_numbers_are_not_packed(code: int) -> None:
    """GPUs decoded fp8_e5m2's infinity to 57344 or so, and NaN to more."""
    problem = Gemm(4, 32, "fp8_e5m2", group_size=32, scale=False)
    weight = QuantizedTensor.from_codes(torch.full((4, 32), code), "fp8_e5m2", (1, 32))
    pack(problem, get_device("cpu"), weight)
    pack(replace(problem, activation="fp8_e5m2"), HOPPER, weight)  # cores take it as it is
    with pytest.raises(ConversionError, match="are decoded as numbers"):
        pack(problem, HOPPER, weight)


@pytest.mark.parametrize(
    ("device", "activation"), [("cpu", "int8"), ("cuda/sm_80", "float16"), ("rocm/gfx942", "int8")]
)
def test_codes_that_kernels_need_not_decode_are_not_packed(device: str, activation: str) -> None:
    """Ternary's fourth code counted as 2, 0 or -1, as kernels had it."""
    output = "float32" if activation == "int8" else activation
    problem = Gemm(4, 32, "ternary", activation, output, scale=False)
    codes = torch.tensor([[0, 1, 2, 1] * 8] * 4)
    pack(problem, get_device(device), QuantizedTensor.from_codes(codes, "ternary", (1, 32)))
    fourth = QuantizedTensor.from_codes(codes + 1, "ternary", (1, 32))
    pack(replace(problem, activation="float16", output="float16"), get_device("cpu"), fourth)
    with pytest.raises(ConversionError, match=r"values \(2\) are left out of its finite_codes"):
        pack(problem, get_device(device), fourth)


def test_tables_have_sizes_to_choose_from() -> None:
    """Pairs of five bits where 128 KiB are worth filling; schedules count on the least."""
    for name, sizes in (("random3", [1 << 15, 1 << 14, 0]), ("random5", [1 << 17, 1 << 12])):
        problem = Gemm(64, 64, user_type(name).name, group_size=32)
        assert table_sizes(problem) == sizes
        assert table_bytes(problem) == min(filter(None, sizes))
    assert table_sizes(Gemm(64, 64, user_type("whole5").name)) == [0]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("name", ["whole5", "falling5", "fp6_e2m3", "fp8_e5m2", "fp3_e2m0"])
def test_wired_bits_are_the_values(name: str, core: str) -> None:
    """Every wiring, laid by hand, gives the values of all codes."""
    ttype = user_type(name)
    codes, expected = ttype.valid_codes().astype(np.int64), core_values(ttype, core)[ttype.valid_codes()]
    kind: Any = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[core]
    found = wirings(ttype, core)
    assert found
    for wiring in found:
        bits = sum((codes >> source & 1) << bit for bit, source in wiring.wires) ^ wiring.base
        held = np.asarray(bits, np.uint16).view(kind).astype(np.float64)
        np.testing.assert_array_equal(held * wiring.gain, expected)


def test_codes_without_a_value_leave_bits_free() -> None:
    """The sign of zero, and what stands for NaN, may be anything."""
    table = (0.0, 1.0, 2.0, float("nan"), 0.0, -1.0, -2.0, float("inf"))
    ttype = TType("partly_finite", 3, lambda code, ops: ops.lookup(table, code))
    for core in CORES:
        assert wirings(ttype, core)
        assert proven_recipes(Conversion(ttype, core))[0].strategy == "wired"


@pytest.mark.parametrize("values", [(1.0,) * 4, (float("nan"), 2.0)])
def test_types_of_one_value_are_decoded(values: tuple[float, ...]) -> None:
    """No bit of a code is one of the value, and no line goes through the values."""
    ttype = register_type(TType("one_value", len(values) // 2, lambda code, ops: ops.lookup(values, code)))
    assert decoder(ttype.name, "float16").choice.strategy != "reference"
    assert not list(affine_forms(ttype)) or len(values) == 2
    for device in (HOPPER, get_device("rocm/gfx942")):
        assert list(decoder_rows(ttype.name, device.name))


@pytest.mark.parametrize("placement", ["operand", "accumulator"])
def test_raw_codes_that_need_too_large_a_gain_are_decoded_otherwise(placement: str) -> None:
    """Codes as subnormal float16 times 2**25, of a kernel that scales sums."""
    assert decoder("odd7", "float16", placement=placement).choice.strategy == "magic"


@pytest.mark.parametrize("name", ["random8", "whole5"])
def test_the_first_decoder_of_a_type_takes_seconds_at_most(name: str) -> None:
    bits, decode = FORMS[name]
    started = time.process_time()
    fresh = TType(f"{name}_fresh", bits, decode)
    for core in CORES:
        proven_recipes(Conversion(fresh, core, order=packed_order(fresh, core)))
    assert time.process_time() - started < 10
