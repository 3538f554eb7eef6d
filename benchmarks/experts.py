"""Products of experts at the shapes of real mixtures: the plan's kernel beside others, and the bytes read.

``python -m benchmarks.experts --compile 60 --output result.json``: one weight per expert, tokens sent to
random experts; every candidate is compiled in parallel processes, checked against float64 and timed by turns
in CUDA graphs. The floor is the bytes of the experts that have tokens, at the bandwidth of the same run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from benchmarks.harness import (
    capture,
    copy_bandwidth,
    environment,
    interleaved_us,
    relative_error,
    require_gpu,
    write_record,
)
from ladder.api.experts import GroupedMatmul
from ladder.runtime.compile import ANY_M, plan_for, target_of
from ladder.runtime.compile_pool import CompilePool, Trial
from ladder.runtime.experts import single
from schedules.cost import weight_bytes
from schedules.expert_tiles import EXPERT_TILES
from schedules.legal import is_legal, placement_for
from schedules.policy import make_plan
from schedules.schedule import GpuSchedule, Plan
from targets import get_device
from tile_types import quantize


@dataclass(frozen=True)
class Mixture:
    """A layer of experts: how many, how many a token goes to, and the extents of their products."""

    name: str
    experts: int
    chosen: int
    products: tuple[tuple[int, int], ...]
    weight: str
    group_size: int


MIXTURES = (
    Mixture("Qwen3-30B-A3B", 128, 8, ((1536, 2048), (2048, 768)), "int4", 128),
    Mixture("gpt-oss-20b", 32, 4, ((5760, 2880), (2880, 2880)), "mxfp4", 0),
)
TOKENS = (1, 16, 64, 512, 2048)

STREAMED = ((4, 8, 2, 16), (4, 4, 1, 16), (4, 4, 2, 32), (2, 8, 4, 32))
"""Stages, warps, slices of K and rows of a warp of ``gemv``, beside what plans take."""

TILED = ((16, 64, 128, 6, 4), (32, 128, 128, 4, 8), (64, 128, 64, 6, 8), (128, 128, 64, 5, 8))
"""Tile of M, N and K, stages and warps of ``wgmma``."""

WALKING = (
    (16, 128, 128, 6, 8), (16, 256, 128, 4, 8), (32, 128, 128, 5, 8), (32, 256, 128, 4, 8),
    (48, 128, 128, 5, 8), (48, 256, 128, 4, 8), (48, 192, 128, 4, 12), (64, 256, 64, 6, 8),
    (64, 192, 64, 6, 12), (80, 128, 128, 4, 8), (80, 256, 64, 6, 8), (80, 192, 64, 6, 12),
    (144, 192, 64, 5, 12), (144, 128, 128, 4, 8),
)  # fmt: skip
"""The same of persistent grids."""

CALLS = 8
"""Calls of a graph, each with tokens sent to other experts."""

ROUNDS = 10


def candidates(gemm: Any, target: str) -> list[GpuSchedule]:
    """Return the legal schedules that compete."""
    device = get_device(target)
    placement = placement_for(gemm)
    tried = [s for _, s in make_plan(gemm, device).entries if isinstance(s, GpuSchedule)]
    tried += [GpuSchedule("wgmma", m, n, k, stages=s, warps=w, persistent=True) for m, n, k, s, w in WALKING]
    tried += [s for tiles in EXPERT_TILES.values() for s in tiles]
    tried += [GpuSchedule("gemv", 8, stages=s, warps=w, split_k=k, warp_rows=r) for s, w, k, r in STREAMED]
    tried += [GpuSchedule("wgmma", m, n, k, stages=s, warps=w) for m, n, k, s, w in TILED]
    placed = [s if s.placement == "accumulator" else replace(s, placement=placement) for s in tried]
    return [s for s in dict.fromkeys(placed) if is_legal(gemm, device, s)]


def routed(mixture: Mixture, tokens: int, seed: int) -> torch.Tensor:
    """Return the offsets of a batch whose tokens each go to random experts."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack(
        [torch.randperm(mixture.experts, generator=generator)[: mixture.chosen] for _ in range(tokens)]
    )
    counts = torch.bincount(chosen.flatten(), minlength=mixture.experts)
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32)


def operator(mixture: Mixture, n: int, k: int, target: str, plan: Plan | None = None) -> GroupedMatmul:
    """Return the operator of one product of a mixture."""
    options: dict[str, Any] = {"group_size": mixture.group_size} if mixture.group_size else {}
    return GroupedMatmul(
        mixture.experts, n, k, mixture.weight, "bfloat16", target=target, plan=plan, **options
    )


def compiled_trials(target: str, seconds: float) -> dict[str, list[GpuSchedule]]:
    """Compile the candidates of every mixture; return what is done in time."""
    with CompilePool() as pool:
        futures = {}
        wanted = []
        for mixture in MIXTURES:
            gemm = operator(mixture, *mixture.products[0], target).gemm
            wanted.append([(mixture.name, gemm, s) for s in candidates(gemm, target)])
        for name, gemm, schedule in (one for turn in zip_longest(*wanted) for one in turn if one):
            (future,) = pool.submit(gemm, target, [schedule])
            futures[future] = name, schedule
        done, late = wait(futures, timeout=seconds)
        for future in late:
            future.cancel()
        print(f"{len(done)} kernels, {len(late)} left out", flush=True)
        found: dict[str, list[GpuSchedule]] = {mixture.name: [] for mixture in MIXTURES}
        for future in futures:
            if future in done:
                result = future.result()
                name, schedule = futures[future]
                found[name] += [schedule] if isinstance(result, Trial) else []
                if not isinstance(result, Trial):
                    print(result[:300], flush=True)
    return found


def measured(
    mixture: Mixture,
    n: int,
    k: int,
    target: str,
    schedules: Sequence[GpuSchedule],
    bandwidth: float,
    numbers: Sequence[int] = TOKENS,
) -> Iterator[dict[str, Any]]:
    """Yield the times of one product at every number of tokens."""
    gemm = operator(mixture, n, k, target).gemm
    plan = plan_for(operator(mixture, n, k, target).request)
    options: dict[str, Any] = {"group_size": mixture.group_size} if mixture.group_size else {}
    if mixture.group_size:
        options["scale_type"] = "bfloat16"
    drawn = [
        quantize(torch.randn(n, k, device="cuda") * k**-0.5, mixture.weight, **options) for _ in range(3)
    ]
    packed = operator(mixture, n, k, target).pack([drawn[e % 3] for e in range(mixture.experts)])
    dense = [weight.dequantize("float64") for weight in drawn]
    for tokens in numbers:
        rows = tokens * mixture.chosen
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        offsets = [routed(mixture, tokens, seed) for seed in range(CALLS)]
        here = [at.cuda() for at in offsets]
        exact = torch.cat([
            x[at:to].double() @ dense[e % 3].T
            for e, (at, to) in enumerate(zip(offsets[0].tolist(), offsets[0].tolist()[1:], strict=False))
        ])  # fmt: skip
        graphs, errors = {}, {}
        choice = plan.schedule_for(-(-rows // mixture.experts))
        for schedule in schedules:
            one = operator(mixture, n, k, target, Plan(((ANY_M, schedule),)))
            errors[str(schedule)] = relative_error(one(x, packed, here[0]), exact)
            graphs[str(schedule)] = capture([partial(one, x, packed, at) for at in here])
        times = interleaved_us(graphs, ROUNDS)
        active = statistics.mean(int((at.diff() > 0).sum()) for at in offsets)
        nbytes = active * weight_bytes(single(gemm)) + rows * (n + k) * 2
        yield {
            "mixture": mixture.name, "n": n, "k": k, "tokens": tokens, "active": active,
            "floor_us": nbytes / bandwidth * 1e6, "choice": str(choice),
            "us": {name: statistics.median(found) for name, found in times.items()},
            "errors": {name: error for name, error in errors.items() if error > 3e-3},
        }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    """Print the choice beside the fastest and the floor."""
    best = min(row["us"], key=row["us"].__getitem__)
    choice = row["us"].get(row["choice"], float("nan"))
    at = f"{row['mixture']} {row['n']}x{row['k']} tokens {row['tokens']}"
    print(
        f"{at}: {choice:.1f} us, best {row['us'][best]:.1f}, floor {row['floor_us']:.1f}; {best}", flush=True
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", type=float, default=60, help="seconds for compiling")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--output", default="experts.json")
    arguments = parser.parse_args()
    require_gpu()
    target = target_of(torch.device("cuda"))
    schedules = compiled_trials(target, arguments.compile)
    bandwidth, rows = copy_bandwidth(), []
    for mixture in MIXTURES:
        for n, k in mixture.products:
            for row in measured(mixture, n, k, target, schedules[mixture.name], bandwidth, arguments.tokens):
                show(row)
                rows.append(row)
                report = {"environment": environment(), "bandwidth": bandwidth, "rows": rows}
                write_record(arguments.output, report)


if __name__ == "__main__":
    main()
