"""Which schedule serves a block-scaled product, and what it is predicted to take: by the device's vendor."""

from __future__ import annotations

from functools import lru_cache

from ladder.ir.scaled import ScaledGemm
from schedules import scaled, wave_scaled
from schedules.scaled import ScaledCost, ScaledSchedule
from schedules.wave_scaled import WaveScaledSchedule
from targets import TileDevice

AnyScaled = ScaledSchedule | WaveScaledSchedule


@lru_cache(maxsize=4096)
def ranked(form: ScaledGemm, device: TileDevice, m: int) -> tuple[AnyScaled, ...]:
    """Return the schedules of a product, the one that is predicted to be fastest first.

    Raises DeviceError if there is no kernel.
    """
    of_vendor = wave_scaled if device.vendor == "amd" else scaled
    of_vendor.check_legal(form, device, of_vendor.LEAST)
    legal = of_vendor.schedules(form, device)
    return tuple(sorted(legal, key=lambda option: predict(form, device, option, m).seconds))


def choose(form: ScaledGemm, device: TileDevice, m: int) -> AnyScaled:
    """Return the schedule that is predicted to be fastest; raises DeviceError if there is no kernel."""
    return ranked(form, device, m)[0]


def predict(form: ScaledGemm, device: TileDevice, schedule: AnyScaled, m: int) -> ScaledCost:
    """Predict the time of a call."""
    if isinstance(schedule, WaveScaledSchedule):
        return wave_scaled.predict(form, device, schedule, m)
    return scaled.predict(form, device, schedule, m)
