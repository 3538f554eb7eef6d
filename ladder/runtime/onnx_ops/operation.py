"""One node of an ONNX graph, as the functions that compute it take it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tile_types.errors import ShapeError


@dataclass(frozen=True)
class Operation:
    """One node without its operands.

    name: Of the operator, ``"domain::Name"`` outside of ONNX's own domain.
    version: Of the set of operators.
    given: Attributes; text is ``str``, tensors are values, graphs are callables.
    count: Results that the node names.
    """

    name: str
    version: int
    given: Mapping[str, Any] = field(default_factory=dict)
    count: int = 1
    _made: list[Any] = field(default_factory=list, compare=False, repr=False)

    def get(self, name: str, default: Any = None) -> Any:
        return self.given.get(name, default)

    def require(self, **given: Any) -> None:
        """Raise unless attributes that are stated have these values, the only ones that are supported.

        Raises ShapeError: Names those that do not.
        """
        other = [
            f"{name}={self.get(name)!r}" for name, value in given.items() if self.get(name, value) != value
        ]
        if other:
            raise ShapeError(f"{self.name} with {', '.join(other)} is not supported")

    def once(self, make: Callable[[], Any]) -> Any:
        """Return what a row makes of the attributes alone; it is made in the first call."""
        if not self._made:
            self._made.append(make())
        return self._made[0]

    def axes(self, operand: Any, name: str = "axes") -> list[int] | None:
        """Return integers from an operand or, as older versions have it, from an attribute."""
        if operand is not None:
            return [int(value) for value in (operand if operand.ndim == 1 else operand.reshape(-1)).tolist()]
        found = self.given.get(name)
        return None if found is None else [int(value) for value in found]


Run = Callable[..., Any]
"""``(operation, *operands) -> value``, or a tuple of values; operands that are left out are None."""
