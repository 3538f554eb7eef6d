"""Open extents of results that the standard's rules do not follow: polynomials in the sizes of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import onnx

from ladder.frontend.onnx_late import shape_of, tensor_info
from ladder.frontend.onnx_values import Known
from ladder.ir.extents import floordiv, product, total
from tile_types.tile import Extent


class Asked(NamedTuple):
    """A node whose shape is inferred: attributes, operands' shapes, known operands, version."""

    given: Mapping[str, Any]
    shapes: Sequence[Sequence[Extent]]
    known: Sequence[Known | None]
    version: int

    def operand(self, at: int) -> Known | None:
        return self.known[at] if at < len(self.known) else None


Found = Sequence[Extent] | None
Rule = Callable[[Asked], Found]
"""What gives the shape of a result; None where no polynomial says it."""


def scaled(extent: Extent, factor: float) -> Extent | None:
    """Return an extent times a factor, rounded down; None where that is no polynomial."""
    if isinstance(extent, int):
        return int(extent * factor)
    if factor == int(factor):
        return product([extent, int(factor)])
    inverse = round(1 / factor) if factor else 0
    return floordiv(extent, inverse) if inverse and factor == 1 / inverse else None


def _resized(node: Asked) -> Found:
    scales, sizes = node.operand(1 if node.version < 11 else 2), node.operand(3)
    if sizes is not None and sizes.array.size:
        if node.given.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
            return None
        shape = list(node.shapes[0])
        for axis, extent in zip(node.given.get("axes") or range(len(shape)), sizes.extents(), strict=True):
            shape[axis] = extent
        return shape
    if scales is None or not scales.array.size or "axes" in node.given:
        return None
    found = [scaled(e, float(f)) for e, f in zip(node.shapes[0], scales.array.tolist(), strict=True)]
    return None if any(extent is None for extent in found) else [e for e in found if e is not None]


def _conv_transposed(node: Asked) -> Found:
    (x, w, *_), given = node.shapes, node.given
    rank = len(x) - 2
    if "output_shape" in given or not all(isinstance(extent, int) for extent in w):
        return None
    strides, gaps = (given.get(name) or [1] * rank for name in ("strides", "dilations"))
    features, mode = product([w[1], given.get("group", 1)]), given.get("auto_pad", b"NOTSET")
    if mode in (b"SAME_UPPER", b"SAME_LOWER"):
        return [x[0], features, *(product(pair) for pair in zip(x[2:], strides, strict=True))]
    if mode == b"VALID":
        return None
    extra, pads = given.get("output_padding") or [0] * rank, given.get("pads") or [0] * 2 * rank
    found = [
        total([product([strides[at], total([x[2 + at], -1])]), rest])
        for at in range(rank)
        for rest in [extra[at] + gaps[at] * (int(w[2 + at]) - 1) + 1 - pads[at] - pads[rank + at]]
    ]
    return [x[0], features, *found]


def _convolved(node: Asked, at: int) -> Found:
    """Return the shape of a convolution by operand ``at``: windows of known sizes over open axes."""
    x, w = node.shapes[0], node.shapes[at]
    kernel = [extent for extent in w[2:] if isinstance(extent, int)]
    return [x[0], w[0], *_window_counts(x[2:], kernel, node.given)] if len(kernel) == len(w) - 2 else None


def _last(rule: Rule) -> Rule:
    """Return the rule for pictures whose channels come last."""

    def found(node: Asked) -> Found:
        batch, *extents, channels = node.shapes[0]
        shape = rule(node._replace(shapes=[[batch, channels, *extents], *node.shapes[1:]]))
        return None if shape is None else [shape[0], *shape[2:], shape[1]]

    return found


def _last_convolved(node: Asked) -> Found:
    """Return the shape of a convolution of whose weights, too, the channels come last."""
    x, (features, *kernel, channels), *others = node.shapes
    return _last(lambda one: _convolved(one, 1))(
        node._replace(shapes=[x, [features, channels, *kernel], *others])
    )


def _pooled(node: Asked) -> Found:
    x = node.shapes[0]
    return [*x[:2], *_window_counts(x[2:], node.given["kernel_shape"], node.given)]


def _window_counts(
    extents: Sequence[Extent], kernel: Sequence[int], given: Mapping[str, Any]
) -> list[Extent]:
    """Return how many windows an image has along each axis; none begins in the padding after it."""
    rank, mode = len(kernel), given.get("auto_pad", b"NOTSET")
    strides, gaps = (given.get(name) or [1] * rank for name in ("strides", "dilations"))
    pads = [0] * 2 * rank if mode == b"VALID" else given.get("pads") or [0] * 2 * rank
    found = []
    for at, (extent, step) in enumerate(zip(extents, strides, strict=True)):
        beyond = pads[at + rank] - gaps[at] * (kernel[at] - 1) - 1 + step
        if mode in (b"SAME_UPPER", b"SAME_LOWER"):
            beyond = step - 1
        else:
            beyond = pads[at] + (min(beyond, 0) + step - 1 if given.get("ceil_mode", 0) else beyond)
        found.append(floordiv(total([extent, beyond]), step))
    return found


def _product(node: Asked) -> Found:
    """Return the rows of a batch by the columns of one matrix."""
    a, b = node.shapes[:2]
    return [*a[:-1], b[1]] if len(b) == 2 else None


def _contracted(node: Asked) -> Found:
    """Return the shape of an Einsum; an axis of one element is as long as others of its letter."""
    terms, arrow, result = node.given["equation"].decode().replace(" ", "").partition("->")
    letters = terms.split(",")
    if "." in terms or not arrow or [len(one) for one in letters] != [len(shape) for shape in node.shapes]:
        return None
    found: dict[str, Extent] = {}
    for letter, extent in zip("".join(letters), (e for shape in node.shapes for e in shape), strict=True):
        if found.get(letter, 1) == 1:
            found[letter] = extent
        elif extent not in (1, found[letter]):
            return None
    return [found[letter] for letter in result] if set(result) <= found.keys() else None


def _of_values(node: Asked) -> Found:
    """Return the shape of attention: the rows of queries by all heads of the values, which may be packed.

    Packed values lie in the operand of keys, ``[batch, rows, heads, 2, size]``, or in that of queries, of 3.
    """
    x, k, v = [*node.shapes, (), ()][:3]
    packed = next((shape for shape in (x, k) if len(shape) == 5), None)
    if packed is not None:
        return [*x[:2], product([packed[2], packed[4]])]
    if len(v) == 3:
        return [*x[:2], v[2]]
    return [*x[:2], product([v[1], v[3]])] if len(v) == 4 else None


def _of_groups(node: Asked) -> Found:
    """Return the shape of the queries; of an operand that is packed, without its keys and values."""
    x, heads = node.shapes[0], node.given["num_heads"]
    if node.shapes[1]:
        return x
    parts = heads + 2 * node.given["kv_num_heads"]
    return [*x[:2], int(x[2]) // parts * heads] if isinstance(x[2], int) else None


def _mixed(node: Asked) -> Found:
    """Return the shape of one stream of several, which lie along an axis of their own or in the last one."""
    x, count = node.shapes[0], node.given.get("num_branches", 0)
    return [*x[:-1], floordiv(x[-1], count)] if count else [*x[:-2], x[-1]]


def _projected(node: Asked) -> Found:
    x, weight = node.shapes[:2]
    sizes = node.given.get("qkv_hidden_sizes")
    width = sizes[2] if sizes else floordiv(weight[1], 3)
    return [*x[:2], width]


def _taken(node: Asked) -> Found:
    """Return the shape of what is taken from a stored table of codes, of which a byte may hold several."""
    table, (shape, indices, *_) = node.operand(0), node.shapes
    if table is None:
        return None
    each, axis = 8 // node.given.get("bits", 4), node.given.get("gather_axis", 0) % len(shape)
    whole = [*shape[:-1], product([shape[-1], each])] if table.ttype == "uint8" else shape
    return [*whole[:axis], *indices, *whole[axis + 1 :]]


def _quantized_gemm(node: Asked) -> Found:
    a, b, given = node.shapes[0], node.shapes[3], node.given
    return [a[1] if given.get("transA", 0) else a[0], b[0] if given.get("transB", 0) else b[1]]


def _concatenated(node: Asked) -> Found:
    parts, axis = node.shapes[2::3], node.given["axis"]
    found = list(parts[0])
    found[axis] = total([part[axis] for part in parts])
    return found


def _of_both(node: Asked) -> Found:
    """Return the shape of two tensors of codes, of which one may be a number or a vector."""
    a, b = sorted((node.shapes[0], node.shapes[3]), key=len, reverse=True)
    return a if all(y in (1, x) for x, y in zip(a[len(a) - len(b) :], b, strict=True)) else None


def _steps(node: Asked) -> Found:
    """Return the shape of the states of a recurrent layer after all steps."""
    x, w = node.shapes[:2]
    return [x[0], w[0], x[1], node.given["hidden_size"]]


def _padded(node: Asked) -> Found:
    stated, shape = node.operand(1), node.shapes[0]
    pads = node.given.get("pads") or (None if stated is None else stated.extents())
    if pads is None or node.operand(3) is not None:
        return None
    return [total([extent, pads[at], pads[at + len(shape)]]) for at, extent in enumerate(shape)]


def _stft(node: Asked) -> Found:
    signal, step, stated = node.shapes[0], node.known[1], node.operand(3)
    window = node.shapes[2] if len(node.shapes) > 2 else ()
    length = window[0] if window else None if stated is None else stated.extents()[0]
    if step is None or not isinstance(length, int) or not isinstance(step.extents()[0], int):
        return None
    frames = total([floordiv(total([signal[1], -length]), step.extents()[0]), 1])
    return [signal[0], frames, length // 2 + 1 if node.given.get("onesided", 1) else length, 2]


def _voted(node: Asked) -> Found:
    """Return the shape of a number for each row and target; a vector is one row."""
    return [*_rows(node), int(node.given.get("n_targets", 1))]


def _rows(node: Asked) -> Sequence[Extent]:
    return node.shapes[0][:1] if len(node.shapes[0]) == 2 else [1]


def _scored(node: Asked) -> Found:
    """Return the shape of a number for each row and class."""
    labels = node.given.get("classlabels_int64s") or node.given.get("classlabels_strings") or ()
    return [*_rows(node), len(labels)]


COUNTED = ("com.microsoft::EmbedLayerNormalization", "com.microsoft::QEmbedLayerNormalization")
"""Operators of whose further results the first is a number for each row of the first operand, int32."""

RULES: Mapping[str, Rule] = {
    "ai.onnx.ml::TreeEnsembleRegressor": _voted,
    "ai.onnx.ml::TreeEnsemble": _voted,
    "ai.onnx.ml::TreeEnsembleClassifier": _rows,
    "Pad": _padded,
    "Resize": _resized,
    "Upsample": lambda node: _resized(node._replace(version=10)),
    "ConvTranspose": _conv_transposed,
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pooled),
    "ConvInteger": lambda node: _convolved(node, 1),
    "QLinearConv": lambda node: _convolved(node, 3),
    "com.microsoft::QLinearConv": lambda node: (
        _last(RULES["QLinearConv"])(node) if node.given.get("channels_last", 0) else _convolved(node, 3)
    ),
    "com.microsoft::NhwcConv": _last_convolved,
    "com.microsoft::NhwcFusedConv": _last(lambda node: _convolved(node, 1)),
    "com.microsoft::NhwcMaxPool": _last(_pooled),
    "STFT": _stft,
    "Einsum": _contracted,
    "com.microsoft::MatMulNBits": lambda node: [*node.shapes[0][:-1], node.given["N"]],
    "com.microsoft::GatherBlockQuantized": _taken,
    **dict.fromkeys(COUNTED, lambda node: [*node.shapes[0], node.shapes[2][1]]),
    "com.microsoft::GroupQueryAttention": _of_groups,
    "com.microsoft::MultiHeadAttention": _of_values,
    "com.microsoft::DecoderMaskedMultiHeadAttention": _of_values,
    "com.microsoft::HyperConnectionPreMix": _mixed,
    "com.microsoft::Attention": _projected,
    "com.microsoft::QAttention": _projected,
    "com.microsoft::DynamicQuantizeMatMul": _product,
    "com.microsoft::MatMulIntegerToFloat": _product,
    "com.microsoft::QGemm": _quantized_gemm,
    "com.microsoft::QLinearConcat": _concatenated,
    "com.microsoft::QLinearAdd": _of_both,
    "com.microsoft::QLinearMul": _of_both,
    "com.microsoft::DynamicQuantizeLSTM": _steps,
    **{
        f"com.microsoft::{name}": lambda node: node.shapes[0]
        for name in (
            *("Gelu", "BiasGelu", "FastGelu", "QuickGelu", "BiasAdd", "SkipLayerNormalization"),
            *("SkipSimplifiedLayerNormalization", "SimplifiedLayerNormalization", "LayerNormalization"),
            *("RotaryEmbedding", "ThresholdedRelu"),
            *("QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax"),
            *(
                *("MRotaryEmbedding", "HyperConnectionPostMix", "EngramGate"),
                "MoE",
                "QMoE",
                "GatedRMSNorm",
                "BranchwiseRMSNorm",
                "ScaledSiLU",
                "GatedAdd",
                "Inverse",
                "Trilu",
            ),
        )
    },
    **{
        name: lambda node: node.shapes[0]
        for name in ("ImageScaler", "Affine", "ScaledTanh", "ParametricSoftplus")
    },
}
"""Operator -> rule for the shape of its first result; its type is the standard's, or its first operand's."""

FURTHER: Mapping[str, Rule] = {
    "com.microsoft::DynamicQuantizeLSTM": lambda node: (_steps(node) or ())[1:],
    "ai.onnx.ml::TreeEnsembleClassifier": _scored,
    "MaxPool": _pooled,
    **dict.fromkeys(COUNTED, lambda node: node.shapes[0][:1]),
}
"""Operator -> rule for the shape of each further result, of the same type but for those of `FLOATS`."""

PREFERRED = frozenset(("MaxPool", "AveragePool", "LpPool", "ConvTranspose", "Einsum"))
"""Operators of which the standard's rules say other extents than its text: windows, axes of one element."""

FLOATS = frozenset(("ai.onnx.ml::TreeEnsembleRegressor", "ai.onnx.ml::TreeEnsembleClassifier"))
"""Operators whose results are float32, where the standard's rules say no other type."""

TYPED_BY: Mapping[str, Sequence[int]] = {
    "com.microsoft::MatMulIntegerToFloat": (2,),
    "com.microsoft::QGemm": (8, 1),
    "com.microsoft::QAttention": (3,),
    "com.microsoft::GatherBlockQuantized": (2,),
    "com.microsoft::EmbedLayerNormalization": (2,),
    "com.microsoft::QEmbedLayerNormalization": (8,),
    "com.microsoft::QLinearConcat": (2,),
    "com.microsoft::LayerNormalization": (1,),
    "com.microsoft::SimplifiedLayerNormalization": (1,),
}
"""Operator -> operands whose type its results have, the first of them that is there."""


def completed(
    key: str, node: Any, given: Mapping[str, Any], infos: Sequence[Any], known: Sequence[Known | None],
    version: int, found: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Return the types of a node's results, with what a rule of ours adds to those of the standard.

    key: The operator.
    node, given, version: The node, its attributes, its version.
    infos, known: Types of its operands, and those that are known.
    found: Name of a result -> type by the standard's rules.
    """
    shapes = [shape_of(info) for info in infos]
    rule, result = RULES.get(key), dict(found)
    usual = shape_of(result.get(node.output[0]))
    if rule is None:
        return result
    if key not in PREFERRED and usual is not None and all(isinstance(extent, int) for extent in usual):
        return result
    if any(name and shape is None for name, shape in zip(node.input, shapes, strict=True)):
        return result
    if any(extent is None for shape in shapes if shape for extent in shape):
        return result
    plain = [[extent for extent in shape or () if extent is not None] for shape in shapes]
    typed = next(at for at in TYPED_BY.get(key, (0,)) if at < len(infos) and infos[at] is not None)
    stated = result.get(node.output[0])
    usual_code = onnx.TensorProto.FLOAT if key in FLOATS else infos[typed].tensor_type.elem_type
    code = (stated.tensor_type.elem_type if stated is not None else 0) or usual_code
    further = FURTHER.get(key)
    asked = Asked(given, plain, known, version)
    shape = rule(asked)
    if shape is not None:
        result[node.output[0]] = tensor_info(code, shape)
    other = None if further is None else further(asked)
    if other is not None:
        of = onnx.TensorProto.INT64 if key == "MaxPool" else usual_code if key in FLOATS else code
        names = node.output[1:]
        if key in COUNTED:
            of, names = onnx.TensorProto.INT32, names[:1]
        result |= {name: tensor_info(of, other) for name in names if name}
    return result


def vector_like(info: Any) -> Any:
    """Return the type of a vector of open length, with the elements of another type."""
    return onnx.helper.make_tensor_type_proto(info.tensor_type.elem_type, [None])
