"""Registers and spills of the shipped kernels: compiles what users get and reads back what compilers report.

``python -m benchmarks.spills --target rocm/gfx942`` compiles, for every type of weights and activations, what
the policy chooses for a layer, and what it chooses next where that spills; for devices with shapes that ship
tuned, every schedule of their plans. Kernels whose TIR is the same compile once. It needs no GPU and no
linker. No shipped schedule spills.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    command,
    write_record,
)
from ladder.api.problem import gemm_for
from ladder.installation import ladder_version, tvm_version
from ladder.ir.gemm import Gemm
from ladder.lower.build import emit
from ladder.lower.tvm_lock import tvm_lock
from ladder.runtime.packed import gemm_from_dict
from ladder.runtime.spills import spilled
from schedules.policy import avoid, rank
from schedules.schedule import Schedule, parse_schedule
from schedules.spilling import TRIES
from schedules.tuning import SHIPPED, Row, read_shipped
from targets import TileDevice, get_device
from tile_types import list_types
from tile_types.errors import LadderError

LAYER = (8192, 8192)
"""N and K that schedules are chosen for; kernels do not depend on them."""

TOKENS = (1, 16, 64, 256, 8192)
GROUPS = (32, 128)
ACTIVATIONS = ("float16", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2")
TARGETS = (
    *("rocm/gfx90a", "rocm/gfx942", "rocm/gfx950", "rocm/gfx1100", "rocm/gfx1201"),
    *("cuda/sm_90a", "cuda/sm_100a", "cuda/sm_103a"),
)

SHARE = 24
"""Kernels that a process takes at a time: of one type, whose decoders it proves once."""

NAME = "kernel"
"""What all kernels are called here, so that equal ones are equal."""


@dataclass(frozen=True)
class Shipped:
    """A kernel that users get: a problem, whose extents do not matter, a target, a schedule."""

    gemm: Gemm
    target: str
    schedule: str
    m: int = 0
    """The M that the policy chose it for; 0 where it was measured to be the fastest."""


@dataclass(frozen=True)
class Outcome:
    """What a compiler reported: registers of a thread, and what it spilled (bytes, or registers on AMD)."""

    kernel: Shipped
    tir: str
    """Digest of the kernel's TIR."""
    registers: int
    spilled: int
    failure: str = ""
    """Why it does not compile."""

    def __str__(self) -> str:
        gemm = self.kernel.gemm
        types = f"{gemm.weight} x {gemm.activation} g{gemm.group_size}"
        found = self.failure or f"{self.registers} registers, {self.spilled} spilled"
        return f"{self.kernel.target} {types}: {found}: {self.kernel.schedule}"


Known = Mapping[tuple[str, str], tuple[int, int]]
"""(target, digest of TIR) -> (registers, spilled)."""


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
        schedules = {str(rank(gemm, device, m)[0].schedule): m for m in reversed(TOKENS)}
        yield from (Shipped(gemm, device.name, schedule, m) for schedule, m in schedules.items())


def shipped_winners(device: TileDevice) -> Iterator[tuple[dict[str, Any], Schedule]]:
    """Yield class and schedule of every point's fastest row that ships for a device, each pair once."""
    for key, rows in read_shipped(SHIPPED).items():
        fields = json.loads(key)
        if fields["device"] != device.row:
            continue
        best: dict[tuple[int, int, int], Row] = {}
        for row in rows:
            point = (row[0], row[1], row[2])
            best[point] = min(best.get(point, row), row, key=lambda each: each[4])
        for text in dict.fromkeys(row[3] for row in best.values()):
            yield fields["gemm"], parse_schedule(text)


def tuned(device: TileDevice, every: int, first: int) -> Iterator[Shipped]:
    """Yield the fastest schedule of points that ship tuned, each kernel once; one of ``every``."""
    n, k = LAYER
    for fields, schedule in islice(shipped_winners(device), first, None, every):
        yield Shipped(gemm_from_dict({**fields, "n": n, "k": k}), device.name, str(schedule))


def kernels(target: str, every: int = 1, first: int = 0) -> list[Shipped]:
    """Return the kernels that users of a target get, or a sample."""
    device = get_device(target)
    ships_tuned = any(True for _ in shipped_winners(device))
    return list((tuned if ships_tuned else chosen)(device, every, first))


def compiled(kernel: Shipped, known: Known | None = None) -> Outcome:
    """Compile a kernel, unless an equal one is ``known``, and return what its compiler reports.

    Raises
    ------
    CompilerError, MissingToolError
        If it does not compile.
    """
    import tvm

    schedule: Any = parse_schedule(kernel.schedule)
    device = get_device(kernel.target)
    with tvm_lock():
        functions = {NAME: emit(kernel.gemm, device, schedule, NAME)}
        text = tvm.ir.save_json(tvm.IRModule(functions))
        tir = hashlib.sha256(text.encode()).hexdigest()[:16]
        found = (known or {}).get((kernel.target, tir)) or reported(functions, device)
    return Outcome(kernel, tir, *found)


def served(kernel: Shipped, known: Known | None = None) -> Outcome:
    """Compile what a user gets: while a choice of the policy spills, what it chooses next.

    Raises as `compiled`.
    """
    device, outcome = get_device(kernel.target), compiled(kernel, known)
    for _ in range(TRIES):
        if not kernel.m or not outcome.spilled:
            break
        avoid(kernel.gemm, device, parse_schedule(outcome.kernel.schedule))
        following = rank(kernel.gemm, device, kernel.m)[0].schedule
        outcome = compiled(replace(kernel, schedule=str(following)), known)
    return outcome


def reported(functions: Mapping[str, Any], device: TileDevice) -> tuple[int, int]:
    """Return (registers, spilled) of the one function, as its compiler reports them."""
    if device.vendor == "amd":
        from ladder.lower.rocm.toolchain import resources_of

        reports: Mapping[str, Mapping[str, int]] = resources_of(functions, device)
    else:
        from ladder.lower.cuda.toolchain import compile_functions

        with tempfile.TemporaryDirectory(prefix="ladder-spills-") as folder:
            reports = compile_functions(functions, device, Path(folder) / "kernel.so").resources
    (report,) = reports.values()
    return report.get("vgpr", report.get("registers", 0)), spilled(reports)


# ---- many of them -----------------------------------------------------------------------
@dataclass(frozen=True)
class Share:
    """Kernels that one process compiles, what is known before, and when it stops."""

    kernels: Sequence[Shipped]
    known: Known
    deadline: float

    def outcomes(self) -> list[Outcome]:
        """Compile what there is time for."""
        known, found = dict(self.known), []
        for kernel in self.kernels:
            if time.time() > self.deadline:
                break
            try:
                outcome = served(kernel, known)
            except LadderError as error:
                found.append(Outcome(kernel, "", 0, 0, str(error)))
                continue
            found.append(outcome)
            known[kernel.target, outcome.tir] = outcome.registers, outcome.spilled
        return found


def shares(wanted: Iterable[Shipped], known: Known, seconds: float) -> Iterator[Share]:
    """Yield the work: kernels of one type of weights and activations together, for all targets."""

    def types(kernel: Shipped) -> tuple[str, str]:
        return kernel.gemm.weight, kernel.gemm.activation

    deadline = time.time() + seconds
    for _, group in groupby(sorted(wanted, key=types), key=types):
        together = list(group)
        for first in range(0, len(together), SHARE):
            yield Share(together[first : first + SHARE], known, deadline)


def read_records(paths: Sequence[Path]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return what earlier runs recorded."""
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()]
    rows = [json.loads(line) for line in lines]
    return {(row[0], row[1]): (row[2], row[3]) for row in rows}


def summary(target: str, wanted: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return what was found of one target's kernels, JSON-able."""
    return {
        "target": target,
        "kernels": len(outcomes),
        "distinct": len({outcome.tir for outcome in outcomes}),
        "not compiled": wanted - len(outcomes),
        "failing": [str(outcome) for outcome in outcomes if outcome.failure],
        "spilling": [str(outcome) for outcome in outcomes if outcome.spilled],
        "most_registers": max((outcome.registers for outcome in outcomes), default=0),
    }


def versions() -> dict[str, str]:
    """Return the versions of what compiles."""
    import tvm

    from ladder.lower.cuda.toolchain import compiler_identity

    llvm = tvm.get_global_func("target.llvm_version_major")()
    return {
        "ladder": ladder_version(),
        "apache-tvm": tvm_version(),
        "LLVM in it": str(llvm),
        "CUDA": compiler_identity(),
    }


def run(options: argparse.Namespace) -> list[Outcome]:
    """Compile the kernels that the options name; every outcome is recorded as soon as it is there."""
    wanted = [kernel for target in options.target or TARGETS for kernel in kernels(target, options.every)]
    known = read_records([*options.known, *([options.record] if options.record else [])])
    work = list(shares(wanted, known, options.seconds))
    found: list[Outcome] = []
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for outcomes in pool.imap_unordered(Share.outcomes, work):
            found += outcomes
            fresh = {(o.kernel.target, o.tir): (o.registers, o.spilled) for o in outcomes if o.tir}
            fresh = {key: found for key, found in fresh.items() if key not in known}
            known.update(fresh)
            if options.record:
                with options.record.open("a") as stream:
                    stream.writelines(json.dumps([*key, *found]) + "\n" for key, found in fresh.items())
            for outcome in filter(lambda each: each.spilled or each.failure, outcomes):
                print(outcome, flush=True)
    return found


def main() -> None:
    """Compile, print what spills, and fail if anything does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="[all]")
    parser.add_argument("--every", type=int, default=1, help="take one problem of so many [1]")
    parser.add_argument("--jobs", type=int, default=1, help="processes [1]")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after about so long")
    parser.add_argument("--record", type=Path, help="outcomes, a line of JSON each: appended and read")
    parser.add_argument("--known", type=Path, action="append", default=[], help="records of other runs")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    options = parser.parse_args()
    outcomes = run(options)
    parts = []
    for target in options.target or TARGETS:
        of_target = [outcome for outcome in outcomes if outcome.kernel.target == target]
        parts.append(summary(target, len(kernels(target, options.every)), of_target))
        print(json.dumps(parts[-1], indent=1), flush=True)
    if options.output:
        facts = {"date": time.strftime("%Y-%m-%d"), "versions": versions(), "command": command()}
        write_record(options.output, {**facts, "targets": parts})
    sys.exit(any(part["spilling"] or part["failing"] for part in parts))


if __name__ == "__main__":
    main()
