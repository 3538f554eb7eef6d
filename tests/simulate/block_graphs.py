"""Runs kernels of block graphs on the simulator, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.superopt_graphs import (
    Case,
    _Block,
    attention,
    gated_mlp,
    lora,
    norm_transition,
    rmsnorm_matmul,
    split_attention,
)
from ladder.ir import GraphBuilder
from ladder.lower.blocks import BlockSchedule
from ladder.lower.blocks.kernel import emit
from ladder.simulate import SimulationResult, simulate_launch
from targets import get_device

__all__ = [
    "Case", "add_then_multiply", "attention", "doubled_product", "gated_mlp", "greatest_product", "lora",
    "norm_transition", "require_quantized", "rmsnorm_matmul", "run", "run_kernels", "run_quantized",
    "split_attention",
]  # fmt: skip


BOUND = {"float16": 5e-4, "bfloat16": 4e-3}
"""Type of results -> relative error that they may have."""


def add_then_multiply(tokens: int, k: int, rank: int, n: int) -> Case:
    """X · (W + A · C): a computed second operand, which passes through shared memory."""
    g = GraphBuilder("merged_lora")
    shapes = {"x": (tokens, k), "w": (k, n), "a": (k, rank), "c": (rank, n)}
    inputs = [g.input(name.upper(), "float16", shape) for name, shape in shapes.items()]
    b = GraphBuilder("block", "block")
    x, w, a, c = (
        b.add("load", b.input(name, "float16", shape), shape=shape) for name, shape in shapes.items()
    )
    both = b.add("add", b.add("convert", w, type="float32"), b.add("matmul", a, c, type="float32"))
    y = b.add("matmul", x, b.add("convert", both, type="float16"), type="float32")
    body = b.finish(b.add("store", b.add("convert", y, type="float16"), shape=(tokens, n)))
    return Case(g.finish(*g.nest(body, *inputs)), lambda x, w, a, c: x @ (w + a @ c))


def greatest_product(tokens: int, k: int, n: int, nt: int, kt: int) -> Case:
    """The greatest of the products of parts of K."""
    g = _Block("greatest_product", {"Ng": n // nt}, {"Kl": k // kt})
    x = g.load("x", (tokens, k), (tokens, kt), (-1,), 1)
    y = g.b.add("accumulate", g.weight("w", n, k, nt, kt, "float16")(x), kind="max")

    def expected(x: Any, w: Any) -> Any:
        parts = [x[:, at : at + kt] @ w[at : at + kt] for at in range(0, k, kt)]
        return np.maximum.reduce(parts)

    return Case(g.finish(y, (tokens, n), (1,)), expected)


def doubled_product(tokens: int, k: int, n: int, nt: int, kt: int, weight: str) -> Case:
    """Twice x, times a weight: the first operand is computed."""
    g = _Block("doubled_product", {"Ng": n // nt}, {"Kl": k // kt})
    x = g.load("x", (tokens, k), (tokens, kt), (-1,), 1)
    twice = g.b.add("convert", g.b.add("add", x, x), type="float16")
    y = g.b.add("accumulate", g.weight("w", n, k, nt, kt, weight)(twice))
    return Case(g.finish(y, (tokens, n), (1,)), lambda x, w: 2 * x @ w)


def run(case: Case, schedule: BlockSchedule, **options: Any) -> tuple[SimulationResult, float]:
    """Simulate a kernel; return what was found and the relative error against float64."""
    device, constants = get_device(options.pop("arch", "sm_90a")), options.pop("constants", ())
    function = emit(case.block, device, schedule, "simulated", constants)
    options["target"] = device
    generator = np.random.default_rng(0)
    arrays = [
        (generator.standard_normal(node.tile.known_shape) * 0.5).astype(_numpy(node.tile.ttype.name))
        for node in case.graph.inputs
    ]
    return _simulated(case, function, arrays, arrays, options)


def run_kernels(case: Case, schedule: BlockSchedule, **options: Any) -> tuple[list[SimulationResult], float]:
    """Simulate all kernels of a graph, one after the other, the first with the schedule; as `run`."""
    generator, values, results = np.random.default_rng(0), {}, []
    for node in case.graph.inputs:
        drawn = generator.standard_normal(node.tile.known_shape) * 0.5
        values[node.name] = drawn.astype(_numpy(node.tile.ttype.name))
    meant = [array.astype(np.float64) for array in values.values()]
    for node in (node for node in case.graph.nodes if node.body is not None):
        outs = [np.full(tile.known_shape, np.nan, _numpy(tile.ttype.name)) for tile in node.tiles]
        plan = BlockSchedule() if results else schedule
        function = emit(node.body, get_device("cuda/sm_90a"), plan, "simulated")
        flat = [array.reshape(-1) for array in (*(values[name] for name in node.inputs), *outs)]
        results.append(simulate_launch(function, flat, outputs=tuple(range(-len(outs), 0)), **options))
        values.update(zip(node.values, outs, strict=True))
    wanted = case.meaning(*meant)
    found = values[case.graph.outputs[0]].astype(np.float64)
    return results, float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def run_quantized(case: Case, schedule: BlockSchedule, **options: Any) -> tuple[SimulationResult, float]:
    """Simulate a kernel some of whose inputs are quantized weights; as `run`."""
    import torch

    device, constants = get_device(options.pop("arch", "sm_90a")), options.pop("constants", ())
    function = emit(case.block, device, schedule, "simulated", constants)
    options["target"] = device
    generator = torch.Generator().manual_seed(0)
    arrays, meant = [], []
    for node in case.graph.inputs:
        values = torch.randn(node.tile.known_shape, generator=generator) * 0.2
        given, exact = (
            _packed(node.tile, values, device) if node.tile.ttype.is_block else ([values.half()],) * 2
        )
        arrays += [array.contiguous().view(-1).numpy() for array in given]
        meant.append(exact[0].double().numpy())
    arrays = [array.view(np.uint32) if array.dtype == np.int32 else array for array in arrays]
    return _simulated(case, function, arrays, meant, options)


def _packed(tile: Any, values: Any, device: Any) -> tuple[list[Any], list[Any]]:
    """Return the packed arrays of a quantized weight, and what it stands for as ``[K, N]``."""
    from ladder.lower.blocks.analysis import gemm_of
    from ladder.runtime.packed import pack
    from tile_types import quantize

    ttype = tile.ttype
    stored = quantize(values, ttype)
    packed = pack(gemm_of(ttype, tile.known_shape, "float16"), device, stored)
    return list(packed.tensors), [stored.dequantize().t()]


def require_quantized(case: Case, schedule: BlockSchedule, **options: Any) -> None:
    """Simulate a kernel as `run_quantized`: nothing is found, and the error is one that rounding explains."""
    result, error = run_quantized(case, schedule, **options)
    assert not result.findings, result.report()
    assert error <= BOUND["float16"], f"error {error:.1e}"


def _simulated(case: Case, function: Any, arrays: Any, meant: Any, options: Any) -> Any:
    out = case.graph.tile(case.graph.outputs[0])
    y = np.full(out.known_shape, np.nan, _numpy(out.ttype.name))
    result = simulate_launch(function, [array.reshape(-1) for array in (*arrays, y)], **options)
    wanted = case.meaning(*(array.astype(np.float64) for array in meant))
    error = np.linalg.norm(y.astype(np.float64) - wanted) / np.linalg.norm(wanted)
    return result, float(error)


def _numpy(name: str) -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)
