"""Graphs that the search found for its programs, for tests of their kernels.

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

from ladder.ir import Graph
from ladder.lower.blocks import BlockSchedule, emitter_for
from ladder.lower.blocks.analysis import gemm_of
from ladder.runtime.packed import pack
from ladder.superopt.generator import Program, get_program, instantiate
from ladder.superopt.generator.choose import tilings
from ladder.superopt.generator.stored import structure_of
from targets import TileDevice
from tile_types import quantize
from tile_types.errors import ScheduleError

FOUND = json.loads((Path(__file__).parent / "golden" / "superopt_found.json").read_text("utf-8"))
SMALL = {
    "rmsnorm_matmul": {"B": 16, "K": 256, "N": 128},
    "gated_mlp": {"B": 16, "K": 256, "N": 128},
    "lora": {"B": 16, "K": 64, "N": 128, "R": 16},
    "ntrans": {"B": 2, "D": 1024},
    "gqa": {"H": 2, "M": 16, "D": 64, "S": 256, "E": 16},
    "qknorm_attention": {"H": 2, "M": 16, "D": 64, "S": 256, "E": 16},
}
SCHEDULES = (BlockSchedule(), BlockSchedule(groups=2, row_warps=1), BlockSchedule(row_warps=4))
ROUNDED = {"qknorm_attention": 4e-3}
"""Largest error against float64, else `BOUND`: graphs that round norms to float16 for an outer product."""
BOUND = 6e-4


@functools.cache
def program_of(name: str) -> Program:
    base, _, weight = name.partition(":")
    program = get_program(base).resized(**SMALL[base])
    return program.with_weights(f"{weight}_g64") if weight else program


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


def require_right(name: str, found: Any, wanted: Any) -> None:
    """Fail unless a result is within the bound of its program."""
    error = float(np.linalg.norm(np.asarray(found, np.float64) - wanted) / np.linalg.norm(wanted))
    assert error <= ROUNDED.get(name, BOUND)


def sample(name: str) -> Graph:
    """Return one of the graphs found, of two kernels if there are such: they say the most."""
    return max(graphs_of(name, random.Random(name)), key=lambda graph: len(graph.nodes))
