"""Which schedule serves a block-scaled product, and what it is predicted to take: by the device's vendor."""

from __future__ import annotations

from collections.abc import Sequence

from ladder.ir.scaled import ScaledGemm
from schedules import scaled, wave_scaled
from schedules.scaled import ScaledCost, ScaledSchedule
from schedules.wave_scaled import WaveScaledSchedule
from targets import TileDevice

AnyScaled = ScaledSchedule | WaveScaledSchedule


def ranked(form: ScaledGemm, device: TileDevice, m: int) -> Sequence[AnyScaled]:
    """Return the schedules of a product, the one that is predicted to be fastest first.

    Raises DeviceError if there is no kernel.
    """
    return wave_scaled.ranked(form, device, m) if device.vendor == "amd" else scaled.ranked(form, device, m)


def choose(form: ScaledGemm, device: TileDevice, m: int) -> AnyScaled:
    """Return the schedule that is predicted to be fastest; raises DeviceError if there is no kernel."""
    return ranked(form, device, m)[0]


def predict(form: ScaledGemm, device: TileDevice, schedule: AnyScaled, m: int) -> ScaledCost:
    """Predict the time of a call."""
    if isinstance(schedule, WaveScaledSchedule):
        return wave_scaled.predict(form, device, schedule, m)
    return scaled.predict(form, device, schedule, m)
