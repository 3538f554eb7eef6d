"""Blocks of row kernels on CPUs: vectors of a panel of the matrix by rows, as registers hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ladder.ir.row_product import RowProduct
from targets import TileDevice
from tile_types.tile import Extent


@dataclass(frozen=True)
class Registers:
    """The vector registers of a CPU.

    lanes: Elements of float32 in one.
    rows: Vectors of a panel -> rows of a block: registers hold their products, and a row of the panel.
    slower: Vectors of a panel -> time of one vector's products: narrow panels load more per product.
    sums: Registers that are summed side by side where each is read once: enough to hide the latency.
    deepest: Products per element up to which a panel of the matrix stays in the second-level cache.
    most: Products of a convolution, but by Winograd's, up to which what follows, and a short call, outweigh
        that oneDNN multiplies faster; None where it does not.
    """

    lanes: int
    rows: Mapping[int, int]
    slower: Mapping[int, float]
    sums: int
    deepest: int
    most: int | None

    def panel_vectors(self, columns: int) -> int:
        """Return the vectors of a panel of a matrix: so many that least is computed beyond its end."""

        def cost(vectors: int) -> float:
            return -(-columns // (vectors * self.lanes)) * vectors * self.slower[vectors]

        return min(self.rows, key=cost)


WINOGRAD_POINTS = 25
"""Numbers that Winograd's products read of each kernel of 3 x 3: these, and the 16 that they become."""

SERIAL = 1 << 20
"""Products of a kernel below which one thread does all: starting threads costs more."""

LEAST_ROWS = 64
"""Rows of a product below which reading more numbers of the kernels costs what fewer products save."""


def are_few(rows: Extent, weights: Extent, registers: Registers) -> bool:
    """Tell whether a convolution has so few products, or an open number, that oneDNN is not preferred."""
    known = isinstance(rows, int) and isinstance(weights, int)
    return registers.most is None or not known or int(rows) * int(weights) <= registers.most


def takes_winograd(form: RowProduct, registers: Registers) -> bool:
    """Tell whether a convolution is computed by Winograd's products: of 3 x 3, one by one, whole vectors."""
    windows, ones = form.windows, (1, 1)
    if windows is None or windows.groups > 1:
        return False
    if windows.kernel != (3, 3) or windows.stride != ones or windows.dilation != ones:
        return False
    many = not isinstance(form.rows, int) or form.rows >= LEAST_ROWS
    channels = form.depth // windows.points
    return many and channels % registers.lanes == 0 and channels >= 16 and form.columns >= 16


WIDE = Registers(16, {4: 6, 3: 8, 2: 12, 1: 14}, {4: 1.0, 3: 1.0, 2: 1.1, 1: 1.3}, 8, 2304, 12_000_000)
NARROW = Registers(8, {3: 4, 2: 6, 1: 12}, {3: 1.0, 2: 1.0, 1: 1.1}, 12, 4608, None)

REGISTERS: Mapping[frozenset[str], Registers] = {
    frozenset({"avx512f"}): WIDE,
    frozenset({"avx2", "fma"}): NARROW,
}
"""Features that a CPU must have -> its registers: 32 of 16 elements, 16 of 8."""


def registers_of(device: TileDevice | None) -> Registers | None:
    """Return the registers of a CPU; None of a device that row kernels are not written for."""
    if device is None or device.kind != "llvm":
        return None
    return next((found for needs, found in REGISTERS.items() if needs <= device.features), None)
