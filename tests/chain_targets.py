"""One chain on every target: compiled and run for CPUs, simulated for GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ladder.ir import Graph
from ladder.lower.chain import emit_chain
from ladder.runtime.build import find_or_build, load_entry
from ladder.runtime.compile import target_of
from ladder.runtime.model.chains import chain_job
from ladder.simulate import simulate_launch
from targets import get_device

TARGETS = ("cpu", "cuda/sm_90a", "rocm/gfx942")

TORCH = {
    **{name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64")},
    **{name: getattr(torch, name) for name in ("int64", "int32", "int16", "uint16", "int8", "uint8", "bool")},
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Type -> torch's."""


def run_chain(graph: Graph, arguments: Sequence[torch.Tensor], target: str) -> list[torch.Tensor]:
    """Return the results of a chain of known extents."""
    run = _on_cpu if target == "cpu" else _simulated
    return run(graph, arguments, target)


def _on_cpu(graph: Graph, arguments: Sequence[torch.Tensor], target: str) -> list[torch.Tensor]:
    (kernel,) = find_or_build([chain_job(graph, get_device(target_of(torch.device("cpu"))))])
    tiles = [graph.tile(value) for value in graph.outputs]
    results = [torch.full(tile.known_shape, 77).to(TORCH[tile.ttype.name]) for tile in tiles]
    load_entry(kernel, "cpu")(*arguments, *results)
    return results


def _simulated(graph: Graph, arguments: Sequence[torch.Tensor], target: str) -> list[torch.Tensor]:
    device = get_device(target)
    inputs = [_array(tensor) for tensor in arguments]
    tiles = [graph.tile(value) for value in graph.outputs]
    results = [_array(torch.full(tile.known_shape or (1,), 77).to(TORCH[tile.ttype.name])) for tile in tiles]
    places = tuple(range(len(inputs), len(inputs) + len(results)))
    found = simulate_launch(
        emit_chain(graph, device, "chain"),
        [*inputs, *results],
        outputs=places,
        target=device,
    )
    assert not found.findings, found.report()
    return [
        _tensor(value, tile.ttype.name).reshape(tile.known_shape)
        for value, tile in zip(results, tiles, strict=True)
    ]


WITHOUT_NUMPY = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}
"""torch's types that numpy lacks -> one of their size, and that of ml_dtypes."""


def _array(tensor: torch.Tensor) -> Any:
    """Return a tensor as the simulator takes it; a number has one axis."""
    held = tensor.contiguous().reshape(tensor.shape or (1,))
    bits, kind = WITHOUT_NUMPY.get(held.dtype, (held.dtype, None))
    array = held.view(bits).numpy().copy()
    return array if kind is None else array.view(kind)


def _tensor(array: Any, name: str) -> torch.Tensor:
    if TORCH[name] not in WITHOUT_NUMPY:
        return torch.from_numpy(np.ascontiguousarray(array))
    bits = np.int16 if name == "bfloat16" else np.uint8
    return torch.from_numpy(array.view(bits)).view(TORCH[name])
