"""Detection of this machine: the host CPU by its feature flags, GPUs by compute capability."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from targets import nvidia
from targets.cpu import ATTRIBUTES, cpu_device, mcpu_for
from targets.device import TileDevice
from targets.machines import Numbers, name_with

COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76
MULTIPROCESSORS, MEMORY_KHZ, MEMORY_BITS, L2_BYTES = 16, 36, 37, 38
"""CUdevice_attribute values (CUDA driver API)."""

DOUBLE_RATE = 2
"""Transfers per clock that the driver states of memory."""

ALIASES: Mapping[str, str] = {"asimddp": "dotprod", "avx512vbmi": "avx512_vbmi"}
"""cpuinfo flags that we spell differently."""

EXTRA = frozenset({"sse4_2", "avx", "avx512_vp2intersect"})

REQUEST_TILES = (158, 0x1023, 18)
"""``arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`` on x86-64."""

log = logging.getLogger("ladder.targets")

CUDA_ARCHITECTURES: Mapping[tuple[int, int], str] = {
    (7, 0): "sm_70",
    (7, 5): "sm_75",
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_80",  # Orin runs sm_80 cubins
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
}


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU that the driver shows: its ordinal, compute capability and device name (None: unsupported).

    The name holds what tells it from the product of its architecture's row.
    """

    ordinal: int
    capability: tuple[int, int]
    device: str | None


def cpu_features(cpuinfo: str) -> frozenset[str]:
    """Return the features that matter from the text of /proc/cpuinfo."""
    flags: set[str] = set()
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = {ALIASES.get(flag, flag) for flag in value.split()}
            break
    return frozenset(flags & (ATTRIBUTES.keys() | EXTRA))


def core_count() -> int:
    """Return the number of CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def may_use_tiles() -> bool:
    """Ask Linux for AMX's tile registers, for this process and for good.

    Linux refuses where a signal stack is too small for them, as after
    ``faulthandler.enable()``; using them all the same ends the process
    (Documentation/arch/x86/xstate.rst).
    """
    try:
        syscall = ctypes.CDLL(None).syscall
    except (OSError, AttributeError):
        return False
    return bool(syscall(*(ctypes.c_long(value) for value in REQUEST_TILES)) == 0)


@cache
def host_cpu() -> TileDevice:
    """Return the CPU this process runs on; AMX counts only if Linux lets the process use it.

    Without /proc/cpuinfo (not Linux) only the machine name is known and the portable
    feature set of that machine is assumed.
    """
    path = Path("/proc/cpuinfo")
    features = (
        cpu_features(path.read_text(encoding="utf-8", errors="replace")) if path.exists() else frozenset()
    )
    tiles = {feature for feature in features if feature.startswith("amx")}
    if tiles and not may_use_tiles():
        log.warning("Linux denies this process AMX (is a small signal stack set?); AVX-512 is used instead")
        features -= tiles
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        features |= {"asimd"}
    name = "aarch64" if "asimd" in features else mcpu_for(features)
    return cpu_device(f"cpu/{name}", f"this machine ({machine})", features, core_count())


@cache
def _driver() -> ctypes.CDLL | None:
    """Load and initialise the CUDA driver, or return None where there is none."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            library = ctypes.CDLL(name)
            return library if library.cuInit(0) == 0 else None
        except (OSError, AttributeError):
            continue
    return None


def visible_gpus() -> list[VisibleGpu]:
    """Return the NVIDIA GPUs that the driver shows, by compute capability; empty without a driver."""
    library = _driver()
    count = ctypes.c_int(0)
    if (
        library is None
        or not hasattr(library, "cuDeviceGetAttribute")
        or library.cuDeviceGetCount(ctypes.byref(count))
    ):
        return []
    return [gpu for ordinal in range(count.value) if (gpu := _gpu(library, ordinal)) is not None]


def _gpu(library: ctypes.CDLL, ordinal: int) -> VisibleGpu | None:
    device = ctypes.c_int(0)
    if library.cuDeviceGet(ctypes.byref(device), ordinal):
        return None
    wanted = COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR
    major, minor = (_attribute(library, device, number) for number in wanted)
    if major is None or minor is None:
        return None
    told = (_attribute(library, device, n) for n in (MULTIPROCESSORS, MEMORY_KHZ, MEMORY_BITS, L2_BYTES))
    return VisibleGpu(ordinal, (major, minor), product_name((major, minor), *told))


def _attribute(library: ctypes.CDLL, device: ctypes.c_int, number: int) -> int | None:
    """Return an attribute of a GPU; None where the driver has none."""
    value = ctypes.c_int(0)
    return None if library.cuDeviceGetAttribute(ctypes.byref(value), number, device) else value.value


def product_name(
    capability: tuple[int, int],
    units: int | None,
    memory_khz: int | None,
    memory_bits: int | None,
    cache: int | None,
) -> str | None:
    """Return the device name of a GPU by what its driver says; what it does not say is as the row has it.

    capability: Compute capability.
    units: Multiprocessors.
    memory_khz, memory_bits: Clock and width of its memory, whose product is the bandwidth.
    cache: Bytes of L2.
    """
    name = device_for_capability(capability)
    row = next((device for device in nvidia.DEVICES if device.name == name), None)
    if row is None:
        return None
    bandwidth = DOUBLE_RATE * 1e3 * (memory_khz or 0) * (memory_bits or 0) / 8
    known = Numbers.of(row)
    return name_with(row, Numbers(units or known.units, bandwidth or known.bandwidth, cache or known.cache))


def device_for_capability(capability: tuple[int, int]) -> str | None:
    """Return the device name whose code runs on a GPU of this compute capability, or None."""
    arch = CUDA_ARCHITECTURES.get(capability)
    return None if arch is None else f"cuda/{arch}"


def rocm_architectures(root: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> list[str]:
    """Return the gfx names of AMD GPUs that the kernel driver shows; empty without one.

    ``gfx_target_version`` is major * 10000 + minor * 100 + stepping; minor and stepping are
    printed in hexadecimal (kfd topology ABI).
    """
    names = []
    for properties in sorted(root.glob("*/properties")):
        fields = dict(line.split(maxsplit=1) for line in properties.read_text().splitlines() if " " in line)
        version = int(fields.get("gfx_target_version", "0"))
        if version:
            names.append(f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}")
    return names
