"""A whole model ready to run: what it takes by name, the plan, and the tensors that it keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch

from ladder.ir.extents import size_names
from ladder.ir.graph import Graph
from ladder.runtime.fields import UNPICKLED, refuse_contradiction
from ladder.runtime.model.executable import Executable
from ladder.runtime.model.plan import ModelPlan
from ladder.runtime.model.sizes import Sizes, evaluator
from ladder.runtime.model.structure import Structure, build, collect, tensors_taken
from tile_types.errors import DTypeError, OutOfRangeError, ShapeError, unknown_name
from tile_types.tile import Extent

Limits = tuple[tuple[Extent, Extent], ...]

OUTSIDE = "out of DATA bounds"
"""What torch says, in a plain RuntimeError, of an index into rows without elements."""


@dataclass(frozen=True)
class WholeModel:
    """A model that needs neither its source nor a compiler; call it as the model that it was made from.

    graph: The simplified tile graph.
    executable: The plan, bound to its kernels. Its arguments are the tensors of a call, then ``stored``.
    parameters: Name -> structure of what a call takes, in order.
    results: Structure of what it returns, over the plan's results, then its arguments.
    stored: The tensors that it keeps: weights, packed for the device, and state that it changes in place;
        None where nothing reads one.
    limits: Pairs (extent, at most) of symbolic sizes.
    libraries: Kernel of a chain -> its library on disk; None for a model that was loaded from a file.
    """

    graph: Graph
    executable: Executable
    parameters: Mapping[str, Structure]
    results: Structure
    stored: Sequence[torch.Tensor | None]
    limits: Limits = ()
    libraries: Mapping[str, Path] | None = None

    def __post_init__(self) -> None:
        """Let the plan know what it brings itself."""
        self.executable.bound.own(tensors_taken(self.parameters), self.stored)

    def __copy__(self) -> WholeModel:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeModel:
        """Return a model of the same kernels with tensors of its own: its state is not this one's."""
        executable = Executable(self.executable.bound.unused())
        return replace(self, executable=executable, stored=copy.deepcopy([*self.stored], memo))

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled."""
        raise DTypeError(UNPICKLED)

    def prepare(self) -> None:
        """Bind the plan to memory, as the first call would."""
        self.executable.prepare()

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        """Run.

        Raises ShapeError, DTypeError if an argument does not fit, the message names it; OutOfRangeError if an
        index lies outside of its axis.
        """
        given = self._tensors(arguments, named)
        values = [*given, *self.stored]
        sizes = self.executable.check(values, len(given), self._check_limits if self.limits else None)
        try:
            computed = self.executable.call(values, sizes)
        except Exception as error:
            if isinstance(error, IndexError) or OUTSIDE in str(error):
                raise OutOfRangeError(
                    f"an index lies outside of the axis that it picks from ({error})"
                ) from error
            if self.libraries is None:
                refuse_contradiction(error)
            raise
        return self._result(computed, values)

    def _result(self, computed: tuple[Any, ...], values: Sequence[Any]) -> Any:
        if self._are_results:
            return computed[0] if "tensor" in self.results else computed
        return build(self.results, (*computed, *values))

    @property
    def where(self) -> torch.device:
        return self.executable.where

    @property
    def steps(self) -> ModelPlan:
        return self.executable.plan

    def plan(self) -> str:
        """Return the plan as text: one line per step, with what executes it."""
        return str(self.executable.plan)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that it keeps."""
        kept = {id(tensor): tensor for tensor in self.stored if tensor is not None}
        return sum(tensor.nbytes for tensor in kept.values())

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.parameters)

    @cached_property
    def _are_tensors(self) -> bool:
        """Whether every parameter is a tensor, in order."""
        return list(self.parameters.values()) == [{"tensor": at} for at in range(len(self.parameters))]

    @cached_property
    def _are_results(self) -> bool:
        """Whether it returns what the plan computes, in order."""
        count = len(self.executable.bound.results)
        several = {"tuple": [{"tensor": at} for at in range(count)]}
        return self.results in (several, {"tensor": 0} if count == 1 else several)

    def _tensors(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Any]:
        """Return the tensors of a call, in order."""
        if self._are_tensors and not named and len(arguments) == len(self.names):
            return arguments
        if self._are_tensors and not arguments and named.keys() == self.parameters.keys():
            return [named[name] for name in self.names]
        given = by_name(self.names, arguments, named)
        if self._are_tensors:
            return list(given.values())
        found: dict[int, Any] = {}
        for name, value in given.items():
            collect(self.parameters[name], value, found, name)
        return [found[at] for at in range(len(found))]

    @cached_property
    def _bounds(self) -> tuple[Limits, Callable[[Sizes], tuple[int, ...]]]:
        """The limits that calls show the sizes of, and what gives both numbers of each."""
        names = self.executable.bound.names
        shown = tuple(pair for pair in self.limits if set(size_names(pair)) <= set(names))
        return shown, evaluator(tuple(extent for pair in shown for extent in pair), names)

    def _check_limits(self, sizes: Sizes) -> None:
        limits, numbers = self._bounds
        found = numbers(sizes)
        for (extent, most), size, bound in zip(limits, found[::2], found[1::2], strict=True):
            if size > bound:
                raise ShapeError(f"the model needs {extent} <= {most}, this call has {size} and {bound}")


def by_name(names: Sequence[str], arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, in order.

    Raises ShapeError, UnknownNameError if there are too many, too few, or others.
    """
    if len(arguments) > len(names):
        raise ShapeError(f"this model takes {', '.join(names)}, got {len(arguments)} arguments")
    given = dict(zip(names, arguments, strict=False))
    for name, value in named.items():
        if name not in names:
            raise unknown_name("input", name, names)
        if name in given:
            raise ShapeError(f"{name} is given twice")
        given[name] = value
    missing = [name for name in names if name not in given]
    if missing:
        raise ShapeError(f"this model also takes {', '.join(missing)}")
    return {name: given[name] for name in names}
