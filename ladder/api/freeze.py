"""From a captured model to one that needs neither its source nor capture: for files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.fx
from torch.utils._pytree import tree_leaves

from ladder.api.compiler import Compiler
from ladder.api.linear import Linear
from ladder.api.open_export import OpenAxes, decide, limits_of, open_paths, require_open
from ladder.capture import capture
from ladder.frontend.importer import identifier
from ladder.frontend.onnx_stages import Imported, Weight
from ladder.frontend.torch_fx import import_fx
from ladder.ir.gemm import Gemm
from ladder.runtime.model.build import Built, bind_program
from ladder.runtime.model.program import Program, Source
from ladder.runtime.model.sizes import NUMBER
from ladder.runtime.model.structure import Structure, structure_of
from ladder.runtime.model.whole import Limits, WholeModel
from tile_types.errors import LadderError, ShapeError, shown
from tile_types.quantized import QuantizedTensor

NOTHING: OpenAxes = MappingProxyType({})


@dataclass
class _Watched:
    """A backend that remembers what its graphs were called with, and how many plans each began with."""

    dynamic_shapes = True
    numbers = False

    compiler: Compiler
    graphs: list[tuple[torch.fx.GraphModule, list[Any]]] = field(default_factory=list)
    calls: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = field(default_factory=list)
    plans: list[int] = field(default_factory=list)

    def __call__(self, module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """Compile; the result notes its calls."""
        before = len(self.compiler.built)
        run = self.compiler(module, examples)
        self.graphs.append((module, examples))
        self.plans.append(len(self.compiler.built) - before)

        def watched(*values: Any) -> Any:
            found = run(*values)
            self.calls.append((values, tuple(found)))
            return found

        return watched


@dataclass(frozen=True)
class Frozen:
    """A model with what one call of it showed.

    model: What was called.
    built: Its only graph.
    graph, examples: The same as torch.fx, and what it was compiled for.
    parameters, results: Structures of what the call took and returned, over the call's tensors, and over the
        plan's results and arguments.
    order: Argument of the plan -> its position: first the call's tensors, then what the model keeps.
    names: Of the call's tensors.
    stored: What the model keeps.
    limits: What must hold between open sizes.
    """

    model: Any
    built: Built
    graph: torch.fx.GraphModule
    examples: list[Any]
    parameters: Mapping[str, Structure]
    results: Structure
    order: Mapping[int, int]
    names: tuple[str, ...]
    stored: tuple[Any, ...]
    limits: Limits = ()

    def placed(self, program: Program) -> Program:
        """Return a program with its arguments in the order of `order`, and what it brings after them."""
        first = len(self.names) + len(self.stored)
        sources = {name: self._placed(source, first) for name, source in program.sources.items()}
        updates = tuple((self.order[at], output) for at, output in program.updates)
        count = first + len(program.held)
        sizes = {name: (self.order[at], axis) for name, (at, axis) in program.sizes.items() if axis != NUMBER}
        return replace(program, sources=sources, updates=updates, held=(), arguments=count, sizes=sizes)

    def _placed(self, source: Source, first: int) -> Source:
        if source.kind == "held":
            return replace(source, kind="argument", at=(first + source.at[0],))
        joined = tuple(tuple(self.order[at] for at in part) for part in source.joined)
        return replace(source, at=tuple(self.order[at] for at in source.at), joined=joined)

    def whole(self) -> WholeModel:
        """Return the model as it is built, without its source."""
        executable, program = self.built.executable, self.placed(self.built.program)
        bound = bind_program(program, self.built.plan, dict(executable.bound.kernels), executable.where)
        libraries = {name: kernel.library for name, kernel in self.built.kernels.items()}
        stored = [*self.stored, *self.built.program.held]
        return WholeModel(
            self.built.graph, bound, self.parameters, self.results, stored, self.limits, libraries
        )

    def imported(self) -> Imported:
        """Return the graph for any device: weights in canonical storage, products as the model has them.

        Raises ShapeError if the results are no tensors that the graph computes, or it changes tensors in
            place.
        Raises LadderError if a weight's canonical storage was not kept.
        """
        plain = import_fx(self.graph, self.examples, precise=self.built.program.precise)
        if plain.updates:
            raise ShapeError("this model changes tensors in place; ONNX models keep no state, export() does")
        program = self.placed(plain)
        kept = [*self.stored, *plain.held]
        weights = [Weight(*found) for found in self._weights(program, kept)]
        order = list(dict.fromkeys(s.at for s in program.sources.values() if s.kind == "weight"))
        held: list[torch.Tensor] = []
        sources = {}
        for name, source in program.sources.items():
            if source.kind in ("weight", "part"):
                sources[name] = replace(source, at=(order.index(source.at),))
            elif source.at[0] < len(self.names):
                sources[name] = source
            else:
                sources[name] = Source("held", (len(held),))
                held.append(kept[source.at[0] - len(self.names)])
        returned = _outputs(self.results, len(program.results))
        results = tuple(program.results[at] for at in returned.values())
        program = replace(program, sources=sources, held=tuple(held), results=results)
        return Imported(program, self.names, tuple(returned), tuple(weights))

    def _weights(self, program: Program, kept: Sequence[Any]) -> Iterator[tuple[Gemm, QuantizedTensor]]:
        """Yield the quantized weights of a program, each once."""
        layers = [m for m in self.model.modules() if isinstance(m, Linear)] if _is_module(self.model) else []
        owners = {id(array): layer for layer in layers for array in layer.buffers(recurse=False)}
        sources = {s.at: s for s in program.sources.values() if s.kind == "weight"}
        for at, source in sources.items():
            layer = owners.get(id(kept[at[0] - len(self.names)]))
            factor = None if layer is None else layer.factor
            if factor is None or source.gemm is None:
                raise LadderError(
                    "a weight's canonical storage was not kept: quantize with keep_canonical=True, by layers"
                    " of a torch.nn.Module"
                )
            yield source.gemm, factor


def freeze(
    function: Any,
    arguments: tuple[Any, ...],
    named: Mapping[str, Any],
    axes: OpenAxes = NOTHING,
    precise: bool = False,
) -> Frozen:
    """Capture a model anew on example inputs, the extents along ``axes`` open.

    Its buffers and the examples are afterwards what they were before.

    Raises LadderError if it is not captured as one graph, or returns what no file can hold; the message says
        what.
    """
    watched = _Watched(Compiler(precise))
    given = _named(function, arguments, named)
    state = list(function.buffers()) if isinstance(function, torch.nn.Module) else []
    state += [x for x in tree_leaves((arguments, dict(named))) if isinstance(x, torch.Tensor)]
    before = [tensor.clone() for tensor in state]
    with torch.no_grad():
        captured = capture(function, backend=watched)
        wanted = open_paths(axes, arguments, named, list(given))
        captured.open(set(wanted), arguments, dict(named))
        captured(*arguments, **named)
        watched.calls.clear()
        result = captured(*arguments, **named)
        for tensor, old in zip(state, before, strict=True):
            if not torch.equal(tensor, old):
                tensor.copy_(old)
    _require_whole(captured, watched)
    if wanted:
        require_open(wanted, captured, *watched.graphs[0])
        decide(captured, watched.graphs[0][0])
    return _frozen(function, watched, given, result)


def freeze_for_file(
    function: Any,
    arguments: tuple[Any, ...],
    named: Mapping[str, Any],
    axes: OpenAxes = NOTHING,
    precise: bool = False,
) -> Frozen:
    """Capture a model as `freeze` does, for a file that serves other inputs than these.

    Raises LadderError if it reads numbers of its inputs.
    """
    frozen = freeze(function, arguments, named, axes, precise)
    _require_tensors(frozen)
    return frozen


def _require_whole(captured: Any, watched: _Watched) -> None:
    """Raise unless the model ran as one graph, compiled to one plan: not piece by piece as it runs."""
    why = "; ".join([*watched.compiler.refused, *watched.compiler.alone])
    plans = sum(watched.plans)
    if captured.outcome != "whole" or why or len(watched.calls) != 1 or plans != 1:
        raise LadderError(
            f"only a model that is one graph and one plan can be exported, this one ran as: "
            f"{captured.outcome}, {len(watched.calls)} graphs, {plans} plans{f' ({why})' if why else ''};"
            " `explain()` and `plan()` of the compiled model say where it splits"
        )


def _require_tensors(frozen: Frozen) -> None:
    """Raise LadderError if the graph holds a number that was read of inputs, or of what the model changes.

    Numbers that follow from what the file holds, such as buffers, are the same in every call.
    """
    graph, order = frozen.graph.graph, frozen.order
    vary = {at for at, place in order.items() if place < len(frozen.names)}
    vary |= {at for at, _ in frozen.built.executable.bound.updates}
    places = {node: at for at, node in enumerate(graph.find_nodes(op="placeholder"))}
    results: Any = graph.output_node().args[0]
    for at, number in frozen.graph.meta["assumed"].items():
        rest: list[torch.fx.Node] = [results[at]]
        met: set[torch.fx.Node] = set()
        while rest:
            node = rest.pop()
            rest += [] if node in met else node.all_input_nodes
            met.add(node)
        if any(places.get(node) in vary for node in met):
            raise LadderError(
                f"the model reads numbers of its inputs, here {shown(number)}, and a file would hold these"
                " for every input: compute with tensors instead, or export the parts before and behind it"
            )


def _named(function: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names of parameters."""
    call = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        signature = inspect.signature(call)
    except ValueError as error:
        raise ShapeError(f"{call!r} does not name its parameters: export a function of yours") from error
    try:
        bound, kinds = signature.bind(*arguments, **named), signature.parameters
    except TypeError as error:
        raise TypeError(
            f"{error}: the file is followed by the arguments of an example call, {signature}"
        ) from error
    for name in bound.arguments:
        if kinds[name].kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise ShapeError(
                f"parameter {name} takes any number of arguments: export needs one name for each"
            )
    return dict(bound.arguments)


def _frozen(function: Any, watched: _Watched, given: Mapping[str, Any], result: Any) -> Frozen:
    tensors: list[torch.Tensor] = []
    names: list[str] = []

    def take(tensor: torch.Tensor, path: str) -> Structure:
        if any(tensor is other for other in tensors):
            raise ShapeError(f"{path} is also another argument: export with tensors of their own")
        tensors.append(tensor)
        names.append(identifier(path))
        return {"tensor": len(tensors) - 1}

    parameters = {name: structure_of(value, take, name) for name, value in given.items()}
    ((values, found),) = watched.calls
    places = {id(tensor): at for at, tensor in enumerate(tensors)}
    kept = [at for at, value in enumerate(values) if id(value) not in places]
    order = {at: places[id(value)] for at, value in enumerate(values) if id(value) in places}
    order |= {at: len(tensors) + number for number, at in enumerate(kept)}
    stored = [values[at] if isinstance(values[at], torch.Tensor) else None for at in kept]
    everything, own = [*found, *tensors, *stored], _held_by(function)
    place = partial(_returned, everything=everything, own=own)
    results = structure_of(result, place, "the result")
    stored = everything[len(found) + len(tensors) :]
    (built,) = watched.compiler.built
    ((graph, examples),) = watched.graphs
    limits = limits_of(graph)
    of_call, of_model = tuple(names), tuple(stored)
    return Frozen(function, built, graph, examples, parameters, results, order, of_call, of_model, limits)


def _held_by(function: Any) -> list[torch.Tensor]:
    """Return the parameters and buffers of a model."""
    return [*function.parameters(), *function.buffers()] if isinstance(function, torch.nn.Module) else []


def _returned(tensor: torch.Tensor, path: str, everything: list[Any], own: list[torch.Tensor]) -> Structure:
    """Return the place of a result in `everything`; one of its `own` that no operator reads is added."""
    new = all(tensor is not each for each in everything)
    everything += [tensor] if new and any(tensor is each for each in own) else []
    for at, other in enumerate(everything):
        if other is tensor:
            return {"tensor": at}
    raise ShapeError(f"{path} is a tensor that the graph does not compute: it cannot be exported")


def _outputs(structure: Structure, count: int, path: str = "output") -> dict[str, int]:
    """Return name -> position of the tensors in a result, all of which the graph must compute."""
    ((kind, held),) = structure.items()
    if kind == "tensor":
        if held >= count:
            raise ShapeError(f"{path} is an argument or a parameter: ONNX models return what they compute")
        return {path: held}
    if kind == "value":
        raise ShapeError(f"{path} is {held!r}: ONNX models return tensors")
    items = held.items() if kind == "dict" else enumerate(held)
    found: dict[str, int] = {}
    for key, item in items:
        found |= _outputs(item, count, identifier(f"{path}_{key}"))
    return found


def _is_module(value: Any) -> bool:
    return isinstance(value, torch.nn.Module)
