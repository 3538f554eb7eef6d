"""Arguments of every CUDA GEMM kernel: which tensors, in which order, with which extents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import Expr
from ladder.lower import builder as b
from schedules.group_values import streams_exponents
from schedules.layouts import TILE, lane_of
from tile_types import get_type


@dataclass(frozen=True)
class Arguments:
    """Tensors and extents of one kernel; absent tensors are None.

    m, n: Rows and columns of the output; a gated product has twice as many weight rows.
    k_x: Row pitch of A in elements, a multiple of 16 bytes; A is zero beyond K. Of an image, its channels.
    n_tiles, k_tiles: Packed 64 x 64 tiles of the weight.
    groups: Rows of ``scales`` and ``zeros``.
    x, words, scales, zeros, row_scale, token_scale, bias, y: See `schedules.fragments` and
        `ladder.ir.gemm.Gemm`. With experts, what belongs to the weight has a leading axis of experts.
    image: Batch, height, width and channels of x where it is an image ``[B, H, W, C]`` (`Gemm.windows`).
    factor: Vector ``[N]`` by which sums are multiplied.
    residual: Tensor ``[M, N]`` that is added.
    experts, ranges, slots: Number of experts, int32 offsets ``[E + 1]`` of their rows of A (if ``ends``,
        ``[E]``, without the first, 0) or, of `slots` of equally many rows, counts ``[E]`` or, if ``named``,
        the expert of each; None without experts.
    """

    m: Expr
    n: Expr
    k_x: Expr
    n_tiles: Expr
    k_tiles: Expr
    groups: Expr
    x: Any
    words: Any
    scales: Any
    zeros: Any
    row_scale: Any
    token_scale: Any
    bias: Any
    y: Any
    experts: Expr = None
    ranges: Any = None
    slots: Expr = None
    named: bool = False
    ends: bool = False
    image: tuple[Expr, ...] = ()
    residual: Any = None
    factor: Any = None


def scale_dtype(gemm: Gemm) -> str:
    """Return the element type of the array of scales."""
    if streams_exponents(gemm):
        return "uint32"
    return "float32" if lane_of(gemm.activation) == 8 else gemm.activation


def declare_arguments(gemm: Gemm, columns: int | None = None) -> Arguments:
    """Declare the arguments in calling order; every extent is symbolic.

    columns: Of x, if the kernel makes it itself: x is no argument then, and K is known.
    """
    m, n, k_x = b.symbol("M"), b.symbol("N"), b.symbol("K") if columns is None else T.int32(columns)
    n_tiles, n_pad = b.symbol("n_tiles"), b.symbol("n_pad")
    k_tiles = b.symbol("k_tiles") if columns is None else T.int32(-(-columns // TILE))
    groups = b.symbol("groups")
    experts = b.symbol("experts") if gemm.experts else None
    each = () if experts is None else (experts,)
    narrow = lane_of(gemm.activation) == 8
    zero_shape = (groups, 2, n_pad) if gemm.zero == "float" else (groups, n_pad)
    optional = {
        "scales": (gemm.scale, (groups, n_pad), scale_dtype(gemm)),
        "zeros": (gemm.zero != "none", zero_shape, "int8" if narrow else gemm.activation),
    }
    image = tuple(map(b.symbol, ("batch", "height", "width", "channels"))) if gemm.windows else ()
    k_x = image[3] if image else k_x
    x = b.tensor("x", image or (m, k_x), b.tir_name(gemm.activation)) if columns is None else None
    if gemm.stored:
        extents = (n, k_x) if gemm.stored == "rows" else (k_x, n)
        words = b.tensor("words", (*each, *extents), gemm.weight)
        n_tiles, k_tiles = (n + (TILE - 1)) // TILE, (k_x + (TILE - 1)) // TILE
    else:
        packed_words = 128 * get_type(gemm.weight).elem_bits
        words = b.tensor("words", (*each, n_tiles, k_tiles, packed_words), "uint32")
    packed = {
        name: b.tensor(name, (*each, *shape), dtype) if wanted else None
        for name, (wanted, shape, dtype) in optional.items()
    }
    row_scale = None if gemm.stored else b.tensor("row_scale", (*each, n_pad), "float32")
    count = b.symbol("range_count") if each else None
    ranges = b.tensor("ranges", (count,), "int32", align=4) if each else None
    token_shape = (m, b.symbol("token_groups")) if gemm.token_group else (m,)
    token_scale = b.tensor("token_scale", token_shape, "float32", align=4) if gemm.token_scale else None
    factor = b.tensor("factor", (n,), "float32", align=4) if gemm.factor else None
    rows = b.symbol("bias_rows") if gemm.gate else n
    bias = b.tensor("bias", (*each, rows), gemm.output, align=2) if gemm.bias else None
    residual = b.tensor("residual", (m, n), gemm.output) if gemm.residual else None
    y = b.tensor("y", (m, n), gemm.output)
    return Arguments(
        m, n, k_x, n_tiles, k_tiles, groups, x, words, packed["scales"], packed["zeros"], row_scale,
        token_scale, bias, y, experts, ranges,
        count if gemm.masked or gemm.slots else None, gemm.slots > 0, bool(gemm.stored), image, residual,
        factor,
    )  # fmt: skip
