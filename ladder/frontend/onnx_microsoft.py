"""Operators of com.microsoft as tile graph rows: what onnxruntime's optimizer and exporters write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd, inf
from typing import Any

import numpy as np

from ladder.frontend.onnx_call import Call, Row
from ladder.frontend.onnx_functions import FUNCTIONS, by_aten, hard_sigmoid, hard_swish, swish
from ladder.frontend.onnx_models import MODELS, add_product
from ladder.frontend.onnx_stages import Weight
from tile_types.library import get_type
from tile_types.packing import pack_codes, unpack_codes
from tile_types.quantized import QuantizedTensor

WIDTHS = (2, 4, 8)
"""Bits of the codes that products by stored matrices have kernels for."""


def _total(call: Call, *places: int) -> Any:
    """Return the sum of the operands that are given."""
    values = [call.tensor(at) for at in places if call.has(at)]
    total = values[0]
    for value in values[1:]:
        total = by_aten(call, "add.Tensor", total, value)
    return total


def _gelu(approximate: str) -> Row:
    """Return the row of GELU of the sum of both operands, or of the one that there is."""
    return lambda call: by_aten(call, "gelu.default", _total(call, 0, 1), approximate=approximate)


def _clipped(call: Call, x: Any, low: float = -inf, high: float = inf) -> Any:
    return by_aten(call, "clamp.default", x, low, high)


ACTIVATIONS: Mapping[str, Callable[..., Any]] = {
    "": lambda call, x: x,
    "Clip": _clipped,
    "HardSigmoid": hard_sigmoid,
    "HardSwish": hard_swish,
    "Relu": lambda call, x, *unused: by_aten(call, "relu.default", x),
    "Tanh": lambda call, x, *unused: by_aten(call, "tanh.default", x),
    "Sigmoid": lambda call, x, *unused: by_aten(call, "sigmoid.default", x),
    "LeakyRelu": lambda call, x, alpha=0.01, *unused: by_aten(call, "leaky_relu.default", x, alpha),
}
"""Activation of a fused operator -> what adds it to the tile graph, given its numbers."""


def _numbers(call: Call) -> list[float]:
    """Return what the node states for its activation: in one list, or one by one."""
    given = call.given
    one_by_one = [given.get(f"activation_{name}") for name in ("alpha", "beta", "gamma")]
    stated = given.get("activation_params") or [number for number in one_by_one if number is not None]
    return [float(number) for number in stated]


# norms ---------------------------------------------------------------------------------------------------


def _over_root_mean_square(call: Call, x: str, scale: str, epsilon: float) -> str:
    """Return x over the root of its mean square along the last axis, rounded, times a vector."""
    im, wide = call.im, call.im.cast(x, "float32")
    mean = im.mean(im.g.add("mul", wide, wide), [len(im.shape(x)) - 1])
    root = im.g.add("sqrt", im.g.add("add", mean, im.number(epsilon, "float32")))
    return str(by_aten(call, "mul.Tensor", im.cast(im.g.add("div", wide, root), call.out), scale))


def _of_one_type(row: Row) -> Row:
    """Return a row for operands of one type: the result is of the scale's."""
    return lambda call: row(call) if call.ttype(1) == call.out else None


def _rms_norm(call: Call) -> Any:
    if call.given.get("axis", -1) not in (-1, len(call.shape(0)) - 1) or call.out == "float64":
        return None
    epsilon = float(call.given.get("epsilon", 1e-5))
    return call.single(_over_root_mean_square(call, call.tensor(0), call.tensor(1), epsilon))


def _with_sum(call: Call, found: Any, total: Any) -> Any:
    """Return a norm and the sum that it is of; None where the model uses its statistics."""
    return None if any(call.node.output[1:3]) else (found, None, None, total)[: len(call.node.output)]


def _skip_layer_norm(call: Call) -> Any:
    im, total = call.im, _total(call, 0, 1, 4)
    value = im.normalised(
        im.cast(total, "float32"), [len(im.shape(total)) - 1], call.given.get("epsilon", 1e-5)
    )
    for operator, at in (("mul", 2), ("add", 3)):
        value = im.g.add(operator, value, im.cast(call.tensor(at), "float32")) if call.has(at) else value
    return _with_sum(call, im.cast(value, call.out), total)


def _skip_rms_norm(call: Call) -> Any:
    total = _total(call, 0, 1, 3)
    epsilon = float(call.given.get("epsilon", 1e-5))
    return _with_sum(call, _over_root_mean_square(call, total, call.tensor(2), epsilon), total)


# products ------------------------------------------------------------------------------------------------


def _fused_matmul(call: Call) -> Any:
    """Multiply batches times a number; batches may lie behind rows, the last two axes be exchanged."""
    given = call.given
    if min(map(len, map(call.shape, (0, 1)))) < 2:
        return None
    im, operands = call.im, []
    for at, side in enumerate("AB"):
        axes = list(range(len(call.shape(at))))
        if given.get(f"transBatch{side}", 0):
            axes = [*axes[1:-1], axes[0], axes[-1]]
        if given.get(f"trans{side}", 0):
            axes = [*axes[:-2], axes[-1], axes[-2]]
        operands.append(im.permute(call.tensor(at), axes))
    found = im.g.add("matmul", *operands, type=call.out)
    alpha = float(given.get("alpha", 1.0))
    return found if alpha == 1 else by_aten(call, "mul.Tensor", found, alpha)


def _activated(row: Row, added: int | None = None) -> Row:
    """Return the row of an operator fused with an activation, after the sum with a further operand."""

    def run(call: Call) -> Any:
        name = call.given.get("activation", b"").decode()
        if name not in ACTIVATIONS or "float" not in call.out:
            return None
        found = row(call)
        if found is None:
            return None
        if added is not None and call.has(added):
            found = by_aten(call, "add.Tensor", found, call.tensor(added))
        return ACTIVATIONS[name](call, found, *_numbers(call))

    return run


def _by_stored(read: Callable[[Call], QuantizedTensor | None]) -> Row:
    """Return the row of a product with a stored weight [N, K] of few bits, quantized in blocks along K."""

    def run(call: Call) -> Any:
        value = read(call)
        if value is None:
            return None
        (n, k), kind = value.shape, call.out
        group = min(value.block[1], k)
        gemm = call.problem(n, k, value.ttype, kind, output=kind, group_size=group, zero=value.zero_kind)
        found = add_product(call.piece, call.tensor(0), Weight(gemm, value))
        return by_aten(call, "add.Tensor", found, call.tensor(5)) if call.has(5) else found

    return run


CODEBOOKS = ("bnb_fp4", "nf4")
"""``quant_type`` of `MatMulBnb4` -> our name of bitsandbytes' codebook."""


def _weight_of_codebook(call: Call) -> QuantizedTensor | None:
    """Return a weight as bitsandbytes stores it: blocks of the flattened matrix, high halves of bytes first.

    Blocks that cross rows are cut into the largest pieces that do not.
    """
    given, codes, scale = call.given, call.known(1), call.known(2)
    kind = int(given["quant_type"])
    if codes is None or scale is None or not given.get("transB", 1) or kind not in range(len(CODEBOOKS)):
        return None
    n, k, size = int(given["N"]), int(given["K"]), int(given["block_size"])
    width = gcd(k, size)
    place = np.arange(n * (k // width)) * width // size
    both = np.stack([codes.array >> 4, codes.array & 15], -1).reshape(-1)[: n * k].reshape(n, k)
    return QuantizedTensor(
        get_type(CODEBOOKS[kind]),
        (n, k),
        pack_codes(both, 4),
        (1, width),
        scale=np.ascontiguousarray(scale.array.reshape(-1)[place].reshape(n, k // width)),
        scale_type=scale.array.dtype.name,
    )


def _weight(call: Call) -> QuantizedTensor | None:
    """Return the weight in our storage; None for a form that is not one of ours."""
    given, known = call.given, [call.known(at) for at in (1, 2, 3)]
    bits, block = int(given.get("bits", 4)), int(given["block_size"])
    codes, scale, zero = (None if value is None else value.array for value in known)
    if bits not in WIDTHS or codes is None or scale is None or call.has(4) or (call.has(3) and zero is None):
        return None
    n, k = int(given["N"]), int(given["K"])
    blocks = -(-k // block)
    whole = unpack_codes(codes.reshape(n, -1), bits, blocks * block)[:, :k]
    if zero is not None and zero.dtype == np.uint8:
        zero = unpack_codes(zero.reshape(n, -1), bits, blocks).astype(np.uint8)
    middle = 1 << (bits - 1)
    signed = zero is None or bool((zero == middle).all())
    fields: dict[str, Any] = {"block": (1, block), "scale_type": scale.dtype.name}
    if zero is not None and not signed:
        fields["zero"] = np.ascontiguousarray(zero.reshape(n, blocks))
        fields["zero_kind"] = "integer" if zero.dtype == np.uint8 else "float"
    element = get_type(f"{'int' if signed else 'uint'}{bits}")
    storage = pack_codes(whole ^ (middle if signed else 0), bits)
    return QuantizedTensor(
        element, (n, k), storage, scale=np.ascontiguousarray(scale.reshape(n, blocks)), **fields
    )


MICROSOFT: Mapping[str, Row] = {
    "LayerNormalization": _of_one_type(MODELS["LayerNormalization"]),
    "SimplifiedLayerNormalization": _of_one_type(_rms_norm),
    "SkipLayerNormalization": _skip_layer_norm,
    "SkipSimplifiedLayerNormalization": _skip_rms_norm,
    "Gelu": _gelu("none"),
    "BiasGelu": _gelu("none"),
    "FastGelu": _gelu("tanh"),
    "QuickGelu": swish(1.702),
    "ThresholdedRelu": FUNCTIONS["ThresholdedRelu"],
    "BiasAdd": lambda call: _total(call, 0, 1, 2),
    "FusedMatMul": _fused_matmul,
    "TransposeMatMul": _fused_matmul,
    "FusedGemm": _activated(MODELS["Gemm"]),
    "FusedConv": _activated(MODELS["Conv"], added=3),
    "MatMulNBits": _by_stored(_weight),
    "MatMulBnb4": _by_stored(_weight_of_codebook),
}
"""Operator of the domain -> row."""
