"""Schedules of block-scaled products, the layout of their scales, what they are predicted to take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from ladder.ir.scaled import FORMATS, ScaledFormat, ScaledGemm
from schedules.cost_constants import WGMMA
from schedules.schedule import Schedule, check, passes
from targets import TileDevice
from tile_types.errors import DeviceError

ROWS = 128
"""Weight rows of a block, and rows of an atom of scales."""

SLAB = 128
"""Bytes of a row of codes in a stage: the widest swizzle."""

ATOM = 512
"""Bytes of an atom of scales: 128 rows by four."""

TENSOR_COLUMNS = 512
"""Columns of tensor memory."""

CLUSTER_CYCLES = 3.5e3
"""Launching a cluster, its two barriers, and reading the other block's sums (not fitted)."""

RESERVED = 2048
"""Bytes of shared memory for barriers and alignment, the driver's share included."""

TILES, STAGES, SPLITS = (32, 64, 128, 256), tuple(range(2, 15)), (1, 2, 4, 8)

HEIGHTS = (128, 64)
"""Weight rows of a block."""

LANE_SCALES = 16
"""Bytes of an atom of scales for each of its lanes: rows that follow each other by 32, four groups."""


@dataclass(frozen=True)
class ScaledSchedule(Schedule):
    """How blocks of 128 weight rows multiply.

    tile_m: Activation rows of a block.
    stages: Slabs of 128 bytes of K in flight, each with a place for its scales in tensor memory.
    split_k: Blocks of a cluster that share K and add up through distributed shared memory.
    pair: Whether two blocks of neighbouring weight rows multiply together, each with half of the activation
        rows in its shared memory (``cta_group::2``).
    rows: Weight rows of a block: 128, or for few activation rows 64, so that twice as many multiprocessors
        read weights; the other half of the instruction's rows then multiplies what is never stored.
    """

    tile_m: int = 128
    stages: int = 4
    split_k: int = 1
    pair: bool = False
    rows: int = ROWS

    def __post_init__(self) -> None:
        limits = (("tile_m", TILES), ("stages", STAGES), ("split_k", SPLITS), ("rows", HEIGHTS))
        for name, allowed in limits:
            value = getattr(self, name)
            check(value in allowed, f"{name}={value} of a block-scaled product: one of {allowed}")
        check(
            self.split_k == 1 or self.tile_m == TILES[0],
            f"blocks that share K have {TILES[0]} activation rows, not {self.tile_m}",
        )
        check(self.split_k == 1 or not self.pair, "blocks that share K multiply alone, not in pairs")
        check(
            self.rows == ROWS or (self.tile_m == TILES[0] and not self.pair),
            f"blocks of {self.rows} weight rows have {TILES[0]} activation rows, and are no pairs",
        )

    @property
    def title(self) -> str:
        """Its part of a kernel's name."""
        tiles = f"{self.tile_m}_{self.stages}_{self.split_k}" + "_pair" * self.pair
        return tiles + f"_{self.rows}" * (self.rows < ROWS)

    @property
    def partners(self) -> int:
        """Blocks that multiply together: what ``cta_group`` says."""
        return 1 + self.pair

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.split_k * self.partners

    @property
    def held_m(self) -> int:
        """Activation rows that a block has in its shared memory."""
        return self.tile_m // self.partners

    @property
    def x_atoms(self) -> int:
        """Atoms of scales that the activation rows of a block need side by side."""
        return -(-self.tile_m // ROWS)


def stage_bytes(form: ScaledGemm, schedule: ScaledSchedule) -> int:
    """Return the bytes of a stage: codes and scales; beside half of the weights is room for the rest."""
    if schedule.rows < ROWS:
        return ROWS * SLAB
    return (schedule.held_m + ROWS) * SLAB + form.slab_atoms * (1 + schedule.x_atoms) * ATOM


def copied_bytes(form: ScaledGemm, schedule: ScaledSchedule, m: int) -> int:
    """Return the bytes of a stage that a block copies: no rows of x beyond M, nor always their scales."""
    x = min(schedule.held_m, -(-m // 8) * 8)
    codes, each = (x + schedule.rows) * SLAB, form.slab_atoms * ATOM
    if schedule.rows < ROWS:
        return codes + each + form.slab_atoms * LANE_SCALES * x
    return codes + each * (1 + schedule.x_atoms)


def exchange_bytes(schedule: ScaledSchedule) -> int:
    """Return the bytes in which a block receives the sums of its cluster."""
    return (schedule.split_k - 1) * (schedule.tile_m // schedule.split_k) * ROWS * 4


def shared_bytes(form: ScaledGemm, schedule: ScaledSchedule) -> int:
    """Return the bytes of shared memory of a block."""
    return schedule.stages * stage_bytes(form, schedule) + exchange_bytes(schedule) + RESERVED


def scale_columns(form: ScaledGemm, schedule: ScaledSchedule) -> int:
    """Return the columns of tensor memory that the scales of a stage take."""
    return 4 * form.slab_atoms * (1 + schedule.x_atoms)


def tensor_columns(form: ScaledGemm, schedule: ScaledSchedule) -> int:
    """Return the columns of tensor memory that a block allocates: a power of two."""
    needed = schedule.tile_m + schedule.stages * scale_columns(form, schedule)
    return 1 << max(5, (needed - 1).bit_length())


def check_legal(form: ScaledGemm, device: TileDevice, schedule: ScaledSchedule) -> None:
    """Raise unless the device runs the schedule.

    Raises DeviceError if it has no cores that scale blocks.
    Raises ScheduleError if the schedule does not fit; names the rule.
    """
    pair = [FORMATS[name] for name in (form.weight, form.activation)]
    if "block.scale" not in device.features or len({one.kind for one in pair}) > 1 or pair[0].bits == 6:
        raise DeviceError(
            f"{device.name} has no kernel for {form.weight} by {form.activation}: use cuda/sm_100a with"
            " mxfp8, mxfp4 or nvfp4 by itself, rocm/gfx950 with mxfp8, mxfp6 or mxfp4, or a 16-bit activation"
        )
    check(
        schedule.split_k <= form.slabs,
        f"{schedule.split_k} blocks share K={form.k}, of {form.slabs} slabs of 128 bytes",
    )
    shared = shared_bytes(form, schedule)
    check(shared <= device.shared_per_block, f"{shared} bytes of shared memory of {device.shared_per_block}")
    room = (ROWS - schedule.rows) * SLAB - schedule.held_m * SLAB - 2 * form.slab_atoms * ATOM
    check(schedule.rows == ROWS or room >= 0, f"half a stage has no room for x and scales of {form.weight}")
    columns = tensor_columns(form, schedule)
    check(columns <= TENSOR_COLUMNS, f"{columns} columns of tensor memory of {TENSOR_COLUMNS}")


LEAST = ScaledSchedule(32, 2)
"""What every device runs that has cores which scale blocks."""


def is_legal(form: ScaledGemm, device: TileDevice, schedule: ScaledSchedule) -> bool:
    """Whether `check_legal` accepts the schedule."""
    return passes(check_legal, form, device, schedule)


def schedules(form: ScaledGemm, device: TileDevice) -> Iterator[ScaledSchedule]:
    """Yield what is legal."""
    for tile_m in TILES:
        for stages in STAGES:
            for more in _WAYS if tile_m == TILES[0] else _WAYS[:2]:
                option = ScaledSchedule(tile_m, stages, *more)
                if is_legal(form, device, option):
                    yield option


_ALONE = [(split, False, rows) for split, rows in product(SPLITS, HEIGHTS) if (split, rows) != (1, ROWS)]

_WAYS: tuple[tuple[int, bool, int], ...] = ((1, False, ROWS), (1, True, ROWS), *_ALONE)
"""Slices of K, pairs and weight rows that are considered; but for the first two with few activation rows."""


@dataclass(frozen=True)
class ScaledCost:
    """Predicted seconds of a call, and of its parts."""

    seconds: float
    parts: tuple[tuple[str, float], ...]

    @property
    def bound(self) -> str:
        """The longest part."""
        return max(self.parts, key=lambda part: part[1])[0]


def predict(form: ScaledGemm, device: TileDevice, schedule: ScaledSchedule, m: int) -> ScaledCost:
    """Predict the time of a call, one of many in a CUDA graph whose weights come from DRAM.

    The constants are wgmma's, fitted on an H200 (`schedules.cost_constants`), with the device's own rates; a
    cluster costs what it does gemv, whose blocks exchange as few sums. No block-scaled product was measured.
    """
    layers = {layer.name: layer for layer in device.layers}
    rate = {name: layer.sustained_bandwidth for name, layer in layers.items()}
    core = device.core_for("fp8_e4m3", "tcgen05")
    pairs, m_tiles = -(-form.n // (schedule.rows * schedule.partners)), -(-m // schedule.tile_m)
    n_tiles = pairs * schedule.partners
    blocks, slabs = n_tiles * m_tiles * schedule.split_k, -(-form.slabs // schedule.split_k)
    by_columns = TENSOR_COLUMNS // tensor_columns(form, schedule)
    resident = max(1, min(device.shared_per_unit // shared_bytes(form, schedule), by_columns))
    per_unit = -(-blocks // device.units)
    stored = form.row_bytes + form.scale_atoms * 4
    out = {"float32": 4}.get(form.output, 2)
    moved = (form.n + m) * stored + m * form.n * out
    loaded = copied_bytes(form, schedule, m) * slabs
    flops = 2 * ROWS * schedule.tile_m * slabs * SLAB * 8 // form.format.bits
    tensor = flops * form.format.bits / 8 / (core.ops_per_cycle * core.sustained * device.clock)
    stage = max(tensor, loaded / (WGMMA["INGEST_BYTES"] * device.clock)) / slabs
    # A buffer is asked for again when it has been used: as `schedules.cost_model.Work`.
    waiting = max(stage, (WGMMA["FILL_SECONDS"] + stage) / (schedule.stages * min(resident, per_unit)))
    units = per_unit * (waiting * slabs + WGMMA["BLOCK_SECONDS"] / min(resident, per_unit))
    # Blocks of a pair wait for each other, as those that share x do.
    units *= 1 + WGMMA["MULTICAST_LOSS"] * schedule.pair
    exchange = 0.0
    if schedule.split_k > 1:
        received = (schedule.split_k - 1) * (schedule.tile_m // schedule.split_k)
        exchange = CLUSTER_CYCLES / device.clock + WGMMA["EXCHANGE_SECONDS"] * received
    dram, l2 = moved / rate["dram"], blocks * loaded / rate["l2"]
    launch, overlap = WGMMA["LAUNCH_SECONDS"], WGMMA["OVERLAP"]
    parts = {"launch": launch, "dram": dram, "l2": l2, "units": units, "exchange": exchange}
    busy = (units**overlap + dram**overlap + l2**overlap) ** (1 / overlap)
    return ScaledCost(launch + exchange + busy, tuple(parts.items()))


def place_scales(scales: Any, own: ScaledFormat, k: int) -> Any:
    """Bring scales, as bytes ``[rows, groups]`` of torch, into the order in which tensor memory takes them.

    Returns ``[atoms of rows, atoms of groups, 512]``. An atom has 128 rows r by four groups g, at byte
    ``16 (r % 32) + 4 (r // 32) + g``: what ``tcgen05.cp.32x128b`` brings to lane ``r % 32``, byte g of column
    ``r // 32`` (PTX ISA, "Scale factor layout"). What has no row or no group is 0: a finite scale.
    """
    import torch

    rows, groups = scales.shape
    tall, wide = -(-rows // ROWS), own.scale_atoms(k)
    padded = torch.nn.functional.pad(scales, (0, wide * 4 - groups, 0, tall * ROWS - rows))
    return padded.reshape(tall, 4, 32, wide, 4).permute(0, 3, 2, 1, 4).reshape(tall, wide, ATOM).contiguous()
