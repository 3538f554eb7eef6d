"""Prologues: a chain of few rows joins the product that alone multiplies its result, as one part.

The product's kernel then computes the chain in each of its blocks, and the rows never go through memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ladder.ir.extents import product
from ladder.ir.gemm import Gemm
from ladder.ir.graph import Graph
from ladder.partition.convolutions import chain_us
from ladder.partition.subgraphs import Subgraph, extract, outside_inputs
from targets import TileDevice

ROW_US = 0.7
"""Microseconds that a row of a prologue adds to a product: an estimate from the latencies of a load from L2,
shuffles and two barriers, no measurement."""

Lower = Callable[[Graph, str, Gemm], str]
"""(Chain, the result that is multiplied, product) -> how the kernel is described; empty if there is none."""


def with_prologues(
    graph: Graph, parts: Sequence[Subgraph], lower: Lower, device: TileDevice
) -> list[Subgraph]:
    """Return parts with chains in the products that alone read them, where that is predicted to be faster."""
    found = list(parts)
    links = _Links(graph, parts)
    for part in parts:
        joined = links.chain_before(part)
        if joined is None or not pays(joined[0], joined[1], device):
            continue
        whole = _joined(graph, part, joined, lower)
        if whole is not None:
            gone = {id(item) for item in (*joined[2], joined[0])}
            found = [whole if item is part else item for item in found if id(item) not in gone]
            links.taken.add(id(joined[0]))
    return found


def pays(chain: Subgraph, value: str, device: TileDevice) -> bool:
    """Tell whether a product that computes a chain's rows is predicted to save time."""
    rows = product(chain.graph.tile(_inner(chain, value)).shape[:-1])
    return isinstance(rows, int) and rows * ROW_US < chain_us(chain.graph, device)


def _inner(part: Subgraph, value: str) -> str:
    """Return the name of a part's result within its graph."""
    return part.graph.outputs[part.outputs.index(value)]


class _Links:
    """Which part makes a value, and which read it."""

    def __init__(self, graph: Graph, parts: Sequence[Subgraph]) -> None:
        self.graph = graph
        self.maker = {value: part for part in parts for value in part.outputs}
        self.readers: dict[str, list[Subgraph]] = {}
        for part in parts:
            for value in dict.fromkeys(part.inputs):
                self.readers.setdefault(value, []).append(part)
        self.taken: set[int] = set()
        """Chains that are in a product already."""

    def chain_before(self, part: Subgraph) -> tuple[Subgraph, str, list[Subgraph]] | None:
        """Return the chain whose result a product multiplies, that result, and the views between them."""
        if part.kind != "gemm" or part.gemm is None or "contract" in part.operators:
            return None
        value, views = part.by_role["A"], list[Subgraph]()
        while self._is_read_once(value) and (before := self.maker.get(value)) is not None:
            if before.kind == "chain" and id(before) not in self.taken and "put" not in before.operators:
                return before, value, views
            if before.kind != "view" or set(before.operators) - {"reshape"}:
                return None
            views.append(before)
            value = before.inputs[0]
        return None

    def _is_read_once(self, value: str) -> bool:
        return len(self.readers.get(value, ())) == 1 and value not in self.graph.outputs


def _joined(
    graph: Graph, part: Subgraph, before: tuple[Subgraph, str, list[Subgraph]], lower: Lower
) -> Subgraph | None:
    """Return a product with its prologue; None if no kernel computes both."""
    chain, value, views = before
    assert part.gemm is not None  # `chain_before` has looked
    text = lower(chain.graph, _inner(chain, value), part.gemm)
    if not text:
        return None
    own = (chain, *views, part)
    members = {n.name for item in own for n in item.graph.nodes if n.operator != "input"}
    outputs = (*part.outputs, *(other for other in chain.outputs if other != value))
    region, inputs = extract(graph, members, outputs), outside_inputs(graph, members)
    names = dict(zip(inputs, (node.name for node in region.inputs), strict=True))
    roles = {role: names[read] for role, read in part.by_role.items() if role != "A"}
    roles |= {f"X{at}": names[read] for at, read in enumerate(chain.inputs)}
    return Subgraph(
        "prologue", region, inputs, outputs, part.reason, part.gemm, tuple(sorted(roles.items())), text
    )
