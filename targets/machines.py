"""GPUs of an architecture of the table that are another product: other memory, other multiprocessors.

Such a device is the row of its architecture with three numbers of its own, which its name holds:
``cuda/sm_90a:132sm-3352gbs-50mib`` is an H100 SXM. Code for it is code for its architecture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from targets.device import Layer, TileDevice

PATTERN = re.compile(r"(\d+)sm-(\d+)gbs-(\d+)mib")

PRODUCTS: Mapping[str, str] = {"cuda/sm_90a:h100": "cuda/sm_90a:132sm-3352gbs-50mib"}
"""Short names; the H100 is the SXM one."""

SAME = 0.05
"""Share by which what a driver says may differ from a row that is meant all the same."""


@dataclass(frozen=True)
class Numbers:
    """Numbers that tell products of one architecture apart.

    units: Multiprocessors.
    bandwidth: Peak bytes per second of DRAM.
    cache: Bytes of L2.
    """

    units: int
    bandwidth: float
    cache: int

    @staticmethod
    def of(device: TileDevice) -> Numbers:
        """Return those of a device."""
        return Numbers(device.units, device.layer("dram").bandwidth, device.layer("l2").capacity)

    def __str__(self) -> str:
        return f"{self.units}sm-{round(self.bandwidth / 1e9)}gbs-{self.cache >> 20}mib"

    def is_like(self, other: Numbers) -> bool:
        """Tell whether two are one product."""
        pairs = ((self.bandwidth, other.bandwidth), (self.cache, other.cache))
        return self.units == other.units and all(abs(a - b) <= SAME * b for a, b in pairs)


def name_with(row: TileDevice, numbers: Numbers) -> str:
    """Return the name of a product of the architecture of ``row``: that of the row where it is one."""
    return row.name if numbers.is_like(Numbers.of(row)) else f"{row.name}:{numbers}"


@cache
def product(row: TileDevice, text: str) -> TileDevice | None:
    """Return the device of which ``text`` stands behind the colon of its name; None if it is no such text."""
    found = PATTERN.fullmatch(text)
    if found is None or row.vendor != "nvidia":
        return None
    units, gbs, mib = map(int, found.groups())
    numbers = Numbers(units, gbs * 1e9, mib << 20)
    share = units / row.units

    def layer(old: Layer) -> Layer:
        bandwidth = numbers.bandwidth if old.name == "dram" else share * old.bandwidth
        return replace(old, bandwidth=bandwidth, capacity=numbers.cache if old.name == "l2" else old.capacity)

    layers = tuple(map(layer, row.layers))
    title = f"{units} multiprocessors, {gbs} GB/s, {mib} MiB of L2; else as {row.title}"
    return replace(row, name=f"{row.name}:{text}", title=title, units=units, layers=layers)
