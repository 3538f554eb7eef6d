"""A sample of randomly altered files: each is one error or a right result; `--long` alters many."""

from __future__ import annotations

import os
from pathlib import Path

import altered_files
import pytest

DAY = int(os.environ.get("LADDER_TEST_DAY", "0"))
SLOW = 20.0
"""Seconds for one file where tests run side by side; the long run takes `altered_files.SECONDS`."""


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["ladder", "onnx"])
def test_a_sample_of_altered_files(kind: str, tmp_path: Path) -> None:
    counts, faults = altered_files.survey(kind, 25, DAY, tmp_path, SLOW)
    assert not faults, "\n".join(faults)
    assert sum(counts.values()) == 25
    assert sum(count for (_, outcome), count in counts.items() if outcome == "error") >= 10


@pytest.mark.slow
@pytest.mark.usefixtures("long_test")
@pytest.mark.parametrize("kind", ["ladder", "onnx"])
def test_many_altered_files(kind: str, tmp_path: Path) -> None:
    _, faults = altered_files.survey(kind, 1000, 0, tmp_path)
    assert not faults, "\n".join(faults)
