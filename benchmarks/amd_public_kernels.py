"""Time of others' kernels on AMD GPUs by the constants of `schedules.cost_amd`: their tiles, not ours.

Tables of tuned kernels name tiles, slices of K and waves; what they do not name is what `Kernel` says. So a
published time checks the constants (clocks of matrix cores, LDS and L1, latency, bandwidths, starts), not how
well our own schedules are chosen. No constant is fitted to any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from schedules import cost_amd
from schedules.cost_amd import Stage
from targets import TileDevice

RASTER = 8
"""Tiles along N of blocks that run together, which no table names: ours."""

STAGE_BYTES = 128
"""Bytes of K of a stage where a name says none."""

ELEMENT_BYTES: Mapping[str, float] = {"bfloat16": 2.0, "int8": 1.0, "mxfp4": 0.5 + 1 / 32}
"""Bytes of an element, its share of the scales included."""

CORES: Mapping[str, str] = {"bfloat16": "bfloat16", "int8": "int8", "mxfp4": "bfloat16"}
"""Type -> that of the core in `targets`; blocks of mxfp4 are multiplied four times as fast as bfloat16."""

FASTER: Mapping[str, float] = {"mxfp4": 4.0}


@dataclass(frozen=True)
class Kernel:
    """What a published kernel's name says.

    rows, columns: Extents of a block's tile along M and N.
    slices: Blocks that share K; their sums meet in memory.
    depth: Elements of K of a stage; by default those of `STAGE_BYTES`.
    waves: Of a block, along M and N.
    ahead: Stages that are asked for before they are multiplied: two in AITER's kernels in assembly.
    """

    rows: int
    columns: int
    slices: int = 1
    depth: int = 0
    waves: tuple[int, int] = (2, 2)
    ahead: int = 1


@dataclass(frozen=True)
class Product:
    """A product of a published table.

    types: Of weights (and activations): a key of `ELEMENT_BYTES`.
    direct: Whether weights lie in the order of registers, so that they pass LDS by.
    """

    m: int
    n: int
    k: int
    types: str
    output_bytes: int
    direct: bool

    @property
    def element(self) -> float:
        """Bytes of an element of both operands."""
        return ELEMENT_BYTES[self.types]


def _stage(product: Product, device: TileDevice, kernel: Kernel) -> tuple[int, Stage]:
    """Return the stages of a block, and what one takes from its compute unit."""
    depth = kernel.depth or round(STAGE_BYTES / product.element)
    core = device.core_for(CORES[product.types], "mfma")
    along_m, along_n = kernel.waves
    ahead = depth * product.element
    through_lds = kernel.rows * (1 + along_n) + (0 if product.direct else kernel.columns * (1 + along_m))
    loaded = kernel.rows + kernel.columns * (along_m if product.direct else 1)
    matrix = 2.0 * kernel.rows * kernel.columns * depth / core.ops_per_cycle / FASTER.get(product.types, 1.0)
    stage = Stage(matrix, 0.0, ahead * through_lds / cost_amd.LDS_BYTES, ahead * loaded / cost_amd.L1_BYTES)
    return -(-product.k // (depth * kernel.slices)), stage


def _waiting(device: TileDevice, ahead: int) -> TileDevice:
    """Return a device of which a stage sees the latency that those asked for before it leave."""
    layers = (
        replace(layer, latency=layer.latency / ahead) if layer.name == "dram" else layer
        for layer in device.layers
    )
    return replace(device, layers=tuple(layers))


def seconds(product: Product, device: TileDevice, kernel: Kernel) -> float:
    """Return the time that a kernel is predicted to take."""
    device = _waiting(device, kernel.ahead)
    along_m, along_n = -(-product.m // kernel.rows), -(-product.n // kernel.columns)
    rounds = -(-along_m * along_n * kernel.slices // device.units)
    count, stage = _stage(product, device, kernel)
    waves = kernel.waves[0] * kernel.waves[1]
    resident = max(1, 2 * device.schedulers // waves)
    clocks, _ = cost_amd.block_clocks(device, stage, count, rounds, resident, waves)
    together, core = min(resident, rounds), device.core_for(CORES[product.types], "mfma")
    others = (_dram(product, device, kernel, together),
              _l2(product, device, kernel, along_m, along_n),
              _fabric(product, device, kernel, (along_m, along_n), together))  # fmt: skip
    clock = cost_amd.lowered_clock(device, core, count * rounds * stage.matrix, clocks, others)
    return cost_amd.LAUNCH_SECONDS + cost_amd.joined((clocks / clock, *others), cost_amd.OVERLAP)


def _dram(product: Product, device: TileDevice, kernel: Kernel, resident: int) -> float:
    dram = device.layer("dram")
    moved = (product.n + product.m) * product.k * product.element
    moved += product.m * product.n * product.output_bytes
    depth = kernel.depth or round(STAGE_BYTES / product.element)
    stage = (kernel.rows + kernel.columns) * depth * product.element
    in_flight = device.units * resident * stage / dram.latency
    return moved / min(dram.sustained_bandwidth, in_flight)


def _l2(product: Product, device: TileDevice, kernel: Kernel, along_m: int, along_n: int) -> float:
    l2 = device.layer("l2")
    moved = (along_m * product.n + along_n * product.m) * product.k * product.element
    moved += kernel.slices * product.m * product.n * product.output_bytes
    return moved / l2.sustained_bandwidth


def _fabric(
    product: Product, device: TileDevice, kernel: Kernel, tiles: tuple[int, int], resident: int
) -> float:
    along_m, along_n = tiles
    wave = max(1, device.units * resident // device.dies)
    rows = min(RASTER, along_n)
    columns = min(along_m, -(-wave // rows))
    moved = (rows * kernel.columns + columns * kernel.rows) * product.k * product.element
    return along_m * along_n / (rows * columns) * moved / cost_amd.FABRIC_BYTES
