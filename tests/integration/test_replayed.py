"""Results of replayed calls lie as eager's do: strides, and what shares memory with what."""

import pytest
import torch

import ladder
from tests.replayed import REPLAYED, lying, replay_calls
from tests.replayed_programs import PROGRAMS, differences


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    replay_calls(monkeypatch)


@pytest.mark.parametrize("way", ["ladder", "torch"])
@pytest.mark.parametrize("name", REPLAYED)
@pytest.mark.parametrize("gap", [1, 2])
@torch.no_grad()
def test_results_lie_as_in_eager(replayed: None, name: str, gap: int, way: str) -> None:
    program = REPLAYED[name]
    torch._dynamo.reset()
    fast = ladder.compile(program) if way == "ladder" else torch.compile(program, backend="ladder")
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        x, y = (torch.randn(n, 6 * gap, generator=generator)[:, ::gap] for n in (4, 3))
        own, wanted = y.clone(), program(x, y)
        y.copy_(own)
        found = fast(x, y)
        again = program(x, own)
        torch.testing.assert_close(found, again, rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(y, own)
        assert lying((x, y, *found)) == lying((x, y, *wanted))


@pytest.mark.parametrize("name", PROGRAMS)
@torch.no_grad()
def test_calls_are_as_in_eager(replayed: None, name: str) -> None:
    assert not differences(name, "cpu")


@pytest.mark.parametrize("most", [1 << 20, 300])
@torch.no_grad()
def test_graphs_for_one_of_many_sizes_hold_little(
    replayed: None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results count as arguments do: there may be as many graphs as sizes."""
    monkeypatch.setattr("ladder.runtime.model.graphs.COPIED", most)
    fast = ladder.compile(lambda x: torch.softmax(x.tanh() @ x.t(), -1))
    for rows in (3, 5, 9, 9, 9):
        fast(torch.randn(rows, 4))
    (*_, last) = (model.executable for model in fast.models)
    assert last.bound.names
    (frame,) = last._frames
    replay = frame.states[frame.memory.sizes].replay
    assert replay is not None
    assert (replay.graph is None) == (most == 300) == ("many sizes" in replay.refused)
