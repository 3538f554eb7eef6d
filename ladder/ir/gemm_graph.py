"""The tile graph and float64 reference of a GEMM or convolution; `rewrite.gemm_match` goes the other way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ladder.ir.build import GraphBuilder
from ladder.ir.gemm import Gemm
from ladder.ir.graph import Graph
from ladder.ir.operator import Attributes
from ladder.ir.ops import get_operator, unary_operators
from ladder.ir.windows import Windows
from tile_types.errors import DTypeError, ShapeError
from tile_types.library import group_scaled
from tile_types.quantized import QuantizedTensor
from tile_types.tile import Extent


def gemm_graph(gemm: Gemm) -> Graph:
    """Return the kernel graph that a GEMM stands for; with experts, that of one of them.

    Inputs, in order: ``A[M,K]`` (group-scaled if its tokens are), ``B[N,K]`` (group-scaled if there are
    scales or zero points),
    ``row_scale[N]`` if there is no group scale, ``token_scale[M]``, ``bias[N]``.

    Raises UnknownNameError, ConversionError if the weight, its zero points or an epilogue operator do not
        exist.
    """
    g = GraphBuilder("gemm")
    a = g.input("A", token_type(gemm), ("M", gemm.k))
    b = g.input("B", weight_type(gemm), (gemm.n, gemm.k))
    return g.finish(insert_gemm(g, gemm, a, b, "M", gemm_vectors(g, gemm, "M")))


def gemm_vectors(g: GraphBuilder, gemm: Gemm, rows: Extent) -> dict[str, str]:
    """Declare the vectors that a GEMM takes besides its matrices, as inputs; returns them by name."""
    vectors: dict[str, tuple[bool, str, Extent]] = {
        "row_scale": (not gemm.scale, "float32", gemm.n),
        "token_scale": (gemm.token_scale and not gemm.token_group, "float32", rows),
        "bias": (gemm.bias, gemm.output, gemm.n),
    }
    return {label: g.input(label, ttype, (n,)) for label, (used, ttype, n) in vectors.items() if used}


def insert_gemm(g: GraphBuilder, gemm: Gemm, a: str, b: str, rows: Extent, given: Mapping[str, str]) -> str:
    """Add the operators of a GEMM to a graph and return its result ``[rows, N]``.

    a, b: Activations ``[rows, K]`` and the weight ``[N, K]`` of `weight_type`.
    rows: M.
    given: The vectors that `gemm_vectors` declares, by name.
    Raises UnknownNameError, DTypeError if an epilogue operator does not exist, or is no function of one
        number.
    """
    for operator in gemm.epilogue:
        _require_epilogue(operator)
    weight = decoded(g, gemm, b)
    activation = as_type(g, a, gemm.activation)
    value = g.add("matmul", activation, weight, transpose_b=True, type=_sum_type(gemm), name="sum")
    value = as_type(g, value, "float32")
    if "row_scale" in given:
        value = g.add("mul", value, given["row_scale"])
    if "token_scale" in given:
        value = g.add("mul", value, g.add("reshape", given["token_scale"], shape=(rows, 1)))
    if "bias" in given:
        value = g.add("add", value, as_type(g, given["bias"], "float32"))
    for operator in gemm.epilogue:
        value = g.add(operator, value)
    value = as_type(g, value, gemm.output)
    return _gated(g, gemm, value, rows) if gemm.gate else value


def _gated(g: GraphBuilder, gemm: Gemm, value: str, rows: Extent) -> str:
    """Return what the gate makes of both halves of a product's columns."""
    _require_epilogue(gemm.gate)
    shape = (rows, gemm.columns)
    halves = [g.add("slice", value, begin=(0, begin), shape=shape) for begin in (0, gemm.columns)]
    gate, other = (as_type(g, half, "float32") for half in (halves[::-1] if gemm.gate_last else halves))
    gate = as_type(g, as_type(g, g.add(gemm.gate, gate), gemm.output), "float32")
    return as_type(g, g.add("mul", gate, other), gemm.output)


def weight_type(gemm: Gemm) -> str:
    """Return the type of a GEMM's weight: group-scaled if there are scales or zero points."""
    if not gemm.scale and gemm.zero == "none":
        return gemm.weight
    scale = "e8m0" if gemm.power_scales else "float16"
    return group_scaled(gemm.weight, gemm.group_size, scale=scale, zero=gemm.zero).name


def token_type(gemm: Gemm) -> str:
    """Return the type of a GEMM's activations: group-scaled if groups of a row have scales."""
    if not gemm.token_group:
        return gemm.activation
    return group_scaled(gemm.activation, gemm.token_group, scale="float32").name


def _sum_type(gemm: Gemm) -> str:
    """Integer sums meet group scales in float32."""
    return "float32" if gemm.scale or gemm.token_group else gemm.accumulator


def decoded(g: GraphBuilder, gemm: Gemm, b: str) -> str:
    """Decode the weight B[N, K]; without group scale only the zero point is applied."""
    core = gemm.activation
    if gemm.scale or gemm.zero == "none":
        return as_type(g, b, core)
    value = g.add("convert", g.add("elements", b), type=core)
    zero = g.add("metadata", b, field="zero")
    zero = g.add("repeat", zero, axis=1, times=gemm.group_size, extent=gemm.k)
    return g.add("sub", value, as_type(g, zero, core))


def as_type(g: GraphBuilder, value: str, ttype: str) -> str:
    """Return a value in a type."""
    return value if g.tile(value).ttype.name == ttype else g.add("convert", value, type=ttype)


def _require_epilogue(operator: str) -> None:
    get_operator(operator)
    if operator not in unary_operators():
        raise DTypeError(
            f"epilogue {operator!r} is not a unary element-wise operator: {', '.join(unary_operators())}"
        )


def gemm_reference(
    gemm: Gemm,
    a: npt.ArrayLike,
    quantized: QuantizedTensor,
    bias: npt.ArrayLike | None = None,
    token_scale: npt.ArrayLike | None = None,
) -> npt.NDArray[np.float64]:
    """Return the exact result [M, N] (of a gated product [M, N / 2]) in float64 on the decoded weights.

    a: Values [M, K] (numpy or torch), of the activation type.
    quantized: The weight [N, K]; its scales, row scales and zero points are applied.
    bias, token_scale: [N] and [M], if the GEMM has them; scales of tokens' groups are [M, groups].
    Raises ShapeError if an operand is missing, superfluous or has another shape.
    """
    activation = _float64(a)
    weight = _float64(quantized.dequantize("float64"))
    if weight.shape != (gemm.n, gemm.k) or activation.shape[1:] != (gemm.k,):
        raise ShapeError(
            f"a GEMM of N={gemm.n}, K={gemm.k} cannot take A {list(activation.shape)}"
            f" and B {list(weight.shape)}"
        )
    if gemm.token_group:
        groups = np.arange(gemm.k) // gemm.token_group
        scales = _float64(token_scale if token_scale is not None else [])
        if scales.shape != (len(activation), groups[-1] + 1):
            raise ShapeError(f"token_scale must be [{len(activation)}, {groups[-1] + 1}], got {scales.shape}")
        activation = activation * scales[:, groups]
    result = activation @ weight.T
    if gemm.token_scale and not gemm.token_group:
        result *= _vector("token_scale", token_scale, result.shape[0])[:, None]
    if gemm.bias:
        result += _vector("bias", bias, gemm.n)
    for operator in gemm.epilogue:
        _require_epilogue(operator)
        result = get_operator(operator).reference([result], _NO_ATTRIBUTES)
    if gemm.gate:
        _require_epilogue(gemm.gate)
        gate, other = np.split(result, 2, axis=1)[:: -1 if gemm.gate_last else 1]
        result = get_operator(gemm.gate).reference([gate], _NO_ATTRIBUTES) * other
    return result


_NO_ATTRIBUTES: Attributes = {}


def _vector(label: str, values: npt.ArrayLike | None, length: int) -> npt.NDArray[np.float64]:
    if values is None:
        raise ShapeError(f"this GEMM needs {label}[{length}]")
    found = _float64(values)
    if found.shape != (length,):
        raise ShapeError(f"{label} must have shape [{length}], got {list(found.shape)}")
    return found


def _float64(values: Any) -> npt.NDArray[np.float64]:
    """Return float64 numpy from numpy (ml_dtypes included) or torch."""
    held = values.detach().double().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)
    return held.astype(np.float64)


def insert_convolution(g: GraphBuilder, gemm: Gemm, x: str, b: str, given: Mapping[str, str]) -> str:
    """Add the operators of a convolution of one group to a graph and return its result ``[B, P, Q, N]``.

    x, b: The image ``[B, H, W, C]`` and the weight ``[N, K]`` of `ladder.ir.gemm_graph.weight_type`.
    given: ``row_scale``, ``bias`` and ``residual``, where the problem has them.
    """
    at = gemm.windows or Windows((1, 1))
    weight = g.add("reshape", decoded(g, gemm, b), shape=(gemm.n, *at.kernel, gemm.channels))
    places, sizes = _places(at, g.tile(x).shape[1:3])
    spec = f"n {places} c, f r0 r1 c -> n h0 h1 f"
    value = g.add("contract", x, weight, spec=spec, sizes=sizes, pad=any(at.padding), type="float32")
    if "row_scale" in given:
        value = g.add("mul", value, given["row_scale"])
    for role in ("bias", "residual"):
        if role in given:
            value = g.add("add", value, as_type(g, given[role], "float32"))
    for operator in gemm.epilogue:
        value = g.add(operator, value)
    return as_type(g, value, gemm.output)


def _places(at: Windows, extents: tuple[Any, ...]) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """Return the affine indices of windows, and the extents of their names."""
    places, sizes = [], []
    for axis, extent in enumerate(extents):
        shift = f"-{at.padding[axis]}" if at.padding[axis] else ""
        places.append(f"{at.stride[axis]}*h{axis}+{at.dilation[axis]}*r{axis}{shift}")
        sizes += [(f"h{axis}", at.extent(extent, axis)), (f"r{axis}", at.kernel[axis])]
    return " ".join(places), tuple(sizes)
