"""Kernels for Blackwell without a Blackwell GPU: what they are predicted to take, and what their code holds.

``python -m benchmarks.blackwell`` chooses the schedule for each problem as a plan would, compiles it, reads
back registers and spills, and prints the predicted time beside that of the fastest schedule of ``mma`` and,
where there is one, a time that others published for a B200. ``--scaled`` does so for products of block types
by themselves, by one CTA and by two. ``--target cuda/sm_103a`` is a B300. ``--simulate`` also executes every
schedule on the CPU: on a smaller problem that leaves remainders in each dimension, compared with float64.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import (
    command,
    write_record,
)
from benchmarks.spills import Shipped, compiled, versions
from ladder.api.lowered import Lowered
from ladder.api.problem import gemm_for
from ladder.api.scaled import ScaledLowered
from ladder.cli.check import SimulatedCheck, simulated_check
from ladder.cli.problem import Problem
from ladder.ir.gemm import Gemm
from ladder.ir.scaled import FORMATS, ScaledGemm
from ladder.runtime.compile import ANY_M, Request
from ladder.runtime.scaled import kernel_for, operand_of
from ladder.simulate.operator import simulate_scaled
from schedules.policy import Candidate, rank
from schedules.scaled import SLAB, ScaledSchedule, predict, schedules
from schedules.scaled_choice import choose
from schedules.schedule import Plan, Schedule
from targets import get_device
from tile_types import get_type, quantize

TARGETS = "cuda/sm_100a", "cuda/sm_103a"

SHAPES = ((4096, 4096), (8192, 8192), (28672, 8192), (14336, 4096), (4096, 14336), (9216, 7168))
"""N and K."""

TOKENS = (64, 256, 4096)

TYPES: Mapping[str, tuple[str, int | None]] = {
    "float16": ("float16", None),
    "bfloat16": ("bfloat16", None),
    "int4": ("float16", 128),
    "mxfp4": ("bfloat16", None),
    "nvfp4": ("bfloat16", None),
    "nf4": ("float16", 64),
    "fp8_e4m3": ("fp8_e4m3", None),
    "int8": ("int8", None),
}
"""Weight -> activations, and elements of K per scale."""

PUBLISHED: Mapping[tuple[str, int, int, int], tuple[float, str]] = {
    ("nvfp4", 8192, 8192, 1): (18.9, "FlashInfer's CUTLASS kernel, NVFP4 by NVFP4"),
    ("nvfp4", 9216, 7168, 4): (13.5, "FlashInfer's CUTLASS kernel, NVFP4 by NVFP4"),
}
"""Weight, N, K, M -> microseconds on a B200, and what took them (issue 20); ours have 16-bit activations."""


def problems() -> Iterator[tuple[str, Gemm, int]]:
    """Yield weight, problem and M."""
    points = {(w, n, k, m) for w in TYPES for n, k in SHAPES for m in TOKENS} | set(PUBLISHED)
    for weight, n, k, m in sorted(points):
        activation, group = TYPES[weight]
        yield weight, gemm_for(n, k, weight, activation, group_size=group, token_scale=False), m


@cache
def code_of(kernel: Shipped) -> tuple[int, int]:
    """Return registers of a thread and bytes that it spills."""
    outcome = compiled(kernel)
    return outcome.registers, outcome.spilled


def record(target: str, weight: str, gemm: Gemm, m: int, execute: bool = False) -> dict[str, Any]:
    """Return what is known of one product."""
    device = get_device(target)
    fastest: dict[str, Candidate] = {}
    for candidate in rank(gemm, device, m):
        fastest.setdefault(candidate.schedule.pipeline, candidate)  # type: ignore[attr-defined]
    name, best = next(iter(fastest.items()))
    generic = gemm_for(8192, 8192, weight, *TYPES[weight][:1], group_size=TYPES[weight][1], token_scale=False)
    registers, spilled = code_of(Shipped(generic, target, str(best.schedule)))
    published = PUBLISHED.get((weight, gemm.n, gemm.k, m))
    return {
        "weight": weight, "activation": gemm.activation, "n": gemm.n, "k": gemm.k, "m": m,
        "pipeline": name, "schedule": str(best.schedule), "bound_by": best.cost.bound,
        "predicted_us": {pipeline: round(c.cost.seconds * 1e6, 2) for pipeline, c in fastest.items()},
        "predicted_tflops": round(best.cost.flops / best.cost.seconds / 1e12),
        "registers": registers, "spilled": spilled, "published": published,
        **({"simulation": simulated(target, weight, generic, best.schedule, m)} if execute else {}),
    }  # fmt: skip


SIMULATED_ROWS, DEEPEST = 70, 4
"""Rows of x of a simulation, and stages that a block fills, at most."""


@cache
def simulated(target: str, weight: str, gemm: Gemm, schedule: Schedule, m: int) -> dict[str, Any]:
    """Return what the simulator says of a schedule that is chosen for M = ``m``."""
    group = -1 if gemm.group_size >= gemm.k or get_type(weight).is_block else gemm.group_size
    problem = Problem(
        weight, gemm.activation, group_size=group, m=min(m, SIMULATED_ROWS), n=gemm.n, k=gemm.k,
        target=target,
    )  # fmt: skip
    lowered = Lowered(Request(gemm, target, Plan(((ANY_M, schedule),))))
    return asdict(simulated_check(problem, lowered))


@cache
def simulated_scaled(target: str, kind: str, schedule: ScaledSchedule, m: int) -> dict[str, Any]:
    """Return what the simulator says of a schedule of block-scaled products that is chosen for M = ``m``."""
    slabs = schedule.split_k * (1 + min(schedule.stages, DEEPEST))
    form = FORMATS[kind]
    rows, n = min(m, SIMULATED_ROWS), schedule.rows * schedule.partners + 3
    k = slabs * SLAB * 8 // form.bits + form.group + 5
    random = torch.Generator().manual_seed(m)
    x, w = (quantize(torch.randn(count, k, generator=random), kind) for count in (rows, n))
    lowered = ScaledLowered(ScaledGemm(n, k, kind, kind, "float32"), target, schedule)
    packed = operand_of(lowered.form, kind, w)
    exact = torch.as_tensor(x.dequantize("float64")) @ torch.as_tensor(w.dequantize("float64")).T
    result = simulate_scaled(lowered, x, packed, None, exact.numpy(), 1.0, {"order": "random"})
    return asdict(SimulatedCheck.of((rows, n, k), result))


SCALED, ROWS = ("mxfp8_e4m3", "mxfp4", "nvfp4"), (1, 4, 64, 256, 4096)
"""Block types that cores multiply with their scales, and M."""


def scaled_record(
    target: str, kind: str, n: int, k: int, m: int, pair: bool, execute: bool = False
) -> dict[str, Any]:
    """Return what is known of one block-scaled product by one CTA, or by a pair of them."""
    form, device = ScaledGemm(n, k, kind, kind), get_device(target)
    legal = [option for option in schedules(form, device) if option.pair == pair]
    cost, schedule = min(
        ((predict(form, device, option, m), option) for option in legal), key=lambda one: one[0].seconds
    )
    (code,) = kernel_for(form, device, schedule).manifest["resources"].values()
    return {
        "weight": kind, "activation": kind, "n": n, "k": k, "m": m, "schedule": str(schedule),
        "chosen": schedule == choose(form, device, m), "bound_by": cost.bound,
        "predicted_us": round(cost.seconds * 1e6, 2),
        "predicted_tflops": round(2 * m * n * k / cost.seconds / 1e12), "registers": code["registers"],
        "spilled": code["spill_stores"] + code["spill_loads"], "published": PUBLISHED.get((kind, n, k, m)),
        **({"simulation": simulated_scaled(target, kind, schedule, m)} if execute else {}),
    }  # fmt: skip


def records(target: str, scaled: bool, only: str, execute: bool) -> Iterator[dict[str, Any]]:
    """Yield what is known of each product, or of those with weights of one type."""
    if scaled:
        for kind, (n, k), m, pair in product(SCALED, SHAPES, ROWS, (False, True)):
            if only in ("", kind):
                yield scaled_record(target, kind, n, k, m, pair, execute)
    else:
        for weight, gemm, m in problems():
            if only in ("", weight):
                yield record(target, weight, gemm, m, execute)


def main() -> None:
    """Print a line for each problem, and write them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--target", choices=TARGETS, default=TARGETS[0])
    parser.add_argument("--scaled", action="store_true", help="products of block types by themselves")
    parser.add_argument("--only", default="", help="weights of this type")
    parser.add_argument("--simulate", action="store_true", help="execute every schedule on the CPU, too")
    options = parser.parse_args()
    rows = []
    for row in records(options.target, options.scaled, options.only, options.simulate):
        rows.append(row)
        print(json.dumps(rows[-1]), flush=True)
    if options.output:
        facts = {"date": time.strftime("%Y-%m-%d"), "versions": versions(), "command": command()}
        write_record(options.output, {**facts, "target": options.target, "products": rows})
    wrong = [row for row in rows if row.get("simulation", {"findings": ()})["findings"]]
    spilling = [row for row in rows if row["spilled"]]
    print(f"{len(rows)} products, {len(spilling)} spill, {len(wrong)} wrong in the simulator")
    raise SystemExit(bool(wrong or spilling))


if __name__ == "__main__":
    main()
