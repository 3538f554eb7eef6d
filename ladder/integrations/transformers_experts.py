"""Experts of transformers in checkpoints: the names of their stacked weights, or of the parts of these."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from ladder.api.stacked_experts import DOWN, GATED, HOME, UP, home_of
from tile_types import QuantizedTensor
from tile_types.shards import joined

MEMBERS = {
    GATED: (("w1", "w3"), ("gate_proj", "up_proj")),
    UP: (("up_proj",),),
    DOWN: (("w2",), ("down_proj",)),
}
"""Stacked weight -> names that checkpoints give its parts in a folder per expert, by family of models."""


def sources(stack: str, experts: int, prefix: str, known: Container[str]) -> list[str]:
    """Return the names that a checkpoint has a stacked weight by: one, or one per part of each expert.

    stack: Its path below the module.
    experts: E.
    prefix: Name of the module.
    known: Names in the checkpoint.
    Returns: Empty if it has none, or not all of them.
    """
    whole = [
        name
        for name in (
            f"{prefix}.{path}" for path in (stack, f"{stack}.weight", f"{HOME}.{home_of(stack)}.weight")
        )
        if name in known
    ]
    families = [
        [f"{prefix}.{expert}.{member}.weight" for expert in range(experts) for member in members]
        for members in MEMBERS.get(stack, ())
    ]
    complete = (names for names in families if all(name in known for name in names))
    return whole[:1] or next(complete, [])


def matrix_of(loaded: Iterable[Any]) -> QuantizedTensor:
    """Return the matrix ``[E * N, K]`` of a stacked weight from what its `sources` hold."""
    return joined([matrix for part in loaded for matrix in (part if isinstance(part, tuple) else (part,))])
