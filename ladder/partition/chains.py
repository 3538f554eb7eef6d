"""Fusion of memory-bound nodes with their producers, as long as the chain stays a loop over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil

from ladder.ir.build import draws, node_attributes
from ladder.ir.extents import Shape, product
from ladder.ir.graph import Graph, Node
from ladder.partition.alike import join_alike, join_readers
from ladder.partition.borders import is_bordered, is_given, is_turned
from ladder.partition.directions import mixes_directions
from ladder.partition.elements import lacking
from ladder.partition.nested_sums import sums_across, sums_between, sums_of_sums
from ladder.partition.repeats import (
    LEAST_READERS,
    LONG_ON_CPUS,
    LONG_ON_GPUS,
    MOST_NESTED,
    ONE_STEP,
    READS_ONCE,
    calls_again,
    is_small_window,
    joins_nested,
    known,
    scattered_windows,
    works_again,
)
from ladder.partition.rows import REDUCTIONS, SCANS, column_axes, loop_extents, row_axes
from ladder.partition.strided_rows import strided_rows, with_rows
from ladder.partition.subgraphs import Subgraph, engine, extract, outside_inputs, part_of
from ladder.partition.views import inlined_chain, is_inlined

MOST_CHAIN_NODES, MOST_ON_GPUS = 96, 128
"""Most nodes of one chain, more on GPUs: a longer kernel spills registers, which costs more than a launch."""

LARGE_WORK = 1 << 20
"""Elements for which another launch costs less than leaving most of the device idle.

An open number of rows counts as so many."""

LARGE_SHARED, MOST_GATHERED = 1 << 18, 4
"""Elements of a value from which on chains that reduce it are joined, and how many."""

MOST_OF_TILES = 6
"""Chains that are joined at once since together they are a loop over tiles."""

MOST_JOINED = 32
"""Most operands of a concatenation in a kernel, where each is a part of the loop; torch copies more."""

LONG_BLOCK = 1 << 15
"""Elements of a block for which another launch costs less."""

LONG_ROW = 8192
"""Elements that a block takes one after the other, and need not, from which on a launch costs less."""

LONG_COLUMNS = 1 << 15
"""Elements from which on blocks of columns, too few for the device, take longer than another launch."""

BLOCK_ELEMENTS = 2048
"""Elements that a block takes of what no reduction binds to rows."""

BLOCK_COLUMNS = 32
"""Columns that a block takes of reductions along axes before the last."""

SPLIT_RATIO = 16
"""Least ratio of the largest value of two chains to what one passes to the other, for two launches."""


class Chains:
    """Grows chains in the order of the graph.

    users: Value -> nodes that read it, None for results.
    taken: Nodes that belong to products -> number of the product.
    units: Of the device, if each block of its kernels takes a row: fewer rows leave some idle.
    kind: Of the device.
    stored: Views that are copied, and so belong to chains.
    """

    def __init__(
        self,
        graph: Graph,
        users: Mapping[str, list[Node | None]],
        taken: Mapping[str, int],
        units: int = 0,
        kind: str = "",
    ) -> None:
        self.graph = graph
        self.users = users
        self.taken = taken
        self.units, self.kind = units, kind
        self.position = {node.name: at for at, node in enumerate(graph.nodes)}
        self.reductions = {node.name for node in graph.nodes if node.operator in REDUCTIONS}
        random = [node.name for node in graph.nodes if draws(node)]
        self.draws_next = dict(pairwise(random))
        self.chain_of: dict[str, int] = {}
        self.members: dict[int, set[str]] = {}
        self.reasons: dict[int, str] = {}
        self.stored = frozenset() if units else scattered_windows(graph, taken)

    def parts(self) -> list[Subgraph]:
        """Return the chains as parts, and what torch joins."""
        wide = []
        for node in self.graph.nodes:
            stored = node.name in self.stored
            own = engine(node) == "chain" and not is_inlined(self.graph, node) and node.name not in self.taken
            if stored or own:
                if is_wide(node):
                    wide.append(part_of("torch", self.graph, node, f"a join of more than {MOST_JOINED}"))
                else:
                    self.place(node)
        for number in sorted(self.reasons, reverse=True):
            while number in self.reasons and (reader := self.only_reader(number)) is not None:
                self.join(number, reader)
                if reader in self.members:
                    break
        if self.units:
            self.join_on_gpus()
        return [*map(self.part, self.members), *wide]

    def join_on_gpus(self) -> None:
        """Join what reads one value, or all that is one loop where no two chains are."""
        join_readers(self)
        for number in sorted(self.reasons):
            if number in self.reasons and self.reductions & self.members[number]:
                self.join_tiles(number)
        for number in sorted(self.reasons):
            self.hand_over(number)
        self.gather()
        join_alike(self)

    def place(self, node: Node) -> None:
        """Let a node begin a chain, then join the chains of its operands one after the other."""
        number = self.position[node.name]
        self.members[number], self.chain_of[node.name] = {node.name}, number
        for value in node.inputs:
            source = inlined_chain(self.graph, value, self.stored)[1]
            other = None if source is None else self.chain_of.get(self.graph.producer(source).name)
            if other is not None and other != self.chain_of[node.name]:
                self.join(other, self.chain_of[node.name])

    def only_reader(self, number: int) -> int | None:
        """Return the chain that alone reads what one gives; None if there is none, or somebody else reads."""
        members, readers = self.members[number], self.reading(number)
        (reader,) = readers if len(readers) == 1 else (None,)
        if reader is None or any(self.is_read(name, members | self.members[reader]) for name in members):
            return None
        return reader

    def reading(self, number: int) -> set[int | None]:
        """Return the chains that read what one gives, None for other parts."""
        members = self.members[number]
        outside = (reader for name in members for reader in self.beyond_views(name) if reader not in members)
        return {self.chain_of.get(reader) for reader in outside}

    def hand_over(self, number: int) -> None:
        """Give the chain that reads a chain's many elements what computes them, if the rest stays a chain.

        Then only the few that were to be stored are, and not the many that were computed with them.
        """
        members = self.members[number]
        sizes = {name: known(product(self.node(name).tile.shape)) for name in members}
        many = {name for name in members if sizes[name] == max(sizes.values())} - self.reductions
        beyond = {reader for name in many for reader in self.beyond_views(name) if reader not in members}
        readers = {self.chain_of.get(reader) for reader in beyond}
        (reader,) = readers if len(readers) == 1 else (None,)
        if reader is None or any(self.is_read(name, members | self.members[reader]) for name in many):
            return
        moved = set[str]()
        while many:
            moved |= many
            left = members - moved - self.reductions
            many = {name for name in left if (users := {*self.beyond_views(name)}) and users <= moved}
        rest, taking = members - moved, self.members[reader] | moved
        stored = (sizes[name] for name in rest if self.is_read(name, rest))
        few = LEAST_READERS * max(stored, default=0) <= max(sizes.values())
        if not rest or not few:
            return
        before = members, self.members[reader]
        self.members[number], self.members[reader] = rest, taking
        self.chain_of |= dict.fromkeys(moved, reader)
        if self.obstacle(rest) or self.obstacle(taking):
            self.members[number], self.members[reader] = before
            self.chain_of |= dict.fromkeys(moved, number)

    def gather(self) -> None:
        """Join chains that reduce one large value, at once, with what computes it if they can."""
        for node in self.graph.nodes:
            own = self.chain_of.get(node.name)
            if known(product(node.tile.shape)) < LARGE_SHARED or (own is None and self.is_inlined(node)):
                continue
            names = [node.name] if own is None else self.members[own]
            readers = {self.chain_of.get(reader) for name in names for reader in self.beyond_views(name)}
            others = (one for one in readers if one is not None and one != own)
            reducing = [one for one in others if self.reductions & self.members[one]]
            for group in ([] if own is None else [*reducing, own], reducing):
                if 2 <= len(group) <= MOST_GATHERED and self.gathered(group, node):
                    break
            else:
                for group in self.apart(reducing):
                    if 2 <= len(group) <= MOST_GATHERED:
                        self.gathered(group, node)

    def apart(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return chains in groups of which none needs another, as deviations need the means before them."""
        groups: list[list[int]] = []
        for number in sorted(numbers):
            for group in groups:
                together = set[str]().union(*(self.members[one] for one in (*group, number)))
                if not self.returns(together):
                    group.append(number)
                    break
            else:
                groups.append([number])
        return groups

    def gathered(self, numbers: Sequence[int], node: Node) -> bool:
        """Join chains at once, if they read little besides a node's value and do not idle together."""
        regions = [self.region(self.members[number])[0] for number in numbers]
        most = max(known(product(each.tile.shape)) for region in regions for each in region.nodes)
        more = most > 2 * known(product(node.tile.shape))
        together = set[str]().union(*(self.members[number] for number in numbers))
        if more or self.obstacle(together):
            return False
        if blocks_of(*with_rows(*self.region(together), self.units > 0)) < self.units:
            return False
        first, *rest = sorted(numbers)
        for number in rest:
            self.members.pop(number)
            self.reasons.pop(number, None)
        self.members[first] = together
        self.chain_of |= dict.fromkeys(together, first)
        return True

    def join(self, first: int, second: int) -> None:
        """Make two chains one, if the result is a chain; else note why not."""
        together = self.members[first] | self.members[second]
        reason = self.obstacle(together)
        if not reason and self.idles(first, second, together):
            reason = "together they have too few rows for the device"
        if reason:
            self.reasons[first] = reason
            return
        for name in self.members.pop(second):
            self.chain_of[name] = first
        self.members[first] = together
        self.reasons.pop(first, None)
        if reason := self.reasons.pop(second, ""):
            self.reasons[first] = reason

    def join_tiles(self, first: int) -> None:
        """Join a chain that reduces tiles with those that follow, if all are one loop where no two are.

        As of what reduces tiles axis by axis, and of what reads them again: each would read them anew.
        """
        group = [first]
        while len(group) < MOST_OF_TILES:
            beyond = {reader for one in group for reader in self.reading(one)} - {*group}
            if not beyond or None in beyond:
                return
            group.append(min(number for number in beyond if number is not None))
            together = set[str]().union(*(self.members[one] for one in group))
            if strided_rows(self.region(together)[0]) is None or self.obstacle(together):
                continue
            if not self.idles(first, group[-1], together):
                for number in group[:-1]:
                    self.members.pop(number)
                    self.reasons.pop(number, None)
                self.members[group[-1]] = together
                self.chain_of |= dict.fromkeys(together, group[-1])
                return

    def obstacle(self, members: set[str]) -> str:
        """Say why nodes are no chain; empty if they are."""
        most = MOST_ON_GPUS if self.units else MOST_CHAIN_NODES
        if len(members) > most:
            return f"more than {most} operators"
        if self.returns(members):
            return "what lies between is computed elsewhere"
        if any(self.windows_recompute(name, members) for name in members):
            return "windows and gathers would compute their elements several times"
        region, outputs = with_rows(*self.region(members), self.units > 0)
        if any(sums_across(region, node) for node in region.nodes):
            return "sums across memory are stored before they are summed on"
        if self.units and (reason := _obstacle_on_gpus(region, outputs)):
            return reason
        called = LONG_ON_GPUS if self.units else LONG_ON_CPUS
        if calls_again(region, outputs, called):
            return "functions of few elements are stored before many read them"
        if self.units and works_again(region, outputs):
            return "what takes long is stored before many read it"
        if not _is_loop(region, outputs, self.units > 0):
            return "rows of the two differ: one needs more of the other than a row"
        if joins_nested(region) > MOST_NESTED:
            return f"more than {MOST_NESTED} joins of joins"
        return lacking(region, self.kind)

    def idles(self, first: int, second: int, together: set[str]) -> bool:
        """Tell whether two chains leave the device idle together, but not apart, where little lies between.

        As sums over all axes do: over the last one by many rows, over the others by one. And what reads
        little itself, as statistics of parts, takes no rows from what reads much: that has many blocks alone.
        """
        region, outputs = with_rows(*self.region(together), self.units > 0)
        work = max((product(node.tile.shape) for node in region.nodes), key=known)
        if not self.units or known(work) < LARGE_WORK // SPLIT_RATIO:  # nor as much as statistics need
            return False
        reduces = any(node.operator in (*REDUCTIONS, *SCANS) for node in region.nodes)
        if not reduces and all(
            SPLIT_RATIO * known(product(region.tile(v).shape)) >= known(work) for v in outputs
        ):
            return False
        above, handed = self.region(self.members[first])
        below, results = self.region(self.members[second])
        blocks = blocks_of(region, outputs)
        if row_axes(region, outputs) is None:
            return blocks < self.units and known(work) >= LONG_COLUMNS * blocks
        reads = max(known(product(node.tile.shape)) for node in above.nodes)
        spread = SPLIT_RATIO * reads <= known(work)
        long = spread and known(work) >= LONG_ROW * blocks
        if (blocks >= self.units and not long) or not (spread or is_large(known(work), blocks)):
            return False
        read = outside_inputs(self.graph, {node.name for node in below.nodes if node.operator != "input"})
        between = sum(known(product(above.tile(value).shape)) for value in handed if value in read)
        apart = max(blocks_of(above, handed), blocks_of(below, results, spread))
        return 2 * blocks <= apart and SPLIT_RATIO * between <= known(work)

    def returns(self, members: set[str]) -> bool:
        """Tell whether a path leaves the nodes and comes back, over whole chains and products."""
        last = max(self.position[name] for name in members)
        todo = [reader for name in members for reader in self.beyond_views(name) if reader not in members]
        seen: set[str] = set()
        while todo:
            name = todo.pop()
            if name in seen or (self.position[name] > last and name not in self.chain_of):
                continue
            unit = self.unit(name)
            seen |= unit
            for inside in unit:
                for reader in self.later(inside):
                    if reader in members:
                        return True
                    todo.append(reader)
        return False

    def later(self, name: str) -> list[str]:
        """Return the nodes that must run after one: its readers, and the next random draw."""
        following = self.draws_next.get(name)
        return [*self.readers(name), *([] if following is None else [following])]

    def beyond_views(self, name: str) -> list[str]:
        """Return the nodes that read a node, where views are no nodes of their own."""
        found: list[str] = []
        ahead = self.readers(name)
        while ahead:
            reader = ahead.pop()
            if self.is_passed(self.node(reader)):
                ahead += self.readers(reader)
            else:
                found.append(reader)
        return found

    def unit(self, name: str) -> set[str]:
        """Return the nodes that run together with one."""
        number = self.chain_of.get(name)
        if number is not None:
            return self.members[number]
        if name in self.taken:
            return {other for other, at in self.taken.items() if at == self.taken[name]}
        return {name}

    def readers(self, name: str) -> list[str]:
        """Return the nodes that read a node's results."""
        node = self.graph.nodes[self.position[name]]
        return [user.name for value in node.values for user in self.users[value] if user is not None]

    def windows_recompute(self, name: str, members: set[str]) -> bool:
        """Tell whether overlapping windows (``map``) or gathers read something computed in the same chain."""
        node = self.graph.nodes[self.position[name]]
        if node.operator not in READS_ONCE or READS_ONCE[node.operator](self.graph, node):
            return False
        todo, light = [node.inputs[0]], self.units > 0 and is_small_window(self.graph, node)
        while todo:
            below = self.graph.producer(todo.pop())
            again = light and below.operator in ONE_STEP
            turned = is_turned(self.graph, below) and is_given(self.users, node)
            moves = below.operator == "pad" or (light and (turned or is_bordered(self.graph, below)))
            if below.name in members and not moves and not again:
                return True
            light = light and not again  # one such step is less than storing what it gives
            if moves or again or self.is_inlined(below):
                todo += below.inputs
        return False

    def region(self, members: set[str]) -> tuple[Graph, list[str]]:
        """Return the subgraph with the views and numbers that it reads through, and its results."""
        full = set(members)
        todo = [value for name in members for value in self.node(name).inputs]
        while todo:
            below = self.graph.producer(todo.pop())
            if below.name not in full and engine(below) != "input" and self.is_inlined(below):
                full.add(below.name)
                todo += below.inputs
        outputs = [
            name for name in sorted(members, key=self.position.__getitem__) if self.is_read(name, members)
        ]
        return extract(self.graph, full, outputs, "chain"), outputs

    def is_inlined(self, node: Node) -> bool:
        """Tell whether every reader computes a node for itself."""
        return node.name not in self.stored and is_inlined(self.graph, node)

    def is_passed(self, node: Node) -> bool:
        """Tell whether the readers of a node read what it reads."""
        return node.name not in self.taken and self.is_inlined(node)

    def node(self, name: str) -> Node:
        return self.graph.nodes[self.position[name]]

    def is_read(self, name: str, members: set[str]) -> bool:
        """Tell whether somebody outside reads a node, directly or through views."""
        ahead = list(self.users[name])
        while ahead:
            reader = ahead.pop()
            if reader is None:
                return True
            if reader.name in members:
                continue
            if not self.is_passed(reader):
                return True
            ahead += self.users[reader.name]
        return False

    def part(self, number: int) -> Subgraph:
        region, outputs = self.region(self.members[number])
        full = {node.name for node in region.nodes if node.operator != "input"}
        inputs = outside_inputs(self.graph, full)
        return Subgraph("chain", region, inputs, tuple(outputs), self.reasons.get(number, ""))


def _obstacle_on_gpus(region: Graph, outputs: Sequence[str]) -> str:
    """Say why reductions are no chain on GPUs; empty if they are."""
    if any(sums_of_sums(region, node) or sums_between(region, node) for node in region.nodes):
        return "what is computed of many sums is stored before it is summed on"
    if mixes_directions(region, outputs):
        return "rows and columns of a large value are reduced apart"
    return ""


def _is_loop(graph: Graph, outputs: Sequence[str], on_gpu: bool) -> bool:
    """Tell whether a chain is a loop over rows or, for GPUs, over columns."""
    rows = row_axes(graph, outputs, again=on_gpu)
    return rows is not None or (on_gpu and column_axes(graph, outputs) is not None)


def is_large(work: int, blocks: int) -> bool:
    """Tell whether so many elements for so few blocks take longer than another launch."""
    return work >= min(LARGE_WORK, LONG_BLOCK * blocks)


def blocks_of(graph: Graph, outputs: Sequence[str], spread: bool = False) -> int:
    """Return how many blocks a chain has, of a row or of some columns each; of an open number, many.

    spread: Whether one without reductions counts as what its threads can divide instead.
    """
    reduces = any(node.operator in REDUCTIONS for node in graph.nodes)
    shape = graph.tile(outputs[0]).shape
    rows = product(loop_extents(graph, outputs) if reduces else shape[: row_axes(graph, outputs)])
    if not isinstance(rows, int):
        return LARGE_WORK
    if spread and not reduces:
        return ceil(known(product(graph.tile(outputs[0]).shape)) / BLOCK_ELEMENTS)
    across = [product(axes) for node in graph.nodes if (axes := _behind(graph, node))]
    together = min((count for count in across if isinstance(count, int) and count > 1), default=1)
    return ceil(rows / min(together, BLOCK_COLUMNS))


def _behind(graph: Graph, node: Node) -> Shape:
    """Return the extents behind the axis of a reduction; none of other nodes."""
    if node.operator not in REDUCTIONS:
        return ()
    shape = graph.tile(node.inputs[0]).shape
    return shape[node_attributes(node)["axis"] % len(shape) + 1 :]


def is_wide(node: Node) -> bool:
    """Tell whether a node joins more than a kernel is compiled for in short time."""
    return node.operator == "concat" and len(node.inputs) > MOST_JOINED
