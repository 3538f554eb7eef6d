"""Evidence of one compiled kernel without running it: what its code takes, and how long it should.

One record for all vendors; what a vendor's compiler reports, and how its matrix instructions are spelled,
is one row of `VENDORS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from schedules.cost import Cost
from schedules.footprint import TENSOR_COLUMNS
from tile_types.errors import MissingToolError

if TYPE_CHECKING:
    from ladder.runtime.build import Kernel
    from targets import TileDevice

Report = Mapping[str, int]
Sources = Mapping[str, str]


@dataclass(frozen=True)
class Fact:
    """One number that evidence states.

    name: Its name in JSON.
    of: Finds it in the device compiler's report and the kept stages; None if they do not tell.
    """

    name: str
    of: Callable[[Report, Sources], int | None]


def _reported(*keys: str) -> Callable[[Report, Sources], int | None]:
    """Return the sum of entries of the compiler's report."""
    return lambda report, sources: (
        sum(report[key] for key in keys if key in report) if keys[0] in report else None
    )


def _written(stage: str, pattern: str) -> Callable[[Report, Sources], int | None]:
    """Return a number that a stage's text states."""

    def find(report: Report, sources: Sources) -> int | None:
        match = re.search(pattern, sources.get(stage, ""))
        return int(match[1]) if match else None

    return find


def _counted(stage: str, pattern: str) -> Callable[[Report, Sources], int | None]:
    """Return how often a stage's text has an instruction."""
    return lambda report, sources: len(re.findall(pattern, sources[stage])) if stage in sources else None


def _shared(report: Report, sources: Sources) -> int | None:
    """Return static and dynamic shared memory of a CUDA kernel."""
    dynamic = _written("tir", r'"tirx\.dyn_smem_bytes": (?:T\.\w+\()?(\d+)')(report, sources)
    return report.get("shared", 0) + (dynamic or 0)


@dataclass(frozen=True)
class Vendor:
    """How one vendor's kernels are read.

    matrix: Name of the count of matrix instructions.
    stages: Stages in which they are counted, best first -> how they are spelled there.
    facts: What else is stated.
    registers, shared: Facts that limit how many blocks are resident.
    reserved: Bytes of shared memory that every block takes besides its own.
    """

    matrix: str
    stages: Mapping[str, str]
    facts: tuple[Fact, ...]
    registers: str
    shared: str
    reserved: int = 0


VENDORS: Mapping[str, Vendor] = {
    "nvidia": Vendor(
        "mma",
        {
            "sass": r"\b(?:(?:HMMA|IMMA|QMMA|HGMMA|IGMMA|QGMMA)\.|UTC[HIQO]MMA )",
            "ptx": r"\b(?:(?:wgmma\.mma_async|mma)\.sync\.aligned\.m\d+n\d+k\d+|tcgen05\.mma\.)",
        },
        (
            Fact("registers", _reported("registers")),
            Fact("spills", _reported("spill_stores", "spill_loads")),
            Fact("stack_bytes", _reported("stack")),
            Fact("shared_bytes", _shared),
            Fact("threads", _written("cuda", r"__launch_bounds__\((\d+)")),
            Fact("tensor_columns", _written("tir", r'T\.uint32\((\d+)\), "alloc"')),
        ),
        "registers",
        "shared_bytes",
        reserved=1024,
    ),
    "amd": Vendor(
        "mfma",
        {"asm": r"\bv_(?:mfma|smfmac|wmma)_\w+"},
        (
            Fact("dots", _counted("asm", r"\bv_dot\d\w*")),
            Fact("vgpr", _reported("vgpr")),
            Fact("agpr", _reported("agpr")),
            Fact("sgpr", _reported("sgpr")),
            Fact("spills", _reported("vgpr_spills", "sgpr_spills")),
            Fact("scratch_bytes", _reported("scratch_bytes")),
            Fact("lds_bytes", _reported("lds_bytes")),
            Fact("threads", _reported("threads")),
            Fact("code_object", _reported("code_object")),
        ),
        "vgpr",
        "lds_bytes",
    ),
}
"""Registers: ptxas counts those of a thread; the metadata of an AMD code object those of a lane, of which
``vgpr`` includes ``agpr`` where the register file is one (gfx90a and later). Spills are bytes on NVIDIA, and
registers on AMD."""


@dataclass(frozen=True)
class Evidence:
    """Evidence of a kernel that was compiled and not run.

    facts: The vendor's facts by name; None where the compiler does not tell.
    matrix, counted_in: Name of the count of matrix instructions among the facts, and the stage that they were
        counted in.
    blocks_per_unit, occupancy: Blocks that fit on a multiprocessor at once, and the part of its threads that
        they are.
    cost: The device model's prediction; None for kernels that it does not know.
    notes: What could not be looked at, and why.
    """

    facts: Mapping[str, int | None]
    matrix: str
    counted_in: str
    blocks_per_unit: int | None
    occupancy: float | None
    cost: Cost | None
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return all of it as one flat JSON-able object; times in µs."""
        return {
            **self.facts,
            "counted_in": self.counted_in,
            "blocks_per_unit": self.blocks_per_unit,
            "occupancy": self.occupancy,
            **self._predicted(),
            "notes": list(self.notes),
        }

    def _predicted(self) -> dict[str, Any]:
        """Return the prediction, in µs."""
        if self.cost is None:
            return {}
        return {
            "predicted_us": round(self.cost.seconds * 1e6, 3),
            "bound_by": self.cost.bound,
            "predicted_parts_us": {name: round(part * 1e6, 3) for name, part in self.cost.parts},
        }

    def as_text(self) -> dict[str, str]:
        """Return it as named lines for people."""
        rest = ", ".join(
            f"{name.replace('_', ' ')} {value}"
            for name, value in self.facts.items()
            if value is not None and name != self.matrix
        )
        share = "" if self.occupancy is None else f", occupancy {self.occupancy:.0%}"
        lines = {"code": f"{self.facts[self.matrix]} {self.matrix} in {self.counted_in}; {rest}{share}"}
        if self.cost is not None:
            parts = ", ".join(f"{name} {part * 1e6:.1f}" for name, part in self.cost.parts)
            time = f"{self.cost.seconds * 1e6:.1f} µs"
            lines["predicted"] = f"{time}, bound by {self.cost.bound} ({parts} µs)"
        return {**lines, **({"note": "; ".join(self.notes)} if self.notes else {})}


def resident_blocks(device: TileDevice, registers: int, shared: int, threads: int, reserved: int) -> int:
    """Return the blocks that a multiprocessor holds at once.

    device: Its limits. Registers come in eights per lane, from the part that each scheduler has.
    registers: 32-bit registers of a thread.
    shared, reserved: Bytes of shared memory of a block, its own and what the hardware adds.
    """
    warps = -(-threads // device.warp)
    per_scheduler = device.registers_per_unit // device.schedulers // device.warp
    resident_warps = device.schedulers * (per_scheduler // (-(-max(registers, 1) // 8) * 8))
    by_shared = device.shared_per_unit // max(shared + reserved, 1)
    by_threads = device.max_threads_per_unit // (warps * device.warp)
    return min(resident_warps // warps, by_shared, by_threads, device.max_blocks_per_unit)


def gather(
    device: TileDevice,
    report: Report,
    sources: Sources,
    cost: Cost | None,
    stage: Callable[[str], str | None],
) -> Evidence:
    """Collect the evidence of one kernel.

    device: What it was compiled for: a GPU.
    report, sources: What the device compiler reported, and the stages that builds keep.
    cost: The prediction, if there is one.
    stage: Makes a stage that builds do not keep; raises MissingToolError where a tool is missing.
    """
    vendor = VENDORS[device.vendor]
    count, counted_in, notes = _count(vendor, sources, stage)
    facts: dict[str, int | None] = {vendor.matrix: count}
    facts |= {fact.name: fact.of(report, sources) for fact in vendor.facts}
    needs = (facts[vendor.registers], facts[vendor.shared], facts["threads"])
    blocks = occupancy = None
    if None not in needs:
        registers, shared, threads = (int(need or 0) for need in needs)
        blocks = resident_blocks(device, registers, shared, threads, vendor.reserved)
        if columns := facts.get("tensor_columns"):
            blocks = min(blocks, TENSOR_COLUMNS // columns)
        occupancy = round(blocks * threads / device.max_threads_per_unit, 4)
    return Evidence(facts, vendor.matrix, counted_in, blocks, occupancy, cost, tuple(notes))


def _count(
    vendor: Vendor, sources: Sources, stage: Callable[[str], str | None]
) -> tuple[int | None, str, list[str]]:
    """Count matrix instructions in the first stage that can be had; say why better ones cannot."""
    notes = []
    for name, pattern in vendor.stages.items():
        try:
            text = sources.get(name) or stage(name)
        except MissingToolError as error:
            notes.append(f"no {name.upper()}: {str(error).splitlines()[0]}")
            continue
        if text is not None:
            return len(re.findall(pattern, text)), name, notes
    return None, "", notes


def report_of(kernel: Kernel) -> Report:
    """Return what the device compiler reported of a kernel; nothing if it did not."""
    reports: Mapping[str, Report] = kernel.manifest["resources"]
    return next((report for name, report in reports.items() if name.startswith(kernel.entry)), {})


def token_evidence(device: TileDevice, source: str, activation: str, k: int, group: int = 0) -> Evidence:
    """Return the evidence of the kernel that quantises rows of K elements on a GPU; compiles it.

    device: A GPU that multiplies the codes.
    source, activation: Types of x and of its codes.
    k, group: Elements of a row, and those that share a scale (0: all).
    Raises ConversionError if the device does not multiply the type.
    Raises MissingToolError, CompilerError if the kernel cannot be compiled.
    """
    from ladder.lower.build import derive_stage
    from ladder.runtime.tokens import gpu_kernel

    kernel = gpu_kernel(source, activation, group, k, device)
    sources = kernel.sources()
    return gather(
        device, report_of(kernel), sources, None, partial(derive_stage, sources=sources, device=device)
    )
