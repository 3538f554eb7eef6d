"""One wheel holds the four packages, typed, and nothing else."""

from __future__ import annotations

import configparser
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ladder", "tile_types", "schedules", "targets")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    builders = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is in the test extra")
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = builders.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return zipfile.ZipFile(path)


def read(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = (entry for entry in wheel.namelist() if entry.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def test_contents_are_the_four_packages(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)


def test_every_source_file_is_in(wheel: zipfile.ZipFile) -> None:
    packed = set(wheel.namelist())
    sources = {p.relative_to(ROOT).as_posix() for name in PACKAGES for p in (ROOT / name).rglob("*.py")}
    assert sources <= packed


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(wheel: zipfile.ZipFile, package: str) -> None:
    assert f"{package}/py.typed" in wheel.namelist()


def test_metadata(wheel: zipfile.ZipFile) -> None:
    fields = message_from_string(read(wheel, "METADATA"))
    assert fields["Name"] == "ladder-compiler"
    assert fields["Version"] == "0.1.0"
    assert fields["License-Expression"] == "Apache-2.0"
    assert set(fields["Requires-Python"].split(",")) == {">=3.11", "<3.15"}


def test_entry_point_is_the_command_line(wheel: zipfile.ZipFile) -> None:
    points = configparser.ConfigParser()
    points.read_string(read(wheel, "entry_points.txt"))
    assert points["console_scripts"]["ladder"] == "ladder.cli:main"


def test_pins_that_the_project_relies_on() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for pin in ("apache-tvm==0.27.*", "apache-tvm-ffi==0.1.14.post1", "torch>=2.11,<2.16"):
        assert pin in project["dependencies"]
    assert set(project["optional-dependencies"]) == {
        *("test", "bench", "peers", "cuda", "rocm", "sign", "zoo", "dev", "engines")
    }
