"""The table of types by name, and the names that are parsed rather than listed.

Values are pinned to ml_dtypes and to the standards by tests. Sources: OCP OFP8 rev. 1.0;
OCP MX v1.0 (E8M0: §5.4.1); NF4: Dettmers et al., QLoRA, arXiv 2305.14314, appendix E (entries
as published in bitsandbytes); ternary: Ma et al., BitNet b1.58, arXiv 2402.17764; NVFP4:
NVIDIA Blackwell, 16 elements with an E4M3 scale and a float32 scale per tensor.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np

from tile_types.arrays import NUMPY_DTYPES, arrays_of
from tile_types.codebooks import CODEBOOKS, codebook_type
from tile_types.errors import (
    ConversionError,
    LadderError,
    ValueRangeError,
    positive_number,
    require_kind,
    require_name,
    unknown_name,
)
from tile_types.floats import QUIET_NAN, FloatFormat
from tile_types.ttype import EXHAUSTIBLE_BITS, NOT_CONSECUTIVE, Metadata, TType, values_text

NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of the normal distribution, rounded to float32 (QLoRA, appendix E)."""

FLOAT_FORMATS = {
    "float32": FloatFormat(8, 23, "ieee"),
    "tfloat32": FloatFormat(8, 10, "ieee"),
    "float16": FloatFormat(5, 10, "ieee"),
    "bfloat16": FloatFormat(8, 7, "ieee"),
    "fp8_e4m3": FloatFormat(4, 3, "fn"),
    "fp8_e5m2": FloatFormat(5, 2, "ieee"),
    "fp8_e4m3fnuz": FloatFormat(4, 3, "fnuz"),
    "fp8_e5m2fnuz": FloatFormat(5, 2, "fnuz"),
    "fp8_e3m4": FloatFormat(3, 4, "ieee"),
    "fp6_e2m3": FloatFormat(2, 3),
    "fp6_e3m2": FloatFormat(3, 2),
    "fp4_e2m1": FloatFormat(2, 1),
}
"""Floating-point types whose special values a standard fixes."""

BLOCK_TYPES = {
    "mxfp8_e4m3": ("fp8_e4m3", 32, "e8m0", False),
    "mxfp8_e5m2": ("fp8_e5m2", 32, "e8m0", False),
    "mxfp6_e2m3": ("fp6_e2m3", 32, "e8m0", False),
    "mxfp6_e3m2": ("fp6_e3m2", 32, "e8m0", False),
    "mxfp4": ("fp4_e2m1", 32, "e8m0", False),
    "nvfp4": ("fp4_e2m1", 16, "fp8_e4m3", True),
}
"""Name -> element, block size, scale type, whether a float32 scale per tensor multiplies all."""

_DOUBLE = float(np.finfo(np.float64).max)

PLAIN_TYPES: dict[str, tuple[int, tuple[float, float], str]] = {
    **{f"int{bits}": (bits, (-(1 << bits - 1), (1 << bits - 1) - 1), f"two's complement; {use}")
        for bits, use in ((16, "sound"), (32, "accumulator"), (64, "indices"))},
    **{f"uint{bits}": (bits, (0, (1 << bits) - 1), f"unsigned integer; {use}")
        for bits, use in ((16, "images"), *((bits, "only library calls take it") for bits in (32, 64)))},
    "bool": (8, (0, 1), "one byte, 0 or 1"),
    "float64": (64, (-_DOUBLE, _DOUBLE), "e11m52"),
    **{f"complex{bits}": (bits, (-most, most), "only library calls take it")
        for bits, most in ((32, 65504.0), (64, float(np.finfo(np.float32).max)), (128, _DOUBLE))},
}  # fmt: skip
"""Name -> bits, least and largest value (of complex numbers: of their parts), and doc of types that programs
compute with and that no weight is stored in."""

SCALE_TYPES = tuple(name for name in NUMPY_DTYPES if name != "float64")
"""Types that scales can be stored in."""

_TYPES: dict[str, TType] = {}
_FLOAT_NAME = re.compile(r"fp(\d)_e(\d)m(\d)")
_GROUP_NAME = re.compile(
    r"(?P<element>[a-z0-9_]+?)_g(?P<size>\d+)(?:_s(?P<scale>[a-z0-9_]+?))?(?:_z(?P<zero>[if]))?"
)
_MULTIPLE_NAME = re.compile(r"(?P<element>[a-z0-9_]+)_times_2(?P<sign>[pm])(?P<power>\d+)")
_ZERO_SUFFIX = {"none": "", "integer": "_zi", "float": "_zf"}
_ZERO_OF_LETTER = {None: "none", "i": "integer", "f": "float"}


def register_type(ttype: TType) -> TType:
    """Add a type to the library and return it, or the one that was added before with the same values.

    Raises
    ------
    ValueRangeError
        If the name is taken by another type, the decode fails or gives no finite value, or an encoder
        does not give the codes of the type's values.
    UnknownNameError
        If a block type names an unknown element or metadata type, or one that scales are not stored in.
    """
    require_kind(ttype, TType, "register_type takes a TType")
    taken = _TYPES.get(ttype.name, ttype)
    if _is_group_name(ttype.name) and _same(parsed := _parsed_type(ttype.name), ttype):
        return parsed
    reserved = ttype.name in PLAIN_TYPES or _is_group_name(ttype.name)
    if reserved or (taken is not ttype and (ttype.name in _SHIPPED or not _same(taken, ttype))):
        raise ValueRangeError(f"type {ttype.name!r} exists already; choose another name")
    if ttype.element_type.elem_bits <= EXHAUSTIBLE_BITS:
        ttype.element_type.valid_codes()
        _check_encoder(ttype.element_type)
    return _add(ttype)


def _is_group_name(name: str) -> bool:
    """Tell whether a name is that of a known element in groups, which products look up."""
    match = _GROUP_NAME.fullmatch(name)
    return match is not None and match["element"] in _TYPES


def _same(one: TType, other: TType) -> bool:
    """Tell whether two types mean the same: a cell of a notebook that is run again makes another function."""
    return one.exact == other.exact and values_text(one) == values_text(other)


def _check_encoder(ttype: TType) -> None:
    """Raise ValueRangeError unless a type's own encoder gives codes of the values that it is given."""
    if ttype.encoder is None:
        return
    values = ttype.probe_values()
    try:
        codes = np.asarray(ttype.encoder(values)).astype(np.int64, casting="same_kind")
        found = ttype.decode_codes(codes)
    except Exception as error:
        raise ValueRangeError(
            f"type {ttype.name}: encoder(values) fails on the type's values ({type(error).__name__}: {error})"
        ) from error
    if not np.array_equal(found, values) or (codes >> ttype.elem_bits).any():
        raise ValueRangeError(
            f"type {ttype.name}: encoder(values) must return the code, an integer, of each of its values"
        )


def _add(ttype: TType) -> TType:
    for metadata in ttype.metadata:
        get_type(metadata.ttype)
    element = ttype.element_type
    if ttype.elem_bits != element.elem_bits:
        raise ValueRangeError(
            f"type {ttype.name} has {ttype.elem_bits} bits, its element {element.name} {element.elem_bits}"
        )
    if ttype.is_block:
        _check_block(ttype, element)
    return _TYPES.setdefault(ttype.name, ttype)


def _check_block(ttype: TType, element: TType) -> None:
    """Raise an error unless blocks store what `quantize` and kernels read: a scale, and a zero point."""
    stored = {part.name: part.ttype for part in ttype.metadata}
    scale = stored.get("scale", "")
    problems = (
        (element.is_block, f"its element {element.name} has blocks itself; name {element.element}"),
        (len(stored) < len(ttype.metadata), "metadata has two of one name; a block has one scale"),
        (not scale, 'a block has a scale; give metadata=(Metadata("scale", "float16"),)'),
        (
            stored.get("zero", scale) not in (scale, ttype.element),
            f"a zero point is of the element's type or of the scale's, not {stored.get('zero')}",
        ),
        (
            stored.get("tensor_scale", "float32") != "float32",
            f"the scale of a tensor is float32, not {stored.get('tensor_scale')}",
        ),
    )
    for wrong, why in problems:
        if wrong:
            raise ValueRangeError(f"type {ttype.name}: {why}")
    if scale not in SCALE_TYPES:
        raise unknown_name("scale type", scale, SCALE_TYPES)


def get_type(name: str | TType) -> TType:
    """Return the type of that name.

    Besides the table this knows ``fp{bits}_e{x}m{y}`` up to 8 bits, `CODEBOOKS`, and group-scaled forms
    ``{element}_g{size}[_s{scale type}][_zi|_zf]`` such as ``int4_g128`` or ``uint4_g64_zf``, and multiples
    of types, `multiple_name`.

    Raises
    ------
    UnknownNameError
        Suggests the nearest names.
    """
    if isinstance(name, TType):
        return name
    if not isinstance(name, str):
        raise unknown_name("type", name, type_names())
    found = _TYPES.get(name)
    return found if found is not None else _parsed_type(name)


def list_types() -> tuple[TType, ...]:
    """Return all registered types in order of registration."""
    return tuple(_TYPES.values())


def own_types() -> tuple[TType, ...]:
    """Return the types that were registered beside the library's own, by name."""
    return tuple(_TYPES[name] for name in sorted(_TYPES.keys() - _SHIPPED))


def shipped_type(name: str) -> TType | None:
    """Return the library's own type of that name, also where a program made another; None without one."""
    if name in _SHIPPED:
        return _TYPES[name]
    try:
        return _parsed_type(name)
    except LadderError:
        return None


def type_names() -> tuple[str, ...]:
    """Return the names of all registered types."""
    return tuple(_TYPES)


def group_scaled(element: str, group_size: int, *, scale: str = "float16", zero: str | None = None) -> TType:
    """Return the block type of ``group_size`` elements along K that share a scale.

    Parameters
    ----------
    element
        Name of the element type.
    group_size
        Elements that share a scale (and a zero point).
    scale
        Name of the scale's type, one of `SCALE_TYPES`.
    zero
        ``None`` or ``"none"``; ``"integer"``: a zero point in the element's own range;
        ``"float"``: a real zero point in the scale's type.

    Raises
    ------
    UnknownNameError, ShapeError, ConversionError, ValueRangeError
        If the element or scale is unknown, the size is below 1, or an integer zero point is
        asked of a type that has values other than consecutive integers.
    """
    base = get_type(element)
    kind = "none" if zero is None else zero
    require_name("kind of zero point", kind, _ZERO_SUFFIX)
    require_name("scale type", scale, SCALE_TYPES)
    positive_number(group_size, "group_size")
    if base.is_block:
        raise ConversionError(f"{element} is a block type already; give its element {base.element!r}")
    if kind == "integer" and not base.is_integer:
        raise ConversionError(f"{element} {NOT_CONSECUTIVE}; use zero='float' or no zero point")
    suffix = ("" if scale == "float16" else f"_s{scale}") + _ZERO_SUFFIX[kind]
    name = f"{base.name}_g{group_size}{suffix}"
    if name in _TYPES:  # registered before its element
        raise ValueRangeError(f"type {name!r} hides groups of {element!r}; choose another name")
    return _group_scaled(name, base, group_size, scale, kind)


@lru_cache(maxsize=1024)
def _group_scaled(name: str, base: TType, size: int, scale: str, zero: str) -> TType:
    """Build the type once per name, so that its derived tables are shared."""
    metadata = [Metadata("scale", scale)]
    if zero != "none":
        metadata.append(Metadata("zero", base.name if zero == "integer" else scale))
    return TType(
        name,
        base.elem_bits,
        shape=(size,),
        element=base.name,
        metadata=tuple(metadata),
        finite_codes=base.finite_codes,
        exact=base.exact,
        doc=f"{base.name}, {size} share a scale",
    )


@lru_cache(maxsize=1024)
def _parsed_type(name: str) -> TType:
    """Build a type that its name describes."""
    if name in PLAIN_TYPES:
        return _plain_type(name)
    if name in CODEBOOKS:
        return codebook_type(name)
    match = _FLOAT_NAME.fullmatch(name)
    if match:
        bits, exponent, mantissa = (int(group) for group in match.groups())
        if bits == 1 + exponent + mantissa and exponent >= 1 and bits <= 8:
            return float_type(name, FloatFormat(exponent, mantissa))
    match = _MULTIPLE_NAME.fullmatch(name)
    if match:
        return _multiple(name, match["element"], int(match["power"]) * (1 if match["sign"] == "p" else -1))
    match = _GROUP_NAME.fullmatch(name)
    element = match["element"] if match else ""
    parsed = _FLOAT_NAME.fullmatch(element) or _MULTIPLE_NAME.fullmatch(element)
    if match and (element in _TYPES or element in CODEBOOKS or parsed):
        zero = _ZERO_OF_LETTER[match["zero"]]
        scale = match["scale"] or "float16"
        return group_scaled(element, int(match["size"]), scale=scale, zero=zero)
    raise unknown_name("type", name, type_names())


def multiple_name(element: str, exponent: int) -> str:
    """Return the name of the type whose values are those of a type times ``2**exponent``.

    Raises
    ------
    ValueRangeError
        If a program gave another type that name.
    """
    name = f"{element}_times_2{'m' if exponent < 0 else 'p'}{abs(exponent)}"
    if name in _TYPES:
        raise ValueRangeError(
            f"type {name!r} hides the multiple of {element!r} that products need; choose another name"
        )
    return name


def _multiple(name: str, element: str, exponent: int) -> TType:
    """Build the type of the same codes whose values are ``2**exponent`` times those of an element type."""
    base = get_type(element)
    if base.is_block:
        raise ConversionError(f"{element} is a block type; multiples are of its element {base.element!r}")

    def decode(code: Any, ops: Any) -> Any:
        return ops.cast(base.evaluate(code, ops), "float32") * 2.0**exponent

    return TType(
        name,
        base.elem_bits,
        decode,
        finite_codes=base.finite_codes,
        exact=base.exact,
        doc=f"2**{exponent} times {element}",
        multiple_of=(element, exponent),
    )


def float_type(name: str, form: FloatFormat) -> TType:
    """Return the element type of a floating-point format."""
    specials = {
        "none": "no infinity, no NaN",
        "ieee": "IEEE infinity and NaN",
        "fn": "NaN, no infinity",
        "fnuz": "one NaN, no infinity, no -0",
    }[form.specials]
    doc = f"e{form.exponent_bits}m{form.mantissa_bits}, bias {form.bias}, {specials}"
    encoder = form.encode if form.bits > 8 else None
    return TType(name, form.bits, form.decode, encoder=encoder, doc=doc)


def _plain_type(name: str) -> TType:
    """Return a type of `PLAIN_TYPES`; not listed, since no weight is stored in it."""
    bits, limits, doc = PLAIN_TYPES[name]
    signed, coded = limits[0] < 0, bits <= 32 and isinstance(limits[0], int)

    def require_codes() -> None:
        if not coded:
            raise ValueRangeError(f"type {name} has no codes here: elements are computed with as they are")

    def decode(code: Any, ops: Any) -> Any:
        require_codes()
        if signed and bits < 32:
            return ops.cast(code << (32 - bits), "int32") >> (32 - bits)
        return ops.cast(code, "int32" if signed or bits < 32 else "uint32")

    def encode(values: Any) -> Any:
        require_codes()
        xp = arrays_of(values)
        return xp.cast(xp.clip(xp.rint(values), *limits), "int64") & ((1 << bits) - 1)

    listed = bits <= EXHAUSTIBLE_BITS
    codes = (0, 1) if name == "bool" else None
    return TType(
        name, bits, decode, encoder=encode, finite_codes=codes, limits=None if listed else limits, doc=doc
    )


def _signed(bits: int) -> TType:
    def decode(code: Any, ops: Any) -> Any:
        return ops.cast(code << (32 - bits), "int32") >> (32 - bits)

    return TType(f"int{bits}", bits, decode, doc="two's complement")


def _unsigned(bits: int) -> TType:
    return TType(f"uint{bits}", bits, lambda code, ops: ops.cast(code, "int32"), doc="unsigned integer")


def _decode_e8m0(code: Any, ops: Any) -> Any:
    """2**(code - 127); code 0 is a float32 subnormal, code 255 is NaN (OCP MX v1.0, 5.4.1)."""
    bits = ops.select(code == 0, 1 << 22, code << 23)
    return ops.bitcast(ops.select(code == 255, QUIET_NAN, bits), "float32")


def _register_library() -> None:
    for name in ("float32", "tfloat32", "float16", "bfloat16"):
        _add(float_type(name, FLOAT_FORMATS[name]))
    for name, form in FLOAT_FORMATS.items():
        if form.bits <= 8:
            _add(float_type(name, form))
    for bits in range(8, 0, -1):
        _add(_signed(bits))
    for bits in range(8, 0, -1):
        _add(_unsigned(bits))
    _add(
        TType(
            "ternary",
            2,
            lambda code, ops: ops.cast(code, "int32") - 1,
            finite_codes=(0, 1, 2),
            doc="-1, 0, 1 as codes 0, 1, 2 (BitNet b1.58)",
        )
    )
    _add(
        TType(
            "nf4",
            4,
            lambda code, ops: ops.lookup(NF4_VALUES, code),
            exact=False,
            doc="normal-float codebook (QLoRA)",
        )
    )
    _add(TType("e8m0", 8, _decode_e8m0, doc="2**(code - 127), 255 is NaN: the MX scale"))
    for name, (element, size, scale, per_tensor) in BLOCK_TYPES.items():
        metadata = [Metadata("scale", scale)]
        if per_tensor:
            metadata.append(Metadata("tensor_scale", "float32", scope="tensor"))
        _add(
            TType(
                name,
                get_type(element).elem_bits,
                shape=(size,),
                element=element,
                metadata=tuple(metadata),
                doc=f"{size} x {element}, {scale} scale",
            )
        )


_register_library()
_SHIPPED = frozenset(_TYPES)
