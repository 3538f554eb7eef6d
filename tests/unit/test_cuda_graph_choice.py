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
    ("steps", "copied", "copies", "pays"),
    [
        (2, LARGE, 0, False),
        (2, 1 << 20, 0, True),
        (1000, LARGE, 2, True),
        (3, 64, 2, False),
        (4, 64, 2, True),
    ],
)
def test_a_host_that_waited_has_no_launches_to_save(
    monkeypatch, steps: int, copied: int, copies: int, pays: bool
) -> None:
    """One launch takes no two milliseconds: a host that took them waited, as for memory."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: None)
    monkeypatch.setattr(graphs, "target_of", lambda where: "cuda/sm_90a")
    watch = graphs.Stopwatch(torch.device("cuda"), steps)
    with watch:
        time.sleep(DEVICE_MS * 1e-3)
    assert watch.allows(copied, copies) is pays


def test_small_tensors_are_copied_by_one_launch() -> None:
    small, large = torch.zeros(graphs.MOST_LISTED), torch.zeros(graphs.MOST_LISTED + 1)
    assert [graphs._launches(group) for group in ([], [small] * 3, [large] * 3, [small, large, small])] == [
        0, 1, 3, 2
    ]  # fmt: skip
    replayed = graphs.Replayed([small, large, small + 1, large + 1], [0, 1, 2, 3])
    assert [places for places, _ in replayed.listed] == [[0, 2]]
    assert [at for at, _ in replayed.alone] == [1, 3]
    for found, made in zip(replayed.of([]), replayed.results, strict=True):
        assert torch.equal(found, made)
        assert found.data_ptr() != made.data_ptr()
