"""The memory-bound chains of `benchmarks.chains`, as one writes them in torch, at sizes of known models.

Each is a function of tensors, with the shapes of its arguments; results are contiguous, as the
products that read them want. ``small`` sizes are for simulation and for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A chain.

    Parameters
    ----------
    function
        Of tensors; returns one or a tuple.
    shapes
        Size name -> shapes of the arguments.
    scale
        Standard deviation of the arguments.
    """

    function: Callable[..., Any]
    shapes: dict[str, tuple[Shape, ...]]
    scale: float = 1.0


def silu_mul(gate: Any, up: Any) -> Any:
    return F.silu(gate) * up


def gelu_bias(x: Any, bias: Any) -> Any:
    return F.gelu(x + bias)


def add_rms_norm(x: Any, residual: Any, weight: Any) -> Any:
    """Return the residual stream and its norm (Llama)."""
    total = x + residual
    return total, F.rms_norm(total, (total.shape[-1],), weight, 1e-5)


def add_layer_norm(x: Any, bias: Any, residual: Any, weight: Any, shift: Any) -> Any:
    """Return what follows a projection in BERT: bias, residual, norm."""
    total = x + bias + residual
    return F.layer_norm(total, (total.shape[-1],), weight, shift, 1e-12)


def layer_norm_gelu(x: Any, weight: Any, shift: Any) -> Any:
    return F.gelu(F.layer_norm(x, (x.shape[-1],), weight, shift))


def masked_softmax(scores: Any, mask: Any) -> Any:
    """Return attention's weights: scale, additive mask, softmax (BERT)."""
    return torch.softmax(scores * 0.125 + mask, -1)


def causal_softmax(scores: Any) -> Any:
    """Return softmax over keys that are not later."""
    rows, columns = scores.shape[-2:]
    position = torch.arange(columns, device=scores.device)
    seen = position[None, :] <= position[:rows, None]
    return torch.softmax((scores * 0.125).masked_fill(~seen, -1e4), -1)


def shuffle_split(left: Any, right: Any) -> Any:
    """Return the halves of ShuffleNet's shuffled channels, as its next unit reads them."""
    n, c, h, w = left.shape
    joined = torch.cat([left, F.relu(right)], 1)
    mixed = joined.view(n, 2, c, h, w).transpose(1, 2).reshape(n, 2 * c, h, w)
    first, second = mixed.chunk(2, 1)
    return first.contiguous(), second.contiguous()


def split_heads(x: Any, bias: Any) -> Any:
    """Return q, k and v of a joint projection, heads first (BERT, ViT)."""
    b, s, width = x.shape
    heads = (x + bias).view(b, s, 3, width // 192, 64).permute(2, 0, 3, 1, 4)
    q, k, v = heads.unbind(0)
    return q.contiguous(), k.contiguous(), v.contiguous()


def rotary(q: Any, cos: Any, sin: Any) -> Any:
    """Return rotated queries, heads first (Llama)."""
    x = q.transpose(1, 2)
    half = q.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


def channels_last(x: Any, bias: Any) -> Any:
    """Return activations of a convolution in NHWC."""
    return F.relu(x + bias[:, None, None]).permute(0, 2, 3, 1).contiguous()


def transposed_glu(x: Any) -> Any:
    """Return Conformer's gated linear unit, time last, as its depthwise convolution reads it."""
    value, gate = x.chunk(2, -1)
    return (value * torch.sigmoid(gate)).transpose(1, 2).contiguous()


def transposed_norm(x: Any, weight: Any, shift: Any) -> Any:
    """Return ConvNeXt's norm over channels of NCHW, channels last."""
    y = x.permute(0, 2, 3, 1)
    return F.layer_norm(y, (y.shape[-1],), weight, shift, 1e-6)


def add_transposed(x: Any, y: Any) -> Any:
    return x + y.t()


PROGRAMS = {
    "silu_mul": Program(
        silu_mul,
        {
            "small": ((6, 96),) * 2,
            "M=1 14336": ((1, 14336),) * 2,
            "M=32 14336": ((32, 14336),) * 2,
            "M=4096 14336": ((4096, 14336),) * 2,
        },
    ),
    "gelu_bias": Program(
        gelu_bias,
        {
            "small": ((6, 96), (96,)),
            "32x128 3072": ((4096, 3072), (3072,)),
            "32x512 3072": ((16384, 3072), (3072,)),
        },
    ),
    "add_rms_norm": Program(
        add_rms_norm,
        {
            "small": ((5, 640), (5, 640), (640,)),
            "M=32 4096": ((32, 4096), (32, 4096), (4096,)),
            "M=8192 4096": ((8192, 4096), (8192, 4096), (4096,)),
            "M=4096 8192": ((4096, 8192), (4096, 8192), (8192,)),
        },
    ),
    "add_layer_norm": Program(
        add_layer_norm,
        {
            "small": ((5, 384), (384,), (5, 384), (384,), (384,)),
            "32x128 768": ((4096, 768), (768,), (4096, 768), (768,), (768,)),
            "32x512 1024": ((16384, 1024), (1024,), (16384, 1024), (1024,), (1024,)),
        },
    ),
    "layer_norm_gelu": Program(
        layer_norm_gelu,
        {
            "small": ((5, 384), (384,), (384,)),
            "16x200 512": ((3200, 512), (512,), (512,)),
            "32x512 2048": ((16384, 2048), (2048,), (2048,)),
        },
    ),
    "masked_softmax": Program(
        masked_softmax,
        {
            "small": ((2, 3, 8, 48), (2, 1, 1, 48)),
            "BERT 8x12x128": ((8, 12, 128, 128), (8, 1, 1, 128)),
            "BERT 32x12x512": ((32, 12, 512, 512), (32, 1, 1, 512)),
        },
        4.0,
    ),
    "causal_softmax": Program(
        causal_softmax,
        {
            "small": ((2, 16, 256),),
            "GPT-2 4x12x1024": ((48, 1024, 1024),),
            "Llama 1x32x4096": ((8, 4096, 4096),),
        },
        4.0,
    ),
    "shuffle_split": Program(
        shuffle_split,
        {
            "small": ((2, 4, 4, 4),) * 2,
            "stage 2, N=32": ((32, 58, 28, 28),) * 2,
            "stage 2, N=512": ((512, 58, 28, 28),) * 2,
            "stage 3, N=32": ((32, 116, 14, 14),) * 2,
            "stage 3, N=1024": ((1024, 116, 14, 14),) * 2,
            "stage 4, N=1024": ((1024, 232, 7, 7),) * 2,
        },
    ),
    "split_heads": Program(
        split_heads,
        {
            "small": ((2, 8, 384), (384,)),
            "BERT 8x128": ((8, 128, 2304), (2304,)),
            "BERT 32x512": ((32, 512, 2304), (2304,)),
        },
    ),
    "rotary": Program(
        rotary,
        {
            "small": ((2, 6, 4, 16), (6, 16), (6, 16)),
            "Llama 1x512": ((1, 512, 32, 128), (512, 128), (512, 128)),
            "Llama 4x4096": ((4, 4096, 32, 128), (4096, 128), (4096, 128)),
        },
    ),
    "channels_last": Program(
        channels_last,
        {
            "small": ((2, 64, 8, 8), (64,)),
            "ResNet 8x256x28x28": ((8, 256, 28, 28), (256,)),
            "ResNet 64x256x56x56": ((64, 256, 56, 56), (256,)),
        },
    ),
    "transposed_glu": Program(
        transposed_glu,
        {
            "small": ((2, 64, 128),),
            "Conformer 8x400": ((8, 400, 1024),),
            "Conformer 32x1600": ((32, 1600, 1024),),
        },
    ),
    "transposed_norm": Program(
        transposed_norm,
        {
            "small": ((2, 64, 8, 8), (64,), (64,)),
            "ConvNeXt 8x384x14x14": ((8, 384, 14, 14), (384,), (384,)),
            "ConvNeXt 64x96x56x56": ((64, 96, 56, 56), (96,), (96,)),
        },
    ),
    "add_transposed": Program(
        add_transposed,
        {
            "small": ((64, 128), (128, 64)),
            "1024": ((1024, 1024),) * 2,
            "8192": ((8192, 8192),) * 2,
        },
    ),
}
"""Name -> chain."""
