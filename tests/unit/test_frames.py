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


def test_what_captures_a_stream_takes_a_frame_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory and constants are there; the capture's own stream runs nothing."""
    fast = ladder.compile(lambda x: torch.softmax(x.sin().sum(0, keepdim=True) * x, -1))
    with torch.no_grad():
        fast(torch.randn(3, 5))
    frames = fast.models[0].executable._frames
    (warm,) = frames
    monkeypatch.setattr(Frames, "_stream", lambda self: 7)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(frames.owner, "where", torch.device("cuda"))
    idle, taken = frames.take()
    assert taken is warm
    idle.append(taken)
    assert frames._idle[0] == [warm]
