"""The time of a CPU kernel: bytes and operations of its tile program, with the constants of its device."""

from __future__ import annotations

from ladder.ir.gemm import Gemm
from ladder.ir.program import Counts, TileProgram, count
from schedules.cost import Cost, joined
from schedules.cpu_policy import tile_program
from schedules.instructions import INSTRUCTIONS, PLANE_OPERATIONS, RECIPES
from schedules.layouts import planes
from schedules.schedule import TransformList
from targets import TileDevice

START_SECONDS = 3e-6
"""Time from the call until threads work."""


def predict_cpu(gemm: Gemm, device: TileDevice, schedule: TransformList, m: int) -> Cost:
    """Predict the time of one call.

    Raises ScheduleError if a transform may not be applied on the device.
    """
    program = tile_program(gemm, device, schedule)
    counts = count(program, m, gemm.n, gemm.k)
    row = INSTRUCTIONS[schedule.instruction]
    core = next(c for c in device.cores if c.name == schedule.instruction and c.a == row.operand)
    dram = device.layer("dram")
    vector = device.vector_ops_per_cycle * device.units * device.clock
    overlapped = {
        "dram": counts.dram / (dram.bandwidth * dram.sustained),
        "core": counts.operations / (device.peak(core) * core.sustained)
        + decode_operations(program, counts) / vector,
    }
    return joined(overlapped, {"launch": START_SECONDS}, counts.dram, 2 * m * gemm.n * gemm.k)


def decode_operations(program: TileProgram, counts: Counts) -> float:
    """Return the vector operations, in 32-bit lanes, that decode all weights as often as the program does."""
    weight = program.operand("w").tile
    extract = PLANE_OPERATIONS * len(planes(weight.ttype.elem_bits))
    words = float(weight.layout.parameters[0]) / 32
    return sum(
        elements * words * (extract + RECIPES[recipe].cost)
        for recipe, elements in counts.converted.items()
        if recipe in RECIPES
    )
