"""Dynamic quantization of activations: one scale per row, computed where the row is."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladder.runtime.build import Job, find_or_build
from ladder.runtime.cache import Identity
from ladder.runtime.compile import load_entry
from ladder.runtime.kernel import torch_dtype

if TYPE_CHECKING:
    import torch

    from ladder.lower.build import BuiltModule

EIGHT_BIT = ("int8", "fp8_e4m3", "fp8_e5m2")
"""Activation types that carry a scale per row."""


def quantize_tokens(x: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row to 8 bits by its largest magnitude.

    Parameters
    ----------
    x
        ``[..., K]`` of any float type.
    activation
        One of `EIGHT_BIT`.

    Returns
    -------
    ``(codes, scale)``: ``[..., K]`` of the 8-bit type, rounded to nearest even, and float32 ``[...]``,
    such that ``codes * scale`` approximates x. A row of zeros has a tiny scale and codes 0.
    """
    import torch

    dtype = torch_dtype(activation)
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    wide = x.to(torch.float32)
    scale = (wide.abs().amax(dim=-1, keepdim=True) / limit).clamp_min(torch.finfo(torch.float32).tiny)
    units = (wide / scale).clamp(-limit, limit)
    codes = units.round().to(dtype) if dtype == torch.int8 else units.to(dtype)
    return codes, scale.squeeze(-1)


def quantize_tokens_on_cpu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to int8 as `quantize_tokens` does, by one kernel; a row of zeros has scale 0."""
    import torch

    rows = x.reshape(-1, x.shape[-1]).contiguous()
    codes = torch.empty(rows.shape, dtype=torch.int8)
    scale = torch.empty(rows.shape[0], dtype=torch.float32)
    if rows.shape[0]:
        _cpu_kernel(str(x.dtype).removeprefix("torch."))(rows, codes, scale)
    return codes.view(x.shape), scale.view(x.shape[:-1])


@cache
def _cpu_kernel(source: str) -> Any:
    """Return the loaded kernel ``(x[M,K], codes int8[M,K], token_scale float32[M])``."""
    from targets import host_cpu

    device = host_cpu()

    def make(folder: Path) -> BuiltModule:
        from ladder.lower.build import BuiltModule
        from ladder.lower.cpu import emit_quantize
        from ladder.lower.cpu.toolchain import compile_functions
        from ladder.lower.turn import tvm_turn

        name, path = f"ladder_quantize_tokens_{source}", folder / "kernel.so"
        with tvm_turn():
            function = emit_quantize(source, device, name)
            result = compile_functions({name: function}, device, path)
            return BuiltModule(path, (name,), {"tir": function.script(), result.language: result.source})

    job = Job({"quantize_tokens": source}, Identity.of(None, device), device, make)
    return load_entry(find_or_build([job])[0], "cpu")
