"""Products with one weight per expert: packing, the call, and ``ladder::grouped_matmul``.

On a GPU one kernel serves all experts and reads on the device which tokens are whose, so a call
never waits for the device and can be captured in a CUDA graph. On a CPU experts take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ladder.ir.extents import MOST_COUNTED
from ladder.ir.gemm import Gemm
from ladder.runtime import words
from ladder.runtime.compile import Request, compiled
from ladder.runtime.kernel import (
    ALIGNMENT,
    CompiledGemm,
    in_memory,
    refuse_rows,
    require_alike,
    require_beside,
)
from ladder.runtime.operator import has_no_gradient, no_bias, refuse_gradient, times_weight
from ladder.runtime.packed import PackedWeight, as_taken, pack
from ladder.runtime.registered import define, library
from targets import TileDevice
from tile_types.arrays import torch_dtype
from tile_types.errors import DTypeError, ShapeError, ValueRangeError, require_kind
from tile_types.quantized import QuantizedTensor

SCHEMA = (
    "grouped_matmul(Tensor x, Tensor[] weight, Tensor ranges, Tensor? bias, Tensor? token_scale,"
    " int expected, str request) -> Tensor"
)

GRADIENTS_SCHEMA = (
    "grouped_gradients(Tensor gradient, Tensor[] weight, Tensor ranges, str request) -> (Tensor, Tensor)"
)


def pack_experts(gemm: Gemm, device: TileDevice, weights: Sequence[QuantizedTensor]) -> PackedWeight:
    """Bring the matrices of all experts into the layout of a device, where the first one's arrays live.

    gemm: The problem, with as many experts as there are matrices.
    device: As for `ladder.runtime.packed.pack`.
    weights: Codes ``[N, K]`` with scales and zero points, one per expert.
    Returns: `PackedWeight` whose arrays have a leading axis of experts; scales and zero points of a CPU are
        as wide as the widest.
    Raises ShapeError if there are more or fewer matrices, or one does not fit (it is named).
    """
    if len(weights) != gemm.experts:
        raise ShapeError(f"the operator has {gemm.experts} experts, got {len(weights)} weights")
    arrays: dict[str, torch.Tensor] = {}
    for index, weight in enumerate(weights):
        try:
            part = pack(single(gemm), device, replace(weight, factors={}))
        except ShapeError as error:
            error.add_note(f"it is the weight of expert {index}")
            raise
        for name, array in part.arrays.items():
            if name not in arrays:
                arrays[name] = array.new_empty((gemm.experts, *array.shape))
                _require_indexable(arrays[name])
            elif array.shape != arrays[name].shape[1:]:
                arrays[name], array = _as_wide(single(gemm), name, arrays[name], array)
            arrays[name][index] = array
    return PackedWeight(gemm, part.family, arrays, part.order)


def _as_wide(gemm: Gemm, name: str, *stored: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield arrays of scales or zero points of a CPU with numbers of equal width."""
    from ladder.lower import cpu

    size = max(array.shape[-1] for array in stored)
    return (cpu.widened(gemm, name.removesuffix("s"), array, size) for array in stored)


def _require_indexable(array: torch.Tensor) -> None:
    if array.numel() > MOST_COUNTED:
        raise ShapeError(
            f"{array.numel()} packed words of all experts exceed the {MOST_COUNTED} that one kernel indexes;"
            " split the experts over two operators"
        )


def single(gemm: Gemm) -> Gemm:
    """Return the product of one expert."""
    return replace(gemm, experts=0, masked=False, slots=0)


class Operands(NamedTuple):
    """Operands and results of a grouped product.

    rows: ``[T, K]``: the tokens.
    weight: Packed arrays, with a leading axis of experts.
    ranges: int32: which tokens are whose.
    bias: ``[E, N]``, or None.
    scales: float32 ``[T, ...]``: scales of 8-bit tokens, or None.
    out: ``[T, N]``: is written.
    """

    rows: torch.Tensor
    weight: Sequence[Any]
    ranges: torch.Tensor
    bias: torch.Tensor | None
    scales: torch.Tensor | None
    out: torch.Tensor


def multiply(
    x: torch.Tensor,
    weight: Sequence[Any],
    ranges: torch.Tensor,
    bias: torch.Tensor | None,
    token_scale: torch.Tensor | None,
    expected: int,
    request: str,
) -> torch.Tensor:
    """Multiply where x is; `ladder.api.experts.GroupedMatmul` describes the arguments.

    ``expected`` is the number of tokens per expert that the kernel is chosen for; 0: the mean.
    """
    words.check(weight)
    if x.dim() == 3 and not Request.parse(request).gemm.masked:
        request = of_slots(request, len(x))
    gemm = Request.parse(request).gemm
    check_operands(gemm, x, ranges, bias, token_scale)
    y = torch.empty((*x.shape[:-1], gemm.columns), dtype=torch_dtype(gemm.output), device=x.device)
    scales = None if token_scale is None else token_scale.reshape(-1, *gemm.token_scale_shape)
    rows = in_memory(x).reshape(-1, gemm.k)
    operands = Operands(rows, [*map(as_taken, weight)], ranges, bias, scales, y.view(-1, gemm.columns))
    if not operands.rows.shape[0]:
        return y
    if x.device.type == "cpu":
        _one_by_one(gemm, compiled(_single_text(request), x.device), operands)
    else:
        at_once(compiled(request, x.device), operands, expected)
    return y


def at_once(kernel: CompiledGemm, operands: Operands, expected: int) -> None:
    """Launch one kernel for all experts on the current stream."""
    rows, weight, ranges, bias, scales, out = operands
    if max(rows.numel(), out.numel()) > MOST_COUNTED:
        raise ShapeError(
            f"kernels count {MOST_COUNTED} elements; multiply {len(rows)} rows by experts in parts"
        )
    slots = len(ranges) if kernel.gemm.slots else kernel.gemm.experts
    typical = expected or -(-rows.shape[0] // slots)
    if kernel.pad or not rows.is_contiguous() or rows.data_ptr() % ALIGNMENT:
        rows = kernel.aligned(rows)
    extras = (in_memory(vector).contiguous() for vector in (ranges, scales, bias) if vector is not None)
    kernel.entry_for(typical)(rows, *weight, *extras, out)


def _one_by_one(gemm: Gemm, kernel: CompiledGemm, operands: Operands) -> None:
    """Multiply expert by expert: on a CPU the ranges are at hand."""
    rows, weight, ranges, bias, scales, out = operands
    for expert, start, stop in host_ranges(gemm, ranges, rows.shape[0]):
        if start < stop:
            part = [array[expert] for array in weight]
            extras = (None if bias is None else bias[expert], None if scales is None else scales[start:stop])
            out[start:stop] = kernel.run(rows[start:stop], part, *extras)


def check_operands(
    gemm: Gemm,
    x: torch.Tensor,
    ranges: torch.Tensor,
    bias: torch.Tensor | None,
    token_scale: torch.Tensor | None,
) -> None:
    """Compare the operands of a grouped product with its problem.

    Raises ShapeError, DTypeError, DeviceError: Says which operand does not fit, and what would.
    """
    in_slots = gemm.masked or gemm.slots
    layout = f"[{gemm.experts if gemm.masked else 'S'}, M, {gemm.k}]" if in_slots else f"[T, {gemm.k}]"
    slots = gemm.masked and x.shape[:1] != (gemm.experts,)
    if x.dim() != (3 if in_slots else 2) or x.shape[-1] != gemm.k or slots:
        raise ShapeError(f"x must be {layout}, got {list(x.shape)}")
    require_alike("token_scale", gemm.token_scale, token_scale)
    require_alike("bias", gemm.bias, bias)
    name = "counts" if gemm.masked else "experts" if gemm.slots else "offsets"
    numbers = len(x) if gemm.slots else gemm.experts + (not gemm.masked)
    operands = (
        ("x", x, torch_dtype(gemm.activation), tuple(x.shape)),
        (name, ranges, torch.int32, (numbers,)),
        ("token_scale", token_scale, torch.float32, (*x.shape[:-1], *gemm.token_scale_shape)),
        ("bias", bias, torch_dtype(gemm.output), (gemm.experts, gemm.n)),
    )
    require_kind(ranges, torch.Tensor, f"{name} must be a torch tensor")
    for label, tensor, dtype, shape in operands:
        if tensor is None:
            continue
        require_kind(tensor, torch.Tensor, f"{label} must be a torch tensor")
        if tensor.dtype != dtype:
            raise DTypeError(f"{label} must be {dtype}, got {tensor.dtype}; convert it with .to({dtype})")
        if tuple(tensor.shape) != shape:
            raise ShapeError(f"{label} must have shape {list(shape)}, got {list(tensor.shape)}")
        require_beside(label, tensor, x)


def host_ranges(gemm: Gemm, ranges: torch.Tensor, tokens: int) -> list[tuple[int, int, int]]:
    """Return experts, each with first row and end of its tokens, within x whatever the ranges say.

    Raises ValueRangeError if offsets descend: rows would belong to two experts.
    """
    numbers = ranges.tolist()
    if gemm.slots:
        slot = tokens // max(len(numbers), 1)
        slots = ((e, s * slot, (s + 1) * slot) for s, e in enumerate(numbers))
        return [each for each in slots if 0 <= each[0] < gemm.experts]
    if gemm.masked:
        slot = tokens // gemm.experts
        return [(e, e * slot, e * slot + min(count, slot)) for e, count in enumerate(numbers)]
    for e, (low, high) in enumerate(pairwise(numbers)):
        if low > high:
            raise ValueRangeError(f"offsets must ascend, but expert {e} has rows {low} to {high}")
    return [(e, max(low, 0), min(high, tokens)) for e, (low, high) in enumerate(pairwise(numbers))]


@cache
def of_slots(request: str, count: int) -> str:
    """Return the request for the same product of so many slots, at least one, that name experts."""
    whole = Request.parse(request)
    return replace(whole, gemm=replace(whole.gemm, slots=max(count, 1))).text


@cache
def _single_text(request: str) -> str:
    """Return the request for one expert's product."""
    whole = Request.parse(request)
    return Request(single(whole.gemm), whole.device, whole.plan).text


def _shape(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    ranges: torch.Tensor,
    bias: torch.Tensor | None,
    token_scale: torch.Tensor | None,
    expected: int,
    request: str,
) -> torch.Tensor:
    """Tell shape and type of the result; tracers refuse what kernels refuse for its type or its width."""
    gemm = Request.parse(request).gemm
    refuse_rows(x, torch_dtype(gemm.activation), gemm.k)
    return x.new_empty((*x.shape[:-1], gemm.columns), dtype=torch_dtype(gemm.output))


def gradients(
    gradient: torch.Tensor, weight: Sequence[torch.Tensor], ranges: torch.Tensor, request: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients for the rows and for a bias ``[E, N]``; weights are frozen, experts take turns.

    Rows that belong to no expert get zeros.
    """
    if gradient.dim() == 3 and not Request.parse(request).gemm.masked:
        request = of_slots(request, len(gradient))
    gemm, kernel = Request.parse(request).gemm, compiled(_single_text(request), gradient.device)
    dtype, none = torch_dtype(gemm.activation), no_bias(gemm, gradient)
    rows = gradient.reshape(-1, gemm.n)
    for_rows = rows.new_zeros(len(rows), gemm.k, dtype=dtype)
    for_bias = rows.new_zeros(gemm.experts, gemm.n)
    for expert, start, stop in host_ranges(gemm, ranges, len(rows)):
        if start < stop:
            run = partial(kernel.run, weight=[as_taken(array)[expert] for array in weight], bias=none)
            for_rows[start:stop] = times_weight(rows[start:stop], gemm.k, dtype, run)
            for_bias[expert] += rows[start:stop].sum(0)
    return for_rows.view(*gradient.shape[:-1], gemm.k), for_bias


def _like_gradients(
    gradient: torch.Tensor, weight: Sequence[torch.Tensor], ranges: torch.Tensor, request: str
) -> tuple[torch.Tensor, torch.Tensor]:
    gemm = Request.parse(request).gemm
    shape = (*gradient.shape[:-1], gemm.k)
    for_rows = gradient.new_empty(shape, dtype=torch_dtype(gemm.activation))
    return for_rows, gradient.new_empty(gemm.experts, gemm.n)


def _keep_for_gradients(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the weights and whose rows are whose."""
    _, weight, ranges, _, _, _, request = inputs
    ctx.save_for_backward(ranges, *weight)
    ctx.request = request


def _gradients(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Return the gradients for x and the bias.

    Raises LadderError where x is quantized, or functions follow the product.
    """
    if has_no_gradient(single(Request.parse(context.request).gemm)):
        refuse_gradient(context)
    ranges, *weight = context.saved_tensors
    for_x, for_bias = grouped_gradients(gradient, weight, ranges, context.request)
    wanted = context.needs_input_grad
    return (for_x, [None] * len(weight), None, for_bias if wanted[3] else None, None, None, None)


grouped_matmul: Callable[..., torch.Tensor] = define(SCHEMA, multiply, _shape)
"""``grouped_matmul(x, weight, ranges, bias, token_scale, expected, request)``: the registered operator."""
grouped_gradients: Callable[..., tuple[torch.Tensor, torch.Tensor]] = define(
    GRADIENTS_SCHEMA, gradients, _like_gradients
)
torch.library.register_autograd("ladder::grouped_gradients", refuse_gradient, lib=library)
torch.library.register_autograd(
    "ladder::grouped_matmul", _gradients, setup_context=_keep_for_gradients, lib=library
)
