"""An error that a simulation found, with the statement of the TIR that caused it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KINDS: dict[str, str] = {
    "race": "accesses of the same bytes that nothing orders",
    "out of bounds": "an access outside its tensor or its part of shared memory",
    "misaligned": "an address that is no multiple of what the instruction needs",
    "uninitialised": "a register or output read that nothing wrote",
    "unwritten bytes": "bytes of shared memory read that nothing wrote",
    "asynchronous": "a register or byte used while an asynchronous operation owns it",
    "barrier": "a barrier used against its rules",
    "divergence": "a collective instruction that not all threads it needs reach together",
    "deadlock": "warps that wait for ever",
    "proxy": "bytes that cross between generic and asynchronous accesses without a fence",
    "unwritten": "outputs that no thread stored",
    "wrong values": "outputs that differ from float64 by more than rounding",
}
"""Kinds of findings, and what each means."""

NOTES = frozenset({"unwritten bytes"})
"""Kinds that are no fault by themselves: kernels may read what they do not use.

Shared memory that nothing wrote holds NaN (-1 as an integer), so it shows in outputs where it is used.
"""

LOCATED = 16
"""Statements whose lines are looked up: one bug may show in hundreds."""


@dataclass(frozen=True)
class Finding:
    """One thing wrong, reported once per statement and reason.

    kind: One of `KINDS`.
    message: What happened, to which bytes, and by whom.
    statement: Text of the TIR statement.
    line: Its line in ``func.script()``; 0 where it has none.
    count: How often it happened.
    """

    kind: str
    message: str
    statement: str = ""
    line: int = 0
    count: int = 1

    def __str__(self) -> str:
        where = f" [line {self.line}: {self.statement}]" if self.statement else ""
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.kind}: {self.message}{where}{times}"


class Log:
    """Collects findings; equal ones of one statement are counted, not repeated.

    statements: The TIR statements by the numbers that closures report.
    function: The PrimFunc that they belong to.
    """

    def __init__(self, statements: list[Any], function: Any) -> None:
        self.statements, self.function = statements, function
        self._found: dict[tuple[str, int, str], _Entry] = {}
        self._lines: dict[int, tuple[int, str]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, kind: str, statement: int, message: str, reason: str = "", other: int = -1) -> None:
        """Add a finding.

        kind: One of `KINDS`.
        statement: Number of the statement, -1 for none.
        message: What happened; ``{other}`` stands for the text of statement ``other``.
        reason: Tells findings of one kind and statement apart.
        other: Number of the other statement that takes part.
        """
        assert kind in KINDS, kind
        entry = self._found.setdefault((kind, statement, reason), _Entry(message, other))
        entry.count += 1

    def place(self, statement: int) -> tuple[int, str]:
        """Return line and text of a statement."""
        if statement < 0:
            return 0, ""
        if statement not in self._lines:
            line, text = locate(self.function, self.statements[statement])
            self._lines[statement] = line, _shorten(text)
        return self._lines[statement]

    def findings(self, notes: bool = False) -> tuple[Finding, ...]:
        """Return all findings, or notes, with their lines."""
        result = []
        for (kind, statement, _), entry in self._found.items():
            if (kind in NOTES) != notes:
                continue
            known = statement in self._lines or len(self._lines) < LOCATED
            line, text = self.place(statement) if known else (0, "")
            message = entry.message
            if entry.other >= 0:
                other_line, other_text = self.place(entry.other) if known else (0, "another statement")
                message = message.replace("{other}", f"line {other_line}: `{other_text}`")
            result.append(Finding(kind, message, text, line, entry.count))
        return tuple(result)


@dataclass
class _Entry:
    """A finding while it is counted."""

    message: str
    other: int
    count: int = 0


def _shorten(text: str, limit: int = 120) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def locate(function: Any, statement: Any) -> tuple[int, str]:
    """Return the line of ``function.script()`` on which a statement begins, and that line.

    The printer marks the statement; it also puts a path and an empty line first. Statements that it
    merges into a declaration have no mark, and line 0.
    """
    lines = function.script(obj_to_underline=[statement]).splitlines()
    start = 2 if lines[0].startswith("Access path") else 0
    marks = [i for i, line in enumerate(lines) if line.strip() and set(line.strip()) == {"^"}]
    if not marks:
        return 0, str(statement).strip().splitlines()[-1]
    return marks[0] - start, lines[marks[0] - 1].strip()
