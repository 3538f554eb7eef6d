"""Tiles of GPU schedules, grown from the core outwards and aligned to the hint of the device.

Source: Ladder (OSDI 2024), section 4.3.

LADDER's device hint: the smallest tile that every layer of a device moves at full rate.

Source: Ladder (OSDI 2024), Algorithm 1, GetDeviceHint: the granularity is the LCM of the
layers' granularities, the shape the LCM of their shapes counted in that granularity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd, lcm, prod
from typing import Any

from ladder.ir.gemm import Gemm
from ladder.ir.windows import Windows
from schedules.codes import decodes_to_floats, table_bytes, takes_sixteens, weight_bits
from schedules.cost import minimum_bytes
from schedules.cost_model import is_tight
from schedules.footprint import (
    PARTIAL_COLUMNS,
    PROMOTED_COLUMNS,
    SLICED,
    SWIZZLE_ROW,
    WARPGROUPS,
    carries,
    k_blocks,
    k_slices,
    of_any_n,
    operand_bytes,
    promotes,
    shared_bytes,
    stage_bytes,
    warpgroup_blocks,
)
from schedules.im2col import MOST_STRIDE, is_reached
from schedules.layouts import lane_of, padded
from schedules.legal import cuts_groups, grid_violations, is_legal, least_stages, placement_for
from schedules.rules import AXES, RULES
from schedules.schedule import GpuSchedule
from schedules.waves import GROUPS
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


CHANNEL_PIECES = 128
"""Channels of a tap that a copy takes at most: which divisor of it divides them is what counts."""

FEW_ROWS = 64
"""Activation rows of a tile of fp8 x fp8 beyond which the deepest ring was measured to pay."""

GRID = ("split_k", "persistent", "cluster", "stream_k")
"""How wgmma's blocks share tiles: what fits one block of no such grid fits none."""

LARGE: Mapping[str, tuple[str, ...]] = {"wgmma": ("wgmma",), "tcgen05": ("tcgen05", "mma")}
"""Feature of a device -> pipelines that compete for many rows of A; without any, ``mma`` alone.

Nothing of ``tcgen05`` was measured yet, so that it must be predicted to be faster.
"""

WAVES_OF: Mapping[str, tuple[str, str]] = {
    "mfma": ("dot", "mfma"),
    "wmma": ("dot32", "wmma"),
    "wmma.split": ("dot32", "wmma_split"),
}
"""Feature of an AMD device -> its pipelines for few rows of A, and for many."""

MOST_GEMV_M = 16
"""M up to which gemv competes: beyond, it reads the weights twice."""

MOST_DIGIT_M = 8
"""M up to which codes are multiplied in place: beyond, several products per code cost more than decoding."""

MOST_DOT_M = 4
"""M up to which dot products are tried: beyond, matrix instructions take fewer cycles."""

LEAST_TILE, LEAST_TABLE_TILE = 3 / 8, 1 / 2
"""Smallest tile along M that competes, over the largest; and of types that tables decode."""

MOST_SLICES = 4
"""Blocks per multiprocessor up to which splitting K further was ever among the fastest."""


def pipelines_for(device: TileDevice, m: int, *, full: bool = False) -> tuple[str, ...]:
    """Return the pipelines that compete for M = ``m`` on ``device``; ``full``: the policy may be wrong."""
    if device.vendor == "cpu":
        return ("cpu",)
    if device.vendor == "amd":
        dots, matrix = next(names for feature, names in WAVES_OF.items() if feature in device.features)
        few = (dots, matrix) if m <= MOST_DOT_M else (matrix,)
        return (*few, GROUPS) if m == 1 and matrix == "mfma" else few
    large = next((names for feature, names in LARGE.items() if feature in device.features), ("mma",))
    gemv = "ldmatrix" in device.features
    few = ("gemv", "digits") if "cp.async" in device.features and m <= MOST_DIGIT_M else ("gemv",)
    if full:
        return (*few, *large) if gemv and m <= MOST_GEMV_M else large
    if gemv and m <= 8:
        return few
    return ("gemv", *large) if gemv and m <= MOST_GEMV_M else large


def aligned(hint: Hint, gemm: Gemm, schedule: GpuSchedule) -> bool:
    """Whether the weight operand of every block step consists of whole hint tiles."""
    return hint.divides(schedule.tile_n, schedule.tile_k * operand_bytes(gemm))


def tilings(
    gemm: Gemm, device: TileDevice, pipeline: str, m: int, *, full: bool = False
) -> Iterator[GpuSchedule]:
    """Yield legal schedules of ``pipeline``, grown from the core's tile to the block's.

    gemm, device: The problem and where it runs.
    pipeline: A key of `schedules.rules.RULES`.
    m: Rows of A: tiles of M beyond the next size up only add padding.
    full: Every legal schedule, for tuning; by default `Rule.depths`, and of wgmma only splits of K
        that still find idle multiprocessors and tiles that leave ptxas some registers.
    """
    column, block = _column(gemm, pipeline), of_any_n(gemm)
    deeper, held = _known_depths(column, device, pipeline), _held(column, device, pipeline)
    competing = _tiles_of_m(gemm, pipeline, full=full)
    least = LEAST_TABLE_TILE if table_bytes(gemm) else LEAST_TILE
    useful = _useful_m(competing, m, least)
    if held and held.isdisjoint(useful):  # registers hold only smaller ones
        useful = _useful_m(tuple(rows for rows in competing if rows in held), m, least)
    sensible = _sensible(gemm, device, pipeline)
    missed = minimum_bytes(gemm, m) > device.layer("l2").capacity
    for schedule in (tile for rows in sensible if rows in useful for tile in sensible[rows]):
        if not _worthwhile(gemm, device, schedule, m):
            continue
        if full:
            depths = (schedule.varied(stages=stages) for stages in RULES[pipeline].stages)
            legal = (deep for deep in depths if is_legal(gemm, device, deep))
            yield from _with_tails(gemm, device, legal, m) if missed else legal
        elif pipeline != "wgmma" or (
            _finds_idle(gemm, device, schedule, m) and not is_tight(block, schedule)
        ):
            if schedule not in deeper:
                deeper[schedule] = tuple(_depths(column, device, schedule))
            known = deeper[schedule]
            yield from _with_tails(gemm, device, known, m) if missed else known


def _with_tails(
    gemm: Gemm, device: TileDevice, schedules: Iterable[GpuSchedule], m: int
) -> Iterator[GpuSchedule]:
    """Yield schedules, and behind each that cuts shares what cuts tails, where L2 holds not all operands.

    Half a round of tiles must be left: the blocks of fewer take in many parts.
    """
    for schedule in schedules:
        yield schedule
        tiles = -(-m // schedule.tile_m) * -(-gemm.n // schedule.tile_n)
        if schedule.stream_k and 2 * (tiles % device.units) >= device.units:
            yield _with_cut_tails(schedule)


@lru_cache(maxsize=4096)
def _with_cut_tails(schedule: GpuSchedule) -> GpuSchedule:
    """Return the one such schedule: what is known of it is found faster by the same object."""
    return schedule.varied(tails=True)


def _column(gemm: Gemm, pipeline: str) -> Gemm:
    """Return a problem of the same legal schedules: N does not count, for some pipelines nor does K."""
    plain = replace(of_any_n(gemm), bias=False, epilogue=(), residual=False, factor=False)
    if pipeline not in ("wgmma", "mma"):
        return plain
    windows = gemm.windows
    if windows:
        steps = 2 if is_reached(windows) else MOST_STRIDE + 1
        windows = Windows((1, 1), (steps, steps), features=windows.features)
    channels = gcd(gemm.channels, CHANNEL_PIECES) if windows else CHANNEL_PIECES
    grouped = gemm.group_size < gemm.k
    k = channels * (2 * gemm.group_size + 1 if grouped else 3)  # an odd multiple: divisible by no more
    return replace(plain, k=k, group_size=gemm.group_size if grouped else k, windows=windows)


@lru_cache(maxsize=256)
def _known_depths(
    gemm: Gemm, device: TileDevice, pipeline: str
) -> dict[GpuSchedule, tuple[GpuSchedule, ...]]:
    """Return what `_depths` gave so far, for `tilings` at every M."""
    return {}


@lru_cache(maxsize=256)
def _shallow(gemm: Gemm, device: TileDevice, pipeline: str) -> tuple[GpuSchedule, ...]:
    """Return every legal tile at the smaller of the two smallest depths that it allows. N does not count."""
    rule = RULES[pipeline]
    hint = device_hint(device, device.core_for(gemm.activation, pipeline))
    choices = {name: getattr(rule, name) for name in AXES if name != "stages" and getattr(rule, name)}
    choices.setdefault("placement", (placement_for(gemm),))
    grids = _grids(gemm, {name: choices.pop(name) for name in GRID}) if pipeline == "wgmma" else ({},)
    found: list[GpuSchedule] = []
    for values in product(*choices.values()):
        fields = dict(zip(choices, values, strict=True))
        if pipeline in SLICED and fields["warps"] % fields["split_k"]:
            continue  # never legal, and half of them all
        tile = GpuSchedule(pipeline, stages=_smallest_depth(gemm, pipeline, fields["tile_k"]), **fields)
        if aligned(hint, gemm, tile) and is_legal(gemm, device, tile):
            ways = (tile.varied(**grid) if grid else tile for grid in grids)
            found += (way for way in ways if way is tile or is_legal(gemm, device, way))
    return tuple(found)


def _grids(gemm: Gemm, choices: Mapping[str, Iterable[Any]]) -> tuple[dict[str, Any], ...]:
    """Return the ways in which blocks of wgmma may share tiles, whatever these are."""
    every = (dict(zip(choices, values, strict=True)) for values in product(*choices.values()))
    smallest = GpuSchedule("wgmma", RULES["wgmma"].tile_m[0], placement=placement_for(gemm))
    return tuple(grid for grid in every if not any(grid_violations(gemm, smallest.varied(**grid))))


@lru_cache(maxsize=256)
def _held(gemm: Gemm, device: TileDevice, pipeline: str) -> frozenset[int]:
    """Return the activation rows of the tiles that registers hold."""
    return frozenset(tile.tile_m for tile in _shallow(gemm, device, pipeline))


def _smallest_depth(gemm: Gemm, pipeline: str, tile_k: int) -> int:
    """Return the smaller of a pipeline's two smallest depths that steps of ``tile_k`` allow."""
    few, more = RULES[pipeline].stages[0], RULES[pipeline].stages[:2][-1]
    return more if pipeline == "wgmma" and few < least_stages(gemm, tile_k) else few


def _depths(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Iterator[GpuSchedule]:
    """Yield the depths of pipelining worth ranking for a tile whose smallest depth is legal.

    `Rule.depths`, for wgmma and digits up to the first that covers DRAM's latency, and what `_deeper` adds.
    Shallower ones replace them for the smallest step of K alone: a longer step with so few buffers was never
    measured.
    """
    dram, stage = device.layer("dram"), stage_bytes(gemm, schedule)
    wanted = dram.sustained_bandwidth * dram.latency / device.units
    until_enough = schedule.pipeline in (*WARPGROUPS, "digits")
    used = int(schedule.pipeline in WARPGROUPS)
    found = None
    rule = RULES[schedule.pipeline]
    for stages in rule.depths or rule.stages:
        deep = schedule.varied(stages=stages)
        if not is_legal(gemm, device, deep):
            break
        if found and not until_enough:
            yield found
        found = deep
        if until_enough and (stages - used) * stage >= wanted:
            break
    if found:
        yield found
        yield from _deeper(gemm, device, found) if schedule.pipeline == "wgmma" else ()
    elif schedule.pipeline not in SLICED and schedule.tile_k <= SWIZZLE_ROW // operand_bytes(gemm):
        shallow = (schedule.varied(stages=s) for s in (3, 2, 1) if s in RULES[schedule.pipeline].stages)
        yield from (deep for deep in shallow if is_legal(gemm, device, deep))


def _deeper(gemm: Gemm, device: TileDevice, found: GpuSchedule) -> Iterator[GpuSchedule]:
    """Yield deeper rings of a wgmma schedule: the deepest for each number of blocks that they leave room for.

    Where fewer fit on a multiprocessor, they are spread evenly. Where weights are multiplied as they are,
    only the deepest of blocks that share K, and of fp8 x fp8 in tiles of many rows, whose stages are long.
    """
    plain = gemm.weight.startswith("fp8") and gemm.activation.startswith("fp8")
    narrow = weight_bits(gemm) < lane_of(gemm.activation)
    beside = warpgroup_blocks(gemm, device, found)
    crowded = beside > 1 and (narrow or found.split_k > 1)
    if not crowded and not (plain and found.tile_m > FEW_ROWS):
        return
    deepest: dict[int, GpuSchedule] = {}
    for stages in (stages for stages in RULES["wgmma"].stages if stages > found.stages):
        deep = found.varied(stages=stages)
        if shared_bytes(gemm, deep) > device.shared_per_block:  # all else is as legal as of fewer stages
            break
        deepest[warpgroup_blocks(gemm, device, deep)] = deep
    if narrow:
        yield from (deep for blocks, deep in deepest.items() if blocks < beside)
    elif deepest:
        yield deepest[min(deepest)]


def _tiles_of_m(gemm: Gemm, pipeline: str, *, full: bool) -> tuple[int, ...]:
    """Return the tiles along M that compete: beside powers of two others where timed, for tuning all."""
    tiles = RULES[pipeline].tile_m
    others = takes_sixteens(gemm) or (full and decodes_to_floats(gemm))
    if others and not gemm.windows:
        return tiles
    return tuple(tile for tile in tiles if tile & (tile - 1) == 0)


def _useful_m(tiles: tuple[int, ...], m: int, share: float) -> tuple[int, ...]:
    """Return the smallest tile that holds ``m``; to a share of it, the smallest of each number of tiles."""
    limit = next((tile for tile in tiles if tile >= m), tiles[-1])
    found: dict[int, int] = {}
    for tile in tiles[::-1]:
        if share * limit <= tile <= limit:
            found[-(-m // tile)] = tile
    return tuple(sorted(found.values()))


def _finds_idle(gemm: Gemm, device: TileDevice, tile: GpuSchedule, m: int) -> bool:
    """Whether K is not split, or its slices still find multiprocessors with few blocks."""
    blocks = -(-m // tile.tile_m) * -(-gemm.n // tile.tile_n)
    return tile.split_k == 1 or blocks * tile.split_k <= MOST_SLICES * device.units


@lru_cache(maxsize=64)
def _sensible(gemm: Gemm, device: TileDevice, pipeline: str) -> Mapping[int, tuple[GpuSchedule, ...]]:
    """Return the tiles that may pay for some M, by their activation rows."""
    found: dict[int, list[GpuSchedule]] = {}
    for tile in _shallow(_column(gemm, pipeline), device, pipeline):
        if _is_sensible(gemm, tile):
            found.setdefault(tile.tile_m, []).append(tile)
    return {rows: tuple(tiles) for rows, tiles in found.items()}


def _is_sensible(gemm: Gemm, tile: GpuSchedule) -> bool:
    """Prune what pays for no M, such as slices of K shorter than four steps."""
    long_enough = k_slices(tile) == 1 or padded(gemm.k) // 64 // k_slices(tile) >= 4
    # Clusters share K so that blocks have rows for many warps, as many for each scheduler.
    busy = k_blocks(tile) == 1 or tile.pipeline not in SLICED or (tile.warps >= 16 and tile.warps % 4 == 0)
    # Digits of two rows of 16-bit x take longer than gemv (H200); int8 needs no decomposition.
    digits = tile.pipeline != "digits" or tile.tile_m == 1 or lane_of(gemm.activation) == 8
    # Three warpgroups whose sums carry take 1.03 of the time of two with fewer columns that share K (H200).
    apart = tile.split_k == 1 or tile.tile_m > PROMOTED_COLUMNS or not carries(gemm, tile)
    return long_enough and busy and digits and apart and not cuts_groups(gemm, tile)


def _worthwhile(gemm: Gemm, device: TileDevice, tile: GpuSchedule, m: int) -> bool:
    """Prune what cannot pay for so many rows, such as persistence without a second wave."""
    small = m * gemm.n <= device.units * 128 * 128
    return decodes_ahead(gemm, device, tile, m) and not (tile.persistent and not tile.stream_k and small)


def decodes_ahead(gemm: Gemm, device: TileDevice, tile: GpuSchedule, m: int) -> bool:
    """Whether another warpgroup multiplies while one promotes sums, which decodes nothing ahead meanwhile.

    One that promotes several row tiles takes longer than several. One that is alone in its block takes longer
    than two of a block where several blocks lie on a multiprocessor and share K, or have few rows.
    """
    if tile.pipeline != "wgmma" or not promotes(gemm, tile) or carries(gemm, tile):
        return True
    narrow = weight_bits(gemm) < lane_of(gemm.activation)
    if tile.tile_n > 16 * tile.warps and (narrow or tile.tile_m > PARTIAL_COLUMNS):
        return False
    blocks = -(-m // tile.tile_m) * -(-gemm.n // tile.tile_n) * tile.split_k
    apart = tile.split_k == 1 and m > MOST_GEMV_M
    return not narrow or tile.warps > 4 or apart or blocks <= device.units
