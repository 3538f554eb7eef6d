"""Distribution of matrix elements over the lanes of a group of warps.

Block graphs with matrix products follow the matrix instructions (`FragmentLanes`); others give each thread
runs of a row, so that every access is 16 bytes wide (`FlatLanes`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.blocks.schedule import WARP
from ladder.lower.blocks.threads import Threads

Expr = Any
Combine = Callable[[Expr, Expr], Expr]

EVERY_LANE = 0xFFFFFFFF


def over_lanes(value: Expr, combine: Combine, distances: Sequence[int]) -> Expr:
    """Combine a float32 with those of lanes at distances (powers of two); all of them get the result."""
    total = b.Variable("float32", value)
    for distance in distances:
        other = T.tvm_warp_shuffle_xor(T.uint32(EVERY_LANE), total.value, distance, WARP, WARP)
        total.set(combine(total.value, other))
    return total.value


class Lanes(ABC):
    """One way to spread elements.

    threads: Indices of a thread.
    """

    rows: int
    """Rows of a fragment."""
    columns: int
    """Columns of a fragment, over all threads that share it."""
    elements: int
    """Elements of a thread in a fragment."""
    row_elements: int
    """Rows of a fragment that a thread has elements of."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads

    @abstractmethod
    def spread(self, row: list[Expr]) -> list[Expr]:
        """Return the elements of a fragment whose columns are all the same."""

    @abstractmethod
    def fold(self, elements: list[Expr], combine: Combine) -> list[Expr]:
        """Combine a thread's elements of each row."""

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


class FragmentLanes(Lanes):
    """Accumulators of ``mma.m16n8k16``: lane ``4 g + c`` has columns 2c, 2c+1 of rows g and g + 8."""

    rows, columns, elements, row_elements = 16, 8, 4, 2

    def spread(self, row: list[Expr]) -> list[Expr]:
        return [row[0], row[0], row[1], row[1]]

    def fold(self, elements: list[Expr], combine: Combine) -> list[Expr]:
        return [combine(elements[0], elements[1]), combine(elements[2], elements[3])]

    def join_row(self, name: str, parts: list[Expr], combine: Combine) -> list[Expr]:
        return [over_lanes(part, combine, (1, 2)) for part in parts]

    def position(self, m: int, n: Expr, run: int) -> tuple[Expr, Expr]:
        lane = self.threads.lane
        return m * self.rows + lane // 4 + 8 * run, n * self.columns + lane % 4 * 2


class FlatLanes(Lanes):
    """The threads of a group share each row: eight neighbouring columns each.

    base, offsets: Shared address of the first byte, and where the warps' sums of rows lie.
    """

    rows, elements, row_elements = 1, 8, 1

    def __init__(self, threads: Threads, base: Expr, offsets: Mapping[str, int]) -> None:
        super().__init__(threads)
        self.base, self.offsets = base, offsets
        self.columns = threads.plan.row_warps * WARP * self.elements

    def spread(self, row: list[Expr]) -> list[Expr]:
        return row * self.elements

    def fold(self, elements: list[Expr], combine: Combine) -> list[Expr]:
        while len(elements) > 1:
            elements = [combine(x, y) for x, y in zip(elements[::2], elements[1::2], strict=True)]
        return elements

    def join_row(self, name: str, parts: list[Expr], combine: Combine) -> list[Expr]:
        total = over_lanes(parts[0], combine, (16, 8, 4, 2, 1))
        threads, warps = self.threads, self.threads.plan.row_warps
        if warps == 1:
            return [total]
        offset = self.offsets[f"row sums {name}"] + threads.group * (4 * warps)
        place = self.base + T.Cast("uint32", offset + threads.row_warp * 4)
        # Lanes hold the same: each may store it, one does.
        with b.when(threads.lane == 0):
            b.ptx("st.shared.f32", place, total)
        threads.sync_group()
        parts = b.local(warps, "float32")
        for warp in range(warps):
            b.ptx("ld.shared.f32", parts[warp], self.base + T.Cast("uint32", offset + warp * 4))
        sums = [parts[warp] for warp in range(warps)]
        while len(sums) > 1:
            rest = sums[len(sums) // 2 * 2 :]
            sums = [combine(x, y) for x, y in zip(sums[::2], sums[1::2], strict=False)] + rest
        return [b.Variable("float32", sums[0]).value]

    def position(self, m: int, n: Expr, run: int) -> tuple[Expr, Expr]:
        thread = self.threads.row_warp * WARP + self.threads.lane
        return m, n * self.columns + thread * self.elements
