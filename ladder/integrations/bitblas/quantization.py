"""BitBLAS's helpers for packed codes in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ladder.integrations.bitblas.layouts import interleaving
from tile_types.errors import ShapeError
from tile_types.packing import pack_codes, unpack_codes

__all__ = ["gen_quant4", "general_compress", "interleave_weight"]


def gen_quant4(
    k: int, n: int, groupsize: int = -1
) -> tuple[torch.Tensor, torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """Return a random weight quantized to 4 bits.

    Returns: The float16 weight ``[k, n]``, a layer of the quantized values, the scales ``[k / groupsize,
        n]``, and the integers from -8 to 8 ``[k, n]``.
    """
    group = k if groupsize == -1 else groupsize
    weight = torch.randn(k, n, dtype=torch.float16)
    grouped = weight.view(k // group, group, n)
    scale = grouped.abs().amax(1, keepdim=True) / 8
    codes = (grouped / scale).round().clamp(-8, 8)
    linear = torch.nn.Linear(k, n, bias=False)
    linear.weight.data = (codes * scale).view(k, n).t()
    return weight, linear, scale.view(-1, n).contiguous(), codes.view(k, n).int()


def general_compress(lowprecision_weight: Any, source_bits: int = 4, storage_dtype: Any = np.int8) -> Any:
    """Pack codes along the last axis of an array, lowest bits first.

    Raises ShapeError if a row of codes does not fill bytes.
    """
    codes = lowprecision_weight.astype(np.int64).astype(np.uint8) & ((1 << source_bits) - 1)
    if codes.shape[-1] * source_bits % 8:
        raise ShapeError(f"{codes.shape[-1]} codes of {source_bits} bits do not fill bytes")
    flat = pack_codes(codes.reshape(-1, codes.shape[-1]), source_bits)
    return flat.reshape(*codes.shape[:-1], -1).view(storage_dtype)


def interleave_weight(qweight: Any, nbits: int = 4, target_dtype: str = "float16") -> Any:
    """Interleave packed codes in 32-bit words, for activations of ``"float16"`` or ``"int8"``."""
    width = np.dtype(target_dtype).itemsize * 8
    octets = qweight.view(np.uint8)
    codes = unpack_codes(octets, nbits, octets.shape[-1] * 8 // nbits)
    words = codes.reshape(len(codes), -1, 32 // nbits)
    stored = np.empty_like(words)
    stored[..., list(interleaving(nbits, target_dtype, width))] = words
    return pack_codes(stored.reshape(len(codes), -1), nbits).view(np.int8)
