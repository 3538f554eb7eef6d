"""Kernels besides products and chains that a first run tries: experts, convolutions, found block graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ladder.api.fused_trials import TOLERANCE, built
from ladder.api.problem import gemm_for
from ladder.cli.first_kernels import Case
from ladder.ir import evaluate
from ladder.ir.gemm import Gemm
from ladder.ir.rounding import BOUNDS
from ladder.ir.windows import Windows
from ladder.lower.blocks.analysis import gemm_of
from ladder.runtime.build import Kernel
from ladder.runtime.compile import Request, plan_for, request_for, settled
from ladder.runtime.experts import host_ranges, pack_experts
from ladder.runtime.packed import PackedWeight, pack
from ladder.runtime.trials import Trial, candidates_of
from ladder.superopt.canonical import Canonical, canonical
from ladder.superopt.generator import Limits
from ladder.superopt.operators import OPERATORS
from ladder.superopt.shipped import recalled
from ladder.superopt.tracer import Traced, Tracer
from targets import TileDevice
from tile_types import quantize
from tile_types.arrays import torch_dtype
from tile_types.errors import LadderError, ScheduleError
from tile_types.quantized import QuantizedTensor
from tile_types.tile import Tile

EXPERTS, OUTPUTS, INPUTS, TOKENS = 8, 1024, 4096, 96
"""Matrices of a mixture, extents of each, and the tokens of all."""

GROUP = 32
"""Elements of K that share a scale of int4."""

IMAGE = 4, 28, 28
"""Images, and rows and columns of each."""

FOUND, TRIED = 4, 8
"""Shipped graphs and choices of tiles, and kernels, that are considered for a block graph."""

EPSILON = 1e-5

SIZES: Mapping[str, int] = {"rows": 8, "depth": 4096, "width": 4096}
"""Extents of block graphs."""


def graph_cases(device: TileDevice) -> Iterator[Case]:
    """Yield what is tried on a device."""
    random = torch.Generator().manual_seed(0)
    yield from (_experts(device, name, *case, random) for name, case in mixtures().items())
    yield from (_convolution(device, name, *case, random) for name, case in convolutions().items())
    yield from (_graph(device, name, *case, random) for name, case in GRAPHS.items())


def _normal(shape: tuple[int, ...], kind: str, random: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=random).to(torch_dtype(kind))


def _matrix(gemm: Gemm, weight: str, random: torch.Generator) -> QuantizedTensor:
    """Draw the weight of a product."""
    values = torch.randn((gemm.n, gemm.k), generator=random) / gemm.k**0.5
    return quantize(values, weight, group_size=GROUP if weight == "int4" else None)


def _decoded(matrix: QuantizedTensor) -> torch.Tensor:
    return torch.as_tensor(matrix.dequantize("float64"))


def _arrays(packed: PackedWeight) -> list[torch.Tensor]:
    return [torch.as_tensor(array) for array in packed.tensors]


def _kernel(gemm: Gemm, device: TileDevice, m: int) -> Kernel:
    """Return the kernel for so many rows: the first choice of the policy that does not spill."""
    plan, kernels = settled(Request(gemm, device.name), lambda: plan_for(request_for(gemm, device, m)))
    return kernels[plan.index(m)]


# ---- experts ---------------------------------------------------------------------------------------------
def mixtures() -> dict[str, tuple[str, Gemm]]:
    """Return a weight's type, and what is asked: tokens in order of experts, some of each, in slots."""

    def of(weight: str, activation: str, **how: Any) -> tuple[str, Gemm]:
        group = GROUP if weight == "int4" else None
        plain = gemm_for(OUTPUTS, INPUTS, weight, activation, group_size=group)
        return weight, replace(plain, experts=EXPERTS, **how)

    return {
        "in order": of("int4", "float16"),
        "some of each": of("mxfp4", "bfloat16", masked=True),
        "a slot each": of("float16", "float16", slots=EXPERTS // 2),
    }


def _experts(device: TileDevice, name: str, weight: str, gemm: Gemm, random: torch.Generator) -> Case:
    ranges = _ranges(gemm)
    matrices = [_matrix(gemm, weight, random) for _ in range(EXPERTS)]
    tokens = len(ranges) if gemm.slots else TOKENS
    x = _normal((tokens, gemm.k), gemm.activation, random)
    exact = torch.full((tokens, gemm.n), torch.nan, dtype=torch.float64)  # of tokens that are nobody's
    for expert, low, high in host_ranges(gemm, ranges, tokens):
        exact[low:high] = x[low:high].double() @ _decoded(matrices[expert]).T
    given = [x, *_arrays(pack_experts(gemm, device, matrices)), ranges]
    build = partial(_kernel, gemm, device, -(-tokens // len(ranges)))
    result = torch.full(exact.shape, torch.nan, dtype=torch_dtype(gemm.output))
    title = f"experts, {name}: {weight} x {gemm.activation}"
    return Case(title, build, given, [result], [exact], BOUNDS[gemm.output])


def _ranges(gemm: Gemm) -> torch.Tensor:
    """Return whose tokens are whose: no expert as many as the next, one of them none."""
    if gemm.slots:
        found = [(3 * slot + 1) % EXPERTS for slot in range(gemm.slots)]
    elif gemm.masked:
        found = [expert * (TOKENS // EXPERTS) // (EXPERTS - 1) for expert in range(EXPERTS)]
    else:
        found = [TOKENS * at * at // EXPERTS**2 for at in (0, 0, *range(2, EXPERTS + 1))]
    return torch.tensor(found, dtype=torch.int32)


# ---- convolutions ----------------------------------------------------------------------------------------
def convolutions() -> dict[str, tuple[str, Windows, Gemm]]:
    """Return a weight's type, windows, and the product of each convolution that is tried."""

    def of(weight: str, windows: Windows, channels: int, outputs: int, **how: Any) -> Any:
        depth = windows.points * channels // windows.groups
        options = {"activation": "float16", "windows": windows, **how}
        return weight, windows, gemm_for(outputs, depth, weight, **options)

    return {
        "3 x 3": of("float16", Windows((3, 3), padding=(1, 1)), 64, 128, bias=True, epilogue=("relu",)),
        "3 x 3, stride 2": of("int4", Windows((3, 3), (2, 2), (1, 1)), 64, 128, group_size=GROUP),
        "groups": of("int8", Windows((3, 3), padding=(1, 1), groups=4), 128, 256, activation="bfloat16"),
    }


def _convolution(
    device: TileDevice, name: str, weight: str, windows: Windows, gemm: Gemm, random: torch.Generator
) -> Case:
    matrix = _matrix(gemm, weight, random)
    x = _normal((*IMAGE, gemm.channels * windows.groups), gemm.activation, random)
    bias = [_normal((gemm.n,), gemm.output, random)] if gemm.bias else []
    kernel = _decoded(matrix).reshape(gemm.n, *windows.kernel, -1).permute(0, 3, 1, 2)
    exact = F.conv2d(
        x.double().permute(0, 3, 1, 2), kernel, bias[0].double() if bias else None, windows.stride,
        windows.padding, windows.dilation, windows.groups,
    ).permute(0, 2, 3, 1)  # fmt: skip
    exact = exact.relu() if gemm.epilogue else exact
    rows = exact.reshape(-1, gemm.n)
    result = torch.full(rows.shape, torch.nan, dtype=torch_dtype(gemm.output))
    given, build = [x, *_arrays(pack(gemm, device, matrix)), *bias], partial(_kernel, gemm, device, len(rows))
    title = f"convolution, {name}: {weight} x {gemm.activation}"
    return Case(title, build, given, [result], [rows], BOUNDS[gemm.output])


# ---- block graphs ----------------------------------------------------------------------------------------
Define = Callable[[Tracer, Traced, list[Traced]], Traced]


def _norm_product(t: Tracer, x: Traced, weights: list[Traced]) -> Traced:
    normed = OPERATORS["rms_norm"](t, x, (SIZES["depth"],), None, EPSILON)
    found: Traced = OPERATORS["linear"](t, normed, *weights)
    return found


def _gated_mlp(t: Tracer, x: Traced, weights: list[Traced]) -> Traced:
    gate, up = (OPERATORS["linear"](t, x, weight) for weight in weights)
    found: Traced = OPERATORS["mul"](t, OPERATORS["silu"](t, gate), up)
    return found


GRAPHS: Mapping[str, tuple[Define, int, str]] = {
    "norm and product": (_norm_product, 1, ""),
    "norm and decoded product": (_norm_product, 1, "int4_g128"),
    "gated MLP": (_gated_mlp, 2, "int4_g128"),
}
"""Programs whose graphs are shipped, how many weights each has, and their type if that is quantized."""


def _canonical(define: Define, count: int, weight: str) -> Canonical:
    """Return a program in the form by which its graphs are found."""
    t = Tracer()
    x = t.input((SIZES["rows"], SIZES["depth"]), (0,))
    declare = t.weight if weight else t.input
    weights = [declare((SIZES["width"], SIZES["depth"])) for _ in range(count)]
    program = t.program("first", define(t, x, weights), "float16")
    packed = {f"X{each.number}": weight for each in weights} if weight else {}
    return canonical(replace(program, packed=packed))


def _trials(form: Canonical, device: TileDevice) -> list[Trial]:
    """Return kernels that are a program as a whole, best first, whose arguments are in one order.

    Raises ScheduleError if there is none, with a reason.
    """
    report = recalled(form, Limits.of(form.program, device.name, workers=1), FOUND)
    if report is None:
        raise ScheduleError("no graph of it is shipped")
    found = candidates_of(report, device, TRIED, choices=FOUND)
    whole = [trial for trial in found if len(trial.lowering.blocks) == 1]
    if not whole:
        raise ScheduleError(f"no kernel of {device.name} is the whole program")
    order = whole[0].lowering.blocks[0].inputs
    return [trial for trial in whole if trial.lowering.blocks[0].inputs == order]


def _graph(
    device: TileDevice, name: str, define: Define, count: int, weight: str, random: torch.Generator
) -> Case:
    title, form = f"block graph, {name}: {weight or 'float16'} x float16", _canonical(define, count, weight)
    try:
        trials = _trials(form, device)
    except LadderError as error:
        return Case(title, partial(_refuse, error), (), (), (), 0.0)
    (node,) = trials[0].lowering.blocks
    tiles = {each.name: each.tile for each in trials[0].lowering.graph.inputs}
    drawn = {name: _operand(tile, device, random) for name, tile in tiles.items()}
    graph = form.program.graph()
    exact = evaluate(graph, [drawn[each.name][1] for each in graph.inputs])
    given = [array.reshape(-1) for value in node.inputs for array in drawn[value][0]]
    result = torch.full((exact.size,), torch.nan, dtype=torch.float16)
    build = partial(_first_built, trials, device)
    return Case(title, build, given, [result], [torch.as_tensor(exact).reshape(-1)], TOLERANCE["float16"])


def _operand(
    tile: Tile, device: TileDevice, random: torch.Generator
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Draw an input: what kernels take, and its values."""
    values = (torch.randn(tile.known_shape, generator=random) / 8).half()
    if not tile.ttype.is_block:
        return [values], values.double()
    matrix = quantize(values, tile.ttype)
    gemm = gemm_of(tile.ttype, tile.known_shape, "float16")
    return _arrays(pack(gemm, device, matrix)), _decoded(matrix)


def _refuse(error: LadderError) -> Kernel:
    raise error


def _first_built(trials: Sequence[Trial], device: TileDevice) -> Kernel:
    ((_, (kernel,)),) = built(trials, device, 1)
    return kernel
