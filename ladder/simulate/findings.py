"""What a simulation found wrong, with the statement of the TIR that did it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

KINDS: dict[str, str] = {
    "race": "accesses of the same bytes that nothing orders",
    "out of bounds": "an access outside its tensor or its part of shared memory",
    "misaligned": "an address that is no multiple of what the instruction needs",
    "uninitialised": "a value read that nothing wrote",
    "asynchronous": "a register or byte used while an asynchronous operation owns it",
    "barrier": "a barrier used against its rules",
    "divergence": "a collective instruction that not all threads it needs reach together",
    "deadlock": "warps that wait for ever",
    "proxy": "bytes that cross between generic and asynchronous accesses without a fence",
    "unwritten": "outputs that no thread stored",
}
"""Kinds of findings, and what each means."""


@dataclass(frozen=True)
class Finding:
    """One thing wrong, reported once per statement and reason.

    Parameters
    ----------
    kind
        One of `KINDS`.
    message
        What happened, to which bytes, and by whom.
    statement
        Text of the TIR statement.
    line
        Its line in ``func.script()``; 0 where it has none.
    count
        How often it happened.
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

    Parameters
    ----------
    statements
        The TIR statements by the numbers that closures report.
    function
        The PrimFunc that they belong to.
    """

    def __init__(self, statements: list[Any], function: Any) -> None:
        self.statements, self.function = statements, function
        self._found: dict[tuple[str, int, str], list[Any]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, kind: str, statement: int, message: str, reason: str = "") -> None:
        """Add a finding; ``reason`` tells findings of one statement apart (by default the kind does)."""
        assert kind in KINDS, kind
        entry = self._found.setdefault((kind, statement, reason), [message, 0])
        entry[1] += 1

    def text_of(self, statement: int) -> str:
        """Return a statement on one line, shortened, for use inside of messages."""
        if statement < 0:
            return "nothing"
        text = str(self.statements[statement]).strip().splitlines()
        return _shorten(text[-1].strip() if text else "?")

    def findings(self) -> tuple[Finding, ...]:
        """Return all findings with their lines."""
        return tuple(self._finding(*key, *entry) for key, entry in self._found.items())

    def _finding(self, kind: str, statement: int, _: str, message: str, count: int) -> Finding:
        if statement < 0:
            return Finding(kind, message, count=count)
        line, text = locate(self.function, self.statements[statement])
        return Finding(kind, message, _shorten(text), line, count)


def _shorten(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def locate(function: Any, statement: Any) -> tuple[int, str]:
    """Return the line of ``function.script()`` on which a statement begins, and that line."""
    underlined = function.script(obj_to_underline=[statement]).splitlines()
    marks = [i for i, line in enumerate(underlined) if line.strip() and set(line.strip()) == {"^"}]
    if not marks:
        return 0, str(statement).strip().splitlines()[-1]
    first = marks[0]
    # Lines of marks are no lines of the script, but none comes before the first one.
    return first, underlined[first - 1].strip()


def names_of(kinds: Iterable[str]) -> str:
    """Return kinds as a list in words."""
    return ", ".join(sorted(set(kinds)))
