"""SDNQ: int8, uint8 and fp8, and integers of 2 to 7 bits in bytes, by rows or in groups along rows.

``w = q * scale``, or ``q * scale + zero_point``, each step rounded to the type of the scales. Codes of 2 and
4 bits lie in bytes lowest first; of 3, 5, 6 and 7 bits the first codes of a unit have the low bits of its
bytes, and the last ones are made of what is left (`LEFT`). Layers of 8 bits whose products are quantized lie
transposed. Source: ``sdnq/dequantizer.py``, ``sdnq/packed_int/unpack.py``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ladder.formats.bits import words_to_codes
from ladder.formats.compressed import EIGHT_BIT, scale_name
from ladder.formats.layer import SCALES, Format, Layer, Shape, group_of
from tile_types import QuantizedTensor, get_type

if TYPE_CHECKING:
    import torch

METHOD = "sdnq"
CODES, SCALE, ZERO = ".weight", ".scale", ".zero_point"

WHOLE = {**EIGHT_BIT, "uint8": "uint8"}
"""Name of a type of 8 bits, and of its array -> ours."""

PACKED = {f"{sign}int{bits}": bits for sign in ("", "u") for bits in range(2, 8)}
"""Name of a type of fewer bits -> these."""

Piece = tuple[int, int, int, int]

LEFT: dict[int, tuple[tuple[Piece, ...], ...]] = {
    3: (*(((byte, 3, 3, 0),) for byte in range(3)), *(((at, 6, 2, 0), (2, 6 + at, 1, 2)) for at in (0, 1))),
    5: (*(((at, 5, 3, 0), (3 + at, 5, 2, 3)) for at in (0, 1)), ((2, 5, 3, 0), (3, 7, 1, 4), (4, 7, 1, 3))),
    6: (((0, 6, 2, 4), (1, 6, 2, 2), (2, 6, 2, 0)),),
    7: (tuple((byte, 7, 1, 6 - byte) for byte in range(7)),),
}  # fmt: skip
"""Bits -> of each further code its pieces: byte, first bit there, how many bits, first bit in the code."""


def named(layer: Layer) -> str:
    """Return the name of a layer's type: its own, or that of all."""
    own = layer.option("modules_dtype_dict", dict, {})
    found = [kind for kind, names in own.items() if isinstance(names, list) and layer.name in names]
    simple = not layer.option("modules_quant_config", dict, {}) and all(
        each in (*WHOLE, *PACKED) for each in own
    )
    layer.require(simple and len(found) < 2, "the configuration gives layers types that are not read")
    kind: Any = found[0] if found else layer.option("weights_dtype", str, "")
    layer.require(kind in WHOLE or kind in PACKED, f"codes of the type {kind[:80]!r} are not read")
    return str(kind)


def _is_turned(layer: Layer) -> bool:
    """Tell whether an array of 8 bits lies transposed, with its scales in a row."""
    scales, codes = layer[SCALE].shape, layer[CODES].shape
    turned = bool(layer.option("use_quantized_matmul", bool, False))
    return turned and len(scales) == 2 and scales == (1, *codes[1:])


def shape(layer: Layer) -> Shape:
    """Return the extents of a matrix: packed codes have no shape of their own, but scales for each row."""
    kind, rows = named(layer), layer.shape(SCALE)[0]
    if kind in WHOLE:
        layer.require_type(CODES, kind)
        found = layer.shape(CODES)
        layer.require(len(found) in (2, 3), f"{CODES} has the shape {list(found)}")
        return found[::-1] if _is_turned(layer) else (found[0], math.prod(found[1:]))
    layer.require_type(CODES, "uint8")
    octets, bits = math.prod(layer.shape(CODES)), PACKED[kind]
    unit = bits // math.gcd(bits, 8)
    fits = octets % unit == 0 and octets * 8 // bits % rows == 0
    layer.require(fits, f"{octets} bytes are no {rows} rows of {bits} bits")
    return rows, octets * 8 // bits // rows


def _unpacked(octets: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes, uint8, in order."""
    import torch

    if bits not in LEFT:
        return words_to_codes(octets.reshape(-1), bits, octets.numel() * 8 // bits)
    units = octets.reshape(-1, bits // math.gcd(bits, 8))
    last = []
    for pieces in LEFT[bits]:
        parts = [(units[:, byte] >> first & (1 << count) - 1) << to for byte, first, count, to in pieces]
        last.append(sum(parts[1:], start=parts[0]))
    return torch.cat([units & (1 << bits) - 1, torch.stack(last, 1)], 1).reshape(-1)


def read(layer: Layer) -> QuantizedTensor:
    """Read codes, scales and offsets."""
    import torch

    (n, k), kind = shape(layer), named(layer)
    layer.require_type(SCALE, *SCALES)
    scale = layer.tensor(SCALE)
    turned = kind in WHOLE and _is_turned(layer)
    by_row = scale.numel() % n == 0 and (turned or scale.shape[0] == n)
    layer.require(by_row, f"scales have the shape {list(scale.shape)} for {n} rows")
    groups = scale.numel() // n
    group = group_of(layer, k, groups)
    if ZERO in layer:
        layer.require_type(ZERO, layer[SCALE].dtype)
        layer.require(layer[ZERO].shape == layer[SCALE].shape, "zero points have another shape than scales")
    layer.require((ZERO in layer) == kind.startswith("uint"), f"zero points of {kind}")
    stored = layer.tensor(CODES)
    given: dict[str, Any] = {"scale": scale.reshape(n, groups), "scale_type": scale_name(scale)}
    if ZERO in layer:
        given["offset"] = layer.tensor(ZERO).reshape(n, groups)
    if kind in WHOLE:
        codes = stored.view(torch.uint8)
        codes = codes.T.contiguous() if turned else codes.reshape(n, k)
        return QuantizedTensor(get_type(WHOLE[kind]), (n, k), codes, (1, group), **given)
    bits = PACKED[kind]
    codes = _unpacked(stored, bits).reshape(n, k)
    if not kind.startswith("uint"):
        codes = codes.to(torch.int8) - (1 << bits - 1)
    return QuantizedTensor.from_codes(codes, kind, (1, group), **given)


FORMAT = Format(
    "sdnq",
    SCALE,
    lambda layer: layer.config.get("quant_method") == METHOD,
    shape,
    read,
    methods=(METHOD,),
    parts=(CODES,),
    optional=(ZERO,),
    dtype="scale",
    rounding="each",
    doc="SDNQ's int8, uint8 and fp8 by rows, its integers of 2 to 7 bits in groups",
)
