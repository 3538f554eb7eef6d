"""Convolutions as parts: by a kernel of ours or a function of torch, with what follows them.

Which of both, and how much of what follows, is decided by predicted times: the reason of the part has them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from ladder.ir.convolution import FusedConvolution
from ladder.ir.extents import product
from ladder.ir.gemm import Gemm
from ladder.ir.graph import Graph
from ladder.partition.parts import Part
from schedules.policy import rank
from targets import TileDevice
from tile_types.errors import LadderError

CONVOLVE = "convolution"
ADDMM = "addmm"
ADDMM_RELU = "_addmm_activation"
RELU = "cudnn_convolution_relu"
ADD_RELU = "cudnn_convolution_add_relu"

Key = tuple[bool, bool, tuple[str, ...]]
"""Whether there are a bias and a residual, and which functions follow."""

PLAIN: Key = (False, False, ())

FUNCTIONS: Mapping[str, Mapping[Key, str]] = {
    "llvm": {PLAIN: CONVOLVE, (True, False, ()): CONVOLVE},
    "cuda": {PLAIN: CONVOLVE, (True, False, ("relu",)): RELU, (True, True, ("relu",)): ADD_RELU},
}
"""Kind of device -> what torch computes there in one launch."""

POINTS: Mapping[str, Mapping[Key, str]] = {
    "cuda": {PLAIN: ADDMM, (True, False, ()): ADDMM, (True, False, ("relu",)): ADDMM_RELU},
}
"""The same for windows of one element: products of matrices."""


@dataclass(frozen=True)
class Way:
    """One way to compute a convolution with some of what follows it.

    Parameters
    ----------
    part
        What it computes; its role ``by`` names the function of torch.
    us
        Predicted time.
    """

    part: Part
    us: float


def way_of(
    form: FusedConvolution, region: Part, device: TileDevice | None, weights: Collection[str]
) -> Way | None:
    """Return the fastest way to compute a region in one launch; None if there is none.

    Parameters
    ----------
    region
        Of kind ``product``.
    weights
        Values of the model that plans may pack for kernels of ours.
    """
    ways = []
    for name in library_functions(form, device):
        ways.append(Way(replace(region, roles=(("by", name),)), library_us(name, form, region.graph, device)))
    outside = dict(zip((node.name for node in region.graph.inputs), region.inputs, strict=True))
    if device is not None and outside[form.weight] in weights:
        ways += kernel_ways(form, region, device)
    return min(ways, key=lambda way: way.us, default=None)


def kernel_ways(form: FusedConvolution, region: Part, device: TileDevice) -> list[Way]:
    """Return the region as a product by a kernel of ours, if one computes it."""
    graph = region.graph
    rows, ttype = product(graph.tile(graph.outputs[0]).shape[:-1]), graph.tile(form.x).ttype.name
    if device.kind != "cuda" or not isinstance(rows, int) or ttype not in HALVES:
        return []
    gemm = Gemm(
        form.features,
        form.depth,
        ttype,
        ttype,
        graph.tile(graph.outputs[0]).ttype.name,
        scale=False,
        bias=bool(form.bias),
        epilogue=form.functions,
        windows=form.windows,
        residual=bool(form.residual),
    )
    try:
        seconds = rank(gemm, device, rows)[0].cost.seconds
    except LadderError:
        return []
    given = {"A": form.x, "B": form.weight, "bias": form.bias, "residual": form.residual}
    roles = tuple(sorted((role, name) for role, name in given.items() if name))
    return [Way(replace(region, kind="gemm", gemm=gemm, roles=roles), seconds * 1e6)]


def best_way(ways: Sequence[Way], device: TileDevice | None) -> Part:
    """Return the fastest of ways, the last of which takes in most of what follows: others need a chain."""
    last = ways[-1]
    totals = [way.us + (0 if way is last else chain_us(way.part.graph, device)) for way in ways]
    best, us = min(zip(ways, totals, strict=True), key=lambda pair: (pair[1], -ways.index(pair[0])))
    reason = "computed by torch" if best.part.gemm is None else ""
    if us:
        pairs = zip(ways, totals, strict=True)
        others = [f"{_name(way)} {total:.1f} us" for way, total in pairs if way is not best]
        reason = "; ".join([f"predicted {us:.1f} us", *others, *([reason] if reason else [])])
    return replace(best.part, reason=reason)


def _name(way: Way) -> str:
    return f"{dict(way.part.roles).get('by', 'ladder')} of {len(way.part.operators)} operators"


def library_functions(form: FusedConvolution, device: TileDevice | None) -> list[str]:
    """Return the functions of torch that compute a region in one launch."""
    kind = "llvm" if device is None else device.kind
    key = (bool(form.bias), bool(form.residual), form.functions)
    tables = [FUNCTIONS, POINTS] if form.form.are_points else [FUNCTIONS]
    return list(dict.fromkeys(table[kind][key] for table in tables if key in table.get(kind, {})))


@dataclass(frozen=True)
class Costs:
    """Times of torch's functions on a GPU, fitted to measurements of the layers of four networks on an H200.

    Parameters
    ----------
    launch
        Microseconds of a launch with its ends.
    rate
        Fraction of the cores' peak that tiles reach.
    tile
        Rows and columns of a block's tile.
    """

    launch: float
    rate: float
    tile: tuple[int, int]


COSTS: Mapping[str, Costs] = {
    CONVOLVE: Costs(3.5, 0.5, (128, 64)),
    RELU: Costs(3.5, 0.5, (128, 64)),
    ADD_RELU: Costs(3.5, 0.5, (128, 64)),
    ADDMM: Costs(3.0, 0.5, (128, 64)),
    ADDMM_RELU: Costs(3.0, 0.5, (128, 64)),
}

HALVES = ("float16", "bfloat16")
"""Types of convolutions that kernels of ours compute on plain weights."""

CHAIN_LAUNCH = 2.0
"""Microseconds of a launch of a chain."""


def library_us(name: str, found: FusedConvolution, graph: Graph, device: TileDevice | None) -> float:
    """Predict the time of a function of torch in microseconds; 0 where sizes or the device are open."""
    rows = product(graph.tile(graph.outputs[0]).shape[:-1])
    if device is None or not device.is_gpu or not isinstance(rows, int):
        return 0.0
    costs, core = COSTS[name], device.core_for(graph.tile(found.x).ttype.name)
    tiles = ceil(rows / costs.tile[0]) * ceil(found.features / costs.tile[1])
    waves = ceil(tiles / device.units)
    work = 2 * costs.tile[0] * costs.tile[1] * found.depth * waves
    compute = work / (device.peak(core) / device.units * costs.rate) * 1e6
    return costs.launch + max(compute, moved_us(graph, device))


def moved_us(graph: Graph, device: TileDevice) -> float:
    """Return the time for reading the operands of a region and writing its result, from and to DRAM."""
    tiles = [node.tile for node in graph.inputs] + [graph.tile(value) for value in graph.outputs]
    return sum(int(tile.nbytes) for tile in tiles) / device.layer("dram").bandwidth * 1e6


def chain_us(graph: Graph, device: TileDevice | None) -> float:
    """Return the time of a chain that reads and writes a region's result."""
    if device is None or not device.is_gpu:
        return 0.0
    tile = graph.tile(graph.outputs[0])
    known = all(isinstance(extent, int) for extent in tile.shape)
    return CHAIN_LAUNCH + (2 * tile.nbytes / device.layer("dram").bandwidth * 1e6 if known else 0.0)
