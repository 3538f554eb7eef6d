"""The tile graph of a quantized convolution, a `Gemm` with windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ladder.ir.build import GraphBuilder
from ladder.ir.gemm import Gemm
from ladder.ir.gemm_graph import as_type, decoded
from ladder.ir.windows import Windows


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
