"""Aliasing and strides of the results of a plan: they are made what they are in the program.

Plans compute equal expressions once, drop copies, write into copies of what a program writes in place, and
lay out what they compute as kernels want it. A caller may write into what it gets, ask for strides and
count writes, so all of that must be what it is in the program. What a plan writes is written last, so where
arguments lie in each other's memory it is not run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch._dispatch.python
import torch.fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ladder.api.shared_results import Group, groups_apart, in_place_of, together
from ladder.api.surroundings import kept_state
from ladder.capture.values.aliasing import (
    Aliasing,
    Strides,
    aliasing_of,
    flat,
    strides_from,
    strides_of,
    version_of,
)
from ladder.capture.values.fakes import fake_in
from ladder.capture.values.tensors import random_states, restore_random
from ladder.interrupts import pass_on
from ladder.runtime.model.library import UnlikeItsFakeError
from ladder.runtime.model.program import ImportRefused
from ladder.runtime.model.results import ArgumentPart

if TYPE_CHECKING:
    from ladder.runtime.model.arguments import Look
    from ladder.runtime.model.executable import Executable


log = logging.getLogger("ladder.model")

set_versions: Any = torch._C._autograd._unsafe_set_version_counter
"""``(tensors, numbers)``: set how often tensors were written."""


def expected_aliasing(module: torch.fx.GraphModule, examples: list[Any]) -> Aliasing:
    """Return which results of a graph share memory: as capture saw it, or by a run on fakes."""
    known: Aliasing | None = module.meta.get("aliasing")
    if known is not None:
        return known
    mode, fakes = without_values(examples)
    before = [version_of(value) for value in fakes]
    results = _computed(module.forward, mode, fakes)
    writes = before != [version_of(value) for value in fakes]
    return aliasing_of(fakes, results, writes=writes, before=before)


def results_of(module: torch.fx.GraphModule, examples: list[Any]) -> list[torch.Tensor]:
    """Return fakes of the tensors that a graph returns."""
    mode, fakes = without_values(examples)
    found = flat(_computed(module.forward, mode, fakes))
    return [value for value in found if isinstance(value, torch.Tensor)]


def open_strides(module: torch.fx.GraphModule, opened: list[Any]) -> OpenStrides:
    """Return how the results of a graph lie, by the sizes of its arguments.

    Raises ImportRefused if that does not follow from sizes alone.
    """
    mode, fakes = without_values(opened)
    results = _computed(module.forward, mode, fakes)
    try:
        return OpenStrides(results, fakes)
    except KeyError as error:
        raise ImportRefused(f"how results lie depends on {error}, which is no size of an argument") from None


def strides_for(run: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Strides | None, ...]:
    """Return how the results of a function lie for the sizes of these inputs."""
    mode, fakes = without_values(list(inputs))
    return tuple(map(strides_of, flat(_computed(run, mode, fakes))))


def _computed(run: Callable[..., Any], mode: FakeTensorMode, fakes: Sequence[Any]) -> Any:
    """Return the results of a function on fake tensors; state of torch that it writes is restored."""
    dispatched = torch._dispatch.python.enable_python_dispatcher()  # open sizes: not all of C++ takes them
    with kept_state(), mode, dispatched:
        return run(*fakes)


def without_values(examples: list[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """Return fakes of examples, those that are fakes as they are, and the mode under which they compute."""
    given = (value.fake_mode for value in examples if isinstance(value, FakeTensor))
    mode = next(given, None) or detect_fake_mode(examples) or FakeTensorMode()
    real = (torch.Tensor, torch.nn.Parameter)
    return mode, [fake_in(mode, value) if type(value) in real else value for value in examples]


def _owned(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory that is no view."""
    return value.data


def _viewed(value: torch.Tensor) -> torch.Tensor:
    return value.view_as(value)


def lies_as(value: Any, expected: Strides | None) -> bool:
    """Say whether a result lies as the program's; strides along one element say nothing."""
    if expected is None or not isinstance(value, torch.Tensor) or not value.numel():
        return True
    if (value.is_conj(), value.is_neg()) != (expected.conjugated, expected.negated):
        return False
    steps = expected.steps
    if expected.order is not None:
        steps = of_order(expected, value.shape, value.new_empty((0,), device="meta")).stride()
    pairs = zip(value.shape, value.stride(), steps, strict=True)
    return all(size == 1 or mine == its for size, mine, its in pairs)


def of_order(
    expected: Strides, shape: Sequence[int], like: torch.Tensor, values: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a tensor, of given values if there are any, whose axes lie in the order of the program's."""
    once = [1 if axis in expected.repeated else size for axis, size in enumerate(shape)]
    made = torch.empty_permuted(once, expected.order or (), dtype=like.dtype, device=like.device)
    if values is not None:
        made.copy_(values[tuple(map(slice, once))])
    return made.expand(shape) if expected.repeated else made


def relaid(expected: Strides, value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a result that lies as the program's, also conjugated or negated where it is read."""
    if expected.conjugated:
        return relaid(expected._replace(conjugated=False), value.conj()).conj()
    if expected.negated:
        return torch._neg_view(relaid(expected._replace(negated=False), torch._neg_view(value)))
    if expected.order is not None:
        return of_order(expected, value.shape, value, value)
    whole = torch.empty(expected.reach, dtype=value.dtype, device=value.device)
    return whole.as_strided(value.shape, expected.steps, expected.offset).copy_(value)


def parts_of_arguments(
    expected: Aliasing, examples: Sequence[Any], written: Iterable[int]
) -> dict[int, ArgumentPart]:
    """Return the results that lie in arguments which are written or require gradients as they do, by number.

    A view of a parameter requires gradients also where none are recorded.
    Raises ImportRefused if a result lies where several arguments do: in which it lies is not known.
    Raises ImportRefused if a result requires gradients and lies in no argument.
    """
    places: dict[int, int] = {expected.memory[at]: at for at in written}
    given = zip(expected.memory[: len(examples)], expected.objects, strict=False)
    shared = Counter(place for place, _ in set(given))
    results = zip(expected.objects[len(examples) :], expected.memory[len(examples) :], strict=True)
    parts = dict[int, ArgumentPart]()
    for number, (first, place) in enumerate(results):
        lies, gradients = expected.strides[number], expected.gradients[number]
        if gradients and place >= len(examples):
            raise ImportRefused("its results require gradients")
        argument = places.get(place, place if gradients else None)
        if argument is not None and first < len(examples):
            parts[number] = ArgumentPart(first)
        elif argument is not None and lies is not None and not lies.changed:
            if shared[place] > 1:
                raise ImportRefused("a result lies in arguments that share memory")
            parts[number] = ArgumentPart(
                argument, lies.steps, lies.offset - examples[argument].storage_offset()
            )
    return parts


def views_of_arguments(expected: Aliasing, opened: Sequence[Any]) -> dict[int, tuple[int, int]]:
    """Return the results that are views of one argument, by number: which, and where its elements begin."""
    given = zip(expected.memory[: len(opened)], expected.objects, strict=False)
    shared = Counter(place for place, _ in set(given))
    rows = zip(expected.objects[len(opened) :], expected.memory[len(opened) :], strict=True)
    views = dict[int, tuple[int, int]]()
    for number, (first, place) in enumerate(rows):
        lies = expected.strides[number]
        if first >= len(opened) > place and shared[place] == 1 and lies is not None and not lies.changed:
            views[number] = place, opened[place].storage_offset()
    return views


class Separated:
    """Runs an executable; what its first run shows to differ from the program is mended in every run.

    executable: What runs the graph.
    instead: What runs it operator by operator, where results cannot be mended or arguments share memory.
    expected: What shares memory in the program, and how results lie.
    lies: How results lie for the sizes of a call, where that follows from them.
    views: As of `views_of_arguments`; what plans copy of them is mended.
    """

    def __init__(
        self,
        executable: Executable,
        instead: Callable[..., Any],
        expected: Aliasing,
        *,
        lies: OpenStrides | None = None,
        views: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        self.executable: Executable | None = executable
        """None once results turned out to be none that can be mended."""
        self.instead = instead
        self.expected = expected
        self.lies = lies
        self.views = views or {}
        self.changes: dict[int, Callable[..., torch.Tensor]] | None = None
        """Result -> what mends it; `relaid` without how the result lies where sizes decide that."""
        self.groups: list[Group] = []
        """Results that are put into one memory after that."""
        self.growth: list[tuple[int, int]] = []
        """Arguments whose versions are mended, with by how much they grow."""
        self.marks: list[tuple[int, int]] = []
        """Results whose versions are set, with what they are: a later run may write them more often."""
        self.told = False
        self.built: object = None
        """What it was made from, for those who ask what became of a graph as long as this runs it."""

    def __call__(self, *inputs: Any) -> Any:
        if self.executable is None:
            return self.instead(*inputs)
        look = self.executable.look(inputs)
        if not look.apart:
            self._tell("arguments share memory that it writes")
            return self.instead(*inputs)
        if self.changes is None:
            return self._first(inputs, self.executable, look)
        if not (self.changes or self.groups or self.growth or self.marks):
            return self.executable.run(inputs, look)
        before = [inputs[at]._version for at, _ in self.growth]
        mended = self._mended(inputs, self.executable.run(inputs, look))
        return self._marked(inputs, before, self._together(inputs, mended))

    def rehearse(self, inputs: Sequence[Any]) -> None:
        """Do the work of a first run before calls: reorder weights, compare aliasing and strides of results.

        Where a run has an effect, its steps are only bound; nothing where arguments have no values.
        """
        executable = self.executable
        if executable is None or any(isinstance(value, FakeTensor) for value in inputs):
            return
        if executable.bound.changed or not executable.plan.is_pure():
            with suppress(Exception):  # the first call raises what it is
                executable.prepare()
        else:
            states = random_states()
            try:
                with suppress(Exception):  # the first call raises what it is
                    self._first(tuple(inputs), executable, executable.look(inputs))
            finally:
                restore_random(states)

    def _tell(self, why: str) -> None:
        if not self.told:
            log.warning("a graph runs operator by operator: %s", why)
        self.told = True

    def _first(self, inputs: tuple[Any, ...], executable: Executable, look: Look) -> Any:
        """Run, and find out what is to be mended; where that is more than can be, run `instead`."""
        kept = [(inputs[at], inputs[at].clone()) for at in executable.bound.changed]
        random = random_states()
        before = [version_of(value) for value in inputs]

        def otherwise(why: str) -> Any:
            self._tell(why)
            restore_random(random)
            self._restore(kept, before, inputs)
            self.executable = None
            return self.instead(*inputs)

        try:
            results = executable.run(inputs, look)
        except UnlikeItsFakeError as error:
            return otherwise(str(error))
        try:
            self.changes = self._needed(inputs, results)
            mended = self._mended(inputs, results)
            self.groups = groups_apart(self.expected, aliasing_of(inputs, mended))
            mended = self._together(inputs, mended)
            wrong = not self._is_right(inputs, mended)
        except RuntimeError as error:  # a result some of whose elements are one is not copied
            pass_on(error)
            wrong = True
        if wrong:
            return otherwise("its results cannot be laid out as the program's")
        self._note_versions(inputs, executable.bound.changed, before, mended)
        return self._marked(inputs, [before[at] for at, _ in self.growth], mended)

    def _restore(self, kept: Any, before: list[int | None], inputs: tuple[Any, ...]) -> None:
        for value, copy in kept:
            with torch.no_grad():
                value.copy_(copy)
        known = [(value, was) for value, was in zip(inputs, before, strict=True) if was is not None]
        set_versions(*zip(*known, strict=True)) if known else None

    def _needed(self, inputs: tuple[Any, ...], results: Any) -> dict[int, Any]:
        found, expected, start = aliasing_of(inputs, results), self.expected, len(inputs)
        changes: dict[int, Any] = {}
        values, strides = flat(results), self._strides_now(inputs)
        for at in range(start, len(found.memory)):
            if not isinstance(values[at - start], torch.Tensor):
                continue  # equal numbers may be one object
            own = expected.memory[at] == at and at not in expected.memory[at + 1 :]
            lies = strides[at - start]
            if at - start in self.views and found.memory[at] != expected.memory[at]:
                changes[at - start] = _viewed
            elif lies is not None and own and not lies_as(values[at - start], lies):
                known = self.lies is None or (expected.strides[at - start] == lies and lies.order is not None)
                changes[at - start] = partial(relaid, lies) if known else relaid
            elif expected.memory[at] != expected.memory[found.memory[at]]:
                changes[at - start] = torch.clone
            elif expected.objects[at] != expected.objects[found.objects[at]]:
                changes[at - start] = _viewed
            elif own and found.views[at - start] and not expected.views[at - start]:
                changes[at - start] = _owned
        return changes

    def _is_right(self, inputs: tuple[Any, ...], results: Any) -> bool:
        found = aliasing_of(inputs, results)
        same = found[:2] == self.expected[:2] and found.gradients == self.expected.gradients
        wanted = self._strides_now(inputs) if same else ()
        return same and all(map(lies_as, flat(results), wanted))

    def _strides_now(self, inputs: tuple[Any, ...]) -> Sequence[Strides | None]:
        """Return how results are to lie for the sizes of this call."""
        known = self.expected.strides
        if self.lies is None:
            return known
        return [self.lies.of(inputs, at) for at in range(len(known))]

    def _view(self, inputs: tuple[Any, ...], number: int, value: torch.Tensor) -> torch.Tensor:
        """Return a result that is a view of an argument, given the plan's copy of it."""
        argument, start = self.views[number]
        lies = self.expected.strides[number] if self.lies is None else self.lies.of(inputs, number)
        if lies is None:
            return value
        return ArgumentPart(argument, lies.steps, lies.offset - start).of(inputs[argument], value)

    def _note_versions(
        self, inputs: tuple[Any, ...], written: Sequence[int], before: list[Any], results: Any
    ) -> None:
        grown: Sequence[Any] = self.expected.versions[: len(inputs)]
        own = self.expected.versions[len(inputs) :]
        self.growth = [
            (at, grown[at])
            for at in written
            if None not in (grown[at], before[at]) and version_of(inputs[at]) != before[at] + grown[at]
        ]
        places = range(len(inputs), len(self.expected.memory))
        fresh = [self.expected.memory[at] >= len(inputs) for at in places]
        rows = zip(fresh, own, map(version_of, flat(results)), strict=True)
        self.marks = [
            (at, wanted or 0)
            for at, (is_new, wanted, found) in enumerate(rows)
            if is_new and None not in (wanted, found)
        ]

    def _marked(self, inputs: tuple[Any, ...], before: Sequence[Any], results: Any) -> Any:
        """Set the versions of arguments that were written, and of results."""
        if self.growth:
            versions = [was + by for was, (_, by) in zip(before, self.growth, strict=True)]
            set_versions([inputs[at] for at, _ in self.growth], versions)
        if self.marks:
            values = flat(results)
            counted = [(values[at], number) for at, number in self.marks if not values[at].is_inference()]
            set_versions(*zip(*counted, strict=True)) if counted else None
        return results

    def _mended(self, inputs: tuple[Any, ...], results: Any) -> Any:
        changes = self.changes or {}
        if not changes:
            return results
        values = flat(results)
        for at, change in changes.items():
            if change is _viewed and at in self.views:
                values[at] = self._view(inputs, at, values[at])
            elif change is not relaid or self.lies is None:
                values[at] = change(values[at])
            elif (lies := self.lies.of(inputs, at)) is not None and not lies_as(values[at], lies):
                values[at] = relaid(lies, values[at])
        return in_place_of(results, values)

    def _together(self, inputs: tuple[Any, ...], results: Any) -> Any:
        """Put the results of each of `groups` into one memory."""
        return together(results, self.groups, self._strides_now(inputs)) if self.groups else results


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
        sizes = (self.sources[name](inputs) for name in names)
        shape, steps, offset, nbytes, item, conjugated, negated = function(*sizes)
        found = strides_from(shape, steps, offset, nbytes // item)
        return found._replace(conjugated=conjugated, negated=negated)


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
    body = ", ".join([*lists, *map(text, rest), str(value.is_conj()), str(value.is_neg())])
    names = tuple(sorted(symbols))
    for name in names:
        sources[name]
    space: dict[str, Any] = {}
    exec(f"import math, torch\ndef lies({', '.join(names)}):\n    return {body}\n", space)
    return space["lies"], names
