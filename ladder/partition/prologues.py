"""Prologues: a chain of few rows joins the product that alone multiplies its result, as one part.

The product's kernel then computes the chain in each of its blocks, and the rows never go through memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ladder.ir.extents import Shape, product
from ladder.ir.gemm import Gemm
from ladder.ir.graph import Graph
from ladder.partition.convolutions import chain_us
from ladder.partition.subgraphs import Subgraph, extract, needed, outside_inputs
from targets import TileDevice

ROW_US = 0.7
"""Microseconds that a row of a prologue adds to a product: an estimate from the latencies of a load from L2,
shuffles and two barriers, no measurement."""

STORED = 1e5
"""Bytes that a block stores in a microsecond: 64 in a cycle."""

Lower = Callable[[Graph, str, Gemm, tuple[Shape, ...], float], str]
"""(Chain, the result that is multiplied, product, shapes of results that repeat that one's rows, microseconds
of the chain alone) -> how the kernel is described; empty if there is none."""

Before = tuple[Subgraph, str, list[Subgraph]]
"""A chain, its result that a product multiplies, and the views between them."""


def with_prologues(
    graph: Graph, parts: Sequence[Subgraph], lower: Lower, device: TileDevice
) -> list[Subgraph]:
    """Return parts with chains in the products that alone read them, where that is predicted to be faster."""
    found = list(parts)
    links = Links(graph, parts)
    for part in parts:
        joined = links.chain_before(part)
        if joined is None or not pays(joined[0], joined[1], device):
            continue
        alone = chain_us(joined[0].graph, device)
        whole = _joined(graph, part, joined, links.read_beside(joined), lower, alone)
        if whole is not None:
            gone = {id(item) for item in (*joined[2], joined[0])}
            found = [whole if item is part else item for item in found if id(item) not in gone]
            links.maker |= dict.fromkeys(whole.outputs, whole)
    return found


def pays(chain: Subgraph, value: str, device: TileDevice) -> bool:
    """Tell whether a product that computes a chain's rows is predicted to save time."""
    graph, own = chain.graph, _inner(chain, value)
    rows = product(graph.tile(own).shape[:-1])
    others = [graph.tile(result) for result in graph.outputs if result != own]
    if not isinstance(rows, int) or not all(isinstance(product(tile.shape), int) for tile in others):
        return False
    stored = sum(tile.nbytes for tile in others)
    return rows * ROW_US + stored / STORED < chain_us(graph, device)


def _inner(part: Subgraph, value: str) -> str:
    """Return the name of a part's result within its graph."""
    return part.graph.outputs[part.outputs.index(value)]


class Links:
    """Which part makes a value, and which read it."""

    def __init__(self, graph: Graph, parts: Sequence[Subgraph]) -> None:
        self.graph = graph
        self.maker = {value: part for part in parts for value in part.outputs}
        self.readers: dict[str, list[Subgraph]] = {}
        for part in parts:
            for value in dict.fromkeys(part.inputs):
                self.readers.setdefault(value, []).append(part)

    def chain_before(self, part: Subgraph) -> Before | None:
        """Return the chain whose result a product multiplies, that result, and the views between them."""
        if part.kind != "gemm" or part.gemm is None or "contract" in part.operators:
            return None
        value, views = part.by_role["A"], list[Subgraph]()
        while (before := self.maker.get(value)) is not None:
            if before.kind == "chain":
                others = [read for read in part.inputs if read != part.by_role["A"]]
                apart = "put" in before.operators or self.lies_between(before, others)
                return None if apart else (before, value, views)
            if before.kind != "view" or set(before.operators) - {"reshape"} or not self.is_read_once(value):
                return None
            views.append(before)
            value = before.inputs[0]
        return None

    def read_beside(self, before: Before) -> list[str]:
        """Return the results of a chain that are read by others than the product of one of them."""
        chain, value, _ = before
        return [result for result in chain.outputs if result != value or not self.is_read_once(value)]

    def is_read_once(self, value: str) -> bool:
        return len(self.readers.get(value, ())) == 1 and value not in self.graph.outputs

    def lies_between(self, chain: Subgraph, values: Sequence[str]) -> bool:
        """Tell whether a chain's results are needed for some of the values."""
        ahead, seen = [*values], set[str]()
        while ahead:
            value = ahead.pop()
            maker = None if value in seen else self.maker.get(value)
            if maker is chain:
                return True
            seen.add(value)
            ahead += () if maker is None else maker.inputs
        return False


def _copies(graph: Graph, result: str, value: str) -> bool:
    """Tell whether a result is a value's rows, one after the other, once or several times over."""
    shape = graph.tile(result).shape
    while result != value:
        node = graph.producer(result)
        if node.operator not in ("reshape", "broadcast"):
            return False
        (result,) = node.inputs
        old = graph.tile(result).shape
        lead = next((axis for axis, extent in enumerate(old) if extent != 1), len(old)) - len(old)
        if node.operator == "broadcast" and lead and old[lead:] != node.tile.shape[lead:]:
            return False
    return shape[-1:] == graph.tile(value).shape[-1:]


def _joined(
    graph: Graph, part: Subgraph, before: Before, kept: Sequence[str], lower: Lower, alone: float
) -> Subgraph | None:
    """Return a product with its prologue; None if no kernel computes both.

    kept: Results of the chain that are stored: first those that are computed, then the copies of the rows.
    """
    chain, value, views = before
    assert part.gemm is not None  # `chain_before` has looked
    own = _inner(chain, value)
    copies = [result for result in kept if _copies(chain.graph, _inner(chain, result), own)]
    computed = [result for result in kept if result not in copies]
    rest = tuple(_inner(chain, r) for r in chain.outputs if r == value or r in computed)
    shapes = tuple(graph.tile(result).shape for result in copies)
    text = lower(needed(chain.graph, rest), own, part.gemm, shapes, alone)
    if not text:
        return None
    items = (chain, *views, part)
    members = {n.name for item in items for n in item.graph.nodes if n.operator != "input"}
    outputs = (*part.outputs, *computed, *copies)
    region, inputs = extract(graph, members, outputs), outside_inputs(graph, members)
    names = dict(zip(inputs, (node.name for node in region.inputs), strict=True))
    roles = {role: names[read] for role, read in part.by_role.items() if role != "A"}
    roles |= {f"X{at}": names[read] for at, read in enumerate(chain.inputs)}
    return Subgraph(
        "prologue", region, inputs, outputs, part.reason, part.gemm, tuple(sorted(roles.items())), text
    )
