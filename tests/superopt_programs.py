"""Small programs for the tests of the superoptimizer: a notation, equal pairs and near misses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.ir.build import infer_tile
from ladder.ir.graph import Node
from ladder.ir.ops import get_operator
from tile_types.errors import LadderError

TYPE = "float32"


class Value:
    """A value of a graph under construction, with operators."""

    def __init__(self, builder: GraphBuilder, name: str) -> None:
        self.builder, self.name = builder, name

    def op(self, operator: str, *others: Value | float, **attributes: Any) -> Value:
        names = [self._lift(other).name for other in (self, *others)]
        return Value(self.builder, self.builder.add(operator, *names, **attributes))

    def _lift(self, other: Value | float) -> Value:
        if isinstance(other, Value):
            return other
        return Value(self.builder, self.builder.add("constant", value=float(other), type=TYPE))

    def __add__(self, other):
        return self.op("add", other)

    def __radd__(self, other):
        return self._lift(other).op("add", self)

    def __sub__(self, other):
        return self.op("sub", other)

    def __rsub__(self, other):
        return self._lift(other).op("sub", self)

    def __mul__(self, other):
        return self.op("mul", other)

    def __rmul__(self, other):
        return self._lift(other).op("mul", self)

    def __truediv__(self, other):
        return self.op("div", other)

    def __rtruediv__(self, other):
        return self._lift(other).op("div", self)

    def __matmul__(self, other):
        return self.op("matmul", other)

    def __neg__(self):
        return self.op("neg")

    @property
    def shape(self):
        return self.builder.tile(self.name).shape

    @property
    def T(self):
        return self.op("transpose", permutation=(1, 0))

    def sum(self, axis: int):
        return self.op("reduce_sum", axis=axis)

    def exp(self):
        return self.op("exp")

    def sqrt(self):
        return self.op("sqrt")

    def rsqrt(self):
        return self.op("rsqrt")

    def square(self):
        return self.op("square")

    def silu(self):
        return self.op("silu")

    def sigmoid(self):
        return self.op("sigmoid")

    def tanh(self):
        return self.op("tanh")

    def reshape(self, *shape: int):
        return self.op("reshape", shape=shape)

    def broadcast(self, *shape: int):
        return self.op("broadcast", shape=shape)

    def slice(self, begin, shape):
        return self.op("slice", begin=begin, shape=shape)


def concat(axis: int, *values: Value) -> Value:
    return values[0].op("concat", *values[1:], axis=axis)


Body = Callable[..., Any]


def program(body: Body, shapes: dict[str, tuple[int, ...]]) -> Graph:
    """Return the kernel graph of a function of values."""
    g = GraphBuilder("program")
    results = body(*(Value(g, g.input(name, TYPE, shape)) for name, shape in shapes.items()))
    results = results if isinstance(results, tuple) else (results,)
    return g.finish(*(result.name for result in results))


A, B, C, W = (2, 3), (2, 3), (2, 3), (3, 2)
ROW, COLUMN = (1, 3), (2, 1)

IDENTITIES: dict[str, tuple[dict[str, tuple[int, ...]], Body, Body]] = {
    "add commutes": ({"a": A, "b": B}, lambda a, b: a + b, lambda a, b: b + a),
    "mul commutes": ({"a": A, "b": B}, lambda a, b: a * b, lambda a, b: b * a),
    "add associates": ({"a": A, "b": B, "c": C}, lambda a, b, c: (a + b) + c, lambda a, b, c: a + (b + c)),
    "mul associates": ({"a": A, "b": B, "c": C}, lambda a, b, c: (a * b) * c, lambda a, b, c: a * (b * c)),
    "mul distributes": ({"a": A, "b": B, "c": C}, lambda a, b, c: a * (b + c), lambda a, b, c: a * b + a * c),
    "sub is add of neg": ({"a": A, "b": B}, lambda a, b: a - b, lambda a, b: a + -b),
    "neg is mul by -1": ({"a": A}, lambda a: -a, lambda a: a * -1.0),
    "double": ({"a": A}, lambda a: a + a, lambda a: a * 2.0),
    "square": ({"a": A}, lambda a: a.square(), lambda a: a * a),
    "binomial": (
        {"a": A, "b": B}, lambda a, b: (a + b).square(), lambda a, b: a.square() + 2.0 * a * b + b.square(),
    ),
    "difference of squares": (
        {"a": A, "b": B}, lambda a, b: (a + b) * (a - b), lambda a, b: a.square() - b.square(),
    ),
    "division of a sum": (
        {"a": A, "b": B, "c": C}, lambda a, b, c: (a + b) / c, lambda a, b, c: a / c + b / c,
    ),
    "mul into div": ({"a": A, "b": B, "c": C}, lambda a, b, c: a * (b / c), lambda a, b, c: (a * b) / c),
    "div of div": ({"a": A, "b": B, "c": C}, lambda a, b, c: (a / b) / c, lambda a, b, c: a / (b * c)),
    "div by div": ({"a": A, "b": B, "c": C}, lambda a, b, c: a / (b / c), lambda a, b, c: a * c / b),
    "reciprocal": ({"a": A, "b": B}, lambda a, b: a / b, lambda a, b: a * (1.0 / b)),
    "common denominator": (
        {"a": A, "b": B}, lambda a, b: 1.0 / a + 1.0 / b, lambda a, b: (a + b) / (a * b),
    ),
    "cancel": ({"a": A, "b": B}, lambda a, b: (a * b) / b, lambda a, b: a * 1.0),
    "sum of sums": (
        {"a": A, "b": B}, lambda a, b: (a + b).sum(1), lambda a, b: a.sum(1) + b.sum(1),
    ),
    "order of sums": ({"a": A}, lambda a: a.sum(0).sum(1), lambda a: a.sum(1).sum(0)),
    "mul out of sum": ({"a": A, "c": COLUMN}, lambda a, c: (a * c).sum(1), lambda a, c: a.sum(1) * c),
    "div out of sum": ({"a": A, "c": COLUMN}, lambda a, c: (a / c).sum(1), lambda a, c: a.sum(1) / c),
    "div past matmul": (
        {"a": A, "w": W, "c": COLUMN}, lambda a, w, c: (a / c) @ w, lambda a, w, c: (a @ w) / c,
    ),
    "scale into weight": (
        {"a": A, "w": W, "r": ROW}, lambda a, w, r: (a * r) @ w, lambda a, w, r: a @ (r.T * w),
    ),
    "scale of columns": (
        {"a": A, "w": W, "r": (1, 2)}, lambda a, w, r: (a @ w) * r, lambda a, w, r: a @ (w * r),
    ),
    "matmul associates": (
        {"a": A, "w": W, "v": (2, 2)}, lambda a, w, v: (a @ w) @ v, lambda a, w, v: a @ (w @ v),
    ),
    "matmul distributes": (
        {"a": A, "w": W, "v": W}, lambda a, w, v: a @ (w + v), lambda a, w, v: a @ w + a @ v,
    ),
    "matmul distributes left": (
        {"a": A, "b": B, "w": W}, lambda a, b, w: (a + b) @ w, lambda a, b, w: a @ w + b @ w,
    ),
    "transposed product": ({"a": A, "w": W}, lambda a, w: (a @ w).T, lambda a, w: w.T @ a.T),
    "transpose_b": (
        {"a": A, "w": W}, lambda a, w: a @ w, lambda a, w: a.op("matmul", w.T, transpose_b=True),
    ),
    "matmul is contract": (
        {"a": A, "w": W}, lambda a, w: a @ w, lambda a, w: a.op("contract", w, spec="m k, k n -> m n"),
    ),
    "split k": (
        {"a": (2, 4), "w": (4, 2)}, lambda a, w: a @ w,
        lambda a, w: a.slice((0, 0), (2, 2)) @ w.slice((0, 0), (2, 2))
        + a.slice((0, 2), (2, 2)) @ w.slice((2, 0), (2, 2)),
    ),
    "lora concat": (
        {"x": A, "w": W, "a": (3, 1), "b": (1, 2)}, lambda x, w, a, b: x @ w + (x @ a) @ b,
        lambda x, w, a, b: concat(1, x, x @ a) @ concat(0, w, b),
    ),
    "columns concat": (
        {"x": A, "w": W, "v": W}, lambda x, w, v: concat(1, x @ w, x @ v),
        lambda x, w, v: x @ concat(1, w, v),
    ),
    "two transposes": ({"a": A}, lambda a: a.T.T, lambda a: a * 1.0),
    "reshape of reshape": (
        {"a": A}, lambda a: a.reshape(6).reshape(3, 2), lambda a: a.reshape(3, 2),
    ),
    "square of broadcast": (
        {"r": ROW}, lambda r: r.broadcast(2, 3).square(), lambda r: r.square().broadcast(2, 3),
    ),
    "exp of a sum": ({"a": A, "b": B}, lambda a, b: (a + b).exp(), lambda a, b: a.exp() * b.exp()),
    "exp of neg": ({"a": A}, lambda a: (-a).exp(), lambda a: 1.0 / a.exp()),
    "exp of double": ({"a": A}, lambda a: (a * 2.0).exp(), lambda a: a.exp().square()),
    "exp of half": ({"a": A}, lambda a: (a * 0.5).exp().square(), lambda a: a.exp()),
    "sigmoid": ({"a": A}, lambda a: a.sigmoid(), lambda a: a.exp() / (1.0 + a.exp())),
    "silu": ({"a": A}, lambda a: a.silu(), lambda a: a * a.sigmoid()),
    "tanh": ({"a": A}, lambda a: a.tanh(), lambda a: (a.exp() - (-a).exp()) / (a.exp() + (-a).exp())),
    "tanh by sigmoid": ({"a": A}, lambda a: a.tanh(), lambda a: 2.0 * (2.0 * a).sigmoid() - 1.0),
    "softmax is shift invariant": (
        {"a": A, "c": COLUMN}, lambda a, c: a.exp() / a.exp().sum(1),
        lambda a, c: (a - c).exp() / (a - c).exp().sum(1),
    ),
    "softmax past matmul": (
        {"a": A, "v": W}, lambda a, v: (a.exp() / a.exp().sum(1)) @ v,
        lambda a, v: (a.exp() @ v) / a.exp().sum(1),
    ),
    "sigmoids add to one": ({"a": A}, lambda a: a.sigmoid() + (-a).sigmoid(), lambda a: a - a + 1.0),
    "rsqrt": ({"a": A, "b": B}, lambda a, b: a * b.rsqrt(), lambda a, b: a / b.sqrt()),
    "square of sqrt": ({"a": COLUMN}, lambda a: a.sqrt().square(), lambda a: a * 1.0),
    "conjugate": (
        {"a": (2, 1), "b": (2, 1)}, lambda a, b: (b + a.sqrt()) * (b - a.sqrt()), lambda a, b: b.square() - a,
    ),
    "rms norm past matmul": (
        {"a": A, "w": W}, lambda a, w: (a / (a.square().sum(1) * 0.25).sqrt()) @ w,
        lambda a, w: (a @ w) / (a.square().sum(1) * 0.25).sqrt(),
    ),
    "rms norm with gain": (
        {"a": A, "r": ROW, "w": W}, lambda a, r, w: (a / (a.square().sum(1) * 0.25).sqrt() * r) @ w,
        lambda a, r, w: (a @ (r.T * w)) * (a.square().sum(1) * 0.25).rsqrt(),
    ),
    "gated mlp": (
        {"a": A, "w": W, "v": W}, lambda a, w, v: (a @ w).silu() * (a @ v),
        lambda a, w, v: (a @ v) * (a @ w) / (1.0 + (-(a @ w)).exp()),
    ),
    "mean of squares": (
        {"a": A}, lambda a: (a.square() * 0.5).sum(1), lambda a: a.op("contract", a, spec="m k, m k -> m")
        .reshape(2, 1) / 2.0,
    ),
}  # fmt: skip
"""Name -> shapes of the inputs and two equal programs."""

CONTEXTS: dict[str, Callable[[Value], Any]] = {
    "alone": lambda y: y,
    "into a product": lambda y: (y * 3.0) * y,
    "under a sum": lambda y: y.sum(0),
    "as a denominator": lambda y: 1.0 / (y + 2.0),
    "two outputs": lambda y: (y, y + 1.0),
}
"""What is done with the result of both programs of a pair."""


@dataclass(frozen=True)
class Pair:
    """Two programs with a name."""

    name: str
    first: Graph
    second: Graph


def equal_pairs() -> Iterator[Pair]:
    for label, (shapes, left, right) in IDENTITIES.items():
        for context, wrap in CONTEXTS.items():
            yield Pair(
                f"{label}, {context}",
                program(lambda *v, left=left, wrap=wrap: wrap(left(*v)), shapes),
                program(lambda *v, right=right, wrap=wrap: wrap(right(*v)), shapes),
            )


OTHER_OPERATOR = {
    "add": ("sub", "mul"), "sub": ("add",), "mul": ("add", "div"), "div": ("mul",), "silu": ("sigmoid",),
    "sigmoid": ("silu", "tanh"), "tanh": ("sigmoid",), "sqrt": ("rsqrt",), "rsqrt": ("sqrt",),
    "square": ("neg",), "neg": ("square",), "exp": ("silu",),
}  # fmt: skip
SCALES = (1.0009765625, -1.0, 2.0)


def mutations(node: Node) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield near misses of one node as changed fields of it."""
    attributes = dict(node.attributes)
    if len(node.inputs) == 2 and node.inputs[0] != node.inputs[1]:
        yield f"swapped operands of {node.operator}", {"inputs": node.inputs[::-1]}
    for other in OTHER_OPERATOR.get(node.operator, ()):
        yield f"{other} for {node.operator}", {"operator": other}
    if node.operator == "add":
        yield "dropped term", {"drop": node.inputs[0]}
        yield "dropped second term", {"drop": node.inputs[1]}
    if node.operator in ("exp", "sqrt", "transpose", "square", "neg"):
        yield f"dropped {node.operator}", {"drop": node.inputs[0]}
    if node.operator == "reduce_sum":
        yield "wrong axis", {"attributes": (("axis", 1 - attributes["axis"]),)}
    if node.operator == "matmul":
        flipped = () if attributes.get("transpose_b") else (("transpose_b", True),)
        yield "transposed operand", {"attributes": flipped}
    if node.operator == "constant":
        for scale in SCALES:
            yield (
                f"wrong scale {scale}",
                {"attributes": (*_without(node, "value"), ("value", attributes["value"] * scale))},
            )
    if node.operator == "slice" and attributes["begin"][-1]:
        moved = (*attributes["begin"][:-1], attributes["begin"][-1] - 1)
        yield "off by one", {"attributes": (*_without(node, "begin"), ("begin", moved))}


def _without(node: Node, name: str) -> tuple[Any, ...]:
    return tuple(pair for pair in node.attributes if pair[0] != name)


def mutated(graph: Graph, changed: Node, change: dict[str, Any]) -> Graph | None:
    """Return a graph of any level with one node changed, all tiles inferred anew; None if it does not fit."""
    g = GraphBuilder(graph.name, graph.level)
    g.grid, g.loops = graph.grid, graph.loops
    names: dict[str, str] = {}
    try:
        for node in graph.nodes:
            if node is changed and "drop" in change:
                names[node.name] = names[change["drop"]]
                continue
            new = replace(node, **change) if node is changed else node
            inputs = tuple(names[value] for value in new.inputs)
            if new.operator != "input":
                row, attributes = get_operator(new.operator), dict(new.attributes)
                tiles = [g.tile(value) for value in inputs]
                tile = infer_tile(row, tiles, attributes, node.tile.level, graph.loops)
                new = replace(new, attributes=row.stored(attributes), tiles=(tile,))
            names[node.name] = g.insert(replace(new, inputs=inputs))
    except LadderError:
        return None
    return g.finish(*(names[output] for output in graph.outputs))


def differ(first: Graph, second: Graph, points: int = 3) -> bool:
    """Whether float64 says clearly that two programs differ."""
    for seed in range(points):
        generator = np.random.default_rng(seed)
        inputs = [generator.uniform(0.5, 2.0, node.tile.known_shape) for node in first.inputs]
        with np.errstate(all="ignore"):
            values = [evaluate(graph, inputs) for graph in (first, second)]
        for a, b in zip(*(value if isinstance(value, tuple) else (value,) for value in values), strict=True):
            if a.shape != b.shape:
                return True
            known = np.isfinite(a) & np.isfinite(b)
            if np.any(np.abs(a[known] - b[known]) > 1e-6 * (1 + np.abs(a[known]))):
                return True
    return False


def near_misses() -> Iterator[Pair]:
    """Yield pairs that differ in one place and, says float64, in value."""
    for label, (shapes, left, right) in IDENTITIES.items():
        original = program(left, shapes)
        for side in (original, program(right, shapes)):
            for node in side.nodes:
                for what, change in mutations(node):
                    candidate = mutated(side, node, change)
                    if candidate is not None and differ(original, candidate):
                        yield Pair(f"{label}: {what}", original, candidate)


def block_near_misses(graph: Graph) -> Iterator[Pair]:
    """Yield a kernel graph of one block graph with one thing of the block changed, if the value changes."""
    (node,) = (node for node in graph.nodes if node.body is not None)
    for what, body in _block_mutations(node.body):
        nodes = tuple(replace(node, body=body) if other is node else other for other in graph.nodes)
        changed = replace(graph, nodes=nodes)
        if differ(graph, changed):
            yield Pair(what, graph, changed)


def _block_mutations(body: Graph) -> Iterator[tuple[str, Graph]]:
    for label in ("grid", "loops"):
        for number, axis in enumerate(getattr(body, label)):
            for extent in (axis.extent - 1, axis.extent + 1):
                axes = list(getattr(body, label))
                axes[number] = replace(axis, extent=extent)
                if extent:
                    yield f"{label}: {axis.name}={extent}", replace(body, **{label: tuple(axes)})
    for node in body.nodes:
        for what, attributes in _map_mutations(node):
            stored = get_operator(node.operator).stored({**dict(node.attributes), **attributes})
            nodes = tuple(replace(node, attributes=stored) if n is node else n for n in body.nodes)
            yield f"%{node.name}: {what}", replace(body, nodes=nodes)


def _map_mutations(node: Node) -> Iterator[tuple[str, dict[str, Any]]]:
    attributes = dict(node.attributes)
    if node.operator == "accumulate":
        yield "other accumulator", {"kind": "last" if attributes.get("kind", "sum") == "sum" else "sum"}
    for label in ("grid", "loop") if node.operator in ("load", "store") else ():
        axes = attributes.get(label, ())
        for position in range(len(axes)):
            for axis in range(-1, len(node.tile.shape)):
                changed = (*axes[:position], axis, *axes[position + 1 :])
                if changed != axes:
                    yield f"{label}={changed}", {label: changed}
