"""Kernels beside products that a first run tries: attention, memory-bound chains, quantizers of rows.

Each is a `Case`: what is compiled, its arguments, and what they should give. It runs on this machine's GPU,
on one of AMD through `ladder.runtime.hip`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from ladder.cli.amd_gpu import HostLaunch
from ladder.cli.measure import copies_for, side_by_side
from ladder.frontend.torch_fx import import_fx
from ladder.ir.attention import CODES, Attention
from ladder.ir.graph import Graph
from ladder.ir.rounding import BOUNDS
from ladder.rewrite import simplify
from ladder.runtime.build import Kernel, find_or_build, load_entry
from ladder.runtime.model.attention import arguments, job_of
from ladder.runtime.model.chains import chain_job
from ladder.runtime.operator import attend
from ladder.runtime.tokens import EIGHT_BIT, gpu_kernel, quantize_tokens
from ladder.simulate.operator import relative_error, rounding_bound
from schedules.attention import has_kernels, ranked
from targets import TileDevice
from tile_types.arrays import torch_dtype
from tile_types.errors import LadderError

ROWS, KEYS, COLUMNS, GROUP = 300, 1000, 4096, 128
"""Rows of x, keys of a cache, elements of a row, and of a row's group with a scale of its own."""

UNSET = 77
"""What results hold before a kernel runs."""


@dataclass(frozen=True)
class Case:
    """A kernel, its arguments, and what they should give.

    build: Finds or compiles it.
    given, results: Arguments: sizes and tensors on the CPU, then tensors that it writes.
    exact: What the results should be, in float64.
    tolerance: Relative Frobenius error that rounding explains.
    """

    name: str
    build: Callable[[], Kernel]
    given: Sequence[int | torch.Tensor]
    results: Sequence[torch.Tensor]
    exact: Sequence[torch.Tensor]
    tolerance: float


def kernel_cases(device: TileDevice) -> Iterator[Case]:
    """Yield what is tried on a device."""
    random = torch.Generator().manual_seed(0)
    if has_kernels(device):
        yield from (_attention(device, kind, *case, random) for kind, case in ATTENTION.items())
    for name, (function, shapes) in CHAINS.items():
        yield from (_chain(device, name, function, shapes(), kind, random) for kind in ("float16", "float32"))
    for activation, group in product(EIGHT_BIT, (0, GROUP)):
        if device.cores_for(activation):
            yield _quantizer(device, activation, group, random)


def run_case(case: Case, device: TileDevice) -> dict[str, Any]:
    """Return what running a kernel gives, or the error in its place."""
    try:
        kernel = case.build()
        launch = _LAUNCHES[device.kind](kernel, case, device)
        launch(*case.given, *case.results)
    except Exception as error:
        told = f"{'' if isinstance(error, LadderError) else type(error).__name__ + ': '}{error}"
        return {"problem": case.name, "passed": False, "error": told}
    errors = [_relative(y.double(), exact) for y, exact in zip(case.results, case.exact, strict=True)]
    return {
        "problem": case.name, "passed": all(error <= case.tolerance for error in errors),
        "relative_error": max(errors), "tolerance": case.tolerance, "spills": kernel.spilled,
        "time_us": round(launch.microseconds, 3), "resources": dict(kernel.manifest["resources"]),
    }  # fmt: skip


def _relative(y: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative Frobenius error; infinity where other elements are NaN."""
    if not torch.equal(y.isnan(), exact.isnan()):
        return math.inf
    return relative_error(y.nan_to_num().numpy(), exact.nan_to_num().numpy())


# ---- launches --------------------------------------------------------------------------------------------
class _CudaLaunch:
    """A kernel that is called with tensors on the CPU, whose copies on an NVIDIA GPU are its arguments."""

    def __init__(self, kernel: Kernel, case: Case, device: TileDevice) -> None:
        self.entry, self.results, self.device = load_entry(kernel, "cuda"), len(case.results), device
        self.microseconds = 0.0

    def __call__(self, *given: Any) -> None:
        calls = [
            [x if isinstance(x, int) else x.to("cuda") for x in given]
            for _ in range(_copies(given, self.device))
        ]
        self.entry(*calls[0])
        for own, found in zip(given[-self.results :], calls[0][-self.results :], strict=True):
            own.copy_(found)
        contender = {"kernel": [partial(self.entry, *arguments) for arguments in calls]}
        self.microseconds = side_by_side(contender, self.device)["kernel"]


def _copies(given: Sequence[Any], device: TileDevice) -> int:
    return copies_for(sum(x.nbytes for x in given if not isinstance(x, int)), device)


def _host_launch(kernel: Kernel, case: Case, device: TileDevice) -> HostLaunch:
    copies = _copies([*case.given, *case.results], device)
    return HostLaunch(load_entry(kernel, "rocm"), copies, len(case.results))


_LAUNCHES: Mapping[str, Callable[..., Any]] = {"cuda": _CudaLaunch, "rocm": _host_launch}
"""TVM target kind -> what launches a kernel with tensors on the CPU, and times it."""


# ---- attention -------------------------------------------------------------------------------------------
def _form(ttype: str = "float16", stored: str = "", **further: Any) -> Attention:
    return Attention(32, 8, 128, ttype, stored or ttype, **{"scale": 128**-0.5, **further})


ATTENTION: Mapping[str, tuple[Attention, int]] = {
    "one token": (_form(), 1),
    "prefill": (_form("bfloat16", causal=True), 65),
    "int8 cache to a position": (_form(stored="int8", position="int64", reach=1), 1),
    "fp8 cache with a mask": (_form("bfloat16", "fp8_e4m3", mask="float32"), 5),
}
"""What is asked, and tokens."""


def _attention(device: TileDevice, kind: str, form: Attention, tokens: int, random: torch.Generator) -> Case:
    keys = tokens if form.causal else KEYS
    schedule = ranked(form, device, (1, tokens, keys))[0]
    given = _operands(form, tokens, keys, random)
    exact = _exact_attention(form, given)
    given["out"] = torch.full_like(given["q"], UNSET)
    wanted = arguments(form, given)
    tolerance = rounding_bound(exact.numpy(), form.ttype)
    build = partial(_built, job_of(form, schedule, device))
    name = f"attention, {kind}: {form.ttype} x {form.stored}"
    return Case(name, build, wanted[:-1], wanted[-1:], [exact.reshape(-1)], tolerance)


def _built(job: Any) -> Kernel:
    return find_or_build([job])[0]


def _operands(form: Attention, tokens: int, keys: int, random: torch.Generator) -> dict[str, torch.Tensor]:
    """Draw what attention reads."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    given = {"q": normal(1, form.heads, tokens, form.size).to(torch_dtype(form.ttype))}
    for name in "kv":
        values = normal(1, form.kv_heads, keys, form.size)
        if form.stored in CODES:
            limit = 127.0 if form.stored == "int8" else 1.0
            scale = values.abs().amax(-1, keepdim=True) / limit
            codes = values / scale
            given[f"{name}_scale"], values = scale, codes.round() if form.stored == "int8" else codes
        given[name] = values.to(torch_dtype(form.stored))
    if form.position:
        given["position"] = torch.full((1, tokens), keys - 7, dtype=torch_dtype(form.position))
    if form.mask:
        given["mask"] = normal(1, 1, tokens, keys).to(torch_dtype(form.mask))
    return given


def _exact_attention(form: Attention, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the result in float64."""
    q, k, v = (given[name].double() for name in "qkv")
    if form.stored in CODES:
        k, v = k * given["k_scale"], v * given["v_scale"]
    mask = given["mask"].double() if form.mask else None
    if form.position:
        mask = torch.arange(k.shape[2]) < (given["position"] + form.reach)[:, None, :, None]
    return attend(q, k, v, mask, form.causal, form.scale)


# ---- chains ----------------------------------------------------------------------------------------------
def _add_rms_norm(x: Any, residual: Any, weight: Any) -> Any:
    total = x + residual
    return total, F.rms_norm(total, (total.shape[-1],), weight, 1e-5)


def _heads_last(x: Any) -> Any:
    return x.transpose(1, 2).contiguous()


CHAINS: Mapping[str, tuple[Callable[..., Any], Callable[[], list[tuple[int, ...]]]]] = {
    "add and RMS norm": (_add_rms_norm, lambda: [(ROWS, COLUMNS), (ROWS, COLUMNS), (COLUMNS,)]),
    "softmax": (partial(torch.softmax, dim=-1), lambda: [(ROWS, COLUMNS)]),
    "gated SiLU": (lambda gate, up: F.silu(gate) * up, lambda: [(ROWS, COLUMNS)] * 2),
    "GELU": (F.gelu, lambda: [(ROWS, COLUMNS)]),
    "transposed heads": (_heads_last, lambda: [(1, ROWS, 32, COLUMNS // 32)]),
}
"""Functions of tensors, and the shapes of these."""


def whole_chain(function: Callable[..., Any], arguments: Sequence[torch.Tensor]) -> Graph:
    """Return a function as one chain; results lie in order, whatever order torch's have in memory."""
    graph = import_fx(make_fx(function)(*arguments), arguments).graph
    turned = [replace(x, operator="transpose") if x.operator == "restride" else x for x in graph.nodes]
    return simplify(replace(graph, nodes=tuple(turned)))


def _chain(
    device: TileDevice,
    name: str,
    function: Callable[..., Any],
    shapes: Sequence[tuple[int, ...]],
    kind: str,
    random: torch.Generator,
) -> Case:
    given = [torch.randn(shape, generator=random).to(torch_dtype(kind)) for shape in shapes]
    graph = whole_chain(function, given)
    exact = function(*(x.double() for x in given))
    found = exact if isinstance(exact, tuple) else (exact,)
    results = [torch.full(y.shape, UNSET, dtype=torch_dtype(kind)) for y in found]
    build = partial(_built, chain_job(graph, device))
    return Case(f"chain, {name}: {kind}", build, given, results, found, BOUNDS[kind])


# ---- quantizers ------------------------------------------------------------------------------------------
def _quantizer(device: TileDevice, activation: str, group: int, random: torch.Generator) -> Case:
    """Return the kernel that quantizes rows, one of them zeros: codes and scales are torch's, bit by bit."""
    x = torch.randn((ROWS, COLUMNS + 3), generator=random).to(torch.float16)
    x[0] = 0
    codes, scale = quantize_tokens(x, activation, group)
    build = partial(gpu_kernel, "float16", activation, group, x.shape[1], device)
    results = [torch.full(codes.shape, UNSET).to(codes.dtype), torch.full_like(scale, UNSET)]
    name = f"rows to {activation}{f', groups of {group}' if group else ''}"
    return Case(name, build, [x], results, [codes.double(), scale.double()], 0.0)
