"""Registers and spills of the shipped kernels: compiles what users get and reads back what compilers report.

``python -m benchmarks.spills --target rocm/gfx942`` compiles, for every type of weights and activations, what
the policy chooses for a layer; for NVIDIA every schedule of the plans of the shapes that ship tuned. It
needs no GPU. Issue 4: no shipped schedule spills.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ladder.api.problem import gemm_for
from ladder.ir.gemm import Gemm
from ladder.lower.build import build
from ladder.runtime.compile import ANY_M
from ladder.runtime.packed import gemm_from_dict
from schedules.policy import rank
from schedules.schedule import Plan, parse_schedule
from schedules.tuning import shipped_winners, write_json
from targets import TileDevice, get_device
from tile_types import list_types
from tile_types.errors import LadderError

LAYER = (8192, 8192)
"""N and K that schedules are chosen for; kernels do not depend on them."""

TOKENS = (1, 16, 64, 256, 8192)
GROUPS = (32, 128)
ACTIVATIONS = ("float16", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2")
TARGETS = ("rocm/gfx90a", "rocm/gfx942", "rocm/gfx950", "cuda/sm_90a")


@dataclass(frozen=True)
class Shipped:
    """A kernel that users get: a problem, whose extents do not matter, a target, a schedule."""

    gemm: Gemm
    target: str
    schedule: str


@dataclass(frozen=True)
class Outcome:
    """What a compiler reported: registers of a thread, and what it spilled (bytes, or registers on AMD)."""

    kernel: Shipped
    registers: int
    spilled: int

    def __str__(self) -> str:
        gemm = self.kernel.gemm
        types = f"{gemm.weight} x {gemm.activation} g{gemm.group_size}"
        found = f"{self.registers} registers, {self.spilled} spilled"
        return f"{self.kernel.target} {types}: {found}: {self.kernel.schedule}"


def problems(device: TileDevice) -> Iterator[Gemm]:
    """Yield a layer of every pair of types that a device multiplies, in groups short and long."""
    n, k = LAYER
    for activation in filter(device.cores_for, ACTIVATIONS):
        for ttype in list_types():
            grouped = not ttype.is_block and ttype.elem_bits <= 8
            for group in GROUPS if grouped else (None,):
                with suppress(LadderError):  # the core cannot multiply the pair without loss
                    yield gemm_for(n, k, ttype, activation, group_size=group)


def chosen(device: TileDevice, every: int, first: int) -> Iterator[Shipped]:
    """Yield what the policy chooses for one of ``every`` `problems` from ``first`` on, each kernel once."""
    for gemm in islice(problems(device), first, None, every):
        schedules = dict.fromkeys(str(rank(gemm, device, m)[0].schedule) for m in TOKENS)
        yield from (Shipped(gemm, device.name, schedule) for schedule in schedules)


def tuned(device: TileDevice, every: int, first: int) -> Iterator[Shipped]:
    """Yield the fastest schedule of points that ship tuned, each kernel once; one of ``every``."""
    n, k = LAYER
    for fields, schedule in islice(shipped_winners(device), first, None, every):
        yield Shipped(gemm_from_dict({**fields, "n": n, "k": k}), device.name, str(schedule))


def kernels(target: str, every: int = 1, first: int = 0) -> list[Shipped]:
    """Return the kernels that users of a target get, or a sample."""
    device = get_device(target)
    return list((chosen if device.vendor == "amd" else tuned)(device, every, first))


def compiled(kernel: Shipped) -> Outcome:
    """Compile a kernel and return what its compiler reports."""
    schedule: Any = parse_schedule(kernel.schedule)
    with tempfile.TemporaryDirectory(prefix="ladder-spills-") as folder:
        built = build(kernel.gemm, get_device(kernel.target), Plan(((ANY_M, schedule),)), Path(folder))
    (report,) = built.resources.values()
    spilled = sum(count for name, count in report.items() if "spill" in name or name == "scratch_bytes")
    return Outcome(kernel, report.get("vgpr", report.get("registers", 0)), spilled)


def summary(target: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return what was found of one target's kernels, JSON-able."""
    return {
        "target": target,
        "kernels": len(outcomes),
        "spilling": [str(outcome) for outcome in outcomes if outcome.spilled],
        "most_registers": max((outcome.registers for outcome in outcomes), default=0),
    }


def main() -> None:
    """Compile, print what spills, and fail if anything does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="[all]")
    parser.add_argument("--every", type=int, default=1, help="take one problem of so many [1]")
    parser.add_argument("--jobs", type=int, default=1, help="processes [1]")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    options = parser.parse_args()
    found = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        for target in options.target or TARGETS:
            outcomes = list(pool.map(compiled, kernels(target, options.every), chunksize=4))
            found.append(summary(target, outcomes))
            print(json.dumps(found[-1], indent=1), flush=True)
    if options.output:
        write_json(options.output, {"targets": found})
    sys.exit(any(part["spilling"] for part in found))


if __name__ == "__main__":
    main()
