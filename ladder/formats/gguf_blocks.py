"""The block types of GGUF: each a row that says how a block's fields become codes, scales and offsets.

Sources: ``ggml-common.h`` and ``ggml-quants.c`` of llama.cpp, ``gguf/quants.py``. All arithmetic of scales is
exact in float32, so dequantization in float32 rounds at most once per element, as ggml's does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ladder.formats.gguf_grids import grid
from tile_types.errors import CheckpointError

Octets = npt.NDArray[Any]
"""uint8: numpy's types lose the width of what operators return."""
Fields = npt.NDArray[np.void]
Decoded = tuple[Octets, npt.NDArray[Any], npt.NDArray[Any] | None]
"""Codes [B, elements], scales [B, groups], offsets [B, groups] or None."""


@dataclass(frozen=True)
class BlockType:
    """How one type of blocks is laid out.

    name: In lower case.
    elements: Of a block.
    fields: numpy's description of its bytes.
    element: Our type of a code.
    decode: Fields -> codes, scales, offsets.
    scale: Type of the scales and offsets.
    packed: Whether ``decode`` gives codes of 4 bits as canonical storage, two in a byte.
    """

    name: str
    elements: int
    fields: npt.DTypeLike
    element: str
    decode: Callable[[Fields], Decoded]
    scale: str = "float32"
    packed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return np.dtype(self.fields).itemsize


def words(octets: Octets) -> npt.NDArray[np.uint64]:
    """Return bytes eight at a time: shifts and masks of them are then eight at a time, too."""
    return octets.view("<u8")


def eight(octet: int) -> np.uint64:
    """Return a word of eight equal bytes."""
    return np.uint64(int.from_bytes(bytes([octet] * 8), "little"))


def split(octets: Octets, bits: int, width: int) -> Octets:
    """Take codes out of bytes: of each ``width`` bytes first all lowest codes, then the next."""
    chunks = np.ascontiguousarray(octets).reshape(-1, width)
    codes = np.empty((len(chunks), 8 // bits, width), np.uint8)
    if width % 8:
        for slot in range(8 // bits):  # whole arrays at a time: short inner axes are slow
            codes[:, slot] = chunks >> bits * slot & (1 << bits) - 1
        return codes.reshape(len(octets), -1)
    source, target, mask = words(chunks), words(codes), eight((1 << bits) - 1)
    for slot in range(8 // bits):
        part = source >> np.uint64(bits * slot)
        part &= mask
        target[:, slot] = part
    return codes.reshape(len(octets), -1)


def joined(low: Octets, high: Octets, shift: int, flip: int = 0) -> Octets:
    """Return ``(low | high << shift) ^ flip``, which must fit bytes; ``low`` and ``high`` are not kept."""
    found, upper = words(low), words(high)
    upper <<= np.uint64(shift)
    found |= upper
    found ^= eight(flip)
    return low


def nibbles(octets: Octets, width: int) -> Octets:
    """Return two consecutive codes a byte, of bytes whose low halves precede, ``width`` at a time."""
    source = words(np.ascontiguousarray(octets).reshape(-1))
    item = {4: "<u4", 8: "<u8", 16: "<c16"}[width // 2]  # moved as one: short inner axes are slow
    codes = np.empty((source.nbytes // width, 2), item)
    for half in range(2):
        found = source >> np.uint64(4 * half)
        found &= eight(0x0F)
        found |= found >> np.uint64(4)
        codes[:, half] = found.view("<u2").astype(np.uint8).view(item)  # the low byte
    return codes.view(np.uint8).reshape(len(octets), -1)


def in_order(octets: Octets, bits: int) -> Octets:
    """Take codes out of bytes one byte after the other, lowest first."""
    return split(octets, bits, 1)


def wide(array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return numbers of a field as float32, at least two axes."""
    return np.asarray(array, np.float32).reshape(len(array), -1)


def octets_of(array: npt.NDArray[Any]) -> Octets:
    """Return the bytes of a field."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)


def six_bit(packed: Octets) -> tuple[Octets, Octets]:
    """Return the 8 scales and 8 minima of 6 bits that Q4_K and Q5_K pack into 12 bytes."""
    four = np.ascontiguousarray(packed).view("<u4")  # four values a word
    low, middle, high = four[:, 0], four[:, 1], four[:, 2]
    six, upper, nibble = (np.uint32(0x01010101 * mask) for mask in (63, 48, 15))
    found = np.empty((2, len(four), 2), np.uint32)
    for first, shift, target in ((low, 0, found[0]), (middle, 4, found[1])):
        target[:, 0] = first & six
        target[:, 1] = high >> np.uint32(shift) & nibble | first >> np.uint32(2) & upper
    scales, minima = found.view(np.uint8)
    return scales, minima


def _plain(codes: Octets, b: Fields) -> Decoded:
    return codes, b["d"][:, None], None


def _q4_0(b: Fields) -> Decoded:
    return _plain(nibbles(b["qs"], 16) ^ 0x88, b)


def _q4_1(b: Fields) -> Decoded:
    return nibbles(b["qs"], 16), b["d"][:, None], b["m"][:, None]


def _q5_0(b: Fields) -> Decoded:
    return _plain(joined(split(b["qs"], 4, 16), in_order(b["qh"], 1), 4, 16), b)


def _q5_1(b: Fields) -> Decoded:
    return joined(split(b["qs"], 4, 16), in_order(b["qh"], 1), 4), b["d"][:, None], b["m"][:, None]


def _q8(b: Fields) -> Decoded:
    return _plain(octets_of(b["qs"]), b)


def _q1_0(b: Fields) -> Decoded:
    return _plain(in_order(b["qs"], 1), b)


def _q2_k(b: Fields) -> Decoded:
    scale, least = wide(b["d"]) * (b["scales"] & 15), wide(b["dmin"]) * (b["scales"] >> 4)
    return split(b["qs"], 2, 32), scale, -least


def _q3_k(b: Fields) -> Decoded:
    low, high = split(b["scales"][:, :8], 4, 8), split(b["scales"][:, 8:], 2, 4)
    scale = wide(b["d"]) * ((low | high << 4).astype(np.float32) - 32)
    return joined(split(b["qs"], 2, 32), split(b["hmask"], 1, 32), 2, 4), scale, None


def _q4_k(b: Fields) -> Decoded:
    scales, minima = six_bit(b["scales"])
    return nibbles(b["qs"], 32), wide(b["d"]) * scales, -(wide(b["dmin"]) * minima)


def _q5_k(b: Fields) -> Decoded:
    scales, minima = six_bit(b["scales"])
    codes = joined(split(b["qs"], 4, 32), split(b["qh"], 1, 32), 4)
    return codes, wide(b["d"]) * scales, -(wide(b["dmin"]) * minima)


def _q6_k(b: Fields) -> Decoded:
    codes = joined(split(b["ql"], 4, 64), split(b["qh"], 2, 32), 4, 32)
    return codes, wide(b["d"]) * b["scales"], None


def _tq1_0(b: Fields) -> Decoded:
    """Take ternary digits from the high end of bytes: multiply by a power of 3, keep 8 bits, take thirds."""
    parts = [b["qs"][:, :32], b["qs"][:, 32:], b["qh"]]
    powers = [np.array([1, 3, 9, 27, 81][:count], np.uint8)[:, None] for count in (5, 5, 4)]
    digits = [(part[:, None] * power).reshape(len(b), -1) for part, power in zip(parts, powers, strict=True)]
    third = np.concatenate(digits, 1).astype(np.uint16) * 3 >> 8
    return _plain(third.astype(np.uint8), b)


def _tq2_0(b: Fields) -> Decoded:
    return _plain(split(b["qs"], 2, 32), b)


PLUS_ZERO = np.array(
    [
        (0 if octet & 15 == 8 else octet & 15) | (0 if octet >> 4 == 8 else octet & 0xF0)
        for octet in range(256)
    ],
    np.uint8,
)
"""Bytes of two e2m1 codes without -0."""


def _e2m1(octets: Octets, width: int) -> Octets:
    """Return e2m1 codes; ggml's table has +0 where the code says -0."""
    return PLUS_ZERO[nibbles(octets, width)]


def _mxfp4(b: Fields) -> Decoded:
    if (b["e"] == 255).any():
        raise CheckpointError("a block has the exponent 255, which ggml and OCP read differently")
    return _e2m1(b["qs"], 16), b["e"][:, None], None


def _nvfp4(b: Fields) -> Decoded:
    if (b["d"] > 127).any():
        raise CheckpointError("a scale has a sign, which unsigned e4m3 has not")
    return _e2m1(b["qs"], 8), np.where(b["d"] == 127, np.uint8(0), b["d"]), None


def _iq4_nl(b: Fields) -> Decoded:
    return _plain(nibbles(b["qs"], 16), b)


def _iq4_xs(b: Fields) -> Decoded:
    scales = in_order(b["scales_l"], 4) | in_order(octets_of(b["scales_h"]), 2) << 4
    return nibbles(b["qs"], 16), wide(b["d"]) * (scales.astype(np.float32) - 32), None


PARITY = np.array([index | (index.bit_count() & 1) << 7 for index in range(128)], np.uint8)
"""7 stored signs -> 8: the product of all is positive."""


def _signed(levels: Octets, signs: Octets, bit: int) -> Octets:
    """Return codes of grid levels [B, ..., v] with a sign each, from bytes of 8 signs."""
    count = len(levels)
    codes: Octets = levels.reshape(count, -1) | in_order(signs.reshape(count, -1), 1) << bit
    return codes


def _seven_bits(words: npt.NDArray[np.uint32]) -> Octets:
    """Return the signs of 4 groups of 7 bits each of words [B, G]."""
    indices = words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    signs: Octets = PARITY[indices]
    return signs


def _iq2_xxs(b: Fields) -> Decoded:
    pairs = b["qs"].reshape(len(b), -1, 2)
    scale = wide(b["d"]) * ((pairs[..., 1] >> 28).astype(np.float32) + np.float32(0.5)) * np.float32(0.25)
    levels = grid("iq2_xxs")[octets_of(pairs[..., 0])]
    return _signed(levels, _seven_bits(pairs[..., 1]), 2), scale, None


def _quarters(b: Fields) -> npt.NDArray[Any]:
    """Return the scales of groups of 16: 4 bits and a half, quartered."""
    return wide(b["d"]) * (in_order(b["scales"], 4) + np.float32(0.5)) * np.float32(0.25)


def _iq2_xs(b: Fields) -> Decoded:
    return _signed(grid("iq2_xs")[b["qs"] & 511], PARITY[b["qs"] >> 9], 2), _quarters(b), None


def _iq2_s(b: Fields) -> Decoded:
    indices = b["qs"] | in_order(b["qh"], 2).astype(np.uint16) << 8
    return _signed(grid("iq2_s")[indices], b["signs"], 2), _quarters(b), None


def _iq3_xxs(b: Fields) -> Decoded:
    scale = wide(b["d"]) * ((b["gas"] >> 28).astype(np.float32) + np.float32(0.5)) * np.float32(0.5)
    return _signed(grid("iq3_xxs")[b["qs"]], _seven_bits(b["gas"]), 3), scale, None


def _iq3_s(b: Fields) -> Decoded:
    indices = b["qs"] | in_order(b["qh"], 1).astype(np.uint16) << 8
    scale = wide(b["d"]) * (1 + 2 * in_order(b["scales"], 4))
    return _signed(grid("iq3_s")[indices], b["signs"], 3), scale, None


def _shifted(indices: npt.NDArray[np.uint16], down: npt.NDArray[np.bool_]) -> Octets:
    """Return codes of IQ1 grids; ``down`` tells which vectors are shifted down."""
    levels = grid("iq1_s")[indices]
    return (levels + np.where(down, np.uint8(0), np.uint8(3))[..., None]).reshape(len(indices), -1)


def _iq1_s(b: Fields) -> Decoded:
    high = (b["qh"][..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(b), -1)
    scale = wide(b["d"]) * (2 * (b["qh"] >> 12 & 7) + 1)
    down = np.repeat(b["qh"] >= 0x8000, 4, axis=1)
    return _shifted(b["qs"] | high << 8, down), scale.astype(np.float32), None


def _iq1_m(b: Fields) -> Decoded:
    words = b["scales"]
    d = ((words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)).sum(1, dtype=np.uint16).view(np.float16)
    scales = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(b), -1)
    high = in_order(b["qh"], 4)
    indices = b["qs"] | (high & 7).astype(np.uint16) << 8
    return _shifted(indices, (high & 8) != 0), (wide(d) * (2 * scales + 1)).astype(np.float32), None


HALF = ("d", "<f2")


def _k(*fields: Any) -> npt.DTypeLike:
    return np.dtype(list(fields))


def _octets(name: str, count: int) -> tuple[str, str, int]:
    return name, "u1", count


BLOCKS = {
    2: BlockType("q4_0", 32, _k(HALF, _octets("qs", 16)), "int4", _q4_0, "float16", packed=True),
    3: BlockType(
        "q4_1", 32, _k(HALF, ("m", "<f2"), _octets("qs", 16)), "uint4", _q4_1, "float16", packed=True
    ),
    6: BlockType("q5_0", 32, _k(HALF, _octets("qh", 4), _octets("qs", 16)), "int5", _q5_0, "float16"),
    7: BlockType(
        "q5_1", 32, _k(HALF, ("m", "<f2"), _octets("qh", 4), _octets("qs", 16)), "uint5", _q5_1, "float16"
    ),
    8: BlockType("q8_0", 32, _k(HALF, ("qs", "i1", 32)), "int8", _q8, "float16"),
    9: BlockType("q8_1", 32, _k(HALF, ("s", "<f2"), ("qs", "i1", 32)), "int8", _q8, "float16"),
    10: BlockType(
        "q2_k", 256, _k(_octets("scales", 16), _octets("qs", 64), HALF, ("dmin", "<f2")), "uint2", _q2_k
    ),
    11: BlockType(
        "q3_k", 256, _k(_octets("hmask", 32), _octets("qs", 64), _octets("scales", 12), HALF), "int3", _q3_k
    ),
    12: BlockType(
        "q4_k",
        256,
        _k(HALF, ("dmin", "<f2"), _octets("scales", 12), _octets("qs", 128)),
        "uint4",
        _q4_k,
        packed=True,
    ),
    13: BlockType(
        "q5_k",
        256,
        _k(HALF, ("dmin", "<f2"), _octets("scales", 12), _octets("qh", 32), _octets("qs", 128)),
        "uint5",
        _q5_k,
    ),
    14: BlockType(
        "q6_k", 256, _k(_octets("ql", 128), _octets("qh", 64), ("scales", "i1", 16), HALF), "int6", _q6_k
    ),
    15: BlockType("q8_k", 256, _k(("d", "<f4"), ("qs", "i1", 256), ("bsums", "<i2", 16)), "int8", _q8),
    16: BlockType("iq2_xxs", 256, _k(HALF, ("qs", "<u4", 16)), "iq2", _iq2_xxs),
    17: BlockType("iq2_xs", 256, _k(HALF, ("qs", "<u2", 32), _octets("scales", 8)), "iq2", _iq2_xs),
    18: BlockType("iq3_xxs", 256, _k(HALF, _octets("qs", 64), ("gas", "<u4", 8)), "iq3", _iq3_xxs),
    19: BlockType("iq1_s", 256, _k(HALF, _octets("qs", 32), ("qh", "<u2", 8)), "iq1", _iq1_s),
    20: BlockType("iq4_nl", 32, _k(HALF, _octets("qs", 16)), "iq4", _iq4_nl, "float16", packed=True),
    21: BlockType(
        "iq3_s",
        256,
        _k(HALF, _octets("qs", 64), _octets("qh", 8), _octets("signs", 32), _octets("scales", 4)),
        "iq3_s",
        _iq3_s,
    ),
    22: BlockType(
        "iq2_s",
        256,
        _k(HALF, _octets("qs", 32), _octets("signs", 32), _octets("qh", 8), _octets("scales", 8)),
        "iq2",
        _iq2_s,
    ),
    23: BlockType(
        "iq4_xs",
        256,
        _k(HALF, ("scales_h", "<u2"), _octets("scales_l", 4), _octets("qs", 128)),
        "iq4",
        _iq4_xs,
        packed=True,
    ),
    29: BlockType(
        "iq1_m", 256, _k(_octets("qs", 32), _octets("qh", 16), ("scales", "<u2", 4)), "iq1", _iq1_m
    ),
    34: BlockType("tq1_0", 256, _k(_octets("qs", 48), _octets("qh", 4), HALF), "ternary", _tq1_0, "float16"),
    35: BlockType("tq2_0", 256, _k(_octets("qs", 64), HALF), "ternary", _tq2_0, "float16"),
    39: BlockType("mxfp4", 32, _k(("e", "u1"), _octets("qs", 16)), "fp4_e2m1", _mxfp4, "e8m0", packed=True),
    40: BlockType(
        "nvfp4", 64, _k(_octets("d", 4), _octets("qs", 32)), "fp4_e2m1", _nvfp4, "fp8_e4m3", packed=True
    ),
    41: BlockType("q1_0", 128, _k(HALF, _octets("qs", 16)), "binary", _q1_0, "float16"),
}
"""ggml's number of a type -> its row."""
