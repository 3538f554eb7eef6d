"""What the models of AMD kernels say beside times that others published: nothing of ours has run there.

``python -m benchmarks.amd_published`` predicts, for each product, the published kernel from the tiles that
its name states (`benchmarks.amd_public_kernels`), which checks the model, and the plan's kernel of the same
types, which is the gap of ours; both are printed over the published time. ``--json FILE`` records them. The
published kernels are the fastest that AITER's tuning found (files of its ``aiter/configs``). Shapes were
chosen before anything was predicted, and no constant was fitted to them. ``--bars`` prints instead what is
predicted for the products whose times the project set itself, and ends with 1 where one misses its bar.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.amd_public_kernels import Kernel, Product
from benchmarks.amd_public_kernels import seconds as public_seconds
from benchmarks.harness import command, write_record
from ladder.api.problem import gemm_for
from ladder.ir.scaled import ScaledGemm
from schedules.policy import rank
from schedules.scaled_choice import choose, predict
from targets import get_device

BOUND = 0.25
"""Share by which a prediction may miss a published time."""


@dataclass(frozen=True)
class Table:
    """Times of one file of AITER.

    target, types: GPU, and type of weights and of activations.
    source: File and commit.
    output: Type of the results.
    direct: Whether weights were put into the order of registers before.
    rows: The values of M.
    times: (N, K) -> microseconds by M, in the order of ``rows``.
    kernels: (N, K) -> what the names of the kernels say, in the same order.
    """

    target: str
    types: tuple[str, str]
    source: str
    output: str
    direct: bool
    rows: tuple[int, ...]
    times: Mapping[tuple[int, int], tuple[float, ...]]
    kernels: Mapping[tuple[int, int], tuple[Kernel, ...]]


BESIDE, WIDE = (2, 1), (2, 4)
"""Waves of a block that OPUS's names state."""


def _asm(rows: int, slices: int, columns: int = 64) -> Kernel:
    return Kernel(rows, columns, slices, ahead=2)


def _opus(rows: int, columns: int, waves: tuple[int, int], slices: int = 1, depth: int = 64) -> Kernel:
    return Kernel(rows, columns, slices, depth, waves)


def _ck(rows: int, columns: int) -> Kernel:
    return Kernel(rows, columns, depth=256)


def _int8(rows: int, columns: int = 128) -> Kernel:
    return Kernel(rows, columns, ahead=2)


TABLES = (
    Table(
        "rocm/gfx950", ("bfloat16", "bfloat16"), "bf16_tuned_gemm.csv, 032c54e4", "float32", False,
        (1, 64, 256, 1024, 2048),
        {
            (2048, 6144): (12.84, 14.15, 23.88, 64.84, 77.41),
            (3072, 6144): (13.60, 15.44, 30.90, 76.17, 99.67),
            (6144, 3072): (13.59, 15.78, 33.87, 62.06, 77.33),
            (50016, 6144): (122.45, 134.92, 187.25, 642.18, 1036.46),
        },
        {
            (2048, 6144): (_asm(32, 6), _asm(64, 6), _opus(64, 64, BESIDE, 4), _opus(64, 64, BESIDE),
                           _opus(128, 128, WIDE)),
            (3072, 6144): (_asm(32, 5), _asm(64, 5), _opus(64, 96, BESIDE, 4), _opus(128, 128, WIDE),
                           _opus(256, 128, WIDE)),
            (6144, 3072): (_asm(32, 2), _asm(64, 2), _opus(64, 96, BESIDE, 1, 128), _opus(256, 128, WIDE),
                           _asm(256, 1, 256)),
            (50016, 6144): (_opus(128, 256, WIDE), _opus(128, 256, WIDE), *[_opus(256, 256, WIDE)] * 3),
        },
    ),
    Table(
        "rocm/gfx942", ("int8", "int8"), "a8w8_bpreshuffle_tuned_gemm.csv, 08e1e1da", "bfloat16", True,
        (64, 512, 1024, 4096, 16384),
        {
            (1536, 5120): (16.78, 18.71, 21.01, 63.84, 211.71),
            (5120, 1280): (7.74, 11.25, 18.26, 58.58, 195.45),
        },
        {
            (1536, 5120): (_int8(16), _int8(32), _int8(48), *[_int8(112, 256)] * 2),
            (5120, 1280): (_int8(16), _int8(80), *[_int8(112, 256)] * 3),
        },
    ),
    Table(
        "rocm/gfx950", ("mxfp4", "mxfp4"), "a4w4_blockscale_tuned_gemm.csv, 16a15490", "bfloat16", True,
        (1, 64, 256, 16384),
        {
            (16384, 16384): (49.05, 51.06, 71.11, 3602.82),
            (18432, 16384): (48.51, 51.48, 97.57, 4031.18),
            (106496, 16384): (170.43, 200.41, 421.92, 23937.22),
            (16384, 53248): (156.56, 161.98, 240.19, 11530.04),
        },
        {
            (16384, 16384): (_ck(64, 128), _ck(64, 128), _ck(64, 256), _ck(96, 512)),
            (18432, 16384): (_ck(64, 128), _ck(64, 128), _ck(64, 384), _ck(128, 384)),
            (106496, 16384): (_ck(64, 256), _ck(64, 512), _ck(128, 384), _ck(96, 512)),
            (16384, 53248): (_ck(64, 128), _ck(64, 128), _ck(64, 256), _ck(96, 512)),
        },
    ),
)  # fmt: skip


def predicted(table: Table, n: int, k: int, m: int) -> tuple[float, str, str]:
    """Return the seconds of the kernel that a plan takes, what binds it, and its schedule."""
    device, types = get_device(table.target), table.types
    if types[1].startswith("mx"):
        form = ScaledGemm(n, k, *types)
        schedule = choose(form, device, m)
        cost = predict(form, device, schedule, m)
        return cost.seconds, cost.bound, str(schedule)
    best = next(iter(rank(gemm_for(n, k, *types, output=table.output), device, m)))
    return best.cost.seconds, best.cost.bound, str(best.schedule)


def points() -> Iterator[dict[str, Any]]:
    """Yield every published product with our prediction."""
    for table in TABLES:
        element = {"float32": 4, "bfloat16": 2}[table.output]
        for (n, k), times in table.times.items():
            for m, microseconds, kernel in zip(table.rows, times, table.kernels[n, k], strict=True):
                seconds, bound, schedule = predicted(table, n, k, m)
                called = Product(m, n, k, table.types[1], element, table.direct)
                theirs = public_seconds(called, get_device(table.target), kernel)
                yield {
                    "target": table.target, "types": list(table.types), "n": n, "k": k, "m": m,
                    "published_us": microseconds, "source": table.source,
                    "kernel": str(kernel), "modelled_us": round(theirs * 1e6, 2),
                    "model": round(theirs * 1e6 / microseconds, 3),
                    "predicted_us": round(seconds * 1e6, 2), "bound": bound, "schedule": schedule,
                    "ratio": round(seconds * 1e6 / microseconds, 3),
                }  # fmt: skip


LARGE, WIDE_LAYER = ((28672, 8192), (8192, 28672)), (8448, 7168)
"""N and K of products that memory binds at M = 1, and of the one whose MXFP4 kernels are published."""

LIBRARY = {"near shapes, slowest": 1.2e15, "near shapes, fastest": 1.32e15, "any shape, fastest": 1.565e15}
"""Operations per second of tuned bfloat16 products in AITER's table for gfx950. They stand for hipBLASLt,
whose time of `WIDE_LAYER` at M = 4096 is not published; near shapes decide about the bar."""

OVER_LIBRARY = 1.1


def bars() -> Iterator[dict[str, Any]]:
    """Yield what is predicted beside each bar, and whether it is met."""
    for target, (n, k) in product(("rocm/gfx950", "rocm/gfx942", "rocm/gfx90a"), LARGE):
        cost = next(iter(rank(gemm_for(n, k, "int4", "float16", group_size=128), get_device(target), 1))).cost
        share = dict(cost.parts)["dram"] / cost.seconds
        yield {
            "what": f"{target} int4 x float16 {n}x{k}, M = 1: share of what reads sustain",
            "predicted": round(share, 3), "bar": 0.92, "met": share >= 0.92,
        }  # fmt: skip
    n, k = WIDE_LAYER
    for activation, m in product(("bfloat16", "float16", "mxfp4"), (1, 4096)):
        table = Table("rocm/gfx950", ("mxfp4", activation), "", activation, False, (), {}, {})
        seconds, bound, _ = predicted(table, n, k, m)
        label = f"rocm/gfx950 mxfp4 x {activation} {n}x{k}, M = {m}, bound by {bound}"
        if m == 1:
            microseconds = round(seconds * 1e6, 1)
            yield {"what": f"{label}: us", "predicted": microseconds, "bar": 9.0, "met": microseconds <= 9}
            continue
        over = {name: round(seconds * rate / (2 * m * n * k), 2) for name, rate in LIBRARY.items()}
        worst = over["near shapes, fastest"]
        yield {"what": f"{label}: times of bfloat16's time at the rates of {over}",
               "predicted": worst, "bar": OVER_LIBRARY, "met": worst <= OVER_LIBRARY}  # fmt: skip


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return, for each pair of types, what the model says of their kernels, and of ours beside them."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for point in found:
        groups.setdefault(f"{point['target']} {' x '.join(point['types'])}", []).append(point)
    return {
        name: {key: _shares([point[key] for point in points]) for key in ("model", "ratio")}
        for name, points in groups.items()
    }


def _shares(ratios: list[float]) -> dict[str, float]:
    """Return how many ratios lie within `BOUND`, and their geometric mean."""
    return {
        "points": len(ratios),
        "within": sum(abs(ratio - 1) <= BOUND for ratio in ratios),
        "geometric_mean": round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 3),
        "least": min(ratios),
        "most": max(ratios),
    }


def main() -> None:
    """Print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="record the points here")
    parser.add_argument("--bars", action="store_true", help="only the project's own bars")
    options = parser.parse_args()
    if options.bars:
        said = list(bars())
        for bar in said:
            verdict = "met" if bar["met"] else "missed"
            print(f"{bar['what']}: {bar['predicted']} (bar {bar['bar']}: {verdict})")
        if options.json:
            write_record(options.json, {"command": command(), "bars": said})
        raise SystemExit(not all(bar["met"] for bar in said))
    found = []
    for point in points():
        found.append(point)
        called = f"{' x '.join(point['types'])} {point['n']}x{point['k']} M={point['m']}"
        print(
            f"{point['target']} {called}: published {point['published_us']:.1f}, by the model"
            f" {point['modelled_us']:.1f} us ({point['model']:.2f}); ours predicted"
            f" {point['predicted_us']:.1f} us ({point['ratio']:.2f}, {point['bound']})",
            flush=True,
        )
    print(json.dumps(summary(found), indent=1))
    if options.json:
        write_record(options.json, {"command": command(), "summary": summary(found), "points": found})


if __name__ == "__main__":
    main()
