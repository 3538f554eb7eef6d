"""How a segment ends: the last lines of its record, and what is raised through frames that end there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ladder.capture.heap.heap import Heap
from ladder.capture.python.tracebacks import again
from ladder.capture.records import ResumePoint


class Leaving(BaseException):
    """Raised through interpreted frames, which end there and see nothing of it."""


@dataclass
class GraphBreak:
    """The end of a segment with a call that is made natively, and the resume points that follow it.

    `failure`: where the call raises. `call`: its text. `roots`: texts of the values of the frames `places`.
    `why`, `where`: the reason, and the lines of all frames, the innermost last.
    """

    point: ResumePoint
    failure: ResumePoint
    call: str
    roots: list[str]
    uses: set[str]
    places: list[Any]
    why: str = ""
    where: tuple[str, ...] = ()


@dataclass
class Ending:
    """The last lines of a record, and the variables that they use.

    `returned`: the variables that a side of a branch takes from its graph; `depth`: how many conditionals
    are inside one another; `branches`: the resume points whose other side, once known, makes the record
    stale; `returns`: the program ends there without an exception.
    """

    lines: list[str]
    uses: set[str]
    depth: int = 0
    returned: list[str] = field(default_factory=list)
    branches: set[ResumePoint] = field(default_factory=set)
    returns: bool = False


def return_ending(heap: Heap, result: Any) -> Ending:
    """Return the end of a segment with which the program returns `result`."""
    uses: set[str] = set()
    return Ending([f"return (None, {heap.reference(result, uses)})"], uses, returns=True)


def raise_ending(heap: Heap, error: BaseException) -> Ending:
    """Return the end of a segment with which the program raises `error`."""
    uses: set[str] = set()
    return Ending([f"{heap.constant(again)}({heap.reference(error, uses)})"], uses)


def break_ending(heap: Heap, graph_break: GraphBreak) -> Ending:
    """Return the end of a segment with a call that is made natively."""
    roots = "".join(f"{text}, " for text in graph_break.roots)
    point, failure = heap.constant(graph_break.point), heap.constant(graph_break.failure)
    lines = [
        "try:",
        f"    result = {graph_break.call}",
        "except Exception as error:",
        f"    return ({failure}, ({roots}error,))",
        f"return ({point}, ({roots}result,))",
    ]
    return Ending(lines, graph_break.uses, branches={graph_break.point} if graph_break.point.forks else set())
