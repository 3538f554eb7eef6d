"""Why graphs cannot be traced with fake tensors, in a sentence."""

from __future__ import annotations

from textwrap import shorten

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

MOST_TOLD = 300
"""Characters of another error that are told."""


def untraceable(error: Exception) -> str:
    """Return why a graph cannot be traced without values, from the error that its tracing raised."""
    if isinstance(error, DynamicOutputShapeException):
        return f"the sizes of what {error.func} gives depend on values"
    if isinstance(error, DataDependentOutputException):
        return f"{error.func} reads values, and graphs are traced without values"
    if isinstance(error, GuardOnDataDependentSymNode):
        return f"a shape or a decision depends on values: {error.cond}"
    if "its data is not allocated" in str(error):  # torch's RuntimeError has no class of its own
        return "an operator reads values, and graphs are traced without values"
    why = shorten(str(error), MOST_TOLD, placeholder=" ...")
    return f"the graph cannot be traced: {type(error).__name__}: {why}"
