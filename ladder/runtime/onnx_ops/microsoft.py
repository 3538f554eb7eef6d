"""Operators of the domain com.microsoft, which exported and quantised language models contain."""

from __future__ import annotations

from collections.abc import Mapping

from ladder.runtime.onnx_ops.operation import Run

MICROSOFT: Mapping[str, Run] = {}
"""Operators of com.microsoft."""
