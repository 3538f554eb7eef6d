"""Dynamic quantization of activations: one scale per row, computed where the row is."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladder.runtime.build import Job, find_or_build
from ladder.runtime.cache import Identity
from ladder.runtime.compile import load_entry, target_of
from ladder.runtime.kernel import ALIGNMENT, torch_dtype

if TYPE_CHECKING:
    import torch

    from ladder.lower.build import BuiltModule
    from targets import TileDevice

EIGHT_BIT = ("int8", "fp8_e4m3", "fp8_e5m2")
"""Activation types that carry a scale per row."""

WARP_ELEMENTS = 1024
"""Elements of a row that a warp of the CUDA kernel keeps in registers: four chunks of 8 per lane."""

FEWEST_WARPS, MOST_WARPS = 4, 32


def quantize_tokens(x: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row to 8 bits by its largest magnitude, with torch's own operators.

    Parameters
    ----------
    x
        ``[..., K]`` of any float type.
    activation
        One of `EIGHT_BIT`.

    Returns
    -------
    ``(codes, scale)``: ``[..., K]`` of the 8-bit type, rounded to nearest even, and float32 ``[...]``,
    such that ``codes * scale`` approximates x. A row of zeros has a tiny scale and codes 0; a row
    with infinity or NaN has the scale NaN.
    """
    import torch

    dtype = torch_dtype(activation)
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    wide = x.to(torch.float32)
    largest = wide.abs().amax(dim=-1, keepdim=True)
    scale = (largest / limit).clamp_min(torch.finfo(torch.float32).tiny)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    units = (wide / scale).clamp(-limit, limit)
    codes = units.round().to(dtype) if dtype == torch.int8 else units.to(dtype)
    return codes, scale.squeeze(-1)


def quantize_by_kernel(x: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows as `quantize_tokens` does, by one kernel of the device that x is on.

    CPUs have kernels for int8; they give a row of zeros the scale 0. What has no kernel of ours
    is computed by `quantize_tokens`.
    """
    import torch

    on_cpu = x.device.type == "cpu"
    if on_cpu and activation != "int8":
        return quantize_tokens(x, activation)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    codes = torch.empty(x.shape, dtype=torch_dtype(activation), device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if codes.numel():
        source = str(x.dtype).removeprefix("torch.")
        if on_cpu:
            entry = _cpu_kernel(source)
        else:
            entry = _cuda_kernel(source, activation, target_of(x.device), warps_for(x.shape[-1]))
            rows = rows.clone() if rows.data_ptr() % ALIGNMENT else rows
        entry(rows, codes.view(rows.shape), scale.view(-1))
    return codes, scale


def warps_for(k: int) -> int:
    """Return the warps of a block of the CUDA kernel: they keep a row of ``k`` where 32 suffice."""
    wanted = -(-k // WARP_ELEMENTS)
    return min(max(FEWEST_WARPS, 1 << (wanted - 1).bit_length()), MOST_WARPS)


@cache
def _cpu_kernel(source: str) -> Any:
    """Return the loaded kernel ``(x[M,K], codes int8[M,K], token_scale float32[M])``."""
    from targets import host_cpu

    device = host_cpu()

    def emit(name: str) -> Any:
        from ladder.lower.cpu import emit_quantize

        return emit_quantize(source, device, name)

    return _load({"quantize_tokens": source}, f"ladder_quantize_tokens_{source}", device, emit)


@cache
def _cuda_kernel(source: str, activation: str, target: str, warps: int) -> Any:
    """Return the loaded kernel ``(x[M,K], codes[M,K], token_scale float32[M])``."""
    from targets import get_device

    device = get_device(target)

    def emit(name: str) -> Any:
        from ladder.lower.cuda import quantize

        return quantize.emit(quantize.Quantization(source, activation, threads=32 * warps), device, name)

    facts = {"quantize_tokens": source, "activation": activation, "warps": warps}
    return _load(facts, f"ladder_quantize_tokens_{source}_{activation}_{warps}", device, emit)


def _load(facts: dict[str, Any], name: str, device: TileDevice, emit: Any) -> Any:
    """Find or build the kernel that ``emit`` emits, and load its entry."""

    def make(folder: Path) -> BuiltModule:
        from ladder.lower.build import build_function

        return build_function(emit, name, device, folder)

    kernel = find_or_build([Job(facts, Identity.of(None, device), device, make)])[0]
    return load_entry(kernel, "cuda" if device.is_gpu else "cpu")
