"""The pages of measurements name every result file, and no file that does not exist."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FILES = {path.stem for path in (BENCHMARKS / "results").glob("*.json")}
PAGES = {"README.md": 250, "LIMITS.md": 350}
"""Page -> the most lines it may have: newer results replace older ones there."""

WIDTH = 120
"""The most characters of a line that is no row of a table."""


def named(text: str) -> set[str]:
    """Return the result files that a page names, without ``.json``."""
    return set(re.findall(r"`(\w+_\d{4}-\d\d-\d\d)(?:\.json)?`", text))


def rows() -> list[list[str]]:
    """Return the cells of each row of the table of result files."""
    text = (BENCHMARKS / "results" / "README.md").read_text()
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in text.splitlines()
        if line[:3] == "| `"
    ]


def test_every_result_file_is_one_row() -> None:
    assert Counter(row[0].strip("`") for row in rows()) == Counter(FILES)


def test_rows_say_device_commit_and_command() -> None:
    assert [row for row in rows() if len(row) != 4 or not all(row)] == []
    silent = [row[0] for row in rows() if "`" not in row[3] and "command not kept" not in row[3]]
    assert silent == []


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_files_that_exist(page: str) -> None:
    assert named((BENCHMARKS / page).read_text()) <= FILES


@pytest.mark.parametrize(("page", "most"), PAGES.items())
def test_pages_can_be_read(page: str, most: int) -> None:
    lines = (BENCHMARKS / page).read_text().splitlines()
    assert len(lines) <= most
    assert [line for line in lines if len(line) > WIDTH and not line.startswith("|")] == []
