"""Every graph that the search found for its programs is lowered, for each target, and is right."""

from __future__ import annotations

import random

import numpy as np
import pytest
from found_graphs import FOUND, graphs_of, lowered, operands, require_right, sample

from ladder.ir import Graph, evaluate
from ladder.lower.blocks import BlockSchedule
from ladder.runtime.fused import Fused, Lowering
from ladder.simulate import simulate_launch
from targets import get_device, host_cpu


@pytest.mark.parametrize("target", ["cuda/sm_80", "cuda/sm_90a", "cpu"])
@pytest.mark.parametrize("name", FOUND)
def test_everything_found_is_lowered(name: str, target: str) -> None:
    device = host_cpu() if target == "cpu" else get_device(target)
    for graph in graphs_of(name, random.Random(f"{name} {target}")):
        for body in (node.body for node in graph.nodes if node.body is not None):
            lowered(body, device)


@pytest.mark.parametrize("name", FOUND)
def test_everything_found_is_right_on_the_simulator(name: str) -> None:
    for graph in graphs_of(name, random.Random(f"{name} simulated")):
        require_right_when_simulated(name, graph)


def require_right_when_simulated(name: str, graph: Graph) -> None:
    device = get_device("cuda/sm_90a")
    arrays, _, meant = operands(graph, device)
    values = {
        node.name: [array.contiguous().view(-1).numpy() for array in own]
        for node, own in zip(graph.inputs, arrays, strict=True)
    }
    for node in (node for node in graph.nodes if node.body is not None):
        function, _ = lowered(node.body, device)
        outs = [np.full(tile.known_shape, np.nan, tile.ttype.name) for tile in node.tiles]
        taken = [array for value in node.inputs for array in values[value]]
        flat = [array.view(np.uint32) if array.dtype == np.int32 else array for array in taken]
        flat += [out.reshape(-1) for out in outs]
        result = simulate_launch(function, flat, outputs=tuple(range(-len(outs), 0)))
        assert not result.findings, result.report()
        values.update({value: [out.reshape(-1)] for value, out in zip(node.values, outs, strict=True)})
    wanted = evaluate(graph, meant)
    require_right(name, values[graph.outputs[0]][0].reshape(wanted.shape), wanted)


@pytest.mark.parametrize("name", FOUND)
def test_a_sample_is_right_on_the_cpu(name: str) -> None:
    graph, device = sample(name), host_cpu()
    _, given, meant = operands(graph, device)
    kernels = sum(node.body is not None for node in graph.nodes)
    run = Fused.build(Lowering(graph, (BlockSchedule(),) * kernels), device)
    require_right(name, run(*given), evaluate(graph, meant))
