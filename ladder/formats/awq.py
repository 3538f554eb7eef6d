"""AWQ (AutoAWQ, AutoRound's auto_awq): 4-bit codes along N (gemm) or along K (gemv, gemv_fast).

``w[n, k] = scales[g, n] * (q[k, n] - z[g, n])``; gemv_fast stores ``-scales * z``. GPTQModel's gemm has other
widths too, whose codes are a stream along N in their own order. Sources: AutoAWQ ``modules/linear/gemm.py``,
``gemv.py``, ``gemv_fast.py``, GPTQModel ``nn_modules/qlinear/gemv_fast_awq.py``,
``quantization/awq/utils/packing_utils.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ladder.formats.bits import by_rows, flipped, octets_of, repacked, sign_bits, words_to_codes
from ladder.formats.gptq import PackedForm, symmetric_or_not
from ladder.formats.layer import AUTO_ROUND, OVERRIDES, SCALES, Format, Layer, Shape, group_of
from ladder.formats.repack import transposed_nibbles
from tile_types.packing import pack_codes

if TYPE_CHECKING:
    import torch

    from tile_types import QuantizedTensor

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of word c is output ``8 * c + ORDER[i]``."""

BITS = 4
FOUR_ONLY = "this layout of AWQ packs 4-bit codes only"


WIDTHS = (4, 2, 3, 5, 6, 7, 8)
"""Bits of codes of the gemm layout."""


def is_gemm(layer: Layer) -> bool:
    """Tell by shapes whether words hold codes of several outputs."""
    weight, scales = layer[".qweight"].shape, layer[".scales"].shape
    return len(weight) == len(scales) == 2 and bool(_widths(layer))


def _widths(layer: Layer) -> list[int]:
    """Return the bits that codes of the gemm layout may have, by shapes alone."""
    words, n = layer[".qweight"].shape[1], layer[".scales"].shape[1]
    return [bits for bits in WIDTHS if words == -(-n * bits // 32) and (bits != BITS or n % 8 == 0)]


def gemm_bits(layer: Layer) -> int:
    """Return the bits of a layer's codes.

    Raises CheckpointError if the configuration says others, or extents fit several.
    """
    fitting, stated = _widths(layer), layer.option("bits", int, None)
    differ = any(layer.config.get(key) for key in OVERRIDES)
    agrees = stated is None or stated in fitting or differ
    layer.require(agrees, f"its words fit codes of {fitting} bits, the configuration says {stated}")
    certain = len(fitting) == 1 or (stated in fitting and not differ)
    layer.require(certain, f"its words fit codes of {fitting} bits")
    return next(bits for bits in fitting if len(fitting) == 1 or bits == stated)


def is_gemv(layer: Layer) -> bool:
    """Tell by shapes whether words hold eight codes of one output."""
    weight, scales, zeros = (layer[part].shape for part in (".qweight", ".scales", ".qzeros"))
    return len(weight) == len(scales) == len(zeros) == 2 and weight[0] == scales[0] == zeros[0]


def is_fast(layer: Layer) -> bool:
    """Tell gemv_fast by its words of 16 bits, each of which holds codes of one of four outputs."""
    weight, scales = layer[".qweight"], layer[".scales"].shape
    fits = weight.dtype == "int16" and len(weight.shape) == len(scales) == 2
    return fits and 4 * weight.shape[0] == scales[1] and (".qzeros" in layer) != (".scaled_zeros" in layer)


def fast_shape(layer: Layer) -> Shape:
    """Return [N, K]."""
    rows, k = layer.shape(".qweight", 2)
    return 4 * rows, k


def gemm_shape(layer: Layer) -> Shape:
    """Return [N, K]."""
    return layer.shape(".scales", 2)[1], layer.shape(".qweight", 2)[0]


def gemv_shape(layer: Layer) -> Shape:
    """Return [N, K]."""
    n, words = layer.shape(".qweight", 2)
    return n, 8 * words


def read_gemm(layer: Layer) -> QuantizedTensor:
    """Read a layer of the gemm layout."""
    n, k = gemm_shape(layer)
    groups, _ = layer.shape(".scales", 2)
    bits = gemm_bits(layer)
    _require_types(layer)
    words = -(-n * bits // 32)
    layer.require(layer.shape(".qzeros", 2) == (groups, words), "qzeros do not fit scales")
    layer.require(bits != BITS or k % 8 == 0, f"{k} inputs are no multiple of 8")
    group = group_of(layer, k, groups, layer.option("group_size", int, None))
    fields = {"scale": layer.tensor(".scales").t().contiguous(), "columns": None, "block": (1, group)}
    form = PackedForm(n, k, bits, groups, planar=False)
    read_codes = _in_order if bits == BITS else _streams
    zero, store = read_codes(layer, form)
    return symmetric_or_not(form, store, zero, None, fields)


def _in_order(layer: Layer, form: PackedForm) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
    """Return zero points ``[N, G]`` and what gives storage, of words of eight outputs in `ORDER`."""
    from torch.nn.functional import pad

    words = pad(layer.tensor(".qzeros"), (0, 0, 0, -form.groups % 8))

    def store(*, signed: bool) -> torch.Tensor:
        flip = sign_bits(BITS, 32) if signed else 0
        return octets_of(transposed_nibbles(layer.tensor(".qweight"), ORDER, flip))

    return words_to_codes(transposed_nibbles(words, ORDER), BITS, form.groups), store


def _streams(layer: Layer, form: PackedForm) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
    """Return zero points ``[N, G]`` and what gives storage, of streams of codes along N."""

    def unpacked(part: str) -> torch.Tensor:
        codes = by_rows(lambda words: words_to_codes(words, form.bits, form.n), layer.tensor(part), form.n)
        return codes.t().contiguous()

    def store(*, signed: bool) -> torch.Tensor:
        middle = 1 << (form.bits - 1) if signed else 0
        codes = unpacked(".qweight")
        return by_rows(lambda rows: pack_codes(rows ^ middle, form.bits), codes, form.k)

    return unpacked(".qzeros"), store


def read_gemv(layer: Layer) -> QuantizedTensor:
    """Read a layer of the gemv layout; its groups are padded, so the configuration must say their size."""
    n, k = gemv_shape(layer)
    _require_types(layer)
    layer.require(layer.option("bits", int, BITS) == BITS, FOUR_ONLY)
    group = stated_group(layer, k)
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


def stated_group(layer: Layer, k: int) -> int:
    """Return the configuration's group size, without which padded groups do not tell it."""
    group = layer.option("group_size", int, None)
    layer.require(group is not None, "the gemv layout needs group_size in the configuration")
    group = k if group == -1 else group
    layer.require(group >= 1 and k % group == 0, f"group_size {group} does not divide {k} inputs")
    found: int = group
    return found


def read_fast(layer: Layer) -> QuantizedTensor:
    """Read a layer of gemv_fast: ``q * scale + zero``, 32 columns in an order, four outputs interleaved."""
    import torch

    from tile_types import QuantizedTensor, get_type

    n, k = fast_shape(layer)
    zeros = ".qzeros" if ".qzeros" in layer else ".scaled_zeros"
    for part in (".scales", zeros):
        layer.require_type(part, *SCALES)
    layer.require(layer.option("bits", int, BITS) == BITS, FOUR_ONLY)
    layer.require(k % 64 == 0, f"{k} inputs are no multiple of 64")
    group = stated_group(layer, k)
    groups, outputs = layer.shape(".scales", 2)
    fits = groups >= k // group and layer.shape(zeros, 2) == (groups, outputs)
    layer.require(fits, f"{groups} groups of scales for {k // group}, or zeros do not fit them")
    scale, zero = (layer.tensor(part)[: k // group].t().contiguous() for part in (".scales", zeros))
    octets = octets_of(layer.tensor(".qweight")).view(n // 4, k // 64, 4, 32)
    rows = octets.transpose(1, 2).reshape(n, k // 2)
    order = torch.arange(k).view(-1, 4, 2, 4).transpose(2, 3).reshape(-1, 4, 4, 2).transpose(1, 2).flatten()
    return QuantizedTensor(
        get_type("uint4"),
        (n, k),
        repacked(rows, BITS, k, lambda codes: codes[:, order]),
        (1, group),
        scale=scale,
        scale_type=layer[".scales"].dtype,
        offset=zero.to(scale.dtype),
    )


def _require_types(layer: Layer) -> None:
    layer.require_type(".qweight", "int32")
    layer.require_type(".qzeros", "int32")
    layer.require_type(".scales", *SCALES)


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
FAST = Format(
    "awq_gemv_fast",
    ".qweight",
    is_fast,
    fast_shape,
    read_fast,
    methods=METHODS,
    parts=(".scales",),
    optional=(".qzeros", ".scaled_zeros"),
    dtype="scale",
    doc="AWQ gemv_fast, llm-awq",
)
