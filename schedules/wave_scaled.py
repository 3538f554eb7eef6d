"""Schedules of block-scaled products on AMD GPUs, and what they are predicted to take.

Waves load codes and scales from memory straight to the registers of the matrix cores: both lie row by row,
and a lane's operand is one or two runs of bytes of a row (`LAYOUTS`). Nothing of this was measured; start-up
costs and overlap are those that `schedules.cost_amd` assumes, rates are the device's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from ladder.ir.scaled import FORMATS, ScaledGemm
from schedules.cost_amd import (
    BARRIER_CLOCKS,
    BLOCK_CLOCKS,
    FABRIC_BYTES,
    L1_BYTES,
    LAUNCH_SECONDS,
    OVERLAP,
)
from schedules.scaled import ScaledCost
from schedules.schedule import Schedule, check, passes
from targets import Core, TileDevice
from tile_types.errors import DeviceError

FRAGMENT = 16
"""Rows of either operand that an instruction multiplies."""

SPAN = 128
"""Elements of K of an instruction: four blocks of 32 with a scale each."""

WAVES = 4
"""Waves of a block."""

LANES = 64

MOST_REGISTERS = 200
"""Registers of operands and sums up to which no kernel was seen to spill."""

PIPELINE = "mfma_scale"
"""What the device's matrix instructions that scale blocks are called (`targets.amd`)."""


@dataclass(frozen=True)
class Layout:
    """How lanes hold a type's codes (AMD Instinct CDNA4 ISA, "Matrix fused-multiply-add with block scaling").

    Of a span of 128 codes of a row, lane group g of four holds run g of ``runs // 4`` quarters of the span's
    ``runs`` runs, and the scale of codes ``32 g`` to ``32 g + 31``, which of 8-bit codes are other lanes'.

    number: The type's number in the instruction (``cbsz``, ``blgp``).
    run: Bytes of a run.
    runs: Runs of a span.
    """

    number: int
    run: int
    runs: int = 4

    @property
    def words(self) -> int:
        """Registers of a lane's codes."""
        return self.run // 4 * (self.runs // 4)

    @property
    def span_bytes(self) -> int:
        """Bytes of a row's span."""
        return self.run * self.runs


LAYOUTS: Mapping[str, Layout] = {
    "mxfp8_e4m3": Layout(0, 16, 8),
    "mxfp8_e5m2": Layout(1, 16, 8),
    "mxfp6_e2m3": Layout(2, 24),
    "mxfp6_e3m2": Layout(3, 24),
    "mxfp4": Layout(4, 16),
}
"""Block types that the instruction takes, any two together."""


@dataclass(frozen=True)
class WaveScaledSchedule(Schedule):
    """How the four waves of a block multiply.

    row_steps, m_steps: Fragments of 16 weight rows, and of 16 activation rows, of a wave.
    split_k: Waves that share K and add up through LDS; the others have other weight rows.
    ahead: Spans of 128 elements of K that a wave loads at once, one turn before it multiplies them.
    """

    row_steps: int = 1
    m_steps: int = 1
    split_k: int = 4
    ahead: int = 2

    def __post_init__(self) -> None:
        limits = {"row_steps": (1, 2, 4), "m_steps": (1, 2, 4), "split_k": (1, 2, 4), "ahead": (1, 2, 4)}
        for name, allowed in limits.items():
            value = getattr(self, name)
            check(value in allowed, f"{name}={value} of a block-scaled product: one of {allowed}")

    @property
    def rows(self) -> int:
        """Weight rows of a block."""
        return FRAGMENT * self.row_steps * (WAVES // self.split_k)

    @property
    def tile_m(self) -> int:
        """Activation rows of a block."""
        return FRAGMENT * self.m_steps

    @property
    def title(self) -> str:
        """Its part of a kernel's name."""
        return f"{self.row_steps}_{self.m_steps}_{self.split_k}_{self.ahead}"

    @property
    def shared_words(self) -> int:
        """Words of LDS: sums of the waves that another one adds up."""
        slots = (self.split_k - 1) * (WAVES // self.split_k)
        return max(4, slots * self.row_steps * self.m_steps * LANES * 4)


def core_for(form: ScaledGemm, device: TileDevice) -> Core:
    """Return the matrix instruction of the product.

    Raises DeviceError if the device has none.
    """
    pair = form.weight, form.activation
    found = [core for core in device.cores if PIPELINE in core.pipelines and (core.a, core.b) == pair]
    if not found:
        raise DeviceError(
            f"{device.name} has no kernel for {form.weight} by {form.activation}: use rocm/gfx950 with"
            f" {', '.join(LAYOUTS)}, cuda/sm_100a, or a 16-bit activation"
        )
    return found[0]


def held_words(form: ScaledGemm, schedule: WaveScaledSchedule) -> int:
    """Return the registers of a lane for the codes and scales of a span."""
    weight, activation = LAYOUTS[form.weight], LAYOUTS[form.activation]
    return schedule.row_steps * (weight.words + 1) + schedule.m_steps * (activation.words + 1)


def check_legal(form: ScaledGemm, device: TileDevice, schedule: WaveScaledSchedule) -> None:
    """Raise unless the device runs the schedule.

    Raises DeviceError if it has no cores that scale such blocks.
    Raises ScheduleError if operands and sums need more registers than there are.
    """
    core_for(form, device)
    sums = schedule.row_steps * schedule.m_steps * 4
    registers = 2 * schedule.ahead * held_words(form, schedule) + sums
    check(registers <= MOST_REGISTERS, f"{registers} registers of operands and sums: use smaller tiles")


LEAST = WaveScaledSchedule(1, 1, 4, 1)
"""What every device runs that has cores which scale blocks."""


def schedules(form: ScaledGemm, device: TileDevice) -> Iterator[WaveScaledSchedule]:
    """Yield what is legal."""
    for option in product((1, 2, 4), repeat=4):
        schedule = WaveScaledSchedule(*option)
        if passes(check_legal, form, device, schedule):
            yield schedule


def predict(form: ScaledGemm, device: TileDevice, schedule: WaveScaledSchedule, m: int) -> ScaledCost:
    """Predict the time of a call whose weights come from DRAM."""
    rate = {layer.name: layer.sustained_bandwidth for layer in device.layers}
    spans = -(-form.k // SPAN)
    turns = -(-spans // (schedule.split_k * schedule.ahead))
    blocks = -(-form.n // schedule.rows) * -(-m // schedule.tile_m)
    sides = ((schedule.row_steps, form.n, form.weight), (schedule.m_steps, m, form.activation))
    loaded = sum(steps * FRAGMENT * (LAYOUTS[name].span_bytes + SPAN // 32) for steps, _, name in sides)
    own = turns * schedule.ahead
    flops = core_for(form, device).ops_per_cycle / device.schedulers
    core = own * schedule.row_steps * schedule.m_steps * 2 * FRAGMENT * FRAGMENT * SPAN / flops
    # Waves of a unit share its first cache; each has its own core.
    resident = min(8, -(-blocks // device.units))
    rounds = -(-blocks // (device.units * resident))
    waves = WAVES * resident
    busy = max(core * waves / device.schedulers, own * loaded * waves / L1_BYTES) / device.clock
    latency = device.layer("dram").latency * turns
    stored = form.n * m * (4 if form.output == "float32" else 2)
    codes = sum(rows * (FORMATS[name].row_bytes(form.k) + form.k / 32) for _, rows, name in sides)
    moved = codes + stored
    read = blocks * WAVES * own * loaded
    parts = {
        "launch": LAUNCH_SECONDS + BLOCK_CLOCKS / device.clock,
        "dram": moved / rate["dram"],
        "l2": read / rate["l2"],
        "fabric": min(read, device.dies * moved) / FABRIC_BYTES,
        "units": rounds * busy,
        "latency": rounds * latency,
        "exchange": BARRIER_CLOCKS / device.clock if schedule.split_k > 1 else 0.0,
    }
    together = ("dram", "l2", "fabric", "units", "latency")
    overlapped = sum(parts[name] ** OVERLAP for name in together) ** (1 / OVERLAP)
    return ScaledCost(parts["launch"] + parts["exchange"] + overlapped, tuple(parts.items()))
