"""Reductions of few results on GPUs in two steps: of parts first, so that all multiprocessors read.

A reduction has a block per result, or per few columns; where those are few, most of the device idles. Its
axis is then divided: one kernel reduces each part, a second one the parts. Whether that is faster, and how
many parts are best, the model of movement graphs says. Reductions whose operand is read again with their
results (norms, softmax) stay whole unless they take far longer: one kernel has both. Sums of exponentials
less a maximum are divided with it (`ladder.movement.split_softmax`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf, prod

import numpy as np

from ladder.ir.build import (
    GraphBuilder,
    draws,
    is_along_last,
    is_by_element,
    node_attributes,
    prune,
    reduced_axis,
    transformed,
)
from ladder.ir.extents import Shape, product
from ladder.ir.gemm_graph import as_type
from ladder.ir.graph import Graph, Node
from ladder.movement.choose import machine_of, ranked
from ladder.movement.mapping import HELD, MOST_ROW_THREADS
from ladder.movement.model import Machine, predicted
from ladder.movement.split_deviations import (
    FEW_BITS,
    Deviations,
    deviations_in_parts,
    parts_of,
    products_of_parts,
    sums_of_deviations,
)
from ladder.movement.split_elements import in_shape, shapes_of_elements
from ladder.movement.split_places import Place, places_in_parts, places_of_maxima
from ladder.movement.split_softmax import (
    Sum,
    in_equal_parts,
    in_parts,
    of_parts,
    over_parts,
    sums_of_exponentials,
)
from ladder.partition.chains import LONG_BLOCK, LONG_COLUMNS, SPLIT_RATIO, blocks_of, is_large
from ladder.partition.partition import readers
from ladder.partition.repeats import LONG_WORK, WORK
from ladder.partition.rows import REDUCTIONS
from ladder.partition.strided_rows import MOST_COLUMNS
from ladder.partition.subgraphs import engine
from targets import TileDevice
from tile_types.tile import Tile

LEAST_PART = 64
"""Elements of a part at least."""

HELD_PARTS = (4096, 8192, 16384)
"""Elements of parts of rows that no block holds."""

HELD_COLUMNS = (128, 256, 512, 1024, 2048)
"""Elements of parts of columns."""

HELD_BITS = 32 * HELD * MOST_ROW_THREADS
"""Bits of a row at most that a block holds, and so reads once."""

AGAIN_BITS, TOGETHER_BITS = 3.0, 2.0
"""Bits read for an element of a shared operand, over its own, up to which parts compute it themselves: to
store it takes a write and two readings, or one where what stores it sums it as well."""

AGAIN = 2.0
"""Times as long as in parts from which on a reduction whose operand is read again is divided, of columns."""


def split_reductions(graph: Graph, device: TileDevice) -> Graph:
    """Return a graph whose long reductions of few results are of parts first, if the device is a GPU."""
    if not device.is_gpu or not any(_is_long(graph, node) for node in graph.nodes):
        return graph
    machine = machine_of(device)
    graph = in_parts(graph, _of_rows(graph, machine, sums_of_exponentials(graph)))
    graph = places_in_parts(graph, _of_rows(graph, machine, places_of_maxima(graph)))
    graph = deviations_in_parts(graph, _of_deviations(graph, machine))
    users = readers(graph)
    long = [node for node in graph.nodes if _is_long(graph, node)]
    parts = {node.name: _parts(graph, node, users, machine) for node in long}
    beside = {graph.tile(node.inputs[0]).shape for node in long if parts[node.name] > 1}
    for node in long:
        if parts[node.name] == 1 and graph.tile(node.inputs[0]).shape in beside:
            parts[node.name] = _parts(graph, node, users, machine, beside)

    divided_ones = [name for name, count in parts.items() if count > 1]
    together = [n for n in divided_ones if not _computes_again(graph, n, users, TOGETHER_BITS)]
    shapes = shapes_of_elements(graph, _shapes_of_parts(graph, {n: parts[n] for n in together}), users)
    alone = [n for n in divided_ones if graph.producer(n).inputs[0] not in shapes]
    again = {name for name in alone if _computes_again(graph, name, users, AGAIN_BITS)}

    def divided(builder: GraphBuilder, node: Node, inputs: tuple[str, ...]) -> str | None:
        if node.name in shapes:
            return in_shape(builder, node, inputs, shapes[node.name])
        count = parts.get(node.name, 1)
        if count == 1:
            return None
        value = _again(builder, inputs[0], {}) if node.name in again else inputs[0]
        return _in_parts(builder, node, value, count)

    return replace(prune(transformed(graph, divided)), grid=graph.grid)


def _computes_again(graph: Graph, name: str, users: Mapping[str, list[Node | None]], most: float) -> bool:
    """Tell whether parts of a reduction compute for themselves what others read as well.

    most: Bits that are read for an element, over its own.
    """
    value = graph.producer(name).inputs[0]
    read, own = _read_bits(graph, value), graph.tile(value).ttype.elem_bits
    again = read <= most * own and _is_shared(graph, value, users)
    return again and _work(graph, value, set()) < LONG_WORK


def _shapes_of_parts(graph: Graph, counts: Mapping[str, int]) -> dict[str, Shape]:
    """Return reductions -> what they read in parts, where parts are neighbours, and equal."""
    found = dict[str, Shape]()
    for name, count in counts.items():
        tile, axis = graph.tile(graph.producer(name).inputs[0]), reduced_axis(graph, graph.producer(name))
        shape = tile.known_shape
        if not _alternate(tile, axis) and shape[axis] % count == 0:
            found[name] = (*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :])
    return found


def _again(builder: GraphBuilder, value: str, made: dict[str, str]) -> str:
    """Add what computes a value, element by element, for one reader alone; return what else it may be.

    made: What has been added for it, by the values that others read.
    """
    node, shape = builder.node(value), builder.tile(value).shape
    shown = node.operator in ("reshape", "slice")
    if not shown and (not is_by_element(node) or draws(node)):
        return value
    if value not in made:
        inputs = [
            _again(builder, v, made) if shown or builder.tile(v).shape == shape else v for v in node.inputs
        ]
        made[value] = builder.add(node.operator, *inputs, **node_attributes(node))
    return made[value]


def _work(graph: Graph, value: str, known: set[str]) -> int:
    """Return the operations of an element of what is computed of the inputs, or of other parts, by element.

    known: Values that count already.
    """
    node = graph.producer(value)
    if value in known or not (is_by_element(node) or node.operator in ("reshape", "slice")):
        return 0
    known.add(value)
    return WORK.get(node.operator, 1) + sum(_work(graph, operand, known) for operand in node.inputs)


def _is_shared(graph: Graph, value: str, users: Mapping[str, list[Node | None]]) -> bool:
    """Tell whether others read a value too, or what it is computed of element by element."""
    node = graph.producer(value)
    computed = is_by_element(node) or node.operator in ("reshape", "slice")
    return computed and (len(users[value]) > 1 or any(_is_shared(graph, v, users) for v in node.inputs))


def _of_rows(graph: Graph, machine: Machine, found: Sequence[Sum | Place]) -> dict[str, int]:
    """Return what is found of rows -> parts of these, where they are few, or longer than a block holds."""
    parts, users = dict[str, int](), readers(graph)
    for one in found:
        if not _is_long(graph, one.maximum):
            continue
        if isinstance(one, Sum) and not is_along_last(graph, one.node):
            parts[one.node.name] = _parts_of_columns(graph, one, machine)
            continue
        count, columns = _parts(graph, one.maximum, users, machine), int(graph.tile(one.read).shape[-1])
        if count == 1 and columns * _read_bits(graph, one.read) > HELD_BITS:
            count = _held(graph, machine, one, columns)
        parts[one.node.name] = count
    return parts


def _of_deviations(graph: Graph, machine: Machine) -> dict[str, int]:
    """Return sums of products of deviations -> parts: where means are divided too, or nothing is stored of x.

    Those of the same means have as many, of all that read them.
    """
    users, groups = readers(graph), list[tuple[set[str], list[Deviations]]]()
    for one in sums_of_deviations(graph):
        means = {side.total.name for side in one.sides}
        alike = [group for group in groups if group[0] & means]
        groups = [group for group in groups if not group[0] & means]
        found = [other for group in alike for other in group[1]]
        groups.append((means.union(*(group[0] for group in alike)), [*found, one]))
    counts = dict[str, int]()
    for _, together in groups:
        long = all(_is_long(graph, one.node) for one in together)
        count = _parts_of_deviations(graph, together, users, machine) if long else 0
        counts |= dict.fromkeys((one.node.name for one in together), count)
    return {name: count for name, count in counts.items() if count}


def _parts_of_deviations(
    graph: Graph, together: Sequence[Deviations], users: Mapping[str, list[Node | None]], machine: Machine
) -> int:
    """Return the parts in which sums of deviations are found soonest; 0: means first, then deviations."""
    node = together[0].node
    shape = graph.tile(node.inputs[0]).known_shape
    axis, most = reduced_axis(graph, node), int(product(shape)) // SPLIT_RATIO
    whole = _alone(graph, node)
    blocks = blocks_of(whole, whole.outputs)
    further = all(one.sums_further(graph) for one in together)
    if further:
        results = min(int(product(graph.tile(one.sides[0].less).shape)) for one in together)
        if shape[axis] < LEAST_PART or int(product(shape)) <= MOST_COLUMNS * results:
            return 0
    elif blocks >= machine.units or not is_large(2 * int(product(shape)), blocks):
        return 0
    again = not further and any(_is_read_again(one.node, most, users) for one in together)
    if again and _parts(graph, together[0].sides[0].total, users, machine) == 1:
        return 0
    reads = len({side.read for one in together for side in one.sides})
    fastest, best = AGAIN * reads * _seconds(whole, machine), 0
    wanted = ceil(machine.units / max(1, blocks))
    counts = {_even(shape[axis], wanted * times) for times in (1, 2, 4, 8, 16, 32)}
    enough = further and blocks >= machine.units and shape[axis] * node.tile.ttype.elem_bits <= HELD_BITS
    for count in [1] if enough else sorted(counts | {1} if further else counts - {1}):
        if count > max(1, shape[axis] // LEAST_PART) or shape[axis] % count:
            continue
        builder = GraphBuilder("parts")
        parts = parts_of(builder, _operand(builder, graph, node), axis, count)
        first = builder.finish(parts.sums, products_of_parts(builder, (parts, parts)))
        builder = GraphBuilder("whole")
        read = builder.input("x", node.tile.ttype.name, parts.shape)
        last = builder.finish(builder.add("reduce_sum", read, axis=axis, keep=False))
        seconds = reads * _seconds(first, machine) + 2 * _seconds(last, machine)
        if seconds < fastest and blocks_of(first, first.outputs) >= machine.units:
            best, fastest = count, seconds
    return best


def _held(graph: Graph, machine: Machine, one: Sum | Place, columns: int) -> int:
    """Return of how many parts, which blocks hold, rows are."""
    if isinstance(one, Place):
        return _even(columns, ceil(columns / HELD_PARTS[0]))
    counts = {_even(columns, ceil(columns / length)) for length in HELD_PARTS}
    return min(counts, key=lambda count: _seconds(_of_parts(graph, one, count), machine))


def _parts_of_columns(graph: Graph, one: Sum, machine: Machine) -> int:
    """Return the parts of which exponentials of columns, too long to be held, are summed soonest; 1: none."""
    whole = _of_parts(graph, one, 1)
    extent = int(graph.tile(one.read).known_shape[one.axis])
    best, fastest = 1, _seconds(whole, machine)
    for count in sorted({_even(extent, ceil(extent / length)) for length in HELD_COLUMNS}):
        if not 1 < count <= extent // LEAST_PART:
            continue
        first = _of_parts(graph, one, count)
        builder = GraphBuilder("whole")
        read = builder.input("x", "float32", first.tile(first.outputs[0]).shape)
        last = _seconds(builder.finish(over_parts(builder, one.node, read, one.axis)), machine)
        if (seconds := _seconds(first, machine) + 2 * last) < fastest:
            best, fastest = count, seconds
    return best


def _of_parts(graph: Graph, one: Sum, count: int) -> Graph:
    """Return the chain that finds maxima and sums of the parts of rows."""
    builder = GraphBuilder("parts")
    return builder.finish(*of_parts(builder, one, _operand(builder, graph, one.maximum), count)[1:])


def _is_long(graph: Graph, node: Node) -> bool:
    """Tell whether a node reduces much, of known extents, to little."""
    if node.operator not in REDUCTIONS or node.tile.ttype.name == "bool":
        return False
    read, made = (product(tile.shape) for tile in (graph.tile(node.inputs[0]), node.tile))
    if not isinstance(read, int) or not isinstance(made, int) or read < LONG_BLOCK:
        return False
    return 0 < made * SPLIT_RATIO <= read


def _is_read_again(node: Node, most: int, users: Mapping[str, list[Node | None]]) -> bool:
    """Tell whether what is computed of a reduction has more elements than ``most``."""
    ahead, seen = list(users[node.name]), set[str]()
    while ahead:
        user = ahead.pop()
        if user is None or user.name in seen or engine(user) not in ("chain", "view"):
            continue
        seen.add(user.name)
        count = product(user.tile.shape)
        if not isinstance(count, int) or count > most:
            return True
        ahead += (reader for value in user.values for reader in users[value])
    return False


def _is_of_normalized(graph: Graph, node: Node) -> bool:
    """Tell whether a reduction reads what is computed of another one of its rows, which needs them whole."""
    (operand,) = node.inputs
    ahead, seen, shape = [operand], set[str](), graph.tile(operand).shape
    while ahead:
        below = graph.producer(ahead.pop())
        if below.name in seen:
            continue
        seen.add(below.name)
        if below.operator in REDUCTIONS:
            if graph.tile(below.inputs[0]).shape == shape:
                return True
        elif engine(below) in ("chain", "view"):
            ahead += below.inputs
    return False


def _parts(
    graph: Graph, node: Node, users: Mapping[str, list[Node | None]], machine: Machine,
    beside: Container[Shape] = (),
) -> int:  # fmt: skip
    """Return into how many parts a long reduction is best divided; 1: none.

    beside: Shapes of what others reduce that are divided: rows of these are not held for one.
    """
    shape, axis = graph.tile(node.inputs[0]).known_shape, reduced_axis(graph, node)
    whole = _alone(graph, node)
    blocks = blocks_of(whole, whole.outputs)
    again, last = _is_read_again(node, int(product(shape)) // SPLIT_RATIO, users), axis == len(shape) - 1
    again = again or _is_of_normalized(graph, node)
    held = last and shape[axis] * _read_bits(graph, node.inputs[0]) <= HELD_BITS and shape not in beside
    work = int(product(shape)) * (2 if again and not held else 1)  # what no block holds is read twice
    alternate = _alternate(graph.tile(node.inputs[0]), axis)
    narrow = alternate and not again and _read_bits(graph, node.inputs[0]) > 0
    few = (narrow or blocks < machine.units) and is_large(work, blocks)
    if not few or (again and held):
        return 1
    wanted = ceil(machine.units / max(1, blocks))
    further = (16, 32) if alternate else ()
    counts = {_even(shape[axis], wanted * times) for times in (1, 2, 4, 8, *further)}
    one = again and not last and int(product(shape)) < LONG_COLUMNS * blocks  # one kernel reads it twice
    best, fastest = 1, _seconds(whole, machine) / (AGAIN if one else 1.0)
    for count in sorted(count for count in counts if 1 < count <= shape[axis] // LEAST_PART):
        builder = GraphBuilder("parts")
        value = _first_step(builder, node, _operand(builder, graph, node), count)
        tile = builder.tile(value)
        first = _seconds(builder.finish(value), machine)
        builder = GraphBuilder("whole")
        parts = builder.input("x", tile.ttype.name, (*shape[:axis], count, *shape[axis + 1 :]))
        value = builder.add(node.operator, parts, axis=axis, keep=False)
        seconds = first + _seconds(builder.finish(value), machine)
        if seconds < fastest:
            best, fastest = count, seconds
    return best


def _read_bits(graph: Graph, value: str) -> int:
    """Return the bits that are read for one element of a value: of all that has as many elements."""
    ahead, bits, seen = [value], 0, set[str]()
    count = product(graph.tile(value).shape)
    while ahead:
        below = graph.producer(ahead.pop())
        if below.name in seen or product(below.tile.shape) != count:
            continue
        seen.add(below.name)
        passed = is_by_element(below) or below.operator == "reshape"
        ahead += below.inputs if passed else ()
        bits += 0 if passed else below.tile.ttype.elem_bits
    return bits


def _seconds(graph: Graph, machine: Machine) -> float:
    return predicted(ranked(graph, machine)[0], machine)


def _even(extent: int, wanted: int) -> int:
    """Return a divisor of an extent that is near a number, else that number."""
    near = (count for count in range(ceil(0.7 * wanted), int(1.4 * wanted) + 1) if extent % count == 0)
    return min(near, key=lambda count: abs(count - wanted), default=wanted)


def _operand(builder: GraphBuilder, graph: Graph, node: Node) -> str:
    """Add what a reduction reads as an input, of the type that it is converted from, and the conversion."""
    tile = graph.tile(node.inputs[0])
    kind = graph.tile(graph.unconverted(node.inputs[0])).ttype.name
    return as_type(builder, builder.input("x", kind, tile.shape), tile.ttype.name)


def _alone(graph: Graph, node: Node) -> Graph:
    """Return a chain that is one reduction, of what its operand is converted from."""
    builder = GraphBuilder("whole")
    value = _operand(builder, graph, node)
    axis = node_attributes(node)["axis"] % len(builder.tile(value).shape)
    return builder.finish(builder.add(node.operator, value, axis=axis, keep=False))


def _first_step(builder: GraphBuilder, node: Node, value: str, parts: int) -> str:
    """Return the reductions of all parts: of an axis of parts, or of one axis of parts and few columns."""
    shape = builder.tile(value).known_shape
    axis = node_attributes(node)["axis"] % len(shape)
    if _alternate(builder.tile(value), axis) and shape[axis] % parts == 0:
        rows = (*shape[:axis], shape[axis] // parts, parts * prod(shape[axis + 1 :]))
        return builder.add(node.operator, builder.add("reshape", value, shape=rows), axis=axis, keep=False)
    value = in_equal_parts(builder, value, axis, parts, _neutral(node))
    return builder.add(node.operator, value, axis=axis + 1, keep=False)


def _alternate(tile: Tile, axis: int) -> bool:
    """Tell whether positions belong to parts by turns: few columns then are in vectors with others."""
    columns = product(tile.shape[axis + 1 :])
    return isinstance(columns, int) and columns > 1 and columns * tile.ttype.elem_bits <= FEW_BITS


def _neutral(node: Node) -> float:
    """Return what fills the last part: it changes no sum, and is no more than any number."""
    name = node.tile.ttype.name
    if node.operator == "reduce_sum":
        return 0.0
    return float(np.iinfo(name).min) if name.startswith(("int", "uint")) else -inf


def _in_parts(builder: GraphBuilder, node: Node, value: str, parts: int) -> str:
    """Add a reduction of parts, and of what they give."""
    attributes = node_attributes(node)
    shape = builder.tile(value).shape
    axis = attributes["axis"] % len(shape)
    found = _first_step(builder, node, value, parts)
    apart = (*shape[:axis], parts, *shape[axis + 1 :])
    found = found if builder.tile(found).shape == apart else builder.add("reshape", found, shape=apart)
    return builder.add(node.operator, found, axis=axis, keep=attributes["keep"])
