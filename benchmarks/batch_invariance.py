"""What ``batch_invariant=True`` costs, and whether it holds, on an NVIDIA GPU.

``python -m benchmarks.batch_invariance --output FILE``

For each product, rows of x are multiplied in batches of many sizes that begin at several rows; every
result must have the bits of the same rows within the largest batch. Times are those of the plan of one
order over those of the usual plan, CUDA graphs by turns, weights from HBM.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ladder
from benchmarks.harness import capture_long, copies_for, environment, interleaved_us, write_record
from benchmarks.peers.ladder_engine import copy_of
from ladder.runtime.packed import PackedWeight

PRODUCTS: tuple[tuple[str, str, int | None, int, int], ...] = (
    ("int4", "float16", 128, 4096, 4096),
    ("int4", "float16", 128, 8192, 8192),
    ("int4", "bfloat16", 128, 5120, 25600),
    ("mxfp4", "bfloat16", None, 2880, 2880),
    ("int4", "int8", 128, 4096, 4096),
    ("fp8_e4m3", "fp8_e4m3", None, 4096, 4096),
)
"""Weight, activation, group size, N, K."""

LARGEST = 8192
CHECKED = (1, 2, 3, 7, 8, 16, 17, 33, 64, 65, 100, 128, 200, 256, 500, 1000, 2048, 4096, LARGEST)
TIMED = tuple(1 << power for power in range(14))
ROUNDS = 5


def other_bits(multiply: Callable[[Any], Any], x: Any) -> list[tuple[int, int]]:
    """Return (rows, first row) of the batches that differ from the same rows of the largest batch."""
    whole = multiply(x)
    places = [(m, at) for m in CHECKED for at in sorted({0, (LARGEST - m) // 6, LARGEST - m})]
    return [
        (m, at)
        for m, at in places
        if not torch.equal(multiply(x[at : at + m].contiguous()), whole[at : at + m])
    ]


def _multiplied(operator: ladder.Matmul, packed: PackedWeight, x: Any) -> Any:
    return operator(x, packed)


def ratios(plans: Mapping[str, Any], packed: PackedWeight, x: Any) -> dict[int, float]:
    """Return the time of the first plan over that of the second, by M."""
    copies = [copy_of(packed) for _ in range(copies_for(packed.nbytes))]
    found = {}
    for m in TIMED:
        given = x[:m].contiguous()
        graphs = {
            name: capture_long([partial(op, given, one) for one in copies]) for name, op in plans.items()
        }
        first, second = (statistics.median(times) for times in interleaved_us(graphs, ROUNDS).values())
        found[m] = round(first / second, 3)
    return found


def measured(weight: str, activation: str, group_size: int | None, n: int, k: int) -> dict[str, Any]:
    """Return the row of one product."""
    dense = torch.randn(n, k, device="cuda", dtype=torch.float16) * k**-0.5
    quantized = ladder.quantize(dense, weight, **({"group_size": group_size} if group_size else {}))
    plans = {
        name: ladder.Matmul(
            n, k, weight, activation, group_size=group_size, batch_invariant=name == "invariant"
        )
        for name in ("invariant", "usual")
    }
    packed = plans["invariant"].pack(quantized)
    dtype = torch.bfloat16 if activation == "bfloat16" else torch.float16  # 8-bit ones: quantized in the call
    x = torch.randn(LARGEST, k, device="cuda", dtype=dtype)
    found = {name: other_bits(partial(_multiplied, op, packed), x) for name, op in plans.items()}
    over = ratios(plans, packed, x)
    problem = {"weight": weight, "activation": activation, "group_size": group_size, "n": n, "k": k}
    return problem | {
        "other_bits": found["invariant"],
        "other_bits_of_the_usual_plan": len(found["usual"]),
        "time_over_usual": over,
        "geometric_mean": round(statistics.geometric_mean(over.values()), 3),
    }


def main() -> int:
    """Measure all products; exit code 1 if a row has other bits anywhere."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    for product in PRODUCTS:
        rows.append(measured(*product))
        print(rows[-1], flush=True)
        if arguments.output:
            write_record(arguments.output, {"environment": environment(), "rows": rows})
    return int(any(row["other_bits"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
