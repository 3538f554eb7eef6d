"""Where a CUDA graph pays, told from the call before it is recorded."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

from ladder.runtime.model import graphs  # noqa: E402

DEVICE_MS = 2.0
LARGE = 512 << 20
"""Bytes, of which copies take about a tenth of that."""


class Event:
    def __init__(self, enable_timing: bool) -> None:
        self.timed = enable_timing

    def record(self, stream) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end) -> float:
        return DEVICE_MS


@pytest.mark.parametrize(
    ("steps", "copied", "pays"), [(1, LARGE, False), (1, 1 << 20, True), (1000, LARGE, True)]
)
def test_a_host_that_waited_has_no_launches_to_save(monkeypatch, steps: int, copied: int, pays: bool) -> None:
    """One launch takes no two milliseconds: a host that took them waited, as for memory."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: None)
    monkeypatch.setattr(graphs, "target_of", lambda where: "cuda/sm_90a")
    watch = graphs.Stopwatch(torch.device("cuda"), steps)
    with watch:
        time.sleep(DEVICE_MS * 1e-3)
    assert watch.allows(copied) is pays
