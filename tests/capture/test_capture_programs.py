"""Every program gives under capture what it gives without; most are captured."""

import importlib

import pytest
from capture_world import PROGRAMS, captured_run, compare

FIRST = ("containers", "objects", "outside", "dynamic")
HOMES = (*FIRST, "errors", "state", "tensors", "language", "iterators", "models")
NAMES: dict[str, list[str]] = {}
for home in HOMES:
    before = set(PROGRAMS)
    importlib.import_module(f"programs_{home}")
    NAMES[home] = [name for name in PROGRAMS if name not in before]


@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_same_as_without_capture(name, repeat):
    expected, found, _ = captured_run(PROGRAMS[name], repeat)
    assert compare(expected, found) == ""


def test_most_programs_are_captured():
    names = [name for home in FIRST for name in NAMES[home]]
    outcomes = {name: captured_run(PROGRAMS[name], 2)[2].outcome for name in names}
    eager = sorted(name for name, outcome in outcomes.items() if outcome not in ("whole", "split"))
    assert len(names) == 66
    assert eager == ["frame_and_inspect"]
    assert sum(outcome == "whole" for outcome in outcomes.values()) >= 44
