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
    """

    bits: int
    group: int
    kind: str
    scale_vec: int
    number: int
    scale: str
    element: str


FORMATS: Mapping[str, ScaledFormat] = {
    "mxfp8_e4m3": ScaledFormat(8, 32, "mxf8f6f4", 1, 0, "e8m0", "fp8_e4m3"),
    "mxfp8_e5m2": ScaledFormat(8, 32, "mxf8f6f4", 1, 1, "e8m0", "fp8_e5m2"),
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
    weight, activation: Block types of `FORMATS`, of one kind.
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
        if FORMATS[self.weight].kind != FORMATS[self.activation].kind:
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
        """Properties that both operands share: bits, blocks and kind."""
        return FORMATS[self.activation]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of codes, a multiple of 16: codes beyond K are zero."""
        return -(-self.k * self.format.bits // 128) * 16

    @property
    def slabs(self) -> int:
        """Pieces of 128 bytes of a row, the last perhaps in part."""
        return -(-self.row_bytes // 128)

    @property
    def scale_atoms(self) -> int:
        """Pieces of four scales of a row: those of whole slabs."""
        return self.slabs * self.slab_atoms

    @property
    def slab_atoms(self) -> int:
        """Pieces of four scales of a slab."""
        return 128 * 8 // self.format.bits // self.format.group // 4
