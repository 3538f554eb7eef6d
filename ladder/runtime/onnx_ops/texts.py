"""Operators of texts that the reference has otherwise: it drops accents and sets the process's locale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ladder.runtime.onnx_ops.operation import Operation, Run
from tile_types.errors import ShapeError


def _each(change: Callable[[str], str]) -> Callable[[str], str]:
    """Return a change of a text's letters, each to one letter, as C's are: those that become several stay."""

    def changed(text: str) -> str:
        pairs = ((letter, change(letter)) for letter in text)
        return "".join(new if len(new) == 1 else letter for letter, new in pairs)

    return changed


CASES: Mapping[str, Callable[[str], str]] = {
    "NONE": str,
    "LOWER": _each(str.lower),
    "UPPER": _each(str.upper),
}


def _normalized(op: Operation, x: Any) -> Any:
    """Leave out words that stop a text, and change the case of others; one empty word where none is left."""
    if x.ndim not in (1, 2) or (x.ndim == 2 and len(x) != 1):
        raise ShapeError(f"words have the shape {list(x.shape)}, not [C] or [1, C]")
    change = CASES[op.get("case_change_action", "NONE")]
    same = str if op.get("is_case_sensitive", 0) else CASES["LOWER"]
    stops = set(map(same, op.get("stopwords", ())))
    kept = [change(word) for word in map(str, x.ravel()) if same(word) not in stops] or [""]
    return np.array(kept, object).reshape(-1 if x.ndim == 1 else (1, -1))


TEXTS: Mapping[str, Run] = {"StringNormalizer": _normalized}
"""Operator -> what computes it."""
