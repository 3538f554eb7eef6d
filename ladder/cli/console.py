"""Output of commands: tables and JSON on stdout, logs, errors and progress on stderr."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

OK, FAILED, USAGE = 0, 1, 2
"""Exit codes: done, failed, the request itself was wrong."""

PIPE_WIDTH = 400
"""Columns of a table that no terminal limits, so that no cell is cut or wrapped."""


class Progress(Protocol):
    """Tells the progress display what is being done."""

    def __call__(self, description: str, done: float | None = None) -> None:
        """Show ``description``; ``done`` is the fraction finished, None if unknown."""


def print_json(value: Any) -> None:
    """Print one JSON object on stdout."""
    print(json.dumps(value, indent=2, allow_nan=False))


def show(found: Any, as_json: bool, plain: Callable[[], object]) -> None:
    """Print what a command found as one JSON object, or as `plain` prints it for people."""
    print_json(found) if as_json else plain()


def finite(value: float | None) -> float | None:
    """Return a number as JSON can hold it: None for what is none."""
    return value if value is not None and math.isfinite(value) else None


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Print an aligned table on stdout, as wide as it needs to be in a pipe."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title or None, box=None, pad_edge=False, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, markup=False, highlight=False)
    with console.capture() as text:  # printed by rich itself, a reader that left would be an error
        console.print(table)
    print(text.get(), end="")


def print_fields(fields: Mapping[str, str]) -> None:
    """Print ``name  value`` lines on stdout."""
    width = max(map(len, fields))
    for name, value in fields.items():
        print(f"{name:<{width}}  {value}".replace("\n", "\n" + " " * (width + 2)))


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as GitHub-flavoured markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, *rows)]
    lines.insert(1, "|" + "---|" * len(columns))
    return "\n".join(lines)


def log_to_stderr(verbose: bool) -> None:
    """Send Ladder's log to stderr: warnings as a line each, or every step if ``verbose``."""
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("ladder").setLevel(level)
    warnings.showwarning = _show_warning


def _show_warning(message: Warning | str, category: type[Warning], *place: Any, **rest: Any) -> None:
    """Print a warning of Ladder's as one line, others as Python does."""
    from ladder.faults import LadderWarning

    if issubclass(category, LadderWarning):
        print(f"ladder: warning: {message}", file=sys.stderr)
    else:
        _python_shows(message, category, *place, **rest)


_python_shows = warnings.showwarning


def silent(description: str, done: float | None = None) -> None:
    """Show nothing: a `Progress` for callers that want no display."""


@contextmanager
def progress() -> Iterator[Progress]:
    """Show what long work is doing, with a bar, on an interactive stderr; stay silent elsewhere."""
    if not (sys.stderr.isatty() and not os.environ.get("CI")):
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as display:
        task = display.add_task("", total=None)

        def step(description: str, done: float | None = None) -> None:
            total = None if done is None else 1.0
            display.update(task, description=description, total=total, completed=done or 0.0)

        yield step


def error(message: str) -> None:
    """Print one line on stderr."""
    print(f"ladder: error: {message}", file=sys.stderr)
