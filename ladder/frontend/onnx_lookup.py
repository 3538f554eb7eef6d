"""Lookup of a node's table row by operator and version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ladder.frontend.onnx_call import Row, title
from ladder.frontend.onnx_microsoft import MICROSOFT
from ladder.frontend.onnx_models import ROWS
from ladder.runtime.model.program import ImportRefused
from ladder.runtime.onnx_ops.evaluate import is_known
from ladder.runtime.onnx_ops.table import TABLE, key_of
from tile_types.errors import unknown_name

OLDEST = 13
"""Version from which on all rows hold; before it, those but `SINCE_13`."""

SINCE_13 = frozenset(
    (
        *("Attention", "CastLike", "DequantizeLinear", "Gelu", "GroupNormalization", "LayerNormalization"),
        *("QuantizeLinear", "Range", "Swish", "TopK", "Trilu"),
    )
)
"""Operators whose rows hold from `OLDEST` on only; those of the others hold from version 7 on."""

LENIENT: Mapping[str, Callable[[Any], Any]] = {
    "Range": lambda array: array.reshape(()) if array.size == 1 else array
}
"""Operators whose operands exporters write as vectors of one element, where the standard wants numbers."""


TABLES: Mapping[str, Mapping[str, Row]] = {"": ROWS, "ai.onnx": ROWS, "com.microsoft": MICROSOFT}
"""Domain -> operator -> row."""


def row_holds(node: Any, version: int) -> bool:
    """Tell whether a node's row is for the version that a model states."""
    return bool(node.domain) or version >= OLDEST or (version >= 7 and node.op_type not in SINCE_13)


def find_row(node: Any, versions: Mapping[str, int]) -> Row | None:
    """Return the row of a node's operator; None if torch has to run it.

    Raises ImportRefused if nothing runs it; the nearest names are suggested.
    """
    found = TABLES.get(node.domain, {}).get(node.op_type)
    if found is None and not is_known(node, versions):
        raise unknown_row(node)
    return found


def unknown_row(node: Any, why: str = "") -> ImportRefused:
    """Return the error for an operator that nothing runs."""
    if why and node.domain in ("", "ai.onnx"):
        return ImportRefused(f"{title(node)}: {why}")
    domains = {key.partition("::")[0] for key in TABLE if "::" in key}
    if node.domain not in ("", "ai.onnx", *domains):
        return ImportRefused(
            f"{title(node)}: operators of the domain {node.domain!r} are not known here; those of ONNX's own"
            f" and of {', '.join(sorted(domains))} are. Export the model without them, or with"
            " functions that define them"
        )
    name = key_of(node.domain, node.op_type)
    return ImportRefused(f"{title(node)}: {unknown_name('ONNX operator', name, (*ROWS, *TABLE))}")
