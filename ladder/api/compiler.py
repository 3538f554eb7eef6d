"""The backend of capture and of ``torch.compile``: graphs to executables of plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from ladder import faults
from ladder.api.aliasing import (
    Separated,
    expected_aliasing,
    open_strides,
    parts_of_arguments,
    results_of,
    strides_for,
    views_of_arguments,
)
from ladder.api.branching import Branching, branches
from ladder.api.elsewhere import without_results
from ladder.api.flags import without_flags
from ladder.api.pieces import Pieces, can_be_cut
from ladder.api.plan_cache import prepared_for
from ladder.api.surroundings import kept_state
from ladder.capture.captured import run_as_is
from ladder.capture.values.aliasing import Aliasing
from ladder.interrupts import pass_on
from ladder.runtime.compile import target_of
from ladder.runtime.model.build import Built, build_prepared
from ladder.runtime.model.executable import Executable
from ladder.runtime.model.program import ImportRefused
from tile_types.errors import DeviceError

MOST_PLANS = 8
"""Sets of sizes that get plans; calls with others run in torch."""

Key = tuple[Any, ...]
Make = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


class BySizes:
    """Runs a graph by the plan for the sizes of a call.

    module: The graph.
    make: Compiles it for arguments of known sizes.
    instead: What runs it where there are plans enough.
    full: Called once, when that happens for the first time.
    """

    def __init__(
        self, module: torch.fx.GraphModule, make: Make, instead: Callable[..., Any], full: Callable[[], None]
    ) -> None:
        self.module = torch.fx.GraphModule(module, module.graph)
        self.module.meta = {name: held for name, held in module.meta.items() if name != "open"}
        self.make, self.instead, self.full = make, instead, full
        self.plans: dict[Key, Callable[..., Any]] = {}

    def __call__(self, *values: Any) -> Any:
        key = tuple(value.shape if isinstance(value, torch.Tensor) else value for value in values)
        run = self.plans.get(key)
        if run is None:
            if len(self.plans) >= MOST_PLANS:
                return self._without_plan(values)
            run = self.plans[key] = self._plan_for(values)
        return run(*values)

    def _plan_for(self, values: tuple[Any, ...]) -> Callable[..., Any]:
        """Return a plan for the sizes of a call.

        How results with gaps lie, and those in the memory of arguments, was noted for other sizes.
        """
        known = self.module.meta.get("aliasing")
        if known is None or not _depends_on_sizes(known):
            return self.make(self.module, list(values))
        try:
            strides = strides_for(self.instead, values)
        except RuntimeError:  # sizes of results that depend on values
            return self.instead
        module = torch.fx.GraphModule(self.module, self.module.graph)
        module.meta = self.module.meta | {"aliasing": known._replace(strides=strides)}
        return self.make(module, list(values))

    def _without_plan(self, values: tuple[Any, ...]) -> Any:
        self.full()
        self.full = _nothing
        return self.instead(*values)


def _depends_on_sizes(known: Aliasing) -> bool:
    """Tell whether sizes decide how results lie: with gaps, in arguments, or in what others show."""
    given = len(known.memory) - len(known.strides)
    return _lie_by_sizes(known) or any(place < given for place in known.memory[given:])


def _nothing() -> None:
    """Do nothing."""


class Compiler:
    """A backend of capture and of ``torch.compile``: graphs to executables, and a record of both outcomes."""

    is_ours = True
    """Marks code whose exceptions are faults of Ladder."""

    conditionals = True
    """Capture may give it graphs that branch."""

    dynamic_shapes = True
    """Extents that change are symbols of a plan."""

    numbers = False
    """Numbers that are no symbols would be constants of a plan."""

    def __init__(self, precise: bool = False, search: float = 0.0) -> None:
        self.precise, self.search = precise, search
        self._built: list[Callable[[], Built | None]] = []
        self.refused: list[str] = []
        self.alone: list[str] = []
        """Operators between plans that run in torch, and why."""
        self._warned: set[tuple[object, str]] = set()

    def __call__(self, module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """Return what runs a graph; one that cannot be imported runs as it is, and `refused` says why.

        Raises Exception: Whatever is wrong inside the compiler, under ``LADDER_STRICT``.
        """
        reason = module.meta.get("switches") or reason_to_refuse(examples)
        if not reason and (found := without_flags(module)) is not None:
            rest, behind = found
            return behind(self(rest, examples))
        if not reason:
            try:
                with kept_state():
                    return self._compiled(module, examples)
            except (ImportRefused, DeviceError) as error:
                reason = str(error)
                if isinstance(error, ImportRefused) and (run := self._otherwise(module, reason)) is not None:
                    return run
            except Exception as error:  # a fault of ours must not become one of the program's
                self.refused.append(faults.tolerated(error, "a graph runs in torch alone"))
                return run_as_is(module, examples)
        if reason == SEVERAL_DEVICES and (run := self._otherwise(module, reason)) is not None:
            return run
        self._refuse(reason)
        return run_as_is(module, examples)

    def _compiled(self, module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """Return the plan of a graph, bound; of one that branches, those of its parts."""
        if branches(module):
            return Branching(module, examples, self)
        place, opened = place_of(module, examples), module.meta.get("open", examples)
        if place is None or not any(node.op.startswith("call") for node in module.graph.nodes):
            return run_as_is(module, examples)
        copies = place.type == "cuda" and has_room(examples, place)
        packed_for = target_of(place) if copies else ""
        prepared = prepared_for(
            module, opened, place, self.search, join=copies, packed_for=packed_for, precise=self.precise
        )
        expected = expected_aliasing(module, opened)
        if others := sorted({str(each) for each in expected.devices if each not in (None, place)}):
            if (found := without_results(module, expected, place)) is not None:
                rest, joined = found
                return joined(self._compiled(rest, examples))
            raise ImportRefused(f"a graph on {place} has results on {', '.join(others)}")
        built = build_prepared(prepared, place)
        run = separated(built.executable, expected, module, examples, opened)
        if place.type == "cpu":  # on GPUs a first run records a graph of launches, for the arguments of calls
            run.rehearse(examples)
        self._remember(run, built)
        return run

    @property
    def built(self) -> list[Built]:
        """What was built, in order."""
        return [built for get in self._built if (built := get()) is not None]

    def _remember(self, run: Separated, built: Built) -> None:
        self._built.append(lambda: built)

    def _otherwise(self, module: torch.fx.GraphModule, reason: str) -> Callable[..., Any] | None:
        """Return what runs a graph that is no plan by several: one per set of sizes, or per piece."""
        if "open" in module.meta:
            full = f"the sizes of a graph keep changing, and no plan serves all of them: {reason}"
            return BySizes(module, self, run_as_is(module, []), lambda: self._refuse(full))
        return Pieces(module, self, self._tell) if can_be_cut(module) else None

    def _tell(self, text: str) -> None:
        """Note that an operator runs in torch, for the plan."""
        self.alone += [] if text in self.alone else [text]

    def _refuse(self, reason: str) -> None:
        """Note why a graph runs in torch alone, and warn of it: once per reason and function."""
        self.refused.append(reason)
        if (self.program(), reason) not in self._warned:
            self._warned.add((self.program(), reason))
            faults.warn(f"a graph runs in torch alone: {reason}")

    def program(self) -> object:
        """Return what tells the function that is compiled from others that this compiles."""
        return None


def separated(
    executable: Executable,
    expected: Aliasing,
    module: torch.fx.GraphModule,
    examples: list[Any],
    opened: list[Any],
) -> Separated:
    """Return what runs a plan whose results share memory, and lie, as the program's do.

    expected: How they do.
    opened: The examples, with symbols in place of what is open.
    Raises ImportRefused if results of open sizes are views of arguments that are written, or of parameters.
    """
    is_open = "open" in module.meta
    parts = parts_of_arguments(expected, examples, [at for at, _ in executable.bound.updates])
    if is_open and any(part.steps is not None for part in parts.values()):
        raise ImportRefused("results are views of arguments, and sizes are open")
    executable.gives(parts)
    lies = open_strides(module, opened) if is_open and _lie_by_sizes(expected) else None
    views = {} if is_open and lies is None else views_of_arguments(expected, opened)
    return Separated(executable, run_as_is(module, examples), expected, lies=lies, views=views)


def _lie_by_sizes(expected: Aliasing) -> bool:
    """Tell whether results lie with gaps, or show what others show."""
    given = len(expected.memory) - len(expected.strides)
    own = [place for place in expected.memory[given:] if place >= given]
    gaps = any(each is not None and each.order is None for each in expected.strides)
    return gaps or len(set(own)) < len(own)


SEVERAL_DEVICES = "tensors are on several devices"
"""Why a graph is no plan, though what lies between moves from one device to another may be."""


def reason_to_refuse(examples: list[Any]) -> str:
    """Say why a graph of these arguments is not for plans; empty if it may be."""
    tensors = [value for value in examples if isinstance(value, torch.Tensor)]
    if torch.is_grad_enabled() and any(value.requires_grad for value in tensors):
        return "gradients are recorded, and plans are for inference: call it under torch.no_grad()"
    if any(
        type(value) not in (torch.Tensor, torch.nn.Parameter) and not _is_fake(value) for value in tensors
    ):
        return "an argument is a subclass of Tensor"
    if any(value.is_nested for value in tensors):
        return "an argument is a nested tensor"
    if any(value.is_quantized for value in tensors):
        return "an argument is a quantized tensor of torch"
    if any(value.is_neg() for value in tensors):
        return "an argument is negated where it is read, and kernels would see its memory as it is"
    if len({value.device for value in tensors}) > 1:
        return SEVERAL_DEVICES
    return ""


def has_room(examples: list[Any], place: torch.device) -> bool:
    """Tell whether a GPU could hold all arguments twice more: weights laid out for plans are copies."""
    needed = sum(value.nbytes for value in examples if isinstance(value, torch.Tensor))
    free = torch.cuda.mem_get_info(place)[0]
    kept = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
    return free + kept >= 2 * needed


def _is_fake(value: torch.Tensor) -> bool:
    return isinstance(value, torch._subclasses.FakeTensor)


def place_of(module: torch.fx.GraphModule, examples: list[Any]) -> torch.device | None:
    """Return the device of the tensors among arguments; without any, that of what a graph makes of none.

    Returns: None if there are no tensors at all.
    Raises ImportRefused if it makes tensors on several devices, or which depends on values.
    """
    given = [value.device for value in examples if isinstance(value, torch.Tensor)]
    try:
        places = given[:1] or {value.device for value in results_of(module, examples)}
    except Exception as error:  # as where a graph is traced: what fakes cannot do, the program still can
        pass_on(error)
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ImportRefused(f"the graph takes no tensors, and its results need values: {why}") from error
    if len(places) > 1:
        raise ImportRefused(f"the graph takes no tensors, and makes some on {len(places)} devices")
    return next(iter(places), None)
