"""The shape of the tree: what lies at the top, and limits that keep files readable."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOP = {"pyproject.toml", "README.md", "ladder", "tile_types", "schedules", "targets", "tests", "benchmarks"}
BUILT = {"build", "dist", "venv", "__pycache__"}
CODE = ("ladder", "tile_types", "schedules", "targets", "benchmarks", "tests")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 80

REGISTRY = re.compile(r"\bpypi" + r"\.org|files\.pythonhosted|download\.pytorch" + r"\.org", re.IGNORECASE)
MACHINE_PATH = re.compile(r"[\"'\s=(]/(?:root|home|work|opt|Users)" + r"/\w+")


def sources() -> Iterator[Path]:
    for folder in CODE:
        yield from (ROOT / folder).rglob("*.py")


def texts() -> Iterator[Path]:
    yield from sources()
    yield from (path for path in ROOT.iterdir() if path.name in ("README.md", "pyproject.toml"))
    yield ROOT / ".ci" / "run"


def test_top_level_is_fixed() -> None:
    found = {
        p.name for p in ROOT.iterdir() if not p.name.startswith(".") and not p.name.endswith(".egg-info")
    }
    assert found - BUILT == TOP


def test_files_are_short() -> None:
    long = [str(p.relative_to(ROOT)) for p in sources() if len(p.read_text().splitlines()) > MAX_FILE_LINES]
    assert long == []


def test_functions_are_short() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds) and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert long == []


def test_every_package_says_what_it_is() -> None:
    packages = [path for path in sources() if path.name == "__init__.py" and "tests" not in path.parts]
    silent = [str(p.relative_to(ROOT)) for p in packages if not ast.get_docstring(ast.parse(p.read_text()))]
    assert silent == []


def test_no_registry_and_no_machine_path_is_named() -> None:
    named = [
        f"{path.relative_to(ROOT)}: {match[0].strip()}"
        for path in texts()
        for pattern in (REGISTRY, MACHINE_PATH)
        for match in pattern.finditer(path.read_text())
    ]
    assert named == []
