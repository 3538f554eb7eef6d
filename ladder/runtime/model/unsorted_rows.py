"""Products of few rows, each with a matrix that it names, instead of rows that are sorted first.

Programs sort rows by expert, count them, multiply, and bring results back into their order: some ten
launches. Of few rows hardly two have one expert, so kernels that look up each row's expert read as much, and
the order is that of the program. That is sound where nothing but the order of rows depends on the sort:
`_Reader` follows what is sorted through operators that treat rows alike, until an inverse of the order undoes
it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ladder.ir.build import is_by_element, node_attributes
from ladder.ir.graph import Graph, Node
from ladder.partition.subgraphs import engine, needed
from ladder.runtime.model.grouped_calls import LAID_OUT, PRODUCT, SLOTTED
from ladder.runtime.model.nodes import EVALUATED, graph_run
from ladder.runtime.model.sizes import CallSizes
from tile_types import get_type
from tile_types.tile import Extent

MOST_AGAIN = 1.25
"""Matrices that rows name over those that differ, as random rows have them, up to which rows stay as they
are."""

SORTS = ("aten.sort.default", "aten.sort.stable")
INDEX, HISTOGRAM, SUMS = "aten.index.Tensor", "aten.histc.default", "aten.cumsum.default"


def with_unsorted_rows(graph: Graph) -> Graph:
    """Return a graph in which few rows that are sorted for grouped products of ours stay as they are."""
    if PRODUCT not in map(_target, graph.nodes):
        return graph
    for name in [node.name for node in graph.nodes if _target(node) in SORTS]:
        found = _Reader(graph, graph.producer(name))
        graph = found.rewritten() if found.follows() else graph
    return graph


def are_few(rows: int, matrices: int) -> bool:
    """Tell whether hardly two of so many rows have one matrix."""
    differ = matrices * (1.0 - (1.0 - 1.0 / matrices) ** rows)
    return rows <= MOST_AGAIN * differ


def _target(node: Node) -> str:
    return str(dict(node.attributes).get("target", ""))


class _Reader:
    """What reads the results of one sort.

    graph, sort: The graph, and the call that sorts whole numbers.
    """

    def __init__(self, graph: Graph, sort: Node) -> None:
        self.graph, self.sort = graph, sort
        self.ids = sort.inputs[0] if sort.inputs else ""
        self.sorted, self.order = sort.values if len(sort.values) == 2 else ("", "")
        self.rows: Extent = sort.tile.shape[0] if len(sort.tile.shape) == 1 else ""
        self.permuted = {self.sorted, self.order}
        """Values whose first axis has the order of the sort."""
        self.inverses: set[str] = set()
        self.restored: dict[str, str] = {}
        """Value in the program's own order -> the permuted value that it is."""
        self.products: set[str] = set()

    def follows(self) -> bool:
        """Tell whether all that reads the order undoes it, and grouped products are between."""
        if not self._ascends() or not isinstance(self.rows, int):
            return False
        for node in self.graph.nodes:
            if node is self.sort or not {*node.inputs} & (self.permuted | self.inverses):
                continue
            if not self._reads(node):
                return False
        seen = self.permuted | self.inverses
        return bool(self.products) and not seen & {*self.graph.outputs} and self._are_own()

    def _are_own(self) -> bool:
        """Tell whether values that take the places of copies are computed, and take one place each."""
        once = len({*self.restored.values()}) == len(self.restored)
        return once and all(self._is_computed(value) for value in self.restored.values())

    def _is_computed(self, value: str) -> bool:
        node = self.graph.producer(value)
        while engine(node) == "view":
            node = self.graph.producer(node.inputs[0])
        return node.operator not in ("input", "put") and _target(node) in ("", PRODUCT)

    def _ascends(self) -> bool:
        given = node_attributes(self.sort)
        keywords = dict(given["keywords"])
        flags = (*given["arguments"][2:], keywords.get("descending", False))
        axes = (*given["arguments"][1:2], keywords.get("dim", 0))
        return all(axis in (0, -1) for axis in axes) and not any(flags)

    def _reads(self, node: Node) -> bool:
        """Enter what a reader makes of permuted rows; return whether it treats them alike."""
        if node.operator == "put":
            return self._puts(node)
        if {*node.inputs} & self.inverses:
            return self._undoes(node)
        if node.operator == "call":
            return self._calls(node)
        if not self._is_by_row(node):
            return False
        self.permuted.add(node.name)
        return True

    def _is_by_row(self, node: Node) -> bool:
        """Tell whether row i of the result depends on row i of permuted operands alone."""
        given, shape = node_attributes(node), node.tile.shape
        tiles = [self.graph.tile(value).shape for value in node.inputs]
        if shape[:1] != (self.rows,):
            return False
        if is_by_element(node):
            others = (s for v, s in zip(node.inputs, tiles, strict=True) if v not in self.permuted)
            return all(len(s) < len(shape) or s[0] == 1 for s in others)
        if node.operator == "slice":
            return given["begin"][0] == 0 and (given["step"] or (1,))[0] == 1
        if node.operator.startswith("reduce_"):
            return len(tiles[0]) > 1 and given["axis"] % len(tiles[0]) > 0
        alone = tiles[0][:1] == (self.rows,)
        if node.operator == "broadcast":
            return alone and len(tiles[0]) == len(shape)
        return node.operator == "reshape" and alone

    def _puts(self, node: Node) -> bool:
        """Take rows that are put at the places of the order: results in the program's own."""
        given, (_, places, rows) = node_attributes(node), node.inputs
        plain = not given["axis"] and not given["combine"] and not given["along"] and places == self.order
        tile = self.graph.tile(rows)
        if not plain or (node.tile.shape, node.tile.ttype) != (tile.shape, tile.ttype):
            return False
        source = self.graph.producer(rows)
        if source.operator == "iota" and self._is_whole(node):
            self.inverses.add(node.name)
            return True
        self.restored[node.name] = rows
        return rows in self.permuted and self._is_whole(node)

    def _is_whole(self, node: Node) -> bool:
        """Tell whether the rows that are put are all, none of them read before."""
        return node.tile.shape[:1] == (self.rows,) and node.inputs[0] not in self.permuted | self.inverses

    def _undoes(self, node: Node) -> bool:
        """Take rows that are read in the inverse of their order."""
        if _target(node) != INDEX or not _is_plain_index(node):
            return False
        table, places = node.inputs
        self.restored[node.name] = table
        return table in self.permuted and places in self.inverses

    def _calls(self, node: Node) -> bool:
        target = _target(node)
        if target == HISTOGRAM:
            return self._is_sorted(node.inputs[0])
        if target == PRODUCT:
            x, matrices, ends = node.inputs if len(node.inputs) == 3 else ("", "", "")
            inside = x in self.permuted and matrices not in self.permuted
            self.products.add(node.name)
            self.permuted.add(node.name)
            return inside and self._are_ends(ends, int(self.graph.tile(matrices).shape[0]))
        if target == INDEX and _is_plain_index(node):
            self.permuted.add(node.name)
            table, places = node.inputs
            alone = len(self.graph.tile(places).shape) == 1
            return alone and table not in self.permuted and places in self.permuted
        self.permuted.add(node.name)
        return target == LAID_OUT

    def _is_sorted(self, value: str) -> bool:
        node = self.graph.producer(value)
        while node.operator == "convert":
            value = node.inputs[0]
            node = self.graph.producer(value)
        return value == self.sorted

    def _are_ends(self, value: str, matrices: int) -> bool:
        """Tell whether a value counts the sorted numbers of each matrix and those before; rows are few."""
        sums = self.graph.producer(value)
        if sums.operator != "call" or _target(sums) != SUMS or node_attributes(sums)["arguments"][1:] != (0,):
            return False
        counts = self.graph.producer(sums.inputs[0])
        bins = (matrices, 0, matrices - 1)
        if counts.operator != "call" or _target(counts) != HISTOGRAM:
            return False
        told = node_attributes(counts)["arguments"][1:] == bins and self._is_sorted(counts.inputs[0])
        return told and are_few(int(self.rows), matrices)

    # the graph without the sort ------------------------------------------------------------------------
    def rewritten(self) -> Graph:
        """Return the graph whose rows have the program's own order."""
        order = f"{self.sort.name}_order"
        named = f"{self.sort.name}_named"
        iota = self._iota(order)
        narrow = replace(self.sort.tile, ttype=get_type("int32"), layout=None)
        ids = Node(named, "convert", (self.ids,), (("type", "int32"),), (narrow,))
        seen = {self.sorted: self.ids, self.order: order}
        nodes: list[Node] = []
        for node in self.graph.nodes:
            if node is self.sort:
                nodes += [iota, ids]
                continue
            if node.name in self.restored:
                value = self.restored[node.name]
                seen[node.name] = seen.get(value, value)
                continue
            inputs = tuple(seen.get(value, value) for value in node.inputs)
            own = node if inputs == node.inputs else replace(node, inputs=inputs)
            if node.name in self.products:
                given = node_attributes(own) | {"target": SLOTTED}
                attributes = tuple(sorted(given.items()))
                own = replace(own, inputs=(*inputs[:2], named), attributes=attributes)
            elif node.name in self.permuted and _target(node) == INDEX:
                each = self._repeated(node)
                if each == 1:
                    seen[node.name] = own.inputs[0]
                else:
                    nodes += self._gathered(own, each)
                continue
            nodes.append(own)
        outputs = tuple(seen.get(value, value) for value in self.graph.outputs)
        graph = replace(self.graph, nodes=tuple(nodes), outputs=outputs)
        kept = {node.name for node in (*needed(graph, outputs).nodes, *graph.inputs)}
        return replace(graph, nodes=tuple(node for node in nodes if node.name in kept))

    def _iota(self, name: str) -> Node:
        """Return the order in which rows stay as they are."""
        tile = self.sort.tiles[1]
        return Node(name, "iota", (), (("extent", self.rows), ("type", tile.ttype.name)), (tile,))

    def _places(self, value: str) -> torch.Tensor | None:
        """Return what a value is where rows stay as they are; None if not the order alone decides it."""
        names, ahead = set[str](), [value]
        while ahead:
            read = ahead.pop()
            node = self.graph.producer(read)
            if read != self.order and node.operator not in EVALUATED:
                return None
            if read != self.order and node.name not in names:
                names.add(node.name)
                ahead += node.inputs
        order, own = "order", sorted(names, key=self.graph.positions.__getitem__)
        nodes = [self._iota(order)]
        for node in map(self.graph.producer, own):
            inputs = tuple(order if read == self.order else read for read in node.inputs)
            nodes.append(replace(node, inputs=inputs))
        part = Graph("places", "kernel", tuple(nodes), (order if value == self.order else value,))
        found: torch.Tensor = graph_run(part, CallSizes(()), torch.device("cpu"))()
        return found

    def _repeated(self, node: Node) -> int:
        """Return how often a call takes each row of a table, one after the other; 0 if it takes others."""
        places, count = self._places(node.inputs[1]), self.graph.tile(node.inputs[0]).shape[0]
        if places is None or not isinstance(count, int) or not count or int(self.rows) % count:
            return 0
        each = int(self.rows) // count
        return each if places.tolist() == [at // each for at in range(int(self.rows))] else 0

    def _gathered(self, node: Node, each: int) -> list[Node]:
        """Return the nodes that give each row of a table so often, the last under the name of the call."""
        if not each:
            return [node]
        shape = node.tile.shape
        count, rest = int(self.rows) // each, shape[1:]
        steps = (("reshape", (count, 1, *rest)), ("broadcast", (count, each, *rest)), ("reshape", shape))
        made, value = list[Node](), node.inputs[0]
        for number, (operator, extents) in enumerate(steps, 1):
            name = node.name if number == len(steps) else f"{node.name}_rows_{number}"
            tile = replace(node.tile, shape=extents, layout=None)
            made.append(Node(name, operator, (value,), (("shape", extents),), (tile,)))
            value = name
        return made


def _is_plain_index(node: Node) -> bool:
    given = node_attributes(node)
    return given["arguments"] == (("%", 0), (("%", 1),)) and not given["keywords"] and len(node.inputs) == 2
