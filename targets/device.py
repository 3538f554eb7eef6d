"""Devices as data: layers from DRAM to core, and the cores themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tile_types.errors import ConversionError, DeviceError


@dataclass(frozen=True)
class Layer:
    """One memory layer.

    name: ``"dram"``, ``"l2"``, ``"shared"``, ``"register"``, ...
    granule: Bytes that one lane moves in one access: the granularity type of the layer's tile.
    shape: Granules that one full-rate access covers.
    capacity: Bytes of one instance of the layer.
    bandwidth: Peak bytes per second, summed over the device.
    sustained: Fraction of ``bandwidth`` that a good kernel reaches.
    moves: Instructions that bring a tile from this layer to the next one inwards.
    latency: Seconds from request to use.
    """

    name: str
    granule: int
    shape: tuple[int, ...]
    capacity: int
    bandwidth: float
    sustained: float = 1.0
    moves: tuple[str, ...] = ()
    latency: float = 0.0

    @property
    def sustained_bandwidth(self) -> float:
        """Bytes per second that a good kernel reaches."""
        return self.bandwidth * self.sustained


@dataclass(frozen=True)
class Core:
    """One compute instruction ``acc[m,n] += a[m,k] · b[n,k]``.

    name: Its mnemonic.
    m, n, k: Extents of one instruction.
    a, b, accumulator: Element types by name (`tile_types`).
    ops_per_cycle: Multiplies and adds per cycle of one unit (SM, CU, CPU core), dense.
    pipelines: Schedule pipelines that use it.
    lane_bytes, lanes: Operand bytes that one lane hands over at once, and how the lanes are arranged: the
        tile of the core layer.
    sustained: Fraction of the peak that a good kernel reaches.
    """

    name: str
    m: int
    n: int
    k: int
    a: str
    b: str
    accumulator: str
    ops_per_cycle: float
    pipelines: tuple[str, ...]
    lane_bytes: int
    lanes: tuple[int, ...]
    sustained: float = 0.85


def accumulator_of(operand: str) -> str:
    """Return the type in which GPUs' cores sum up products of a type."""
    return "int32" if operand == "int8" else "float32"


@dataclass(frozen=True)
class TileDevice:
    """A device as the compiler sees it.

    name: ``"cuda/sm_90a"``: TVM target kind and architecture; of another product than the row's title says,
        also its numbers (`targets.machines`).
    vendor, arch, title: ``"nvidia"``, ``"sm_90a"``, and the product whose constants are used.
    units, clock: SMs, CUs or CPU cores, and their boost clock in Hz.
    warp: Lanes that run in lockstep (1 on a CPU).
    layers: From DRAM inwards.
    cores: Compute instructions, fastest first.
    target: TVM target as sorted pairs; see `tvm_target`.
    compile_options: Extra options of the device compiler (nvcc).
    features: Named abilities, e.g. ``"cp.async"``, ``"wgmma"``, ``"fp8"``, ``"avx512_bf16"``.
    vector_ops_per_cycle: 32-bit integer or float operations per cycle of one unit, for decoding.
    registers_per_unit, max_threads_per_unit, max_blocks_per_unit: Occupancy limits (0 on a CPU).
    shared_per_block, shared_per_unit: Bytes of shared memory a block may take, and that a unit has.
    toolkit: Compiler versions that know the device, e.g. ``"cuda>=9.0,<13.0"``.
    source: Where the constants come from.
    dies: Dies with an L2 of their own, to which blocks are dealt in turn.
    schedulers: Parts of a unit that issue for their own warps, each with its share of the registers.
    """

    name: str
    vendor: str
    arch: str
    title: str
    units: int
    clock: float
    warp: int
    layers: tuple[Layer, ...]
    cores: tuple[Core, ...]
    target: tuple[tuple[str, Any], ...]
    compile_options: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()
    vector_ops_per_cycle: float = 64.0
    registers_per_unit: int = 0
    max_threads_per_unit: int = 0
    max_blocks_per_unit: int = 0
    shared_per_block: int = 0
    shared_per_unit: int = 0
    toolkit: str = ""
    source: str = ""
    dies: int = 1
    schedulers: int = 4

    def __hash__(self) -> int:
        """Return the hash of the name alone: devices are keys of many caches, and few share a name."""
        return hash(self.name)

    @property
    def row(self) -> str:
        """Name of the row of the table that this device is, or of whose architecture it is a product."""
        return self.name.partition(":")[0]

    @property
    def kind(self) -> str:
        """TVM target kind: ``"cuda"``, ``"rocm"`` or ``"llvm"``."""
        return str(dict(self.target)["kind"])

    @property
    def tvm_target(self) -> dict[str, Any]:
        """The target as the dictionary that ``tvm.target.Target`` takes."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in self.target}

    @property
    def is_gpu(self) -> bool:
        """Whether kernels run outside the host's address space."""
        return self.vendor != "cpu"

    @property
    def compute_capability(self) -> tuple[int, int]:
        """CUDA compute capability, e.g. ``(9, 0)``; ``(0, 0)`` on other devices."""
        digits = "".join(filter(str.isdigit, self.arch)) if self.vendor == "nvidia" else ""
        return (int(digits[:-1]), int(digits[-1])) if digits else (0, 0)

    def layer(self, name: str) -> Layer:
        """Return the memory layer called ``name``."""
        found = self._layers.get(name)
        if found is None:
            raise DeviceError(f"{self.name} has no layer {name!r}; it has {', '.join(self._layers)}")
        return found

    @cached_property
    def _layers(self) -> dict[str, Layer]:
        return {layer.name: layer for layer in self.layers}

    def peak(self, core: Core) -> float:
        """Return the peak rate of ``core`` over the whole device, in operations per second."""
        return core.ops_per_cycle * self.units * self.clock

    def cores_for(self, operand: str, pipeline: str | None = None) -> tuple[Core, ...]:
        """Return the cores that multiply activations of type ``operand``, fastest first."""
        return tuple(
            core
            for core in self.cores
            if core.a == operand and (core.pipelines if pipeline is None else pipeline in core.pipelines)
        )

    def core_for(self, operand: str, pipeline: str | None = None) -> Core:
        """Return the fastest core for activations of type ``operand``.

        Raises ConversionError if the device has none; the message names the operand types that it has.
        """
        cores = self.cores_for(operand, pipeline)
        if not cores:
            usable = sorted({core.a for core in self.cores if core.pipelines})
            where = f" in pipeline {pipeline!r}" if pipeline else ""
            advice = f"use one of {', '.join(usable)}" if usable else "no pipeline emits code for it yet"
            raise ConversionError(f"{self.name} has no core for {operand} activations{where}; {advice}")
        return cores[0]
