"""``ladder gemm``: compile one product, run it, compare it with float64, time it beside torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from ladder.api.lowered import Lowered
from ladder.api.matmul import Matmul
from ladder.cli.amd_gpu import with_run
from ladder.cli.check import simulated_check, token_check
from ladder.cli.comparison import checked, compiled_report
from ladder.cli.console import Progress, silent
from ladder.cli.experts import run_experts
from ladder.cli.measure import Call, ceiling, copies_for, side_by_side
from ladder.cli.operands import Operands, make_operands
from ladder.cli.problem import Problem, why_not_here
from ladder.cli.report import GemmReport
from ladder.ir.gemm import Gemm
from ladder.runtime.packed import PackedWeight
from targets import TileDevice
from tile_types import QuantizedTensor
from tile_types.arrays import torch_dtype
from tile_types.errors import ParseError

SIXTEEN_BIT = ("float16", "bfloat16", "float32")
INT4_PACK_GROUPS = (32, 64, 128, 256)
"""Group sizes that torch's int4 kernel takes."""

INNER_K_TILES = 2
INT4_OFFSET = 8
"""torch's int4 kernel computes (code - 8) * scale + zero with unsigned codes."""


def torch_baselines(gemm: Gemm, operands: Operands, device: TileDevice) -> dict[str, list[Call]]:
    """Return calls by name, each on weights that together exceed the cache.

    The linear layer has the decoded weight in the activation's type, bfloat16 if that has 8 bits.
    """
    return dict(_baselines(gemm, operands, device))


def _baselines(gemm: Gemm, operands: Operands, device: TileDevice) -> Iterator[tuple[str, list[Call]]]:
    name = gemm.activation if gemm.activation in SIXTEEN_BIT else "bfloat16"
    x = operands.x.to(torch_dtype(name))
    weight = _dense(operands.weight).to(device=x.device, dtype=x.dtype)
    weights = [weight.clone() for _ in range(copies_for(weight.nbytes, device))]
    yield f"{name} F.linear", [partial(torch.nn.functional.linear, x, copy) for copy in weights]
    if _int4_applies(gemm, device):
        yield "_weight_int4pack_mm_for_cpu", _int4_calls(x, operands.weight, device)


def _dense(weight: QuantizedTensor) -> torch.Tensor:
    return torch.as_tensor(weight.dequantize("float32"))


def _int4_applies(gemm: Gemm, device: TileDevice) -> bool:
    fits = gemm.weight == "int4" and gemm.zero == "none" and gemm.activation == "bfloat16"
    shaped = gemm.group_size in INT4_PACK_GROUPS and gemm.k % gemm.group_size == 0 and gemm.n % 16 == 0
    known = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
    return fits and shaped and known and not device.is_gpu


def _int4_calls(x: torch.Tensor, weight: QuantizedTensor, device: TileDevice) -> list[Call]:
    aten = torch.ops.aten
    codes = torch.as_tensor(weight.codes()).to(torch.int32)
    packed = aten._convert_weight_to_int4pack_for_cpu((codes + INT4_OFFSET) % 16, INNER_K_TILES)
    scale = torch.as_tensor(weight.scale).T.to(x.dtype)
    scales = torch.stack([scale, torch.zeros_like(scale)], dim=-1).contiguous()
    group = min(weight.group_size, weight.shape[1])
    return [
        partial(aten._weight_int4pack_mm_for_cpu, x, packed.clone(), group, scales)
        for _ in range(copies_for(packed.nbytes, device))
    ]


def run_gemm(
    problem: Problem,
    *,
    check: bool = True,
    timed: bool = True,
    simulated: bool = True,
    step: Progress = silent,
) -> GemmReport:
    """Compile a product and, where its target is here, run, check and time it.

    problem: What to multiply, and for which target.
    check: Whether to compare with float64; for a GPU also to look at its code.
    timed: Whether to time it; but on AMD GPUs beside torch.
    simulated: Whether a check of a GPU's kernel also simulates it on the CPU.
    step: Called with what is being done.
    Raises LadderError if the problem cannot be, or a compiler is missing or fails.
    """
    if problem.masked and not problem.experts:
        raise ParseError("--masked says how the tokens of experts lie: give --experts too")
    if problem.experts:
        return run_experts(problem, check=check, step=step)
    step(f"compiling for {problem.device.name}")
    operator, reason = problem.operator(), why_not_here(problem.device)
    lowered, start = operator.lower(problem.device), time.perf_counter()
    if reason or problem.device.kind == "rocm":  # only the kernel that serves this M is of interest
        lowered = lowered.serving(problem.m)
    report = compiled_report(problem, lowered, start)
    if check and problem.device.is_gpu:
        step(f"looking at the code{' and simulating the kernel' if simulated else ''}")
        report = with_evidence(report, problem, lowered, simulated)
    if reason:
        done = "compiled and simulated, but not timed" if report.simulated else "compiled, but not run"
        return replace(report, not_run=f"{reason}; the kernel was {done}")
    step("drawing and packing operands")
    operands = make_operands(problem, operator.gemm)
    if problem.device.kind == "rocm":
        step("running on the GPU")
        packed = operator.pack(operands.weight)
        return with_run(report, lowered, operands, packed, check=check, timed=timed)
    place = "cuda" if problem.device.is_gpu else "cpu"
    packed, operands = operator.pack(operands.weight, place), operands.to(place)
    if check:
        step("computing the exact result in float64")
        report = checked(report, operands, operator.gemm, multiply(operator, operands, packed))
    if timed and problem.m:
        step("timing beside torch")
        report = clocked(report, problem, operator, operands, packed)
    return report


def with_evidence(
    report: GemmReport, problem: Problem, lowered: Lowered, simulated: bool = True
) -> GemmReport:
    """Add what the code of the kernel says, and if asked what it does on the simulator with any rows."""
    report = replace(report, evidence=lowered.evidence(max(problem.m, 1)))
    if not problem.m or not simulated:
        return report
    found, tokens = simulated_check(problem, lowered), token_check(problem, lowered.request.gemm)
    return replace(
        report,
        simulated=found,
        tokens=tokens,
        relative_error=found.relative_error,
        passed=not found.findings and not (tokens and tokens.findings),
    )


def multiply(operator: Matmul, operands: Operands, packed: PackedWeight) -> torch.Tensor:
    """Run the kernel once."""
    return operator(operands.x, packed, bias=operands.bias, token_scale=operands.token_scale)


def clocked(
    report: GemmReport, problem: Problem, operator: Matmul, operands: Operands, packed: PackedWeight
) -> GemmReport:
    """Time the kernel beside torch, every weight coming from memory."""
    device = problem.device
    ours: list[Call] = [
        partial(multiply, operator, operands, copy_of(packed))
        for _ in range(copies_for(packed.nbytes, device))
    ]
    theirs = torch_baselines(operator.gemm, operands, device)
    times = side_by_side({"ladder": ours, **theirs}, device)
    baselines = {name: round(times[name], 3) for name in theirs}
    best = min(baselines, key=lambda name: baselines[name])
    limit = ceiling(device, report.activation)
    return replace(
        report,
        time_us=round(times["ladder"], 3),
        baseline_us=baselines[best],
        baseline=best,
        baselines_us=baselines,
        roofline_fraction=round(limit.seconds(report.bytes, report.flops) * 1e6 / times["ladder"], 6),
        roofline=limit.source,
    )


def copy_of(packed: PackedWeight) -> PackedWeight:
    """Return the same weight elsewhere in memory."""
    arrays = {name: array.clone() for name, array in packed.arrays.items()}
    return replace(packed, arrays=arrays)
