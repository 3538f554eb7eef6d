"""Stages of an ONNX model: plans of tile graphs, and nodes between them with data-dependent shapes.

Most models are one plan. A node is a stage of its own where the shape of a result depends on values of the
inputs, where a type is none of a plan's, or where it runs graphs of its own (If, Loop, Scan).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ladder.frontend.importer import Importer
from ladder.frontend.onnx_check import check_extents
from ladder.frontend.onnx_values import Known, as_tensor, is_plain
from ladder.ir.build import prune
from ladder.ir.extents import bind_shape
from ladder.ir.extents import size_names as names_in
from ladder.ir.gemm import Gemm
from ladder.ir.graph import Graph
from ladder.lower.chain.scatter import size_names
from ladder.runtime.model.program import ImportRefused, Program, Source
from tile_types.quantized import QuantizedTensor
from tile_types.tile import Extent


@dataclass(frozen=True)
class Weight:
    """A quantized weight of a model.

    gemm: The product that it is for.
    value: The matrix in canonical storage.
    """

    gemm: Gemm
    value: QuantizedTensor


@dataclass(frozen=True)
class Imported:
    """An imported model, or a part of one that is one plan, for any device.

    program: Arguments are the inputs in order; sources of kind ``weight`` and ``part`` name a position in
        ``weights``.
    inputs, outputs: Names in the file.
    weights: Quantized weights, to be packed for a device.
    limits: Pairs (extent, at most): what the sizes of a call must keep to.
    """

    program: Program
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[Weight, ...] = field(default=(), compare=False)
    limits: tuple[tuple[Extent, Extent], ...] = ()


@dataclass(frozen=True)
class NodeStage:
    """A node that torch runs between plans.

    node: ``onnx.NodeProto``.
    reads: Values that it, or a graph of its own, reads.
    versions: Domain -> version of its operators.
    why: Why it is in no plan.
    """

    node: Any
    reads: tuple[str, ...]
    versions: Mapping[str, int]
    why: str


@dataclass(frozen=True)
class Staged:
    """An imported model.

    title: For messages.
    inputs: Name -> ONNX type, in order.
    outputs: Names.
    stages: In order.
    stored: Values that nodes between plans, or callers, read and no stage makes, by name.
    """

    title: str
    inputs: Mapping[str, Any]
    outputs: tuple[str, ...]
    stages: tuple[Imported | NodeStage, ...]
    stored: Mapping[str, Any]

    @property
    def single(self) -> Imported | None:
        """The only plan, if the model is one."""
        whole = len(self.stages) == 1 and isinstance(self.stages[0], Imported)
        if not whole:
            return None
        (stage,) = self.stages
        assert isinstance(stage, Imported)  # as was just said
        return stage if stage.inputs == tuple(self.inputs) and stage.outputs == self.outputs else None

    def one(self, what: str) -> Imported:
        """Return the only plan.

        Raises ImportRefused if there are several; the message says why, and what cannot be done.
        """
        found = self.single
        if found is None:
            nodes = [stage for stage in self.stages if isinstance(stage, NodeStage)]
            because = f", since {nodes[0].why}" if nodes else ""
            raise ImportRefused(
                f"{self.title} is no single plan{because}: it runs in {len(self.stages)} stages, {what}"
                " needs one; give sizes, axes and types as stored tensors, or simplify the model first"
            )
        return found


class Piece:
    """A plan in the making: what becomes one tile graph."""

    def __init__(self, name: str, precise: bool) -> None:
        self.im = Importer(name)
        self.im.precise = precise
        self.sources: dict[str, Source] = {}
        self.held: list[torch.Tensor] = []
        self.weights: list[Weight] = []
        self.limits: list[tuple[Extent, Extent]] = []
        self.kept: dict[int, tuple[Known, str]] = {}
        self.entered: dict[str, str] = {}
        """Name of a value of the call -> the graph's input that it is."""
        self.reads: list[str] = []
        """Values of the call, by position of the argument."""
        self.wanted: dict[str, str] = {}
        """Name that something else reads -> value of the graph."""

    def argument(self, name: str) -> int:
        """Return the position of a value of the call among the arguments."""
        if name not in self.reads:
            self.reads.append(name)
        return self.reads.index(name)

    def enter(self, name: str, ttype: Any, shape: Sequence[Extent], wish: str) -> str:
        """Return a value of the call as one of the graph."""
        if name not in self.entered:
            value = self.entered[name] = self.im.g.input(wish, ttype, shape)
            self.sources[value] = Source("argument", (self.argument(name),))
        return self.entered[name]

    def tensor(self, value: str | Known) -> str:
        """Return a value as one of the graph; stored tensors become inputs that the program brings."""
        if isinstance(value, str):
            return value
        known = self.kept.get(id(value))
        if known is None:
            known = self.kept[id(value)] = (value, self._stored(value))
        return known[1]

    def _stored(self, value: Known) -> str:
        if value.symbolic:
            return self._extents(value)
        flat = value.array.reshape(-1)
        if len(flat) and flat.tobytes() == flat[:1].tobytes() * len(flat) and is_plain(flat[0]):
            return self.im.expand(self.im.number(flat[0].item(), value.ttype), value.shape)
        name = self.im.g.input("stored", value.ttype, value.shape)
        self.hold(name, as_tensor(value.array))
        return name

    def hold(self, name: str, tensor: torch.Tensor) -> None:
        """Bring a tensor as an input of the graph."""
        self.held.append(tensor)
        self.sources[name] = Source("held", (len(self.held) - 1,))

    def _extents(self, value: Known) -> str:
        """Return symbolic sizes as a tensor: they are read off the inputs of a call."""
        parts = [self.im.reshape(self.im.operand(extent, "int64"), (1,)) for extent in value.extents()]
        joined = parts[0] if len(parts) == 1 else self.im.g.add("concat", *parts, axis=0)
        return self.im.cast(self.im.reshape(joined, value.shape), value.ttype)

    def state(self) -> tuple[int, int]:
        """Return what `back` goes back to."""
        return len(self.limits), len(self.weights)

    def back(self, state: tuple[int, int]) -> None:
        """Forget limits and weights of a row that gave up; its nodes are read by nothing."""
        del self.limits[state[0] :], self.weights[state[1] :]

    def finished(
        self, homes: Mapping[str, tuple[str, int]], literals: Mapping[str, Known], order: Sequence[str],
        *, whole: bool,
    ) -> Imported:  # fmt: skip
        """Return the plan.

        homes: Size -> value of the call and axis that show it.
        literals: Results that are known, by name.
        order: Names of the results.
        whole: Whether it is the whole model: then inputs that nothing reads stay.
        """
        found: list[int | tuple[Any]] = []
        results: list[str] = []
        for name in order:
            if name in literals:
                found.append((as_tensor(literals[name].array),))
                continue
            found.append(len(results))
            results.append(self.wanted[name])
        graph = prune(self.im.g.finish(*results))
        _check_least(graph)
        if not whole:
            read = {value for node in graph.nodes for value in node.inputs} | set(graph.outputs)
            kept = tuple(node for node in graph.nodes if node.operator != "input" or node.name in read)
            graph = type(graph)(graph.name, graph.level, kept, graph.outputs)
        names = {node.name for node in graph.inputs}
        sources = {name: source for name, source in self.sources.items() if name in names}
        limits = tuple(dict.fromkeys(self.limits))
        asked = dict.fromkeys((*size_names(graph), *names_in(e for pair in limits for e in pair)))
        sizes = {} if whole else self._sizes(asked, homes)
        program = Program(graph, sources, tuple(found), (), tuple(self.held), 0, sizes, self.im.precise)
        return Imported(program, tuple(self.reads), tuple(order), tuple(self.weights), limits)

    def _sizes(
        self, names: Mapping[str, None], homes: Mapping[str, tuple[str, int]]
    ) -> dict[str, tuple[int, int]]:
        """Return where a call of the plan shows each size."""
        return {name: (self.argument(homes[name][0]), homes[name][1]) for name in names if name in homes}


def names_read(node: Any) -> list[str]:
    """Return the values that a node and the graphs in it read from around it."""
    found = [name for name in node.input if name]
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            own = {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}
            for inner in graph.node:
                found += [name for name in names_read(inner) if name not in own]
                own |= set(inner.output)
            found += [info.name for info in graph.output if info.name not in own]
    return list(dict.fromkeys(found))


def has_graphs(node: Any) -> bool:
    """Tell whether a node runs graphs."""
    return any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)


def attribute_literals(given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...] | None:
    """Return attributes as a tile graph can hold them; None if it cannot, or not so many."""
    if sum(len(value) for value in given.values() if isinstance(value, Sequence)) > MOST_LITERALS:
        return None
    found = tuple((name, _literal(value)) for name, value in sorted(given.items()))
    return None if any(value is _NONE for _, value in found) else found


MOST_LITERALS = 1 << 20
"""Elements of a node's attributes in a tile graph, where each is an object: trees may have many more."""

_NONE = object()


def _literal(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, float) and not np.isfinite(value):
        return _NONE
    if isinstance(value, int | float | str):
        return value
    if isinstance(value, Sequence):
        items = tuple(map(_literal, value))
        return _NONE if any(item is _NONE for item in items) else items
    return _NONE


def _check_least(graph: Graph) -> None:
    """Raise ImportRefused if a value has too many elements even where all open sizes are 1."""
    for node in graph.nodes:
        for tile in node.tiles:
            sizes = dict.fromkeys(names_in(tile.shape), 1)
            least = [max(int(extent), 0) for extent in bind_shape(tile.shape, sizes)]
            check_extents(least, f"{node.operator} {node.name!r}")
