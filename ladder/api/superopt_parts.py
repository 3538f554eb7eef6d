"""A function in parts: those that can be proved are superoptimized, the others compiled.

What cannot be taken apart, such as a function with effects, is one part that torch runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from ladder.api.compiler import Compiler
from ladder.api.superopt_calls import Contract, readable
from ladder.api.superopt_task import Superoptimized, Task, beside_torch, require_provable, require_type
from ladder.api.tensor_program import (
    Recorded,
    decoded,
    name_of,
    packed_types,
    require_precision,
    step_of,
    target_of,
    translated,
)
from ladder.ir.ops import get_operator
from ladder.superopt.generator import Program
from ladder.superopt.partition import OUTSIDE, Operation, pieces
from ladder.superopt.tracer import Tracer
from ladder.superopt.verifier import Certificate, Stability
from ladder.superopt.verifier.shrink import joined
from tile_types.errors import ConversionError, DeviceError, LadderError, ScheduleError, VerificationError
from tile_types.quantized import QuantizedTensor

VIEWS = ("transpose", "t", "getattr", "contiguous")
"""Operators that parts repeat rather than pass on: kernels read contiguous tensors, and views in place."""

NOTHING_TO_FUSE = "one operator: there is nothing to fuse"

IN_TORCH = "torch runs it as it is"
"""Plan of a function that is not taken apart."""


@dataclass(frozen=True)
class FunctionPart:
    """A part of a function.

    operators: What it calls, in order.
    kernels: What it was optimised to, or None.
    reason: Why not: what of it is outside LAX, or what the search or the lowering says.
    plan: What runs then: `ladder.compile`'s plan, as text.
    """

    operators: tuple[str, ...]
    kernels: Superoptimized | None = None
    reason: str = ""
    plan: str = ""

    def __str__(self) -> str:
        what = " ".join(self.operators)
        if self.kernels:
            return f"{what}: {self.kernels}"
        runs = f"; {self.plan}" if self.plan == IN_TORCH else ""
        return f"{what}: not superoptimized, {self.reason}{runs}"


@dataclass(frozen=True)
class Partitioned:
    """A function as parts, some of which may be fused kernels with certificates.

    name: Of the function.
    parts: In the order in which they run.
    run: All of them, of the function's inputs; None if kernels are for a device that is not here.
    contract: What the function takes and returns; None if torch runs it as it is.
    seconds, torch: That the parts take, and the function as torch runs it; infinity if that was not timed.
    unfused: The function, if torch runs it faster.
    """

    name: str
    parts: tuple[FunctionPart, ...]
    run: Callable[..., Any] | None
    contract: Contract | None = None
    seconds: float = math.inf
    torch: float = math.inf
    unfused: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Run the parts, or the function where torch is faster, of shapes that were optimised for."""
        if self.run is None:
            raise DeviceError("these kernels were built for a device that is not here; superoptimize there")
        if self.contract is None:
            return self.run(*inputs)
        with torch.no_grad():
            if self.unfused is None:
                return self.contract.call(self.run, inputs)
            self.contract.require(inputs)
            return self.unfused(*inputs)

    def __str__(self) -> str:
        """Say what runs each part, or that torch runs the function."""
        times = "" if math.isinf(self.torch) else f", {self.seconds * 1e6:.1f} us{beside_torch(self)}"
        copied = self.contract.copies if self.contract else ""
        count = "1 part" if len(self.parts) == 1 else f"{len(self.parts)} parts"
        return "\n".join([f"{self.name} in {count}{times}{copied}", *map(str, self.parts)])

    @property
    def kernels(self) -> tuple[Superoptimized, ...]:
        """The parts that were optimised."""
        return tuple(part.kernels for part in self.parts if part.kernels is not None)

    @property
    def certificate(self) -> Certificate:
        """That all optimised parts equal the function's: errors, rounds and draws add up.

        Raises VerificationError if no part was optimised: says why.
        """
        return joined([kernels.certificate for kernels in self._proved()])

    @property
    def stability(self) -> Stability:
        """Of the optimised part with the largest error; VerificationError if there is none."""
        return max((kernels.stability for kernels in self._proved()), key=lambda found: found.error)

    def _proved(self) -> tuple[Superoptimized, ...]:
        if not self.kernels:
            reasons = "; ".join(part.reason for part in self.parts)
            raise VerificationError(
                f"no part of {self.name} was superoptimized, so nothing is proved: {reasons}"
            )
        return self.kernels

    def as_json(self) -> dict[str, Any]:
        """Return what a report shows."""
        return {
            "program": self.name, "delta": self.certificate.error if self.kernels else None,
            "unfused": self.unfused is not None,
            "parts": [
                {
                    "operators": part.operators, "reason": part.reason, "plan": part.plan,
                    "kernels": part.kernels.as_json() if part.kernels else None,
                }
                for part in self.parts
            ],
        }  # fmt: skip


def as_torch(function: Callable[..., Any], inputs: Sequence[Any], error: LadderError) -> Partitioned:
    """Return a function as torch runs it, its effects and gradients included.

    error: Why it is not taken apart.
    """

    def run(*given: Any) -> Any:
        return function(*decoded(given))

    quantized = any(isinstance(given, QuantizedTensor) for given in inputs)
    name = name_of(function)
    part = FunctionPart((name,), None, str(error).removeprefix(f"{name}: "), IN_TORCH)
    return Partitioned(name, (part,), run if quantized else function)


def partitioned(
    function: Recorded, inputs: Sequence[Any], tensors: Sequence[torch.Tensor], task: Task, error: LadderError
) -> Partitioned:
    """Superoptimize the parts of a captured function that can be proved; compile the others.

    inputs, tensors: Of the function; and decoded.
    error: Why it is not one program, or has no graph as one.
    """
    cut = _Cut(function, inputs, tensors)
    pieces = cut.pieces()
    if len(pieces) == 1 and not isinstance(error, ConversionError):  # it is the program
        pieces, task = list(cut.halves(pieces[0], error)) or pieces, task.shorter()
    parts = [part for nodes in pieces for part in cut.optimised(nodes, task)]
    if not any(part.kernels for part in parts):
        parts = [replace(part, part=replace(part.part, reason=_why(part.reason, error))) for part in parts]
    segments = cut.joined(parts)
    if not task.is_here:
        return Partitioned(cut.name, tuple(segment.part for segment in segments), None)
    run = _Run(cut, [cut.loaded(segment) for segment in segments])
    return Partitioned(cut.name, tuple(step.part for step in run.steps), run)


def _why(reason: str, error: LadderError) -> str:
    """Return why nothing of a function was optimised: of the part, or of the whole if that says more."""
    return str(error) if reason == NOTHING_TO_FUSE else reason


@dataclass(frozen=True)
class _Segment:
    """A part, and the nodes of the captured graph that it is."""

    part: FunctionPart
    nodes: tuple[torch.fx.Node, ...]

    @property
    def kernels(self) -> Superoptimized | None:
        return self.part.kernels

    @property
    def reason(self) -> str:
        return self.part.reason


@dataclass(frozen=True)
class _Step:
    """A part that can run: takes the values of some nodes, gives those of others."""

    part: FunctionPart
    sources: tuple[torch.fx.Node, ...]
    results: tuple[torch.fx.Node, ...]
    call: Callable[..., Any]


class _Recorder(torch.fx.Interpreter):
    """Runs a graph and keeps the value of every node."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[torch.fx.Node, Any] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


class _Cut:
    """A captured function's operators, which of them are LAX, and the parts that they form."""

    def __init__(self, function: Recorded, inputs: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        self.name, self.module, self.order = function.name, function.module, function.order
        self.inputs = inputs
        recorder = _Recorder(self.module)
        with torch.no_grad():
            recorder.run(*function.examples)
        self.values = recorder.values
        self.tensors = {id(tensor): number for number, tensor in enumerate(tensors)}
        self.dtype = tensors[0].dtype
        *self.nodes, self.output = self.module.graph.nodes
        self.traced: dict[torch.fx.Node, Any] = {}
        self.reasons: dict[torch.fx.Node, str] = {}
        self.counts: dict[torch.fx.Node, int] = {}
        self.operations = self._operations()

    def number(self, node: torch.fx.Node) -> int | None:
        """Return which of the function's inputs a node is."""
        return self.tensors.get(id(self.values[node])) if node.op == "placeholder" else None

    def is_view(self, node: torch.fx.Node) -> bool:
        """Whether parts repeat a node: views, and what gives several tensors, which no part passes on."""
        if node.op == "placeholder":
            return False
        several = not isinstance(self.values[node], torch.Tensor)
        return several or (target_of(node) in VIEWS and node not in self.reasons)

    def sources(self, nodes: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
        """Return what nodes take from outside of them, by way of views."""
        found: dict[torch.fx.Node, None] = {}
        stack = [value for node in reversed(nodes) for value in reversed(node.all_input_nodes)]
        while stack:
            value = stack.pop()
            if value in nodes:
                continue
            if self.is_view(value):
                stack += reversed(value.all_input_nodes)
            else:
                found[value] = None
        return list(found)

    def _operations(self) -> list[Operation]:
        """Translate every operator by itself, to see what it is."""
        tracer = Tracer(torch.finfo(self.dtype).eps)
        found = []
        for node in self.nodes:
            if node.op == "placeholder":
                self.traced[node] = tracer.input(self.values[node].shape)
                continue
            before = len(tracer.steps)
            classes: frozenset[str]
            try:
                self._require_tensors(node)
                self.traced[node] = step_of(tracer, self.name, node, self.traced)
                rows = [get_operator(step.operator) for step in tracer.steps[before:]]
                classes = frozenset(row.lax_class({}) for row in rows if row.name != "matmul")
                self.counts[node] = sum(row.name != "constant" for row in rows)
                if OUTSIDE in classes:
                    self.reasons[node] = f"{target_of(node)} is outside LAX"
            except LadderError as error:
                value = self.values[node]
                self.traced[node] = tracer.input(value.shape) if isinstance(value, torch.Tensor) else value
                self.reasons[node], classes = str(error), frozenset({OUTSIDE})
            if not self.is_view(node):
                found.append(Operation(node.name, tuple(s.name for s in self.sources([node])), classes))
        return found

    def _require_tensors(self, node: torch.fx.Node) -> None:
        for value in (node, *node.all_input_nodes):
            found = self.values[value]
            if not isinstance(found, torch.Tensor):
                raise ConversionError(f"{target_of(node)} of what is no tensor")
            if not found.ndim:
                raise ConversionError(f"{target_of(node)} of a tensor without axes")
            require_precision(target_of(node), found.dtype, self.dtype)

    def pieces(self) -> list[tuple[torch.fx.Node, ...]]:
        """Return the operators of each part, in an order in which parts can run."""
        by_name = {node.name: node for node in self.nodes}
        wanted = {source.name for source in self.sources([self.output])}
        return [tuple(by_name[o.name] for o in piece) for piece in pieces(self.operations, wanted)]

    def halves(
        self, nodes: tuple[torch.fx.Node, ...], error: LadderError
    ) -> tuple[tuple[torch.fx.Node, ...], ...]:
        """Return a part as two, of which the second takes one value of the first; or none.

        error: Why the part has no graph. What is not provable is cut behind the most that is, else in halves.
        """
        before: dict[torch.fx.Node, set[torch.fx.Node]] = {}
        for node in nodes:
            before[node] = {node}.union(*(before.get(source, ()) for source in self.sources([node])))
        found = []
        for node in nodes[:-1]:
            first = tuple(n for n in nodes if n in before[node])
            rest = tuple(n for n in nodes if n not in before[node])
            if before[node] & set(self.sources(rest)) == {node}:
                sizes = [sum(self.counts[n] for n in half) for half in (first, rest)]
                found.append((sizes, first, rest))
        if isinstance(error, VerificationError):
            found = [cut for cut in found if self.is_provable(cut[1])]
            return max(found, key=lambda cut: cut[0][0])[1:] if found else ()
        return min(found, key=lambda cut: max(cut[0]))[1:] if found else ()

    def is_provable(self, nodes: tuple[torch.fx.Node, ...]) -> bool:
        """Tell whether a part is a program of which equality is decided."""
        try:
            self._program(nodes)
        except LadderError:
            return False
        return True

    def optimised(self, nodes: tuple[torch.fx.Node, ...], task: Task) -> list[_Segment]:
        """Superoptimize a part, or its halves if nothing is found for all of it, or say why not."""
        operators = tuple(target_of(node) for node in nodes)
        reason = self.reasons.get(nodes[-1], "")
        kernels = None
        if not reason and sum(self.counts[node] for node in nodes) < 2:
            reason = NOTHING_TO_FUSE
        if not reason:
            try:
                kernels = self._superoptimized(nodes, task)
            except LadderError as error:
                reason = str(error)
                halves = self.halves(nodes, error) if isinstance(error, ScheduleError) else ()
                parts = [part for half in halves for part in self.optimised(half, task.shorter())]
                if any(part.kernels for part in parts):
                    return parts
        return [_Segment(FunctionPart(operators, kernels, reason), nodes)]

    def _superoptimized(self, nodes: tuple[torch.fx.Node, ...], task: Task) -> Superoptimized:
        program, graph = self._program(nodes)
        sources = self.sources(nodes)
        constants = [at for at, source in enumerate(sources) if self.number(source) in task.constants]
        given = [self.given(source) for source in sources]
        return task.run(program, lambda *values: graph(*values)[0], given, constants)

    def _program(self, nodes: tuple[torch.fx.Node, ...]) -> tuple[Program, torch.fx.GraphModule]:
        """Return a part as a program, and as torch runs it; raises where equality to it is not decided."""
        sources = self.sources(nodes)
        graph = self.subgraph(sources, nodes[-1:])
        tensors = [readable(self.values[source]) for source in sources]
        require_type(self.values[nodes[-1]], tensors)
        name = f"{self.name}_{nodes[-1].name}"
        packed = packed_types([self.given(source) for source in sources])
        program = translated(name, graph, tensors, tensors, packed)
        require_provable(program)
        return program, graph

    def given(self, source: torch.fx.Node) -> Any:
        """Return a value as kernels take it: quantized if it is such an input."""
        number = self.number(source)
        quantized = number is not None and isinstance(self.inputs[number], QuantizedTensor)
        return self.inputs[number] if number is not None and quantized else readable(self.values[source])

    def subgraph(
        self, sources: Sequence[torch.fx.Node], results: Sequence[torch.fx.Node]
    ) -> torch.fx.GraphModule:
        """Return the graph of nodes as results of others."""
        graph = torch.fx.Graph()
        copies = {source: graph.placeholder(source.name) for source in sources}

        def copied(node: torch.fx.Node) -> torch.fx.Node:
            if node not in copies:
                copies[node] = graph.node_copy(node, copied)
            return copies[node]

        graph.output(tuple(copied(node) for node in results))
        return torch.fx.GraphModule(self.module, graph)

    def joined(self, parts: Sequence[_Segment]) -> list[_Segment]:
        """Return the parts with those that are not optimised joined, where they can run one after another."""
        left = list(parts)
        done: set[torch.fx.Node] = {node for node in self.nodes if node.op == "placeholder"}
        found: list[_Segment] = []
        while left:
            ready = [part for part in left if done >= set(self.sources(part.nodes))]
            chosen = next((part for part in ready if not part.kernels), ready[0])
            left.remove(chosen)
            done.update(chosen.nodes)
            if found and not chosen.kernels and not found[-1].kernels:
                chosen = _together(found.pop(), chosen)
            found.append(chosen)
        return found

    def loaded(self, segment: _Segment) -> _Step:
        """Return a part that can run; one that is not optimised is compiled as `ladder.compile` does."""
        sources = tuple(self.sources(segment.nodes))
        inside = set(segment.nodes)
        outside = [node for node in (*self.operators, self.output) if node not in inside]
        wanted = {source for node in outside for source in self.sources([node])}
        results = tuple(node for node in segment.nodes if node in wanted)
        if segment.kernels:
            kernels = segment.kernels
            return _Step(segment.part, sources, results, lambda *given: kernels(*map(readable, given)))
        for source in sources:
            if isinstance(self.given(source), QuantizedTensor):
                raise ScheduleError(
                    f"{self.name}: input {self.number(source)} is quantized, and read by what is not"
                    f" superoptimized: {segment.reason}"
                )
        if self.converts(segment.nodes):
            graph = self.subgraph(sources, results)
            return _Step(replace(segment.part, plan="runs in torch: it converts"), sources, results, graph)
        compiler = Compiler()
        with torch.no_grad():
            call = compiler(self.subgraph(sources, results), [self.values[s] for s in sources])
        plan = "\n".join([*(str(built.plan) for built in compiler.built), *compiler.refused])
        return _Step(replace(segment.part, plan=plan), sources, results, call)

    def converts(self, nodes: Sequence[torch.fx.Node]) -> bool:
        """Whether nodes compute in other types than the program's: what rounds then rounds as torch does."""
        values = [self.values[node] for node in nodes]
        return any(isinstance(x, torch.Tensor) and x.dtype not in (self.dtype, torch.float32) for x in values)

    @property
    def operators(self) -> list[torch.fx.Node]:
        """All nodes that parts consist of."""
        return [node for node in self.nodes if node.op != "placeholder" and not self.is_view(node)]


def _together(a: _Segment, b: _Segment) -> _Segment:
    """Return two parts that are not optimised as one."""
    reasons = "; ".join(dict.fromkeys([a.reason, b.reason]))
    return _Segment(FunctionPart((*a.part.operators, *b.part.operators), None, reasons), (*a.nodes, *b.nodes))


class _Run:
    """Runs the parts one after another."""

    def __init__(self, cut: _Cut, steps: Sequence[_Step]) -> None:
        self.steps = steps
        placeholders = [(node, cut.number(node)) for node in cut.nodes if node.op == "placeholder"]
        self.inputs = {node: number for node, number in placeholders if number is not None}
        self.held = {node: cut.values[node] for node, number in placeholders if number is None}
        self.sources = cut.sources([cut.output])
        self.results = cut.subgraph(self.sources, cut.output.args[0])
        self.order = cut.order

    def __call__(self, *inputs: Any) -> Any:
        values = {**self.held, **{node: inputs[number] for node, number in self.inputs.items()}}
        for step in self.steps:
            found = step.call(*(values[source] for source in step.sources))
            values.update(zip(step.results, found if isinstance(found, tuple) else (found,), strict=True))
        results = self.results(*(values[source] for source in self.sources))
        return results[0] if self.order is None else tuple(results[number] for number in self.order)
