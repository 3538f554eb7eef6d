"""Steps that torch computes: products, convolutions, attention, embeddings, ATen calls, views."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.partition.subgraphs import FORMS, OURS, Subgraph
from ladder.runtime import peers, recurrent_operator  # noqa: F401  registers ladder::recurrent
from ladder.runtime.functional import functional_form, original
from ladder.runtime.grouped import grouped, in_turn
from ladder.runtime.model.attention import library_attention
from ladder.runtime.model.convolutions import convolution_run, convolution_title
from ladder.runtime.model.ordered import Keep, multiply, ordered_matrix, pays
from ladder.runtime.model.sizes import CallSizes, is_fixed
from ladder.runtime.registered import import_home
from ladder.runtime.stores import stored
from tile_types.arrays import torch_dtype
from tile_types.errors import LadderError

# ``x[i, j, ...]`` of few numbers that are broadcast to many: one number for each row, then one copy
Indices = Sequence[torch.Tensor | None]

LEAST_ROWS = 2048
"""Least number of rows at which this is faster."""

BROADCAST = 4
"""How many times more rows there are than numbers given for them."""

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Types whose rows torch does not select by number."""


def indexed(call: Callable[[torch.Tensor, Indices], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``aten::index`` on CPUs; ``call`` is torch's, which does the rest and raises the errors."""

    def run(x: torch.Tensor, indices: Indices) -> torch.Tensor:
        rows = _rows(x, indices) if x.device.type == "cpu" else None
        if rows is None:
            return call(x, indices)
        rest = x.shape[len(indices) :]
        table = x.reshape(-1, *rest)
        return table.index_select(0, rows.reshape(-1)).view(*rows.shape, *rest)

    return run


def _rows(x: torch.Tensor, indices: Indices) -> torch.Tensor | None:
    """Return which rows of the first axes, counted through, are taken; None where torch's way serves."""
    given = [each for each in indices if each is not None and each.dtype in (torch.int64, torch.int32)]
    if not 2 <= len(given) == len(indices) <= x.dim() or not x.numel() or x.dtype in UNSIGNED:
        return None
    try:
        shape: torch.Size = torch.broadcast_shapes(*(each.shape for each in given))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    if math.prod(shape) < max(LEAST_ROWS, BROADCAST * sum(each.numel() for each in given)):
        return None
    parts = []
    for axis, numbers in enumerate(given):
        extent = x.shape[axis]
        least, most = map(int, torch.aminmax(numbers))
        if not -extent <= least <= most < extent:
            return None
        place = numbers.long() if least >= 0 else torch.where(numbers < 0, numbers + extent, numbers).long()
        parts.append(place * math.prod(x.shape[axis + 1 : len(given)]))
    return _sum(parts).expand(shape)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Add what is broadcast: first what varies along the last axes, then what makes the sum grow least."""
    total = min(parts, key=_axes_behind)
    rest = [part for part in parts if part is not total]
    while rest:
        grown = [math.prod(torch.broadcast_shapes(total.shape, part.shape)) for part in rest]  # type: ignore[no-untyped-call]
        total = total + rest.pop(grown.index(min(grown)))
    return total


def _axes_behind(part: torch.Tensor) -> int:
    """Return how many axes lie behind the last along which a tensor varies."""
    return next((at for at, extent in enumerate(reversed(part.shape)) if extent > 1), part.dim())


Run = Callable[..., Any]

COLLECTIVES = "_c10d_functional."
"""How the names of operators begin that the processes of a group carry out together."""


OVER_PEERS: Mapping[str, Run] = {f"{COLLECTIVES}all_reduce.default": peers.all_reduce}
"""Collectives that GPUs carry out in each other's memory where they can."""


QUICKER: Mapping[str, Callable[[Run], Run]] = {
    "aten.index.Tensor": indexed,
    "transformers.grouped_mm_fallback.default": grouped,
    f"{OURS[1]}store.default": stored,
}
"""Operator -> what wraps torch's call of it: some calls take a faster way, with equal results."""


OF_OTHERS: Mapping[str, Run] = {"transformers.grouped_mm_fallback.default": in_turn}
"""Operators of other packages -> the same, for processes that do not import these."""


def library_run(graph: Graph, now: CallSizes) -> Run:
    """Return ``(operands) -> result`` (a tuple if there are several) of a one-node part.

    A part reads each value once; its node may take one several times.
    """
    node = next(node for node in graph.nodes if node.operator != "input")
    run, read = RUNS[node.operator](node, now), [node.name for node in graph.inputs]
    if tuple(read) == node.inputs:
        return run
    places = [read.index(value) for value in node.inputs]
    return lambda *operands: run(*(operands[at] for at in places))


def library_title(graph: Graph) -> str:
    """Return the name of the function that computes a part."""
    node = next(node for node in graph.nodes if node.operator != "input")
    if node.operator in _TITLES:
        return _TITLES[node.operator]
    target = str(dict(node.attributes)["target"])
    if is_onnx(target):
        return f"torch {target}"
    if target.startswith(OURS[1]):
        target = original(target)
    if not target.startswith("ladder."):
        return f"torch.ops.{target}"
    name = target.split(".")[1]
    return f"torch {name}" if name in BY_TORCH else f"ladder {name}"


BY_TORCH = ("upsample", "laid_out", "bernoulli", "recurrent", "recurrent_dropout")
"""Operators of ours that are calls of torch's."""


_TITLES = {
    "take": "torch.embedding",
    "put": "torch.index_copy",
    "attention": "torch.scaled_dot_product_attention",
}


def _put(node: Node, now: CallSizes) -> Run:
    axis, from_end, along, combine = (
        node_attributes(node)[name] for name in ("axis", "from_end", "along", "combine")
    )
    if combine and (along or combine != "add"):
        kind = {"add": "sum", "max": "amax", "min": "amin"}[combine]

        def scattered(base: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            behind = (1,) * (rows.dim() - axis - 1)
            each = ids if along else ids.reshape(-1, *behind).expand_as(rows)
            return torch.scatter_reduce(base, axis, each.long(), rows, kind)

        return scattered
    if not from_end:
        function = torch.index_add if combine else torch.index_copy
        return lambda base, ids, rows: function(base, axis, ids, rows)
    before = (None,) * axis
    return lambda base, ids, rows: torch.ops.aten.index_put(base, (*before, ids), rows, bool(combine))


def _call(node: Node, now: CallSizes) -> Run:
    given = node_attributes(node)
    if is_onnx(given["target"]):
        return onnx_run(node, now)
    function = awaited(given["target"])
    arguments = [literal(value, now) for value in given["arguments"]]
    keywords = [(key, literal(value, now)) for key, value in given["keywords"]]
    dtypes = [torch_dtype(tile.ttype.name) for tile in node.tiles]

    def run(*operands: torch.Tensor) -> Any:
        named = {key: value(operands) for key, value in keywords}
        found = function(*(value(operands) for value in arguments), **named)
        results = found if isinstance(found, tuple | list) else (found,)
        for result, dtype in zip(results, dtypes, strict=True):
            if result is not None and result.dtype is not dtype:  # None was not asked for
                raise UnlikeItsFakeError(
                    f"{given['target']} gives {result.dtype} here, its fake tensors say {dtype}"
                )
        return found

    return run


class UnlikeItsFakeError(LadderError):
    """An operator of torch gives another type than its fake tensors, by which the plan was made."""


def is_onnx(target: str) -> bool:
    """Tell whether a call is of an ONNX operator, see `ladder.runtime.onnx_ops`, not of one of torch's."""
    return target.startswith("onnx.")


def onnx_run(node: Node, now: CallSizes) -> Run:
    """Return ``(operands) -> results`` of an ONNX operator; results must be what the graph states."""
    from ladder.runtime.onnx_ops.evaluate import operation_run

    given = node_attributes(node)
    run = operation_run(given["target"], dict(given["keywords"]), len(node.tiles))
    places = [None if value is None else value[1] for value in given["arguments"]]
    stated = [(torch_dtype(tile.ttype.name), now.numbers(tile.shape)) for tile in node.tiles]

    as_they_are = places == [*range(len(places))]

    def call(*operands: torch.Tensor) -> Any:
        found = run(*operands) if as_they_are else run(*(None if p is None else operands[p] for p in places))
        for result, (dtype, shape) in zip(found, stated, strict=True):
            if result.dtype != dtype or result.shape != shape():
                raise LadderError(
                    f"{given['target']} gives {result.dtype}{list(result.shape)}, the plan has"
                    f" {dtype}{list(shape())}"
                )
        return found if len(found) > 1 else found[0]

    return call


RUNS: Mapping[str, Callable[[Node, CallSizes], Run]] = {
    "take": lambda node, now: torch.embedding,
    "put": _put,
    "attention": lambda node, now: library_attention(node),
    "call": _call,
}
"""Operator of a library -> what makes its function."""


def resolve(target: str) -> Any:
    """Return the operator of a name such as ``aten.topk.default``.

    Raises LadderError if this torch has none of that name.
    """
    if target.startswith(f"{FORMS}."):
        return functional_form(resolve(original(target)))
    names = target.split(".")
    try:
        return reduce(getattr, names, torch.ops)
    except AttributeError as error:
        if import_home(target):
            return reduce(getattr, names, torch.ops)
        raise LadderError(f"torch {torch.__version__} has no operator {target}") from error


def awaited(target: str) -> Any:
    """Return the operator of a name; results of a collective are there when it returns.

    On GPUs that is an order of streams, which a CUDA graph records.
    """
    function = OF_OTHERS.get(target) or resolve(target)
    if target in OVER_PEERS:
        return OVER_PEERS[target]
    if target in QUICKER:
        return QUICKER[target](function)
    if not target.startswith(COLLECTIVES):
        return function
    wait = torch.ops._c10d_functional.wait_tensor

    def run(*arguments: Any, **keywords: Any) -> Any:
        found = function(*arguments, **keywords)
        return [wait(item) for item in found] if isinstance(found, list | tuple) else wait(found)

    return run


Argument = Callable[[Sequence[Any]], Any]
"""From the operands of a call to one of its arguments."""


def _always(value: Any) -> Argument:
    return lambda operands: value


def _extent(extent: Any, now: CallSizes) -> Argument:
    numbers = now.numbers((extent,))
    return lambda operands: numbers()[0]


_WORDS: Mapping[str, Callable[[Any, CallSizes], Argument]] = {
    "%": lambda at, now: operator.itemgetter(at),
    "extent": _extent,
    "torch": lambda value, now: _always(getattr(torch, value)),
    "device": lambda value, now: _always(torch.device(value)),
}
"""First element of a pair that stands for something else than itself."""


def literal(value: Any, now: CallSizes) -> Argument:
    """Return what gives an argument of a library call, from the attribute that holds it."""
    if not isinstance(value, tuple):
        return _always(value)
    if len(value) == 2 and isinstance(value[0], str) and value[0] in _WORDS:
        return _WORDS[value[0]](value[1], now)
    items = [literal(item, now) for item in value]
    return lambda operands: [item(operands) for item in items]


# products -------------------------------------------------------------------------------------------


def product_takes_out(graph: Graph, lasting: Mapping[str, Keep]) -> bool:
    """Tell whether a product is written into memory that it is given; parameters as of `product_run`."""
    first = _product_node(graph)
    return first.operator != "contract" and not _in_order(graph, lasting) and _matrix_product(graph)[1]


def product_run(part: Subgraph, now: CallSizes, lasting: Mapping[str, Keep]) -> Run:
    """Return ``(operands..., out=)`` of a product with an optional bias; ``out`` only where it takes it.

    lasting: Inputs of the part's graph of which oneDNN may keep a copy in an order of its own -> what holds
        it.
    """
    if _product_node(part.graph).operator == "contract":
        return convolution_run(part, now, lasting)
    run, takes_out = _matrix_product(part.graph)
    return _ordered(part.graph, run, lasting) if takes_out and _in_order(part.graph, lasting) else run


def _in_order(graph: Graph, lasting: Mapping[str, Keep]) -> bool:
    """Tell whether a product's second operand is a matrix that oneDNN puts in order."""
    first = _product_node(graph)
    tiles = [graph.tile(value) for value in first.inputs]
    return first.inputs[1] in lasting and all(len(t.shape) == 2 for t in tiles) and pays(tiles[1])


def _ordered(graph: Graph, plain: Run, lasting: Mapping[str, Keep]) -> Run:
    """Return a product with a matrix in order, and ``plain`` while there is none."""
    first = _product_node(graph)
    transposed = bool(node_attributes(first)["transpose_b"])
    names = [node.name for node in graph.inputs]
    left, right = (names.index(value) for value in first.inputs)
    bias = next((at for at, name in enumerate(names) if name not in first.inputs), None)
    weights = lasting[first.inputs[1]](lambda w, x: ordered_matrix(w if transposed else w.t(), x))

    def run(*operands: torch.Tensor) -> torch.Tensor:
        known = weights.of(operands[right], operands[left])
        if known is None:
            return plain(*operands)  # type: ignore[no-any-return]
        return multiply(operands[left], known, None if bias is None else operands[bias])

    return run


def _matrix_product(graph: Graph) -> tuple[Run, bool]:
    """Return the run of a product of matrices, and whether it takes ``out``."""
    first = _product_node(graph)
    transposed = bool(node_attributes(first)["transpose_b"])
    names = [node.name for node in graph.inputs]
    order = tuple(names.index(value) for value in first.inputs)
    bias = tuple(at for at, name in enumerate(names) if name not in first.inputs)
    left, right = (graph.tile(value).shape for value in first.inputs)
    if bias:
        return _linear_and_bias(transposed, (*bias, *order)), True
    alike = len(left) == len(right) and left[:-2] == right[:-2]
    makes = _RANKED.get(len(left)) if alike and order == (0, 1) else None
    return (_any_rank(transposed, order), False) if makes is None else (makes(transposed), True)


def _product_node(graph: Graph) -> Node:
    return next(node for node in graph.nodes if node.operator in ("matmul", "contract"))


def _linear(transposed: bool) -> Run:
    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.mm(a, b.t() if transposed else b, out=out)

    return run


def _linear_and_bias(transposed: bool, order: Sequence[int]) -> Run:
    """Return the product whose bias and two factors are the operands ``order``."""
    bias, left, right = order

    def run(*operands: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        b = operands[right]
        return torch.addmm(operands[bias], operands[left], b.t() if transposed else b, out=out)

    return run


def _batched(transposed: bool) -> Run:
    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.bmm(a, b.mT if transposed else b, out=out)

    return run


def _any_rank(transposed: bool, order: Sequence[int]) -> Run:
    left, right = order

    def run(*operands: torch.Tensor) -> torch.Tensor:
        b = operands[right]
        return torch.matmul(operands[left], b.mT if transposed else b)

    return run


_RANKED: Mapping[int, Callable[[bool], Run]] = {2: _linear, 3: _batched}
"""Axes of both operands -> their product."""


def product_title(part: Subgraph) -> str:
    """Return the name of torch's function for a product."""
    if _product_node(part.graph).operator == "contract":
        return convolution_title(part)
    return "torch.addmm" if len(part.graph.inputs) > 2 else "torch.matmul"


# views ----------------------------------------------------------------------------------------------


def view_run(graph: Graph, now: CallSizes) -> Run:
    """Return ``(operand) -> view`` of a chain of views; one that needs a copy copies."""
    steps = [VIEWS[node.operator](node, now) for node in graph.nodes if node.operator != "input"]
    if len(steps) == 1:
        return steps[0]
    return lambda value: reduce(lambda current, step: step(current), steps, value)


def _transposed(node: Node, now: CallSizes) -> Run:
    return operator.methodcaller("permute", node_attributes(node)["permutation"])


def _shaped(method: str) -> Callable[[Node, CallSizes], Run]:
    """Return what makes a view by a method that takes the new shape."""
    function = getattr(torch.Tensor, method)

    def make(node: Node, now: CallSizes) -> Run:
        shape = now.numbers(node.tile.shape)
        if is_fixed(node.tile.shape):
            return operator.methodcaller(method, shape())
        return lambda value: function(value, shape())

    return make


def _sliced(node: Node, now: CallSizes) -> Run:
    given, shape = node_attributes(node), now.numbers(node.tile.shape)
    begin, step = now.numbers(given["begin"]), given["step"] or (1,) * len(node.tile.shape)

    def box() -> tuple[slice, ...]:
        parts = zip(begin(), shape(), step, strict=True)
        return tuple(slice(b, b + n * s, s) for b, n, s in parts)

    if is_fixed((*node.tile.shape, *given["begin"])):
        return operator.itemgetter(box())
    return lambda value: value[box()]


VIEWS: Mapping[str, Callable[[Node, CallSizes], Run]] = {
    "transpose": _transposed,
    "restride": _transposed,
    "reshape": _shaped("reshape"),
    "broadcast": _shaped("expand"),
    "slice": _sliced,
}
"""Operator that renames positions -> what makes its function."""
