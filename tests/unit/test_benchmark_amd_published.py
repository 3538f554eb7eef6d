"""Bars of AMD kernels that nobody ran: what the cost model says of them."""

from __future__ import annotations

import sys

import pytest

from benchmarks import amd_published


def test_every_bar_is_met_by_prediction(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["amd_published", "--bars"])
    with pytest.raises(SystemExit) as end:
        amd_published.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12
    assert not end.value.code, [line for line in lines if not line.endswith("met)")]


def test_a_missed_bar_ends_the_command_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["amd_published", "--bars"])
    monkeypatch.setattr(amd_published, "OVER_LIBRARY", 0.5)
    with pytest.raises(SystemExit) as end:
        amd_published.main()
    assert end.value.code == 1
    assert sum("missed" in line for line in capsys.readouterr().out.splitlines()) == 2
