"""What the README says is what the project does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ladder.cli import tables
from ladder.cli.app import command_names

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
OWN = ("ladder", "tile_types", "targets", "schedules", "benchmarks", "tests")
PAGES = {".": README} | {
    path.parent.relative_to(ROOT).as_posix(): path.read_text()
    for folder in OWN
    for path in sorted((ROOT / folder).rglob("README.md"))
}
"""Folder -> its README."""

BLOCKS = {
    folder: re.findall(r"<!-- test: (\w+) -->\n```python\n(.*?)```", text, re.DOTALL)
    for folder, text in PAGES.items()
}
MOST_LINES = 200


def run_blocks(*blocks: str) -> None:
    """Run code blocks in one fresh process: they register types."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "\n".join(blocks)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def blocks(kind: str, folder: str = ".") -> list[str]:
    return [code for name, code in BLOCKS[folder] if name == kind]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


def test_every_python_block_is_tested() -> None:
    assert {at: len(found) for at, found in BLOCKS.items()} == {
        at: text.count("```python") for at, text in PAGES.items()
    }


def test_links_lead_somewhere() -> None:
    for folder, text in PAGES.items():
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (ROOT / folder / link).exists(), f"{folder}: {link}"


@pytest.mark.costly
@pytest.mark.parametrize("folder", [folder for folder in BLOCKS if blocks("cpu", folder)])
def test_examples_run_on_the_cpu(folder: str) -> None:
    run_blocks(*blocks("cpu", folder))


@pytest.mark.costly
@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not on PATH; see `ladder doctor`")
def test_new_type_compiles_for_a_gpu() -> None:
    (new_type,) = (code for code in blocks("cpu") if "register_type" in code)
    (compile_it,) = blocks("cuda")
    run_blocks(new_type, compile_it)


def test_new_type_takes_about_ten_lines() -> None:
    (new_type,) = (code for code in blocks("cpu") if "register_type" in code)
    assert sum(1 for line in new_type.splitlines() if line.strip()) <= 12


@pytest.mark.parametrize(
    ("folder", "name", "table"),
    [("tile_types", "types", tables.type_markdown), ("targets", "devices", tables.device_markdown)],
)
def test_support_tables_come_from_the_tables(folder: str, name: str, table: object) -> None:
    match = re.search(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", PAGES[folder], re.DOTALL)
    assert match is not None
    assert match[1].strip() == table(), f"run `python -m benchmarks.support_table` to write the {name} table"


def test_every_command_is_listed() -> None:
    listed = set(re.findall(r"^\| `ladder ([\w-]+)` \|", README, re.MULTILINE))
    assert listed == set(command_names())


def test_every_dependency_is_justified() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {}
    for requirement in project["dependencies"]:
        name, constraint = re.fullmatch(r"([\w-]+)(.*)", requirement).groups()
        pinned[name] = re.sub(r"^==", "", constraint).replace("*", r"\*").replace(",", ", ")
    rows = dict(re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|", README, re.MULTILINE))
    shown = {name: re.sub(r"([<≥]) ", r"\1", rows[name]).replace("≥", ">=").strip() for name in pinned}
    assert shown == pinned


@pytest.mark.parametrize("path", re.findall(r"^\| `([\w/]+/)`", README, re.MULTILINE))
def test_every_folder_that_is_described_exists(path: str) -> None:
    assert (ROOT / path).is_dir()


@pytest.mark.parametrize("marker", ["setup", "test"])
def test_ci_runs_the_readme(marker: str) -> None:
    assert f"<!-- ci: {marker} -->\n```bash\n" in README
    assert f"run_readme {marker}" in (ROOT / ".ci" / "run").read_text()
