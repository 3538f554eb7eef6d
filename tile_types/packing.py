"""The canonical storage of codes: what is on disk, and what device layouts are maps of.

Widths that divide 32 are dense: little-endian, lowest bits first, in bytes. Other widths
put ``32 // bits`` codes in each 4-byte word, lowest bits first (ten 3-bit codes in a word),
so that no code crosses a word.
"""

from __future__ import annotations

from tile_types.arrays import Array, Arrays, arrays_of
from tile_types.errors import DTypeError, ShapeError
from tile_types.ttype import code_dtype

MAX_BITS = 32
"""Widest code that is packed; wider types are only computed with."""


def is_dense(bits: int) -> bool:
    """Tell whether codes of this width fill words without a gap."""
    return 32 % bits == 0 or bits % 32 == 0


def storage_dtype(bits: int) -> str:
    """Return the dtype of canonical storage: uint8 when dense, else uint32."""
    return "uint8" if is_dense(bits) else "uint32"


def storage_extent(count: int, bits: int) -> int:
    """Return the last extent (bytes or words) that stores ``count`` codes."""
    return -(-count * bits // 8) if is_dense(bits) else -(-count // (32 // bits))


def storage_bytes(count: int, bits: int) -> int:
    """Return the bytes that store ``count`` codes along the last axis."""
    return storage_extent(count, bits) * (1 if is_dense(bits) else 4)


def pack_codes(codes: Array, bits: int) -> Array:
    """Pack codes along the last axis.

    codes: Integer array [..., K] with values below ``2**bits``; higher bits are ignored.
    bits: Width of a code, 1 to 32.
    Returns: uint8 [..., ceil(K * bits / 8)] if ``bits`` divides 32, else uint32 [..., ceil(K / (32 //
        bits))].
    """
    xp = _checked(codes, bits)
    if is_dense(bits) and bits >= 8:
        return xp.view(xp.cast(codes, code_dtype(bits)), "uint8")
    per_unit = 8 // bits if is_dense(bits) else 32 // bits
    unit = "uint8" if is_dense(bits) else "int32"
    count = codes.shape[-1]
    narrow = "uint8" if bits <= 8 else unit  # a fourth of the memory to go through
    padded = xp.pad_last(xp.cast(codes, narrow) & ((1 << bits) - 1), -count % per_unit)
    slots = padded.reshape(*codes.shape[:-1], padded.shape[-1] // per_unit, per_unit)
    packed = xp.empty(tuple(slots.shape[:-1]), unit, codes)
    packed[...] = slots[..., per_unit - 1]
    for slot in reversed(range(per_unit - 1)):
        packed <<= bits
        packed |= slots[..., slot]
    return packed if is_dense(bits) else xp.view(packed, "uint32")


def unpack_codes(storage: Array, bits: int, count: int) -> Array:
    """Invert `pack_codes`.

    storage: What `pack_codes` returned.
    bits: Width of a code.
    count: Codes along the last axis.
    Returns: Codes [..., count]: uint8, or uint16 / uint32 for wider codes.
    Raises ShapeError if the storage cannot hold exactly ``count`` codes.
    """
    xp = _checked(storage, bits)
    if storage.shape[-1] != storage_extent(count, bits):
        raise ShapeError(
            f"{count} codes of {bits} bits take {storage_extent(count, bits)} {storage_dtype(bits)} units, "
            f"the storage has {storage.shape[-1]}"
        )
    if xp.dtype_name(storage) != storage_dtype(bits):
        raise DTypeError(f"storage of {bits}-bit codes is {storage_dtype(bits)}, got {storage.dtype}")
    if is_dense(bits) and bits >= 8:
        return xp.view(storage, code_dtype(bits))
    words = storage if is_dense(bits) else xp.view(storage, "int32")
    per_unit = 8 // bits if is_dense(bits) else 32 // bits
    codes = xp.empty((*storage.shape, per_unit), code_dtype(bits), storage)
    mask = (1 << bits) - 1
    for slot in range(per_unit):
        codes[..., slot] = xp.cast((words >> (bits * slot)) & mask, code_dtype(bits))
    return codes.reshape(*storage.shape[:-1], storage.shape[-1] * per_unit)[..., :count]


def with_constant(storage: Array, bits: int, count: int, groups: Array, width: int, code: int) -> Array:
    """Return storage in which all codes of some groups of columns are one; what else it holds is not read.

    storage: Canonical storage ``[N, ...]`` of rows of ``count`` codes.
    bits: Width of a code.
    groups: Which, bool ``[N, ceil(count / width)]``.
    width: Columns of a group; the last may have fewer.
    code: What their codes become.
    """
    xp = _checked(storage, bits)
    rows = len(storage)
    if is_dense(bits) and width * bits % 8 == 0 and count % width == 0:  # a group is some whole bytes
        size = next(size for size in (8, 4, 2, 1) if width * bits // 8 % size == 0)
        parts = xp.view(xp.copy(storage).reshape(rows, count // width, -1), f"int{8 * size}")
        parts[xp.nonzero(groups)] = _repeated(code, bits, size)
        return xp.view(parts, "uint8").reshape(rows, -1)
    if is_dense(bits) and bits >= 8:
        codes = xp.copy(storage).reshape(rows, count, -1)
        octets = pack_codes(xp.array([code], "int64", storage), bits)
        for group in range(groups.shape[1]):
            codes[groups[:, group], group * width : (group + 1) * width] = octets
        return codes.reshape(rows, -1)
    per_unit = 8 // bits if is_dense(bits) else 32 // bits
    units = xp.copy(storage if is_dense(bits) else xp.view(storage, "int32"))
    row, group = xp.nonzero(groups)
    for column in range(width):
        for slot in range(per_unit):  # no two groups share a unit whose code at this column lies there
            place = group * width + column
            here = (place % per_unit == slot) & (place < count)
            at = row[here], place[here] // per_unit
            kept = (0xFF if is_dense(bits) else -1) ^ ((1 << bits) - 1) << slot * bits
            units[at] = units[at] & kept | code << slot * bits
    return units if is_dense(bits) else xp.view(units, "uint32")


def _repeated(code: int, bits: int, size: int) -> int:
    """Return the signed integer of so many bytes that holds one code again and again."""
    word = sum((code & (1 << bits) - 1) << first for first in range(0, 8 * size, bits))
    return int.from_bytes(word.to_bytes(size, "little"), "little", signed=True)


def _checked(array: Array, bits: int) -> Arrays:
    xp = arrays_of(array)
    if not 1 <= bits <= MAX_BITS:
        raise ShapeError(f"a code has 1 to {MAX_BITS} bits, got {bits}")
    if xp.is_float(array):
        raise DTypeError(f"codes and their storage are integers, got {array.dtype}")
    if array.ndim < 1:
        raise ShapeError("packing runs along the last axis; got a scalar")
    return xp
