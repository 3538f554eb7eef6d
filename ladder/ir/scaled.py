"""The normal form of a block-scaled product: both operands are codes with a scale per block along K."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tile_types.errors import ConversionError, DTypeError, ShapeError, unknown_name


@dataclass(frozen=True)
class ScaledFormat:
    """An operand that cores multiply with its scales (PTX ISA, "tcgen05.mma", "Block scaling").

    bits, group: Bits of a code, and codes along K that share a scale.
    kind, scale_vec: The instruction's kind, and scales of a row that one instruction takes.
    number: The element's number in the instruction descriptor.
    scale: Type of the scales: ``"e8m0"`` or ``"fp8_e4m3"``.
    element: Type of the codes.

    AMD's instructions have the same elements and scales (`schedules.wave_scaled`), any two of them together.
    """

    bits: int
    group: int
    kind: str
    scale_vec: int
    number: int
    scale: str
    element: str

    @property
    def slab_codes(self) -> int:
        """Codes of a slab: 128 bytes of 4 or 8-bit codes, 96 of 6-bit ones."""
        return 256 if self.bits == 4 else 128

    @property
    def slab_atoms(self) -> int:
        """Pieces of four scales of a slab."""
        return self.slab_codes // self.group // 4

    def row_bytes(self, k: int) -> int:
        """Return the bytes of a row of codes, dense and of whole blocks of 32: codes beyond K are zero."""
        return -(-k // 32) * 4 * self.bits

    def scale_atoms(self, k: int) -> int:
        """Return the pieces of four scales of a row: those of whole slabs."""
        return -(-k // self.slab_codes) * self.slab_atoms


FORMATS: Mapping[str, ScaledFormat] = {
    "mxfp8_e4m3": ScaledFormat(8, 32, "mxf8f6f4", 1, 0, "e8m0", "fp8_e4m3"),
    "mxfp8_e5m2": ScaledFormat(8, 32, "mxf8f6f4", 1, 1, "e8m0", "fp8_e5m2"),
    "mxfp6_e2m3": ScaledFormat(6, 32, "mxf8f6f4", 1, 3, "e8m0", "fp6_e2m3"),
    "mxfp6_e3m2": ScaledFormat(6, 32, "mxf8f6f4", 1, 4, "e8m0", "fp6_e3m2"),
    "mxfp4": ScaledFormat(4, 32, "mxf4", 2, 1, "e8m0", "fp4_e2m1"),
    "nvfp4": ScaledFormat(4, 16, "mxf4nvf4", 4, 1, "fp8_e4m3", "fp4_e2m1"),
}
"""Block types whose products cores scale themselves."""

OUTPUTS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class ScaledGemm:
    """``out[m,n] = factor * sum_k x[m,k] sx[m,k//g] w[n,k] sw[n,k//g] + bias[n]``, M always dynamic.

    Sums are float32; ``factor`` is the product of the operands' tensor scales.

    n, k: Extents of the weight matrix.
    weight, activation: Block types of `FORMATS` with scales of one type and size.
    output: Element type of the result.
    bias: Whether a bias [N] of the output type is added.
    Raises UnknownNameError, ConversionError, DTypeError, ShapeError if there is no such product.
    """

    n: int
    k: int
    weight: str
    activation: str
    output: str = "bfloat16"
    bias: bool = False

    def __post_init__(self) -> None:
        for name in (self.weight, self.activation):
            if name not in FORMATS:
                raise unknown_name("type of a block-scaled operand", name, FORMATS)
        if len({(FORMATS[name].scale, FORMATS[name].group) for name in (self.weight, self.activation)}) > 1:
            raise ConversionError(
                f"no core multiplies {self.weight} by {self.activation} with both scales: give both operands"
                " one type, or a 16-bit activation"
            )
        if self.output not in OUTPUTS:
            raise DTypeError(
                f"the result of a block-scaled product is one of {', '.join(OUTPUTS)}, got {self.output!r}"
            )
        if self.n < 1 or self.k < 1:
            raise ShapeError(f"a product needs N and K of at least 1, got {self.n} and {self.k}")

    @property
    def format(self) -> ScaledFormat:
        """The activation's format; on NVIDIA GPUs both operands share its bits, blocks and kind."""
        return FORMATS[self.activation]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the activation's codes."""
        return self.format.row_bytes(self.k)

    @property
    def slabs(self) -> int:
        """Slabs of a row of activations, the last perhaps in part."""
        return -(-self.k // self.format.slab_codes)

    @property
    def scale_atoms(self) -> int:
        """Pieces of four scales of a row of activations."""
        return self.format.scale_atoms(self.k)

    @property
    def slab_atoms(self) -> int:
        """Pieces of four scales of a slab."""
        return self.format.slab_atoms
