"""Dynamic quantization of activation rows: one scale per row, computed on the row's device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any

from ladder.ir.gemm import SMALLEST_SCALE, require_quantizable
from ladder.runtime.build import Job, Kernel, find_or_build, function_job, load_entry
from ladder.runtime.compile import target_of
from ladder.runtime.kernel import ALIGNMENT, in_memory, rows_at_once
from ladder.runtime.spills import warn_of_spills
from ladder.runtime.threads import keep_apart
from schedules.quantization import Quantization, tilings
from targets import get_device, host_cpu
from tile_types.arrays import torch_dtype
from tile_types.errors import DTypeError, ShapeError, shown

if TYPE_CHECKING:
    import torch

    from targets import TileDevice

EIGHT_BIT = ("int8", "fp8_e4m3", "fp8_e5m2")
"""Activation types that carry a scale per row."""


def quantize_tokens(x: torch.Tensor, activation: str, group: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row to 8 bits by its largest magnitude, with torch's own operators.

    Parameters
    ----------
    x
        ``[..., K]`` of any float type.
    activation
        One of `EIGHT_BIT`.
    group
        Elements along K that share a scale; 0: all of a row.

    Returns
    -------
    ``(codes, scale)``: ``[..., K]`` of the 8-bit type, ``x * (1 / scale)`` rounded to nearest even, and
    float32 ``[...]`` or ``[..., ceil(K / group)]``, such that ``codes * scale`` approximates x. Zeros have a
    tiny scale and codes 0; where infinity or NaN is among the elements, the scale is NaN.
    """
    import torch

    if group:
        k = x.shape[-1]
        padded = torch.nn.functional.pad(x, (0, -k % group))
        parts = padded.reshape(*x.shape[:-1], -(-k // group), group)
        codes, scale = quantize_tokens(parts, activation)
        bits = codes.view(torch.int8).flatten(-2)[..., :k].contiguous()
        return bits.view(codes.dtype), scale
    dtype = torch_dtype(activation)
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    wide = x.to(torch.float32)
    largest = wide.abs().amax(dim=-1, keepdim=True)
    scale = (largest / limit).clamp_min(SMALLEST_SCALE)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    units = (wide * scale.reciprocal()).clamp(-limit, limit)
    codes = units.round().to(dtype) if dtype == torch.int8 else units.to(dtype)
    return codes, scale.squeeze(-1)


def quantize_by_kernel(x: torch.Tensor, activation: str, group: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows as `quantize_tokens` does, by one kernel of the device that x is on.

    CPUs have a kernel for int8 rows; what else is asked of a CPU, `quantize_tokens` computes.

    Raises DTypeError if ``activation`` is none of `EIGHT_BIT`, or x no float of 16 or 32 bits.
    """
    import torch

    if not isinstance(activation, str) or activation not in EIGHT_BIT:
        raise DTypeError(f"tokens are quantized to {', '.join(EIGHT_BIT)}, got {shown(activation)}")
    source = str(x.dtype).removeprefix("torch.")
    require_quantizable(source)
    if x.layout not in (torch.strided, torch.jagged) or not x.dim() or not x.shape[-1]:
        raise ShapeError(f"tokens are dense rows of at least one element, got {x.layout} of {tuple(x.shape)}")
    on_cpu = x.device.type == "cpu"
    if on_cpu and (activation != "int8" or group):
        return quantize_tokens(x, activation, group)
    rows = in_memory(x).reshape(-1, x.shape[-1]).contiguous()
    groups = (-(-x.shape[-1] // group),) if group else ()
    codes = torch.empty(x.shape, dtype=torch_dtype(activation), device=x.device)
    scale = torch.empty((*x.shape[:-1], *groups), dtype=torch.float32, device=x.device)
    if codes.numel():
        if on_cpu:
            entry = _cpu_kernel(source)
            keep_apart()
        else:
            entry = _gpu_entry(source, activation, group, x.shape[-1], target_of(x.device))
            rows = rows.clone() if rows.data_ptr() % ALIGNMENT else rows
        arrays = rows, codes.view(rows.shape), scale.view(rows.shape[0], *groups)
        most = rows_at_once(rows.shape[1])
        if rows.shape[0] <= most:
            entry(*arrays)
        else:
            for begin in range(0, rows.shape[0], most):
                entry(*(x[begin : begin + most] for x in arrays))
    return codes, scale


Key = tuple[Any, ...]
_adopted: dict[Key, Any] = {}


def adopt(key: Key, entry: Any) -> None:
    """Use a kernel that was loaded with a saved model, where it would otherwise be found or built."""
    _adopted[key] = entry


def kernels_for(calls: Sequence[tuple[str, str, int, int]], where: torch.device) -> list[tuple[Key, Kernel]]:
    """Return the kernels, and the keys to `adopt` them by, of (type, activation, group, K) on a device.

    What torch computes there has none.
    """
    found: dict[Key, Kernel] = {}
    for source, activation, group, k in calls:
        if where.type == "cpu":
            if activation == "int8" and not group:
                found["cpu", source] = _cpu_job(source)
        else:
            target = target_of(where)
            kernel = gpu_kernel(source, activation, group, k, get_device(target))
            found["cuda", source, activation, group, k, target] = kernel
    return list(found.items())


@cache
def _cpu_kernel(source: str) -> Any:
    """Return the loaded kernel ``(x[M,K], codes int8[M,K], token_scale float32[M])``."""
    return _adopted.get(("cpu", source)) or load_entry(_cpu_job(source), "cpu")


def _cpu_job(source: str) -> Kernel:
    """Find or build the kernel for rows of a type."""
    device = host_cpu()

    def emit(name: str) -> Any:
        from ladder.lower.cpu import emit_quantize

        return emit_quantize(source, device, name)

    job = function_job({"quantize_tokens": source}, f"ladder_quantize_tokens_{source}", device, emit)
    return find_or_build([job])[0]


@cache
def _gpu_entry(source: str, activation: str, group: int, k: int, target: str) -> Any:
    """Return the loaded kernel ``(x[M,K], codes[M,K], token_scale float32[M] or [M, groups])``."""
    known = _adopted.get(("cuda", source, activation, group, k, target))
    if known is not None:
        return known
    return load_entry(gpu_kernel(source, activation, group, k, get_device(target)), "cuda")


def gpu_kernel(source: str, activation: str, group: int, k: int, device: TileDevice) -> Kernel:
    """Return the compiled kernel that quantises rows of K elements of a type on a GPU; it need not be here.

    Raises ConversionError if the device does not multiply the type.
    Raises MissingToolError, CompilerError if the kernel cannot be compiled.
    """
    plan, *others = tilings(source, activation, group, k, device.vendor)
    job = _gpu_job(plan, device, lambda: (_gpu_job(other, device) for other in others))
    return warn_of_spills(find_or_build([job]), device)[0]


def _gpu_job(plan: Quantization, device: TileDevice, others: Callable[[], Iterable[Job]] = tuple) -> Job:
    from ladder.lower.build import emit_quantizer

    def emit(name: str) -> Any:
        return emit_quantizer(plan, device, name)

    shape = f"{plan.source}_{plan.activation}_{plan.group}_{plan.threads}_{plan.chunks}"
    facts = {"quantize_tokens": asdict(plan)}
    return function_job(facts, f"ladder_quantize_tokens_{shape}", device, emit, others=others)
