"""Fused programs on the simulator: their kernels one after the other, against float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ladder.simulate.findings import Finding
from ladder.simulate.launch import SimulationResult, calls_of, simulate_launch
from tile_types.quantized import QuantizedTensor

if TYPE_CHECKING:
    import torch

    from ladder.ir.graph import Graph
    from ladder.runtime.fused import Lowering
    from targets import TileDevice


@dataclass(frozen=True)
class FusedResult:
    """Results of the launches of a program.

    launches: Of its kernels, in order.
    outputs: The program's results.
    """

    launches: tuple[SimulationResult, ...]
    outputs: tuple[Any, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Everything that was wrong; empty for correct kernels."""
        return tuple(finding for launch in self.launches for finding in launch.findings)

    def report(self) -> str:
        return "\n".join(launch.report() for launch in self.launches)

    def relative_error(self, expected: Any) -> float:
        """Return the Frobenius norm of the first result's error over that of what was expected."""
        found = self.outputs[0].astype(np.float64)
        return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def simulate_fused(
    lowering: Lowering, device: TileDevice, inputs: Sequence[Any], **options: Any
) -> FusedResult:
    """Execute all kernels of a program on the CPU, lane by lane.

    lowering: Kernels and schedules.
    device: A GPU to emit for.
    inputs: torch tensors on the CPU, quantized matrices where weights are packed.
    **options: Of `simulate_launch`.
    Raises DeviceError if the device is no GPU that block graphs are lowered to.
    """
    from ladder.lower.blocks import emitter_for
    from ladder.runtime.fused import constants_of

    calls_of(device)
    emit = emitter_for(device)
    graph = lowering.graph
    values = {
        node.name: _arrays(lowering, device, number, given)
        for number, (node, given) in enumerate(zip(graph.inputs, inputs, strict=True))
    }
    launches = []
    for node, plan in zip(lowering.blocks, lowering.schedules, strict=True):
        assert node.body is not None
        results = [np.full(tile.known_shape, np.nan, native(tile.ttype.name)) for tile in node.tiles]
        arrays = [array for name in node.inputs for array in values[name]] + results
        launches.append(
            simulate_launch(
                emit(node.body, device, plan, "simulated", constants_of(node, lowering.constants)),
                [array.reshape(-1) for array in arrays],
                outputs=tuple(range(-len(results), 0)),
                target=device,
                **options,
            )
        )
        values.update({name: [result] for name, result in zip(node.values, results, strict=True)})
    return FusedResult(tuple(launches), tuple(values[output][0] for output in graph.outputs))


def _arrays(lowering: Lowering, device: TileDevice, number: int, given: Any) -> list[Any]:
    """Return an input as kernels declare it: packed words are unsigned."""
    quantized = isinstance(given, QuantizedTensor)
    tensors = lowering.packed(number, given, device).tensors if quantized else [given]
    arrays = [_numpy(x) for x in tensors]
    return [array.view(np.uint32) if array.dtype == np.int32 else array for array in arrays]


def _numpy(x: torch.Tensor) -> Any:
    """Return a tensor as an array; ml_dtypes has the bfloat16 that numpy lacks."""
    import torch

    if x.dtype != torch.bfloat16:
        return x.numpy()
    return x.view(torch.int16).numpy().view(native("bfloat16"))


def native(name: str) -> Any:
    """Return numpy's type of a float."""
    return np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)


def smaller(graph: Graph, schedules: Sequence[Any], factors: Mapping[str, int]) -> dict[str, int]:
    """Return factors with the same tiles, two blocks along each dimension and two rounds of each loop.

    graph, schedules: Kernels and how they are lowered: a round is a step of each group of warps.
    factors: Number by name; those of the graph's grids and loops may become smaller.
    """
    blocks = [node.body for node in graph.nodes if node.body is not None]
    found = dict(factors)
    for body in blocks:
        found.update({axis.name: min(factors[axis.name], 2) for axis in body.grid})
    for body, plan in zip(blocks, schedules, strict=True):
        found.update({axis.name: min(factors[axis.name], 2 * plan.sharers) for axis in body.loops})
    return found
