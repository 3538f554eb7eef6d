"""Text that says what was captured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ladder.capture.conditionals import described

if TYPE_CHECKING:
    from ladder.capture.sites import Captured, Record


def explain(captured: Captured) -> str:
    """Return, for each record, its place, guard, operators and end."""
    name = getattr(captured.function, "__qualname__", type(captured.function).__qualname__)
    lines = [f"{name}: {captured.outcome}; calls: {captured.calls}"]
    if captured.given_up:
        lines.append(f"  runs without capture: {captured.given_up}")
    for site in (*captured.entries.values(), *captured.sites.values()):
        where = " > ".join(f"{layout.code.co_name}:{layout.index}" for layout in site.layouts) or "entry"
        for record in site.records:
            lines.append(f"  record at {where}")
            lines += [f"    {text}" for text in _record_lines(record)]
        lines += [f"  {where}: not recorded: {why}" for why in site.failures]
        lines += [f"  {where}: lifted {path}" for path in sorted(site.lifted)]
    return "\n".join(lines)


def _record_lines(record: Record) -> list[str]:
    lines = [f"guard: {check.why}" for check in record.checks if check.binds is None]
    inside = f", {record.depth} conditionals inside one another" if record.depth else ""
    lines.append(f"graph: {record.operators} operators{inside}")
    lines += [f"conditional: {text}" for text in described(record.graph)]
    lines.append(f"ends: split, {record.split}" if record.split else "ends: returns")
    return lines
