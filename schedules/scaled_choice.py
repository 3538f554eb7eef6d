"""Which schedule serves a block-scaled product, and what it is predicted to take: by the device's vendor."""

from __future__ import annotations

from ladder.ir.scaled import ScaledGemm
from schedules import scaled, wave_scaled
from schedules.scaled import ScaledCost, ScaledSchedule
from schedules.wave_scaled import WaveScaledSchedule
from targets import TileDevice

AnyScaled = ScaledSchedule | WaveScaledSchedule


def choose(form: ScaledGemm, device: TileDevice, m: int) -> AnyScaled:
    """Return the schedule that is predicted to be fastest; raises DeviceError if there is no kernel."""
    return wave_scaled.choose(form, device, m) if device.vendor == "amd" else scaled.choose(form, device, m)


def predict(form: ScaledGemm, device: TileDevice, schedule: AnyScaled, m: int) -> ScaledCost:
    """Predict the time of a call."""
    if isinstance(schedule, WaveScaledSchedule):
        return wave_scaled.predict(form, device, schedule, m)
    return scaled.predict(form, device, schedule, m)
