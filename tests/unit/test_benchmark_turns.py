"""Processes of a benchmark prepare side by side and are timed one after the other."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.turns import take_turns

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
