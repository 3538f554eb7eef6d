"""Base class of transforms: a frozen value with one printed line, a rewriting, and the checks beside it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from ladder.ir.program import TileProgram
from targets import TileDevice
from tile_types.errors import ScheduleError


@dataclass(frozen=True)
class Transform:
    """One step of a schedule; ``str()`` gives the line that `parse_transform` reads back."""

    form: ClassVar[str] = ""
    """The line, with a field's name in braces for its value."""

    def __str__(self) -> str:
        return self.form.format(**{item.name: getattr(self, item.name) for item in fields(self)})

    def apply(self, program: TileProgram, device: TileDevice) -> TileProgram:
        """Return the rewritten program.

        Raises ScheduleError if it may not be applied; the message begins with the transform.
        """
        raise NotImplementedError

    def check(self, condition: bool, message: str) -> None:
        """Refuse unless ``condition`` holds."""
        if not condition:
            raise ScheduleError(f"{self}: {message}")
