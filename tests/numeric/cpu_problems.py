"""Problems for CPU kernels: quantized weights, activations and the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ladder.ir.gemm import Gemm
from ladder.lower import cpu
from ladder.lower.build import emit
from ladder.lower.cpu.toolchain import compile_module
from tile_types import QuantizedTensor, get_type
from tile_types.factored import Factored

DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

BOUNDS = {"float16": 5e-4, "bfloat16": 3e-3, "float32": 1e-5}
"""Relative Frobenius error by output type: half a unit in the last place, and float32 sums."""


@dataclass(frozen=True)
class Problem:
    gemm: Gemm
    weight: QuantizedTensor
    values: np.ndarray


def problem(weight, activation, n, k, group=0, *, zero="none", output="float32", seed=0, **rest):
    """Draw codes uniformly among the valid ones, so that every code occurs."""
    rng = np.random.default_rng(seed)
    element = get_type(weight)
    # Of e8m0's 2**-127 to 2**127 only what float32 can sum.
    valid = element.valid_codes()[abs(element.probe_values()) <= 2.0**60]
    if element.elem_bits > 8:
        normal = torch.from_numpy(rng.standard_normal((n, k)))
        codes = element.encode(normal).numpy()
    else:
        codes = valid[rng.integers(0, len(valid), (n, k))]
    width = group or k
    groups = -(-k // width)
    scale = (rng.random((n, groups)) + 0.5).astype(np.float16)
    zeros = None
    if zero == "integer":
        zeros = rng.integers(int(element.minimum), int(element.maximum) + 1, (n, groups))
        zeros = zeros.astype(np.int8 if element.minimum < 0 else np.uint8)
    elif zero == "float":
        zeros = (rng.standard_normal((n, groups)) * element.max_abs / 2).astype(np.float16)
    kept = codes.astype(
        np.uint8 if element.elem_bits <= 8 else np.uint16 if element.elem_bits <= 16 else np.uint32
    )
    quantized = QuantizedTensor.from_codes(
        kept, element, (1, width), scale=scale, zero=zeros, zero_kind=zero, scale_type="float16"
    )
    values = element.decode_codes(codes) - (
        0 if zeros is None else np.repeat(zeros.astype(np.float64), width, 1)[:, :k]
    )
    values = values * np.repeat(scale.astype(np.float64), width, 1)[:, :k]
    gemm = Gemm(n, k, weight, activation, output, width, group != 0, zero, **rest)
    return Problem(gemm, quantized, values)


def factored(ttype, shape, group, *, offset=True, vanishing=False):
    """Draw a matrix whose scales and offsets are factors as in GGUF's K-quants.

    vanishing: Whether two groups of each row are zero.
    """
    random, found, (n, k) = torch.Generator().manual_seed(group), {}, shape
    element = get_type(ttype)
    codes = torch.randint(0, 1 << element.elem_bits, shape, generator=random).byte()
    for name in ("scale", "offset")[: 1 + offset]:
        number = (torch.rand(n, k // 256, generator=random) - 0.5).half()
        integers = torch.randint(-128, 128, (n, k // group), generator=random).to(torch.int8)
        integers[integers == 0] = 1
        integers[:, 3:5] *= not vanishing
        products = number.float().repeat_interleave(256 // group, 1) * integers
        found[name] = Factored(products, number, integers)
    arrays = {name: each.products for name, each in found.items()}
    return QuantizedTensor.from_codes(
        codes, element, (1, group), scale_type="float32", factors=found, **arrays
    )


def activations(gemm, m, seed=1):
    x = torch.randn(m, gemm.k, generator=torch.Generator().manual_seed(seed))
    if gemm.activation == "int8":
        return (x * 40 + 7).round().clamp(-128, 127).to(torch.int8)
    return (x + 0.25).to(DTYPES.get(gemm.activation) or getattr(torch, gemm.activation))


def compile_entries(gemm, device, schedules):
    names = {f"entry_{index}": schedule for index, schedule in enumerate(schedules)}
    module = compile_module({name: emit(gemm, device, s, name) for name, s in names.items()}, device)
    return [module[name] for name in names]


def relative_error(case, entry, m, x=None):
    """Run one entry and compare with float64; y starts as NaN, so what is not written shows."""
    gemm = case.gemm
    x = activations(gemm, m) if x is None else x
    y = torch.full((m, gemm.n), float("nan"), dtype=getattr(torch, gemm.output))
    random = torch.Generator().manual_seed(2)
    expected = x.double().numpy() @ case.values.T
    extras = []
    if gemm.token_scale:
        extras.append(torch.rand(m, generator=random) + 0.5)
        expected = expected * extras[-1].double().numpy()[:, None]
    if gemm.bias:
        extras.append(torch.randn(gemm.n, generator=random).to(y.dtype))
        expected = expected + extras[-1].double().numpy()
    entry(x, *cpu.pack(gemm, case.weight).values(), *extras, y)
    return float(np.linalg.norm(y.double().numpy() - expected) / np.linalg.norm(expected))
