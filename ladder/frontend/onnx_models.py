"""ONNX operators as tile graph rows: products, convolution, pooling, norms; and the table of all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
import torch

from ladder.frontend.aten_models import MODEL_ROWS, row_codes
from ladder.frontend.aten_rows import ROWS as ATEN
from ladder.frontend.importer import Importer
from ladder.frontend.onnx_call import Call, Row
from ladder.frontend.onnx_functions import FUNCTIONS
from ladder.frontend.onnx_rows import ARITHMETIC, MOVES, REDUCTIONS
from ladder.frontend.onnx_stages import Piece, Weight
from ladder.frontend.onnx_values import Known
from ladder.frontend.transposed_convolution import Axis, transposed_convolution
from ladder.ir.extents import product, quotient
from ladder.ir.gemm_graph import insert_gemm, weight_type
from ladder.runtime.model.program import Source
from ladder.runtime.onnx_ops.resize import NEAREST, PLACES
from ladder.runtime.onnx_ops.windows import settings, window_pads
from tile_types.library import get_type
from tile_types.quantize import quantize
from tile_types.tile import Extent, Tile

LIMITS: Mapping[str, tuple[float, float]] = {"uint8": (0.0, 255.0), "int8": (-128.0, 127.0)}
"""Types of codes that kernels make -> smallest and largest."""

SPECIAL = ("block_size", "precision", "output_dtype")
"""Attributes whose default alone has a kernel."""

FLOAT = "float32"


def _is_plain(call: Call) -> bool:
    return call.ttype(1) == FLOAT and not any(call.given.get(name, 0) for name in SPECIAL)


def _spread(call: Call, at: int) -> str | None:
    """Return scale or zero point as float32, so that it broadcasts; None where its form has no kernel."""
    known = call.known(at)
    if known is None or known.symbolic:
        return call.im.cast(call.tensor(at), FLOAT) if call.shape(at) == () else None
    array, rank = known.array.astype(np.float32), len(call.shape(0))
    if array.size == 1:
        return call.piece.tensor(Known(array.reshape(())))
    if array.ndim != 1:
        return None
    axis = int(call.given.get("axis", 1)) % rank
    return call.piece.tensor(Known(array.reshape([-1 if place == axis else 1 for place in range(rank)])))


def _codes(call: Call, ratio: str, zero: str | None, target: str) -> str:
    """Round, move by the zero point, and clamp; NaN becomes the smallest code."""
    low, high = LIMITS[target]
    whole = ATEN["round.default"](call.im, FLOAT, ratio)
    whole = whole if zero is None else ATEN["add.Tensor"](call.im, FLOAT, whole, zero)
    above = ATEN["ge.Scalar"](call.im, "bool", whole, low)
    most = ATEN["clamp.default"](call.im, FLOAT, whole, None, high)
    return call.im.cast(ATEN["where.self"](call.im, FLOAT, above, most, low), target)


def _coded(call: Call) -> Any:
    target = call.ttype(2) if call.has(2) else "uint8"
    if call.out != FLOAT or not _is_plain(call) or target not in LIMITS:
        return None
    scale, zero = _spread(call, 1), _spread(call, 2) if call.has(2) else None
    if scale is None or (zero is None and call.has(2)):
        return None
    return _codes(call, ATEN["div.Tensor"](call.im, FLOAT, call.tensor(0), scale), zero, target)


def _dequantized(call: Call) -> Any:
    if call.out not in LIMITS or not _is_plain(call):
        return None
    scale, zero = _spread(call, 1), _spread(call, 2) if call.has(2) else None
    if scale is None or (zero is None and call.has(2)):
        return None
    value = call.im.cast(call.tensor(0), FLOAT)
    value = value if zero is None else ATEN["sub.Tensor"](call.im, FLOAT, value, zero)
    return ATEN["mul.Tensor"](call.im, FLOAT, value, scale)


CODES: Mapping[str, Row] = {"QuantizeLinear": _coded, "DequantizeLinear": _dequantized}
"""Conversions to codes and back."""


ANNOTATION = "weight_ttype"
"""Attribute of a product: the type that its weight is stored in."""

QUANTIZE_OPTIONS = ("group_size", "zero", "scaling", "scale_type")
"""Attributes beside `ANNOTATION`, as `ladder.quantize` takes them; ``activation_ttype`` is the other one."""


# products --------------------------------------------------------------------------------------------


def _matmul(call: Call) -> Any:
    """Multiply as numpy does; a stored matrix multiplies all rows at once."""
    a, b = call.shape(0), call.shape(1)
    im = call.im
    if ANNOTATION in call.given:
        return _quantized(call, call.tensor(0), transposed=False)
    if len(a) > 1 and len(b) == 2:
        rows = im.reshape(call.tensor(0), [product(a[:-1]), a[-1]])
        return im.reshape(im.g.add("matmul", rows, call.tensor(1), type=call.out), [*a[:-1], b[-1]])
    left = im.reshape(call.tensor(0), [1, *a] if len(a) == 1 else a)
    right = im.reshape(call.tensor(1), [*b, 1] if len(b) == 1 else b)
    found = im.g.add("matmul", left, right, type=call.out)
    shape = list(im.shape(found))
    if len(b) == 1:
        shape.pop()
    if len(a) == 1:
        shape.pop(-1 if len(b) == 1 else -2)
    return im.reshape(found, shape)


def _gemm(call: Call) -> Any:
    """``alpha * A' * B' + beta * C``; torch runs it on integers that fractions multiply."""
    im, given = call.im, call.given
    alpha, beta = (float(given.get(name, 1.0)) for name in ("alpha", "beta"))
    if "float" not in call.out and (alpha % 1 or beta % 1):
        return None
    a = im.permute(call.tensor(0), (1, 0)) if given.get("transA", 0) else call.tensor(0)
    transposed = bool(given.get("transB", 0))
    if ANNOTATION in given:
        value = _quantized(call, a, transposed=transposed)
    else:
        value = im.g.add("matmul", a, call.tensor(1), transpose_b=transposed, type=call.out)
    if alpha != 1:
        value = im.arithmetic("mul", [value, alpha], call.out)
    if not call.has(2) or not beta:
        return value
    added = call.tensor(2) if beta == 1 else im.arithmetic("mul", [call.tensor(2), beta], call.out)
    return im.arithmetic("add", [value, added], call.out)


def _quantized(call: Call, x: str, *, transposed: bool) -> str:
    """Return a product by a weight that is stored in the annotated type, rounded to nearest."""
    known = call.known(1)
    if known is None or len(known.shape) != 2:
        raise call.refuse(f"{ANNOTATION} needs a weight that is a stored matrix")
    matrix = known.array if transposed else known.array.T
    options = {name: _plain(call.given[name]) for name in QUANTIZE_OPTIONS if name in call.given}
    ttype = str(_plain(call.given[ANNOTATION]))
    value = quantize(np.ascontiguousarray(matrix).astype(np.float32), ttype, **options)
    n, k = value.shape
    gemm = call.problem(
        *(n, k, value.type_name if value.type_name != value.ttype.name else value.ttype),
        str(_plain(call.given.get("activation_ttype", call.out))),
        output=call.out,
        group_size=min(value.block[1], k),
        zero=value.zero_kind,
    )
    return add_product(call.piece, x, Weight(gemm, value))


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def add_product(piece: Piece, x: str, weight: Weight) -> str:
    """Multiply ``x[..., K]`` by a quantized weight; 8-bit activations are quantized row by row."""
    im, gemm = piece.im, weight.gemm
    shape = im.shape(x)
    rows = im.reshape(x, (product(shape[:-1]), gemm.k))
    given: dict[str, str] = {}
    name = im.g.input("weight", weight_type(gemm), (gemm.n, gemm.k))
    piece.weights.append(weight)
    piece.sources[name] = Source("weight", (len(piece.weights) - 1,), gemm)
    if not gemm.scale:
        given["row_scale"] = im.g.input("row_scale", "float32", (gemm.n,))
        piece.sources[given["row_scale"]] = Source("part", (len(piece.weights) - 1,))
    if gemm.token_scale:
        rows, given["token_scale"] = _eight_bit(im, rows, gemm.activation)
    return str(
        im.reshape(insert_gemm(im.g, gemm, rows, name, im.shape(rows)[0], given), (*shape[:-1], gemm.n))
    )


def _eight_bit(im: Importer, rows: str, activation: str) -> tuple[str, str]:
    """Quantize rows, as `ladder.quantize_tokens` does."""
    if activation == "int8":
        return row_codes(im, rows)
    shape = im.shape(rows)
    tiles = (Tile(get_type(activation), shape), Tile(get_type("float32"), shape[:1]))
    added = im.call("ladder.quantize_tokens.default", (("%", 0), activation), (), [rows], tiles)
    codes, scale = added.values
    return codes, scale


# windows ---------------------------------------------------------------------------------------------


def _windows(call: Call, kernel: Sequence[int], value: float) -> tuple[str, list[int], list[int], list[int]]:
    """Return the first operand, strides, the padding that is left to windows, and dilations.

    Pads that differ before and after an axis are added to the operand; a window must fit into the whole.
    """
    op, x, spatial = call.operation, call.tensor(0), call.shape(0)[2:]
    strides, dilations = settings(op, len(kernel))
    if op.get("auto_pad", "").startswith("SAME") and not all(isinstance(extent, int) for extent in spatial):
        raise call.refuse(f"auto_pad {op.get('auto_pad')} needs known sizes")
    low, high = window_pads(op, spatial, kernel, strides, dilations)
    for axis, extent in enumerate(spatial):
        beyond = strides[axis] - 1 if op.get("ceil_mode", 0) else 0
        least = dilations[axis] * (kernel[axis] - 1) + 1 - beyond - low[axis] - high[axis]
        if not isinstance(extent, int):  # checked when the model is called
            call.piece.limits.extend([(least, extent)] if least > 0 else [])
        elif extent < least:
            raise call.invalid(f"a window along axis {axis + 2} of {extent} needs at least {least} elements")
    if low == high:
        return x, strides, low, dilations
    x = call.im.g.add("pad", x, low=(0, 0, *low), high=(0, 0, *high), value=value)
    return x, strides, [0] * len(kernel), dilations


def _convolution(call: Call) -> Any:
    weight, bias = call.tensor(1), call.optional(2)
    if not all(isinstance(extent, int) for extent in call.shape(1)):
        raise call.refuse("the shape of its weight is open")
    x, *windows = _windows(call, [int(extent) for extent in call.shape(1)[2:]], 0.0)
    row, groups = MODEL_ROWS["convolution.default"], call.given.get("group", 1)
    return row(call.im, call.out, x, weight, bias, *windows, False, None, groups)


def _max_pool(call: Call) -> Any:
    if "float" not in call.out or call.given.get("ceil_mode", 0):
        return None
    kernel = list(call.given["kernel_shape"])
    x, sizes = _as_image(call, kernel, *_windows(call, kernel, -inf))
    found = MODEL_ROWS["max_pool2d_with_indices.default"](call.im, call.out, x, *sizes)
    return None if found is None else _as_line(call, call.single(found), len(kernel))


def _average_pool(call: Call) -> Any:
    kernel, include = list(call.given["kernel_shape"]), bool(call.given.get("count_include_pad", 0))
    x, *rest = _windows(call, kernel, 0.0)
    shares = None if include else _shares(call, kernel)
    row = MODEL_ROWS.get(f"avg_pool{max(len(kernel), 2)}d.default")
    gaps = rest[-1] != [1] * len(kernel)
    if row is None or gaps or (not include and shares is None) or call.given.get("ceil_mode", 0):
        return None
    x, sizes = _as_image(call, kernel, x, *rest)
    found = row(call.im, call.out, x, *sizes[:-1])
    if found is None:
        return None
    mean = _as_line(call, found, len(kernel))
    if shares is None or (shares == 1).all():
        return mean
    return call.im.arithmetic("div", [mean, call.piece.tensor(Known(shares))], call.out)


def _shares(call: Call, kernel: Sequence[int]) -> Any:
    """Return which share of each window lies inside; None if that is open, or halves would round twice."""
    op, spatial = call.operation, call.shape(0)[2:]
    strides, gaps = settings(op, len(kernel))
    if not any(op.get("pads") or ()) and op.get("auto_pad", "NOTSET") in ("NOTSET", "VALID"):
        return np.ones(1, np.float32)
    if call.out not in ("float32", "float64") or not all(isinstance(extent, int) for extent in spatial):
        return None
    low, high = window_pads(op, spatial, kernel, strides, gaps)
    shares = np.ones((), np.float64)
    for extent, taps, step, before, after in zip(spatial, kernel, strides, low, high, strict=True):
        inside = np.pad(np.ones(int(extent)), (before, after))
        windows = np.lib.stride_tricks.sliding_window_view(inside, taps)[::step]
        shares = shares[..., None] * windows.mean(-1)
    return shares.astype(call.out)


def _as_image(
    call: Call, kernel: list[int], x: str, *windows: list[int]
) -> tuple[str, tuple[list[int], ...]]:
    """Return a line of pixels as an image of one row, with the settings of its windows."""
    sizes = (kernel, *windows)
    if len(kernel) > 1:
        return x, sizes
    n, c, width = call.im.shape(x)
    wide = tuple([first, *setting] for first, setting in zip((1, 1, 0, 1), sizes, strict=True))
    return call.im.reshape(x, [n, c, 1, width]), wide


def _as_line(call: Call, value: str, rank: int) -> str:
    shape = call.im.shape(value)
    return value if rank > 1 else call.im.reshape(value, [*shape[:2], *shape[3:]])


def _whole_mean(call: Call) -> Any:
    axes = list(range(2, len(call.shape(0))))
    return call.im.cast(call.im.mean(call.im.cast(call.tensor(0), "float32"), axes), call.out)


def _whole_maximum(call: Call) -> Any:
    return call.im.reduce("reduce_max", call.tensor(0), list(range(2, len(call.shape(0)))), True)


# normalisation ---------------------------------------------------------------------------------------


def _softmax(name: str) -> Row:
    """Return the row: until version 13 all axes from one on are one."""

    def row(call: Call) -> Any:
        im, value, axis = call.im, call.tensor(0), call.given.get("axis", -1 if call.version >= 13 else 1)
        shape = im.shape(value)
        if call.version >= 13 or axis in (-1, len(shape) - 1):
            return MODEL_ROWS[name](im, call.out, value, axis)
        axis %= len(shape)
        matrix = im.reshape(value, [product(shape[:axis]), product(shape[axis:])])
        return im.reshape(MODEL_ROWS[name](im, call.out, matrix, -1), shape)

    return row


def _layer_norm(call: Call) -> Any:
    shape, axis = call.shape(0), call.given.get("axis", -1)
    epsilon = call.given.get("epsilon", 1e-5)
    row, vectors = MODEL_ROWS["native_layer_norm.default"], (call.tensor(1), call.optional(2))
    return call.single(row(call.im, call.out, call.tensor(0), shape[axis:], *vectors, epsilon))


def _group_norm(call: Call) -> Any:
    """Opset 21: scale and bias per channel."""
    groups, epsilon = call.given["num_groups"], call.given.get("epsilon", 1e-5)
    return _grouped(call, groups, epsilon) if call.shape(1) == call.shape(0)[1:2] else None


def _instance_norm(call: Call) -> Any:
    channels = call.shape(0)[1]
    return _grouped(call, channels, call.given.get("epsilon", 1e-5)) if isinstance(channels, int) else None


def _grouped(call: Call, groups: int, epsilon: float) -> Any:
    n, c, *spatial = call.shape(0)
    row, vectors = MODEL_ROWS["native_group_norm.default"], (call.tensor(1), call.tensor(2))
    found = row(call.im, call.out, call.tensor(0), *vectors, n, c, product(spatial), groups, epsilon)
    return found[0]


def _batch_norm(call: Call) -> Any:
    """Inference: one multiplication and one addition per channel, of numbers that are computed here."""
    known = [call.known(at) for at in range(1, 5)]
    if call.given.get("training_mode", 0) or not call.given.get("spatial", 1):
        return None
    weight, bias, mean, variance = (
        None if value is None else value.array.astype(np.float64) for value in known
    )
    if weight is None or bias is None or mean is None or variance is None:
        raise call.refuse("scale, bias, mean and variance must be stored in the model")
    scale = weight / np.sqrt(variance + call.given.get("epsilon", 1e-5))
    im, rank = call.im, len(call.shape(0))
    value = im.cast(call.tensor(0), "float32")
    for operator, vector in (("mul", scale), ("add", bias - mean * scale)):
        held = call.piece.tensor(Known(vector.astype(np.float32)))
        value = im.g.add(operator, value, im.along(held, 1, rank))
    return call.single(im.cast(value, call.out))


def _transposed(call: Call) -> Any:
    """Scatter; None where the kernel is not stored, has gaps or groups, or a given shape decides pads."""
    axes = None if call.known(1) is None else _axes(call)
    if axes is None or call.out != "float32":
        return None
    return transposed_convolution(call.im, call.out, call.tensor(0), call.tensor(1), call.optional(2), axes)


def _axes(call: Call) -> list[Axis] | None:
    given, extents = call.given, call.shape(0)[2:]
    rank = len(extents)
    if given.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID", b"") or "output_shape" in given:
        return None
    if given.get("group", 1) != 1 or any(gap != 1 for gap in given.get("dilations") or ()):
        return None
    steps, extra = given.get("strides") or [1] * rank, given.get("output_padding") or [0] * rank
    pads = given.get("pads") or [0] * 2 * rank
    if given.get("auto_pad") == b"VALID":
        pads = [0] * 2 * rank
    rows = zip(extents, steps, call.shape(1)[2:], pads[:rank], pads[rank:], extra, strict=False)
    axes = [Axis(extent, *map(int, rest)) for extent, *rest in rows]
    return axes if len(axes) == rank else None


SAMPLES = (1, 2, 5)
"""Extents for which places are compared: formulas are the same for all."""


def _resized(call: Call) -> Any:
    """Repeat every element, without arithmetic; None where a result is more, or not known not to be."""
    given, shape = call.given, call.shape(0)
    stretches = given.get("keep_aspect_ratio_policy", b"stretch") == b"stretch"
    if given.get("mode", b"nearest") != b"nearest" or "axes" in given or not stretches:
        return None
    factors = _factors(call, shape)
    if factors is None or not all(_repeats(call, factor) for factor in factors):
        return None
    return call.im.repeat_elements(call.tensor(0), factors)


def _factors(call: Call, shape: Sequence[Extent]) -> list[int] | None:
    """Return how often elements stand along each axis, if these are whole numbers."""
    upsample = call.node.op_type == "Upsample"
    at = 1 if upsample or call.version < 11 else 2
    if call.has(3) and not upsample:
        found = [quotient(size, extent) for size, extent in zip(call.extents(3), shape, strict=True)]
        whole = [factor for factor in found if isinstance(factor, int) and factor > 0]
        return whole if len(whole) == len(shape) else None
    known = call.known(at)
    scales = call.given.get("scales") if known is None else known.array.tolist()
    if not scales or len(scales) != len(shape) or any(scale < 1 or scale != int(scale) for scale in scales):
        return None
    return [int(scale) for scale in scales]


def _repeats(call: Call, factor: int) -> bool:
    """Tell whether places of the result are those of the operand, each as often."""
    older = call.node.op_type == "Upsample" or call.version < 11
    how, nearest = (b"asymmetric", b"floor") if older else (b"half_pixel", b"round_prefer_floor")
    place = PLACES.get(call.given.get("coordinate_transformation_mode", how).decode())
    choose = NEAREST.get(call.given.get("nearest_mode", nearest).decode())
    if place is None or choose is None or place is PLACES["tf_crop_and_resize"]:
        return False
    for extent in SAMPLES if factor > 1 else ():
        at = torch.arange(extent * factor, dtype=torch.float64)
        found = choose(place(at, factor, extent, extent * factor, 0.0, 1.0)).clamp(0, extent - 1)
        if not torch.equal(found, at.div(factor, rounding_mode="floor")):
            return False
    return True


MODELS: Mapping[str, Row] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _convolution,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": _whole_mean,
    "GlobalMaxPool": _whole_maximum,
    "Resize": _resized,
    "Upsample": _resized,
    "ConvTranspose": _transposed,
    "Softmax": _softmax("_softmax.default"),
    "LogSoftmax": _softmax("_log_softmax.default"),
    "LayerNormalization": _layer_norm,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "BatchNormalization": _batch_norm,
}
"""Operators of models."""

ROWS: Mapping[str, Row] = {**ARITHMETIC, **MOVES, **REDUCTIONS, **MODELS, **FUNCTIONS, **CODES}
"""ONNX operator -> row: all that can be imported."""
