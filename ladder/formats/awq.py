"""AWQ (AutoAWQ, AutoRound's auto_awq): 4-bit codes along N (gemm) or along K (gemv).

``w[n, k] = scales[g, n] * (q[k, n] - z[g, n])``. Sources: AutoAWQ ``modules/linear/gemm.py``, ``gemv.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ladder.formats.bits import flipped, octets_of, sign_bits, words_to_codes
from ladder.formats.gptq import PackedForm, symmetric_or_not
from ladder.formats.layer import AUTO_ROUND, SCALES, Format, Layer, Shape, group_of
from ladder.formats.repack import transposed_nibbles

if TYPE_CHECKING:
    import torch

    from tile_types import QuantizedTensor

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of word c is output ``8 * c + ORDER[i]``."""

BITS = 4


def is_gemm(layer: Layer) -> bool:
    """Tell by shapes whether words hold codes of eight outputs."""
    weight, scales = layer[".qweight"].shape, layer[".scales"].shape
    return len(weight) == len(scales) == 2 and weight[1] * 8 == scales[1]


def is_gemv(layer: Layer) -> bool:
    """Tell by shapes whether words hold eight codes of one output."""
    weight, scales, zeros = (layer[part].shape for part in (".qweight", ".scales", ".qzeros"))
    return len(weight) == len(scales) == len(zeros) == 2 and weight[0] == scales[0] == zeros[0]


def gemm_shape(layer: Layer) -> Shape:
    """Return [N, K]."""
    k, words = layer.shape(".qweight", 2)
    return 8 * words, k


def gemv_shape(layer: Layer) -> Shape:
    """Return [N, K]."""
    n, words = layer.shape(".qweight", 2)
    return n, 8 * words


def read_gemm(layer: Layer) -> QuantizedTensor:
    """Read a layer of the gemm layout."""
    from torch.nn.functional import pad

    n, k = gemm_shape(layer)
    groups, _ = layer.shape(".scales", 2)
    _require_types(layer)
    layer.require(layer.shape(".qzeros", 2) == (groups, n // 8), "qzeros do not fit scales")
    layer.require(k % 8 == 0, f"{k} inputs are no multiple of 8")
    group = group_of(layer, k, groups, layer.option("group_size", int, None))
    words = pad(layer.tensor(".qzeros"), (0, 0, 0, -groups % 8))
    zero = words_to_codes(transposed_nibbles(words, ORDER), BITS, groups)
    fields = {"scale": layer.tensor(".scales").t().contiguous(), "columns": None, "block": (1, group)}
    form = PackedForm(n, k, BITS, groups, planar=False)

    def store(*, signed: bool) -> torch.Tensor:
        flip = sign_bits(BITS, 32) if signed else 0
        return octets_of(transposed_nibbles(layer.tensor(".qweight"), ORDER, flip))

    return symmetric_or_not(form, store, zero, None, fields)


def read_gemv(layer: Layer) -> QuantizedTensor:
    """Read a layer of the gemv layout; its groups are padded, so the configuration must say their size."""
    n, k = gemv_shape(layer)
    _require_types(layer)
    group = layer.option("group_size", int, None)
    layer.require(group is not None, "the gemv layout needs group_size in the configuration")
    group = k if group == -1 else group
    layer.require(group >= 1 and k % group == 0, f"group_size {group} does not divide {k} inputs")
    groups = k // group
    room = min(layer.shape(".scales", 2)[1], 8 * layer.shape(".qzeros", 2)[1])
    layer.require(groups <= room, f"scales and zero points have room for {room} groups, not for {groups}")
    zero = words_to_codes(layer.tensor(".qzeros"), BITS, groups)
    scale = layer.tensor(".scales")[:, :groups].contiguous()
    form = PackedForm(n, k, BITS, groups, planar=False)
    stored = octets_of(layer.tensor(".qweight"))
    fields = {"scale": scale, "columns": None, "block": (1, group)}

    def store(*, signed: bool) -> torch.Tensor:
        return flipped(stored, BITS) if signed else stored

    return symmetric_or_not(form, store, zero, None, fields)


def _require_types(layer: Layer) -> None:
    layer.require_type(".qweight", "int32")
    layer.require_type(".qzeros", "int32")
    layer.require_type(".scales", *SCALES)
    layer.require(layer.option("bits", int, BITS) == BITS, "AWQ packs 4-bit codes only")


METHODS = ("awq", *AUTO_ROUND)
PARTS = (".scales", ".qzeros")

GEMM = Format(
    "awq",
    ".qweight",
    is_gemm,
    gemm_shape,
    read_gemm,
    methods=METHODS,
    parts=PARTS,
    dtype="scale",
    doc="AWQ gemm; AutoRound's auto_awq",
)
GEMV = Format(
    "awq_gemv",
    ".qweight",
    is_gemv,
    gemv_shape,
    read_gemv,
    methods=METHODS,
    parts=PARTS,
    dtype="scale",
    doc="AWQ gemv",
)
