"""The weight of a quantized layer in a state dict: arrays beside a text that says what they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from ladder.runtime.packed import PackedWeight
from tile_types import QuantizedTensor
from tile_types.errors import LadderError

WEIGHT, PACKED = "weight.", "packed."
"""Prefixes of canonical and of packed weights in a state dict."""

COLUMNS = "columns"
"""Key, after the prefix of packed weights, of the order of columns."""

DESCRIPTION = "description"
"""Key, after the prefix, of the JSON text (as uint8) that says what the arrays are."""


def state_of(weight: QuantizedTensor) -> dict[str, Any]:
    """Return what a state dict has of a canonical weight."""
    kept = weight.to_dict()
    return {**kept["arrays"], DESCRIPTION: _as_bytes(json.dumps(kept["metadata"]))}


def state_of_packed(packed: PackedWeight, columns: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return what a state dict has of a packed weight."""
    arrays = dict(zip(packed.arrays, packed.buffers, strict=True))
    order = {} if columns is None else {COLUMNS: columns}
    return {**arrays, **order, DESCRIPTION: _as_bytes(packed.describe())}


def _as_bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).clone()


def keys_of(state: Mapping[str, Any], prefix: str) -> set[str]:
    """Return the keys of a layer's weight in a state dict."""
    return {key for key in state if key.startswith((prefix + WEIGHT, prefix + PACKED))}


def copied(value: Any) -> Any:
    """Return a copy of a tensor, as a layer keeps it that is not told to take those that it is given."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def load(layer: Any, state: Mapping[str, Any], prefix: str, missing: list[str], errors: list[str]) -> None:
    """Let a layer take its weight from a state dict, in either form; what is wrong is added to the lists."""
    for form in (WEIGHT, PACKED):
        begin = prefix + form
        arrays = {key[len(begin) :]: value for key, value in state.items() if key.startswith(begin)}
        description = arrays.pop(DESCRIPTION, None)
        if description is None:
            continue
        try:
            text = bytes(description.cpu().tolist()).decode()
            if form == WEIGHT:
                stored = {"arrays": arrays, "metadata": json.loads(text)}
                layer.set_weight(QuantizedTensor.from_dict(stored))
            else:
                layer.set_packed(PackedWeight.from_arrays(text, arrays), arrays.get(COLUMNS))
        except LadderError as error:
            errors.append(f"{prefix}weight: {error}")
        except (ValueError, KeyError) as error:
            errors.append(f"{prefix}weight: its description is damaged: {error!r}")
        return
    missing.append(prefix + WEIGHT + DESCRIPTION)
