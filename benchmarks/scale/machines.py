"""GPUs and what connects them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from targets import TileDevice, get_device
from targets.nvidia import GIB

NODE = 8
"""GPUs whose memories reach each other without a network card."""


@dataclass(frozen=True)
class Machine:
    """A GPU and its links.

    Parameters
    ----------
    device
        Row of `targets`.
    link, network
        Peak bytes per second, one way, of a GPU to the others of its node, and of its network card.
    source
        Where these two are from.
    """

    device: TileDevice
    link: float
    network: float
    source: str

    @property
    def reads(self) -> float:
        """Bytes per second that reads of its memory sustain."""
        memory = self.device.layer("dram")
        return memory.sustained_bandwidth

    @property
    def rate(self) -> float:
        """Operations per second that products of float16 sustain."""
        cores = self.device.cores_for("float16")
        return max(self.device.peak(core) * core.sustained for core in cores)

    @property
    def capacity(self) -> int:
        """Bytes of its memory."""
        return self.device.layer("dram").capacity


def _with_memory(name: str, capacity: int, bandwidth: float) -> TileDevice:
    """Return a row of `targets` with another memory."""
    device = get_device(name)
    layers = [
        replace(layer, capacity=capacity, bandwidth=bandwidth) if layer.name == "dram" else layer
        for layer in device.layers
    ]
    return replace(device, layers=tuple(layers))


MACHINES = {
    "H100": Machine(_with_memory("cuda/sm_90a", 80 * GIB, 3.35e12), 450e9, 50e9,
                    "H100 SXM datasheet: 80 GB, 3.35 TB/s, NVLink 900 GB/s both ways; DGX: 400 Gb/s a GPU"),
    "H200": Machine(get_device("cuda/sm_90a"), 450e9, 50e9, "H200 SXM datasheet; DGX H200: 400 Gb/s a GPU"),
    "B200": Machine(get_device("cuda/sm_100a"), 900e9, 50e9,
                    "B200 datasheet: NVLink 1.8 TB/s both ways; DGX B200: 400 Gb/s a GPU"),
    "MI300X": Machine(get_device("rocm/gfx942"), 448e9, 50e9,
                      "MI300X datasheet: seven links of 64 GB/s one way; 400 Gb/s a GPU as in its platforms"),
}  # fmt: skip
"""GPUs by name: the rows of `targets`, H100 with the H200's cores and its own memory."""
