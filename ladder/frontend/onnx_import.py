"""ONNX models into tile graphs: one walk over the nodes; `onnx_rows` and `onnx_models` are the tables.

What depends on no input is computed here, by the standard's own reference implementation, and with symbolic
sizes by `onnx_values.SYMBOLIC`; so shapes that exporters compute by operators are known when they are used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch

from ladder.frontend.importer import Importer, identifier
from ladder.frontend.onnx_attention import SPELT_ATTENTION
from ladder.frontend.onnx_call import Call, Row, Value, element_type, title
from ladder.frontend.onnx_check import check_computed
from ladder.frontend.onnx_file import DOMAIN, LIMITS, OnnxFile, open_onnx
from ladder.frontend.onnx_values import SYMBOLIC, Known, as_tensor, known_extents
from ladder.ir.build import prune
from ladder.ir.extents import canonical, show_shape
from ladder.ir.gemm import Gemm
from ladder.ir.rewrite import rewrite
from ladder.runtime.model.program import ImportRefused, Program, Source
from tile_types.errors import LadderError, ShapeError, unknown_name
from tile_types.quantized import QuantizedTensor
from tile_types.tile import Extent

Problem = Callable[..., Gemm]
"""``(n, k, weight type, activation type, **options)`` -> the product's normal form."""


@dataclass(frozen=True)
class Weight:
    """A quantized weight of a model.

    Parameters
    ----------
    gemm
        The product that it is for.
    value
        The matrix in canonical storage.
    """

    gemm: Gemm
    value: QuantizedTensor


@dataclass(frozen=True)
class Imported:
    """An imported model, for any device.

    Parameters
    ----------
    program
        Arguments are the model's inputs in order; sources of kind ``weight`` and ``part`` name a position
        in ``weights``.
    inputs, outputs
        Names in the file.
    weights
        Quantized weights, to be packed for a device.
    limits
        Pairs (extent, at most): what the sizes of a call must keep to.
    """

    program: Program
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[Weight, ...] = field(default=(), compare=False)
    limits: tuple[tuple[Extent, Extent], ...] = ()


def import_onnx(source: Any, problem: Problem, precise: bool = False) -> Imported:
    """Import a model.

    Parameters
    ----------
    source
        Path of the file, or `onnx.ModelProto`.
    problem
        Gives the normal form of a product whose weight is annotated with a type.
    precise
        Whether each operator's result is rounded to its type, and operators stay those of the file.

    Raises
    ------
    ArtifactError
        If the file is truncated, or its external data is missing.
    ImportRefused
        If it uses an operator, a version or a form that no table has; the message names it.
    """
    try:
        return Walk(open_onnx(source), problem, precise).imported()
    except LadderError:
        raise
    except Exception as error:  # the file is others': whatever it makes fail is one class of error
        what = "the model" if isinstance(source, onnx.ModelProto) else str(source)
        raise ImportRefused(f"{what} cannot be imported: {type(error).__name__}: {error}") from error


class Walk:
    """Goes through a model node by node."""

    def __init__(self, file: OnnxFile, problem: Problem, precise: bool = False) -> None:
        self.file, self.problem = file, problem
        self.im = Importer(identifier(file.model.graph.name) or "model")
        self.im.precise = precise
        self.values: dict[str, Value] = {}
        self.sources: dict[str, Source] = {}
        self.held: list[torch.Tensor] = []
        self.weights: list[Weight] = []
        self.limits: list[tuple[Extent, Extent]] = []
        self.names: dict[str, str] = {}
        self.kept: dict[int, tuple[Known, str]] = {}
        self.stated: dict[str, Any] = {}

    def imported(self) -> Imported:
        """Walk, and return the program."""
        graph = self.file.model.graph
        self.stated = {info.name: info for info in (*graph.value_info, *graph.output)}
        stored = {tensor.name for tensor in graph.initializer}
        inputs = [info for info in graph.input if info.name not in stored]
        for tensor in graph.initializer:
            self.values[tensor.name] = self.file.array(tensor)
        for at, info in enumerate(inputs):
            self.input(at, info)
        for node in graph.node:
            self.node(node)
        for entry in self.file.model.metadata_props:
            if entry.key == LIMITS:
                self.limits += [(a, b) for a, b in json.loads(entry.value)]
        outputs = [info.name for info in graph.output]
        return Imported(
            self.program(outputs),
            tuple(info.name for info in inputs),
            tuple(outputs),
            tuple(self.weights),
            tuple(dict.fromkeys(self.limits)),
        )

    def program(self, outputs: Sequence[str]) -> Program:
        found: list[int | tuple[Any]] = []
        results: list[str] = []
        for name in outputs:
            value = self.value(name)
            if isinstance(value, Known) and not value.symbolic:
                found.append((as_tensor(value.array),))
                continue
            found.append(len(results))
            results.append(self.tensor(value))
        if not results:
            raise ImportRefused(f"{self.file.title} computes nothing: its outputs depend on no input")
        graph = prune(self.im.g.finish(*results))
        if not self.im.precise and DOMAIN not in {entry.domain for entry in self.file.model.opset_import}:
            graph = rewrite(graph, SPELT_ATTENTION)  # what Ladder wrote stays as it was
        names = {node.name for node in graph.inputs}
        sources = {name: source for name, source in self.sources.items() if name in names}
        return Program(graph, sources, tuple(found), (), tuple(self.held), precise=self.im.precise)

    # values ----------------------------------------------------------------------------------------
    def input(self, at: int, info: Any) -> None:
        """Declare an input of the model."""
        kind = info.type.tensor_type
        if not info.type.HasField("tensor_type") or not kind.HasField("shape"):
            raise ImportRefused(
                f"input {info.name!r} is no tensor of known rank: export the model with shapes"
            )
        shape = [
            self.extent(dim, f"{identifier(info.name)}_{axis}") for axis, dim in enumerate(kind.shape.dim)
        ]
        name = self.im.g.input(identifier(info.name), element_type(kind.elem_type, info.name), shape)
        self.values[info.name] = name
        self.sources[name] = Source("argument", (at,))

    def extent(self, dim: Any, otherwise: str) -> Extent:
        """Return a stated size: a number, an expression of named sizes, or a name of its own."""
        if dim.HasField("dim_value"):
            return int(dim.dim_value)
        if not dim.dim_param:
            return otherwise
        try:
            return canonical(dim.dim_param)
        except LadderError:
            return self.names.setdefault(dim.dim_param, identifier(dim.dim_param))

    def value(self, name: str) -> Value:
        """Return a value by its name in the file."""
        if name not in self.values:
            raise ImportRefused(f"{self.file.title} reads {name!r} before anything computes it")
        return self.values[name]

    def tensor(self, value: Value) -> str:
        """Return a value as one of the tile graph; stored tensors become inputs that the program brings."""
        if isinstance(value, str):
            return value
        known = self.kept.get(id(value))
        if known is None:
            known = self.kept[id(value)] = (value, self._made(value))
        return known[1]

    def _made(self, value: Known) -> str:
        if value.symbolic:
            return self._sizes(value)
        flat = value.array.reshape(-1)
        if len(flat) and flat.tobytes() == flat[:1].tobytes() * len(flat) and is_plain(flat[0]):
            return self.im.expand(self.im.number(flat[0].item(), value.ttype), value.shape)
        self.held.append(as_tensor(value.array))
        name = self.im.g.input("stored", value.ttype, value.shape)
        self.sources[name] = Source("held", (len(self.held) - 1,))
        return name

    def _sizes(self, value: Known) -> str:
        """Return symbolic sizes as a tensor: they are read off the inputs of a call."""
        parts = [self.im.reshape(self.im.operand(extent, "int64"), (1,)) for extent in value.extents()]
        joined = parts[0] if len(parts) == 1 else self.im.g.add("concat", *parts, axis=0)
        return self.im.reshape(joined, value.shape)

    # nodes -----------------------------------------------------------------------------------------
    def node(self, node: Any) -> None:
        """Compute a node now, or add it to the graph."""
        try:
            found = self._computed(node)
        except ImportRefused:
            raise
        except Exception as error:  # what a table or the reference cannot take
            raise ImportRefused(f"{title(node)}: {error}") from error
        for name, value in zip(node.output, found, strict=False):
            if name:
                self.check(node, name, value)
                self.values[name] = value

    def _computed(self, node: Any) -> tuple[Value, ...]:
        inputs = [self.value(name) if name else None for name in node.input]
        given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.domain == DOMAIN:
            from ladder.frontend.onnx_export import add_native

            return add_native(self, node, given, inputs)
        row = find_row(node)
        known = self._known(node, given, inputs)
        if known is not None:
            return known
        found = row(Call(self, node, given, tuple(inputs)))
        if found is None:
            raise ImportRefused(f"{title(node)}: this form of it is not supported: {_form(given)}")
        return found if isinstance(found, tuple) else (found,)

    def _known(
        self, node: Any, given: Mapping[str, Any], inputs: Sequence[Value | None]
    ) -> tuple[Value, ...] | None:
        """Compute what depends on no input, or only on symbolic sizes."""
        if node.op_type == "Shape":
            return (self._shape(given, inputs),)
        if not all(value is None or isinstance(value, Known) for value in inputs):
            return None
        operands = [value for value in inputs if isinstance(value, Known)]
        if any(value.symbolic for value in operands):
            function = SYMBOLIC.get(node.op_type)
            found = function(given, *operands) if function is not None else None
            return None if found is None else (found,)
        return tuple(Known(np.asarray(value)) for value in self._reference(node, operands))

    def _shape(self, given: Mapping[str, Any], inputs: Sequence[Value | None]) -> Known:
        value = inputs[0]
        assert value is not None  # Shape has one operand
        shape = value.shape if isinstance(value, Known) else self.im.shape(value)
        return known_extents(shape[given.get("start", 0) : given.get("end", len(shape))])

    def _reference(self, node: Any, operands: Sequence[Known]) -> Any:
        from onnx.reference import ReferenceEvaluator

        names = [name for name in node.input if name]
        body = onnx.helper.make_graph(
            [node],
            "known",
            [onnx.helper.make_tensor_value_info(name, 0, None) for name in dict.fromkeys(names)],
            [onnx.helper.make_tensor_value_info(name, 0, None) for name in node.output if name],
        )
        model = onnx.helper.make_model(body, opset_imports=self.file.model.opset_import)
        feeds = {name: operand.array for name, operand in zip(names, operands, strict=True)}
        check_computed(node, feeds, self.file.model.opset_import, title(node))
        return ReferenceEvaluator(model).run(None, feeds)

    def check(self, node: Any, name: str, value: Value) -> None:
        """Compare what a row gives with what the file states."""
        info = self.stated.get(name)
        if info is None or not isinstance(value, str) or not info.type.HasField("tensor_type"):
            return
        kind, tile = info.type.tensor_type, self.im.tile(value)
        ttype = element_type(kind.elem_type, name) if kind.elem_type else tile.ttype.name
        stated: list[Extent] = list(tile.shape)
        if kind.HasField("shape"):
            stated = [dim.dim_value if dim.HasField("dim_value") else "?" for dim in kind.shape.dim]
        fits = len(stated) == len(tile.shape) and all(
            a == b or not isinstance(a, int) or not isinstance(b, int)
            for a, b in zip(stated, tile.shape, strict=True)
        )
        if not fits or tile.ttype.name != ttype:
            raise ShapeError(
                f"{title(node)} gives {tile.ttype}{show_shape(tile.shape)}, the file states"
                f" {ttype}{show_shape(stated)} for {name!r}"
            )


def is_plain(number: Any) -> bool:
    """Tell whether a number is finite, and no zero below 0: then it may be an attribute."""
    found = float(number)
    return np.isfinite(found) and not (found == 0 and np.signbit(found))


def find_row(node: Any) -> Row:
    """Return the row of a node's operator.

    Raises
    ------
    ImportRefused
        If there is none; the nearest names are suggested.
    """
    from ladder.frontend.onnx_models import ROWS

    found = ROWS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if found is None:
        if node.domain not in ("", "ai.onnx"):
            raise ImportRefused(f"{title(node)}: operators of the domain {node.domain!r} are not known here")
        raise ImportRefused(f"{title(node)}: {unknown_name('ONNX operator', node.op_type, ROWS)}")
    return found


def _form(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items()) or "no attributes"
