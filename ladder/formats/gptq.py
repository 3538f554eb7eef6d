"""GPTQ (AutoGPTQ, GPTQModel, AutoRound, QLLM): words of codes along K, zero points along N, ``g_idx``.

``w[n, k] = scales[g, n] * (q[k, n] - z[g, n])`` with ``g = g_idx[k]``. Version 1 stores ``z - 1``. Sources:
GPTQModel ``nn_modules/qlinear``, ``utils/model_dequant.py`` and ``utils/planar_packing.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ladder.formats.bits import (
    PLANES,
    by_rows,
    planes_to_codes,
    repacked,
    sign_bits,
    storage_of_words,
    words_to_codes,
)
from ladder.formats.layer import AUTO_ROUND, OVERRIDES, SCALES, Format, Layer, Shape, group_of
from ladder.formats.repack import transposed_words
from tile_types import QuantizedTensor, get_type
from tile_types.packing import is_dense, pack_codes

if TYPE_CHECKING:
    import torch


WIDTHS = (2, 3, 4, 5, 6, 7, 8)
FIRST, SECOND, PLANAR = "gptq", "gptq_v2", "gptq_p"
VERSIONS = {
    "": FIRST,
    "gptq": FIRST,
    "auto_round:auto_gptq": FIRST,
    "gptq_v2": SECOND,
    "auto_round": SECOND,
    "auto_round:gptqmodel": SECOND,
    "gptq_p": PLANAR,
}
"""``checkpoint_format`` of GPTQModel or ``packing_format`` of AutoRound -> version; the first has z - 1."""


FORMS = ("checkpoint_format", "format", "packing_format")
"""Fields that name the version: GPTQModel's of old, its of today, AutoRound's."""


QLLM, COMPATIBLE = "GPTQ", "COMPATIBLE_WITH_AUTOGPTQ"
"""QLLM's ``version`` of what it stores, zero points as they are, and the entry that says they are z - 1."""


@dataclass(frozen=True)
class PackedForm:
    """Extents and widths of a layer."""

    n: int
    k: int
    bits: int
    groups: int
    planar: bool


def geometry(layer: Layer) -> PackedForm:
    """Work out a layer's extents from those of its arrays.

    Raises CheckpointError if they contradict each other or the configuration.
    """
    rows, n = layer.shape(".qweight", 2)
    groups, columns = layer.shape(".scales", 2)
    zero_rows, zero_words = layer.shape(".qzeros", 2)
    layer.require(columns == n, f"scales for {columns} outputs beside codes of {n}")
    layer.require(zero_rows == groups, f"zero points of {zero_rows} groups beside scales of {groups}")
    fitting = [bits for bits in WIDTHS if -(-n * bits // 32) == zero_words]
    stated = layer.option("bits", int, None)
    bits = stated if stated in fitting else fitting[0] if len(fitting) == 1 else None
    layer.require(bits is not None, f"zero points of {zero_words} words for {n} outputs fit no width")
    assert bits is not None
    agrees = stated in (None, bits) or any(layer.config.get(key) for key in OVERRIDES)
    layer.require(agrees, f"its codes have {bits} bits, the configuration says {stated}")
    k = layer.shape(".g_idx", 1)[0] if ".g_idx" in layer else rows * 32 // bits
    layer.require(-(-k * bits // 32) == rows, f"{rows} words do not hold {k} codes of {bits} bits")
    planar = bits in PLANES and (version(layer) == PLANAR or (bits != 3 and not has_streams(layer)))
    layer.require(not planar or (k % 32 == 0 and n % 32 == 0), "planes need extents that are multiples of 32")
    return PackedForm(n, k, bits, groups, planar)


def version(layer: Layer) -> str:
    """Return the version of a layer's arrays.

    Raises CheckpointError if it is not known, or the configuration names several.
    """
    if is_qllm(layer):
        return FIRST if layer.config.get(COMPATIBLE) else SECOND
    stated = {layer.option(name, str, "") for name in FORMS} - {""} or {""}
    unknown = [name for name in stated if name not in VERSIONS]
    layer.require(not unknown, f"the form {unknown} is not read; known: {', '.join(filter(None, VERSIONS))}")
    found = {VERSIONS[name] for name in stated}
    layer.require(len(found) == 1, f"the configuration names several forms: {', '.join(sorted(stated))}")
    return found.pop()


def has_streams(layer: Layer) -> bool:
    """Tell AutoRound and QLLM, which pack 5, 6 and 7 bits as a stream, where GPTQModel has planes."""
    return "auto-round" in layer.option("quant_method", str, "") or is_qllm(layer)


def is_qllm(layer: Layer) -> bool:
    """Tell what QLLM wrote, the one tool that calls its packing GPTQ in this place."""
    return str(layer.config.get("version")).upper() == QLLM and layer.config.get("quant_method") == "gptq"


def is_gptq(layer: Layer) -> bool:
    """Tell GPTQ from AWQ by shapes: codes of one output per column."""
    weight, scales = layer[".qweight"], layer[".scales"]
    fits = len(weight.shape) == len(scales.shape) == 2 and weight.shape[1] == scales.shape[1]
    if fits:  # GPTQModel's pack_dtype may be another
        layer.require_type(".qweight", "int32")
        layer.require_type(".qzeros", "int32")
    return fits


def zero_points(layer: Layer, form: PackedForm) -> torch.Tensor:
    """Return the zero points in code space, uint8 [G, N].

    Where codes fill words, GPTQModel subtracts the 1 from words: a zero point of 0 borrows from the next.
    """
    words, bits, first = layer.tensor(".qzeros"), form.bits, version(layer) == FIRST
    if first and is_dense(bits):
        return words_to_codes(words + sum(1 << place for place in range(0, 32, bits)), bits, form.n)
    codes = planes_to_codes(words, bits) if form.planar else words_to_codes(words, bits, form.n)
    return (codes + 1) & ((1 << bits) - 1) if first else codes


def storage(layer: Layer, form: PackedForm, *, signed: bool) -> torch.Tensor:
    """Return the codes in canonical storage, [N, ...]; signed ones have their highest bit inverted."""
    words, bits = layer.tensor(".qweight"), form.bits
    if is_dense(bits) and not form.planar:
        words = transposed_words(words, sign_bits(bits, 32) if signed else 0)
        return storage_of_words(words, bits, form.k)
    middle = 1 << (bits - 1) if signed else 0

    def some_rows(part: torch.Tensor) -> torch.Tensor:
        codes = planes_to_codes(part, bits) if form.planar else words_to_codes(part, bits, form.k)
        packed: torch.Tensor = pack_codes(codes ^ middle, bits)
        return packed

    return by_rows(some_rows, transposed_words(words), form.k)


def read(layer: Layer) -> QuantizedTensor:
    """Read a layer: signed codes where all zero points are the middle one, else unsigned ones."""
    layer.require_type(".qweight", "int32")
    layer.require_type(".qzeros", "int32")
    layer.require_type(".scales", *SCALES)
    form = geometry(layer)
    group, columns = grouping(layer, form)
    scale, zero = layer.tensor(".scales"), zero_points(layer, form)
    if columns is not None:
        index = layer.tensor(".g_idx").long()[columns.long()][::group]
        scale, zero = scale[index], zero[index]
    fields = {"scale": scale.t().contiguous(), "columns": columns, "block": (1, group)}
    return symmetric_or_not(form, partial(storage, layer, form), zero.t().contiguous(), columns, fields)


def symmetric_or_not(
    form: PackedForm,
    store: Callable[..., torch.Tensor],
    zero: torch.Tensor,
    columns: torch.Tensor | None,
    fields: dict[str, Any],
) -> QuantizedTensor:
    """Return the matrix of codes in canonical storage and zero points [N, G].

    ``store(signed=...)`` gives the storage, with the highest bit of each code inverted if it is signed.
    """
    import torch

    bits = form.bits
    signed = torch.equal(zero, torch.full_like(zero, 1 << (bits - 1)))
    stored = store(signed=signed)
    if columns is not None:
        order = columns.long()
        stored = repacked(stored, bits, form.k, lambda codes: codes[:, order])
    element = get_type(f"{'int' if signed else 'uint'}{bits}")
    return QuantizedTensor(
        element,
        (form.n, form.k),
        stored,
        zero=None if signed else zero,
        zero_kind="none" if signed else "integer",
        scale_type=str(fields["scale"].dtype).removeprefix("torch."),
        **fields,
    )


def grouping(layer: Layer, form: PackedForm) -> tuple[int, torch.Tensor | None]:
    """Return the group size, and the order of columns that makes groups contiguous if they are not.

    A group's columns may be any; the group size is then the largest that divides every group.
    """
    import torch

    stated = layer.option("group_size", int, None)
    if ".g_idx" not in layer:
        ordered = layer.option("desc_act", bool, False) and form.groups > 1
        layer.require(not ordered, "its part '.g_idx' is missing, the configuration says desc_act")
        return group_of(layer, form.k, form.groups, stated), None
    layer.require_type(".g_idx", "int32", "int64")
    index = layer.tensor(".g_idx").long()
    within = int(index.min()) >= 0 and int(index.max()) < form.groups
    layer.require(within, f"g_idx names a group beyond the {form.groups} that there are")
    group = group_of(layer, form.k, form.groups, stated) if _even(form, stated) else 1
    if torch.equal(index, torch.arange(form.k) // group):
        return group, None
    order = torch.argsort(index, stable=True)
    counts = torch.bincount(index, minlength=form.groups).tolist()
    used = [count for count in counts if count]
    return math.gcd(*used[:-1]) or used[-1], order.to(torch.int32)


def _even(form: PackedForm, stated: int | None) -> bool:
    return form.k % form.groups == 0 or bool(stated and stated > 0 and -(-form.k // stated) == form.groups)


def shape(layer: Layer) -> Shape:
    """Return [N, K]."""
    form = geometry(layer)
    return form.n, form.k


FORMAT = Format(
    "gptq",
    ".qweight",
    is_gptq,
    shape,
    read,
    methods=("gptq", *AUTO_ROUND),
    parts=(".scales", ".qzeros"),
    optional=(".g_idx",),
    dtype="scale",
    doc="GPTQ versions 1 and 2, 2 to 8 bits, desc_act, planar; AutoRound's auto_gptq",
)
