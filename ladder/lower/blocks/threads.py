"""Thread, warp and group indices of a kernel, and the loop steps of each group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.blocks.schedule import BlockSchedule
from tile_types.errors import ScheduleError


class Point:
    """Expressions that are computed already, the step of the loop, and what shared memory holds."""

    def __init__(self) -> None:
        self.step: Expr = None
        """Step of the loop; None outside of it."""
        self.whole = False
        """Whether a warp computes any row of values, not only its own."""
        self.written: set[str] = set()
        """Computed values that are in shared memory."""
        self._frames: list[dict[Any, Any]] = [{}]
        self._alive: list[Any] = []

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return what ``make`` emits, emitted once where it is still valid."""
        hashed = (self.whole, *(self._name(part) for part in key))
        for frame in reversed(self._frames):
            if hashed in frame:
                return frame[hashed]
        self._frames[-1][hashed] = made = make()
        return made

    def _name(self, part: Any) -> Any:
        if isinstance(part, (int, str, tuple, bool)) or part is None or hasattr(part, "pitch"):
            return part
        self._alive.append(part)  # so that no other expression gets its identity
        return ("expression", id(part))

    def register(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Expr:
        """Return a uint32 that depends on the thread alone, computed once into a register."""
        return self.once(("kept", *key), lambda: b.Variable("uint32", make()).value)

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Enter a loop or branch: what is computed in it is not valid after it."""
        self._frames.append({})
        yield
        self._frames.pop()

    @contextmanager
    def whole_rows(self) -> Iterator[None]:
        """Let a warp compute any row of values, not only its own."""
        self.whole, saved = True, self.whole
        yield
        self.whole = saved

    def require_written(self, name: str) -> None:
        """Raise unless a value that passes through shared memory is there.

        Raises ScheduleError: Otherwise: its stage comes later.
        """
        if name not in self.written:
            raise ScheduleError(f"%{name} is used before it is in shared memory")


@dataclass(frozen=True)
class Threads:
    """Indices of a thread, as expressions.

    block: Number of the block within the grid; the blocks of a cluster have the same.
    rank: Of the block within its cluster.
    thread, warp: Within the block.
    lane: Within the warp.
    group: Group of warps within the block.
    group_thread: Thread within the group.
    row_warp, column_warp: Place of the warp among those that split rows, and columns.
    worker: Number of the group among all that share the loop.
    iterations: Steps of the loop that the group takes.
    """

    plan: BlockSchedule
    block: Expr
    rank: Expr
    thread: Expr
    warp: Expr
    lane: Expr
    group: Expr
    group_thread: Expr
    row_warp: Expr
    column_warp: Expr
    worker: Expr
    iterations: Expr

    def own_step(self, iteration: Expr) -> Expr:
        """Return the step of the loop that the thread's group takes in an iteration."""
        return self.worker + iteration * self.plan.sharers
