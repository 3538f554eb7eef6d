"""Affine functions of channels folded into convolutions, and what is computed of parameters alone.

``(x * w) s + t = x * (w s) + t`` for a factor s and a term t per channel of the result: batch normalisation
in inference. Before a convolution, ``(x s + t) * w = x * (w s) + sum of w t``, if it reads nothing but x:
with zeros around x the term would be missing there. Two sums that meet share one term.

What becomes of the weights depends on nothing that changes from call to call: `fold` makes inputs of it, and
says by which graphs they are computed. Quantized weights stay as they are: factors become one more vector.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ladder.ir.build import GraphBuilder, draws, node_attributes, prune
from ladder.ir.convolution import Convolution, as_convolution
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.ir.indexing import parse_indexing
from tile_types.errors import ShapeError

WIDE = "float32"
"""In which parameters are computed; each is rounded once."""

PURE = (
    "convert", "add", "sub", "mul", "div", "neg", "square", "sqrt", "rsqrt", "reshape", "transpose",
    "restride", "broadcast", "constant", "reduce_sum", "pad",
)  # fmt: skip
"""Operators of what is computed of parameters."""


@dataclass(frozen=True)
class Folded:
    """A graph whose convolutions read parameters that are computed elsewhere.

    graph: It has new inputs.
    made: New input -> the graph that computes it; its inputs have the names of the model's.
    """

    graph: Graph
    made: Mapping[str, Graph]


def fold(graph: Graph, parameters: Collection[str]) -> Folded:
    """Fold affine functions into the weights of convolutions.

    graph: Simplified. Convolutions of groups are folded where channels are last.
    parameters: Inputs that may be parameters. What changes from call to call may be among them: what is made
        of it is made again then.
    """
    folding = _Folding(graph, set(parameters))
    return with_inputs(folding.run(), folding.roots)


@dataclass(frozen=True)
class _Form:
    """``(the core's result) * scale + shift``, not yet in the graph.

    core: The convolution, or the product of windows with the weights of channels by themselves.
    tail: Sums over the windows that follow it.
    x: What it reads instead of its first operand.
    inner, scale, shift: Vectors of parameters: factors of what it reads, factors and terms of its result.
    ttype: Of the value.
    packed: Whether the weight is decoded from a packed one: factors stay apart from it.
    leading: Axes of the weight that count features: of groups and within them, where a reshape joins both.
    behind: Axes behind the channels: none where channels are last.
    grouped: Whether the convolution has groups, whose axis stands before the features'.
    """

    core: Node
    tail: tuple[Node, ...] = ()
    x: str = ""
    inner: str = ""
    scale: str = ""
    shift: str = ""
    ttype: str = ""
    packed: bool = False
    leading: int = 1
    behind: int = 0
    grouped: bool = False


class _Folding:
    """Goes through a graph once; values that a later node may still take in are held back."""

    def __init__(self, graph: Graph, parameters: set[str]) -> None:
        self.graph = graph
        self.g = GraphBuilder(graph.name)
        self.readers: dict[str, int] = {}
        for node in graph.nodes:
            for value in dict.fromkeys(node.inputs):
                self.readers[value] = self.readers.get(value, 0) + 1
        for value in graph.outputs:
            self.readers[value] = self.readers.get(value, 0) + 2
        self.pure = _pure(graph, parameters)
        self.new: dict[str, str] = {}
        self.forms: dict[str, _Form] = {}
        self.roots: list[str] = []

    def run(self) -> Graph:
        """Return the graph with what is computed of parameters first."""
        for node in self.graph.nodes:
            if node.operator == "input" or node.name in self.pure:
                self.copy(node)
        for node in self.graph.nodes:
            if node.values[0] not in self.new:
                self.visit(node)
        return self.g.finish(*(self.value(output) for output in self.graph.outputs))

    def copy(self, node: Node) -> None:
        inputs = tuple(map(self.value, node.inputs))
        self.new.update(zip(node.values, self.g.copy(node, inputs), strict=True))

    def value(self, old: str) -> str:
        """Return the new name of a value; one held back is put into the graph."""
        if old not in self.new:
            self.new[old] = self.put(self.forms.pop(old))
        return self.new[old]

    def visit(self, node: Node) -> None:
        row = _ROWS.get(node.operator)
        form = None if row is None else row(self, node)
        if form is None:
            self.copy(node)
        elif isinstance(form, str):
            self.new[node.name] = form
        else:
            self.forms[node.name] = form

    # forms ----------------------------------------------------------------------------------------
    def taken(self, value: str) -> _Form | None:
        """Return the form of a value that one node alone reads."""
        return self.forms.get(value) if self.readers.get(value) == 1 else None

    def convolution(self, node: Node) -> _Form | None:
        if not node.inputs[1:]:
            return None
        try:
            form = as_convolution(self.graph, node)
        except ShapeError:
            return None
        if node.inputs[1] not in self.pure:
            decodes = self.graph.producer(node.inputs[1]).operator != "input"
            return _Form(node, ttype=node.tile.ttype.name, packed=True) if form.last and decodes else None
        if (form.groups > 1 and not form.last) or not _known(self.graph, node.inputs[1]):
            return None
        if form.groups > 1:
            return _Form(node, x=self.value(node.inputs[0]), ttype=node.tile.ttype.name, grouped=True)
        behind = 0 if form.last else form.rank
        x, factor, term = self.before(node.inputs[0], form, behind)
        shift = self.weighted(node.inputs[1], term, behind) if term else ""
        return _Form(node, (), self.value(x), factor, "", shift, node.tile.ttype.name, behind=behind)

    def before(self, value: str, form: Convolution, behind: int) -> tuple[str, str, str]:
        """Return what a convolution reads below an affine function of channels, its factors and terms."""
        channels = self.graph.tile(value).shape[-1 - behind]
        factor = term = ""
        source = value
        while self.readers[source] == 1 and source not in self.forms:
            node = self.graph.producer(source)
            if node.operator == "convert":
                source = node.inputs[0]
                continue
            found = self.split(node, channels, behind) if node.operator in ("mul", "add") else None
            if found is None or (node.operator == "add" and (any(form.padding) or factor)):
                break
            rest, vector = found
            if node.operator == "mul":
                factor = self.both("mul", factor, vector)
            else:
                term = self.both("add", term, vector)
            source = rest
        if not factor and not term:
            return value, "", ""
        kept = self.graph.tile(source).ttype.name == self.graph.tile(value).ttype.name
        return (source, factor, term) if kept else self.narrowed(source, value, factor, term)

    def narrowed(self, source: str, value: str, factor: str, term: str) -> tuple[str, str, str]:
        """As `before`, below a conversion to the type that the convolution reads."""
        node = self.graph.producer(source)
        if (
            node.operator == "convert"
            and self.graph.tile(node.inputs[0]).ttype == self.graph.tile(value).ttype
        ):
            return node.inputs[0], factor, term
        return value, "", ""

    def weighted_windows(self, node: Node) -> _Form | None:
        """``windows * weights[C, taps]``, both converted."""
        for x, weight in (node.inputs, node.inputs[::-1]):
            shape = self.graph.tile(weight).shape
            windows = self.graph.producer(x)
            windows = self.graph.producer(windows.inputs[0]) if windows.operator == "convert" else windows
            if weight not in self.pure or windows.operator != "map" or len(shape) < 2:
                continue
            if node.tile.shape[-len(shape) :] == shape and _known(self.graph, weight):
                ordered = replace(node, inputs=(x, weight))
                return _Form(ordered, (), self.value(x), ttype=node.tile.ttype.name)
        return None

    def product(self, node: Node) -> _Form | None:
        found = self.affine(node)
        if found is None:
            return self.row_scaled(node) or self.weighted_windows(node)
        form, vector = found
        shift = self.g.add("mul", form.shift, vector) if form.shift else ""
        return replace(form, scale=self.both("mul", form.scale, vector), shift=shift)

    def row_scaled(self, node: Node) -> _Form | None:
        """Take in the scales of rows, which are packed with a quantized weight."""
        for value, scales in (node.inputs, node.inputs[::-1]):
            form = self.taken(value)
            if form is None or not form.packed or form.tail or form.scale or form.shift:
                continue
            if self.graph.producer(scales).operator == "input" and scales not in self.pure:
                del self.forms[value]
                return replace(form, tail=(node,), ttype=node.tile.ttype.name)
        return None

    def sum(self, node: Node) -> _Form | str | None:
        found = self.affine(node)
        if found is not None:
            form, vector = found
            return replace(form, shift=self.both("add", form.shift, vector))
        first, second = (self.taken(value) for value in node.inputs)
        if node.inputs[0] == node.inputs[1] or first is None or second is None or not second.shift:
            return None
        if first.core.operator != "contract" or second.core.operator != "contract":
            return None
        for value in node.inputs:
            del self.forms[value]
        main = self.put(replace(first, shift=self.both("add", first.shift, second.shift), ttype=WIDE))
        other = self.put(replace(second, shift="", ttype=second.core.tile.ttype.name))
        value = self.g.add("add", main, self.wide(other))
        return self.typed(value, node.tile.ttype.name)

    def conversion(self, node: Node) -> _Form | None:
        """Take in a conversion, but for one to a wider type that several read: each converts for itself."""
        form = self.taken(node.inputs[0])
        if form is None or not self.complete(form):
            return None
        wider = node.tile.ttype.elem_bits > self.graph.tile(node.inputs[0]).ttype.elem_bits
        if wider and self.readers.get(node.name, 0) > 1 and (form.shift or form.scale):
            return None
        return replace(form, ttype=node.tile.ttype.name)

    def join(self, node: Node) -> _Form | None:
        """Take in a reshape that puts the features of all groups side by side."""
        form = self.taken(node.inputs[0])
        if form is None or not form.grouped or form.tail or form.scale or form.shift:
            return None
        weight = self.graph.tile(form.core.inputs[1]).shape
        shape = self.graph.tile(node.inputs[0]).shape
        joins = shape[-2:] == weight[:2]
        if not joins or node.tile.shape != (*shape[:-2], product(weight[:2])):
            return None
        return replace(self.forms.pop(node.inputs[0]), tail=(node,), leading=2)

    def reduction(self, node: Node) -> _Form | None:
        form = self.taken(node.inputs[0])
        given = node_attributes(node)
        rank = len(self.graph.tile(node.inputs[0]).shape)
        if form is None or self.complete(form) or given["keep"] or given["axis"] % rank != rank - 1:
            return None
        return replace(form, tail=(*form.tail, node), ttype=node.tile.ttype.name)

    def complete(self, form: _Form) -> bool:
        """Tell whether a form's last axis counts channels: all windows are summed."""
        taps = len(self.graph.tile(form.core.inputs[1]).shape) - 1
        return form.core.operator == "contract" or len(form.tail) == taps

    def affine(self, node: Node) -> tuple[_Form, str] | None:
        """Return the form and the vector that a node applies to it."""
        for value, other in (node.inputs, node.inputs[::-1]):
            form = self.taken(value)
            if form is None or not self.complete(form) or form.ttype != WIDE:
                continue
            vector = self.vector(other, self.channels(form), form.behind)
            if vector and self.graph.tile(value).shape == node.tile.shape:
                return self.forms.pop(value), vector
        return None

    def channels(self, form: _Form) -> Any:
        return product(self.graph.tile(form.core.inputs[1]).shape[: form.leading])

    # vectors --------------------------------------------------------------------------------------
    def split(self, node: Node, channels: Any, behind: int) -> tuple[str, str] | None:
        """Return (value, vector) of a node that applies a vector of parameters to channels."""
        for value, other in (node.inputs, node.inputs[::-1]):
            vector = self.vector(other, channels, behind)
            if vector and self.graph.tile(value).shape == node.tile.shape:
                return value, vector
        return None

    def vector(self, value: str, channels: Any, behind: int) -> str:
        """Return ``[channels]`` of parameters, before axes of one element, float32; or empty."""
        tile = self.graph.tile(value)
        if value not in self.pure or tile.ttype.is_block:
            return ""
        count = product(tile.shape)
        if count == 1:
            one = self.g.add("reshape", self.wide(self.new[value]), shape=(1,))
            return self.g.add("broadcast", one, shape=(channels,))
        if count != channels or len(tile.shape) <= behind or tile.shape[-1 - behind] != channels:
            return ""
        return self.g.add("reshape", self.wide(self.new[value]), shape=(channels,))

    def wide(self, value: str) -> str:
        return self.typed(value, WIDE)

    def typed(self, value: str, ttype: str) -> str:
        same = self.g.tile(value).ttype.name == ttype
        return value if same else self.g.add("convert", value, type=ttype)

    def column(self, vector: str, behind: int) -> str:
        """Return a vector with axes of one element behind."""
        shape = (*self.g.tile(vector).shape, *(1,) * behind)
        return self.g.add("reshape", vector, shape=shape) if behind else vector

    def both(self, operator: str, first: str, second: str) -> str:
        return self.g.add(operator, first, second) if first else second

    def weighted(self, weight: str, term: str, behind: int) -> str:
        """Return the sum over windows and channels of ``weight[F, taps, C] * term[C]``."""
        value = self.g.add("mul", self.wide(self.new[weight]), self.column(term, behind))
        while len(self.g.tile(value).shape) > 1:
            value = self.g.add("reduce_sum", value, axis=len(self.g.tile(value).shape) - 1, keep=False)
        return value

    # results --------------------------------------------------------------------------------------
    def put(self, form: _Form) -> str:
        make = self.contracted if form.core.operator == "contract" else self.summed
        value = make(form)
        if form.shift:
            value = self.g.add("add", self.wide(value), self.term(form))
        return self.typed(value, form.ttype)

    def term(self, form: _Form) -> str:
        """Return the terms of channels: as narrow as results of products that libraries compute."""
        if form.core.operator != "contract":
            return self.root(form.shift)
        stored = self.graph.tile(form.core.inputs[0]) if form.packed else form.core.tile
        return self.wide(self.root(self.typed(self.column(form.shift, form.behind), stored.ttype.name)))

    def contracted(self, form: _Form) -> str:
        if form.packed:
            return self.quantized(form)
        weight = self.root(self.scaled(self.new[form.core.inputs[1]], form))
        value = self.again(form.core, form.x, weight)
        for node in form.tail:
            value = self.again(node, value)
        return value

    def quantized(self, form: _Form) -> str:
        """Put the convolution as it is, scales of rows, then factors of channels."""
        value = self.again(form.core, *map(self.value, form.core.inputs))
        for node in form.tail:
            scales = next(name for name in node.inputs if self.graph.producer(name).operator == "input")
            value = self.again(node, value, self.value(scales))
        return self.g.add("mul", self.wide(value), self.root(form.scale)) if form.scale else value

    def summed(self, form: _Form) -> str:
        """Windows by weights that lie channel beside channel, and their sums."""
        source = self.graph.producer(form.core.inputs[1])
        stored = source.inputs[0] if source.operator == "convert" else source.name
        weight = self.scaled(self.new[stored], form)
        rank = len(self.g.tile(weight).shape)
        turned = self.root(self.g.add("transpose", weight, permutation=(*range(1, rank), 0)))
        back = self.g.add("transpose", turned, permutation=(rank - 1, *range(rank - 1)))
        value = self.again(form.core, form.x, self.typed(back, form.core.tile.ttype.name))
        for node in form.tail:
            value = self.again(node, value)
        return value

    def scaled(self, weight: str, form: _Form) -> str:
        """Return a weight times its factors, in its own type."""
        value, tile = weight, self.g.tile(weight)
        if form.scale:
            lead = form.leading
            ones = (1,) * (len(tile.shape) - lead)
            column = self.g.add("reshape", form.scale, shape=(*tile.shape[:lead], *ones))
            value = self.g.add("mul", self.wide(value), column)
        if form.inner:
            value = self.g.add("mul", self.wide(value), self.column(form.inner, form.behind))
        return self.typed(value, tile.ttype.name)

    def again(self, node: Node, *inputs: str) -> str:
        given: dict[str, Any] = dict(node.attributes)
        return self.g.add(node.operator, *inputs, **given)

    def root(self, value: str) -> str:
        if self.g.node(value).operator not in ("input", "constant") and value not in self.roots:
            self.roots.append(value)
        return value


_ROWS: Mapping[str, Any] = {
    "contract": _Folding.convolution,
    "mul": _Folding.product,
    "add": _Folding.sum,
    "convert": _Folding.conversion,
    "reduce_sum": _Folding.reduction,
    "reshape": _Folding.join,
}
"""Operator -> what it may become: a form, a value of the new graph, or None where it stays."""


def _known(graph: Graph, value: str) -> bool:
    return all(isinstance(extent, int) for extent in graph.tile(value).shape)


def _pure(graph: Graph, parameters: set[str]) -> set[str]:
    """Return the nodes that depend on parameters and numbers alone."""
    found: set[str] = set()
    for node in graph.nodes:
        given = node.operator == "input" and node.name in parameters and not node.tile.ttype.is_block
        moves = node.operator in PURE or _mirrors(node)
        if given or (moves and all(value in found for value in node.inputs)):
            found.add(node.name)
    return found


def _mirrors(node: Node) -> bool:
    """Tell whether a node turns axes around: other maps gather windows, which are of images."""
    if node.operator != "map":
        return False
    (axes,) = parse_indexing(node_attributes(node)["spec"]).operands
    return any(step < 0 for axis in axes for _, step in axis.terms)


def with_inputs(graph: Graph, roots: Sequence[str]) -> Folded:
    """Make inputs of values that are computed of parameters."""
    made: dict[str, Graph] = {}
    nodes = []
    for node in graph.nodes:
        if node.name not in roots:
            nodes.append(node)
            continue
        before = graph.nodes[: graph.positions[node.name] + 1]
        needed = tuple(other for other in before if not draws(other))  # `prune` would keep these
        cone = prune(replace(graph, nodes=needed, outputs=(node.name,)))
        read = {value for other in cone.nodes for value in other.inputs}
        kept = tuple(n for n in cone.nodes if n.operator != "input" or n.name in read)
        if not any(n.operator == "input" for n in kept):  # numbers
            nodes.append(node)
            continue
        made[node.name] = replace(cone, name="parameters", nodes=kept)
        nodes.append(Node(node.name, "input", (), (), (replace(node.tile, layout=None),)))
    pruned = prune(replace(graph, nodes=tuple(nodes)))
    kept_inputs = {value for node in pruned.nodes for value in node.inputs}
    made = {name: cone for name, cone in made.items() if name in kept_inputs}
    return Folded(pruned, made)
