"""Predictions of time, and costs of products on any device: bytes to move, weights to decode."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from ladder.ir.gemm import Gemm
from ladder.ir.program import Counts, TileProgram, count
from schedules.codes import looked_up, raw_needs_gain, weight_bits
from schedules.cpu_policy import tile_program
from schedules.footprint import operand_bytes, scale_bytes
from schedules.group_values import scale_span
from schedules.instructions import INSTRUCTIONS, PLANE_OPERATIONS, RECIPES
from schedules.layouts import LANES, LEAST_GROUP, padded, planes
from schedules.schedule import TransformList
from targets import TileDevice
from tile_types import get_type

CONTENTION = 0.03
"""How much of the parts that overlap with the longest one shows nevertheless."""

OUTPUT_BYTES: Mapping[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}


class Cost(NamedTuple):
    """A prediction.

    seconds: Predicted time of one call.
    names, times: Of every part of the model, and its seconds.
    bytes, flops: Bytes that must cross DRAM once, and useful operations.
    """

    seconds: float
    names: tuple[str, ...]
    times: tuple[float, ...]
    bytes: int
    flops: int

    @property
    def bound(self) -> str:
        """Name of the largest part; none of a prediction whose parts were not kept."""
        return max(zip(self.times, self.names, strict=True))[1] if self.names else ""

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """``(name, seconds)`` of every part."""
        return tuple(zip(self.names, self.times, strict=True))


@lru_cache(maxsize=4096)
def weight_bytes(gemm: Gemm) -> int:
    """Return the bytes of packed weights with their scales and zeros."""
    n, k = padded(gemm.n), padded(gemm.k)
    if gemm.activation not in LANES or (gemm.group_size < gemm.k and gemm.group_size % LEAST_GROUP):
        scales = 2 * n * gemm.groups  # as CPUs have them
    else:
        scales = scale_bytes(gemm, n, -(-k // (scale_span(gemm) or k)))
    return n * k * weight_bits(gemm) // 8 + scales


@lru_cache(maxsize=4096)
def minimum_bytes(gemm: Gemm, m: int) -> int:
    """Return the bytes that any kernel must move: weights, activations and results once."""
    activation = {"float32": 4, "float16": 2, "bfloat16": 2}.get(gemm.activation, 1)
    results = m * gemm.n * OUTPUT_BYTES[gemm.output] * (1 + gemm.residual)
    return weight_bytes(gemm) + m * elements_per_row(gemm) * activation + results


class Traffic(NamedTuple):
    """Bytes of a product's operands.

    weights: Of packed weights with their scales and zeros.
    activations: Of x as the core takes it, once.
    least: That any kernel must move, results included.
    """

    weights: int
    activations: int
    least: int


@lru_cache(maxsize=4096)
def traffic_of(gemm: Gemm, m: int) -> Traffic:
    """Return the bytes of a call of ``m`` rows."""
    return Traffic(weight_bytes(gemm), m * gemm.k * operand_bytes(gemm), minimum_bytes(gemm, m))


def elements_per_row(gemm: Gemm) -> int:
    """Return the elements of x per row of A: windows overlap, so they bring few of their own."""
    if gemm.windows is None:
        return gemm.k
    at = gemm.windows
    return gemm.channels * at.groups * min(at.kernel[0], at.stride[0]) * min(at.kernel[1], at.stride[1])


@cache
def convert_ops(weight: str) -> float:
    """Return vector operations that turn one register of codes into operands.

    Evenly spaced values need one multiply-add; other exact types a shift and a rescale;
    others look-ups.
    """
    ttype = get_type(weight)
    if looked_up(weight, "float16"):
        return 6.0
    if ttype.elem_bits > 8:
        return 0.0
    values = np.unique(ttype.values()[np.isfinite(ttype.values())])
    return 1.0 if len(np.unique(np.diff(values))) < 2 else 2.0


@lru_cache(maxsize=4096)
def decode_ops(gemm: Gemm, placement: str) -> float:
    """Return vector operations per weight to extract, convert, offset and scale it."""
    per_register = 1.5 * len(planes(weight_bits(gemm))) + convert_ops(gemm.weight)
    per_register += {"none": 0, "integer": 1, "float": 2}[gemm.zero]
    multiplied = placement == "operand" or raw_needs_gain(gemm.weight, gemm.activation)
    per_register += 1 if gemm.scale and multiplied else 0
    return per_register * LANES.get(gemm.activation, 32) / 32


def cost_of(gemm: Gemm, m: int, overlapped: dict[str, float], serial: dict[str, float]) -> Cost:
    """Return the cost of a product from seconds of parts that overlap and of serial ones; see `joined`."""
    return joined(overlapped, serial, minimum_bytes(gemm, m), 2 * m * gemm.n * gemm.k)


def joined(overlapped: dict[str, float], serial: dict[str, float], nbytes: int, flops: int) -> Cost:
    """Return the cost of parts that overlap, and of those that come on top."""
    parts = {**overlapped, **serial}
    longest = max(overlapped.values())
    contention = CONTENTION * (sum(overlapped.values()) - longest)
    seconds = longest + contention + sum(serial.values())
    return Cost(seconds, tuple(parts), tuple(parts.values()), nbytes, flops)


START_SECONDS = 3e-6
"""Time from the call until threads work."""


def predict_cpu(gemm: Gemm, device: TileDevice, schedule: TransformList, m: int) -> Cost:
    """Predict the time of one call.

    Raises ScheduleError if a transform may not be applied on the device.
    """
    program = tile_program(gemm, device, schedule)
    counts = count(program, m, gemm.n, gemm.k)
    row = INSTRUCTIONS[schedule.instruction]
    operand = gemm.activation if row.split else row.operand
    core = next(c for c in device.cores if c.name == schedule.instruction and c.a == operand)
    dram = device.layer("dram")
    vector = device.vector_ops_per_cycle * device.units * device.clock
    overlapped = {
        "dram": counts.dram / dram.sustained_bandwidth,
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
