"""`MatmulConfig`: a matrix product in BitBLAS's words, and the types that it names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch

from tile_types import TType
from tile_types.errors import DTypeError, LadderError, ShapeError, unknown_name

SIGN = TType("sign1", 1, lambda code, ops: ops.cast(code, "int32") * 2 - 1, doc="-1, 1 as codes 0, 1")
"""BitBLAS's ``int1``; registered when a matrix of it is made."""


class TransformKind(IntEnum):
    """How a weight is laid out: by rows, by tiles, in these as ldmatrix or as tensor cores take them."""

    NonTransform = 0
    InterWarpTransform = 1
    IntraWarpTransform = 2
    LDMatrixTransform = 3


class OptimizeStrategy(IntEnum):
    """What BitBLAS tunes for; it decides the default of `MatmulConfig.propagate_b` alone."""

    SingleBatchDecodeOnly = 0
    ContigousBatching = 1


@dataclass(frozen=True)
class Element:
    """A type of BitBLAS.

    source, bits: BitBLAS's ``source_format`` and width.
    name: The type here; ``""`` if products of it are not computed.
    dtype: What torch holds values in, None below 8 bits.
    """

    source: str
    bits: int
    name: str = ""
    dtype: torch.dtype | None = None


ELEMENTS = {
    "float64": Element("fp", 64, "", torch.float64),
    "float32": Element("fp", 32, "float32", torch.float32),
    "float16": Element("fp", 16, "float16", torch.float16),
    "bfloat16": Element("bf", 16, "bfloat16", torch.bfloat16),
    "int32": Element("int", 32, "", torch.int32),
    "uint32": Element("uint", 32),
    "int16": Element("int", 16, "", torch.int16),
    "uint16": Element("uint", 16),
    "int8": Element("int", 8, "int8", torch.int8),
    "uint8": Element("uint", 8, "uint8", torch.uint8),
    "int4": Element("int", 4, "int4"),
    "uint4": Element("uint", 4, "uint4"),
    "int2": Element("int", 2, "int2"),
    "uint2": Element("uint", 2, "uint2"),
    "int1": Element("int", 1, SIGN.name),
    "uint1": Element("uint", 1, "uint1"),
    "nf4": Element("nf", 4, "nf4"),
    "fp4_e2m1": Element("fp", 4, "fp4_e2m1"),
    "e4m3_float8": Element("fp_e4m3", 8, "fp8_e4m3", torch.float8_e4m3fn),
    "e5m2_float8": Element("fp_e5m2", 8, "fp8_e5m2", torch.float8_e5m2),
}
"""Name in a `MatmulConfig` -> type."""

ACTIVATIONS = {
    **{name: ELEMENTS[name].name for name in ("float32", "float16", "bfloat16", "int8")},
    **{name: ELEMENTS[name].name for name in ("e4m3_float8", "e5m2_float8")},
    "int4": "int8",
    "uint4": "int8",
}
"""``A_dtype`` -> the type here that it is computed in; 4-bit values come two in a byte, low one first."""

OUTPUTS = ("float32", "float16", "bfloat16", "int32", "int8")
ZEROS_MODES = ("original", "rescale", "quantized")
TILE_ROWS = 16
"""Rows of a tile of tensor cores."""

DYNAMIC_M = (1, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class MatmulConfig:
    """``C[M, N] = A[M, K] · decode(W)ᵀ``, as BitBLAS's class of this name.

    M: Rows: a number or several. Kernels here take any; it decides the defaults below.
    N, K: Outputs and inputs.
    A_dtype, W_dtype, out_dtype: See `ELEMENTS`; 4-bit activations come two in a byte.
    accum_dtype: Kept; sums are float32, of integers int32.
    layout: Whether A and W are as in the formula (``"nt"``) or transposed; quantized W: ``"nt"`` and
        ``"tt"``.
    with_scaling, with_zeros, with_bias: Which operands follow W, in this order: scale ``[N, K /
        group_size]``, zeros, bias ``[N]``.
    group_size: Elements along K that share a scale; -1: K.
    zeros_mode: ``"original"``: ``(w - zero) * scale``; ``"rescale"``: ``w * scale - zero``; ``"quantized"``:
        as the first, with zeros packed like W along N, ``[K / group_size, N * bits / 8]``.
    storage_dtype: ``"int8"``: what packed weights lie in.
    fast_decoding: Whether codes are interleaved in 32-bit words; by default those of integers below 8 bits
        are.
    propagate_a: Kept; activations are read as they are.
    propagate_b: Layout of the weight's tiles; by default of tensor cores if M is one number over 1.
    optimize_stratety: See `OptimizeStrategy` (the name is BitBLAS's).
    Raises LadderError if a type, layout, mode or group size is none that there is.
    """

    M: int | tuple[int, ...] | list[int] | None = None
    N: int | None = None
    K: int | None = None
    A_dtype: str = "float16"
    W_dtype: str = "float16"
    out_dtype: str = "float16"
    accum_dtype: str = "float16"
    layout: Literal["nn", "nt", "tn", "tt"] = "nt"
    with_bias: bool = False
    group_size: int = -1
    with_scaling: bool = False
    with_zeros: bool = False
    zeros_mode: Literal["original", "rescale", "quantized"] = "original"
    storage_dtype: str = "int8"
    fast_decoding: bool | None = None
    propagate_a: TransformKind | int | bool | None = None
    propagate_b: TransformKind | int | bool | None = None
    optimize_stratety: OptimizeStrategy | int = OptimizeStrategy.SingleBatchDecodeOnly

    def __post_init__(self) -> None:
        strategy = OptimizeStrategy(self.optimize_stratety)
        rows = self.M if self.M is not None else DYNAMIC_M[strategy:]
        self._set("optimize_stratety", strategy)
        self._set("M", rows if isinstance(rows, int) else tuple(rows))
        for name, default in (("zeros_mode", "original"), ("group_size", -1)):
            if getattr(self, name) is None:
                self._set(name, default)
        for name in ("with_bias", "with_scaling", "with_zeros"):
            self._set(name, bool(getattr(self, name)))
        self._check()
        self._set("propagate_a", _kind(self.propagate_a) or TransformKind.NonTransform)
        self._set("propagate_b", self._tiles())
        if self.fast_decoding is None:
            self._set("fast_decoding", self._decodes_fast())
        if self.is_native and self.weight.bits >= 8:
            self._set("storage_dtype", self.W_dtype)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def weight(self) -> Element:
        """Type of the weights."""
        return ELEMENTS[self.W_dtype]

    @property
    def is_native(self) -> bool:
        """Whether weights are what activations are: then they have no scales."""
        return self.A_dtype == self.W_dtype or {self.A_dtype, self.W_dtype} == {"e4m3_float8", "e5m2_float8"}

    @property
    def extents(self) -> tuple[int, int]:
        """N and K."""
        assert self.N is not None
        assert self.K is not None
        return self.N, self.K

    @property
    def group(self) -> int:
        """Elements along K that share a scale."""
        return self.extents[1] if self.group_size == -1 else self.group_size

    def _check(self) -> None:
        if self.N is None or self.K is None:
            raise ValueError("MatmulConfig needs N and K")
        for role, name, known in (
            ("A_dtype", self.A_dtype, [name for name in ACTIVATIONS if name]),
            ("W_dtype", self.W_dtype, [name for name, element in ELEMENTS.items() if element.name]),
            ("out_dtype", self.out_dtype, OUTPUTS),
            ("layout", self.layout, ("nt", "nn", "tn", "tt")),
            ("zeros_mode", self.zeros_mode, ZEROS_MODES),
            ("storage_dtype", self.storage_dtype, ("int8", *ELEMENTS)),
        ):
            if name not in known:
                raise unknown_name(role, name, known)
        if self.group < 1 or self.K % self.group:
            raise ShapeError(f"group_size {self.group_size} does not divide K = {self.K}")
        if self.weight.bits > 8 and not self.is_native:
            raise DTypeError(
                f"weights of {self.W_dtype} need activations of {self.W_dtype}, got {self.A_dtype}"
            )
        if self.layout[1] == "n" and (not self.is_native or self.weight.bits < 8):
            raise ShapeError(
                f"{self.W_dtype} weights are packed along K: layout 'nt' or 'tt', not {self.layout!r}"
            )
        if self.is_native and (self.with_scaling or self.with_zeros):
            raise LadderError(
                f"{self.W_dtype} weights of {self.A_dtype} activations have no scales, no zeros"
            )

    def _tiles(self) -> TransformKind:
        """Return the layout of the weight's tiles that BitBLAS takes for this."""
        asked = _kind(self.propagate_b)
        if self.A_dtype in ("e4m3_float8", "e5m2_float8", "bfloat16", "float32"):
            return TransformKind.NonTransform
        n, k = self.extents
        fits = n % TILE_ROWS == 0 and k % self.tile_columns == 0
        several = isinstance(self.M, int) and self.M > 1
        kind = TransformKind.LDMatrixTransform if fits and several else TransformKind.NonTransform
        kind = kind if asked is None else asked
        if self.optimize_stratety and self.M != 1:
            kind = TransformKind.LDMatrixTransform
        if kind and not fits:
            raise ShapeError(f"tiles of {TILE_ROWS} x {self.tile_columns} do not cover N = {n}, K = {k}")
        is_small = self.A_dtype in ("int4", "uint4")
        return TransformKind.LDMatrixTransform if is_small and kind == 2 else kind

    @property
    def unit(self) -> int:
        """Codes that move together in a tile: two of 4-bit activations."""
        return 2 if ELEMENTS[self.A_dtype].bits == 4 else 1

    @property
    def tile_columns(self) -> int:
        """Codes in a row of a tile: 32 bytes of activations."""
        return 256 // ELEMENTS[self.A_dtype].bits

    def _decodes_fast(self) -> bool:
        small = self.weight.source in ("int", "uint") and self.weight.bits < 8 and not self.is_native
        wide = self.A_dtype == "bfloat16" or (self.A_dtype == "int8" and self.weight.bits == 4)
        return small and not wide


def _kind(asked: TransformKind | int | bool | None) -> TransformKind | None:
    if asked is None:
        return None
    if isinstance(asked, bool):
        return TransformKind.LDMatrixTransform if asked else TransformKind.NonTransform
    return TransformKind(asked)
