"""Products of rows with the matrix of their group, as the program has it: ``ladder::grouped_product``.

Models whose experts have 16 bits call ``torch._grouped_mm`` or, where that does not serve, an operator of
transformers that counts rows on the host. On NVIDIA GPUs one kernel of ours does either: it reads on the
device where groups end, and the matrices in place, whichever of their axes lies close.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from ladder.ir.extents import MOST_COUNTED
from ladder.ir.gemm import Gemm
from ladder.runtime.compile import Request, compiled, target_of
from ladder.runtime.experts import Operands, at_once
from ladder.runtime.grouped import in_turn
from ladder.runtime.kernel import in_memory
from ladder.runtime.operator import refuse_gradient
from ladder.runtime.registered import define, library
from schedules.dense import serves_experts
from targets import TileDevice, get_device

SCHEMA = "grouped_product(Tensor x, Tensor matrices, Tensor ends, bool whole) -> Tensor"

NAMED_SCHEMA = "named_product(Tensor x, Tensor matrices, Tensor experts, bool whole) -> Tensor"

TYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}

UNIT = 8
"""Elements that kernels load at once: rows of x and of matrices are multiples."""


def problem(dtype: str, experts: int, n: int, k: int, stored: str) -> Gemm:
    """Return the normal form of a product with matrices in the order ``stored`` (`ladder.ir.gemm.STORED`)."""
    return Gemm(n, k, dtype, dtype, dtype, scale=False, experts=experts, stored=stored)


def can_serve(device: TileDevice, dtype: str, k: int, n: int) -> bool:
    """Tell whether a device has kernels for products ``[T, K] x [E, K, N]`` in some order of the matrices."""
    able = "ldmatrix" in device.features and any(core.a == dtype for core in device.cores)
    return able and dtype in TYPES.values() and k % UNIT == 0 == n % UNIT and k > 0 and n > 0


def stored_as(matrices: torch.Tensor) -> str:
    """Return how matrices ``[E, K, N]`` lie (`ladder.ir.gemm.STORED`); empty if no kernel reads that."""
    if matrices.data_ptr() % 16 or matrices.is_neg():
        return ""
    if matrices.is_contiguous():
        return "columns"
    return "rows" if matrices.mT.is_contiguous() else ""


def multiply(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, whole: bool) -> torch.Tensor:
    """Multiply each row by the matrix of its group.

    x: ``[T, K]``, float16 or bfloat16.
    matrices: ``[E, K, N]`` of the same type.
    ends: int32 or int64 ``[E]``: rows of group e end before ``ends[e]``, where those of the next begin.
    whole: Whether rows of no group are zeros; else they are not written.
    Returns: ``[T, N]``.
    """
    request = _request(x, matrices)
    if request is None:
        return original(whole)(x, matrices, ends)
    return _launched(request, x, matrices, ends, whole)


def multiply_named(
    x: torch.Tensor, matrices: torch.Tensor, experts: torch.Tensor, whole: bool
) -> torch.Tensor:
    """Multiply each row by the matrix that it names.

    experts: int32 ``[T]``; rows with numbers that are no matrix are rows of no group.
    The others: As for `multiply`.
    """
    request = _request(x, matrices, len(x))
    if request is None:
        return _sorted(x, matrices, experts, whole)
    return _launched(request, x, matrices, experts, whole)


def _sorted(x: torch.Tensor, matrices: torch.Tensor, experts: torch.Tensor, whole: bool) -> torch.Tensor:
    """Multiply rows sorted by their matrices, and return them in their own order."""
    found, order = torch.sort(experts)
    ends = torch.searchsorted(found, torch.arange(len(matrices), device=x.device), right=True)
    y = original(whole)(x[order], matrices, ends.to(torch.int32))
    return torch.empty_like(y).index_copy_(0, order, y)


def _launched(
    request: Request, x: torch.Tensor, matrices: torch.Tensor, ranges: torch.Tensor, whole: bool
) -> torch.Tensor:
    y = (torch.zeros if whole else torch.empty)((len(x), matrices.shape[2]), dtype=x.dtype, device=x.device)
    weight = matrices if request.gemm.stored == "columns" else matrices.mT
    operands = Operands(in_memory(x), (weight,), ranges.to(torch.int32), None, None, y)
    at_once(compiled(request.text, x.device), operands, 0)
    return y


def original(whole: bool) -> Callable[..., torch.Tensor]:
    """Return the operator that a program called, or what does the same."""
    if whole:
        return in_turn
    return torch.ops.aten._grouped_mm.default


def _request(x: torch.Tensor, matrices: torch.Tensor, slots: int = 0) -> Request | None:
    """Return what a kernel of ours is asked for; None where the program's own operator serves."""
    experts, k, n = matrices.shape
    stored = stored_as(matrices) if x.dtype is matrices.dtype and x.dtype in TYPES else ""
    if not stored or not len(x) or max(len(x) * k, len(x) * n, matrices.numel()) > MOST_COUNTED:
        return None
    return _chosen(TYPES[x.dtype], experts, n, k, stored, x.device, len(x), slots)


@lru_cache(maxsize=1024)
def _chosen(
    dtype: str, experts: int, n: int, k: int, stored: str, where: torch.device, rows: int, slots: int
) -> Request | None:
    device = get_device(target_of(where))
    if not can_serve(device, dtype, k, n):
        return None
    gemm = replace(problem(dtype, experts, n, k, stored), slots=slots)
    return Request(gemm, device.name) if serves_experts(device, gemm, rows) else None


def _shape(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, whole: bool) -> torch.Tensor:
    """Tell shape and type of the result."""
    return x.new_empty((x.shape[0], matrices.shape[2]))


named_product: Callable[..., torch.Tensor] = define(NAMED_SCHEMA, multiply_named, _shape, ("CUDA",))
"""``named_product(x, matrices, experts, whole)``: the registered operator."""
torch.library.register_autograd("ladder::named_product", refuse_gradient, lib=library)

grouped_product: Callable[..., torch.Tensor] = define(SCHEMA, multiply, _shape, ("CUDA",))
"""``grouped_product(x, matrices, ends, whole)``: the registered operator."""
torch.library.register_autograd("ladder::grouped_product", refuse_gradient, lib=library)
