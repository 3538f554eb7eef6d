"""LADDER's device hint: the smallest tile that every layer of a device moves at full rate.

Source: Ladder (OSDI 2024), Algorithm 1, GetDeviceHint: the granularity is the LCM of the
layers' granularities, the shape the LCM of their shapes counted in that granularity.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod

from targets import Core, TileDevice


@dataclass(frozen=True)
class Hint:
    """A tile of ``shape`` granules of ``granularity`` bytes."""

    granularity: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tile."""
        return self.granularity * prod(self.shape)

    def divides(self, rows: int, row_bytes: int) -> bool:
        """Whether a tile of ``rows`` x ``row_bytes`` consists of whole hint tiles.

        The hint's lanes may be laid along rows or along columns, so its count of granules
        decides, not its outline.
        """
        return row_bytes % self.granularity == 0 and rows * row_bytes % self.nbytes == 0


def _in_granules(granule: int, shape: tuple[int, ...], granularity: int) -> tuple[int, ...]:
    """Count a layer's tile in granules of ``granularity`` bytes along its last axis."""
    row = granule * shape[-1]
    return (*shape[:-1], lcm(row, granularity) // granularity)


def device_hint(device: TileDevice, core: Core) -> Hint:
    """Return the hint of ``device`` for one of its cores (GetDeviceHint).

    device: Layers from DRAM to register.
    core: The innermost layer: its operand granule and lanes.
    Returns Hint: On A100 with FP16 tensor cores: 16 B, [4, 8].
    """
    tiles = [(layer.granule, layer.shape) for layer in device.layers]
    tiles.append((core.lane_bytes, core.lanes))
    granularity = lcm(*(granule for granule, _ in tiles))
    rank = max(len(shape) for _, shape in tiles)
    shape = (1,) * rank
    for granule, extents in tiles:
        counted = (1,) * (rank - len(extents)) + _in_granules(granule, extents, granularity)
        shape = tuple(map(lcm, shape, counted))
    return Hint(granularity, shape)
