"""Partition of a model's tile graph: products first, then chains, then what is left."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType

from ladder.ir.build import draws, node_attributes
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.partition.attention import attention_part
from ladder.partition.chains import MOST_CHAIN_NODES, Chains
from ladder.partition.convolutions import Choose, best_candidate, read_in_order
from ladder.partition.elements import without_kernel
from ladder.partition.native_parts import elements_part, fourier_part, recurrent_part
from ladder.partition.products import Products
from ladder.partition.recomputed import with_recomputed, without_stored
from ladder.partition.repeats import MOST_NESTED, joins_nested
from ladder.partition.rows import REDUCTIONS, SCANS, column_axes, row_axes, separate_loops
from ladder.partition.scatter import in_place, numbered, rows_put, with_scatters, without_puts, written
from ladder.partition.strided_rows import strided_rows
from ladder.partition.subgraphs import OURS, Subgraph, engine, extract, outside_inputs, part_of
from ladder.partition.views import inlined_chain, is_free, is_inlined, view_chain
from targets import TileDevice
from tile_types.errors import VerificationError

NEEDS = "avx2"
"""Instructions of the kernels."""

OPERATORS = frozenset({"onnx.DynamicQuantizeLinear", "onnx.MatMulInteger", "onnx.ConvInteger"})
"""Calls that kernels compute."""


def codes_part(graph: Graph, node: Node, device: TileDevice | None) -> Subgraph | None:
    """Return the part of a call on codes; None if no kernel of ours computes it."""
    if str(dict(node.attributes).get("target")) not in OPERATORS:
        return None
    if device is None or device.kind != "llvm" or NEEDS not in device.features:
        return None
    return part_of("codes", graph, node)


MOST_INPUTS = 24
"""Tensors that one kernel reads at most."""

SIDE = 256
"""Rows of small chains, and elements of each."""

LEAST_SHARED = 1 << 14
"""Elements of an argument from which on chains that read it are one launch, if their results have no more."""

SMALL_RESULT = 64
"""Elements of results so small that a launch costs more than all of their work."""


def fuse_horizontally(graph: Graph, parts: Sequence[Subgraph]) -> list[Subgraph]:
    """Return parts, in an order in which they can run, with chains fused horizontally.

    Results of chains without reductions are computed one after the other by the same threads, so that nothing
    is computed twice. Chains of a few elements need not read one value. Rows of small chains with reductions
    have blocks of their own.
    """
    parts = list(parts)
    at = 0
    while at < len(parts):
        found = _mate(graph, parts, at)
        if found is None:
            at += 1
            continue
        mate, behind = found
        first, other = parts[at], parts[mate]
        ahead = [part for part in parts[at + 1 : mate] if part not in behind]
        joined = _joined(graph, first, other, (*first.outputs, *other.outputs))
        parts[at : mate + 1] = [*ahead, joined, *behind]
    return with_readers(graph, parts)


def with_readers(graph: Graph, parts: Sequence[Subgraph]) -> list[Subgraph]:
    """Return parts with each chain in the one that alone reads it, where that computes no element twice."""
    found = list(parts)
    readers: dict[str, list[Subgraph | None]] = {value: [None] for value in graph.outputs}
    for part in parts:
        for value in part.inputs:
            readers.setdefault(value, []).append(part)
    merged: dict[int, Subgraph] = {}
    for part in parts:
        now = merged.get(id(part), part)
        users = {id(user): user for value in now.outputs for user in readers.get(value, [])}
        (reader,) = users.values() if len(users) == 1 else (None,)
        if reader is None or not (_is_plain(now) and _is_plain(reader)):
            continue
        stored = {*written(reader).values(), *(numbers for numbers, *_ in numbered(reader))}
        if "put" in now.operators or stored.intersection(now.outputs):
            continue  # rows are put into what is complete, by numbers in memory, and read once all are there
        target = merged.get(id(reader), reader)
        if (
            _elements(graph, target) > _elements(graph, now)
            or len(now.inputs) + len(target.inputs) > MOST_INPUTS
            or not _is_short(now, target)
        ):
            continue
        joined = _joined(graph, now, target, target.outputs)
        if joins_nested(joined.graph) > MOST_NESTED:
            continue
        merged[id(reader)] = joined
        found[found.index(target)] = joined
        found.remove(now)
    return found


def _elements(graph: Graph, part: Subgraph) -> float:
    """Return how many elements a chain computes, results of one shape together; infinity if sizes say."""
    counts = [product(shape) for shape in {graph.tile(value).shape for value in part.outputs}]
    return sum(count if isinstance(count, int) else math.inf for count in counts)


def _mate(graph: Graph, parts: Sequence[Subgraph], at: int) -> tuple[int, list[Subgraph]] | None:
    """Return a later chain that goes with this one, and the parts between that must run after this one.

    That is one that reads what this one reads, or of as few elements, and nothing that is made from this.
    """
    first = parts[at]
    plain, small = _is_plain(first), _is_small(first)
    if not (plain or small):
        return None
    changing = _changing(parts) | _large(graph, first)
    bases = {value for part in parts for value in written(part).values()}
    made, behind = set(first.outputs), list[Subgraph]()
    for later in range(at + 1, len(parts)):
        part = parts[later]
        if made & set(part.inputs) or any(map(draws, part.graph.nodes)):
            behind.append(part)
            made |= set(part.outputs)
            continue
        shared = set(first.inputs) & set(part.inputs) & changing
        few = len({*first.inputs, *part.inputs}) <= MOST_INPUTS
        filled = not {*first.inputs, *part.inputs} and {*first.outputs, *part.outputs} <= bases
        alike = shared or filled or _are_tiny(graph, first, part)
        if not (few and alike and _is_short(first, part)) or rows_put(first) & rows_put(part):
            continue
        if (plain and _is_plain(part)) or (small and _is_small(part)):
            return later, behind
    return None


def _large(graph: Graph, part: Subgraph) -> set[str]:
    """Return what a chain reads of as many elements as its results have, where those are many."""
    sizes = {value: product(graph.tile(value).shape) for value in (*part.inputs, *part.outputs)}
    known = {value: count for value, count in sizes.items() if isinstance(count, int)}
    most = max((known.get(value, 0) for value in part.outputs), default=0)
    return {value for value in part.inputs if known.get(value, 0) >= max(most, LEAST_SHARED)}


def _changing(parts: Sequence[Subgraph]) -> set[str]:
    """Return the values that are computed from call to call."""
    made: set[str] = set()
    constant: set[str] = set()
    for part in parts:
        fixed = part.kind in ("chain", "view") and all(value in constant for value in part.inputs)
        (constant if fixed else made).update(part.outputs)
    return made


def _is_short(a: Subgraph, b: Subgraph) -> bool:
    """Tell whether a chain of two is not too long for one kernel."""
    return len({node.name for part in (a, b) for node in part.graph.nodes}) <= MOST_CHAIN_NODES


def _are_tiny(graph: Graph, a: Subgraph, b: Subgraph) -> bool:
    """Tell whether all results of two chains have the same few elements, and none is written in place."""
    shapes = {graph.tile(value).shape for value in (*a.outputs, *b.outputs)}
    count = product(next(iter(shapes)))
    in_place = "put" in (*a.operators, *b.operators)
    return len(shapes) == 1 and isinstance(count, int) and count <= SMALL_RESULT and not in_place


def _is_plain(part: Subgraph) -> bool:
    """Tell whether a part is a chain of neither reductions, scans nor windows, nor of random numbers."""
    nodes = part.graph.nodes
    return (
        part.kind == "chain"
        and not {*REDUCTIONS, *SCANS, "map"} & {node.operator for node in nodes}
        and not any(map(draws, nodes))
    )


def _is_small(part: Subgraph) -> bool:
    """Tell whether a part is a chain that takes about as long as its launch: few rows of few elements."""
    if part.kind != "chain" or any(
        draws(node) or node.operator in ("map", "pad") for node in part.graph.nodes
    ):
        return False
    graph, results = without_puts(part.graph)
    reduced = [node.inputs[0] for node in graph.nodes if node.operator in REDUCTIONS]
    sizes = [product(graph.tile(value).shape) for value in (*results, *reduced)]
    loops = separate_loops(graph, results) if all(isinstance(size, int) for size in sizes) else None
    if loops is None:
        return False
    counts = [product(graph.tile(r[0]).shape[: row_axes(graph, r)]) for r in loops]
    rows = sum(count if isinstance(count, int) else math.inf for count in counts)  # open ones of no elements
    return rows <= SIDE and max(map(int, sizes)) <= SIDE * rows


def _joined(graph: Graph, a: Subgraph, b: Subgraph, outputs: tuple[str, ...]) -> Subgraph:
    members = {n.name for part in (a, b) for n in part.graph.nodes if n.operator != "input"}
    region = extract(graph, members, outputs, "chain")
    return Subgraph("chain", region, outside_inputs(graph, members), outputs, a.reason or b.reason)


Users = Mapping[str, list[Node | None]]

NOTHING: Mapping[str, str] = MappingProxyType({})


def partition(
    graph: Graph,
    weights: Collection[str] = (),
    updated: Mapping[str, str] = NOTHING,
    *,
    side_by_side: bool = False,
    device: TileDevice | None = None,
    packable: Collection[str] = (),
    choose: Choose = best_candidate,
) -> list[Subgraph]:
    """Divide a model into parts, in an order in which they can run.

    graph: At kernel level, `simplify` done. Symbolic extents stay symbolic.
    weights: Inputs that are packed quantized weights, and vectors packed with them.
    updated: Result -> the input that takes it once all has run.
    side_by_side: Whether chains that read one value become one launch: where launches cost more than threads
        do.
    device: What runs it: decides which attention and which convolutions are ours.
    packable: Inputs that are plain weights of convolutions, which the plan may pack for kernels of ours.
    choose: What predicts these kernels.
    Raises LadderError if a quantized product is none that a kernel computes.
    """
    users = readers(graph)
    parts = Products(graph, users, set(weights), device, packable, choose).parts()
    taken = {name: at for at, part in enumerate(parts) for name in _members(graph, part, users)}
    scatters = in_place(graph, users, updated, device)
    kind = "" if device is None else device.kind
    units = 0 if device is None or kind == "llvm" else device.units
    chains = Chains(graph, users, taken, units, kind)
    parts += with_scatters(graph, users, chains.parts(), scatters)
    written = {node.name for node in scatters}
    library = [node for node in graph.nodes if engine(node) == "library" and node.name not in written]
    for node in library:
        parts.append(_called(graph, node, device))
    rows = read_in_order(parts) if kind == "cuda" else set()
    views = _views(graph, parts, library, chains.stored, rows, units > 0)
    parts = [without_kernel(part, kind) for part in parts + views]
    found = ordered(graph, absorb_copies(graph, parts, again=units > 0))
    found = without_stored(graph, with_recomputed(graph, found, kind), kind) if units else found
    return fuse_horizontally(graph, found) if side_by_side else found


def readers(graph: Graph) -> dict[str, list[Node | None]]:
    """Return value -> the nodes that read it, None for each time that it is a result."""
    found: dict[str, list[Node | None]] = {value: [] for node in graph.nodes for value in node.values}
    for node in graph.nodes:
        for value in dict.fromkeys(node.inputs):
            found[value].append(node)
    for output in graph.outputs:
        found[output].append(None)
    return found


def _members(graph: Graph, part: Subgraph, users: Users) -> set[str]:
    """Return the nodes of the model that only this part computes: not what others inline as well."""
    names = {node.name for node in part.graph.nodes if node.operator != "input"}
    return {name for name in names if not _is_shared(graph.producer(name), names, users)}


def _is_shared(node: Node, members: set[str], users: Users) -> bool:
    """Tell whether a conversion of what a part reads serves others as well."""
    others = [reader for reader in users[node.name] if reader is None or reader.name not in members]
    return bool(others) and node.operator == "convert" and not set(node.inputs) & members


def _called(graph: Graph, node: Node, device: TileDevice | None) -> Subgraph:
    if node.operator == "attention":
        return attention_part(graph, node, device)
    if node.operator == "restride":
        return part_of("view", graph, node)
    own = (row(graph, node, device) for row in (recurrent_part, codes_part, elements_part, fourier_part))
    return next((part for part in own if part is not None), None) or _library(graph, node)


def _library(graph: Graph, node: Node) -> Subgraph:
    target = str(dict(node.attributes).get("target", node.operator))
    reason = "" if target.startswith(OURS) else f"{target} has no kernel of ours"
    return part_of("library", graph, node, reason)


def _views(
    graph: Graph, parts: list[Subgraph], library: list[Node], copied: Container[str], rows: Container[str],
    on_gpu: bool,
) -> list[Subgraph]:  # fmt: skip
    """Return the parts that give other parts, and the caller, views of what is computed.

    copied: Views that are part of chains.
    rows: What is read in the order of its axes: all readers share one copy.
    on_gpu: Whether kernels of ours copy faster than torch does.
    """
    made = {value for part in parts for value in part.outputs} | {node.name for node in graph.inputs}
    wanted = [value for part in parts for value in part.inputs] + list(graph.outputs)
    wanted += [value for node in library for value in node.inputs]
    in_order = {value for node in library if _is_ours(node) for value in node.inputs}
    stored = {node.inputs[0] for node in library if node.operator == "restride"}
    found: dict[str, Subgraph] = {}
    for value in wanted:
        if value in made or value in found or graph.producer(value).operator == "call":
            continue
        if engine(graph.producer(value)) == "library":
            continue
        as_stored = value in stored or value in rows
        made_here = _materialise(graph, value, copied, value in in_order, as_stored, on_gpu)
        found.update({part.outputs[0]: part for part in made_here if part.outputs[0] not in made})
    return list(found.values())


def _is_ours(node: Node) -> bool:
    """Tell whether a call is of an operator of ours, whose kernels read elements in order."""
    return str(dict(node.attributes).get("target")).startswith("ladder.")


def _materialise(
    graph: Graph, value: str, copied: Container[str], in_order: bool, stored: bool, on_gpu: bool
) -> list[Subgraph]:
    """Return what makes a view or a number available: nothing but an address, or a copy.

    copied: Views that are available.
    in_order: Whether its elements must lie one after the other, none read at several places.
    stored: Whether it is to lie in the order of its axes, as results and what products read.
    """
    members, source = inlined_chain(graph, value, copied)
    if in_order and any(graph.producer(name).operator == "broadcast" for name in members):
        return [_part(graph, members, value, "chain", "copied: what follows needs it in order")]
    if source is None or source != view_chain(graph, value, copied)[1]:  # made of numbers, or converted
        return [_part(graph, members, value, "chain", "")]
    by_torch = ("library",) if stored or on_gpu else ("library", "input", "product")
    if engine(graph.producer(source)) in by_torch or is_free(graph, members, stored):
        return [_part(graph, members, value, "view", "")]
    for cut in range(len(members) - 1, 0, -1):
        if is_free(graph, members[cut:], stored):
            middle = members[cut - 1]
            copy = _part(graph, members[:cut], middle, "chain", "copied: what follows needs it in order")
            return [copy, _part(graph, members[cut:], value, "view", "")]
    return [_part(graph, members, value, "chain", "copied: what follows needs it in order")]


def _part(graph: Graph, members: list[str], value: str, kind: str, reason: str) -> Subgraph:
    region = extract(graph, members, [value])
    return Subgraph(kind, region, outside_inputs(graph, members), (value,), reason)


def ordered(graph: Graph, parts: list[Subgraph]) -> list[Subgraph]:
    """Return parts so that every value is made before it is read; random draws keep their order."""
    position = {value: at for at, node in enumerate(graph.nodes) for value in node.values}
    inorder = sorted(parts, key=lambda part: max(position[value] for value in part.outputs))
    needs = _needs(inorder)
    begun: set[int] = set()
    placed: dict[int, Subgraph] = {}
    for first in inorder:
        ahead = [first]
        while ahead:
            part = ahead[-1]
            missing = [other for other in needs[id(part)] if id(other) not in placed]
            if id(part) in placed or not missing:
                placed.setdefault(id(part), ahead.pop())
            elif id(part) in begun:
                raise VerificationError(f"parts need each other: {', '.join(part.outputs)}")
            else:
                begun.add(id(part))
                ahead += missing
    return list(placed.values())


def _needs(parts: Sequence[Subgraph]) -> dict[int, list[Subgraph]]:
    """Return what must run before each part: the producers of its inputs, and earlier random draws."""
    maker = {value: part for part in parts for value in part.outputs}
    found = {id(part): [maker[value] for value in part.inputs if value in maker] for part in parts}
    random = [part for part in parts if any(map(draws, part.graph.nodes))]
    for before, part in pairwise(random):
        found[id(part)].append(before)
    return found


def absorb_copies(graph: Graph, parts: Sequence[Subgraph], again: bool) -> list[Subgraph]:
    """Let chains write what only copies of their results are read for in the order in which it is read.

    A part that reads one result of a chain and only renames its positions becomes part of that chain; the
    result itself is stored no more unless somebody else reads it. ``again`` as `row_axes` takes it.
    """
    found = list(parts)
    for copy in parts:
        if copy.kind != "chain" or len(copy.inputs) != 1 or not _only_moves(copy):
            continue
        maker = next((p for p in found if p.kind == "chain" and copy.inputs[0] in p.outputs), None)
        if maker is None or "put" in maker.operators or _has_columns(maker):
            continue
        if (joined := _absorbed(graph, found, maker, copy, again)) is not None:
            found = [joined if part is maker else part for part in found if part is not copy]
    return found


def _has_columns(part: Subgraph) -> bool:
    """Tell whether a chain is a loop over columns: in another order its rows would lie apart."""
    rows = row_axes(part.graph, part.graph.outputs)
    return rows is None and column_axes(part.graph, part.graph.outputs) is not None


def _only_moves(part: Subgraph) -> bool:
    nodes = [node for node in part.graph.nodes if node.operator != "input"]
    return all(is_inlined(part.graph, node) and node.operator != "map" for node in nodes)


def _turns_last(node: Node) -> bool:
    """Tell whether a node makes another axis the last one."""
    last = len(node.tile.shape) - 1
    return node.operator == "transpose" and node_attributes(node)["permutation"][-1] != last


def _absorbed(
    graph: Graph, parts: Sequence[Subgraph], maker: Subgraph, copy: Subgraph, again: bool
) -> Subgraph | None:
    """Return a chain with a copy of its result; None if the two are no loop over rows."""
    (value,) = copy.inputs
    others = [part for part in parts if part is not copy]
    kept = value in graph.outputs or any(value in part.inputs for part in others)
    if kept and again and any(map(_turns_last, copy.graph.nodes)):
        return None  # one of the two would be written, or read, in single elements
    outputs = tuple(v for v in maker.outputs if kept or v != value) + copy.outputs
    members = {node.name for part in (maker, copy) for node in part.graph.nodes if node.operator != "input"}
    region = extract(graph, members, outputs, "chain")
    rows = row_axes(region, outputs, again) is not None or (again and strided_rows(region) is not None)
    if len(members) > MOST_CHAIN_NODES or not rows:
        return None
    return replace(maker, graph=region, inputs=outside_inputs(graph, members), outputs=outputs)
