"""The list of faults, a copy of the tree, and the planting of one fault in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).parent / "faults"


@dataclass(frozen=True)
class Fault:
    """A small wrong change.

    Parameters
    ----------
    area
        What it concerns: the name of its list.
    file
        Path within the tree.
    old, new
        Text that stands once in the file, and what replaces it.
    says
        What is wrong afterwards.
    tests
        What pytest is given first: the smallest set that should fail.
    wider
        What it is given if those pass: the tests of the area.
    """

    area: str
    file: str
    old: str
    new: str
    says: str
    tests: tuple[str, ...]
    wider: tuple[str, ...]

    def planted(self, text: str) -> str:
        """Return a file's text with the fault; raises ValueError unless its place is there once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: {self.old!r} is there {text.count(self.old)} times, not once")
        return text.replace(self.old, self.new)


def read_faults() -> list[Fault]:
    """Return all faults, in the order of the lists' names."""
    found = []
    for path in sorted(FAULTS.glob("*.toml")):
        held = tomllib.loads(path.read_text(encoding="utf-8"))
        for row in held["fault"]:
            tests = tuple(row.pop("tests", held.get("tests", ())))
            found.append(Fault(path.stem, **row, tests=tests, wider=tuple(held["wider"])))
    return found


def copy_tree(to: Path) -> None:
    """Copy what git tracks, and new files that it does not ignore."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


@contextmanager
def planted(fault: Fault, tree: Path, stamp: int) -> Iterator[None]:
    """Have a fault in a copy of the tree.

    ``stamp`` is the time of change that the file gets, in seconds: another one for each fault, since
    bytecode is taken for a source's by time and size.
    """
    path = tree / fault.file
    text, before = path.read_text(encoding="utf-8"), path.stat()
    path.write_text(fault.planted(text), encoding="utf-8")
    os.utime(path, (stamp, stamp))
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
