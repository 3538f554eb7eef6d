"""Graphs that the search found, of one and of two kernels, on a GPU."""

from __future__ import annotations

import itertools
import random

import pytest
from found_graphs import FOUND, graphs_of, lowered, operands, require_right, sample

from ladder.ir import evaluate
from ladder.runtime.build import find_or_build
from ladder.runtime.compile import target_of
from ladder.runtime.fused import Fused, Lowering
from targets import get_device

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

EACH = 4
"""Graphs of each program."""


@pytest.fixture(scope="module")
def lowerings():
    """Every program's graphs with their schedules, compiled side by side."""
    device = get_device(target_of(torch.device("cuda")))
    found = {}
    for name in FOUND:
        graphs = [sample(name), *itertools.islice(graphs_of(name, random.Random(name)), EACH - 1)]
        found[name] = [
            Lowering(g, tuple(lowered(n.body, device)[1] for n in g.nodes if n.body is not None))
            for g in graphs
        ]
    find_or_build([job for each in found.values() for lowering in each for job in lowering.jobs(device)])
    return device, found


@pytest.mark.parametrize("name", FOUND)
def test_found_graphs(name: str, lowerings) -> None:
    device, found = lowerings
    for lowering in found[name]:
        _, given, meant = operands(lowering.graph, device)
        run, inputs = Fused.build(lowering, device), [x.to("cuda") for x in given]
        wanted = evaluate(lowering.graph, meant)
        for _ in range(2):
            require_right(name, run(*inputs).cpu(), wanted)
