"""What a chain would compute several times over: functions, and elements that are read again and again."""

from __future__ import annotations

from collections.abc import Container, Sequence
from math import prod

from ladder.ir.build import node_attributes
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.ir.indexing import parse_indexing
from ladder.ir.ops import get_operator
from ladder.partition.rows import REDUCTIONS, SCANS, column_axes
from ladder.partition.views import is_free, view_chain
from tile_types.tile import Extent

LONG_ON_CPUS = ("sin", "cos", "log", "log2", "log10", "exp2", "pow")
"""Functions that kernels for CPUs have the C library compute, element by element."""

LONG_ON_GPUS = ("sin", "cos")
"""Functions whose code is long on GPUs too, since it reduces arguments of any size: where many elements read
one result, as heads read a rotary embedding's cosines, storing it is faster."""

ONE_STEP = ("neg", "abs")
"""Operators of one instruction: GPUs make their results again for each window that reads them."""

SMALL_WINDOW = 16
"""Elements of a window up to which that is faster than to store and read them."""

LEAST_READERS = 4
"""Least number of readers of an element for which storing it costs less than a call for each."""


MOST_NESTED = 3
"""Joins of joins in one chain: each doubles the branches of a kernel, and the time to emit them."""


def is_small_window(graph: Graph, node: Node) -> bool:
    """Tell whether a node is windows that take each element of an image a few times."""
    read, taken = read_and_taken(graph, node)
    return node.operator == "map" and 0 < taken <= SMALL_WINDOW * read


def read_and_taken(graph: Graph, node: Node) -> tuple[int, int]:
    """Return the elements of what a node reads first, and of its result; 0 for an open number."""
    return known(product(graph.tile(node.inputs[0]).shape)), known(product(node.tile.shape))


def calls_again(graph: Graph, outputs: Sequence[str], functions: Container[str]) -> bool:
    """Tell whether one of some functions would be called for each row anew."""
    elements, of_rows = _elements(graph, outputs), _of_rows(graph, outputs)
    read = dict[str, int]()
    """Value -> elements that are read of it at most, by one reader: a join reads of each operand its part."""
    for node in reversed(graph.nodes):
        count = known(product(node.tile.shape)) or elements
        wanted = max([count if node.name in outputs else 0, *(read.get(value, 0) for value in node.values)])
        again = node.name not in of_rows and LEAST_READERS * count <= wanted
        if node.operator in functions and again:
            return True
        for value in node.inputs:
            own = known(product(graph.tile(value).shape)) or elements
            share = wanted * own // max(1, count) if node.operator == "concat" else wanted
            share = max(own, wanted) if node.operator in REDUCTIONS else share
            read[value] = max(read.get(value, 0), share)
    return False


LONG_WORK, MOST_WORK, WASTED = 32, 256, 1 << 26
"""Operations of an element from which on, and up to which, they count, and those of all that would be
computed again from which on storing costs less."""

APART = ("map", "gather", "put", "repeat")
"""Operators of chains of which each element is a thread's own."""

WORK = {
    "div": 8, "rsqrt": 4, "sqrt": 8, "exp": 8, "log": 12, "log1p": 20, "tanh": 16, "sigmoid": 16, "erf": 20,
    "pow": 40,
}  # fmt: skip
"""Operator -> instructions of an element; one of others."""


MOST_POSITIONS, LEAST_ROW, LEAST_ROWS = 4, 64, 1 << 17
"""Positions at most of an axis of which a thread of a GPU has all, and elements at least behind it, and of
each position."""


def works_again(graph: Graph, outputs: Sequence[str]) -> bool:
    """Tell whether elements of much work would be computed for many that read them.

    What reads an element at the same place, as all do that are computed by element, shares it.
    """
    work, of_rows = dict[str, int](), _of_rows(graph, outputs)
    long = all(known(product(graph.tile(value).shape[-1:])) >= LEAST_ROW for value in outputs)
    once = of_rows if long else set()
    """What is computed once for many elements: it is no work of theirs."""
    for node in graph.nodes:
        below = sum(work[value] for value in node.inputs if value not in once)
        own = 2 * len(node.inputs) if node.operator == "concat" else WORK.get(node.operator, 1)
        counted = get_operator(node.operator).elementwise or node.operator == "concat"
        work |= dict.fromkeys(node.values, min(MOST_WORK, below + (own if counted else 0)))
    of_rows |= _of_columns(graph, outputs)
    shared, apart, short = dict[str, int](), dict[str, int](), short_axes(graph, outputs)
    """Value -> elements that are read of it by readers that share them, and by others."""
    for node in reversed(graph.nodes):
        count = known(product(node.tile.shape))
        wanted = max(*(shared.get(v, 0) for v in node.values), *(apart.get(v, 0) for v in node.values), 0)
        wanted = max(wanted, count) if node.name in outputs else wanted
        many = 0 < LEAST_READERS * count <= wanted and node.name not in of_rows
        if many and work[node.name] >= LONG_WORK and (wanted - count) * work[node.name] >= WASTED:
            return True
        for value in node.inputs:
            own = known(product(graph.tile(value).shape))
            share = wanted * own // max(1, count) if node.operator == "concat" else wanted
            share = own if node.operator in REDUCTIONS else share
            if own < share and not _is_of_one(graph, node, value, short):
                apart[value] = apart.get(value, 0) + share
            else:
                shared[value] = max(shared.get(value, 0), min(own, share))
    return False


def short_axes(graph: Graph, outputs: Sequence[str]) -> list[int]:
    """Return the axes before the last, from the end, of a few positions that threads of GPUs may all have.

    What is computed for none of them alone, they then compute once.
    """
    shapes = {graph.tile(value).shape for value in outputs}
    shape = next(iter(shapes))
    if len(shapes) > 1 or any(node.operator in (*REDUCTIONS, *SCANS, *APART) for node in graph.nodes):
        return []
    if not all(isinstance(extent, int) for extent in shape):
        return []
    extents, count = [int(extent) for extent in shape], prod(map(int, shape))
    return [
        at - len(shape)
        for at, extent in enumerate(extents[:-1])
        if 1 < extent <= MOST_POSITIONS
        and prod(extents[at + 1 :]) >= LEAST_ROW
        and count >= LEAST_ROWS * extent
    ]


def _is_of_one(graph: Graph, node: Node, value: str, axes: Sequence[int]) -> bool:
    """Tell whether a node reads a value for all positions of a short axis, and else element by element."""
    whole, own = node.tile.shape, graph.tile(value).shape
    if not axes or not get_operator(node.operator).elementwise:
        return False
    own = (*[1] * (len(whole) - len(own)), *own)
    apart = [at - len(whole) for at, pair in enumerate(zip(whole, own, strict=True)) if pair[0] != pair[1]]
    return len(apart) == 1 and apart[0] in axes


def _of_rows(graph: Graph, outputs: Sequence[str]) -> set[str]:
    """Return the values that are read as one number of each row: of its lanes, none computes several."""
    found, others = set[str](), set(outputs)
    for node in reversed(graph.nodes):
        shape = node.tile.shape
        if shape[-1:] in ((), (1,)) or not others.intersection(node.values):
            found.update(node.values)
        shown = node.operator == "reshape" or get_operator(node.operator).elementwise
        for value in node.inputs:
            alike = node.operator == "reshape" or graph.tile(value).shape == shape
            if not (shown and alike and node.name in found):
                others.add(value)
    return found


def _of_columns(graph: Graph, outputs: Sequence[str]) -> set[str]:
    """Return the values that are computed of reductions of columns: once for all positions of a lane."""
    found = set[str]()
    for node in graph.nodes:
        if node.operator in REDUCTIONS or found.intersection(node.inputs):
            found.update(node.values)
    reduced = [node for node in graph.nodes if node.operator in REDUCTIONS]
    last = (node_attributes(n)["axis"] % len(graph.tile(n.inputs[0]).shape) + 1 for n in reduced)
    before = all(at < len(graph.tile(n.inputs[0]).shape) for n, at in zip(reduced, last, strict=True))
    return found if found and before and column_axes(graph, outputs) is not None else set()


def _elements(graph: Graph, outputs: Sequence[str]) -> int:
    """Return the most elements of a result; 0 if all are open."""
    return max(known(product(graph.tile(value).shape)) for value in outputs)


def _turns_axes(graph: Graph, node: Node) -> bool:
    """Tell whether windows take no element twice: they only turn axes, or parts of them, around."""
    indexing = parse_indexing(node_attributes(node)["spec"])
    moved = [axis.names for axis in indexing.operands[0]]
    return all(len(names) <= 1 for names in moved) and {*indexing.result} == {*sum(map(tuple, moved), ())}


def _gathers_few(graph: Graph, node: Node) -> bool:
    """Tell whether a gather takes no more elements than there are."""
    given, ids = node_attributes(node), graph.tile(node.inputs[1]).shape
    most = graph.tile(node.inputs[0]).shape[given["axis"]]
    taken = ids[given["axis"]] if given["along"] else product(ids)
    return isinstance(most, int) and isinstance(taken, int) and taken <= most


READS_ONCE = {"map": _turns_axes, "gather": _gathers_few}
"""Operator that may read elements several times -> whether a node does not."""


def known(count: Extent) -> int:
    """Return a number of elements; 0 if it is open."""
    return count if isinstance(count, int) else 0


def scattered_windows(graph: Graph, taken: Container[str]) -> frozenset[str]:
    """Return the views that are stored since overlapping windows read an order that no strides describe.

    As depthwise convolutions read shuffled channels: each window would gather them one by one. Images made
    larger by broadcasts are read as they are: they have fewer elements.

    taken: Nodes that belong to products.
    """
    found = set()
    for node in graph.nodes:
        if node.operator != "map" or node.name in taken or not _overlaps(graph, node):
            continue
        below = graph.producer(node.inputs[0])
        value = below.inputs[0] if below.operator == "pad" else node.inputs[0]
        views, source = view_chain(graph, value)
        larger = any(graph.producer(view).operator == "broadcast" for view in views)
        if source is None or larger or is_free(graph, views):
            continue
        cut = next(at for at in range(1, len(views) + 1) if is_free(graph, views[at:]))
        closed = (at for at in range(cut, len(views)) if graph.producer(views[at]).operator != "reshape")
        copied = views[next(closed, len(views)) - 1]  # whole axes: kernels take the last one in vectors
        if copied not in taken:
            found.add(copied)
    return frozenset(found)


def _overlaps(graph: Graph, node: Node) -> bool:
    """Tell whether windows take elements several times; of open sizes, that they do."""
    read, taken = read_and_taken(graph, node)
    return not taken or taken > read


def joins_nested(graph: Graph) -> int:
    """Return how many joins an element passes at most."""
    passed: dict[str, int] = {}
    for node in graph.nodes:
        below = max((passed[value] for value in node.inputs), default=0)
        passed |= dict.fromkeys(node.values, below + (node.operator == "concat"))
    return max(passed.values(), default=0)
