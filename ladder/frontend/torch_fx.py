"""torch.fx graphs, as capture and ``torch.compile`` hand them over, into tile graphs.

The graph is traced once more with fake tensors, which reduces torch's operators to ATen's core (some two
hundred, functional, with known shapes and types); each is then a row of a table, or a library call.
"""

from __future__ import annotations

import operator
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch._dispatch.python
import torch.fx

from ladder import faults, interrupts
from ladder.frontend.aten_graphs import RUN, to_aten
from ladder.frontend.aten_models import MODEL_ROWS
from ladder.frontend.aten_rows import ROWS
from ladder.frontend.complex_parts import ComplexParts
from ladder.frontend.fx_nodes import (
    CARRIED,
    LAID_OUT,
    RELAID,
    STRIDED,
    TYPES,
    depends_on_strides,
    draws,
    first_result,
    inverse,
    is_open,
    is_whole,
    may_turn,
    out_of_order,
    shows_copy,
    size_of,
    sizes_shown,
    stays_within,
    stored_order,
    tensors_around,
    type_and_shape,
    used_results,
)
from ladder.frontend.importer import Importer
from ladder.frontend.joined import (
    HALVES,
    PARAMETER,
    Serves,
    dense_gemm,
    is_packed,
    joined_products,
    mark_arguments,
    served_on,
    stored_weight,
    width_of,
)
from ladder.ir.build import GraphBuilder, prune
from ladder.ir.extents import product
from ladder.ir.gemm import Gemm
from ladder.ir.gemm_graph import insert_convolution, insert_gemm, weight_type
from ladder.ir.graph import Graph
from ladder.ir.ops import get_operator
from ladder.runtime import operator as torch_operators  # noqa: F401  registers ladder::attention
from ladder.runtime.compile import Request
from ladder.runtime.model.program import ImportRefused, Program, Source
from ladder.runtime.model.sizes import ELEMENT
from tile_types.errors import DTypeError, LadderError, ShapeError
from tile_types.library import get_type
from tile_types.tile import Extent, Tile


def import_fx(
    module: torch.fx.GraphModule,
    examples: Sequence[Any],
    name: str = "model",
    *,
    join: bool = False,
    packed_for: str = "",
    precise: bool = False,
) -> Program:
    """Import a graph.

    module: The graph; it is not changed.
    examples: One argument per placeholder: tensors (fake ones may have symbolic sizes) and numbers.
    name: Of the tile graph.
    join: Whether products of one value become one product of their weights side by side.
    packed_for: Target whose kernels compute products of plain halves, on packed copies, where
        `schedules.dense` finds that they serve; empty: none.
    precise: Whether each operator's result is rounded as torch does, and operators stay those of the graph.
    Raises ImportRefused if it changes torch's state, has shapes of values, or types that tile graphs lack.
    """
    traced = to_aten(module, examples)
    mark_arguments(traced, examples, module.meta.get("of_model"))
    walk = _Walk(traced, name, join, served_on(packed_for))
    walk.im.precise = precise
    return walk.program()


class _Walk:
    """Goes through an ATen graph node by node."""

    def __init__(
        self, module: torch.fx.GraphModule, name: str, join: bool = False, serves: Serves | None = None
    ) -> None:
        self.module, self.serves = module, serves
        self.groups = joined_products(module, serves) if join else {}
        self.wholes: dict[torch.fx.Node, str] = {}
        self.im = Importer(name)
        self.im.few_launches = join
        self.complex = ComplexParts(self)
        self.values: dict[torch.fx.Node, Any] = {}
        self.sources: dict[str, Source] = {}
        self.given: dict[torch.fx.Node, str] = {}
        """Arguments whose axes lie in another order in memory -> their inputs."""
        self.held: list[Any] = []
        self.positions: dict[torch.fx.Node, int] = {}
        self.updates: list[tuple[int, Any]] = []
        self.sizes: dict[str, tuple[int, int]] = {}

    def program(self) -> Program:
        """Walk, and return the program."""
        results: Any = ()
        for node in self.module.graph.nodes:
            try:
                if node.op == "output":
                    results = node.args[0]
                else:
                    self.values[node] = _STEPS[node.op](self, node)
            except ImportRefused:
                raise
            except (LadderError, KeyError, TypeError, ValueError) as error:
                raise ImportRefused(f"{node.target} at {node.name}: {error}") from error
        return self._finish(results)

    def _finish(self, results: Any) -> Program:
        outputs: list[str] = []

        def place(value: str) -> int:
            outputs.append(value)
            return len(outputs) - 1

        found: list[int | tuple[Any]] = []
        for item in results if isinstance(results, (list, tuple)) else [results]:
            if isinstance(item, torch.fx.Node) and isinstance(item.meta.get("val"), torch.Tensor):
                found.append(place(self.result(item)))
            else:
                found.append((self.extent(item),))
        updates = tuple((at, place(value)) for at, value in self.updates)
        for node in self.module.graph.nodes:
            if node.meta.get(RUN) and isinstance(self.values[node], str):
                place(self.values[node])
        graph = _pruned(self.im.g, outputs)
        names = {node.name for node in graph.inputs}
        sources = {name: source for name, source in self.sources.items() if name in names}
        held, count = tuple(self.held), len(self.positions)
        return Program(graph, sources, tuple(found), updates, held, count, self.sizes, self.im.precise)

    # nodes -----------------------------------------------------------------------------------------
    def placeholder(self, node: torch.fx.Node) -> Any:
        at = self.positions[node] = len(self.positions)
        self.sizes = sizes_shown(node.meta.get("val"), at) | self.sizes
        return self._input(node, Source("argument", (at,), of_model=node.meta.get("of_model", False)))

    def attribute(self, node: torch.fx.Node) -> Any:
        held = self.module
        for part in str(node.target).split("."):
            held = getattr(held, part)
        self.held.append(held)
        node.meta.setdefault("val", held)
        return self._input(node, Source("held", (len(self.held) - 1,)))

    def _input(self, node: torch.fx.Node, source: Source) -> Any:
        value = node.meta.get("val")
        if value is None:
            return None  # a number, which tracing has put where it is used
        if not isinstance(value, torch.Tensor):
            return self.extent(value)
        if value.dtype not in TYPES and value.dtype not in CARRIED:
            return None  # an array of a packed weight; any other use of it is refused
        name = self.im.g.input(node.name, *type_and_shape(value))
        self.sources[name] = source
        order = None if node.meta.get(PARAMETER) else stored_order(value)
        if order is None or inverse(order) == order == tuple(range(value.ndim)):
            return name
        self.given[node] = name
        return self.im.permute(self.im.g.add("restride", name, permutation=order), inverse(order))

    def result(self, node: torch.fx.Node) -> str:
        """Return a value that lies as in the program."""
        value: str = self.values[node]
        order = stored_order(node.meta["val"])
        if node in self.positions or order is None:
            return self.given.get(node, value)
        return self.im.g.add("restride", self.im.permute(value, order), permutation=inverse(order))

    def function(self, node: torch.fx.Node) -> Any:
        if node.target is operator.getitem:
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        if not isinstance(node.target, torch._ops.OpOverload):
            return self.extent(node.meta["val"])  # arithmetic of sizes
        if "val" not in node.meta:
            return None  # a check that tracing leaves behind
        if node in self.groups:
            return self.columns(node)
        namespace, _, name = str(node.target).partition(".")
        if not isinstance(node.meta.get("val"), torch.Tensor | list | tuple):
            of = self.positions.get(next(iter(node.all_input_nodes), node))
            if of is not None and node.target is torch.ops.aten._local_scalar_dense.default:
                self.sizes = sizes_shown(node.meta["val"], of, ELEMENT) | self.sizes
            return self.extent(node.meta["val"])  # a size
        special = _SPECIAL.get(f"{namespace}.{name}")
        return special(self, node) if special is not None else self._by_row(node, name)

    def _by_row(self, node: torch.fx.Node, name: str) -> Any:
        """Return what the row of an operator makes of it; without one, the call of the operator itself."""
        row = ROWS.get(name) or MODEL_ROWS.get(name)
        by_memory = node.target in STRIDED and not node.all_input_nodes[0].meta["val"].is_contiguous()
        if row is None or by_memory or not all(value.dtype in TYPES for value in tensors_around(node)):
            return self.complex.called(node, name)
        first, self.im.used = first_result(node), used_results(node)
        self.im.on_cpu, self.im.stated = first.device.type == "cpu", tuple(map(size_of, first.shape))
        try:
            arguments = [self.im.seen(self.argument(value), TYPES[first.dtype]) for value in node.args]
            keywords = {key: self.argument(value) for key, value in node.kwargs.items()}
            found = row(self.im, TYPES[first.dtype], *arguments, **keywords)
            if found is not None and self._gives_all(found) and self._is_as_stated(node, found):
                return found
        except ImportRefused:
            raise
        except Exception as error:
            interrupts.pass_on(error)
            if not (is_open(node) and isinstance(error, LadderError)):  # rows need not know open sizes
                faults.tolerated(error, f"{node.target} runs in torch")
        return self.call(node)

    def _gives_all(self, found: Any) -> bool:
        """Tell whether a row gives every result that is used: of norms most give no statistics."""
        return not isinstance(found, tuple) or all(found[at] is not None for at in self.im.used)

    def _is_as_stated(self, node: torch.fx.Node, found: Any) -> bool:
        """Tell whether what the rows infer is what torch infers; open sizes may be written otherwise.

        Raises ShapeError if known sizes, or types, differ.
        """
        values = node.meta["val"] if isinstance(node.meta["val"], list | tuple) else (node.meta["val"],)
        for value, stated in zip(found if isinstance(found, tuple) else (found,), values, strict=False):
            if value is None or not isinstance(stated, torch.Tensor):
                continue
            tile, (ttype, shape) = self.im.tile(value), type_and_shape(stated)
            if (tile.ttype.name, tile.shape) == (ttype, shape):
                continue
            if not is_open(node):
                raise ShapeError(
                    f"{node.target} gives {ttype}{list(shape)}, its row {tile.ttype}{list(tile.shape)}"
                )
            return False
        return True

    def argument(self, value: Any) -> Any:
        """Return an argument as rows take it."""
        if isinstance(value, torch.fx.Node):
            return self.values[value]
        if isinstance(value, list | tuple):
            return [self.argument(item) for item in value]
        return self.extent(value)

    def extent(self, value: Any) -> Any:
        """Return a number; a symbolic one as an extent.

        Raises ImportRefused if it is no extent but depends on open sizes.
        """
        if isinstance(value, torch.fx.Node):
            return self.values[value] if value in self.values else self.extent(value.meta["val"])
        if isinstance(value, torch.SymInt):
            return size_of(value)
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise ImportRefused(f"a number depends on sizes: {value}")
        return value

    # calls -----------------------------------------------------------------------------------------
    def call(self, node: torch.fx.Node) -> Any:
        """Leave an operator to the library."""
        inputs: list[str] = []
        lying = ChainMap(self._laid_out(node), self.values)
        arguments = self._literal(list(node.args), inputs, lying)
        keywords = tuple((key, self._literal(value, inputs, lying)) for key, value in _named(node).items())
        stated = node.meta["val"]
        values = stated if isinstance(stated, list | tuple) else (stated,)
        if not all(value is None or isinstance(value, torch.Tensor) for value in values):
            raise ImportRefused(f"{node.target} returns {stated!r}")
        tiles = [Tile(get_type(ttype), shape) for ttype, shape in map(type_and_shape, values)]
        target = RELAID.get(str(node.target), str(node.target))
        added = self.im.call(target, arguments, keywords, inputs, tiles, draws(node))
        return added.values if isinstance(stated, list | tuple) else added.name

    def _laid_out(self, node: torch.fx.Node) -> dict[torch.fx.Node, str]:
        """Return copies of what an operator reads in the order of memory, that lie as in the program."""
        found: dict[torch.fx.Node, str] = {}
        for source in node.all_input_nodes:
            value = source.meta["val"]
            if not isinstance(value, torch.Tensor) or not self.values[source]:
                continue
            if node.target in STRIDED and source is not node.args[0]:
                continue  # what is written there is read by its axes
            if node.target in STRIDED and not (is_whole(value) or stays_within(node, value)):
                raise ImportRefused(f"{node.target} of a part of a tensor")
            if source in self.positions:
                continue
            asks, dense = depends_on_strides(node), value.is_contiguous()
            same = self._is_dense(source) if dense else not asks
            if same and asks and dense:
                same = not may_turn(self.im.g, self.values[source], out_of_order(self.positions, self.values))
            if shows_copy(source) or not (same or self._shows_argument(source)):
                found[source] = self._of_strides(LAID_OUT, source)
        return found

    def _is_dense(self, source: torch.fx.Node) -> bool:
        """Tell whether a value lies in the order of its axes here."""
        node = self.im.g.node(self.values[source])
        while node.operator == "reshape":
            node = self.im.g.node(node.inputs[0])
        return get_operator(node.operator).engine != "view"

    def _shows_argument(self, source: torch.fx.Node) -> bool:
        """Tell whether a value is a view of an argument: it lies as in the program."""
        while isinstance(source.target, torch._ops.OpOverload) and source.target.is_view:
            source = source.all_input_nodes[0]
        return source in self.positions

    def _of_strides(self, target: str, source: torch.fx.Node, *rest: Any) -> str:
        """Return what an operator of ours makes of a value and its strides in the program."""
        value = source.meta["val"]
        extents = [size_of(step) for step in value.stride()]
        steps = tuple(("extent", step) if isinstance(step, str) else step for step in extents)
        ttype, shape = type_and_shape(value)
        arguments, tiles = (("%", 0), steps, *rest), [Tile(get_type(ttype), shape)]
        random = target != LAID_OUT
        return self.im.call(target, arguments, (), [self.values[source]], tiles, random).name

    def bernoulli(self, node: torch.fx.Node) -> Any:
        """Draw numbers in the order in which the operand lies: the functional operator would not."""
        source, p = node.args[:2]
        dense = torch._prims_common.is_non_overlapping_and_dense_or_false
        if source.meta["val"].is_contiguous() or node.kwargs or not dense(source.meta["val"]):  # type: ignore[union-attr]
            return self.call(node)
        return self._of_strides("ladder.bernoulli.default", source, p)  # type: ignore[arg-type]

    def _literal(self, value: Any, inputs: list[str], values: Mapping[torch.fx.Node, Any]) -> Any:
        """Return an argument as an attribute holds it; tensors become places among the operands."""
        if isinstance(value, torch.fx.Node) and isinstance(value.meta["val"], torch.Tensor):
            if values[value] is None:
                raise DTypeError(f"{value.name} has a type that tile graphs lack: {value.meta['val'].dtype}")
            inputs.append(values[value])
            return ("%", len(inputs) - 1)
        if isinstance(value, list | tuple):
            return tuple(self._literal(item, inputs, values) for item in value)
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return ("torch", str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            return ("device", str(value))
        found = self.extent(value)
        return ("extent", found) if isinstance(found, str) and not isinstance(value, str) else found

    def update(self, node: torch.fx.Node) -> Any:
        """``copy_`` into an argument: what the program changes outside of itself."""
        target, value = node.args[:2]
        if target not in self.positions:
            raise ImportRefused("a tensor is changed in place that is no argument")
        new = self.im.cast(self.values[value], self.im.ttype(self.values[target]))  # type: ignore[index]
        self.updates.append((self.positions[target], new))  # type: ignore[index]
        return new

    def quantized_product(self, node: torch.fx.Node) -> Any:
        """Return a quantized product, as `insert_gemm` writes it."""
        gemm = Request.parse(str(node.args[4])).gemm
        return self.call(node) if gemm.experts or gemm.token_group else self.products((node,))

    def quantized_convolution(self, node: torch.fx.Node) -> Any:
        """Return a quantized convolution, as `insert_convolution` writes it."""
        x, arrays, bias, residual, text = node.args
        gemm = Request.parse(str(text)).gemm
        if gemm.windows is not None and gemm.windows.groups > 1:
            return self.call(node)
        source = self.side_by_side("weight", [arrays], gemm)
        weight = self.new_input("weight", source, weight_type(gemm), (gemm.n, gemm.k))
        added = {"bias": bias, "residual": residual}
        given = {role: self.values[value] for role, value in added.items() if value is not None}  # type: ignore[index]
        if not gemm.scale:
            of_weight = replace(source, kind="part", gemm=None)
            given["row_scale"] = self.new_input("row_scale", of_weight, "float32", (gemm.n,))
        return insert_convolution(self.im.g, gemm, self.values[x], weight, given)  # type: ignore[index]

    def columns(self, node: torch.fx.Node) -> str:
        """Return a product as columns of the one that computes all products of its group."""
        group = self.groups[node]
        if group[0] not in self.wholes:
            quantized = "matmul" in str(node.target)
            self.wholes[group[0]] = (self.products if quantized else self.plain_products)(group)
        whole = self.wholes[group[0]]
        if len(group) == 1:
            return whole
        begin = sum(width_of(other) for other in group[: group.index(node)])
        return self.im.take_axis(whole, -1, begin, width_of(node))

    def products(self, nodes: Sequence[torch.fx.Node]) -> str:
        """Return the product of one value with the quantized weights of all nodes side by side."""
        x, _, _, token_scale, text = nodes[0].args
        one, im = Request.parse(str(text)).gemm, self.im
        gemm = replace(one, n=sum(map(width_of, nodes)))
        value = self.values[x]  # type: ignore[index]
        shape = im.shape(value)
        rows = im.reshape(value, (product(shape[:-1]), gemm.k))
        count = im.shape(rows)[0]
        source = self.side_by_side("weight", [node.args[1] for node in nodes], gemm)
        weight = self.new_input("weight", source, weight_type(gemm), (gemm.n, gemm.k))
        given: dict[str, str] = {}
        if not gemm.scale:
            of_weight = replace(source, kind="part", gemm=None)
            given["row_scale"] = self.new_input("row_scale", of_weight, "float32", (gemm.n,))
        if gemm.bias:
            given["bias"] = self.vectors([node.args[2] for node in nodes])
        if gemm.token_scale:
            given["token_scale"] = im.reshape(self.values[token_scale], (count,))  # type: ignore[index]
        return im.reshape(insert_gemm(im.g, gemm, rows, weight, count, given), (*shape[:-1], gemm.n))

    def plain_products(self, nodes: Sequence[torch.fx.Node]) -> str:
        """Return the product of one value with the weights of all nodes side by side."""
        x, last = nodes[0].args[-2:]
        value, out = self.values[x], type_and_shape(nodes[0].meta["val"])[0]  # type: ignore[index]
        found = [stored_weight(node.args[-1]) for node in nodes]  # type: ignore[arg-type]
        stored, turned = [[weight[0]] for weight in found if weight], stored_weight(last)[1]  # type: ignore
        width, depth = sum(map(width_of, nodes)), self.im.shape(value)[-1]
        biases = [node.args[0] for node in nodes if len(node.args) == 3]
        if is_packed(nodes, self.serves):
            gemm = replace(dense_gemm(nodes, HALVES[nodes[0].meta["val"].dtype]), epilogue=())
            source = replace(self.side_by_side("weight", stored, gemm), dense=True, turned=turned)
            weight = self.new_input("weight", source, out, (width, depth))
            given = {"bias": self.vectors(biases)} if biases else {}
            return insert_gemm(self.im.g, gemm, value, weight, self.im.shape(value)[0], given)
        source = replace(self.side_by_side("argument", stored), turned=turned)
        weight = self.new_input("weight", source, out, (depth, width) if turned else (width, depth))
        total = self.im.g.add("matmul", value, weight, transpose_b=not turned, type=out)
        return self.im.arithmetic("add", [total, self.vectors(biases)], out) if biases else total

    def vectors(self, nodes: Sequence[Any]) -> str:
        """Return the biases of several products one after the other."""
        if len(nodes) == 1:
            return self.values[nodes[0]]  # type: ignore[no-any-return]
        tiles = [self.im.tile(self.values[node]) for node in nodes]
        width = sum(int(tile.shape[0]) for tile in tiles)
        source = self.side_by_side("argument", [[node] for node in nodes])
        return self.new_input("bias", source, tiles[0].ttype.name, (width,))

    def side_by_side(self, kind: str, arrays: Sequence[Any], gemm: Gemm | None = None) -> Source:
        """Return the source of what several placeholders, or lists of them, hold side by side."""
        places = [tuple(self.positions[part] for part in parts) for parts in arrays]
        return Source(kind, places[0], gemm) if len(places) == 1 else Source(kind, (), gemm, tuple(places))

    def new_input(self, name: str, source: Source, ttype: str, shape: Sequence[Extent]) -> str:
        """Add an input that comes from ``source``."""
        added = self.im.g.input(name, ttype, tuple(shape))
        self.sources[added] = source
        return added


_STEPS: dict[str, Callable[[_Walk, torch.fx.Node], Any]] = {
    "placeholder": _Walk.placeholder,
    "get_attr": _Walk.attribute,
    "call_function": _Walk.function,
}

_SPECIAL: dict[str, Callable[[_Walk, torch.fx.Node], Any]] = {
    "aten.copy_.default": _Walk.update,
    "aten.bernoulli.p": _Walk.bernoulli,
    "ladder.matmul.default": _Walk.quantized_product,
    "ladder.matmul_with_gradient.default": _Walk.quantized_product,
    "ladder.convolve.default": _Walk.quantized_convolution,
}
"""Operators that are more than a row."""


def _pruned(builder: GraphBuilder, outputs: Sequence[str]) -> Graph:
    if not outputs:
        raise ImportRefused("the graph computes no tensor")
    return prune(builder.finish(*outputs))


def _named(node: torch.fx.Node) -> dict[str, Any]:
    """Return the named arguments of an operator; one that reads no tensor is told its type.

    The default that it was traced under may be another where it runs.
    """
    made, schema = node.meta["val"], getattr(node.target, "_schema", None)
    takes_dtype = schema is not None and any(item.name == "dtype" for item in schema.arguments)
    reads = any(isinstance(other.meta.get("val"), torch.Tensor) for other in node.all_input_nodes)
    tells = takes_dtype and not reads and isinstance(made, torch.Tensor)
    return {**node.kwargs, "dtype": made.dtype} if tells else node.kwargs
