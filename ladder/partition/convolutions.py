"""Convolution subgraphs with their epilogues, for a kernel of ours or a function of torch.

Which of both, and how much of what follows, is decided by predicted times: the reason of the part has them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from ladder.ir.convolution import FusedConvolution, as_fused_convolution
from ladder.ir.extents import product
from ladder.ir.gemm import Gemm
from ladder.ir.graph import Graph
from ladder.ir.windows import Windows
from ladder.partition.subgraphs import Subgraph
from schedules.policy import Candidate, choose
from targets import TileDevice
from tile_types.errors import LadderError, ShapeError

CONVOLVE = "convolution"
ADDMM = "addmm"
BMM = "bmm"
ADDMM_RELU = "_addmm_activation"
RELU = "cudnn_convolution_relu"
ADD_RELU = "cudnn_convolution_add_relu"

Choose = Callable[[Gemm, TileDevice, int], Candidate]
"""(problem, device, rows) -> the kernel of ours and its cost; raises LadderError where there is none."""

Key = tuple[bool, bool, tuple[str, ...]]
"""Whether there are a bias and a residual, and which functions follow."""

PLAIN: Key = (False, False, ())

FUNCTIONS: Mapping[str, Mapping[Key, str]] = {
    "llvm": {PLAIN: CONVOLVE, (True, False, ()): CONVOLVE},
    "cuda": {PLAIN: CONVOLVE, (True, False, ("relu",)): RELU, (True, True, ("relu",)): ADD_RELU},
}
"""Kind of device -> what torch computes there in one launch."""

POINTS: Mapping[str, Mapping[Key, str]] = {
    "llvm": {PLAIN: ADDMM, (True, False, ()): ADDMM},
    "cuda": {PLAIN: ADDMM, (True, False, ()): ADDMM, (True, False, ("relu",)): ADDMM_RELU},
}
"""The same for windows of one element: products of matrices."""

GROUPED: Mapping[str, Mapping[Key, str]] = {"llvm": {PLAIN: BMM}}
"""The same in groups: oneDNN's convolution takes 1.1 to 8 times as long where channels are last."""


NO_PRODUCTS = (("llvm", "float16"),)
"""Kinds of devices and types for which torch multiplies matrices element by element."""


@dataclass(frozen=True)
class Way:
    """One way to compute a convolution with some of what follows it.

    part: What it computes; its role ``by`` names the function of torch.
    us: Predicted time.
    """

    part: Subgraph
    us: float


def convolution_part(
    regions: Sequence[Subgraph], device: TileDevice | None, packable: Collection[str], choose: Choose
) -> Subgraph:
    """Return the part that is predicted to be the fastest.

    regions: A convolution, then with more and more of what follows it: of kind ``product``.
    packable: Values of the model that are weights, and that plans may pack for kernels of ours.
    choose: What predicts kernels of ours.
    """
    ways: list[Way] = []
    for region in reversed(regions):
        with contextlib.suppress(ShapeError):  # what follows is more than an epilogue
            form = as_fused_convolution(region.graph)
            ways += library_ways(form, region, device)
            # A kernel of ours that leaves work to a chain is never faster than one that does it.
            if device is not None and not any(way.part.gemm for way in ways):
                ways += kernel_ways(form, region, device, packable, choose)
    return best_way(ways, device) if ways else regions[0]


def library_ways(form: FusedConvolution, region: Subgraph, device: TileDevice | None) -> list[Way]:
    """Return the functions of torch that compute a region in one launch."""
    kind = "llvm" if device is None else device.kind
    key = (bool(form.bias), bool(form.residual), form.functions)
    points = form.form.have_points and (kind, region.graph.tile(form.x).ttype.name) not in NO_PRODUCTS
    tables = [GROUPED if form.form.groups > 1 else POINTS, FUNCTIONS] if points else [FUNCTIONS]
    names = dict.fromkeys(table[kind][key] for table in tables if key in table.get(kind, {}))
    return [
        Way(replace(region, roles=(("by", name),)), library_us(name, form, region.graph, device))
        for name in names
    ]


def kernel_ways(
    form: FusedConvolution, region: Subgraph, device: TileDevice, packable: Collection[str], choose: Choose
) -> list[Way]:
    """Return the region as a product by a kernel of ours, if one computes it."""
    graph = region.graph
    outside = region.outside
    rows, ttype = form.places, graph.tile(form.x).ttype.name
    known = isinstance(rows, int) and ttype in HALVES and outside[form.weight] in packable
    if device.kind != "cuda" or not known or not rows or form.form.rank > 2:
        return []
    windows, rows_of_weight = filled_up(form)
    gemm = Gemm(
        rows_of_weight,
        form.depth,
        ttype,
        ttype,
        graph.tile(graph.outputs[0]).ttype.name,
        scale=False,
        bias=bool(form.bias),
        epilogue=form.functions,
        windows=windows,
        residual=bool(form.residual),
    )
    try:
        us = WARM * 1e6 * choose(plain_problem(gemm), device, int(str(rows))).cost.seconds
    except LadderError:
        return []
    given = {"A": form.x, "B": form.weight, "bias": form.bias, "residual": form.residual}
    roles = tuple(sorted((role, name) for role, name in given.items() if name))
    return [Way(replace(region, kind="gemm", gemm=gemm, roles=roles), us)]


def filled_up(form: FusedConvolution) -> tuple[Windows | None, int]:
    """Return the windows of a convolution and its rows of the weight: of each group whole tiles of them."""
    windows, groups = form.windows, form.form.groups
    own = form.features // groups
    if windows is None or groups == 1 or own % TILE == 0:
        return windows, form.features
    return replace(windows, features=own), groups * ceil(own / TILE) * TILE


def plain_problem(gemm: Gemm) -> Gemm:
    """Return a problem without what schedules do not depend on."""
    return replace(gemm, bias=False, epilogue=())


@lru_cache(maxsize=1024)
def best_candidate(gemm: Gemm, device: TileDevice, rows: int) -> Candidate:
    """Return the best kernel of ours for a problem: as measured, or by the model.

    Raises LadderError if none computes it.
    """
    return choose(gemm, device, rows)


def best_way(ways: Sequence[Way], device: TileDevice | None) -> Subgraph:
    """Return the fastest of ways; those that take in less than the first need a chain more."""
    most = len(ways[0].part.operators)
    behind = [0.0 if len(w.part.operators) == most else chain_us(w.part.graph, device) for w in ways]
    totals = [way.us + us for way, us in zip(ways, behind, strict=True)]
    at = min(range(len(ways)), key=lambda place: (totals[place], place))
    reasons = [] if totals[at] == 0 else [f"predicted {totals[at]:.1f} us"]
    reasons += [
        f"{_name(w)} {us:.1f} us" for w, us in zip(ways, totals, strict=True) if us and w is not ways[at]
    ]
    if ways[at].part.gemm is None:
        reasons.append("computed by torch")
    return replace(ways[at].part, reason="; ".join(reasons))


def _name(way: Way) -> str:
    return f"{dict(way.part.roles).get('by', 'ladder')} of {len(way.part.operators)} operators"


@dataclass(frozen=True)
class Costs:
    """Times of a function of torch on a GPU, fitted to the 53 convolutions of four networks on an H200.

    ``launch + max(blocks / units * (depth * per product + block), bytes / bandwidth)`` for blocks of 64 x 64;
    the mean error of the fits is 9 to 20 %.

    launch: Microseconds of a launch with its ends.
    points, windows: Microseconds per 64 x 64 products of a block, where windows are single elements or more.
    block: Microseconds of a block besides.
    bandwidth: Bytes per microsecond.
    """

    launch: float
    points: float
    windows: float
    block: float
    bandwidth: float


TILE = 64
"""Rows and columns of a block; products come in multiples of as many, too."""

ALIGNED = 4
"""Multiple of the number of channels without which a convolution takes `SLOWER` times as long."""

SLOWER = 3

FAST_GROUPS, SLOWER_GROUPS = (4, 8, 16, 32), 8
"""Channels and features of a group that cuDNN has kernels for, and how much longer others take at least."""

COSTS: Mapping[str, Costs] = {
    CONVOLVE: Costs(2.8, 0.00113, 0.00265, 0.20, 6.0e6),
    RELU: Costs(3.1, 0.00113, 0.00236, 0.37, 4.5e6),
    ADD_RELU: Costs(3.5, 0.00113, 0.00263, 0.43, 3.1e6),
    ADDMM: Costs(2.6, 0.00127, 0.00127, 0.38, 3.7e6),
    ADDMM_RELU: Costs(2.6, 0.00127, 0.00127, 0.39, 3.7e6),
}

WARM = 0.9
"""Time of layers in sequence over their time with operands in DRAM: torch's, on an H200."""

HALVES = ("float16", "bfloat16")
"""Types of convolutions that kernels of ours compute on plain weights."""

CHAIN_LAUNCH = 2.0
"""Microseconds of a launch of a chain."""


def library_us(name: str, found: FusedConvolution, graph: Graph, device: TileDevice | None) -> float:
    """Predict the time of a function of torch in microseconds; 0 where sizes or the device are open."""
    rows = found.places
    if device is None or not device.is_gpu or not isinstance(rows, int):
        return 0.0
    costs = COSTS[name]
    blocks = ceil(rows / TILE) * ceil(found.features / TILE)
    whole = graph.tile(found.x).shape[-1] % ALIGNED == 0
    depth = ceil(found.depth / TILE) * TILE * (1 if whole else SLOWER)
    depth *= 1 if found.form.groups == 1 or groups_are_fast(found) else SLOWER_GROUPS
    each = depth * (costs.points if found.form.are_points else costs.windows) + costs.block
    waves = max(1.0, blocks / device.units)
    return costs.launch + max(waves * each, moved(graph) / costs.bandwidth)


def groups_are_fast(found: FusedConvolution) -> bool:
    """Tell whether cuDNN has kernels for the groups of a convolution."""
    taps = product(found.form.taps)
    channels = found.depth // taps if isinstance(taps, int) else 0
    return channels in FAST_GROUPS and found.features // found.form.groups in FAST_GROUPS


def moved(graph: Graph) -> int:
    """Return the bytes of the operands of a region and of its result."""
    tiles = [node.tile for node in graph.inputs] + [graph.tile(value) for value in graph.outputs]
    return sum(int(tile.nbytes) for tile in tiles)


def chain_us(graph: Graph, device: TileDevice | None) -> float:
    """Return the time of a chain that reads and writes a region's result."""
    if device is None or not device.is_gpu:
        return 0.0
    tile = graph.tile(graph.outputs[0])
    known = all(isinstance(extent, int) for extent in tile.shape)
    return CHAIN_LAUNCH + (2 * tile.nbytes / device.layer("dram").bandwidth * 1e6 if known else 0.0)


def read_in_order(parts: Sequence[Subgraph]) -> set[str]:
    """Return the values that products read in the order of their axes: of views each would make a copy."""
    found: set[str] = set()
    for part in parts:
        if part.kind == "gemm":
            found.update(value for role, value in part.by_role.items() if role in ("A", "residual"))
        elif part.kind == "product" and "contract" in part.operators:
            with contextlib.suppress(ShapeError):  # channels are first, as they may lie
                form = as_fused_convolution(part.graph)
                found.update(part.outside[name] for name in (form.x, form.residual) if name)
    return found
