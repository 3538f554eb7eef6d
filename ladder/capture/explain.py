"""Text that says what was captured: on one screen, or with every condition of every guard."""

from __future__ import annotations

from collections import Counter

from ladder.capture.heap.nodes import Check
from ladder.capture.python.frames import user_line
from ladder.capture.records import Record, ResumePoint, Store
from ladder.capture.trace.conditionals import described

MOST_LINES = 8
"""Most lines of one kind that the short form prints."""


def explain(store: Store, *, guards: bool = False) -> str:
    """Return graphs, graph breaks, guards by kind and seconds; with ``guards`` every condition too."""
    name = getattr(store.function, "__qualname__", type(store.function).__qualname__)
    (recorded, eager, seconds), records = store.totals(), store.records
    lines = [
        f"{name}: {store.outcome}; {len(store.graphs)} graphs in {len(records)} records;"
        f" calls: {recorded} recorded, {eager} eager; {seconds:.1f} s recording and compiling"
    ]
    if store.given_up:
        lines.append(f"  runs without capture: {store.given_up}")
    for point in store.all_points():
        lines += _point_lines(point, guards)
    return "\n".join([*lines, *(f"  {line}" for line in store.where_it_ran())])


def _point_lines(point: ResumePoint, guards: bool) -> list[str]:
    """Return what is known at one place where recording begins."""
    where, lines = point.place(), []
    for record in point.records:
        lines.append(f"  record from {where}: {_summary(record)}")
        lines += [f"    guard: {check.why}" for check in record.checks if guards and check.binds is None]
        lines += [f"    conditional: {text}" for text in described(record.graph)]
        if record.split:
            lines.append(f"    graph break at {user_line(record.where)}: {record.split}")
    lines += [f"  not recorded: {why}" for why in _few(point.failures)]
    return [*lines, *(f"  left open: {path}" for path in _few(sorted(point.lifted)))]


def _few(items: list[str]) -> list[str]:
    hidden = len(items) - MOST_LINES + 1
    return items if hidden <= 1 else [*items[: MOST_LINES - 1], f"and {hidden} more"]


def _summary(record: Record) -> str:
    inside = f", {record.depth} conditionals inside one another" if record.depth else ""
    counts = Counter[str]()
    for check in record.checks:
        if check.binds is None:
            counts[kind_of(check)] += count_of(check)
    guards = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    return f"{record.operators} operators{inside}; guards on {guards or 'nothing'}"


def kind_of(check: Check) -> str:
    """Return what a condition of a guard is about."""
    if check.why.startswith(METADATA):
        return "tensors"
    if check.holds or check.text == "True":
        return "objects"
    return "types" if check.text.startswith("type(") else "values"


def count_of(check: Check) -> int:
    """Return how many conditions a line of the guard stands for."""
    if not check.why.startswith(METADATA):
        return 1
    return int(check.why.removeprefix(METADATA).partition(" ")[0])


METADATA = "metadata of "
"""How the line begins that stands for the metadata of several tensors."""
