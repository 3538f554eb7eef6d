"""Processes of a benchmark prepare side by side and are timed one after the other."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import models
from benchmarks.turns import READY, take_turns

WORK = """
import sys, time
from pathlib import Path
from benchmarks.turns import wait_for_turn
wait_for_turn()
log = Path(sys.argv[1])
for step in ("begin", "end"):
    with log.open("a") as file:
        file.write(f"{sys.argv[2]} {step}\\n")
    time.sleep(0.05)
"""


def test_turns(tmp_path: Path) -> None:
    log = tmp_path / "log"
    commands = [[sys.executable, "-c", WORK, str(log), name] for name in ("first", "second")]
    commands += [[sys.executable, "-c", "raise SystemExit(1)"]]
    ended: list[int] = []
    root = str(Path(__file__).resolve().parents[2])
    take_turns(commands, os.environ | {"PYTHONPATH": root}, ended.append, patience=60)
    assert log.read_text().split("\n")[:-1] == ["first begin", "first end", "second begin", "second end"]
    assert ended == [0, 1, 2]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (["vit b/16, batch 1"], ["vit b/16, batch 1"]),  # not batch 128, whose name begins so
        (["vit b/16,"], ["vit b/16, batch 1", "vit b/16, batch 128"]),
    ],
)
def test_a_model_that_is_named_runs_alone(asked: list[str], found: list[str]) -> None:
    """Its process waits once for its turn."""
    assert models.models_of(argparse.Namespace(models=asked)) == found


def test_a_process_that_ended_before_its_turn_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may end between the look at it and the word that it may go on."""
    monkeypatch.setattr(subprocess.Popen, "poll", lambda process: time.sleep(0.2))
    ready = [sys.executable, "-c", f"print({READY!r})"]
    seen: list[int] = []
    take_turns([ready, ready], os.environ, seen.append, patience=30)
    assert seen == [0, 1]
