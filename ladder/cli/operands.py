"""Random operands of a product, and its exact result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ladder.cli.problem import SIXTEEN_BIT
from tile_types import quantize
from tile_types.arrays import torch_dtype

if TYPE_CHECKING:
    from ladder.cli.problem import Problem
    from ladder.ir.gemm import Gemm
    from tile_types import QuantizedTensor

INT8_MAX, INT8_SIGMAS = 127, 4.0
"""int8 activations: the largest code, and the deviations of a normal value that it stands for."""

RARE, BOUNDED = 5.0, 1.8
"""Standard deviations: beyond these lies one of 270,000 draws; so many a bound allows bfloat16's rounding."""


@dataclass(frozen=True)
class Operands:
    """Activations, weight and what else the product takes, on the host.

    x: ``[M, K]`` of the activation type.
    weight: ``[N, K]`` quantized.
    bias: ``[N]`` of the output type, or None.
    token_scale: float32 ``[M]``, or None.
    """

    x: torch.Tensor
    weight: QuantizedTensor
    bias: torch.Tensor | None
    token_scale: torch.Tensor | None

    def to(self, device: str) -> Operands:
        """Return the operands with their activations, bias and scales on another device."""
        bias, scale = self.bias, self.token_scale
        return Operands(
            self.x.to(device),
            self.weight,
            None if bias is None else bias.to(device),
            None if scale is None else scale.to(device),
        )


def make_operands(problem: Problem, gemm: Gemm) -> Operands:
    """Draw normal weights and activations from the problem's seed."""
    random = torch.Generator().manual_seed(problem.seed)
    weight = make_weight(problem, random)
    x = torch.randn(problem.m, problem.k, generator=random)
    token_scale = None
    if gemm.token_scale:
        token_scale = torch.rand(problem.m, generator=random) / 64 + 1 / 64
    bias = torch.randn(problem.n, generator=random).to(torch_dtype(gemm.output)) if gemm.bias else None
    return Operands(activations(x, gemm.activation), weight, bias, token_scale)


def cancellation(products: Sequence[Operands], exact: Any) -> float:
    """Return by what factor, at least 1, the error may exceed that of many results whose terms do not cancel.

    Rounding an operand errs relative to its products: where they cancel, the error grows by the norm of their
    sums, were they independent, over that of the results. It averages over many results only; the error of
    few may be `RARE` standard deviations of the largest above its mean (Gaussian concentration).

    products, exact: What is multiplied, one or each expert's, and all their results.
    """
    return cancellation_of(map(_squares, products), float(np.linalg.norm(exact)))


def cancellation_of(squares: Iterable[tuple[Any, Any]], size: float) -> float:
    """Return `cancellation` by the squares of ``[M, K]`` and ``[N, K]``, and the norm of all results."""
    size, terms, largest = size or 1.0, 0.0, 0.0
    for rows, columns in squares:
        terms += float(rows.sum(0) @ columns.sum(0))
        most, widest = rows.max(0, initial=0.0), columns.max(0, initial=0.0)
        largest = max(largest, float(min((most @ columns.T).max(), (rows @ widest).max(initial=0.0))))
    share = math.sqrt(terms) / size
    return max(1.0, share, (share + RARE * math.sqrt(largest) / size) / BOUNDED)


def _squares(product: Operands) -> tuple[Any, Any]:
    """Return the squares of activations ``[M, K]``, scales included, and of weights ``[N, K]``."""
    x = product.x.double().cpu().numpy()
    if product.token_scale is not None:
        x = x * product.token_scale.double().cpu().numpy()[:, None]
    return np.square(x), np.square(np.asarray(product.weight.dequantize("float64")))


def make_weight(problem: Problem, random: torch.Generator) -> QuantizedTensor:
    """Quantize a normal matrix; a type with values of one sign and no zero points gets magnitudes.

    Its scales and real zero points have the precision of 16-bit activations, as those of checkpoints do.
    """
    values = torch.randn(problem.n, problem.k, generator=random) / problem.k**0.5
    if problem.activation_type in SIXTEEN_BIT:
        values = values.to(torch_dtype(problem.activation_type))
    element = problem.ttype.element_type
    if problem.zero == "none" and min(-element.minimum, element.maximum) <= 0:
        values = values.abs() if element.maximum > 0 else -values.abs()
    zero = None if problem.zero == "none" else problem.zero
    return quantize(values, problem.ttype, group_size=problem.group, zero=zero)


def activations(x: torch.Tensor, name: str) -> torch.Tensor:
    """Round normal values to the activation type, using most of its range."""
    if name == "int8":
        return (x * INT8_MAX / INT8_SIGMAS).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return x.to(torch_dtype(name))
