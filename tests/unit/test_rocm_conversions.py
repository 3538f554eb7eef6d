"""Conversions by AMD's own instructions: proven, scaled by every exponent, and the order of bits read."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

import ladder
from ladder.api.problem import gemm_for
from ladder.lower.gpu.machine import Word
from ladder.lower.gpu.proof import NumpyMachine, lanes, prove, round_to
from ladder.lower.gpu.proven import packed_layout
from ladder.lower.gpu.recipes import Conversion
from ladder.lower.rocm.decode import Converted, best_recipe, vector_instructions, wave_decoder
from ladder.runtime.packed import PackedWeight, own_order
from ladder.simulate.amd import conversions as hardware
from schedules.codes import (
    CONVERSIONS,
    CONVERT_OPERATIONS,
    CONVERTED_TO,
    EXPONENT_OPERATIONS,
    order_read,
)
from schedules.cost_amd import wave_decode_ops
from schedules.layouts import EXPONENT_FORMS
from schedules.schedule import GpuSchedule
from targets import get_device
from tile_types import NumpyOps, TType, get_type
from tile_types.errors import ArtifactError, ShapeError

GPU = get_device("rocm/gfx950")
OTHERS = [get_device(name) for name in ("rocm/gfx942", "rocm/gfx1201", "cuda/sm_90a", "cpu")]
NAMES = {"fp4_e2m1": "fp4", "fp8_e4m3": "fp8", "fp8_e5m2": "bf8", "float16": "f16", "bfloat16": "bf16"}
CASES = list(product(CONVERSIONS, CONVERTED_TO))
OPERAND = GpuSchedule("mfma", 32, 64, 64, 2, 4, placement="operand")


@pytest.mark.parametrize(("name", "core"), CASES)
def test_chosen_proven_and_one_instruction_for_two(name: str, core: str) -> None:
    ttype = get_type(name)
    conversion = Conversion(ttype, core, order=order_read(ttype, core, GPU))
    best = best_recipe(conversion, GPU)
    assert isinstance(best.recipe, Converted)
    assert vector_instructions(best.recipe, conversion) == CONVERT_OPERATIONS * 32
    prove(best.recipe, conversion)
    assert packed_layout(ttype, core, GPU).order == conversion.order
    assert not any(order_read(ttype, core, device) for device in OTHERS)


@pytest.mark.parametrize(("name", "core"), CASES)
def test_the_proof_means_what_the_simulator_executes(name: str, core: str) -> None:
    """All codes in all places by all 256 exponents: subnormal results, and NaN for the last."""
    bits = get_type(name).elem_bits
    codes = get_type(name).valid_codes().astype(np.uint32)
    both = codes * np.uint32((1 << bits) + 1) if bits == 4 else codes | codes[::-1] << np.uint32(bits)
    scale = np.arange(256, dtype=np.uint32) << np.uint32(23)
    for place in range(32 // (2 * bits)):
        word = np.repeat(both << np.uint32(2 * bits * place) | np.uint32(1 << bits), len(scale))
        scales = np.tile(scale | np.uint32(0x80000001), len(codes))  # sign and mantissa do not count
        m = NumpyMachine()
        with np.errstate(all="ignore"):
            found = m.convert(core, name, m.input(word), m.input(scales), place).content
        expected = hardware.convert(word, scales, place, NAMES[name], NAMES[core])
        numbers = zip(lanes(core, found), lanes(core, expected), strict=True)
        last = scales >> np.uint32(23) & np.uint32(255) == 255
        for ours, theirs in numbers:
            np.testing.assert_array_equal(ours, theirs)
            assert np.isnan(theirs[last]).all()


@pytest.mark.parametrize(
    ("weight", "core"), list(product(("mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"), CONVERTED_TO))
)
def test_exponents_go_into_the_conversion(weight: str, core: str) -> None:
    """Every exponent that packing leaves, in every byte of a word, times every code: rounded once."""
    gemm = gemm_for(64, 64, weight, core)
    decoder, ttype, form = wave_decoder(gemm, GPU), get_type(gemm.weight), EXPONENT_FORMS[core]
    assert decoder.scales_inside
    exponents = np.arange(form.lowest, form.highest + 1, dtype=np.uint32)
    codes = ttype.valid_codes().astype(np.uint32)
    exponent, code = (each.ravel() for each in np.meshgrid(exponents, codes))
    power = np.exp2(exponent.astype(np.float64) - form.bias - form.raised)
    expected = ttype.decode_codes(code) * power
    for at in range(4):
        m = NumpyMachine()
        beside = np.uint32(0x5A) << np.uint32((8 * at + 8) % 32)  # the exponent of another group
        (factor,) = decoder.prepare(m, m.input(exponent << np.uint32(8 * at) | beside), 0, at)
        words = [m.input(code * np.uint32(0x01010101 if ttype.elem_bits == 8 else 0x11111111))]
        value = decoder.value(m, words, 0, [factor], None).content
        rounded = lanes(core, round_to(core, expected) * np.uint32(0x00010001))
        np.testing.assert_array_equal(lanes(core, value), rounded)
    assert wave_decode_ops(gemm, GPU, OPERAND) == CONVERT_OPERATIONS + EXPONENT_OPERATIONS


def test_types_are_known_by_their_values() -> None:
    def decode(code: Word, ops: NumpyOps) -> Word:
        return get_type("fp4_e2m1").evaluate(code, ops)

    assert order_read(TType("another_e2m1", 4, decode), "bfloat16", GPU) == "pairs"
    assert not order_read(get_type("nf4"), "bfloat16", GPU)
    assert not order_read(get_type("fp4_e2m1"), "fp8_e4m3", GPU)


def test_weights_say_the_order_of_their_bits(tmp_path: Path) -> None:
    """Of two devices that pack alike one takes the other's weight; else the error names both orders."""
    weight = ladder.quantize(torch.randn(64, 64), "mxfp4")
    ops = {
        name: ladder.Matmul(64, 64, "mxfp4", "bfloat16", target=name)
        for name in ("rocm/gfx950", "rocm/gfx942")
    }
    packed = {name: op.pack(weight) for name, op in ops.items()}
    own = packed["rocm/gfx950"]
    assert own.order == own_order(own.gemm, GPU) == "pairs"
    assert not packed["rocm/gfx942"].order
    assert not torch.equal(own.arrays["words"], packed["rocm/gfx942"].arrays["words"])
    again = PackedWeight.from_bytes(own.to_bytes())
    assert (again.layout, again.order) == (own.layout, "pairs")
    x = torch.randn(3, 64).bfloat16()
    for name, op in ops.items():
        assert not ladder.simulate(op, x, PackedWeight.from_bytes(packed[name].to_bytes())).findings
        other = next(each for each in packed if each != name)
        with pytest.raises(ShapeError, match="order=pairs"):
            ladder.simulate(op, x, packed[other])
        with pytest.raises(ShapeError, match="order=pairs"):
            op.export(tmp_path / "op.ladder", packed[other])
    older = own.describe().replace('"bits": "pairs"', '"bits": ""')
    assert PackedWeight.from_arrays(older, own.arrays).layout != own.layout
    with pytest.raises(ArtifactError, match="export it again"):
        PackedWeight.from_bytes(own.to_bytes()[:-3])
