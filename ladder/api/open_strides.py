"""How the results of a graph of open sizes lie, for the sizes of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from ladder.capture.values.aliasing import Strides, flat, strides_from

Values = Sequence[Any]


class OpenStrides:
    """Strides of results as expressions of the sizes of arguments.

    results: Fakes of what the graph returns for `opened`.
    opened: Fakes of its arguments, with symbols for sizes.
    Raises KeyError if strides depend on what is no size of an argument.
    """

    def __init__(self, results: Any, opened: Values) -> None:
        self.sources = _sources(opened)
        """Name of a symbol -> function of the arguments that gives it."""
        self.rows = [_row_of(value, self.sources) for value in flat(results)]
        """Function of the symbols' values, and the symbols, for each result that is a strided tensor."""

    def of(self, inputs: Values, at: int) -> Strides | None:
        """Return how a result lies; None for what is no strided tensor."""
        row = self.rows[at]
        if row is None:
            return None
        function, names = row
        shape, steps, offset, nbytes, item = function(*(self.sources[name](inputs) for name in names))
        return strides_from(shape, steps, offset, nbytes // item)


def _sources(opened: Values) -> dict[str, Callable[[Values], int]]:
    found: dict[str, Callable[[Values], int]] = {}

    def note(number: Any, source: Callable[[Values], int]) -> None:
        if isinstance(number, torch.SymInt) and number.node.expr.is_Symbol:
            found.setdefault(str(number.node.expr), source)

    for at, value in enumerate(opened):
        note(value, lambda inputs, at=at: inputs[at])  # type: ignore[misc]
        if isinstance(value, torch.Tensor):
            for axis, extent in enumerate(value.shape):
                note(extent, lambda inputs, at=at, axis=axis: inputs[at].shape[axis])  # type: ignore[misc]
    return found


def _row_of(value: Any, sources: dict[str, Any]) -> tuple[Callable[..., Any], tuple[str, ...]] | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
        return None
    symbols: set[str] = set()

    def text(number: Any) -> str:
        if not isinstance(number, torch.SymInt):
            return str(int(number))
        from torch.utils._sympy.printers import PythonPrinter

        symbols.update(map(str, number.node.expr.free_symbols))
        return str(PythonPrinter().doprint(number.node.expr))

    lists = [f"({''.join(text(number) + ', ' for number in each)})" for each in (value.shape, value.stride())]
    rest = [value.storage_offset(), value.untyped_storage().nbytes(), value.element_size()]
    body = ", ".join([*lists, *map(text, rest)])
    names = tuple(sorted(symbols))
    for name in names:
        sources[name]
    space: dict[str, Any] = {}
    exec(f"import math, torch\ndef lies({', '.join(names)}):\n    return {body}\n", space)
    return space["lies"], names
