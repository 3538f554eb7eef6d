"""Decoders: proofs for the whole library, planted errors, order of fragments, emitted code."""

from __future__ import annotations

import dataclasses
import shutil
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from decode_kernels import conversions, emit_decode, fragment_place, tile_codes
from user_types import user_type

from ladder.ir.gemm import Gemm
from ladder.lower.gpu.decode import load_order, make_decoder
from ladder.lower.gpu.decode_codebook import Lookup, Table
from ladder.lower.gpu.decode_float import Spread, Wired
from ladder.lower.gpu.decode_int import ByteOffset, Magic
from ladder.lower.gpu.machine import AND_OR, AND_XOR, XNOR_AND, CountingMachine
from ladder.lower.gpu.proof import NumpyMachine, lanes, place, prove, round_to
from ladder.lower.gpu.proven import (
    STRATEGIES,
    cheapest,
    operand_type,
    packed_layout,
    packed_order,
    proven_recipes,
)
from ladder.lower.gpu.recipes import FLOAT_CORES, Conversion, Lanes16, Meaning
from schedules.fragments import FragmentLayout
from schedules.layouts import EXPONENT_FORMS, lane_of
from targets import get_device
from tile_types import TType, core_values, get_type
from tile_types.errors import ConversionError, VerificationError

HOPPER = "cuda/sm_90a"

EXACT = [name for name, strategy in STRATEGIES.items() if not strategy.raw]

BEST = {
    ("int4", "float16", "none"): "magic",
    ("uint8", "bfloat16", "none"): "split magic",
    ("fp8_e4m3", "bfloat16", "none"): "wired",
    ("fp4_e2m1", "float16", "none"): "wired",
    ("fp4_e2m1", "fp8_e4m3", "none"): "lookup",
    ("int4", "int8", "integer"): "bytes",
    ("fp8_e4m3", "fp8_e4m3", "none"): "pass-through",
    ("fp8_e5m2fnuz", "float16", "none"): "through bfloat16",
}


@pytest.mark.parametrize(("name", "core", "zero"), conversions())
def test_every_conversion_of_the_library_is_proven(name: str, core: str, zero: str) -> None:
    assert proven_recipes(Conversion(get_type(name), core, zero))[0].strategy != "reference"


@pytest.mark.parametrize(("problem", "strategy"), BEST.items(), ids="-".join)
def test_the_cheapest_strategy(problem: Any, strategy: str) -> None:
    name, core, zero = problem if isinstance(problem, tuple) else problem.split("-")
    assert proven_recipes(Conversion(get_type(name), core, zero))[0].strategy == strategy


@pytest.mark.parametrize("strategy", EXACT)
def test_every_strategy_is_needed(strategy: str) -> None:
    if strategy == "table":
        conversion = Conversion(get_type("nf4"), "float16", order="pairs")
        assert [x.strategy for x in proven_recipes(conversion)] == ["table", "table", "lookup"]
    elif strategy == "xor":
        conversion = Conversion(get_type("fp4_e2m1"), "float16", order="float16 crossed")
        assert [x.strategy for x in proven_recipes(conversion)] == ["xor"]
    elif strategy == "spread":
        conversion = Conversion(get_type("fp6_e3m2"), "float16", order="spread 8")
        assert [x.strategy for x in proven_recipes(conversion)] == ["spread"]
    elif strategy == "reference":
        wide = TType("odd_codebook", 5, lambda code, ops: ops.cast(code * code, "float32"))
        assert cheapest(Conversion(wide, "float16"), (9, 0)).strategy == "reference"
    else:
        assert strategy in BEST.values()


@pytest.mark.parametrize(("name", "core"), [case[:2] for case in conversions() if case[2] == "none"])
def test_raw_decodes_of_the_library_are_proven_and_no_dearer(name: str, core: str) -> None:
    raw = cheapest(Conversion(get_type(name), core, raw=True), (9, 0), table=1 << 16)
    assert raw.weight() <= proven_recipes(Conversion(get_type(name), core))[0].weight()
    # What a tensor core multiplies stays within float32's normal numbers.
    assert max(map(abs, raw.meaning.gains)) <= 2.0**24
    assert core not in ("fp8_e4m3", "fp8_e5m2") or not any(raw.meaning.offsets)


def test_raw_int4_is_one_lop3_per_register() -> None:
    """Four per word, and one shift by 8 that brings the upper two fields among float16's subnormals."""
    raw = proven_recipes(Conversion(get_type("int4"), "float16", raw=True))[0]
    assert raw.strategy == "placed"
    assert raw.cost.instructions == 4 * (4 + 1)
    assert raw.meaning == Meaning(gains=(2.0**24, 2.0**20), offsets=(-8.0, -8.0))


def test_offsets_are_left_to_sums_only_where_those_are_cheap() -> None:
    device = get_device(HOPPER)
    for zero, offset in (("none", 0.0), ("integer", -8.0)):
        gemm = Gemm(64, 64, "int4", zero=zero, group_size=32)
        assert make_decoder(gemm, device, "accumulator").offsets == (-8.0, -8.0)
        assert make_decoder(gemm, device, "accumulator", offset_clocks=24.0).offsets == (offset, offset)


@pytest.mark.parametrize("core", ["float16", "bfloat16", "int8"])
def test_a_planted_wrong_meaning_is_rejected(core: str) -> None:
    conversion = Conversion(get_type("int3"), core, raw=True)
    proven = proven_recipes(conversion)[0]
    low, high = proven.meaning.gains
    for gains in ((low, 2 * high), (2 * low, high)):
        with pytest.raises(VerificationError, match="of int3"):
            prove(proven.recipe, conversion, dataclasses.replace(proven.meaning, gains=gains))


def test_zero_points_are_left_to_the_accumulator_where_its_sums_are_exact_enough() -> None:
    device = get_device(HOPPER)
    for core, inside in (("float16", False), ("bfloat16", False), ("int8", False), ("fp8_e4m3", True)):
        gemm = Gemm(64, 64, "uint3", core, zero="integer")
        assert make_decoder(gemm, device, "accumulator").subtracts_zeros == inside
        assert make_decoder(gemm, device).subtracts_zeros
        assert make_decoder(gemm, device).offsets == (0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "core", "order"),
    [("int4", "float16", "lanes"), ("uint4", "bfloat16", "lanes"), ("int4", "int8", "lanes"),
     ("fp4_e2m1", "float16", "float16 crossed"), ("fp4_e2m1", "bfloat16", "bfloat16 crossed"),
     ("int3", "float16", "dense"), ("fp6_e2m3", "bfloat16", "spread 4"),
     ("fp8_e4m3", "float16", "spread 7"), ("uint7", "int8", "dense"),
     ("nf4", "float16", "pairs"), ("nf4", "bfloat16", "pairs"), ("fp4_e2m1", "fp8_e4m3", "lanes")],
)  # fmt: skip
def test_codes_are_packed_in_the_order_that_decodes_cheapest(name: str, core: str, order: str) -> None:
    assert packed_order(get_type(name), core) == order
    assert packed_layout(get_type(name), core) == FragmentLayout(
        get_type(name).elem_bits, lane_of(core), order
    )


def test_tables_are_used_only_where_a_kernel_has_room() -> None:
    gemm, device = Gemm(64, 64, "nf4"), get_device(HOPPER)
    decoders = [make_decoder(gemm, device, table=room) for room in (0, 1 << 15, 1 << 16)]
    assert [decoder.choice.strategy for decoder in decoders] == ["lookup", "table", "table"]
    assert [decoder.table_words for decoder in decoders] == [0, 256 * 32, 256 * 64]
    assert [decoder.choice.cost.instructions for decoder in decoders] == [84, 32, 32]


PLANTED = [
    ("int4", "float16", "none", Magic, lambda r: dataclasses.replace(r, form=_shifted(r.form, 1))),
    ("int4", "bfloat16", "integer", Magic, lambda r: dataclasses.replace(r, form=_shifted(r.form, 1))),
    ("int3", "int8", "none", ByteOffset, lambda r: dataclasses.replace(r, form=_shifted(r.form, 1))),
    ("fp6_e3m2", "float16", "none", Spread, lambda r: dataclasses.replace(r, wiring=_doubled(r.wiring))),
    ("fp8_e5m2", "float16", "none", Wired, lambda r: dataclasses.replace(r, wiring=_doubled(r.wiring))),
    ("nf4", "bfloat16", "none", Table, lambda r: dataclasses.replace(r, values=(*r.values[:-1], 0))),
    ("nf4", "bfloat16", "none", Lookup, lambda r: dataclasses.replace(r, table=(*r.table[:-1], 0))),
    ("fp4_e2m1", "fp8_e4m3", "none", Lookup, lambda r: dataclasses.replace(r, table=(1, *r.table[1:]))),
]


def _doubled(wiring: Any) -> Any:
    return dataclasses.replace(wiring, gain=2 * wiring.gain)


def _shifted(form: Any, by: float) -> Any:
    return dataclasses.replace(form, offset=form.offset + by)


@pytest.mark.parametrize(("name", "core", "zero", "kind", "spoil"), PLANTED)
def test_a_planted_wrong_constant_is_rejected(name: str, core: str, zero: str, kind: Any, spoil: Any) -> None:
    order = packed_order(get_type(name), core)
    conversion = Conversion(get_type(name), core, zero, order=order)
    recipes = [proven.recipe for proven in proven_recipes(conversion)]
    found = next(r for r in recipes if isinstance(getattr(r, "inner", r), kind))
    prove(found, conversion)
    wrong = dataclasses.replace(found, inner=spoil(found.inner)) if hasattr(found, "inner") else spoil(found)
    with pytest.raises(VerificationError, match=f"of {name}"):
        prove(wrong, conversion)


def test_a_leak_into_one_place_is_rejected() -> None:
    """An error in a single register, for a single neighbour, is enough."""
    conversion = Conversion(get_type("uint4"), "float16")
    proven = proven_recipes(conversion)[0].recipe

    class Leaky:
        def register(self, m: Any, words: Any, index: int, zero: Any) -> Any:
            value = proven.register(m, words, index, zero)
            if index != 13:
                return value
            leak = m.mask(m.shift(words[0], -31), 1)  # top bit of another register's code
            return m.lop3(value, m.constant(0xFFFFFFFF), leak, AND_OR)

    with pytest.raises(VerificationError, match="register 13"):
        prove(Leaky(), conversion)


def test_magic_must_fit_the_mantissa() -> None:
    """bfloat16 keeps 8 significant bits: 8-bit codes in a 7-bit mantissa must not pass."""
    form = next(
        r.recipe.inner.form  # type: ignore[attr-defined]
        for r in proven_recipes(Conversion(get_type("uint8"), "float16"))
        if r.strategy == "magic"
    )
    with pytest.raises(VerificationError):
        prove(Lanes16(8, Magic(FLOAT_CORES["bfloat16"], 8, form)), Conversion(get_type("uint8"), "bfloat16"))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("core", ["float16", "bfloat16", "int8", "fp8_e4m3"])
def test_a_users_codebook_gets_table_lookups(bits: int, core: str) -> None:
    table = [0.0, 3.0, -7.0, 5.0, -1.0, 14.0, 2.0, -12.0, 9.0, -2.0, 1.0, 8.0, -16.0, 4.0, 6.0, -5.0]
    table = table[: 1 << bits]
    ttype = TType(f"users{bits}", bits, lambda code, ops: ops.lookup(table, code))
    best = cheapest(Conversion(ttype, core), (9, 0))
    assert best.strategy == ("lookup" if bits > 1 else best.strategy)


def test_types_with_equal_names_do_not_share_proofs() -> None:
    for sign in (1.0, -1.0):
        ttype = TType("twin", 2, lambda code, ops, s=sign: ops.lookup((0.0, s, 5 * s, 7 * s), code))
        conversion = Conversion(ttype, "float16")
        prove(proven_recipes(conversion)[0].recipe, conversion)


# ---- the machine that proofs run on -----------------------------------------------------
def test_float16_fma_is_rounded_once() -> None:
    """Against exact fractions: no neighbour of a result is nearer, and ties are even."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 0x6800, (3, 2000)) | rng.integers(0, 2, (3, 2000)) << 15
    operands = bits.astype(np.uint16).view(np.float16)
    m = NumpyMachine()
    got = m.float_fma("float16", *(m.input(row.astype(np.uint32)) for row in bits)).content
    results = (got & 0xFFFF).astype(np.uint16).view(np.float16)
    finite = np.isfinite(results)
    assert finite.sum() > 1000
    for (a, b, c), result in zip(operands.T[finite], results[finite], strict=True):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        error = abs(Fraction(float(result)) - exact)
        for towards in (np.float16(-65504), np.float16(65504)):
            other = abs(Fraction(float(np.nextafter(result, towards))) - exact)
            even = int(result.view(np.uint16)) % 2 == 0
            assert error < other or (error == other and even) or result == towards


def test_bfloat16_is_not_rounded_twice() -> None:
    # 1 + 2**-8 is a tie between two bfloat16; an addend far below float32's last bit decides it.
    tie, crumb = 1 + 2.0**-8, 2.0**-40
    up = round_to("bfloat16", np.array([tie]), np.array([crumb]))
    down = round_to("bfloat16", np.array([tie]), np.array([-crumb]))
    assert up.astype(np.uint16).view(ml_dtypes.bfloat16)[0] == 1 + 2.0**-7
    assert down.astype(np.uint16).view(ml_dtypes.bfloat16)[0] == 1.0


@pytest.mark.parametrize("table", [AND_XOR, AND_OR, XNOR_AND])
def test_lop3_tables(table: int) -> None:
    formulas = {AND_XOR: lambda a, b, c: (a & b) ^ c, AND_OR: lambda a, b, c: (a & b) | c}
    formula = formulas.get(table, lambda a, b, c: ~(a ^ b) & c)
    a, b, c = np.random.default_rng(0).integers(0, 1 << 32, (3, 64)).astype(np.uint32)
    m = NumpyMachine()
    got = m.lop3(m.input(a), m.input(b), m.input(c), table).content
    np.testing.assert_array_equal(got, formula(a, b, c))


def test_permute_replicates_signs() -> None:
    """PTX ISA, prmt: bit 3 of a selector nibble replicates the sign of the byte."""
    m = NumpyMachine()
    a, b = m.input(np.array([0x33228011], np.uint32)), m.input(np.array([0x77665544], np.uint32))
    assert m.permute(a, b, m.constant(0x7150)).content[0] == 0x77805511
    assert m.permute(a, b, m.constant(0x0089)).content[0] == 0x111100FF


# ---- order of fragments -----------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "core"),
    [("int4", "float16"), ("fp6_e3m2", "bfloat16"), ("uint7", "int8"), ("nf4", "float16"), ("int3", "int8"),
     ("fp8_e5m2", "fp8_e5m2"), ("float16", "float16"), ("int5", "float16"), ("uint1", "fp8_e4m3")],
)  # fmt: skip
def test_packed_tiles_decode_to_the_right_row_and_column(name: str, core: str) -> None:
    """Words of `FragmentLayout.pack`, loaded in `load_order`, give the A fragment of the PTX ISA."""
    ttype = get_type(name)
    layout = packed_layout(ttype, core)
    conversion = Conversion(ttype, core, order=layout.order)
    codes = tile_codes(ttype)
    packed = layout.pack(torch.from_numpy(codes.astype(np.int32))).view(torch.int32).numpy().view(np.uint32)
    threads = np.arange(128)
    own = [packed[o + threads * w + v] for o, w in load_order(ttype.elem_bits) for v in range(w)]
    m = NumpyMachine()
    words = [m.input(word) for word in own]
    recipe = cheapest(conversion, (9, 0)).recipe
    expected = core_values(ttype, core)
    for register in range(conversion.lane):
        out = np.broadcast_to(recipe.register(m, words, register, None).content, (128,))
        for element, values in enumerate(lanes(core, out)):
            for thread in threads:
                row, k = fragment_place(conversion.lane, int(thread), register, element)
                assert values[thread] == expected[codes[row, k]]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_load_order_covers_the_tile(bits: int) -> None:
    order = load_order(bits)
    assert sum(width for _, width in order) == bits
    assert all(width in (1, 2, 4) for _, width in order)
    seen = {o + t * w + v for o, w in order for t in range(128) for v in range(w)}
    assert seen == set(range(128 * bits))


# ---- choice by problem and device ---------------------------------------------------------
def test_a_weight_that_does_not_fit_names_a_core_that_does() -> None:
    with pytest.raises(ConversionError, match="float16"):
        make_decoder(Gemm(64, 64, "nf4", "int8"), get_device(HOPPER))
    with pytest.raises(ConversionError, match="8-bit core"):
        make_decoder(Gemm(64, 64, "uint4", "int8", zero="float"), get_device(HOPPER))


def test_fp8_cores_take_the_other_fp8_type_where_only_it_fits() -> None:
    assert operand_type(Gemm(64, 64, "fp6_e2m3", "fp8_e5m2")) == "fp8_e4m3"
    assert operand_type(Gemm(64, 64, "fp8_e5m2", "fp8_e4m3")) == "fp8_e5m2"
    assert operand_type(Gemm(64, 64, "fp4_e2m1", "fp8_e5m2")) == "fp8_e5m2"


def test_block_types_decode_their_element() -> None:
    decoder = make_decoder(Gemm(64, 64, "mxfp4", group_size=32), get_device(HOPPER))
    assert (decoder.words, decoder.lane, decoder.operand) == (4, 16, "float16")


def test_devices_without_bfloat16_get_another_recipe() -> None:
    conversion = Conversion(get_type("fp8_e5m2fnuz"), "float16")
    assert cheapest(conversion, (7, 5)).strategy == "reference"
    assert cheapest(conversion, (8, 0)).strategy == "through bfloat16"
    assert STRATEGIES["through bfloat16"].capability == (8, 0)


# ---- scales folded into the decode --------------------------------------------------------
def folded_values(decoder: Any, scales: Any, at: int | None = None) -> Any:
    """``[register, lane, code, scale]``: what the decoder makes of every code with every scale.

    Scales are 16-bit floats or, with ``at``, words of exponents.
    """
    ttype, lane = decoder.conversion.ttype, decoder.lane
    codes = np.repeat(ttype.valid_codes().astype(np.uint32), len(scales))
    whole = np.broadcast_to(codes[:, None, None], (len(codes), lane, 32 // lane))
    m = NumpyMachine()
    words = [m.input(word) for word in place(whole, ttype.elem_bits, lane, decoder.conversion.order)]
    held = scales if at is not None else scales.view(np.uint16).astype(np.uint32) * np.uint32(0x10001)
    bits = np.tile(held, len(codes) // len(scales))
    rows = []
    for r in range(4):
        factors = decoder.prepare(m, m.input(bits), r % 2, at)
        rows.append(decoder.value(m, words, r, factors, None).content)
    return np.array([lanes(decoder.operand, row) for row in rows]).reshape(4, 2, -1, len(scales))


FOLDED = {"int4": 20, "uint4": 20, "int8": 24, "int2": 26, "ternary": 30, "fp4_e2m1": 32, "fp8_e4m3": 40}


@pytest.mark.parametrize(("name", "instructions"), FOLDED.items())
def test_folded_scales_are_rounded_once(name: str, instructions: int) -> None:
    """For every code and every mantissa of a scale; the exponents are the largest that packing leaves."""
    ttype = get_type(name)
    decoder = make_decoder(Gemm(64, 64, name, group_size=32), get_device(HOPPER), gains=True)
    assert decoder.fold is not None
    assert decoder.choice.cost.instructions == instructions
    assert decoder.gains == (1.0, 1.0)
    largest = np.float16(2.0**-8).view(np.uint16)
    scales = (largest - np.arange(1, 1025)).astype(np.uint16).view(np.float16)
    got = folded_values(decoder, scales)
    exact = ttype.probe_values()[:, None] * scales.astype(np.float64) / decoder.gains[0]
    np.testing.assert_array_equal(got, np.broadcast_to(exact.astype(np.float16), got.shape))


def test_folded_scales_bring_tiny_operands_back() -> None:
    """fp4_e2m1 in bfloat16 is 2**-126 of itself; as such it must not meet x, but a scale may."""
    gemm, device = Gemm(64, 64, "fp4_e2m1", "bfloat16", group_size=32), get_device(HOPPER)
    decoder = make_decoder(gemm, device, gains=True)
    assert (decoder.choice.strategy, decoder.gains[0]) == ("xor, unscaled", 1.0)
    assert make_decoder(gemm, device, "accumulator").gains == (1.0, 1.0)
    scales = (2.0 ** np.arange(-40, -9) * 1.4140625).astype(ml_dtypes.bfloat16)
    exact = get_type("fp4_e2m1").probe_values()[:, None] * scales.astype(np.float64) / decoder.gains[0]
    np.testing.assert_array_equal(
        folded_values(decoder, scales)[0, 0], exact.astype(ml_dtypes.bfloat16).astype(np.float64)
    )


def test_folded_scales_may_underflow_but_not_harm() -> None:
    """Scales 2**-12 of the row's largest: off by the smallest float16 at most, 2**-19 of the largest."""
    decoder = make_decoder(Gemm(64, 64, "int4", group_size=32), get_device(HOPPER), gains=True)
    scales = (2.0**-20 * np.arange(1, 2, 2.0**-4)).astype(np.float16)
    exact = np.r_[0:8, -8:0][:, None] * scales.astype(np.float64)
    assert np.abs(folded_values(decoder, scales) - exact).max() <= 2.0**-24 <= 2.0**-19 * 8 * 2.0**-8


@pytest.mark.parametrize("core", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["fp4_e2m1", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", "fp8_e5m2", "int4", "nf4"])
def test_exponents_become_factors(name: str, core: str) -> None:
    """For every code and every exponent, in every byte of a word; scales 2**-16 of the largest may be 0."""
    ttype, form = get_type(name), EXPONENT_FORMS[core]
    gemm = Gemm(64, 64, name, core, group_size=32, power_scales=True)
    decoder = make_decoder(gemm, get_device(HOPPER), gains=True)
    byte = np.arange(form.lowest, form.highest + 1)
    scales = 2.0 ** (byte - form.bias - form.raised)
    exact = core_values(ttype, core)[ttype.valid_codes()][:, None] * scales / decoder.gains[0]
    kind, small = FLOAT_CORES[core].numpy, np.abs(exact).max() * (2.0**-16 if core == "float16" else 0.0)
    for at in range(4):
        words = (byte << (8 * at) | 0x5A5A5A5A & ~(255 << 8 * at)).astype(np.uint32)
        got = folded_values(decoder, words, at)
        np.testing.assert_allclose(got[0, 0], exact.astype(kind).astype(float), rtol=0, atol=small)
        np.testing.assert_array_equal(got, np.broadcast_to(got[0, 0], got.shape))


def test_exponents_of_fp4_cost_one_multiply_add() -> None:
    for core in ("float16", "bfloat16"):
        gemm = Gemm(64, 64, "fp4_e2m1", core, group_size=32, power_scales=True)
        decoder, m = make_decoder(gemm, get_device(HOPPER), gains=True), CountingMachine()
        decoder.prepare(m, m.input(None), 0, 3)
        assert m.cost.instructions == 2


@pytest.mark.parametrize(
    ("name", "core", "zero", "folds"),
    [("int4", "bfloat16", "none", False), ("uint4", "bfloat16", "none", True),
     ("nf4", "float16", "none", False), ("uint4", "float16", "integer", False),
     ("uint4", "float16", "float", False)],
)  # fmt: skip
def test_scales_fold_only_where_that_is_exact(name: str, core: str, zero: str, folds: bool) -> None:
    """-136 times a bfloat16 is rounded; so is the difference of offset and zero point times a scale."""
    gemm = Gemm(64, 64, name, core, zero=zero, group_size=32)
    decoder = make_decoder(gemm, get_device(HOPPER), gains=True)
    assert (decoder.fold is not None) == folds
    assert folds or decoder.gains == (1.0, 1.0)


# ---- emitted code -------------------------------------------------------------------------
EMITTED = [
    Gemm(64, 64, "int4", "float16", group_size=32, zero="integer"),
    Gemm(64, 64, "uint4", "bfloat16", group_size=32, zero="float"),
    Gemm(64, 64, "int8", "bfloat16", scale=False),
    Gemm(64, 64, "fp8_e5m2fnuz", "float16"),
    Gemm(64, 64, "fp4_e2m1", "float16"),
    Gemm(64, 64, "fp7_e3m3", "bfloat16"),
    Gemm(64, 64, "fp8_e5m2", "float16"),
    Gemm(64, 64, "nf4", "float16"),
    Gemm(64, 64, "fp4_e2m1", "fp8_e4m3"),
    Gemm(64, 64, "int3", "int8", group_size=32, zero="integer"),
    Gemm(64, 64, "fp6_e2m3", "fp8_e4m3"),
    Gemm(64, 64, "e8m0", "bfloat16"),
]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="compiling needs nvcc")
def test_emitted_decoders_compile_without_spills(tmp_path: Any) -> None:
    """One kernel per strategy: nvcc accepts every instruction spelling."""
    from ladder.lower.cuda.toolchain import compile_functions

    device = get_device(HOPPER)
    emitted = [*EMITTED, Gemm(64, 64, user_type("random3").name, "float16")]
    used = {make_decoder(gemm, device, table=1 << 16).choice.strategy for gemm in emitted}
    assert used == set(EXACT) - {"pass-through", "reference"}
    functions = {f"decode_{i}": emit_decode(gemm, device, f"decode_{i}") for i, gemm in enumerate(emitted)}
    result = compile_functions(functions, device, tmp_path / "decode.so")
    assert len(result.resources) == len(emitted)
    assert all(not kernel["spill_stores"] for kernel in result.resources.values())
