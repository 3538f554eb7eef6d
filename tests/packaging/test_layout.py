"""The shape of the tree: what lies at the top, and limits that keep files readable."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TOP = {"pyproject.toml", "README.md", "ladder", "tile_types", "schedules", "targets", "tests", "benchmarks"}
BUILT = {"build", "dist", "venv", "__pycache__"}
CODE = ("ladder", "tile_types", "schedules", "targets", "benchmarks", "tests")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60
MORE_IN_TESTS = 100, 20
MAX_LATE_ATTRIBUTES = 20

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


def limits(path: Path) -> tuple[int, int]:
    """Return the most lines of a file and of a function; tests hold tables of programs."""
    more = MORE_IN_TESTS if path.relative_to(ROOT).parts[0] == "tests" else (0, 0)
    return MAX_FILE_LINES + more[0], MAX_FUNCTION_LINES + more[1]


def test_files_are_short() -> None:
    long = [str(p.relative_to(ROOT)) for p in sources() if len(p.read_text().splitlines()) > limits(p)[0]]
    assert long == []


class Facts(NamedTuple):
    """What is looked at in a source file: described, or lines and names."""

    documented: bool
    functions: list[tuple[int, str, int]]
    late: list[str]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements under a node, at any depth; expressions, most of a tree, are not gone through."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, field, ()):
            yield inner
            yield from statements(inner)


@cache
def facts(path: Path) -> Facts:
    tree = ast.parse(path.read_text())
    functions, late = [], []
    for node in statements(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions.append((node.lineno, node.name, (node.end_lineno or 0) - node.lineno + 1))
        elif isinstance(node, ast.ClassDef):
            late += [f"{node.name}.{name}" for name in sorted(late_attributes(node))]
    return Facts(bool(ast.get_docstring(tree)), functions, late)


def test_functions_are_short() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sources()
        for line, name, count in facts(path).functions
        if count > limits(path)[1]
    ]
    assert long == []


def assigned(tree: ast.AST) -> set[str]:
    """Return the attributes of `self` that code assigns."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def late_attributes(kind: ast.ClassDef) -> set[str]:
    """Return what a class declares neither in its body nor in its constructor."""
    body = [node for node in kind.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    fields = {name.id for node in body for name in ast.walk(node) if isinstance(name, ast.Name)}
    methods = [node for node in kind.body if isinstance(node, ast.FunctionDef)]
    made = [method for method in methods if method.name in ("__init__", "__post_init__")]
    early = fields.union(*map(assigned, made))
    return set().union(*map(assigned, methods)) - early


def test_attributes_are_made_by_constructors() -> None:
    late = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources()
        if path.relative_to(ROOT).parts[0] not in ("tests", "benchmarks")
        for name in facts(path).late
    ]
    assert len(late) <= MAX_LATE_ATTRIBUTES, late


def test_every_package_says_what_it_is() -> None:
    packages = [path for path in sources() if path.name == "__init__.py" and "tests" not in path.parts]
    assert [str(p.relative_to(ROOT)) for p in packages if not facts(p).documented] == []


def test_no_registry_and_no_machine_path_is_named() -> None:
    named = [
        f"{path.relative_to(ROOT)}: {match[0].strip()}"
        for path in texts()
        for pattern in (REGISTRY, MACHINE_PATH)
        for match in pattern.finditer(path.read_text())
    ]
    assert named == []
