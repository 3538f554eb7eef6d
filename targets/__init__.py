"""Devices as data: layers from DRAM to core, cores, limits and compiler targets.

May import tile_types; imports neither torch nor TVM. A new device is one row in
`nvidia.py`, `amd.py` or `cpu.py`.
"""

from __future__ import annotations

from targets import amd, cpu, nvidia
from targets.detect import VisibleGpu, host_cpu, rocm_architectures, visible_gpus
from targets.device import Core, Layer, TileDevice
from targets.machines import PRODUCTS, product
from tile_types.errors import unknown_name

__all__ = [
    "Core",
    "Layer",
    "TileDevice",
    "VisibleGpu",
    "get_device",
    "host_cpu",
    "list_devices",
    "rocm_architectures",
    "visible_gpus",
]

_DEVICES = {device.name: device for device in (*nvidia.DEVICES, *amd.DEVICES, *cpu.DEVICES)}
_ALIASES = {device.arch: name for name, device in _DEVICES.items()}


def list_devices() -> tuple[TileDevice, ...]:
    """Return every device of the table, without the detected host."""
    return tuple(_DEVICES.values())


def get_device(name: str | TileDevice) -> TileDevice:
    """Return a device by name.

    Parameters
    ----------
    name
        ``"cuda/sm_90a"``, ``"sm_90a"``, ``"rocm/gfx942"``, ``"cpu/amx"``, or ``"cpu"`` for this host;
        other products (`targets.machines`) are ``"cuda/sm_90a:h100"``, ``"cuda/sm_90a:114sm-2039gbs-50mib"``.

    Raises
    ------
    UnknownNameError
        If there is no such device; the nearest names are suggested.
    """
    if isinstance(name, TileDevice):
        return name
    if not isinstance(name, str):
        raise unknown_name("device", name, _names())
    if name == "cpu" or (name.startswith("cpu/") and name not in _DEVICES and name == host_cpu().name):
        return host_cpu()
    row, colon, numbers = PRODUCTS.get(name, name).partition(":")
    device = _DEVICES.get(_ALIASES.get(row, row))
    if device is not None and colon:
        device = product(device, numbers)
    if device is None:
        raise unknown_name("device", name, _names())
    return device


def _names() -> list[str]:
    """Return every name that `get_device` knows."""
    return [*_DEVICES, *_ALIASES, *PRODUCTS, "cpu"]
