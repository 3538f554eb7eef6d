"""Every graph that the search found for its programs is lowered, for each target, and is right.

``golden/superopt_found.json`` holds the structures that `ladder.superopt.generator.search` found at the sizes
of the H200's baselines (attention: of one token of 16 heads), as `dataclasses.asdict` gives them.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ladder.cli.superopt import with_weight
from ladder.ir import Graph, evaluate
from ladder.lower.blocks import BlockSchedule, emitter_for
from ladder.lower.blocks.analysis import gemm_of
from ladder.runtime.fused import Fused, Lowering
from ladder.runtime.packed import pack
from ladder.simulate import simulate_launch
from ladder.superopt.generator import Program, get_program, instantiate
from ladder.superopt.generator.choose import tilings
from ladder.superopt.generator.stored import structure_of
from targets import TileDevice, get_device, host_cpu
from tile_types import quantize
from tile_types.errors import ScheduleError

FOUND = json.loads((Path(__file__).parents[1] / "golden" / "superopt_found.json").read_text("utf-8"))
SMALL = {
    "rmsnorm_matmul": {"B": 16, "K": 256, "N": 128},
    "gated_mlp": {"B": 16, "K": 256, "N": 128},
    "lora": {"B": 16, "K": 64, "N": 128, "R": 16},
    "ntrans": {"B": 2, "D": 1024},
    "gqa": {"H": 2, "M": 16, "D": 64, "S": 256, "E": 16},
    "qknorm_attention": {"H": 2, "M": 16, "D": 64, "S": 256, "E": 16},
}
SCHEDULES = (BlockSchedule(), BlockSchedule(groups=2, row_warps=1), BlockSchedule(row_warps=4))
BOUND = {"qknorm_attention": 4e-3}
"""Largest error against float64, else 6e-4: graphs that round norms to float16 for an outer product."""


@functools.cache
def program_of(name: str) -> Program:
    base, _, weight = name.partition(":")
    return with_weight(get_program(base).resized(**SMALL[base]), weight or "float16", 64)


def graphs_of(name: str, draw: random.Random) -> Iterator[Graph]:
    """Yield, for each structure, its kernel graph at tiles that are drawn."""
    program = program_of(name)
    for value in FOUND[name]:
        structure = structure_of(value)
        packed = bool(program.packed)
        legal = [f for f in tilings(structure.mapping, program) if not packed or f.get("Nt", 64) % 64 == 0]
        yield instantiate(structure, program, draw.choice(legal), packed=packed)


def lowered(body: Graph, device: TileDevice) -> tuple[Any, BlockSchedule]:
    """Return a block graph's kernel by the first schedule that fits; raises what the last one raised."""
    last: Exception = AssertionError
    for schedule in SCHEDULES if device.is_gpu else SCHEDULES[:1]:
        try:
            return emitter_for(device)(body, device, schedule, "k", ()), schedule
        except ScheduleError as error:
            last = error
    raise last


@pytest.mark.parametrize("target", ["cuda/sm_80", "cuda/sm_90a", "cpu"])
@pytest.mark.parametrize("name", FOUND)
def test_everything_found_is_lowered(name: str, target: str) -> None:
    device = host_cpu() if target == "cpu" else get_device(target)
    for graph in graphs_of(name, random.Random(f"{name} {target}")):
        for body in (node.body for node in graph.nodes if node.body is not None):
            lowered(body, device)


def operands(graph: Graph, device: TileDevice) -> tuple[list[list[Any]], list[Any], list[Any]]:
    """Draw inputs; return kernels' arrays of each, arguments of `Fused`, and what `evaluate` takes."""
    import torch

    generator = torch.Generator().manual_seed(0)
    arrays, given, meant = [], [], []
    for node in graph.inputs:
        values = (torch.randn(node.tile.known_shape, generator=generator) * 0.5).half()
        if not node.tile.ttype.is_block:
            arrays.append([values])
            given.append(values)
            meant.append(values)
            continue
        stored = quantize(values, node.tile.ttype)
        weight = pack(gemm_of(node.tile.ttype, node.tile.known_shape, "float16"), device, stored)
        arrays.append(weight.tensors)
        given.append(weight)
        meant.append(stored)
    return arrays, given, meant


def error_of(found: Any, wanted: Any) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - wanted) / np.linalg.norm(wanted))


def sample(name: str) -> Graph:
    """Return one of the graphs found, of two kernels if there are such: they say the most."""
    return max(graphs_of(name, random.Random(name)), key=lambda graph: len(graph.nodes))


@pytest.mark.parametrize("name", FOUND)
def test_a_sample_is_right_on_the_simulator(name: str) -> None:
    graph, device = sample(name), get_device("cuda/sm_90a")
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
    assert error_of(values[graph.outputs[0]][0].reshape(wanted.shape), wanted) <= BOUND.get(name, 6e-4)


@pytest.mark.parametrize("name", FOUND)
def test_a_sample_is_right_on_the_cpu(name: str) -> None:
    graph, device = sample(name), host_cpu()
    _, given, meant = operands(graph, device)
    kernels = sum(node.body is not None for node in graph.nodes)
    run = Fused.build(Lowering(graph, (BlockSchedule(),) * kernels), device)
    assert error_of(run(*given), evaluate(graph, meant)) <= BOUND.get(name, 6e-4)
