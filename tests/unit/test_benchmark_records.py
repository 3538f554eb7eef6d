"""Results of benchmarks name the commit that was measured."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import harness

FOLDER = Path(harness.__file__).parent

NO_RESULTS = {
    "checkpoints.py": "a checkpoint's configuration",
    "choices.py": "the problems that another machine compiles",
    "convolutions.py": "the candidates that another machine compiles",
    "model_loading.py": "a checkpoint's configuration",
    "gpu_tune.py": "the database of schedules that ships",
    "forked.py": "what a model's process tells the one that started it",
}
"""Benchmark -> what it also writes as JSON that is no result."""


def written(report: dict, folder: Path) -> dict:
    harness.write_record(folder / "result.json", report)
    return json.loads((folder / "result.json").read_text())


def test_records_name_the_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    head = "0123456789abcdef0123456789abcdef01234567"

    def git(words: list[str], **rest: object) -> subprocess.CompletedProcess:
        return subprocess.CompletedProcess(words, 0, head if "rev-parse" in words else changes, "")

    monkeypatch.setattr(harness.subprocess, "run", git)
    changes = ""
    assert written({"rows": [{"us": 1.23456}]}, tmp_path) == {"commit": head, "rows": [{"us": 1.235}]}
    changes = " M ladder/x.py"
    assert written({"found": {}}, tmp_path)["commit"] == f"{head} with changes"
    assert written({"environment": {"commit": "other"}}, tmp_path) == {"environment": {"commit": "other"}}


def test_outside_of_a_checkout_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        harness.subprocess, "run", lambda words, **rest: subprocess.CompletedProcess(words, 128, "", "no")
    )
    assert written({"found": 1}, tmp_path)["commit"] == "unknown: no git checkout"


def test_every_benchmark_writes_its_results_as_records() -> None:
    writes = re.compile(r"\.write_text\(\s*(json\.dumps|compact)\(|json\.dump\(|write_json\(")
    found = {path.name for path in FOLDER.glob("*.py") if writes.search(path.read_text())}
    assert found == {*NO_RESULTS}
