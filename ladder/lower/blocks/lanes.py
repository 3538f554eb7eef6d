"""Distribution of matrix elements over the lanes of a group of warps.

Block graphs with matrix products follow the matrix instructions (`FragmentLanes`); others give each thread
runs of a row, so that every access is 16 bytes wide (`FlatLanes`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.blocks.dialect import BlockDialect, Combine
from ladder.lower.blocks.fragments import ROWS
from ladder.lower.blocks.geometry import BlockGeometry
from ladder.lower.blocks.shared import CHUNK_ELEMENTS, SharedMemory
from ladder.lower.blocks.threads import Threads


class Lanes(ABC):
    """One way to spread elements."""

    rows: int
    """Rows of a fragment."""
    columns: int
    """Columns of a fragment, over all threads that share it."""
    elements: int
    """Elements of a thread in a fragment."""
    row_elements: int
    """Rows of a fragment that a thread has elements of."""

    def __init__(
        self, threads: Threads, dialect: BlockDialect, shared: SharedMemory, geo: BlockGeometry
    ) -> None:
        self.threads, self.dialect, self.shared, self.geo = threads, dialect, shared, geo

    @property
    def run(self) -> int:
        """Neighbouring columns of a row that a thread has in a fragment."""
        return self.elements // self.row_elements

    def spread(self, row: list[Expr]) -> list[Expr]:
        """Return the elements of a fragment whose columns are all the same."""
        return [x for x in row for _ in range(self.run)]

    def row_of(self, element: int) -> int:
        """Return which of a thread's rows an element of a fragment is of."""
        return element // self.run

    def fold(self, elements: list[Expr], combine: Combine) -> list[Expr]:
        """Combine a thread's elements of each row."""
        runs = [elements[i : i + self.run] for i in range(0, len(elements), self.run)]
        return [_tree(run, combine) for run in runs]

    @abstractmethod
    def join_row(self, name: str, parts: list[Expr], combine: Combine) -> list[Expr]:
        """Combine what the threads have of their rows; all of a row's threads get the result."""

    @abstractmethod
    def position(self, m: int, n: Expr, run: int) -> tuple[Expr, Expr]:
        """Return row and column of the first element of a thread's ``run``-th run of columns."""

    @property
    def runs(self) -> int:
        """Runs of neighbouring columns of a thread in a fragment."""
        return self.row_elements


def _tree(elements: list[Expr], combine: Combine) -> Expr:
    """Combine elements by twos."""
    while len(elements) > 1:
        rest = elements[len(elements) // 2 * 2 :]
        elements = [combine(x, y) for x, y in zip(elements[::2], elements[1::2], strict=False)] + rest
    return elements[0]


class FragmentLanes(Lanes):
    """Fragments of the matrix instructions, see `ladder.lower.blocks.fragments`.

    Lane ``4 g + c`` has columns 2c, 2c+1 of rows g and g + 8 of 16 x 8 (NVIDIA), or lane ``16 g + r`` a run
    of row r of 16 x 16, g being its place along the row (AMD). Beside packed weights columns lie as those of
    their rows that AMD lanes decode (`ladder.lower.rocm.steps`).
    """

    rows = ROWS

    def __init__(
        self, threads: Threads, dialect: BlockDialect, shared: SharedMemory, geo: BlockGeometry
    ) -> None:
        super().__init__(threads, dialect, shared, geo)
        shape = dialect.shape
        self.columns, self.elements, self.row_elements = shape.columns, shape.elements, shape.row_elements
        self.sharers = self.columns // shape.run
        """Lanes that share a row."""
        self.holders = ROWS // self.row_elements
        """Lanes that share a column."""
        self.by_rows = self.row_elements > 1
        """Whether lanes that share a row are neighbours, not those that share a column."""

    @property
    def row(self) -> Expr:
        """The first row that a lane has elements of."""
        lane = self.threads.lane
        return lane // self.sharers if self.by_rows else lane % self.holders

    @property
    def place(self) -> Expr:
        """The lane's place along its rows."""
        lane = self.threads.lane
        return lane % self.sharers if self.by_rows else lane // self.holders

    def join_row(self, name: str, parts: list[Expr], combine: Combine) -> list[Expr]:
        distances = _powers(self.sharers, 1 if self.by_rows else self.holders)
        return [self.dialect.over_lanes(part, combine, distances, self.threads.lane) for part in parts]

    def join_column(self, part: Expr, combine: Combine) -> Expr:
        """Combine what the lanes of a column have; all of them get the result."""
        distances = _powers(self.holders, self.sharers if self.by_rows else 1)
        return self.dialect.over_lanes(part, combine, distances, self.threads.lane)

    def position(self, m: int, n: Expr, run: int) -> tuple[Expr, Expr]:
        row = m * self.rows + self.row + self.holders * run
        return row, self.column(n, self.place * self.run)

    def column(self, n: Expr, place: Expr) -> Expr:
        """Return a column of a fragment; eight of them lie together."""
        if not self.geo.interleaved:
            return n * self.columns + place
        return n // 2 * 32 + place // 8 * 16 + n % 2 * 8 + place % 8

    def chunk(self, n: Expr) -> tuple[Expr, Expr]:
        """Return the chunk of 8 columns that the lane's columns of a fragment lie in, and the byte there."""
        first = self.place * self.run
        if self.columns == CHUNK_ELEMENTS:
            return n, first * 2
        part, within = first // CHUNK_ELEMENTS, first % CHUNK_ELEMENTS * 2
        return (n // 2 * 4 + part * 2 + n % 2 if self.geo.interleaved else n * 2 + part), within


def fragment_lanes(lanes: Lanes) -> FragmentLanes:
    """Return the lanes of a graph with matrix products."""
    assert isinstance(lanes, FragmentLanes)
    return lanes


def _powers(count: int, first: int) -> tuple[int, ...]:
    """Return the distances by which ``count`` lanes combine what they have, ``first`` apart."""
    return tuple(first << i for i in range(count.bit_length() - 1))


class FlatLanes(Lanes):
    """The threads of a group share each row: eight neighbouring columns each."""

    rows, elements, row_elements = 1, 8, 1

    def __init__(
        self, threads: Threads, dialect: BlockDialect, shared: SharedMemory, geo: BlockGeometry
    ) -> None:
        super().__init__(threads, dialect, shared, geo)
        self.columns = threads.plan.row_warps * dialect.shape.lanes * self.elements

    def join_row(self, name: str, parts: list[Expr], combine: Combine) -> list[Expr]:
        threads, dialect, warps = self.threads, self.dialect, self.threads.plan.row_warps
        distances = _powers(dialect.shape.lanes, 1)
        total = dialect.over_lanes(parts[0], combine, distances, threads.lane)
        if warps == 1:
            return [total]
        offset = self.geo.offsets[f"row sums {name}"] + threads.group * (4 * warps)
        base = self.shared.base
        # Lanes hold the same: each may store it, one does.
        with b.when(threads.lane == 0):
            dialect.write(self.shared, base + dialect.address(offset + threads.row_warp * 4), [total])
        dialect.sync_group(threads)
        places = (base + dialect.address(offset + warp * 4) for warp in range(warps))
        sums = [dialect.read(self.shared, place, 1, "float32")[0] for place in places]
        return [b.Variable("float32", _tree(sums, combine)).value]

    def position(self, m: int, n: Expr, run: int) -> tuple[Expr, Expr]:
        thread = self.threads.row_warp * self.dialect.shape.lanes + self.threads.lane
        return m, n * self.columns + thread * self.elements
