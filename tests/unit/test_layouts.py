"""The packed weight layout against a scalar reference written from its formula."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from schedules.fragments import FragmentLayout
from schedules.layouts import EXPONENT_FORMS, packed_group, planes
from schedules.packed_scales import normalise_scales
from schedules.spread import XOR_PACKINGS, spread
from tile_types.errors import ConversionError, DTypeError, ShapeError, ValueRangeError

PLANE_WIDTHS = {1: [1], 2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8], 16: [16]}
CASES = [(bits, lane) for lane in (16, 8) for bits in PLANE_WIDTHS if bits <= lane]


def owner(lane: int, register: int, e: int, thread: int) -> tuple[int, int]:
    """Row and column, in a 64 x 64 tile, of element e of a thread's A-fragment register."""
    w, g, c = thread // 32, thread % 32 // 4, thread % 4
    j, kh, h = register // 4, register // 2 % 2, register % 2
    if lane == 16:
        return 16 * w + g + 8 * h, 16 * j + 8 * kh + 2 * c + e
    return 16 * w + g + 8 * h, 32 * j + 16 * kh + 4 * c + e


def pack_tile(codes: np.ndarray, bits: int, lane: int) -> list[int]:
    """Pack one 64 x 64 tile, one code at a time."""
    words: list[int] = []
    low = 0
    for p in PLANE_WIDTHS[bits]:
        plane = [0] * (128 * p)
        vector = min(p, 4)
        for thread in range(128):
            for register in range(lane):  # 16 registers of 2 codes, or 8 of 4
                for e in range(32 // lane):
                    row, column = owner(lane, register, e, thread)
                    code = (int(codes[row, column]) >> low) & ((1 << p) - 1)
                    word, slot = divmod(register, lane // p)
                    where = (word // vector) * 128 * vector + thread * vector + word % vector
                    plane[where] |= code << (lane * e + p * slot)
        words += plane
        low += p
    return words


@pytest.mark.parametrize(("bits", "lane"), CASES)
def test_pack_equals_scalar_reference_and_inverts(bits: int, lane: int) -> None:
    rng = np.random.default_rng(bits * 100 + lane)
    n, k = 70, 130
    codes = rng.integers(0, 1 << bits, (n, k)).astype(np.uint8 if bits <= 8 else np.uint16)
    pad = (1 << bits) - 1
    full = np.full((128, 192), pad, dtype=codes.dtype)
    full[:n, :k] = codes
    expected: list[int] = []
    for row in range(0, 128, 64):
        for column in range(0, 192, 64):
            expected += pack_tile(full[row : row + 64, column : column + 64], bits, lane)
    layout = FragmentLayout(bits, lane)
    packed = layout.pack(codes, pad_code=pad)
    assert packed.dtype == torch.uint32
    np.testing.assert_array_equal(packed.numpy(), np.array(expected, dtype=np.uint32))
    assert np.prod(layout.packed_shape(n, k)) == packed.numel()
    np.testing.assert_array_equal(layout.unpack(packed, n, k).numpy(), codes)


def element_bit(order: str, register: int, e: int, bit: int) -> int:
    """Bit of word ``register // 4`` that holds bit ``bit`` of a four-bit code."""
    slot = register % 4
    if order == "pairs":
        return 8 * slot + 4 * e + bit
    if order == "bfloat16 signs" and slot == 3:
        return 16 * e + (13, 14, 10, 11)[bit]
    top = {"float16 signs": (14, 13, 12, 15), "bfloat16 signs": (9, 12, 15)}[order][slot]
    return 16 * e + (top if bit == 3 else 3 * slot + bit)


@pytest.mark.parametrize(
    ("bits", "order"),
    [(3, "pairs"), (5, "bytes"), (6, "bytes"), (7, "bytes"), (8, "halves"), (6, "spread 8"), (4, "spread 6")],
)
def test_orders_of_other_widths_invert(bits: int, order: str) -> None:
    codes = np.random.default_rng(1).integers(0, 1 << bits, (67, 130)).astype(np.uint8)
    layout = FragmentLayout(bits, 16, order)
    np.testing.assert_array_equal(layout.unpack(layout.pack(codes), 67, 130).numpy(), codes)


@pytest.mark.parametrize("order", ["pairs", "float16 signs", "bfloat16 signs"])
def test_other_orders_equal_a_scalar_reference_and_invert(order: str) -> None:
    codes = np.random.default_rng(1).integers(0, 16, (64, 64)).astype(np.uint8)
    expected = np.zeros(512, np.uint32)
    for thread in range(128):
        for register in range(16):
            for e in (0, 1):
                for bit in range(4):
                    code = int(codes[owner(16, register, e, thread)])
                    at = element_bit(order, register, e, bit)
                    expected[4 * thread + register // 4] |= np.uint32((code >> bit & 1) << at)
    layout = FragmentLayout(4, 16, order)
    packed = layout.pack(codes)
    np.testing.assert_array_equal(packed.numpy(), expected)
    np.testing.assert_array_equal(layout.unpack(packed, 64, 64).numpy(), codes)


@pytest.mark.parametrize(("order", "place"), [("float16 crossed", 9), ("bfloat16 crossed", 6)])
def test_crossed_words_yield_registers_by_masked_sums(order: str, place: int) -> None:
    """Sign and magnitude of e2m1 at bit 15 and from ``place`` on of each half, as the order promises."""
    codes = np.random.default_rng(1).integers(0, 16, (64, 64)).astype(np.uint8)
    layout = FragmentLayout(4, 16, order)
    packed = layout.pack(codes)
    np.testing.assert_array_equal(layout.unpack(packed, 64, 64).numpy(), codes)
    words = packed.numpy().astype(np.uint64)
    for thread, register in product((0, 37, 127), range(16)):
        word, total = int(words[4 * thread + register // 4]), 0
        for left in XOR_PACKINGS[order].shifts[register % 4]:
            total ^= word << left if left >= 0 else word >> -left | word << 32 + left
        for e in (0, 1):
            code = int(codes[owner(16, register, e, thread)])
            assert total >> (16 * e) & (1 << 15 | 7 << place) == (code & 8) << 12 | (code & 7) << place


@pytest.mark.parametrize(("bits", "place"), [(3, 10), (5, 6), (6, 8), (7, 4), (8, 7)])
def test_spread_words_yield_registers_by_masked_rotations(bits: int, place: int) -> None:
    """Sign at bit 15 and magnitude from ``place`` on of each half; no bit of a word is wasted."""
    codes = np.random.default_rng(1).integers(0, 1 << bits, (64, 64)).astype(np.uint8)
    layout = FragmentLayout(bits, 16, f"spread {place}")
    packed = layout.pack(codes)
    np.testing.assert_array_equal(layout.unpack(packed, 64, 64).numpy(), codes)
    flat, low = packed.numpy(), (1 << (bits - 1)) - 1
    for thread, register in product((0, 37, 127), range(16)):
        total = 0
        for word, turn, mask in spread(bits, place)[register]:
            found = int(flat[word_place(bits, word, thread)])
            total |= (found << turn | found >> 32 - turn) & mask * 0x10001
        for e in (0, 1):
            code = int(codes[owner(16, register, e, thread)])
            sign = code >> (bits - 1)
            assert total >> (16 * e) & 0xFFFF == sign << 15 | (code & low) << place


def word_place(bits: int, word: int, thread: int) -> int:
    """Return where a thread's word is in a packed tile: by planes, then vectors of up to four words."""
    first = 0
    for width, _ in planes(bits):
        if word < first + width:
            vector = min(width, 4)
            group, at = divmod(word - first, vector)
            return 128 * first + (group * 128 + thread) * vector + at
        first += width
    raise AssertionError(word)


def test_masking_a_word_yields_one_register() -> None:
    codes = torch.arange(64 * 64).reshape(64, 64).remainder(16).to(torch.uint8)
    words = FragmentLayout(4, 16).pack(codes).numpy()
    for thread, register in ((0, 0), (37, 5), (127, 15)):
        value = (int(words[4 * thread + register // 4]) >> (4 * (register % 4))) & 0x000F000F
        expected = [int(codes[owner(16, register, e, thread)]) for e in (0, 1)]
        assert value == expected[0] | expected[1] << 16


def test_planes_cover_each_bit_once() -> None:
    for bits, widths in PLANE_WIDTHS.items():
        assert [width for width, _ in planes(bits)] == widths
        assert [shift for _, shift in planes(bits)] == list(np.cumsum([0, *widths])[:-1])


@pytest.mark.parametrize(("bits", "lane"), [(16, 8), (9, 16), (0, 16), (4, 32)])
def test_impossible_layouts_are_refused(bits: int, lane: int) -> None:
    with pytest.raises(ShapeError):
        FragmentLayout(bits, lane)


@pytest.mark.parametrize("lane", [16, 8])
@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_dense_order_equals_a_scalar_reference_and_inverts(bits: int, lane: int) -> None:
    """Whole codes first, then the last codes, bit by bit, in what is left of the lanes."""
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (64, 64)).astype(np.uint8)
    whole, rest = lane // bits, lane % bits
    own = np.zeros((128, bits), np.uint32)
    for thread in range(128):
        for register in range(lane):
            for e in range(32 // lane):
                code = int(codes[owner(lane, register, e, thread)])
                for bit in range(bits):
                    word, at = register // whole, bits * (register % whole) + bit
                    if register >= bits * whole:
                        word, at = divmod((register - bits * whole) * bits + bit, rest)
                        at += bits * whole
                    own[thread, word] |= np.uint32((code >> bit & 1) << (lane * e + at))
    parts, first = [], 0
    for p in PLANE_WIDTHS[bits]:
        for start in range(first, first + p, min(p, 4)):
            parts.append(own[:, start : start + min(p, 4)].reshape(-1))
        first += p
    layout = FragmentLayout(bits, lane, "dense")
    packed = layout.pack(codes)
    np.testing.assert_array_equal(packed.numpy(), np.concatenate(parts))
    np.testing.assert_array_equal(layout.unpack(packed, 64, 64).numpy(), codes)


@pytest.mark.parametrize(
    ("bits", "lane", "order"), [(4, 8, "pairs"), (2, 16, "pairs"), (8, 16, "dense"), (4, 16, "dense")]
)
def test_orders_are_of_certain_widths(bits: int, lane: int, order: str) -> None:
    with pytest.raises(ShapeError, match=order):
        FragmentLayout(bits, lane, order)


def test_pack_refuses_bad_input() -> None:
    with pytest.raises(ValueRangeError, match="16"):
        FragmentLayout(4, 16).pack(torch.full((64, 64), 16, dtype=torch.uint8))
    with pytest.raises(ShapeError, match="matrix"):
        FragmentLayout(4, 16).pack(torch.zeros(64, dtype=torch.uint8))
    with pytest.raises(ShapeError, match="packed words"):
        FragmentLayout(4, 16).unpack(torch.zeros(3, dtype=torch.uint32), 64, 64)


@dataclass(frozen=True)
class Limits:
    minimum: float = -8.0
    maximum: float = 7.0


@dataclass(frozen=True)
class Weight:
    shape: tuple[int, int]
    block: tuple[int, int]
    scale: Any = None
    zero: Any = None
    zero_kind: str = "none"
    tensor_scale: float | None = None
    ttype: Limits = Limits()


def dense(array: np.ndarray, weight: Weight) -> np.ndarray:
    """Scale of every element, straight from the canonical block structure."""
    n, k = weight.shape
    rows, columns = np.arange(n) // weight.block[0], np.arange(k) // weight.block[1]
    return np.asarray(array, dtype=np.float64)[rows[:, None], columns[None, :]]


def packed_dense(array: torch.Tensor, group: int, n: int, k: int) -> np.ndarray:
    """Value of every element as a kernel looks it up."""
    return array.to(torch.float64).numpy()[(np.arange(k) // group)[None, :], np.arange(n)[:, None]]


@pytest.mark.parametrize("core", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((70, 200), (1, 128)),
        ((64, 256), (1, 48)),
        ((130, 130), (128, 128)),
        ((3, 100), (1, 16)),
        ((5, 96), (1, 96)),
    ],
)
def test_scales_times_row_scale_is_the_scale(
    core: str, shape: tuple[int, int], block: tuple[int, int]
) -> None:
    rng = np.random.default_rng(0)
    extents = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    # 8 significant bits, so that every core holds them exactly
    scale = rng.integers(128, 256, extents) * 2.0 ** rng.integers(-20, -10, (extents[0], 1))
    weight = Weight(shape, block, scale=scale, tensor_scale=0.75)
    packed = normalise_scales(weight, core, grouped=True)
    assert packed.scales is not None
    assert packed.scales.dtype == (torch.float32 if core == "int8" else getattr(torch, core))
    row = packed.row_scale[: shape[0], None].to(torch.float64).numpy()
    np.testing.assert_array_equal(
        packed_dense(packed.scales, packed.group, *shape) * row, dense(scale, weight) * 0.75
    )
    assert packed.scales.shape[1] % 64 == 0
    assert torch.count_nonzero(packed.scales[:, shape[0] :]) == 0
    largest = packed.scales[:, : shape[0]].to(torch.float64).amax(dim=0)
    assert bool(((largest >= 2**-9) & (largest < 2**-8)).all())


def test_scales_outside_float16_survive() -> None:
    weight = Weight((2, 64), (1, 32), scale=np.array([[2.0**-127, 2.0**-126], [2.0**100, 2.0**101]]))
    packed = normalise_scales(weight, "float16")
    assert packed.scales is not None
    row = packed.row_scale[:2].to(torch.float64)
    assert (packed.scales[:, 1].to(torch.float64) * row[1]).tolist() == [2.0**100, 2.0**101]
    # float32 has no normal number below 2**-126: the row factor stops there and the scales take the rest
    assert (packed.scales[:, 0].to(torch.float64) * row[0]).tolist() == [2.0**-127, 2.0**-126]


@pytest.mark.parametrize("core", ["float16", "bfloat16"])
def test_exponents_times_row_scale_are_the_scale(core: str) -> None:
    rng = np.random.default_rng(0)
    scale = 2.0 ** (rng.integers(-100, 100, (70, 1)) + rng.integers(0, 17, (70, 7)))
    packed = normalise_scales(Weight((70, 200), (1, 32), scale=scale), core, exponents=True)
    assert packed.scales is not None
    assert (packed.scales.dtype, packed.scales.shape) == (torch.uint32, (2, 128))
    row = packed.row_scale[:70, None].to(torch.float64).numpy()
    np.testing.assert_array_equal(unpacked_exponents(packed.scales, core)[:7, :70].T * row, scale)


def unpacked_exponents(words: torch.Tensor, core: str) -> Any:
    """Return the scales ``[k_groups, n_pad]`` that words of exponents stand for."""
    form = EXPONENT_FORMS[core]
    byte = words.view(torch.uint8).reshape(*words.shape, 4).permute(0, 2, 1).flatten(0, 1)
    return 2.0 ** (byte.numpy().astype(float) - form.bias - form.raised)


def test_exponents_far_below_the_rows_largest_stop_there() -> None:
    """2**-17 of the largest scale is below float16's rounding of what the largest multiplies."""
    scale = np.array([[1.0, 2.0**-17, 2.0**-18, 2.0**-120]])
    packed = normalise_scales(Weight((1, 128), (1, 32), scale=scale), "float16", exponents=True)
    assert packed.scales is not None
    got = unpacked_exponents(packed.scales, "float16")[:, 0] * float(packed.row_scale[0])
    assert got.tolist() == [1.0, 2.0**-17, 2.0**-17, 2.0**-17]


def test_a_scale_that_is_nan_makes_its_row_nan() -> None:
    scale = np.array([[np.nan, 1.0], [2.0, 4.0]])
    packed = normalise_scales(Weight((2, 64), (1, 32), scale=scale), "float16", exponents=True)
    assert packed.row_scale[:2].isnan().tolist() == [True, False]


@pytest.mark.parametrize("scale", [0.75, 0.0, -1.0, 2.0**119])
def test_exponents_of_other_scales_are_refused(scale: float) -> None:
    with pytest.raises(ConversionError, match="a scale"):
        normalise_scales(
            Weight((1, 64), (1, 32), scale=np.array([[scale, scale]])), "bfloat16", exponents=True
        )


def test_one_scale_per_row_is_exact_float32() -> None:
    scale = np.array([[1 / 3], [2 / 7]], dtype=np.float32)
    packed = normalise_scales(Weight((2, 100), (1, 100), scale=scale), "bfloat16")
    assert packed.scales is None
    assert packed.row_scale[:2].tolist() == scale[:, 0].tolist()
    assert packed.row_scale.shape == (64,)


def test_no_scale_at_all_is_one() -> None:
    packed = normalise_scales(Weight((2, 64), (1, 64)), "float16")
    assert packed.scales is None
    assert packed.row_scale[:2].tolist() == [1.0, 1.0]


def test_zero_rows_keep_factor_one() -> None:
    packed = normalise_scales(Weight((1, 64), (1, 32), scale=np.zeros((1, 2))), "float16")
    assert packed.row_scale[0] == 1.0


@pytest.mark.parametrize(
    ("core", "dtype"), [("float16", torch.float16), ("int8", torch.int8), ("fp8_e4m3", torch.int8)]
)
def test_integer_zeros(core: str, dtype: torch.dtype) -> None:
    zero = np.arange(6).reshape(2, 3)
    weight = Weight(
        (2, 96), (1, 32), scale=np.ones((2, 3)), zero=zero, zero_kind="integer", ttype=Limits(0, 15)
    )
    packed = normalise_scales(weight, core)
    assert packed.zeros is not None
    assert packed.zeros.dtype == dtype
    assert packed.zeros.shape == (4, 64)
    assert packed.zeros[:3, :2].to(torch.int32).tolist() == zero.T.tolist()


def test_float_zeros_split_into_coarse_part_and_remainder() -> None:
    zero = torch.tensor([[7.40625, 0.2734375], [15.5, 130.125]])
    weight = Weight(
        (2, 64), (1, 32), scale=torch.ones(2, 2), zero=zero, zero_kind="float", ttype=Limits(0, 15)
    )
    packed = normalise_scales(weight, "bfloat16")
    assert packed.zeros is not None
    assert packed.zeros.shape == (2, 2, 64)
    coarse, rest = packed.zeros[:, 0, :2].float(), packed.zeros[:, 1, :2].float()
    assert torch.equal(coarse.t(), torch.tensor([[7.40625, 0.25], [15.5, 130.0]]))
    assert torch.equal((coarse + rest).t(), zero)


def test_zeros_that_8_bit_cores_cannot_subtract() -> None:
    base = {"shape": (1, 64), "block": (1, 64), "scale": np.ones((1, 1))}
    with pytest.raises(ConversionError, match="float16"):
        normalise_scales(Weight(**base, zero=np.array([[0.5]]), zero_kind="float"), "int8")
    with pytest.raises(ConversionError, match="int8"):
        normalise_scales(Weight(**base, zero=np.array([[200]]), zero_kind="integer"), "int8")


def test_packed_group() -> None:
    assert [packed_group(g, 4096) for g in (16, 32, 48, 64, 96, 128, 192, 4096)] == [
        16,
        32,
        16,
        64,
        32,
        128,
        192,
        4096,
    ]
    assert packed_group(100, 100) == 128
    with pytest.raises(ShapeError, match="multiple of 16"):
        packed_group(24, 4096)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(DTypeError, match="float64"):
        normalise_scales(Weight((1, 64), (1, 64)), "float64")
    with pytest.raises(ShapeError, match="fold"):
        normalise_scales(Weight((1, 64), (1, 32), scale=np.ones((1, 2))), "float16", grouped=False)
    with pytest.raises(ShapeError, match=r"\(1, 3\)"):
        normalise_scales(Weight((1, 64), (1, 32), scale=np.ones((1, 3))), "float16")
