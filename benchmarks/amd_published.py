"""What the models of AMD kernels say beside times that others published: nothing of ours has run there.

``python -m benchmarks.amd_published`` predicts the plan's kernel for each product, of the same types, and
prints its time over the published one; ``--json FILE`` records both. The published kernels are the fastest
that AITER's tuning found (files of its ``aiter/configs``). Shapes were chosen before anything was predicted,
and no constant was fitted to them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import command
from ladder.api.problem import gemm_for
from ladder.ir.scaled import ScaledGemm
from schedules.policy import rank
from schedules.scaled_choice import choose, predict
from schedules.tuning import write_json
from targets import get_device

BOUND = 0.25
"""Share by which a prediction may miss a published time."""


@dataclass(frozen=True)
class Table:
    """Times of one file of AITER.

    target, types: GPU, and type of weights and of activations.
    source: File and commit.
    rows: N, K and M.
    times: (N, K) -> microseconds by M, in the order of ``rows``.
    """

    target: str
    types: tuple[str, str]
    source: str
    rows: tuple[int, ...]
    times: Mapping[tuple[int, int], tuple[float, ...]]


TABLES = (
    Table(
        "rocm/gfx950", ("bfloat16", "bfloat16"), "bf16_tuned_gemm.csv, 032c54e4", (1, 64, 256, 1024, 2048),
        {
            (2048, 6144): (12.84, 14.15, 23.88, 64.84, 77.41),
            (3072, 6144): (13.60, 15.44, 30.90, 76.17, 99.67),
            (6144, 3072): (13.59, 15.78, 33.87, 62.06, 77.33),
            (50016, 6144): (122.45, 134.92, 187.25, 642.18, 1036.46),
        },
    ),
    Table(
        "rocm/gfx942", ("int8", "int8"), "a8w8_bpreshuffle_tuned_gemm.csv, 08e1e1da",
        (64, 512, 1024, 4096, 16384),
        {
            (1536, 5120): (16.78, 18.71, 21.01, 63.84, 211.71),
            (5120, 1280): (7.74, 11.25, 18.26, 58.58, 195.45),
        },
    ),
    Table(
        "rocm/gfx950", ("mxfp4", "mxfp4"), "a4w4_blockscale_tuned_gemm.csv, 16a15490", (1, 64, 256, 16384),
        {
            (16384, 16384): (49.05, 51.06, 71.11, 3602.82),
            (18432, 16384): (48.51, 51.48, 97.57, 4031.18),
            (106496, 16384): (170.43, 200.41, 421.92, 23937.22),
            (16384, 53248): (156.56, 161.98, 240.19, 11530.04),
        },
    ),
)  # fmt: skip


def predicted(target: str, types: tuple[str, str], n: int, k: int, m: int) -> tuple[float, str, str]:
    """Return the seconds of the kernel that a plan takes, what binds it, and its schedule."""
    device = get_device(target)
    if types[1].startswith("mx"):
        form = ScaledGemm(n, k, *types)
        schedule = choose(form, device, m)
        cost = predict(form, device, schedule, m)
        return cost.seconds, cost.bound, str(schedule)
    best = next(iter(rank(gemm_for(n, k, *types, output="bfloat16"), device, m)))
    return best.cost.seconds, best.cost.bound, str(best.schedule)


def points() -> Iterator[dict[str, Any]]:
    """Yield every published product with our prediction."""
    for table in TABLES:
        for (n, k), times in table.times.items():
            for m, microseconds in zip(table.rows, times, strict=True):
                seconds, bound, schedule = predicted(table.target, table.types, n, k, m)
                yield {
                    "target": table.target, "types": list(table.types), "n": n, "k": k, "m": m,
                    "published_us": microseconds, "source": table.source,
                    "predicted_us": round(seconds * 1e6, 2), "bound": bound, "schedule": schedule,
                    "ratio": round(seconds * 1e6 / microseconds, 3),
                }  # fmt: skip


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return, for each pair of types, how many predictions lie within `BOUND`, and their geometric mean."""
    groups: dict[str, list[float]] = {}
    for point in found:
        groups.setdefault(f"{point['target']} {' x '.join(point['types'])}", []).append(point["ratio"])
    return {
        name: {
            "points": len(ratios),
            "within": sum(abs(ratio - 1) <= BOUND for ratio in ratios),
            "geometric_mean": round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 3),
            "least": min(ratios), "most": max(ratios),
        }
        for name, ratios in groups.items()
    }  # fmt: skip


def main() -> None:
    """Print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="record the points here")
    options = parser.parse_args()
    found = []
    for point in points():
        found.append(point)
        product = f"{' x '.join(point['types'])} {point['n']}x{point['k']} M={point['m']}"
        print(
            f"{point['target']} {product}: published {point['published_us']:.1f}, ours predicted"
            f" {point['predicted_us']:.1f} us ({point['ratio']:.2f}, {point['bound']})",
            flush=True,
        )
    print(json.dumps(summary(found), indent=1))
    if options.json:
        write_json(options.json, {"command": command(), "summary": summary(found), "points": found})


if __name__ == "__main__":
    main()
