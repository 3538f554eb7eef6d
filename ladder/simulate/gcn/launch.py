"""Runs a kernel's machine code: workgroups one after the other, waves in turns between barriers."""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ladder.simulate.amd.mfma import Core
from ladder.simulate.amd.wmma import CORES, HalfCore
from ladder.simulate.findings import Finding
from ladder.simulate.gcn import memory, packed, rdna, scalar, scratch, vector
from ladder.simulate.gcn.listing import TEMPORARY, GcnError, Instruction, Listing, parse_listing
from ladder.simulate.gcn.wave import LANES, Wave
from ladder.simulate.values import Array
from tile_types.errors import unknown_name

MOST_STEPS = 5_000_000
"""Instructions of a wave after which it is taken to run for ever."""

MESSAGES = {
    "barrier": "a wave passes a barrier while its LDS accesses are outstanding",
    "deadlock": "waves of a workgroup wait at different barriers",
    "divergence": "lanes exchange while part of the wave is active",
    "race": "two waves access an LDS word with no barrier between, one of them to write it",
    "asynchronous": "a register is used before the load of it was awaited",
    "out of bounds": "an access beyond a tensor or beyond LDS",
    "misaligned": "an address that is no multiple of the access's width",
}
"""Findings that are reported: kinds of `ladder.simulate.findings.KINDS`."""


@dataclass
class Report:
    """Result of a launch.

    findings: What was wrong, by kind and instruction.
    instructions: Executed by waves.
    counts: Of mnemonics.
    """

    findings: tuple[Finding, ...]
    instructions: int
    counts: Counter[str]

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or "no findings"


@dataclass
class Group:
    """State that the waves of a workgroup share, and the list of findings.

    ``stores_apart``: whether stores have a counter of their own.
    """

    space: memory.Space
    core: Core
    local: memory.LocalMemory
    stores_apart: bool = False
    found: Counter[tuple[str, str]] = field(default_factory=Counter)

    def report(self, kind: str, text: str) -> None:
        self.found[kind, text] += 1


STOPS = {"s_barrier", "s_endpgm"}


class Program:
    """A kernel's instructions as closures.

    Raises GcnError if it has an instruction that no table has; names all of them.
    """

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self.steps = [self._translate(i) for i in listing.instructions]
        unknown = sorted({i.op for i, s in zip(listing.instructions, self.steps, strict=True) if s is None})
        if unknown:
            raise GcnError(f"the emulator does not know {', '.join(unknown)}")
        self.registers = [self._used(i) for i in listing.instructions]

    def _translate(self, i: Instruction) -> Any:
        if i.op in STOPS or i.op == "s_waitcnt":
            return i.op
        if i.op == rdna.PAIR:
            return rdna.pair(i, self._translate)
        return (
            scalar.translate(i, self.listing.labels)
            or memory.translate(i)
            or scratch.translate(i)
            or packed.translate(i)
            or vector.translate(i)
            or rdna.translate(i)
        )

    @staticmethod
    def _used(i: Instruction) -> frozenset[int]:
        """Return the registers that must have arrived: vector loads return in order, and may overwrite."""
        if memory.is_vector_load(i):
            return frozenset().union(*(operand.registers for operand in i.operands[1:]))
        return i.registers


def run(
    assembly: str, kernel: str, arch: str, arguments: Sequence[Array | int], grid: int, threads: int
) -> Report:
    """Execute a launch of a kernel on the CPU, all lanes; tensors are read and written in place.

    assembly: What LLVM wrote beside the code object.
    kernel: Symbol of the kernel.
    arch: ``"gfx90a"``, ``"gfx942"``, ``"gfx950"``, ``"gfx1100"`` or ``"gfx1201"``.
    arguments: Tensors and numbers in the order of the kernel's arguments.
    grid, threads: Workgroups, and threads of each.
    Raises GcnError if the code has an instruction that the emulator does not know, or the arguments do not
        fit.
    """
    if arch not in CORES:
        raise unknown_name("architecture", arch, CORES)
    listing, core = parse_listing(assembly, kernel), CORES[arch]
    halves, lanes = isinstance(core, HalfCore), core.lanes
    if halves:
        listing.instructions = [rdna.as_gfx9(i) for i in listing.instructions]
    program = Program(listing)
    if threads % lanes:
        raise GcnError(f"{threads} threads are no whole waves")
    arrays = [argument for argument in arguments if isinstance(argument, np.ndarray)]
    kernarg = _kernarg(listing, arguments)
    space = memory.Space([*arrays, kernarg])
    counts: Counter[str] = Counter()
    found: Counter[tuple[str, str]] = Counter()
    with np.errstate(all="ignore"):
        for number in range(grid):
            lds = memory.LocalMemory(listing.settings["group_segment_fixed_size"])
            group = Group(space, core, lds, halves, found)
            waves = [Wave(group, index, lanes) for index in range(threads // lanes)]
            for wave in waves:
                _set_up(wave, listing, memory.Space.address(len(arrays)), number)
            _run_group(program, group, waves, counts)
    findings = tuple(Finding(kind, MESSAGES[kind], text, 0, times) for (kind, text), times in found.items())
    return Report(findings, counts.total(), counts)


def _kernarg(listing: Listing, arguments: Sequence[Array | int]) -> Array:
    """Return the kernarg segment: addresses of tensors, and numbers."""
    if len(arguments) != len(listing.offsets):
        raise GcnError(f"{listing.name} takes {len(listing.offsets)} arguments, got {len(arguments)}")
    segment = bytearray(-(-listing.settings["kernarg_size"] // 64) * 64)
    tensors = 0
    for argument, (at, size) in zip(arguments, listing.offsets, strict=True):
        if isinstance(argument, np.ndarray):
            struct.pack_into("<Q", segment, at, memory.Space.address(tensors))
            tensors += 1
        else:
            struct.pack_into({4: "<i", 8: "<q"}[size], segment, at, argument)
    return np.frombuffer(bytes(segment), np.uint8)


def _set_up(wave: Wave, listing: Listing, kernarg: int, group: int) -> None:
    """Give a wave what hardware gives it: SGPRs by the kernel's settings, and its threads' numbers."""
    at = 0
    for name, count, value in (
        ("user_sgpr_private_segment_buffer", 4, 0),
        ("user_sgpr_dispatch_ptr", 2, None),
        ("user_sgpr_queue_ptr", 2, None),
        ("user_sgpr_kernarg_segment_ptr", 2, kernarg),
        ("user_sgpr_dispatch_id", 2, None),
    ):
        if not listing.settings.get(name):
            continue
        if value is None:
            raise GcnError(f"the emulator does not know {name}")
        for word in range(count):
            wave.s[at + word] = value >> 32 * word & 0xFFFFFFFF
        at += count
    at = listing.settings["user_sgpr_count"]
    if listing.settings.get("user_sgpr_kernarg_preload_length"):
        raise GcnError("the emulator knows no preloaded arguments")
    if listing.settings["system_sgpr_workgroup_id_x"]:
        wave.s[at] = group
    if getattr(wave.group.core, "split", False):  # RDNA4
        wave.s[TEMPORARY + 9] = group
        wave.scalar_memory = deque()
    wave.scratch = np.full((LANES, listing.settings["private_segment_fixed_size"]), 0xFF, np.uint8)
    wave.v[0] = np.arange(LANES, dtype=np.uint32) + np.uint32(wave.number * wave.lanes)


def _run_group(program: Program, group: Group, waves: list[Wave], counts: Counter[str]) -> None:
    """Run all waves of a workgroup to their ends, each as far as the next barrier in its turn."""
    running = waves
    while running:
        reached = {wave.number: _run_wave(program, group, wave, counts) for wave in running}
        ended = {number for number, where in reached.items() if where < 0}
        if len(set(reached.values())) > 1:
            group.report("deadlock", f"barriers {sorted(set(reached.values()))}")
        group.local.new_epoch()
        running = [wave for wave in running if wave.number not in ended]


def _run_wave(program: Program, group: Group, wave: Wave, counts: Counter[str]) -> int:
    """Run a wave to its next barrier, whose place is returned, or to its end: -1."""
    instructions, steps, registers = program.listing.instructions, program.steps, program.registers
    for _ in range(MOST_STEPS):
        at = wave.pc
        i, step = instructions[at], steps[at]
        wave.pc = at + 1
        counts[i.op] += 1
        if wave.pending and not wave.pending.isdisjoint(registers[at]):
            group.report("asynchronous", i.text)
        if step.__class__ is not str:
            step(wave)
        elif step == "s_endpgm":
            return -1
        elif step == "s_waitcnt":
            _wait(wave, i)
        else:
            if any(entry.kind.startswith("lds") for entry in wave.local_memory):
                group.report("barrier", i.text)
            return at
    raise GcnError(f"{program.listing.name} does not end")


def _wait(wave: Wave, i: Instruction) -> None:
    """``s_waitcnt``."""
    text = i.text
    for name, queue in (("vmcnt", wave.vector_memory), ("lgkmcnt", wave.local_memory)):
        start = text.find(f"{name}(")
        if start >= 0:
            wave.wait(queue, int(text[start + len(name) + 1 : text.index(")", start)]))
    if "cnt(" not in text:  # a number: VMCNT in bits 0-3 and 14-15, LGKMCNT in bits 8-11
        bits = int(text.split()[1], 0)
        wave.wait(wave.vector_memory, bits & 0xF | bits >> 10 & 0x30)
        wave.wait(wave.local_memory, bits >> 8 & 0xF)
