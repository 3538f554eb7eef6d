"""Programs by definition on their kernels: random inputs, their meaning in float64, smaller sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ladder.ir import evaluate
from ladder.runtime.fused import Lowering
from ladder.runtime.trials import Trial
from ladder.superopt.generator import Program, instantiate
from ladder.superopt.generator.instantiate import at_factors
from tile_types.library import get_type

if TYPE_CHECKING:
    import torch

SCALE = 0.5
"""Standard deviation of random inputs."""


def draw_inputs(program: Program, where: torch.device | str = "cpu", seed: int = 0) -> list[Any]:
    """Return random inputs of a program: tensors, and quantized matrices where weights are packed."""
    import torch

    import ladder

    generator = torch.Generator().manual_seed(seed)
    found: list[Any] = []
    for node in program.graph().inputs:
        values = torch.randn(node.tile.known_shape, generator=generator) * SCALE
        if node.name not in program.packed:
            found.append(values.to(getattr(torch, node.tile.ttype.name)).to(where))
            continue
        ttype = get_type(program.packed[node.name])
        options = {"group_size": ttype.block_size, "scale_type": ttype.metadata[0].ttype}
        found.append(ladder.quantize(values.to(where), ttype.element_type.name, **options))
    return found


def meaning_of(program: Program) -> Callable[..., Any]:
    """Return the program as a function of float tensors, computed in float64 operator by operator."""
    import torch

    graph = program.graph()

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        exact = evaluate(graph, [x.double().cpu().numpy() for x in tensors])
        return torch.from_numpy(np.ascontiguousarray(exact)).to(tensors[0].device)

    return function


def resized(trial: Trial, program: Program, factors: Mapping[str, int]) -> tuple[Lowering, Program]:
    """Return a trial's kernels at other factors, with the same schedules, and the program at these sizes."""
    structure, small = at_factors(trial.found.structure, program, factors)
    graph = instantiate(structure, small, factors, packed=True)
    return Lowering(graph, trial.lowering.schedules, trial.lowering.constants), small
