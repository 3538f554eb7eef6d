"""ONNX models into tile graphs: one walk over the nodes; `onnx_rows` and `onnx_models` are the tables.

What depends on no input is computed here, and with symbolic sizes by `onnx_values.SYMBOLIC`; so shapes that
exporters compute by operators are known when they are used. A node without a row is taken apart if the
standard defines it by others; else torch runs it, as a step of the plan if the shapes of its results follow
from those of its operands, and between two plans if they do not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnx

from ladder import faults
from ladder.frontend.importer import Importer, identifier
from ladder.frontend.onnx_branches import BranchedStage, branches
from ladder.frontend.onnx_call import Call, Invalid, Problem, Row, Value, check_stated, title
from ladder.frontend.onnx_check import MOST_COMPUTED, check_computed, check_extents
from ladder.frontend.onnx_classical import DOMAIN as CLASSICAL_DOMAIN
from ladder.frontend.onnx_classical import Expansion, classical_row
from ladder.frontend.onnx_extents import completed, vector_like
from ladder.frontend.onnx_file import DOMAIN, LIMITS, VALUES, OnnxFile, open_onnx
from ladder.frontend.onnx_flow import Flow, LateOfPiece
from ladder.frontend.onnx_inline import renamed
from ladder.frontend.onnx_late import Late, inferred, info_of_known, info_of_tile, shape_of
from ladder.frontend.onnx_lookup import LENIENT, OLDEST, find_row, row_holds, unknown_row
from ladder.frontend.onnx_meeting import by_row
from ladder.frontend.onnx_native import add_native
from ladder.frontend.onnx_nibbles import in_bytes
from ladder.frontend.onnx_sizes import Shapes, SizeDecided, fixed_sizes
from ladder.frontend.onnx_stages import (
    Imported,
    NodeStage,
    Piece,
    Staged,
    attribute_literals,
    has_graphs,
    names_read,
)
from ladder.frontend.onnx_values import Known, known_extents, symbolic_value
from ladder.ir.extents import bind, canonical
from ladder.ir.extents import size_names as names_in
from ladder.runtime.model.program import ImportRefused
from ladder.runtime.onnx_ops.evaluate import (
    bound_node,
    dense_value,
    function_of,
    is_known,
    run_node,
    version_of,
    versions_of,
)
from ladder.runtime.onnx_ops.signals import DRAWS
from ladder.runtime.onnx_ops.table import TABLE, key_of
from ladder.runtime.onnx_ops.values import array_of, value_of
from tile_types.errors import LadderError
from tile_types.identity import require_values
from tile_types.tile import Extent, Tile


def import_onnx(source: Any, problem: Problem, precise: bool = False) -> Imported:
    """Import a model that is one plan.

    source: Path of the file, or `onnx.ModelProto`.
    problem: Gives the normal form of a product whose weight is annotated with a type.
    precise: Whether each operator's result is rounded to its type, and operators stay those of the file.
    Raises ArtifactError if the file is truncated, or its external data is missing.
    Raises ImportRefused if it uses an operator, a version or a form that no table has, or is no single plan;
        the message names it.
    """
    return import_stages(source, problem, precise).one("a tile graph")


def import_stages(
    source: Any, problem: Problem, precise: bool = False, shapes: Shapes | None = None
) -> Staged:
    """Import a model as plans and the nodes between them; errors as `import_onnx`.

    source, problem, precise: As in `import_onnx`; or an `OnnxFile`.
    shapes: Input -> the shape that it has in every call, in place of what the file states.
    """
    with one_error(source):
        file, decided = open_onnx(source), dict[str, int]()
        while True:
            try:
                return Walk(file, problem, precise, shapes or {}, decided).imported()
            except SizeDecided as error:
                decided[error.name] = error.extent


@contextmanager
def one_error(source: Any) -> Iterator[None]:
    """Make whatever the file, which is others', makes fail one class of error."""
    try:
        yield
    except LadderError:
        raise
    except Exception as error:
        what = str(source) if isinstance(source, str | os.PathLike) else "the model"
        raise ImportRefused(f"{what} cannot be imported: {type(error).__name__}: {error}") from error


class Walk:
    """Goes through a model node by node."""

    def __init__(
        self, file: OnnxFile, problem: Problem, precise: bool, shapes: Shapes, decided: Mapping[str, int]
    ) -> None:
        self.file, self.problem, self.precise, self.shapes = file, problem, precise, shapes
        self.decided = decided
        """Size that inputs show -> the only number that it can be."""
        self.open: set[str] = set()
        """Sizes that inputs show."""
        self.sizes: dict[str, int] = {}
        """Size that the file names -> its extent in every call."""
        self.versions: Mapping[str, int] = versions_of(file.model)
        self.values: dict[str, Value | Late] = {}
        self.stated: dict[str, Any] = {}
        self.flow = Flow(file.model.graph.name, precise)

    @property
    def piece(self) -> Piece:
        return self.flow.piece

    @property
    def im(self) -> Importer:
        """The importer of the plan in the making."""
        return self.piece.im

    def imported(self) -> Staged:
        """Walk, and return the stages."""
        graph = self.file.model.graph
        require_values(self.told(VALUES, {}))
        self.stated = {info.name: info for info in (*graph.value_info, *graph.output)}
        for tensor in graph.initializer:
            self.values[tensor.name] = self.file.array(tensor)
        for sparse in graph.sparse_initializer:
            self.values[sparse.values.name] = Known(array_of(dense_value(sparse)))
        inputs = [info for info in graph.input if info.name not in self.values]
        self.sizes = fixed_sizes({info.name: info.type for info in inputs}, self.shapes)
        for info in inputs:
            self.input(info)
        for node in graph.node:
            self.node(node, self.versions)
        self.piece.limits.extend((a, b) for a, b in self.told(LIMITS, []))
        outputs = [info.name for info in graph.output]
        # A result that is listed again is another of that value, with a name of its own.
        own = [name if outputs.index(name) == at else f"{name}:{at}" for at, name in enumerate(outputs)]
        results = {new: self.value(name) for new, name in zip(own, outputs, strict=True)}
        named = {info.name: self._named(info) if self.shapes else info.type for info in inputs}
        return self.flow.staged(self.file.title, named, results, self.tensor)

    def told(self, key: str, absent: Any) -> Any:
        """Return the metadata that Ladder's own exporter stored in a model under a key."""
        found = [entry.value for entry in self.file.model.metadata_props if entry.key == key]
        return json.loads(found[0]) if found else absent

    # values ----------------------------------------------------------------------------------------
    def input(self, info: Any) -> None:
        """Declare an input of the model."""
        late = Late(info.name, self._named(info))
        tile = late.tile
        shape = [0 if extent is None else extent for extent in shape_of(late.info) or ()]
        check_extents([e for e in shape if isinstance(e, int)], f"input {info.name!r}")
        self.open.update(names_in(shape))
        self.flow.show(info.name, shape)  # texts show sizes, too
        if tile is None:
            self.values[info.name] = late
            return
        self.values[info.name] = self.piece.enter(info.name, tile.ttype, tile.shape, identifier(info.name))

    def _named(self, info: Any) -> Any:
        """Return the type of an input, every open extent of which has a name."""
        kind = onnx.TypeProto()
        kind.CopyFrom(info.type)
        if kind.HasField("tensor_type"):
            for axis, dim in enumerate(kind.tensor_type.shape.dim):
                found = bind(self.extent(dim, f"{identifier(info.name)}_{axis}"), self.decided)
                if info.name in self.shapes or dim.dim_param in self.sizes:
                    dim.dim_value = self.shapes.get(info.name, {axis: self.sizes.get(dim.dim_param)})[axis]
                elif isinstance(found, str):
                    dim.dim_param = found
                elif found > 0:
                    dim.dim_value = found
        return kind

    def extent(self, dim: Any, otherwise: str) -> Extent:
        """Return a stated size: a number, an expression of named sizes, or a name of its own."""
        if dim.HasField("dim_value"):
            return int(dim.dim_value) if dim.dim_value != -1 else otherwise
        return canonical(dim.dim_param) if dim.dim_param else otherwise

    def value(self, name: str) -> Value | Late:
        """Return a value by its name in the file."""
        if name not in self.values:
            raise ImportRefused(f"{self.file.title} reads {name!r} before anything computes it")
        return self.values[name]

    def tensor(self, value: Value | Late) -> str:
        """Return a value as one of the tile graph; stored tensors become inputs that the program brings."""
        if not isinstance(value, Late):
            return self.piece.tensor(value)
        tile = value.tile
        assert tile is not None  # callers have checked
        if isinstance(value, LateOfPiece):
            value.piece.wanted[value.name] = value.value
        return self.piece.enter(value.name, tile.ttype, tile.shape, identifier(value.name))

    # nodes -----------------------------------------------------------------------------------------
    def node(self, node: Any, versions: Mapping[str, int]) -> None:
        """Compute a node now, add it to a plan, or make it a stage."""
        try:
            node = in_bytes(node, self.values)
            found = self._computed(node, versions)
        except ImportRefused:
            raise
        except Exception as error:  # what a table or the reference cannot take
            missing = f"it needs the attribute {error}" if isinstance(error, KeyError) else str(error)
            raise ImportRefused(f"{title(node)}: {missing}") from error
        for name, value in zip(node.output, found, strict=False):
            if name and value is not None:
                self.check(node, name, value)
                self.values[name] = self.flow.called(name, value, OLDEST)

    def _computed(self, node: Any, versions: Mapping[str, int]) -> tuple[Value | Late | None, ...]:
        inputs = [self.value(name) if name else None for name in node.input]
        given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.domain == DOMAIN:
            return add_native(self.piece, node, given, self._entered(inputs))
        row = find_row(node, versions)
        known = self._known(node, given, inputs, versions)
        if known is not None:
            return known
        if node.op_type == "If" and isinstance(inputs[0], Known):
            return self._branch(node, given, inputs[0], versions)
        found, why = self._by_row(node, given, inputs, row, versions)
        if found is not None:
            return found
        return (
            self._written(node, given, inputs)
            or self._taken_apart(node, versions, inputs)
            or self._by_torch(node, given, inputs, versions, why)
        )

    def _entered(self, inputs: Sequence[Value | Late | None]) -> list[Value | None]:
        return [self.tensor(value) if isinstance(value, Late) else value for value in inputs]

    def _by_row(
        self, node: Any, given: Mapping[str, Any], inputs: Sequence[Value | Late | None], row: Row | None,
        versions: Mapping[str, int],
    ) -> tuple[tuple[Value, ...] | None, str]:  # fmt: skip
        """Add a node by its row; else return why it has none that serves."""
        version = version_of(node.domain, versions)
        if row is None or not row_holds(node, version):
            return None, f"{node.op_type} of version {version} has no kernel of ours"
        if not all(map(_is_ours, inputs)):
            return None, "operands have types, or a rank, that plans do not have"
        state = self.piece.state()
        try:
            found = by_row(row, self._call(node, given, inputs, version))
            reason = f"this form of it is not supported: {_form(given)}"
        except Invalid:
            raise
        except SizeDecided as error:
            if error.name in self.open:
                raise
            found, reason = None, str(error)
        except LadderError as error:
            found, reason = None, str(error).removeprefix(f"{title(node)}: ")
        except Exception as error:
            found, reason = None, faults.tolerated(error, f"torch runs {title(node)}")
        if found is None:
            self.piece.back(state)
            if any(name in given for name in ("weight_ttype", "activation_ttype")):
                raise ImportRefused(f"{title(node)}: {reason}")
            return None, reason
        return (found if isinstance(found, tuple) else (found,)), ""

    def _call(
        self, node: Any, given: Mapping[str, Any], inputs: Sequence[Value | Late | None], version: int
    ) -> Call:
        entered = tuple(self._entered(inputs))
        return Call(self.piece, node, given, entered, version, self.problem, self.file.array)

    def _known(
        self, node: Any, given: Mapping[str, Any], inputs: Sequence[Value | Late | None],
        versions: Mapping[str, int],
    ) -> tuple[Value, ...] | None:  # fmt: skip
        """Compute what depends on no input, or only on symbolic sizes."""
        if node.op_type == "Shape" and node.domain in ("", "ai.onnx"):
            return self._shape(given, inputs)
        if key_of(node.domain, node.op_type) in DRAWS or node.op_type in ("Loop", "Scan"):
            return None  # what may take any time is not for imports
        read = {name: self.value(name) for name in names_read(node)}
        if not all(isinstance(value, Known) for value in read.values()):
            return None
        operands = [value for value in inputs if isinstance(value, Known)]
        if any(isinstance(value, Known) and value.symbolic for value in read.values()):
            found = symbolic_value(node.op_type, given, operands)
            return None if found is None else (found,)
        return self._folded(node, {n: v for n, v in read.items() if isinstance(v, Known)}, versions)

    def _shape(self, given: Mapping[str, Any], inputs: Sequence[Value | Late | None]) -> tuple[Known] | None:
        value = inputs[0]
        shape: Sequence[Extent | None] | None
        if isinstance(value, Late):
            shape = shape_of(value.info)
        else:
            assert value is not None  # Shape has one operand
            shape = value.shape if isinstance(value, Known) else self.im.shape(value)
        if shape is None or any(extent is None for extent in shape):
            return None
        return (
            known_extents(
                [e for e in shape[given.get("start", 0) : given.get("end", len(shape))] if e is not None]
            ),
        )

    def _folded(
        self, node: Any, operands: Mapping[str, Known], versions: Mapping[str, int]
    ) -> tuple[Value, ...] | None:
        """Compute a node of known operands, unless it makes more than tensors or too much of them."""
        if not is_known(node, versions):
            return None
        lenient = LENIENT.get(node.op_type, lambda array: array)
        arrays = {name: lenient(value.array) for name, value in operands.items()}
        if not has_graphs(node):
            check_computed(node, arrays, _opsets(versions), title(node))
        values = {name: value_of(array) for name, array in arrays.items()}
        run_node(bound_node(node, versions), values)
        found = [values.get(name) for name in node.output]
        if any(value is None or isinstance(value, list) for value in found):
            return None
        for value in found:
            check_extents(value.shape, title(node), MOST_COMPUTED)  # type: ignore[union-attr]
        return tuple(Known(array, text=array.dtype == object) for array in map(array_of, found))

    def _branch(
        self, node: Any, given: Mapping[str, Any], condition: Known, versions: Mapping[str, int]
    ) -> tuple[Value | Late | None, ...]:
        graph = given["then_branch" if bool(condition.array.reshape(-1)[0]) else "else_branch"]
        prefix, names = self._prefix(node), dict[str, str]()
        for tensor in graph.initializer:
            names[tensor.name] = f"{prefix}{tensor.name}"
            self.values[names[tensor.name]] = self.file.array(tensor)
        for inner in renamed(graph.node, names, prefix):
            self.node(inner, versions)
        return tuple(self.value(names.get(info.name, info.name)) for info in graph.output)

    def _written(
        self, node: Any, given: Mapping[str, Any], inputs: Sequence[Value | Late | None]
    ) -> tuple[Value | Late, ...] | None:
        """Add the operators that a numeric operator of a classical model stands for."""
        if node.domain != CLASSICAL_DOMAIN or not all(map(_is_ours, inputs)):
            return None
        tiles = [self._tile(self._info(value)) for value in inputs if value is not None]
        plain = [tile for tile in tiles if tile is not None]
        row = classical_row(node, plain) if 0 < len(plain) == len(inputs) else None
        found = row and row(Expansion(node.input, plain, given, self._prefix(node), self.values, self.node))
        return tuple(map(self.value, found)) if found else None

    def _taken_apart(
        self, node: Any, versions: Mapping[str, int], inputs: Sequence[Value | Late | None]
    ) -> tuple[Value | Late | None, ...] | None:
        """Walk the graph by which the standard defines an operator that torch has no row for."""
        if key_of(node.domain, node.op_type) in TABLE or has_graphs(node) or not is_known(node, versions):
            return None
        infos = [None if value is None else self._info(value) for value in inputs]
        if any(info is None and value is not None for info, value in zip(infos, inputs, strict=True)):
            return None
        function = function_of(node, versions, infos)
        prefix = self._prefix(node)
        names = dict.fromkeys(function.input, "") | dict(zip(function.input, node.input, strict=False))
        for name, own in zip(function.output, node.output, strict=False):
            if own and name not in names:
                names[name] = own
        for inner in renamed(function.node, names, prefix):
            self.node(inner, {**versions, **versions_of(function)})
        return tuple(
            self.values.get(names.get(name, "")) if at < len(node.output) and node.output[at] else None
            for at, name in enumerate(function.output)
        )

    def _prefix(self, node: Any) -> str:
        return f"{node.output[0]}/{self.flow.number()}/"

    # torch -----------------------------------------------------------------------------------------
    def _by_torch(
        self, node: Any, given: Mapping[str, Any], inputs: Sequence[Value | Late | None],
        versions: Mapping[str, int], why: str,
    ) -> tuple[Value | Late | None, ...]:  # fmt: skip
        """Let torch run a node: as a step of the plan, or between plans."""
        if not is_known(node, versions):
            raise unknown_row(node, why)
        infos = self._inferred(node, given, versions)
        results = [infos.get(name) for name in node.output]
        tiles = [self._tile(info) for info in results]
        literals = attribute_literals(given)
        draws = key_of(node.domain, node.op_type) in DRAWS
        if literals is None or has_graphs(node) or draws or not all(map(_is_ours, inputs)):
            return self._stage(node, results, versions, why)
        needed = [tile for tile, name in zip(tiles, node.output, strict=True) if name]
        if not needed or any(tile is None for tile in needed) or not all(node.output):
            return self._stage(node, results, versions, why)
        return self._step(node, literals, inputs, [tile for tile in needed if tile is not None], versions)

    def _step(
        self, node: Any, literals: Any, inputs: Sequence[Value | Late | None], tiles: Sequence[Tile],
        versions: Mapping[str, int],
    ) -> tuple[Value, ...]:  # fmt: skip
        """Add a node to the plan as a call of torch."""
        operands = [None if value is None else self.tensor(value) for value in inputs]
        read = [value for value in operands if value is not None]
        places = iter(range(len(read)))
        arguments = tuple(None if value is None else ("%", next(places)) for value in operands)
        keywords = (
            ("attributes", literals),
            ("domain", node.domain),
            ("version", version_of(node.domain, versions)),
        )
        return self.im.call(f"onnx.{node.op_type}", arguments, keywords, read, tiles).values

    def _stage(
        self, node: Any, results: Sequence[Any], versions: Mapping[str, int], why: str
    ) -> tuple[Late, ...]:
        stage = NodeStage(node, tuple(names_read(node)), dict(versions), f"{title(node)}: {why}")
        if node.op_type == "If" and node.domain in ("", "ai.onnx"):
            read = {name: self.value(name) for name in stage.reads}
            known = {n: v for n, v in read.items() if isinstance(v, Known) and not v.symbolic}
            infos = {n: self._info(v) for n, v in read.items()}
            models = branches(node, {a.name: a.g for a in node.attribute}, infos, known, self.file.model)
            stage = (
                stage
                if models is None
                else BranchedStage(node, stage.reads, stage.versions, stage.why, models)
            )
        self.flow.add(stage, self.values, self.tensor)
        return tuple(self.flow.late(name, info) for name, info in zip(node.output, results, strict=True))

    def _info(self, value: Value | Late) -> Any:
        """Return the ONNX type of a value."""
        if isinstance(value, Late):
            return value.info
        return info_of_known(value) if isinstance(value, Known) else info_of_tile(self.im.tile(value))

    def _inferred(self, node: Any, given: Mapping[str, Any], versions: Mapping[str, int]) -> dict[str, Any]:
        """Return the types of a node's results."""
        read = {name: self.value(name) for name in names_read(node)}
        infos = {name: self._info(value) for name, value in read.items()}
        operands = [infos.get(name) for name in node.input]
        if node.op_type in LENIENT:
            return {} if operands[0] is None else {node.output[0]: vector_like(operands[0])}
        known = {name: value for name, value in read.items() if isinstance(value, Known)}
        found = inferred(node, infos, known, _opsets(versions), title(node))
        constants = [known.get(name) for name in node.input]
        key, version = key_of(node.domain, node.op_type), version_of(node.domain, versions)
        return completed(key, node, given, operands, constants, version, found)

    def _tile(self, info: Any) -> Tile | None:
        """Return the tile of a result if its extents are numbers or follow from sizes of the plan."""
        tile = Late("", info).tile
        return tile if tile is not None and all(map(self.flow.is_shown, tile.shape)) else None

    def check(self, node: Any, name: str, value: Value | Late) -> None:
        """Compare the type and shape that a row infers with those that the file states."""
        info = self.stated.get(name)
        if info is not None and isinstance(value, str) and info.type.HasField("tensor_type"):
            check_stated(title(node), self.file.title, info, self.im.tile(value))


def _is_ours(value: Value | Late | None) -> bool:
    """Tell whether a plan can read a value."""
    if isinstance(value, Late):
        return value.tile is not None
    return not isinstance(value, Known) or value.has_type


def _opsets(versions: Mapping[str, int]) -> list[Any]:
    return [onnx.helper.make_opsetid(domain, version) for domain, version in versions.items()]


def _form(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items()) or "no attributes"
