"""`TType`: an element or block type as one decode expression plus what follows from it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tile_types.arrays import Array, arrays_of, is_torch
from tile_types.errors import ShapeError, ValueRangeError, require_kind, whole_number
from tile_types.grid import Grid
from tile_types.ops import Decode, NumpyOps, TirOps, TorchOps

MAX_BITS = 128
EXHAUSTIBLE_BITS = 16
"""Types up to this width are enumerated; wider ones are probed (see `TType.probe_codes`)."""

NOT_CONSECUTIVE = "has values other than consecutive integers, which integer zero points need"
"""What is wrong with a type that is not `TType.is_integer`, after its name."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")

STORED = (("scale", "block"), ("zero", "block"), ("tensor_scale", "tensor"))
"""Names and scopes of `Metadata`."""


@dataclass(frozen=True)
class Metadata:
    """An array that a block type stores beside its codes.

    Parameters
    ----------
    name
        ``"scale"``, ``"zero"`` or ``"tensor_scale"``.
    ttype
        Name of its type. A zero point of the element's own type is an integer in code space.
    scope
        ``"block"``: one per block; ``"tensor"``: one per tensor.
    """

    name: str
    ttype: str
    scope: str = "block"

    def __post_init__(self) -> None:
        for field_name in ("name", "ttype", "scope"):
            require_kind(getattr(self, field_name), str, f"{field_name} of metadata is a text")
        if (self.name, self.scope) not in STORED:
            known = ", ".join(f"{name} per {scope}" for name, scope in STORED)
            raise ValueRangeError(
                f"metadata {self.name!r} per {self.scope!r} has no meaning: there are {known}"
            )


@dataclass(frozen=True, eq=False)
class TType:
    """A low-bit type. Two types are equal when their names are.

    Parameters
    ----------
    name
        Lower-case identifier.
    elem_bits
        Bits of one code: 1 to 32, more for types that are only computed with.
    decode
        ``decode(code, ops) -> value``: the value of a code as one expression, see `tile_types.ops`.
        A block type leaves it out and names its ``element``.
    shape
        Elements along K of one block; ``(1,)`` for an element-wise type.
    element
        Name of the element type of a block type.
    metadata
        What a block stores beside its codes. A block's value is
        ``(decode(code) - zero) * scale * tensor_scale``, with what is absent left out.
    encoder
        Optional faster encode: finite float64 array -> int64 codes (same rounding as `encode`).
    finite_codes
        Codes that `encode` may produce; by default all whose value is finite. Codes left out are
        invalid or special: they still decode by the expression but never occur in encoded data.
    exact
        False for a codebook whose entries are themselves rounded real numbers (nf4).
    doc
        One line for tables; may name the source.
    multiple_of
        Name of a type and an exponent e where the values are those of that type times ``2**e``; see
        `tile_types.multiples`.
    limits
        Least and largest value of a type above 16 bits, whose codes are too many to list; two integers if
        all values between are.

    Raises
    ------
    ValueRangeError
        If the name, the width or the decode is unusable.

    Examples
    --------
    >>> sign = TType("sign", 1, lambda code, ops: 1 - 2 * ops.cast(code, "int32"))
    >>> sign.values()
    array([ 1., -1.])
    """

    name: str
    elem_bits: int
    decode: Decode | None = None
    shape: tuple[int, ...] = (1,)
    element: str | None = None
    metadata: tuple[Metadata, ...] = ()
    encoder: Callable[[Array], Array] | None = field(default=None, repr=False)
    finite_codes: tuple[int, ...] | None = None
    exact: bool = True
    doc: str = ""
    multiple_of: tuple[str, int] | None = None
    limits: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and _NAME.fullmatch(self.name)):
            raise ValueRangeError(f"type name {self.name!r} must match {_NAME.pattern}")
        if not 1 <= whole_number(self.elem_bits, f"type {self.name}: elem_bits") <= MAX_BITS:
            raise ValueRangeError(
                f"type {self.name}: elem_bits must be in 1..{MAX_BITS}, got {self.elem_bits}"
            )
        if (self.decode is None) == (self.element is None):
            raise ValueRangeError(
                f"type {self.name}: give either decode(code, ops) or the name of an element"
            )
        if not (self.decode is None or callable(self.decode)):
            raise ValueRangeError(f"type {self.name}: decode must be a function of (code, ops)")
        require_kind(self.shape, tuple, f"type {self.name}: shape must be a tuple")
        extents = [whole_number(extent, f"type {self.name}: an extent") for extent in self.shape]
        if len(extents) != 1 or extents[0] < 1:
            raise ShapeError(
                f"type {self.name}: a block is so many elements along K, (32,), got {self.shape}"
            )
        require_kind(self.metadata, tuple, f"type {self.name}: metadata must be a tuple")
        for part in self.metadata:
            require_kind(part, Metadata, f"type {self.name}: metadata must hold Metadata")
        if self.decode is not None and (extents != [1] or self.metadata):
            raise ValueRangeError(
                f"type {self.name}: a type of blocks has no decode: register its element, then give that"
                " name as element="
            )
        self._check_limits()
        codes = () if self.finite_codes is None else self.finite_codes
        require_kind(codes, tuple, f"type {self.name}: finite_codes must be a tuple")
        for code in codes:
            if not 0 <= whole_number(code, f"type {self.name}: a code") < 1 << self.elem_bits:
                raise ValueRangeError(
                    f"type {self.name}: finite_codes has {code}, no code of {self.elem_bits} bits"
                )

    def _check_limits(self) -> None:
        """Raise ValueRangeError unless limits are two ascending numbers of a type that is not listed."""
        given = self.limits
        pair = isinstance(given, tuple) and len(given) == 2 and all(isinstance(x, int | float) for x in given)
        if given is not None and not (pair and given[0] < given[1] and self.elem_bits > EXHAUSTIBLE_BITS):
            raise ValueRangeError(
                f"type {self.name}: limits are the least and the largest value of more than"
                f" {EXHAUSTIBLE_BITS} bits, got {given!r} for {self.elem_bits}"
            )

    def __eq__(self, other: object) -> bool:
        """Compare names."""
        return isinstance(other, TType) and other.name == self.name

    def __hash__(self) -> int:
        """Hash the name."""
        return hash(self.name)

    def __str__(self) -> str:
        """Return the name."""
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by name and a digest of the values: decode expressions are code, not data."""
        from tile_types.identity import own_values, stored_type
        from tile_types.library import get_type

        own = own_values(self)
        return (stored_type, (self.name, own)) if own else (get_type, (self.name,))

    @property
    def is_block(self) -> bool:
        """Whether elements share metadata."""
        return self.element is not None

    @property
    def element_type(self) -> TType:
        """The type of one code: the element of a block type, else the type itself."""
        if self.element is None:
            return self
        from tile_types.library import get_type

        return get_type(self.element)

    @property
    def block_size(self) -> int:
        """Elements of one block."""
        return int(np.prod(self.shape))

    @property
    def zero_kind(self) -> str:
        """How zero points are stored: ``"none"``, ``"integer"`` (in code space) or ``"float"``."""
        zero = self.metadata_named("zero")
        if zero is None:
            return "none"
        return "integer" if zero.ttype == self.element else "float"

    @property
    def bits_per_element(self) -> float:
        """Code bits plus the element's share of block metadata (not of tensor metadata)."""
        from tile_types.library import get_type

        shared = sum(get_type(m.ttype).elem_bits for m in self.metadata if m.scope == "block")
        return self.elem_bits + shared / self.block_size

    def metadata_named(self, name: str) -> Metadata | None:
        """Return the metadata of that name, or None."""
        return next((m for m in self.metadata if m.name == name), None)

    def evaluate(self, code: Any, ops: Any) -> Any:
        """Evaluate the decode expression of the element with any of the evaluators."""
        element = self.element_type
        if isinstance(ops, TirOps) and (table := element.kernel_table):
            return ops.lookup(table, code)
        assert element.decode is not None  # an element type always has one
        return element.decode(code, ops)

    @cached_property
    def kernel_table(self) -> tuple[float, ...]:
        """The values, where the decode expression gives others in a kernel than here or none; else empty.

        Raises
        ------
        ValueRangeError
            If they have too many codes for a table.
        """
        from tile_types.tir_values import kernel_values

        assert self.decode is not None
        computed = kernel_values(self.decode, self.probe_codes())
        if computed is not None and _close(computed, self._probe_values):
            return ()
        if self.elem_bits > EXHAUSTIBLE_BITS:
            raise ValueRangeError(
                f"type {self.name}: kernels compute other values of decode(code, ops) than numpy, and no"
                f" table holds {self.elem_bits} bits; use ops.select, cast, bitcast, exp2 and + - * & | >>"
            )
        return tuple(self.values().tolist())

    def values(self) -> npt.NDArray[np.float64]:
        """Return the value of every code, float64[2**elem_bits], NaN and infinity included.

        Raises
        ------
        ValueRangeError
            If the type has more than 16 bits; use `decode_codes` on the codes of interest.
        """
        if self.elem_bits > EXHAUSTIBLE_BITS:
            raise ValueRangeError(
                f"type {self.name} has 2**{self.elem_bits} codes, too many to list; use decode_codes(codes)"
            )
        return self._probe_values

    def probe_codes(self) -> npt.NDArray[np.uint32]:
        """Return all codes up to 16 bits; for wider types every pattern of the upper 16 bits.

        The lower bits then take five patterns (none, lowest, all, and alternating), so every
        sign, exponent and each mantissa bit occurs.
        """
        spare = max(0, self.elem_bits - EXHAUSTIBLE_BITS)
        upper = np.arange(1 << (self.elem_bits - spare), dtype=np.uint32) << np.uint32(spare)
        patterns = (0, 1, 0xFFFFFFFF, 0x55555555, 0xAAAAAAAA) if spare else (0,)
        mask = (1 << spare) - 1
        return np.concatenate([upper | np.uint32(pattern & mask) for pattern in patterns])

    def probe_values(self) -> npt.NDArray[np.float64]:
        """Return the values of `valid_codes`."""
        values = self._probe_values
        return values[self._valid]

    def valid_codes(self) -> npt.NDArray[np.uint32]:
        """Return the codes (of `probe_codes`) that encode may produce: finite and not excluded."""
        return self.probe_codes()[self._valid]

    def holds(self, numbers: npt.NDArray[np.float64]) -> bool:
        """Tell whether all of some numbers are values of the type; not known of complex types."""
        if self.limits is None:
            return bool((self.decode_codes(self.encode(numbers)) == numbers).all())
        least, most = self.limits
        if not isinstance(least, int):
            return self.name == "float64"
        return bool(((numbers == np.rint(numbers)) & (numbers >= least) & (numbers <= most)).all())

    def decode_codes(self, codes: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the float64 values of numpy codes by the reference evaluator."""
        with np.errstate(all="ignore"):
            value = np.asarray(self.evaluate(np.asarray(codes).astype(np.uint32), NumpyOps()))
            if np.iscomplexobj(value):
                raise ValueRangeError(f"type {self.name}: decode(code, ops) must return real numbers")
            return value.astype(np.float64)

    def decode_array(self, codes: Array) -> Array:
        """Return the float64 values of codes held by numpy or torch (any device)."""
        xp = arrays_of(codes)
        element = self.element_type
        if element.elem_bits <= 8 or element.is_listed:
            return xp.take(xp.array(element.values(), "float64", codes), xp.cast(codes, "int32"))
        if not is_torch(codes):
            return element.decode_codes(codes)
        return xp.cast(element.evaluate(xp.cast(codes, "int64"), TorchOps()), "float64")

    @property
    def is_listed(self) -> bool:
        """Whether a program made the type, and its values can be listed: evaluators need not agree on it."""
        from tile_types.identity import is_own

        return self.elem_bits <= EXHAUSTIBLE_BITS and is_own(self)

    @cached_property
    def minimum(self) -> float:
        """Smallest finite value; of integers an int."""
        return self.limits[0] if self.limits else float(self.probe_values().min())

    @cached_property
    def maximum(self) -> float:
        """Largest finite value; of integers an int."""
        return self.limits[1] if self.limits else float(self.probe_values().max())

    @property
    def max_abs(self) -> float:
        """Largest magnitude of a finite value."""
        return max(self.maximum, -self.minimum)

    @property
    def smallest_positive(self) -> float:
        """Smallest value above zero (infinity if there is none)."""
        values = self.probe_values()
        return float(values[values > 0].min(initial=np.inf))

    @property
    def is_integer(self) -> bool:
        """Whether the values are consecutive integers (then rounding is arithmetic)."""
        if self.limits is not None:
            return all(isinstance(limit, int) for limit in self.limits)
        return self.elem_bits <= EXHAUSTIBLE_BITS and self._grid.integers

    def encode(self, values: Array) -> Array:
        """Return the codes of the nearest values, on numpy or torch.

        A tie between neighbours a < b with step d = b - a goes to the one that is an even
        multiple of d if they are multiples, else to the even code; for standard types this is
        IEEE's round to nearest even. Finite values out of range saturate. Zero gets the code
        of +0.

        Parameters
        ----------
        values
            Real array of any shape.

        Returns
        -------
        uint8, uint16 or uint32 array of the same shape, the narrowest that holds a code.

        Raises
        ------
        ValueRangeError
            If a value is NaN or infinite; names its position.
        """
        xp = arrays_of(values)
        require_finite(values, f"encode to {self.name}")
        return xp.cast(self.encode_finite(xp.cast(values, "float64")), code_dtype(self.elem_bits))

    def encode_finite(self, values: Array) -> Array:
        """Encode finite float64 values; returns integer codes of the library's index type."""
        element = self.element_type
        if element.encoder is not None:
            return element.encoder(values)
        return element._grid.encode(values)

    @cached_property
    def _probe_values(self) -> npt.NDArray[np.float64]:
        codes = self.probe_codes()
        try:
            values = self.decode_codes(codes)
        except ValueRangeError:
            raise
        except Exception as error:
            raise ValueRangeError(
                f"type {self.name}: decode(code, ops) fails on an array of codes"
                f" ({type(error).__name__}: {error}); write it with operators and ops.select, ops.lookup,"
                " ops.cast, ops.bitcast, ops.exp2"
            ) from error
        if values.shape not in (codes.shape, ()):
            raise ValueRangeError(
                f"type {self.name}: decode(code, ops) must return one number per code,"
                f" got shape {values.shape} for {codes.size} codes"
            )
        if not np.array_equal(values, self.decode_codes(codes), equal_nan=True):
            raise ValueRangeError(
                f"type {self.name}: decode(code, ops) gives other values when it is called again; it must"
                " depend on the code alone"
            )
        values = np.where(np.isnan(values), np.nan, np.broadcast_to(values, codes.shape))  # NaN are quiet
        if (wrapped := self._wrapped(codes, values)).any():
            raise ValueRangeError(
                f"type {self.name}: decode(code, ops) gives {values[wrapped][0]:g} for code"
                f" {codes[wrapped][0]}: codes count as uint32, in which numbers below 0 wrap around;"
                " write ops.cast(code, 'int32') where they may be negative"
            )
        values.setflags(write=False)
        return values

    def _wrapped(self, codes: npt.NDArray[np.uint32], values: npt.NDArray[np.float64]) -> Any:
        """Tell of each code whether its value would be a small negative one, were codes signed."""
        try:
            with np.errstate(all="ignore"):
                signed = np.asarray(self.evaluate(codes.astype(np.int64), NumpyOps()), np.float64)
        except Exception:  # bits of 64-bit codes are no float32
            signed = values
        signed = np.where(np.isnan(signed), 0.0, signed)
        return (signed < 0) & (values / (1 << EXHAUSTIBLE_BITS - 1) > -signed)

    @cached_property
    def _valid(self) -> npt.NDArray[np.bool_]:
        finite = np.isfinite(self._probe_values)
        if self.finite_codes is not None:
            finite &= np.isin(self.probe_codes(), self.finite_codes)
        if not finite.any():
            raise ValueRangeError(
                f"type {self.name} has no finite value; decode(code, ops) must return a number for each code"
            )
        return finite

    @cached_property
    def _grid(self) -> Grid:
        if self.elem_bits > EXHAUSTIBLE_BITS:
            raise ValueRangeError(
                f"type {self.name} has {self.elem_bits} bits: give TType(..., encoder=...) to encode it"
            )
        return Grid.of(self.valid_codes(), self.probe_values())


def _close(computed: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> bool:
    """Compare with float32 values; powers of two that are no whole numbers may differ in the last places."""
    with np.errstate(all="ignore"):
        rounded = values.astype(np.float32).astype(np.float64)
    return np.allclose(computed, rounded, rtol=2.0**-20, atol=0.0, equal_nan=True)


def code_dtype(bits: int) -> str:
    """Return the narrowest unsigned dtype that holds a code of ``bits`` bits."""
    return "uint8" if bits <= 8 else "uint16" if bits <= 16 else "uint32"


def require_finite(values: Array, action: str) -> None:
    """Raise when a value is NaN or infinite.

    Raises
    ------
    ValueRangeError
        Names the action, the position and the value.
    """
    xp = arrays_of(values)
    if not xp.is_float(values):
        return
    if bool(values.dtype.itemsize == 1):
        values = xp.cast(values, "float32")
    position = xp.first_nonfinite(values)
    if position is not None:
        raise ValueRangeError(
            f"cannot {action}: value {float(values[position])} at position {list(position)};"
            " replace NaN and infinity first"
        )


def values_text(ttype: TType) -> str:
    """Return what tells types of one name apart: width, values of all codes, and what a block shares."""
    if ttype.is_block:
        shared = ", ".join(f"{m.name} {m.ttype} per {m.scope}" for m in ttype.metadata)
        return f"blocks of {list(ttype.shape)} {ttype.element}, {shared or 'nothing shared'}"
    listed = ttype.elem_bits <= EXHAUSTIBLE_BITS
    values = ttype.values() if listed else ttype.decode_codes(ttype.probe_codes())
    digest = hashlib.sha256(np.where(np.isnan(values), np.nan, values).astype("<f8").tobytes())
    digest.update(ttype.valid_codes().astype("<u4").tobytes())
    span = f"{ttype.minimum:.6g} to {ttype.maximum:.6g}"
    return f"{ttype.elem_bits} bits, values {span}, sha256 {digest.hexdigest()[:32]}"
