"""Registers of accumulator fragments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from schedules.waves import MOST_THREADS
from targets import TileDevice
from tile_types.errors import ScheduleError

ROWS = 16
"""Rows of a fragment."""

SHORT_WAVE = 32


@dataclass(frozen=True)
class FragmentShape:
    """What the lanes of a warp hold of a fragment of 16 rows.

    lanes: Of a warp.
    columns: Of a fragment.
    row_elements: Rows of a fragment that a lane has elements of.
    row_words: Registers that a lane publishes of a value of one column: of NVIDIA's as many as one access of
        another block's shared memory reads.
    through_registers: Whether tiles reach shared memory by way of registers, those of a step during the one
        before.
    named_barriers: Barriers that some warps of a block may wait at while others do not.
    most_threads: Threads of a block.
    """

    lanes: int
    columns: int
    row_elements: int
    row_words: int
    through_registers: bool = False
    named_barriers: int = 0
    most_threads: int = MOST_THREADS

    @property
    def elements(self) -> int:
        """Elements of a lane."""
        return ROWS * self.columns // self.lanes

    @property
    def few_registers(self) -> bool:
        """Whether lanes of AMD's short waves have 256 registers, half as many as of long ones."""
        return self.through_registers and self.lanes == SHORT_WAVE

    @property
    def run(self) -> int:
        """Neighbouring columns of a row that a lane holds."""
        return self.elements // self.row_elements

    def published_bytes(self, columns: int) -> int:
        """Return the bytes of a fragment that a warp publishes, of a value of so many columns."""
        if columns == 1:
            return 4 * self.row_words * ROWS // self.row_elements
        return 4 * ROWS * self.columns


SHAPES: Mapping[str, FragmentShape] = {
    "cp.async": FragmentShape(32, 8, 2, 4, named_barriers=15, most_threads=1024),
    "mfma": FragmentShape(64, 16, 1, 1, True),
    "wmma": FragmentShape(32, 16, 1, 1, True),
    "wmma.split": FragmentShape(32, 16, 1, 1, True),
}
"""Feature that block graphs need of a device -> its fragments: ``mma.m16n8k16``, MFMA and WMMA 16x16x16."""


def shape_of(device: TileDevice) -> FragmentShape:
    """Return the fragments of a device.

    Raises ScheduleError if block graphs are not lowered to it.
    """
    for feature, shape in SHAPES.items():
        if feature in device.features:
            return shape
    raise ScheduleError(f"{device.name} lacks what block graphs need: one of {', '.join(SHAPES)}")


Shape = tuple[int, int]

DEPTH = 16
"""Elements along K of one matrix instruction."""


def hold(value: Expr) -> Expr:
    """Compute a float32 once, into a register."""
    return b.Variable("float32", value).value


def zeros(count: int, value: float = 0.0) -> Any:
    """Return float32 registers that all hold a number."""
    registers = b.local(count, "float32")
    for i in range(count):
        b.store(registers, T.float32(value), i)
    return registers
