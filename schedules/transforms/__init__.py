"""The transforms of which schedules are lists: each rewrites a tile program and says when it may.

A schedule is applied in order. Every transform acts on the *innermost piece*: what the slices before it have
left as the body of the innermost loop. So the order of slices is the order of loops, and a tile is placed,
converted and mapped at the loop that its transform follows. All leave the program's result as it is.
Source: Ladder (OSDI 2024), section 4.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from ladder.ir.program import Layout, TileProgram
from schedules.transforms.base import Transform
from schedules.transforms.extents import Pad, Slice
from schedules.transforms.tiles import Convert, Map, Place
from schedules.transforms.use import Use
from targets import TileDevice
from tile_types.errors import ParseError

__all__ = [
    "TRANSFORMS",
    "Convert",
    "Map",
    "Pad",
    "Place",
    "Slice",
    "Transform",
    "Use",
    "apply_all",
    "parse_transform",
]

TRANSFORMS: Mapping[str, type[Transform]] = {
    "slice": Slice,
    "map": Map,
    "pad": Pad,
    "convert": Convert,
    "place": Place,
    "use": Use,
}
"""The transforms by the words with which their lines begin."""

_LINES: tuple[tuple[str, Callable[..., Transform]], ...] = (
    (r"slice (\w+) by (\d+) over (\w+)", lambda axis, step, over: Slice(axis, int(step), over)),
    (r"map (\w+) to (\w+)\((\d+(?:, \d+)*|)\)", lambda tile, name, of: Map(tile, Layout(name, _numbers(of)))),
    (r"pad w\.(\w+) to (\d+) with 0", lambda axis, multiple: Pad(axis, int(multiple))),
    (r"convert (\w+) to (\w+) by (\w+)", Convert),
    (r"place (\w+) in (\w+)(?: by ([\w ]+))?", lambda tile, level, by: Place(tile, level, by or "")),
    (r"use (\w+) for (\w+)", Use),
)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(", "))) if text else ()


def parse_transform(line: str) -> Transform:
    """Read back what ``str(transform)`` printed.

    Raises ParseError if the line is no transform.
    """
    for pattern, make in _LINES:
        found = re.fullmatch(pattern, line.strip())
        if found:
            return make(*found.groups())
    raise ParseError(f"not a transform: {line.strip()!r}; lines begin with {', '.join(TRANSFORMS)}")


def apply_all(program: TileProgram, transforms: Sequence[Transform], device: TileDevice) -> TileProgram:
    """Apply a schedule to a block graph; returns the tile program.

    Raises ScheduleError if a transform may not be applied; the message begins with it.
    """
    for transform in transforms:
        transform.check(not program.product[0].by, "the instruction is chosen already; it comes last")
        program = transform.apply(program, device)
    return program
