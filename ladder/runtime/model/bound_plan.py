"""A plan whose inputs are bound to call arguments; all frames of an executable share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ladder.runtime.compile import compiled
from ladder.runtime.kernel import CompiledGemm
from ladder.runtime.model.arguments import CallArguments
from ladder.runtime.model.joined import Joined
from ladder.runtime.model.plan import ModelPlan


class BoundPlan:
    """A plan whose inputs are bound to arguments, on one device.

    plan: The steps.
    bindings: Input of the graph -> position among `values`; packed weights by `packs`.
    packs: Input of the graph that is a packed weight -> positions of its arrays.
    held: Input of the graph -> tensor that the program brings.
    results: As in `Program.results`.
    updates: As in `Program.updates`.
    kernels: Kernel -> its loaded entry.
    where: The device.
    joined: Arrays that are made of arguments; their positions follow those of the arguments.
    places: As in `Program.sizes`, complete; by default what the shapes of inputs show.
    Raises ShapeError if no argument shows a size that a step needs.
    """

    def __init__(
        self,
        plan: ModelPlan,
        bindings: Mapping[str, int],
        packs: Mapping[str, tuple[int, ...]],
        held: Mapping[str, torch.Tensor],
        results: Sequence[int | tuple[Any]],
        updates: Sequence[tuple[int, int]],
        kernels: Mapping[str, Any],
        where: torch.device,
        joined: Joined | None = None,
        places: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.plan = plan
        self.bindings, self.packs = dict(bindings), dict(packs)
        self.held = dict(held)
        self.results, self.updates = tuple(results), tuple(updates)
        self.kernels = kernels
        self.where = where
        self.joined = joined if joined is not None and joined.joins else None
        self.places = dict(places_of(plan, self.bindings) if places is None else places)
        """Symbolic size -> where a call shows it."""
        self.names = tuple(self.places)
        self.wanted = frozenset(item for item in self.results if isinstance(item, int))
        """Outputs of the graph that are results."""
        self.written = {
            output: self.bindings[plan.in_place[value]]
            for output, value in enumerate(plan.outputs)
            if plan.in_place.get(value) in self.bindings
        }
        """Output of the graph that a step writes into an argument -> that argument."""
        self.copied = [(at, output) for at, output in self.updates if self.written.get(output) != at]
        """Arguments that take outputs once all steps have run."""
        self.changed = sorted({*self.written.values(), *(at for at, _ in self.copied)})
        """Arguments that are written."""
        self.arguments = CallArguments(self.changed, are_open=bool(self.names))
        self.owned: dict[str, torch.Tensor] = {}
        """Input of the graph -> tensor that every call brings, as `own` was told."""
        self.constants: dict[str, Any] = {}
        """Value that no call changes -> tensor, as the first frame has computed it."""
        self.in_order: dict[Any, torch.Tensor] = {}
        """(Input of the graph that stays, how it is stored) -> the matrix in panels, for row kernels."""
        self.layers: dict[str, tuple[Any, ...]] = {}
        """Recurrent weight that stays -> the weights of its layer as kernels take them."""
        self.operators: dict[str, CompiledGemm] = {}
        """Request -> kernels of a quantized product that came with the plan; others are found or built."""

    def operator(self, request: str) -> CompiledGemm:
        """Return the kernels of a quantized product."""
        return self.operators.get(request) or compiled(request, self.where)

    def is_recorded(self) -> bool:
        """Tell whether what this thread launches goes into a CUDA graph."""
        return self.where.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def own(self, first: int, stored: Sequence[torch.Tensor | None]) -> None:
        """Take the tensors that follow the first arguments of every call: constants, if nothing is written.

        first: Position of the first of them.
        stored: The tensors; the same objects in each call.
        """
        if self.changed:
            return
        values: list[Any] = [*[None] * first, *stored]
        if self.joined is not None and min(self.joined.read, default=first) >= first:
            values += self.joined.settle(values)
        self.owned = {
            name: values[at].detach()
            for name, at in self.bindings.items()
            if first <= at < len(values) and values[at] is not None
        }

    def unused(self) -> BoundPlan:
        """Return the same plan and kernels for arguments of their own."""
        joined = Joined(self.joined.joins) if self.joined is not None else None
        program = (self.plan, self.bindings, self.packs, self.held, self.results, self.updates)
        found = BoundPlan(*program, self.kernels, self.where, joined, self.places)
        found.operators = self.operators
        return found

    def weights(self) -> set[int]:
        """Return the positions of packed weights, and of what arrays are made of."""
        made_of = () if self.joined is None else self.joined.read
        return {*made_of, *(at for found in self.packs.values() for at in found)}

    def made_from(self, values: Sequence[Any]) -> int:
        """Return the position of the first argument that is made of others."""
        return len(values) - (len(self.joined.arrays) if self.joined is not None else 0)


def places_of(plan: ModelPlan, bindings: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return symbolic size -> (argument, axis) that shows it, from the shapes of a plan's inputs."""
    found: dict[str, tuple[int, int]] = {}
    for name, at in bindings.items():
        for axis, extent in enumerate(plan.tiles[name].shape):
            if isinstance(extent, str) and extent.isidentifier():
                found.setdefault(extent, (at, axis))
    return found
