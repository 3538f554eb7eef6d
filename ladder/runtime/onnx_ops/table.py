"""All ONNX operators that torch computes, and those that the standard's reference computes."""

from __future__ import annotations

from collections.abc import Mapping

from ladder.runtime.onnx_ops.casts import CASTS
from ladder.runtime.onnx_ops.classical import CLASSICAL
from ladder.runtime.onnx_ops.elementwise import ELEMENTWISE
from ladder.runtime.onnx_ops.microsoft import MICROSOFT
from ladder.runtime.onnx_ops.microsoft_attention import ATTENTION
from ladder.runtime.onnx_ops.microsoft_blocks import BLOCKS
from ladder.runtime.onnx_ops.microsoft_states import STATES
from ladder.runtime.onnx_ops.microsoft_tokens import TOKENS
from ladder.runtime.onnx_ops.moves import MOVES
from ladder.runtime.onnx_ops.operation import Run
from ladder.runtime.onnx_ops.quantized import QUANTIZED
from ladder.runtime.onnx_ops.recurrent import RECURRENT
from ladder.runtime.onnx_ops.reductions import REDUCTIONS
from ladder.runtime.onnx_ops.reference import REFERENCE
from ladder.runtime.onnx_ops.resize import RESIZES
from ladder.runtime.onnx_ops.sequences import MAPS, SEQUENCES
from ladder.runtime.onnx_ops.signals import SIGNALS
from ladder.runtime.onnx_ops.texts import TEXTS
from ladder.runtime.onnx_ops.trees import TREES
from ladder.runtime.onnx_ops.vision import VISION
from ladder.runtime.onnx_ops.windows import WINDOWS

TABLE: Mapping[str, Run] = {
    **ELEMENTWISE, **CASTS, **MOVES, **REDUCTIONS, **WINDOWS, **RECURRENT, **RESIZES, **VISION, **SIGNALS,
    **SEQUENCES, **MICROSOFT, **ATTENTION, **STATES, **TOKENS, **BLOCKS, **QUANTIZED, **REFERENCE,
    **MAPS, **TREES, **CLASSICAL, **TEXTS,
}  # fmt: skip
"""Operator, with its domain where it is not ONNX's own -> what computes it."""


def key_of(domain: str, operator: str) -> str:
    """Return the key of an operator in `TABLE`."""
    return operator if domain in ("", "ai.onnx") else f"{domain}::{operator}"
