"""Frames of an executable: one for each call at a time, and none that another stream may still work with."""

import pytest
import torch

import ladder
from ladder.runtime.model.frame import Frames


@torch.no_grad()
def test_a_stream_has_frames_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1]
    monkeypatch.setattr(Frames, "_stream", lambda self: now[0])
    fast = ladder.compile(lambda x: torch.softmax(x.sin().sum(0, keepdim=True) * x, -1))
    x = torch.randn(3, 5)
    fast(x)
    (model,) = fast.models
    frames = model.executable._frames
    (first,) = frames
    for stream in (1, 2, 1, 2):
        now[0] = stream
        fast(x)
    one, two = frames
    assert one is first
    assert two is not first
    now[0] = 1
    idle, taken = frames.take()
    assert taken is first
    idle.append(taken)


@torch.no_grad()
def test_what_a_program_records_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two graphs of a program may be replayed side by side, and after the plan's own memory was replaced."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.sin() @ torch.arange(25, dtype=x.dtype).view(5, 5).cos(), -1)

    fast = ladder.compile(program)
    for _ in range(2):
        fast(torch.randn(3, 5))
    frames = fast.models[0].executable._frames
    (warm,) = frames
    monkeypatch.setattr(type(frames.owner), "is_recorded", lambda self: True)
    (idle, one), (_, two) = frames.take(), frames.take()
    assert len({id(frame) for frame in (warm, one, two)}) == 3
    assert not idle
    assert [*frames] == [warm]
    made = [*map(id, frames.owner.constants.values())]
    assert made
    assert all({*made} <= {*map(id, frame.memory.slots)} for frame in (warm, one, two))
