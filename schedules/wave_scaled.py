"""Schedules of block-scaled products on AMD GPUs, and what they are predicted to take.

Waves load codes and scales from memory straight to the registers of the matrix cores: both lie row by row,
and a lane's operand is 16 bytes of a row. Nothing of this was measured; start-up costs and overlap are
those that `schedules.cost_amd` assumes, rates are the device's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from ladder.ir.scaled import ScaledGemm
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
from targets import TileDevice
from tile_types.errors import DeviceError

FRAGMENT = 16
"""Rows of either operand that an instruction multiplies."""

SPAN = 128
"""Elements of K of an instruction: four blocks of 32 with a scale each."""

WAVES = 4
"""Waves of a block."""

LANES = 64

FORMATS = ("mxfp4",)
"""Block types whose operands lanes hold as they lie: 32 neighbours of a row, which share a scale."""

FLOPS = 4096
"""Operations per cycle of a SIMD's core on 4-bit floats (CDNA4 whitepaper: 9.2 PFLOPS of 1024 at 2.4 GHz)."""


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
        registers = 2 * self.ahead * (self.row_steps + self.m_steps) * 5 + self.row_steps * self.m_steps * 4
        check(registers <= 200, f"{registers} registers of operands and sums: use smaller tiles")

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


def check_legal(form: ScaledGemm, device: TileDevice) -> None:
    """Raise unless the device multiplies such operands.

    Raises DeviceError if it has no cores that scale blocks, or this does not emit their type.
    """
    if "fp4" not in device.features or form.weight not in FORMATS:
        raise DeviceError(
            f"{device.name} has no kernel for {form.weight} by {form.activation}: use rocm/gfx950 with"
            f" {', '.join(FORMATS)}, cuda/sm_100a, or a 16-bit activation"
        )


def schedules() -> Iterator[WaveScaledSchedule]:
    """Yield what there is."""
    for option in product((1, 2, 4), repeat=4):
        if passes(WaveScaledSchedule, *option):
            yield WaveScaledSchedule(*option)


def predict(form: ScaledGemm, device: TileDevice, schedule: WaveScaledSchedule, m: int) -> ScaledCost:
    """Predict the time of a call whose weights come from DRAM."""
    rate = {layer.name: layer.bandwidth * layer.sustained for layer in device.layers}
    spans = -(-form.row_bytes // (SPAN // 2))
    turns = -(-spans // (schedule.split_k * schedule.ahead))
    blocks = -(-form.n // schedule.rows) * -(-m // schedule.tile_m)
    fragments = schedule.row_steps + schedule.m_steps
    loaded = fragments * FRAGMENT * (SPAN // 2 + SPAN // 32)
    own = turns * schedule.ahead
    core = own * schedule.row_steps * schedule.m_steps * 2 * FRAGMENT * FRAGMENT * SPAN / FLOPS
    # Waves of a unit share its first cache; each has its own core.
    resident = min(8, -(-blocks // device.units))
    rounds = -(-blocks // (device.units * resident))
    waves = WAVES * resident
    busy = max(core * waves / device.schedulers, own * loaded * waves / L1_BYTES) / device.clock
    latency = device.layer("dram").latency * turns
    stored = form.n * m * (4 if form.output == "float32" else 2)
    moved = (form.n + m) * form.row_bytes * (1 + 1 / 16) + stored
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


@lru_cache(maxsize=4096)
def choose(form: ScaledGemm, device: TileDevice, m: int) -> WaveScaledSchedule:
    """Return the schedule that is predicted to be fastest; raises as `check_legal` does."""
    check_legal(form, device)
    return min(schedules(), key=lambda option: predict(form, device, option, m).seconds)
