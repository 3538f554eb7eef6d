"""Assignment of call arguments to the slots of a plan; parameters stay assigned between calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ladder.runtime.snapshot import Snapshot, identical


class FrameArguments:
    """The arguments of one frame.

    inputs: (slot, position) of each argument that the plan reads.
    plain: Position -> a parameter, and what steps get for it: the same tensor, whatever sizes they are for.
    """

    def __init__(self, inputs: Sequence[tuple[int, int]], plain: dict[int, tuple[Any, Any]]) -> None:
        self.inputs, self.plain = tuple(inputs), plain
        self.moving = self.inputs
        """Those that are put into their slots in every call."""
        self.staying: list[int] = []
        """Positions of parameters, and of what is made of them."""
        self.known: list[Any] | None = None
        self.addresses: list[int] = []
        self.snapshot = Snapshot()

    def put(self, values: Sequence[Any], slots: list[Any], made: int) -> None:
        """Fill the slots: kernels take plain tensors, not parameters.

        values: The arguments of a call.
        slots: Of the frame.
        made: Position of the first argument that is made of others.
        """
        known, staying = self.known, self.staying
        if known is None or (staying and not self._stay([values[at] for at in staying], known)):
            self._learn(values, slots, made)
        for slot, at in self.moving:
            value = values[at]
            slots[slot] = value.detach() if value.requires_grad else value

    def drop(self, slots: list[Any]) -> None:
        """Forget what may be another tensor in the next call."""
        for slot, _ in self.moving:
            slots[slot] = None

    def _stay(self, given: list[Any], known: list[Any]) -> bool:
        return self.snapshot.confirm(
            given,
            lambda: identical(given, known) and [*map(torch.Tensor.data_ptr, given)] == self.addresses,
        )

    def _learn(self, values: Sequence[Any], slots: list[Any], made: int) -> None:
        stays = [(slot, at) for slot, at in self.inputs if at >= made or values[at].requires_grad]
        self.moving = tuple(pair for pair in self.inputs if pair not in stays)
        self.staying = [at for _, at in stays]
        self.known = [values[at] for at in self.staying]
        self.addresses = [*map(torch.Tensor.data_ptr, self.known)]
        self.snapshot = Snapshot()
        for slot, at in stays:
            slots[slot] = self._plain(at, values[at])

    def _plain(self, at: int, value: Any) -> Any:
        """Return a parameter as a tensor that asks for no gradient."""
        if not value.requires_grad:
            return value
        parameter, found = self.plain.get(at, (None, value))
        if parameter is not value or found.data_ptr() != value.data_ptr():
            found = value.detach()
            self.plain[at] = value, found
        return found
