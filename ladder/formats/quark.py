"""AMD Quark's integers of 4 bits, also as what fp8 is made of, its integers in groups, MXFP6 and AMDFP4.

Groups are stored with columns before rows: ``weight`` [K, N], ``weight_scale`` [G, N]; eight 4-bit codes lie
in an int32 along the last axis, in AWQ's order unless ``pack_method`` says otherwise. The configuration alone
tells signed codes from unsigned ones. ``w = (q - z) * scale``. AMDFP4 is e2m1 with a scale in e5m3 per 16 or
32 columns. Sources: Quark ``utils/pack.py`` (``Pack_4_bits``, ``Pack_8_bits``, ``Pack_fp6``),
``export/nn/modules/realquantizer.py``, ``kernel/float8_e5m3``.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ladder.formats.awq import ORDER
from ladder.formats.bits import by_rows, octets_of, repacked, sign_bits, words_to_codes
from ladder.formats.compressed import is_mx, mx_scales, mx_shape, mx_type, nvfp4_shape
from ladder.formats.gptq import PackedForm, symmetric_or_not
from ladder.formats.layer import SCALES, Format, Layer, Shape, of_block_type
from ladder.formats.repack import changed, transposed_nibbles
from tile_types import QuantizedTensor, get_type
from tile_types.errors import CheckpointError
from tile_types.packing import pack_codes

if TYPE_CHECKING:
    import torch

METHOD = "quark"
WIDTHS = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}
"""Types of integers that are read -> their bits."""

STORED = {"int4": "int32", "uint4": "int32", "int8": "int8", "uint8": "uint8"}
"""Types of integers -> of the array that they lie in."""

GLOBAL = "global_quant_config"
GROUPS, CHANNELS = "per_group", "per_channel"
FP6 = ("fp6_e2m3", "fp6_e3m2")
"""Elements of 6 bits."""

FP4 = "fp4"
"""The element e2m1."""

E5M3 = "e5m3"
"""Scales of 5 bits of exponent and 3 of mantissa, without a sign."""

SMALL, BIAS, NAN = 8, 18, 255
"""Of e5m3: codes below are multiples of ``2**(1 - BIAS)``, the others ``(8 + m) * 2**(e - BIAS)``; NaN's."""


FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
"""What the configuration says of the numbers that integers stand for where these are codes of fp8."""


def said(layer: Layer) -> Any:
    """Return what the configuration says of a layer's weight; None if nothing, or several things."""
    module = layer.name.removesuffix(".weight")
    by_name, by_type = (layer.config.get(f"layer_{kind}quant_config") or {} for kind in ("", "type_"))
    named = [found for pattern, found in by_name.items() if fnmatchcase(module, pattern)]
    typed = [by_type["Linear"]] if "Linear" in by_type else []
    candidates = named or typed or [layer.config.get(GLOBAL)]
    weights = [found.get("weight") for found in candidates if isinstance(found, dict)]
    one = len(weights) == len(candidates) and all(found == weights[0] for found in weights)
    return weights[0] if one else None


def scheme(layer: Layer) -> dict[str, Any]:
    """Return what the configuration says of the codes of a layer's weight; their scales may be codes, too.

    Raises CheckpointError if it says nothing, or several things.
    """
    chosen = said(layer)
    codes, *scales = chosen if isinstance(chosen, list) and chosen else [chosen]
    of_scales = all(isinstance(stage, dict) and stage.get("is_scale_quant") for stage in scales)
    if not isinstance(codes, dict) or not of_scales:
        raise CheckpointError(f"{layer.name}: the configuration has no one scheme for its weight")
    return codes


def integers(layer: Layer) -> str | None:
    """Return the type of a layer's integers, if they are stored as here."""
    weight, scale = layer[".weight"], layer[".weight_scale"].shape
    if layer.config.get("quant_method") != METHOD or weight.dtype not in STORED.values() or is_mx(layer):
        return None
    by_rows_of_it = len(scale) < 2 or scale[1] == 1
    told = GLOBAL in layer.config or not by_rows_of_it
    if below_fp8(layer) is not None:
        return None  # another format
    if weight.dtype == "int8" and not (told and scheme(layer).get("qscheme") == GROUPS):
        return None  # stored as others store them
    kind = str(scheme(layer).get("dtype"))
    if kind == FP4:
        return None  # other formats
    layer.require(STORED.get(kind) == weight.dtype, f"{weight.dtype} does not hold what is called {kind!r}")
    return kind


def extents(layer: Layer) -> tuple[int, int, int]:
    """Return (N, K, columns of a group)."""
    options, scales = scheme(layer), layer[".weight_scale"].shape
    per_word = 8 if layer[".weight"].dtype == "int32" else 1
    first, last = layer.shape(".weight", 2)
    layer.require(0 not in scales, f"weight_scale has the shape {list(scales)}")
    if options.get("qscheme") == GROUPS:
        stated = options.get("group_size")
        size: int = stated if type(stated) is int else 0
        k, n = first, scales[-1] if scales else 0
        fits = len(scales) == 2 and -(-n // per_word) == last and size >= 1
        layer.require(fits and scales[0] * size == k, f"scales {list(scales)} beside {[first, last]} words")
        return n, k, size
    rows_apart = options.get("qscheme") == CHANNELS and options.get("ch_axis") in (0, None)
    layer.require(rows_apart, f"scales {options.get('qscheme')} of such codes are not read")
    layer.require(scales in ((first,), (first, 1)), f"scales {list(scales)} of {first} rows")
    return first, per_word * last, per_word * last


def shape(layer: Layer) -> Shape:
    """Return [N, K]."""
    return extents(layer)[:2]


def order(layer: Layer) -> tuple[int, ...]:
    """Return which code of eight each nibble of a word is."""
    export = layer.config.get("export")
    method = export.get("pack_method", "reorder") if isinstance(export, dict) else "reorder"
    layer.require(method in ("reorder", "order"), f"the configuration's pack_method is {method!r}")
    return ORDER if method == "reorder" else tuple(range(8))


def numbers(layer: Layer, suffix: str, count: int) -> torch.Tensor:
    """Return codes along the last axis of an array, uint8 ``[..., count]``."""
    import torch

    array = layer.tensor(suffix)
    if array.dtype != torch.int32:
        return array.view(torch.uint8)
    return in_order(words_to_codes(array, 4, 8 * array.shape[-1]), order(layer))[..., :count]


def in_order(codes: torch.Tensor, places: tuple[int, ...]) -> torch.Tensor:
    """Return codes of which each eight along the last axis lay in another order."""
    eights = codes.reshape(*codes.shape[:-1], -1, 8)
    result: torch.Tensor = eights[..., [places.index(code) for code in range(8)]].reshape(codes.shape)
    return result


def read(layer: Layer) -> QuantizedTensor:
    """Read integers in groups or by rows."""
    import torch

    kind = integers(layer)
    assert kind is not None
    bits, is_signed = WIDTHS[kind], not kind.startswith("u")
    n, k, group = extents(layer)
    layer.require_type(".weight_scale", *SCALES)
    grouped, scale = scheme(layer).get("qscheme") == GROUPS, layer.tensor(".weight_scale")
    scale = scale.t().contiguous() if grouped else scale.reshape(n, 1)
    highest = 1 << (bits - 1)  # what signed numbers and unsigned codes differ by
    zero = torch.full(scale.shape, highest if is_signed else 0, dtype=torch.uint8)
    if ".weight_zero_point" in layer:
        layer.require_type(".weight_zero_point", STORED[kind])
        found = numbers(layer, ".weight_zero_point", n) ^ (highest if is_signed else 0)
        zero = (found.t() if grouped else found.reshape(-1, 1)).contiguous()
        layer.require(zero.shape == scale.shape, "zero points do not fit scales")

    def store(*, signed: bool) -> torch.Tensor:
        return stored(layer, n, k, bits, grouped, highest if signed != is_signed else 0)

    form = PackedForm(n, k, bits, scale.shape[1], planar=False)
    fields = {"scale": scale, "columns": None, "block": (1, group)}
    return symmetric_or_not(form, store, zero, None, fields)


def stored(layer: Layer, n: int, k: int, bits: int, grouped: bool, flip: int) -> torch.Tensor:
    """Return the codes in canonical storage, some bits of each inverted."""
    if bits == 8:
        codes = numbers(layer, ".weight", k)
        return changed((codes.t() if grouped else codes).contiguous(), flip)
    words = layer.tensor(".weight")
    if grouped:
        layer.require(k % 8 == 0, f"{k} inputs are no multiple of 8")
        return octets_of(transposed_nibbles(words, order(layer), sign_bits(4, 32) if flip else 0)[:n])
    places = order(layer)
    return repacked(octets_of(words), bits, k, lambda codes: in_order(codes, places) ^ flip)


def is_mxfp6(layer: Layer) -> bool:
    """Tell 6-bit codes beside an exponent per 32."""
    found = mx_type(layer, ".weight")
    fits = layer.config.get("quant_method") == METHOD and found is not None and found[0] == 6
    return fits and scheme(layer).get("scale_format") != E5M3


def is_amdfp4(layer: Layer) -> bool:
    """Tell two e2m1 codes a byte beside scales in e5m3, of which the configuration alone tells."""
    stored = [(layer[part].dtype, len(layer[part].shape)) for part in (".weight", ".weight_scale")]
    told = layer.config.get("quant_method") == METHOD and GLOBAL in layer.config
    if not told or stored != [("uint8", 2)] * 2:
        return False
    return (scheme(layer).get("dtype"), scheme(layer).get("scale_format")) == (FP4, E5M3)


def read_amdfp4(layer: Layer) -> QuantizedTensor:
    """Read e2m1 codes, as MXFP4's lie, with scales in e5m3."""
    import torch

    n, k = nvfp4_shape(layer, ".weight")
    rows, groups = layer.shape(".weight_scale", 2)
    fits = rows == n and k % groups == 0 and scheme(layer).get("group_size") == k // groups
    layer.require(fits, f"scales {[rows, groups]} for [{n}, {k}]")
    code = layer.tensor(".weight_scale").int()
    exponent, mantissa = code >> 3, code & 7
    scale = torch.ldexp((mantissa + SMALL * (exponent > 0)).float(), exponent.clamp(min=1) - BIAS)
    scale[code == NAN] = float("nan")
    codes = layer.tensor(".weight")
    fields = {"scale": scale, "scale_type": "float32"}
    return QuantizedTensor(get_type("fp4_e2m1"), (n, k), codes, (1, k // groups), **fields)  # type: ignore[arg-type]


def read_mxfp6(layer: Layer) -> QuantizedTensor:
    """Read 6-bit codes, a stream from the lowest bit of the first byte on."""
    n, k = mx_shape(layer, ".weight")
    element = str(scheme(layer).get("dtype"))
    layer.require(element in FP6, f"6-bit codes are called {element!r}")
    scale, _ = mx_scales(layer, n, k)
    codes = layer.tensor(".weight")
    packed = by_rows(lambda part: pack_codes(words_to_codes(part, 6, k), 6), codes, k)
    return of_block_type(f"mx{element}", (n, k), packed, scale)


def below_fp8(layer: Layer) -> Layer | None:
    """Return the integers that stand for a layer's fp8 codes, as a layer; None if it has none."""
    stages = said(layer) if layer.config.get("quant_method") == METHOD else None
    if not (isinstance(stages, list) and len(stages) == 2 and all(isinstance(each, dict) for each in stages)):
        return None
    outer, inner = stages
    if any(outer.get(key) != value for key, value in FP8.items()) or inner.get("is_scale_quant"):
        return None
    names = {suffix.removesuffix("_2"): suffix for suffix in layer.parts if suffix.endswith("_2")}
    parts = {name: layer[suffix] for name, suffix in {**names, ".weight": ".weight"}.items()}
    stated = {key: value for key, value in layer.config.items() if not key.startswith("layer_")}
    return Layer(layer.name, parts, {**stated, GLOBAL: {"weight": inner}})


def is_below_fp8(layer: Layer) -> bool:
    """Tell integers that stand for fp8 codes."""
    inner = below_fp8(layer)
    return inner is not None and integers(inner) is not None


def below_shape(layer: Layer) -> Shape:
    """Return [N, K]."""
    inner = below_fp8(layer)
    assert inner is not None
    return shape(inner)


def read_below_fp8(layer: Layer) -> QuantizedTensor:
    """Read integers whose values, codes of fp8, are multiplied by one number."""
    inner = below_fp8(layer)
    assert inner is not None
    return replace(read(inner), tensor_scale=layer.number(".weight_scale"), scale_type="float32")


INTEGERS = Format(
    "quark",
    ".weight_scale",
    lambda layer: integers(layer) is not None,
    shape,
    read,
    methods=(METHOD,),
    parts=(".weight",),
    optional=(".weight_zero_point",),
    doc="Quark's integers of 4 bits, and of 8 bits in groups",
)
MXFP6 = Format(
    "quark-mxfp6",
    ".weight_scale",
    is_mxfp6,
    lambda layer: mx_shape(layer, ".weight"),
    read_mxfp6,
    methods=(METHOD,),
    parts=(".weight",),
    doc="Quark's MXFP6",
)
AMDFP4 = Format(
    "quark-amdfp4",
    ".weight_scale",
    is_amdfp4,
    lambda layer: nvfp4_shape(layer, ".weight"),
    read_amdfp4,
    methods=(METHOD,),
    parts=(".weight",),
    doc="Quark's AMDFP4: e2m1 with scales in e5m3",
)
BELOW_FP8 = Format(
    "quark-int4-fp8",
    ".weight_scale_2",
    is_below_fp8,
    below_shape,
    read_below_fp8,
    methods=(METHOD,),
    parts=(".weight", ".weight_scale"),
    optional=(".weight_zero_point_2",),
    rounding="each",
    doc="Quark's integers that stand for fp8 codes",
)
FORMATS = (AMDFP4, BELOW_FP8, INTEGERS, MXFP6)
