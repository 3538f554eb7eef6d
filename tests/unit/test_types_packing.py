"""Canonical storage: words and bytes by hand, and the errors."""

from __future__ import annotations

import numpy as np
import pytest

from tile_types import pack_codes, unpack_codes
from tile_types.arrays import as_torch
from tile_types.errors import DTypeError, ShapeError
from tile_types.packing import storage_bytes, storage_extent, with_constant


def test_ten_three_bit_codes_share_a_word() -> None:
    codes = np.arange(11, dtype=np.uint8) % 8
    words = pack_codes(codes, 3)
    expected = sum(int(code) << (3 * i) for i, code in enumerate(codes[:10]))
    assert words.dtype == np.uint32
    assert words.tolist() == [expected, int(codes[10])]


def test_four_bit_codes_are_little_endian() -> None:
    np.testing.assert_array_equal(
        pack_codes(np.array([[1, 2, 3], [4, 5, 15]]), 4), [[0x21, 0x03], [0x54, 0x0F]]
    )


@pytest.mark.parametrize(("bits", "per_word"), [(3, 10), (5, 6), (6, 5), (7, 4), (19, 1)])
def test_other_widths_fill_words(bits: int, per_word: int) -> None:
    codes = np.full(per_word * 2, (1 << bits) - 1, np.uint32)
    words = pack_codes(codes, bits)
    assert words.tolist() == [(1 << (bits * per_word)) - 1] * 2
    assert storage_extent(per_word * 2 + 1, bits) == 3
    assert storage_bytes(per_word * 2 + 1, bits) == 12


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_whole_bytes_keep_their_order(bits: int) -> None:
    codes = np.array([[1, 2**bits - 1, 7]], f"uint{bits}")
    storage = pack_codes(codes, bits)
    assert storage.tobytes() == codes.astype(f"<u{bits // 8}").tobytes()
    np.testing.assert_array_equal(unpack_codes(storage, bits, 3), codes)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8, 16, 19, 32])
@pytest.mark.parametrize("shape", [(1,), (3, 13), (2, 3, 31), (0, 7)])
def test_torch_packs_like_numpy(bits: int, shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    codes = np.random.default_rng(bits).integers(0, 2**bits, shape, dtype=np.uint64).astype(np.uint32)
    ours = pack_codes(codes, bits)
    theirs = pack_codes(torch.from_numpy(codes.astype(np.int64)), bits)
    np.testing.assert_array_equal(theirs.numpy(), ours)
    np.testing.assert_array_equal(unpack_codes(ours, bits, shape[-1]), codes)
    np.testing.assert_array_equal(unpack_codes(theirs, bits, shape[-1]).numpy(), codes)


def test_bits_above_the_width_are_ignored() -> None:
    np.testing.assert_array_equal(pack_codes(np.array([0xF1, 0xF2]), 4), [0x21])


@pytest.mark.parametrize("bits", [0, 33, -1])
def test_impossible_widths(bits: int) -> None:
    with pytest.raises(ShapeError, match="1 to 32"):
        pack_codes(np.zeros(4, np.uint8), bits)


def test_storage_of_another_length() -> None:
    with pytest.raises(ShapeError, match="the storage has 2"):
        unpack_codes(np.zeros(2, np.uint8), 4, 5)


def test_storage_of_another_dtype() -> None:
    with pytest.raises(DTypeError, match="uint32"):
        unpack_codes(np.zeros(1, np.uint8), 3, 5)


@pytest.mark.parametrize("codes", [np.zeros(4), [1, 2]])
def test_codes_are_integer_arrays(codes: object) -> None:
    with pytest.raises(DTypeError):
        pack_codes(codes, 4)


def test_a_scalar_cannot_be_packed() -> None:
    with pytest.raises(ShapeError):
        pack_codes(np.array(3), 4)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 7, 8, 16, 19])
@pytest.mark.parametrize(("columns", "width"), [(64, 16), (70, 32), (50, 7), (33, 3), (40, 40)])
def test_codes_of_some_groups_become_one(bits: int, columns: int, width: int) -> None:
    """In storage, without taking out the others; what was given is not written."""
    random = np.random.default_rng(bits)
    codes = random.integers(0, 1 << bits, (6, columns)).astype(np.uint32)
    groups, code = random.random((6, -(-columns // width))) < 0.4, int(random.integers(0, 1 << bits))
    spread = groups.repeat(width, 1)[:, :columns]
    storage = pack_codes(codes, bits)
    kept = storage.copy()
    found = with_constant(storage, bits, columns, groups, width, code)
    np.testing.assert_array_equal(unpack_codes(found, bits, columns), np.where(spread, code, codes))
    same = with_constant(as_torch(storage), bits, columns, as_torch(groups), width, code)
    np.testing.assert_array_equal(same.numpy(), found)
    np.testing.assert_array_equal(storage, kept)
