"""Found graphs: connected parts that the superoptimizer's database has proven kernels for become one part.

A region is one or more products with the chains and products around them, as long as the rest of the model
reads one of its values. Each region that is a program of the superoptimizer (`found_program`) is offered; the
ones that save most are taken. Nothing else of a partition changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.partition.found_program import RegionProgram, Slice, program_of, sliced_product
from ladder.partition.subgraphs import Subgraph, extract, outside_inputs
from tile_types.errors import LadderError
from tile_types.tile import Tile


def separated(graph: Graph, members: Collection[str], slices: Iterable[Slice]) -> tuple[Graph, set[str]]:
    """Return a graph in which some rows of weights are inputs, multiplied by products of their own.

    members: Nodes among which slices of products are to be replaced.
    slices: The rows; each becomes an input of that name.
    Returns: The graph, and the members: those whose values nothing reads any more are gone from both.
    """
    wanted = {(item.value, item.begin, item.rows): item for item in slices}
    if not wanted:
        return graph, set(members)
    nodes: list[Node] = []
    found = set(members)
    inputs: dict[str, Node] = {}
    for node in graph.nodes:
        product = sliced_product(graph, node) if node.name in found and node.operator == "slice" else None
        if product is None:
            nodes.append(node)
            continue
        new, weight = _product_of(graph, node, product, wanted)
        inputs[weight.name] = weight
        nodes += new
        found |= {n.name for n in new}
    whole = {item.value for item in wanted.values()}
    return _pruned(replace(graph, nodes=(*inputs.values(), *nodes)), found | whole)


def _product_of(
    graph: Graph, node: Node, product: Node, wanted: dict[tuple[str, int, int], Slice]
) -> tuple[list[Node], Node]:
    """Return the nodes that compute a slice's value by a product of its own, and their weight."""
    chain = [graph.producer(product.inputs[1])]
    while chain[-1].operator == "convert":
        chain.append(graph.producer(chain[-1].inputs[0]))
    rows = int(node.tile.shape[-1])
    item = wanted[chain[-1].name, int(node_attributes(node)["begin"][-1]), rows]
    weight = replace(chain[-1], name=str(item), tiles=(_with_rows(chain[-1], 0, rows),))
    new, value = [], weight.name
    for step in reversed(chain[:-1]):
        new.append(
            replace(
                step, name=f"{node.name}_{step.name}", inputs=(value,), tiles=(_with_rows(step, 0, rows),)
            )
        )
        value = new[-1].name
    last = f"{node.name}_{product.name}"
    new.append(
        replace(product, name=last, inputs=(product.inputs[0], value), tiles=(_with_rows(product, -1, rows),))
    )
    new.append(Node(f"{last}_in_type", "convert", (last,), (("type", node.tile.ttype.name),),
                    (replace(new[-1].tile, ttype=node.tile.ttype),)))  # fmt: skip
    shape = (("shape", node.tile.shape),)
    new.append(Node(node.name, "reshape", (new[-1].name,), shape, (node.tile,)))
    return new, weight


def _with_rows(node: Node, axis: int, extent: int) -> Tile:
    """Return a node's tile with another extent along an axis."""
    shape = list(node.tile.shape)
    shape[axis] = extent
    return replace(node.tile, shape=tuple(shape))


def _pruned(graph: Graph, members: set[str]) -> tuple[Graph, set[str]]:
    """Return a graph without members that nothing reads, and the members that are left."""
    while True:
        read = {value for node in graph.nodes for value in node.inputs} | set(graph.outputs)
        dead = {n.name for n in graph.nodes if n.name in members and not read & set(n.values)}
        if not dead:
            return graph, {n.name for n in graph.nodes if n.name in members and n.operator != "input"}
        graph = replace(graph, nodes=tuple(node for node in graph.nodes if node.name not in dead))
        members = members - dead


KINDS = ("gemm", "product", "chain")
"""Parts that regions consist of."""

PRODUCTS = ("gemm", "product")

MOST_PARTS = 5
"""Parts of a region: two products that are added take four with what follows."""

MOST_REGIONS = 24
"""Regions around one product."""


@dataclass(frozen=True)
class Choice:
    """Kernels of a found graph for a region.

    text: The kernels, as `ladder.runtime.fused.Lowering` prints them.
    seconds, unfused: Predicted times of these, and of the parts that they replace.
    reason: Which graph, what proves it, and why it was chosen.
    """

    text: str
    seconds: float
    unfused: float
    reason: str

    @property
    def gain(self) -> float:
        """Seconds that it saves."""
        return self.unfused - self.seconds


Find = Callable[[RegionProgram, Sequence[Subgraph]], Choice | None]
"""(program of a region, its parts) -> kernels that are predicted to be faster; None if there are none."""


@dataclass(frozen=True)
class Weight:
    """Ways in which a region may use a weight that plans lay out.

    joined: How many matrices lie side by side in it.
    alone: Whether kernels of found graphs read other arrays of it, so that none but they may read it.
    readable: Whether its arrays are those that kernels of found graphs take.
    """

    joined: int = 1
    alone: bool = False
    readable: bool = True


@dataclass(frozen=True)
class Replaced:
    """A partition with found graphs.

    graph: Of the model: it differs where weights that lay side by side are read apart.
    parts: In any order.
    slices: The rows that are inputs now.
    """

    graph: Graph
    parts: list[Subgraph]
    slices: tuple[Slice, ...] = ()


def with_found(
    graph: Graph, parts: Sequence[Subgraph], find: Find, weights: Mapping[str, Weight] | None = None
) -> Replaced:
    """Return parts with found graphs in place of those that they beat.

    graph, parts: The model and its partition.
    find: What knows found graphs.
    weights: Inputs that plans lay out.
    """
    regions = _Regions(graph, parts, weights or {})
    offers = list(regions.offers(find))
    taken: list[_Offer] = []
    slices: list[Slice] = []
    for offer in sorted(offers, key=lambda offer: -offer.choice.gain):
        if not any(offer.numbers & other.numbers for other in taken):
            taken.append(offer)
    found = list(parts)
    for offer in taken:
        graph, part = _part_of(graph, regions, offer)
        slices += offer.program.slices
        gone = {id(parts[number]) for number in offer.numbers}
        place = min(at for at, old in enumerate(found) if id(old) in gone)
        found[place] = part
        found = [old for old in found if id(old) not in gone]
    return Replaced(graph, _without_unread_views(graph, found) if taken else found, tuple(slices))


@dataclass(frozen=True)
class _Offer:
    """A region and what was found for it."""

    numbers: frozenset[int]
    program: RegionProgram
    choice: Choice


class _Regions:
    """The regions of a partition.

    parts: Of it, in any order.
    weights: Inputs that plans lay out.
    """

    def __init__(self, graph: Graph, parts: Sequence[Subgraph], weights: Mapping[str, Weight]) -> None:
        self.graph, self.parts, self.weights = graph, parts, weights
        self.maker = {value: at for at, part in enumerate(parts) for value in part.outputs}
        self.readers: dict[str, list[int]] = {}
        for at, part in enumerate(parts):
            for value in part.inputs:
                self.readers.setdefault(value, []).append(at)

    def offers(self, find: Find) -> Iterator[_Offer]:
        seen: set[frozenset[int]] = set()
        for at, part in enumerate(self.parts):
            if part.kind not in PRODUCTS:
                continue
            for numbers in self._around(at):
                if numbers not in seen:
                    seen.add(numbers)
                    yield from self._offer(numbers, find)

    def _offer(self, numbers: frozenset[int], find: Find) -> Iterator[_Offer]:
        outputs = self.outputs(numbers)
        if len(outputs) != 1 or self._returns(numbers):
            return
        try:
            program = program_of(self.region(numbers), self.types(numbers))
        except LadderError:
            return
        if not self._fits(program, numbers):
            return
        choice = find(program, [self.parts[number] for number in sorted(numbers)])
        if choice is not None and choice.gain > 0:
            yield _Offer(numbers, program, choice)

    def _fits(self, program: RegionProgram, numbers: frozenset[int]) -> bool:
        """Tell whether kernels can have the weights as they read them."""
        whole = [value for value in program.inputs if isinstance(value, str)]
        read = [self.weights[value] for value in whole if value in self.weights]
        divided = {item.value for item in program.slices}
        every = read + [self.weights.get(value, Weight()) for value in divided]
        alone = {v for v in (*whole, *divided) if v in self.weights and self.weights[v].alone}
        shared = any(set(self.readers[value]) - numbers for value in (*alone, *divided))
        apart = all(self._is_divided(value, program.slices) for value in divided)
        return apart and not shared and all(weight.readable for weight in every)

    def _is_divided(self, value: str, slices: Sequence[Slice]) -> bool:
        """Tell whether slices are the matrices that lie side by side in a weight."""
        own = sorted((item.begin, item.rows) for item in slices if item.value == value)
        ends = [begin + rows for begin, rows in own]
        follow = [begin for begin, _ in own] == [0, *ends[:-1]]
        count = self.weights.get(value, Weight()).joined
        return follow and ends[-1] == self.graph.tile(value).shape[0] and len(own) == count

    def _around(self, at: int) -> Iterator[frozenset[int]]:
        """Yield connected sets of parts around a product, small ones first."""
        layer = [frozenset({at})]
        count = 0
        for _ in range(MOST_PARTS - 1):
            wider = {group | {other} for group in layer for at in group for other in self._near(at)}
            layer = sorted({group for group in wider if group not in layer}, key=sorted)[:MOST_REGIONS]
            for group in layer:
                count += 1
                yield group
            if count > MOST_REGIONS:
                return

    def _near(self, number: int) -> set[int]:
        """Return a part's producers and consumers, through views."""
        above = {self._source(value) for value in self.parts[number].inputs}
        found = {self.maker[value] for value in above if value in self.maker}
        for value in self.parts[number].outputs:
            found |= set(self._users(value))
        return {other for other in found - {number} if self.parts[other].kind in KINDS}

    def _source(self, value: str) -> str:
        """Return the value that a view shows."""
        while value in self.maker and self.parts[self.maker[value]].kind == "view":
            value = self.parts[self.maker[value]].inputs[0]
        return value

    def _users(self, value: str) -> Iterator[int]:
        """Yield the parts that read a value, or views of it."""
        for number in self.readers.get(value, []):
            if self.parts[number].kind == "view":
                yield from (user for shown in self.parts[number].outputs for user in self._users(shown))
            else:
                yield number

    def outputs(self, numbers: frozenset[int]) -> list[str]:
        """Return the values that the rest of the model reads, or the caller."""
        made = [value for number in sorted(numbers) for value in self.parts[number].outputs]
        return [value for value in made if self._is_shown(value) or set(self._users(value)) - numbers]

    def _is_shown(self, value: str) -> bool:
        """Tell whether a value or a view of it is a result of the model."""
        views = [n for n in self.readers.get(value, []) if self.parts[n].kind == "view"]
        return value in self.graph.outputs or any(
            self._is_shown(shown) for number in views for shown in self.parts[number].outputs
        )

    def _returns(self, numbers: frozenset[int]) -> bool:
        """Tell whether something outside reads a part's result and makes what another part reads."""
        ahead = [user for number in numbers for value in self.parts[number].outputs
                 for user in self._users(value) if user not in numbers]  # fmt: skip
        seen: set[int] = set()
        while ahead:
            number = ahead.pop()
            if number in numbers:
                return True
            if number not in seen:
                seen.add(number)
                ahead += [user for value in self.parts[number].outputs for user in self._users(value)]
        return False

    def members(self, numbers: frozenset[int]) -> set[str]:
        """Return the nodes of parts and of the views between them."""
        own = [self.parts[number] for number in numbers]
        shown = [view for part in own for value in part.inputs for view in self._between(value, numbers)]
        every = [*own, *(self.parts[self.maker[view]] for view in shown)]
        return {node.name for part in every for node in part.graph.nodes if node.operator != "input"}

    def _between(self, value: str, numbers: frozenset[int]) -> Iterator[str]:
        """Yield the views by which a region reads what it makes itself."""
        if self.maker.get(self._source(value)) in numbers:
            while self.parts[self.maker[value]].kind == "view":
                yield value
                value = self.parts[self.maker[value]].inputs[0]

    def region(self, numbers: frozenset[int]) -> Graph:
        """Return the graph of a region of one result."""
        return extract(self.graph, self.members(numbers), self.outputs(numbers), "found")

    def types(self, numbers: frozenset[int]) -> dict[str, str]:
        """Return the packed weights that products of a region read -> their types."""
        found = {}
        for number in numbers:
            for node in self.parts[number].graph.inputs:
                if node.tile.ttype.is_block:
                    found[node.name] = node.tile.ttype.name
        return found


def _part_of(graph: Graph, regions: _Regions, offer: _Offer) -> tuple[Graph, Subgraph]:
    """Return the part of an offer, and the graph."""
    members, outputs = regions.members(offer.numbers), regions.outputs(offer.numbers)
    inputs = offer.program.inputs
    graph, members = separated(graph, members, offer.program.slices)
    region, outside = extract(graph, members, outputs, "found"), outside_inputs(graph, members)
    values = dict(zip((node.name for node in region.inputs), outside, strict=True))
    roles = tuple((f"X{number}", values[str(value)]) for number, value in enumerate(inputs))
    choice = offer.choice
    part = Subgraph("found", region, outside, tuple(outputs), choice.reason, roles=roles, found=choice.text)
    return graph, part


def _without_unread_views(graph: Graph, parts: Sequence[Subgraph]) -> list[Subgraph]:
    """Return parts without views that nothing reads."""
    found = list(parts)
    while True:
        read = {value for part in found for value in part.inputs} | set(graph.outputs)
        kept = [part for part in found if part.kind != "view" or read & set(part.outputs)]
        if len(kept) == len(found):
            return kept
        found = kept
