"""Models of several stages: plans, and nodes between them that torch runs with the shapes of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ladder.ir.extents import match_shape
from ladder.ir.graph import Graph
from ladder.runtime.model.executable import MOST_FITTING
from ladder.runtime.model.whole import WholeModel, by_name
from ladder.runtime.onnx_ops.evaluate import BoundNode, run_node
from ladder.runtime.onnx_ops.specialized import Specialized
from ladder.runtime.onnx_ops.values import code_of, given_value
from tile_types.errors import DTypeError, LadderError, ShapeError
from tile_types.tile import Extent


@dataclass(frozen=True)
class Wanted:
    """Requirements on one input.

    kind: ``"tensor"``, ``"sequence"`` or ``"optional"``.
    code: ONNX element type of a tensor; 0 for any.
    shape: Its extents; None for any.
    """

    kind: str
    code: int = 0
    shape: tuple[Extent, ...] | None = None


@dataclass(frozen=True)
class PlanStage:
    """A plan and the values that it reads and makes, by name."""

    plan: WholeModel
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def run(self, values: dict[str, Any]) -> None:
        """Compute results from values of the call."""
        found = self.plan(*[values[name] for name in self.reads])
        results = (found,) if len(self.writes) == 1 else found
        for name, value in zip(self.writes, results, strict=True):
            values[name] = value


@dataclass(frozen=True)
class TorchStage:
    """A node that torch runs, and the values that it reads, also within its graphs."""

    node: BoundNode
    reads: tuple[str, ...]
    why: str

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of its results."""
        return self.node.writes

    def run(self, values: dict[str, Any]) -> None:
        """Compute results from values of the call."""
        run_node(self.node, values)


@dataclass(frozen=True)
class IfStage(TorchStage):
    """A node that runs one of two graphs: each is a model, made when it is first taken.

    node, reads, why: As of any; the node runs a branch that cannot be a model.
    make: Condition -> the model of its branch for any shapes, None if it can be none.
    special: Condition -> the branch for the shapes that it is first taken with.
    handed: Condition -> the values that its branch only hands on; None if it computes any.
    """

    make: Callable[[bool], WholeModel | StagedModel | None]
    special: Mapping[bool, Specialized]
    handed: Mapping[bool, tuple[str, ...] | None]

    @cached_property
    def _made(self) -> dict[bool, WholeModel | StagedModel | None]:
        return {}

    def run(self, values: dict[str, Any]) -> None:
        taken = bool(values[self.node.reads[0]])
        handed = self.handed[taken]
        if handed is not None:
            for made, name in zip(self.writes, handed, strict=True):
                values[made] = values[name]
            return
        special = self.special[taken]
        given = [values[name] for name in special.names]
        model = special.of(given)
        if model is None:
            if taken not in self._made:
                self._made[taken] = self.make(taken)
            model = self._made[taken]
            if model is None:
                run_node(self.node, values)
                return
            given = [values[name] for name in model.names]
        found = model(*given)
        results = found if len(self.writes) > 1 else (found,)
        values.update(zip(self.writes, results, strict=True))


@dataclass(frozen=True)
class StagedModel:
    """A model of several stages; call it with its inputs, by position or by name.

    inputs: Name -> what it must be.
    outputs: Names.
    stages: In order.
    stored: Values that it brings, by name.
    title: For messages.
    """

    inputs: Mapping[str, Wanted]
    outputs: tuple[str, ...]
    stages: Sequence[PlanStage | TorchStage]
    stored: Mapping[str, Any]
    where: torch.device
    title: str

    def prepare(self) -> None:
        """Bind the plans to memory, as the first call would."""
        for stage in self.stages:
            if isinstance(stage, PlanStage):
                stage.plan.prepare()

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        """Run.

        Returns: The output, or a tuple of them: tensors; of types that torch does not compute in, arrays of
            numpy; sequences are lists, missing optional values None.
        Raises ShapeError, DTypeError if an argument does not fit; the message names it.
        Raises LadderError if a node cannot be computed of what is there; the message names it.
        """
        if arguments or named.keys() != self.inputs.keys():
            named = by_name(self.names, arguments, named)
        seen = self._seen(named)
        if seen in self._tensors:
            return self._run(named)
        given = {name: given_value(value) for name, value in named.items()}
        found = self.of(given)
        if all(given[name] is value for name, value in named.items()):
            self._remember(self._tensors, seen)
        return found

    def of(self, given: Mapping[str, Any]) -> Any:
        """Run, as a call does, with values by name."""
        seen = self._seen(given)
        if seen not in self._fitting:
            require_wanted(self.inputs, given)
            self._remember(self._fitting, seen)
        return self._run(given)

    def _run(self, given: Mapping[str, Any]) -> Any:
        values = {**self.stored, **given}
        for stage, dead in self._order:
            stage.run(values)
            for name in dead:
                values.pop(name, None)
        found = tuple(values[name] for name in self.outputs)
        return found[0] if len(found) == 1 else found

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.inputs)

    @cached_property
    def _order(self) -> list[tuple[PlanStage | TorchStage, tuple[str, ...]]]:
        """The stages, each with the values that nothing reads after it, but for those that stay anyway."""
        seen, found = {*self.outputs, *self.stored}, []
        for stage in reversed(self.stages):
            names = {*stage.reads, *stage.writes} - seen
            seen |= names
            found.append((stage, tuple(names)))
        return found[::-1]

    @cached_property
    def _fitting(self) -> set[tuple[Any, ...]]:
        """Types and shapes of inputs that fitted."""
        return set()

    @cached_property
    def _tensors(self) -> set[tuple[Any, ...]]:
        """Those of them that are values as they are given."""
        return set()

    def _seen(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple([_form(values[name]) for name in self.names])

    def _remember(self, known: set[tuple[Any, ...]], seen: tuple[Any, ...]) -> None:
        if len(known) >= MOST_FITTING:
            known.clear()
        known.add(seen)

    @property
    def graph(self) -> Graph:
        """Of a model of several stages there is none.

        Raises LadderError: Always.
        """
        raise LadderError(f"{self.title} has several tile graphs: see plan()")

    def plan(self) -> str:
        """Return the stages as text: one line per step, with what executes it."""
        parts = []
        for stage in self.stages:
            if isinstance(stage, PlanStage):
                parts.append(stage.plan.plan())
            else:
                parts.append(
                    f"{'node':8} {'torch, with the shapes of a call':44} {stage.node.title}  [{stage.why}]"
                )
        return "\n".join(parts)


def require_wanted(inputs: Mapping[str, Wanted], values: Mapping[str, Any]) -> None:
    """Raise unless values of a call are what a model takes.

    Raises ShapeError, DTypeError if one does not fit; the message names it.
    """
    sizes: dict[str, int] = {}
    for name, wanted in inputs.items():
        value = values[name]
        if wanted.kind != "tensor":
            if wanted.kind == "sequence" and not isinstance(value, list):
                raise ShapeError(f"input {name!r} must be a sequence, got {type(value).__name__}")
            continue
        if not hasattr(value, "dtype"):
            raise ShapeError(f"input {name!r} must be a tensor, got {type(value).__name__}")
        if wanted.code and code_of(value) != wanted.code:
            raise DTypeError(f"input {name!r} must have ONNX's type {wanted.code}, got {value.dtype}")
        if wanted.shape is not None:
            match_shape(wanted.shape, value.shape, f"input {name!r}", sizes)


def _form(value: Any) -> tuple[Any, ...]:
    return type(value), getattr(value, "shape", None), getattr(value, "dtype", None)
