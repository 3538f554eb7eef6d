"""Iterations that match become one node of the graph, which computes what they computed."""

import random
import sys

import pytest
import torch
import torch.fx
from torch import nn

from ladder.capture import capture
from ladder.capture.trace.loops import repeat, rolled


def counts(graph):
    """Return how many iterations each loop node of a graph has."""
    return [node.args[1] for node in graph.nodes if node.target is repeat]


def recurrence(x, w):
    for _ in range(20):
        x = torch.tanh(x @ w) + 0.5 * x
    return x


def numbered(x, w):
    kept = []
    for turn in range(6):
        x = (x + turn * 0.25) @ w
        kept.append(x.sum())
    return x, torch.stack(kept), kept[2]


def two_carried(x, w):
    y = x * 0
    for _ in range(5):
        x, y = x + y, (y + w) * x
    return x, y


def writes_in_place(x, w):
    total = torch.zeros(4)
    for row in range(4):
        total[row] = x[row].sum()
        w.mul_(1.5).add_(total)
    return total, w


def while_loop(x, w):
    turns = 0
    while turns < 7:
        x = torch.relu(x) - w
        turns += 1
    return x, turns


def nested(x, w):
    for _ in range(3):
        for _ in range(4):
            x = x + w
        x = x.relu()
    return x


def newton(x, w):
    y = x.abs() + 1
    for _ in range(10):
        y = 0.5 * (y + x.abs() / y)
    return y + w


def shorter_than_a_loop(x, w):
    for _ in range(2):
        x = (x @ w).relu()
    return x


LOOPS = {
    recurrence: [20], numbered: [6], two_carried: [5], writes_in_place: [4], while_loop: [7],
    nested: [3], newton: [10], shorter_than_a_loop: [],
}  # fmt: skip


@pytest.mark.parametrize("program", LOOPS, ids=lambda program: program.__name__)
def test_loops_are_nodes_and_compute_the_same(program):
    captured = capture(program)
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        x, w = torch.randn(4, 4), torch.randn(4, 4) * 0.1
        y, v = x.clone(), w.clone()
        torch.testing.assert_close(captured(x, w), program(y, v), rtol=0, atol=0)
        torch.testing.assert_close((x, w), (y, v), rtol=0, atol=0)
    (graph,) = captured.graphs
    assert counts(graph.graph) == LOOPS[program]
    assert captured.calls == {"recorded": 1, "eager": 0}


def test_layers_with_weights_of_their_own_stay_as_they_are():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    captured = capture(model)
    captured(torch.randn(2, 4))
    assert counts(captured.graphs[0].graph) == []
    shared = nn.Sequential(*[nn.Linear(4, 4)] * 6)
    captured = capture(shared)
    x = torch.randn(2, 4, requires_grad=True)
    (found,), (expected,) = (torch.autograd.grad(f(x).sum(), x) for f in (captured, shared))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert counts(captured.graphs[0].graph) == [6]


def test_a_backend_that_takes_no_loops_gets_all_iterations():
    seen = []
    captured = capture(recurrence, backend=lambda module, _: seen.append(module.graph) or module.forward)
    captured(torch.randn(4, 4), torch.randn(4, 4))
    assert counts(seen[0]) == []
    assert len(seen[0].nodes) > 80


def random_graph(seed):
    """Return a graph in which pieces are repeated, sometimes with one thing changed."""
    chosen = random.Random(seed)
    graph = torch.fx.Graph()
    values = [graph.placeholder(name) for name in "abc"]
    for _ in range(chosen.randint(1, 4)):
        length, state = chosen.randint(1, 4), chosen.getrandbits(30)
        for _ in range(chosen.randint(2, 6)):
            piece = random.Random(state if chosen.random() < 0.95 else chosen.getrandbits(30))
            for _ in range(length):
                function = piece.choice([torch.add, torch.sub, torch.mul])
                # Mostly what was computed just before, sometimes what lies far back.
                back = [-piece.randint(1, min(len(values), piece.choice([2, 4, 9]))) for _ in range(2)]
                fixed = values[piece.randint(0, 2)]
                right = piece.choice([values[back[1]], fixed, 0.5, chosen.random()])
                values.append(graph.call_function(function, (values[back[0]], right)))
    graph.output(tuple(chosen.sample(values, min(len(values), 4))))
    return graph


def test_random_graphs_compute_the_same():
    found = 0
    for seed in range(150):
        graph = random_graph(seed)
        root, made = rolled(graph)
        found += len(counts(made))
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.rand(3, generator=generator, dtype=torch.float64) for _ in range(3)]
        expected = torch.fx.GraphModule(nn.Module(), graph)(*inputs)
        torch.testing.assert_close(
            torch.fx.GraphModule(root, made)(*inputs), expected, rtol=0, atol=0, equal_nan=True
        )
    assert found > 40


def grows(x, count):
    found = {}
    for turn in range(count):
        found[turn] = turn % 7
    return x + len(found)


def adds(x, count):
    for _ in range(count):
        x = x + 1
    return x


@pytest.mark.parametrize("program", [grows, adds])
def test_the_work_of_recording_grows_as_the_loop_does(program):
    def events(count):
        """Return how many functions of Python are called while a loop is recorded."""
        found = [0]

        def note(frame, event, argument):
            found[0] += 1

        fast, x = capture(program), torch.ones(2)
        sys.setprofile(note)
        try:
            fast(x, count)
        finally:
            sys.setprofile(None)
        assert torch.equal(fast(x, count), program(x, count))
        return found[0]

    events(20)
    assert events(480) - events(320) < 2 * (events(160) - events(20))
