"""Calls of plans replayed on CPUs as a GPU replays a CUDA graph: the same memory in each call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ladder.runtime.model.executable import Executable
from ladder.runtime.model.frame import Frame
from ladder.runtime.model.graphs import Replay


class _Graph:
    """Stands for a CUDA graph: runs a plan's steps again, whose results come to lie where they lay."""

    def __init__(self) -> None:
        self.owner: Any = None
        self.given: Sequence[Any] = ()

    def replay(self) -> None:
        """Run the steps with the arguments of the recording, which hold what they hold now."""
        for old, new in zip(self.owner.replayed.results, self.owner.step_by_step(self.given), strict=True):
            if isinstance(old, torch.Tensor) and old is not new:
                old.untyped_storage().copy_(new.untyped_storage())


class _Replay(Replay):
    """A recording on a CPU, of the second call with a set of sizes: the first runs step by step."""

    def run(self, values: Sequence[Any], generation: int) -> list[Any]:
        if self.calls:
            return super().run(values, generation)
        self.calls += 1
        found = self.step_by_step(values)
        self.given = sum(found[at].nbytes for at in self.owner.wanted - self.owner.written.keys())
        return found

    def record(self, values: Sequence[Any], moving: Any) -> None:
        steps = self.step_by_step

        def told(given: Sequence[Any]) -> list[Any]:
            self.given_then = given
            return steps(given)

        self.step_by_step = told
        tensors = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
        before, random = [memory.clone() for memory in tensors], torch.get_rng_state()
        super().record(values, moving)
        for memory, was in zip(tensors, before, strict=True):  # a recording computes nothing
            memory.copy_(was)
        torch.set_rng_state(random)
        self.step_by_step = steps
        if self.graph is not None:
            self.graph.owner, self.graph.given = self, self.given_then


@contextmanager
def _recorded(graph: Any, where: torch.device, **options: Any) -> Iterator[None]:
    yield


def replay_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every plan replay each of its calls but the first."""
    module = "ladder.runtime.model.graphs"
    monkeypatch.setattr(f"{module}.recorded", _recorded)
    monkeypatch.setattr(f"{module}.WARM", 0)
    monkeypatch.setattr(f"{module}.CALLS_PER_RECORDING", 0)
    monkeypatch.setattr("torch.cuda.CUDAGraph", _Graph)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device=None: None)
    monkeypatch.setattr(
        Executable, "_only_reads", property(lambda self: False, lambda self, value: None), raising=False
    )
    monkeypatch.setattr(Frame, "call", _called)


def _called(frame: Frame, values: Sequence[Any], sizes: Any, generation: int = 0) -> list[Any]:
    state = frame.enter(sizes)
    if state.some_empty:
        return frame.steps.run(values)
    state.replay = state.replay or _Replay(frame.steps.run, frame.owner)
    return state.replay.run(values, generation)


def _views(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    v = torch.selu(x)
    return v, v[..., -1], v[1:, ::2]


def _gaps(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.tanh(x)[:, ::2], torch.exp(x).t(), torch.sigmoid(y)[1:]


def _repeated(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x.sum(0, keepdim=True) * 2).expand(3, -1), y.relu()


def _arguments(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x[1:], x.t(), (x * 2 + 1).exp()


def _written(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y.add_(x.mean()).mul_(2)
    z = y.exp()
    return y, z, z.t()


def _bits(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = torch.view_as_real(torch.complex(x, x * 2))
    return z, z.view(torch.int32), z[..., 1]


REPLAYED = {f.__name__[1:]: f for f in (_views, _gaps, _repeated, _arguments, _written, _bits)}
"""Programs whose results share memory or have gaps."""


def lying(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    """Return strides of tensors, and which lie in the memory of which first one."""
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [
        (tensor.dtype, tuple(tensor.shape), tensor.stride(), places.index(place))
        for tensor, place in zip(tensors, places, strict=True)
    ]
