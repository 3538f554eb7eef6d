"""Frames as lists of values: what a resume point keeps of them, and makes them of again."""

from __future__ import annotations

from dataclasses import dataclass
from types import CodeType
from typing import Any

from ladder.capture.python.frames import NO_OVERRIDE, Frame


@dataclass(frozen=True)
class Layout:
    """How the values at a point make up one frame."""

    code: CodeType
    index: int
    names: tuple[str, ...]
    depth: int
    override: bool
    handled: int
    namespace: int

    def values(self, frame: Frame) -> list[Any]:
        """Return the values of `frame`, in the order that `restore` takes."""
        override = [frame.override] if self.override else []
        return [
            frame.function,
            *(frame.slots[name] for name in self.names),
            *frame.stack[: self.depth],
            *override,
            *frame.handled,
        ]

    @property
    def size(self) -> int:
        """How many values make up the frame."""
        return 1 + len(self.names) + self.depth + self.override + self.handled

    def restore(self, values: list[Any]) -> Frame:
        frame = Frame(values[0], dict(zip(self.names, values[1:], strict=False)))
        frame.index = self.index
        at = 1 + len(self.names)
        frame.stack = list(values[at : at + self.depth])
        at += self.depth
        frame.override = values[at] if self.override else NO_OVERRIDE
        frame.handled = list(values[at + self.override :])
        return frame
