"""The operator as torch sees it: ``ladder::matmul``, traceable, with a fake kernel.

Eager calls skip the dispatcher (`needs_dispatch`); tracing, dispatch modes, tensor subclasses
and autograd take the registered operator. Its request travels as text (`Request.text`), so a
traced graph that is saved finds or builds its kernel in another process.

A Python kernel at torch's Autograd key would cost every call a second trip through Python (two
thirds of the dispatcher's cost). So ``matmul`` falls through that key, and where a gradient may be
asked for, ``matmul_with_gradient`` runs instead: the same product of frozen weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ladder.ir.gemm import Gemm
from ladder.runtime import failing, words  # noqa: F401  the first registers what checks values
from ladder.runtime.compile import Request, compiled
from ladder.runtime.kernel import refuse_rows, refuse_sparse
from ladder.runtime.library import load_foreign_interface
from ladder.runtime.registered import define, library
from ladder.runtime.tokens import quantize_by_kernel
from tile_types.arrays import torch_dtype
from tile_types.errors import DTypeError, LadderError, ShapeError, require_kind

load_foreign_interface()

ARGUMENTS = "(Tensor x, Tensor[] weight, Tensor? bias, Tensor? token_scale, str request) -> Tensor"

DECODED_COLUMNS = 1024
"""Columns of a weight that a backward pass has in memory at a time."""

ATTENTION_SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask=None, bool causal=False, float? scale=None)"
    " -> Tensor"
)
"""One node of a graph for what torch would take apart."""

QUANTIZE_SCHEMA = "quantize_tokens(Tensor x, str activation, int group=0) -> (Tensor codes, Tensor scale)"

LAID_OUT_SCHEMA = "laid_out(Tensor(a) x, SymInt[] strides) -> Tensor(a)"

BERNOULLI_SCHEMA = "bernoulli(Tensor x, SymInt[] strides, float p) -> Tensor"

UPSAMPLE_SCHEMA = (
    "upsample(Tensor x, SymInt[] sizes, str name, bool? aligned=None, float[]? scales=None) -> Tensor"
)
"""One node for every operator of ATen that upsamples; torch would take some of them apart."""


def _run(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    token_scale: torch.Tensor | None,
    request: str,
) -> torch.Tensor:
    """Launch on the current stream of ``x``'s device."""
    if wants_gradient(x, bias, token_scale):
        return _learning(x, weight, bias, token_scale, request)
    return _run_below_autograd(x, weight, bias, token_scale, request)


def _run_below_autograd(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    token_scale: torch.Tensor | None,
    request: str,
) -> torch.Tensor:
    """Launch; autograd has recorded the call above."""
    words.check(weight)
    return compiled(request, x.device).run(x, weight, bias, token_scale)


def wants_gradient(
    x: torch.Tensor, bias: torch.Tensor | None = None, token_scale: torch.Tensor | None = None
) -> bool:
    """Tell whether autograd would record a product of these tensors."""
    require_vectors(bias, token_scale)
    given = (x, bias, token_scale)
    return torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in given)


def require_vectors(bias: object, token_scale: object) -> None:
    """Raise DTypeError unless what a product takes per column and per row are tensors or left out."""
    for name, vector in (("bias", bias), ("token_scale", token_scale)):
        if vector is not None:
            require_kind(vector, (torch.Tensor, torch.fx.Proxy), f"{name} must be a torch tensor")


def _shape(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    token_scale: torch.Tensor | None,
    request: str,
) -> torch.Tensor:
    """Tell shape and type of the result; tracers refuse what kernels refuse for its type or its width."""
    gemm = Request.parse(request).gemm
    refuse_rows(x, torch_dtype(gemm.activation), gemm.k)
    return x.new_empty((*x.shape[:-1], gemm.columns), dtype=torch_dtype(gemm.output))


def refuse_gradient(context: Any, *gradients: Any) -> Any:
    """Raise where gradients are required."""
    raise LadderError(
        "Ladder's kernels have no gradient here: products of activations that are not quantized have one, by"
        " torch.autograd; else run the model under torch.no_grad() or detach its result"
    )


def has_no_gradient(gemm: Gemm) -> bool:
    """Tell whether activations are quantized, or functions follow the product."""
    return bool(gemm.token_scale or gemm.epilogue or gemm.extras)


def no_bias(gemm: Gemm, like: torch.Tensor) -> torch.Tensor | None:
    """Return zeros of the type and on the device of a tensor where a product takes a bias, else None.

    They are the same for all samples of that tensor.
    """
    return torch.zeros(gemm.n, dtype=like.dtype, device=like.device) if gemm.bias else None


def _keep_for_gradient(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep what `_gradients` needs: of tensors, only those of the weight."""
    x, weight, bias, _, request = inputs
    ctx.save_for_backward(*weight)
    ctx.request, ctx.width, ctx.dtype = request, x.shape[-1], x.dtype
    ctx.bias = None if bias is None else bias.dtype


def times_weight(
    gradient: torch.Tensor, width: int, dtype: torch.dtype, multiply: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return rows ``[..., N]`` times a weight ``[N, width]``, which `multiply` multiplies rows of inputs by.

    The product of some rows of the identity is as many columns of the weight, as the kernel has them. So they
    need no other kernel, and no more of them than these is in memory.
    """
    parts = []
    for first in range(0, width, DECODED_COLUMNS):
        rows = torch.arange(first, min(first + DECODED_COLUMNS, width), device=gradient.device)
        units = torch.nn.functional.one_hot(rows, width).to(dtype)
        parts.append(torch.nn.functional.linear(gradient, multiply(units)))
    return torch.cat(parts, -1).to(dtype)


def _gradients(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Return the gradients for x and the bias; weights are frozen.

    Raises LadderError where x is quantized, or functions follow the product.
    """
    gemm, weight = Request.parse(context.request).gemm, list(context.saved_tensors)
    if has_no_gradient(gemm):
        refuse_gradient(context)
    for_x = for_bias = None
    if context.needs_input_grad[0]:
        none = no_bias(gemm, gradient)
        for_x = times_weight(
            gradient, context.width, context.dtype, lambda x: dispatch(x, weight, none, None, context.request)
        )
    if context.needs_input_grad[2]:
        for_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(context.bias)
    return for_x, [None] * len(weight), for_bias, None, None


def _rows_together(
    info: Any,
    axes: tuple[Any, ...],
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    token_scale: torch.Tensor | None,
    request: str,
    multiply: Callable[..., torch.Tensor] | None = None,
) -> tuple[torch.Tensor, int]:
    """Multiply the rows of all samples of a ``torch.vmap`` at once; weights that differ, one by one.

    info: Has the number of samples.
    axes: For each argument the axis along which its samples lie; None if it is the same for all.
    multiply: What multiplies; by default the registered operator.
    Returns: The result and its axis of samples.
    """
    multiply = multiply or matmul
    count, (x_axis, weight_axes, bias_axis, scale_axis, _) = info.batch_size, axes
    rows, scales = _by_sample(x, x_axis, count), _by_sample(token_scale, scale_axis, count)
    if bias_axis is None and all(axis is None for axis in weight_axes):
        return multiply(rows, weight, bias, scales, request), 0
    kept = [_by_sample(each, axis, count) for each, axis in zip(weight, weight_axes, strict=True)]
    biases = _by_sample(bias, bias_axis, count)
    each = (
        (rows[i], [part[i] for part in kept], *(None if v is None else v[i] for v in (biases, scales)))
        for i in range(count)
    )
    return torch.stack([multiply(*given, request) for given in each]), 0


def _by_sample(value: Any, axis: int | None, count: int) -> Any:
    """Return an argument with its samples along the first axis; None stays None."""
    if value is None:
        return None
    return value.expand(count, *value.shape) if axis is None else value.movedim(axis, 0)


def _rows_quantized_together(
    info: Any, axes: tuple[Any, ...], x: torch.Tensor, activation: str, group: int = 0
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, int]]:
    """Quantize the rows of all samples of a ``torch.vmap`` at once, as `_rows_together` multiplies."""
    return _quantize(x.movedim(axes[0], 0), activation, group), (0, 0)


def _rows_like(x: torch.Tensor, activation: str, group: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tell shapes and types of `quantize_tokens`'s results."""
    codes = torch.empty_like(x, dtype=torch_dtype(activation), memory_format=torch.contiguous_format)
    groups = (-(-x.shape[-1] // group),) if group else ()
    return codes, x.new_empty((*x.shape[:-1], *groups), dtype=torch.float32)


_quantize: Callable[..., tuple[torch.Tensor, torch.Tensor]] = define(
    QUANTIZE_SCHEMA, quantize_by_kernel, _rows_like
)
torch.library.register_vmap("ladder::quantize_tokens", _rows_quantized_together, lib=library)
torch.library.register_autograd("ladder::quantize_tokens", refuse_gradient, lib=library)

matmul: Callable[..., torch.Tensor] = define(f"matmul{ARGUMENTS}", _run, _shape)
"""``matmul(x, weight, bias, token_scale, request)``: the registered operator."""

_learning: Callable[..., torch.Tensor] = define(
    f"matmul_with_gradient{ARGUMENTS}", _run_below_autograd, _shape
)
for name in ("matmul", "matmul_with_gradient"):
    torch.library.register_vmap(f"ladder::{name}", _rows_together, lib=library)
library.impl("matmul", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_autograd(
    "ladder::matmul_with_gradient", _gradients, setup_context=_keep_for_gradient, lib=library
)


class Product(torch.autograd.Function):
    """A product of float activations and a frozen weight, whose derivatives ``torch.func`` may ask for.

    Its arguments are x, the request, the bias and the tensors of the weight. Registered operators do not tell
    their derivatives through transforms.
    """

    @staticmethod
    def forward(
        x: torch.Tensor, request: str, bias: torch.Tensor | None, *weight: torch.Tensor
    ) -> torch.Tensor:
        """Multiply."""
        return matmul(x, weight, bias, None, request)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep what the derivatives need."""
        x, request, bias, *weight = inputs
        _keep_for_gradient(ctx, (x, weight, bias, None, request), output)
        ctx.save_for_forward(*weight)
        ctx.shape = output.shape

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients for x and the bias."""
        for_x, none, for_bias, _, _ = _gradients(ctx, *gradients)
        return for_x, None, for_bias, *none

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> torch.Tensor:
        """Return the result's tangent."""
        for_x, _, for_bias, *_ = tangents
        if for_x is None:
            return for_bias.expand(ctx.shape)  # type: ignore[union-attr]
        none = no_bias(Request.parse(ctx.request).gemm, for_x)
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):  # it may be differentiated, too
            along = dispatch(for_x, ctx.saved_tensors, none, None, ctx.request)
            return along if for_bias is None else along + for_bias

    @staticmethod
    def vmap(info: Any, axes: tuple[Any, ...], *given: Any) -> tuple[torch.Tensor, int]:
        """Multiply the rows of all samples."""
        x, request, bias, *weight = given
        axes = axes[0], axes[3:], axes[2], None, None
        return _rows_together(info, axes, x, weight, bias, None, request, dispatch)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Return torch's attention; heads of k and v serve groups of heads of q."""
    grouped = bool(q.shape[-3] != k.shape[-3])
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped
    )


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """Tell shape, type and strides of attention's result, which programs may rely on.

    Keys and values that differ in number are refused. Torch asks a GPU itself which kernel it takes, and the
    strides follow from it: where there is no GPU, the result is said to be contiguous.
    """
    if k.shape[-2] != v.shape[-2]:
        raise ShapeError(f"attention has {k.shape[-2]} keys and {v.shape[-2]} values")
    if q.device.type == "cpu" or (q.device.type == "cuda" and torch.cuda.is_available()):
        return attend(q, k, v, *rest, **options)
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


define(ATTENTION_SCHEMA, attend, _attended)


def laid_out(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return x, or a copy that has these strides; along those that are 0 the elements of x are the same."""
    if x.stride() == tuple(strides):
        return x
    once = [size if step else min(size, 1) for size, step in zip(x.shape, strides, strict=True)]
    whole = torch.empty_strided(once, list(strides), dtype=x.dtype, device=x.device)
    return whole.copy_(x[tuple(map(slice, once))]).expand(x.shape)


def _laid_out(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    return x.new_empty_strided(x.shape, list(strides))


def bernoulli(x: torch.Tensor, strides: Sequence[int], p: float) -> torch.Tensor:
    """Return what ``x.bernoulli_(p)`` writes into a tensor like x of given strides."""
    return torch.empty_strided(x.shape, list(strides), dtype=x.dtype, device=x.device).bernoulli_(p)


def upsample(
    x: torch.Tensor,
    sizes: Sequence[int],
    name: str,
    aligned: bool | None = None,
    scales: Sequence[float] | None = None,
) -> torch.Tensor:
    """Return what the operator of ATen of that name gives."""
    option = () if aligned is None else (aligned,)
    found: torch.Tensor = getattr(torch.ops.aten, name).default(x, sizes, *option, *(scales or ()))
    return found


define(LAID_OUT_SCHEMA, laid_out, _laid_out)
define(
    BERNOULLI_SCHEMA,
    bernoulli,
    bernoulli,
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)
define(UPSAMPLE_SCHEMA, upsample, upsample)


def autocast_type(x: torch.Tensor) -> torch.dtype | None:
    """Return the type that autocasting gives a tensor and products of it; None where it leaves it."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    narrow = x.is_floating_point() and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if narrow else None


def is_captured() -> bool:
    """Tell whether `ladder.capture` follows this call; it answers for itself."""
    return False


def dispatch(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    token_scale: torch.Tensor | None,
    request: str,
) -> torch.Tensor:
    """Call the registered operator, so that torch's dispatch modes see the call; see the module.

    ``torch.jit.trace`` records the one that has a gradient: it compares graphs with and without gradients.

    Raises LadderError where ``torch.func`` or forward-mode differentiation asks for a derivative of a product
        of quantized activations.
    """
    if not torch.compiler.is_compiling() and (is_transformed() or is_differentiated_forward()):
        if token_scale is None and not has_no_gradient(Request.parse(request).gemm):
            product: torch.Tensor = Product.apply(x, request, bias, *weight)  # type: ignore[no-untyped-call]
            return product
        if is_differentiated(x, bias, token_scale):
            refuse_gradient(None)
    learns = isinstance(x, torch.Tensor) and (wants_gradient(x, bias, token_scale) or is_recorded())
    return (_learning if learns else matmul)(x, weight, bias, token_scale, request)


def quantize_tokens(x: torch.Tensor, activation: str, group: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows, or groups of them, by a kernel: one node of a graph where one is traced."""
    call = _quantize if needs_dispatch(x) else quantize_by_kernel
    return call(x, activation, group)


def with_token_scale(x: Any, gemm: Gemm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the activations of a problem with their scales: floats are quantized, codes get 1.

    Raises DTypeError if x is neither a float nor of the activation type, or is sparse.
    """
    if not isinstance(x, torch.Tensor):  # torch.fx traces
        return quantize_tokens(x, gemm.activation, gemm.token_group)
    if x.layout not in (torch.strided, torch.jagged):
        refuse_sparse(x)
    dtype = torch_dtype(gemm.activation)
    if x.dtype == dtype:
        shape = (*x.shape[:-1], *gemm.token_scale_shape)
        return x, torch.ones(shape, dtype=torch.float32, device=x.device)
    if not x.is_floating_point():
        raise DTypeError(f"x is {x.dtype}; give floats to be quantized, or {dtype} with token_scale")
    return quantize_tokens(x, gemm.activation, gemm.token_group)


def is_recorded() -> bool:
    """Tell whether ``torch.jit.trace`` records this call; ``torch.compile`` may not be able to ask that."""
    return not torch.compiler.is_compiling() and torch._C._is_tracing()


is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Tell whether ``torch.func`` transforms this call, as ``vmap`` does: its tensors have no memory."""


_unpack_dual: Callable[..., Any] = forward_ad.unpack_dual


def is_differentiated_forward() -> bool:
    """Tell whether this call lies in a level of forward-mode differentiation."""
    return forward_ad._current_level >= 0


def is_differentiated(*given: Any) -> bool:
    """Tell whether a transform of torch asks for derivatives by one of some tensors."""
    tensors = [y for y in given if isinstance(y, torch.Tensor)]
    if is_transformed() and torch.is_grad_enabled() and any(y.requires_grad for y in tensors):
        return True
    return is_differentiated_forward() and any(_unpack_dual(y).tangent is not None for y in tensors)


def needs_dispatch(x: torch.Tensor) -> bool:
    """Tell whether somebody watches the call of an operator that has no derivative.

    Raises LadderError if ``torch.func`` or forward-mode differentiation asks for it; DTypeError if x is no
        tensor.
    """
    watched = is_watched(x)
    if not torch.compiler.is_compiling() and not is_captured() and is_differentiated(x):
        refuse_gradient(None)
    return watched


def is_watched(x: torch.Tensor) -> bool:
    """Tell whether somebody watches this call, so that it must go through the dispatcher.

    Raises DTypeError if x is no tensor.
    """
    if not isinstance(x, (torch.Tensor, torch.fx.Proxy)):
        raise DTypeError(f"x must be a torch tensor, got {type(x).__name__}")
    if torch.compiler.is_compiling() or is_captured():
        return True
    return (
        type(x) is not torch.Tensor
        or is_in_torch_dispatch_mode()
        or is_transformed()
        or is_differentiated_forward()
        or is_recorded()
        or (x.requires_grad and torch.is_grad_enabled())
    )
