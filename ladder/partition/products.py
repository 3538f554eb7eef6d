"""Matrix products with their epilogues: as `as_gemm` matches them, with a bias, or of few rows on CPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from ladder.ir.build import is_by_element
from ladder.ir.convolution import joins_groups
from ladder.ir.extents import Shape, product
from ladder.ir.gemm import Gemm
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.ir.row_product import RowProduct, as_row_product
from ladder.partition.convolutions import Choose, best_candidate, convolution_part
from ladder.partition.subgraphs import Subgraph, engine, extract, outside_inputs
from ladder.partition.views import is_inlined
from ladder.rewrite.convolution_match import as_window_gemm
from ladder.rewrite.gemm_match import as_gemm
from schedules.row_panels import LEAST_ROWS, Registers, are_few, registers_of, takes_winograd
from targets import TileDevice
from tile_types.errors import LadderError, ShapeError

LONGEST_EPILOGUE = 16
"""Nodes that are tried after a product."""


class Products:
    """Finds the regions around products.

    users: Value -> nodes that read it; a graph output counts as one more reader, None.
    weights: Inputs that are packed quantized weights, and the vectors that are packed with them.
    device: The device: decides what computes convolutions.
    packable: Inputs that are weights of convolutions, and may be packed.
    choose: What predicts the kernels of convolutions.
    """

    def __init__(
        self,
        graph: Graph,
        users: Mapping[str, list[Node | None]],
        weights: set[str],
        device: TileDevice | None = None,
        packable: Collection[str] = (),
        choose: Choose = best_candidate,
    ) -> None:
        self.graph = graph
        self.users = users
        self.weights = weights
        self.device = device
        self.choose = choose
        self.taken: set[str] = set()
        self.packable = {value for value in packable if len(users.get(value, ())) == 1}

    def parts(self) -> list[Subgraph]:
        """Return one part per product; what one takes in, a later one cannot."""
        found = []
        for node in self.graph.nodes:
            if engine(node) == "product":
                found.append(self.part(node))
                self.taken.update(n.name for n in found[-1].graph.nodes if n.operator != "input")
        return found

    def part(self, node: Node) -> Subgraph:
        if self.is_quantized(node):
            return self.quantized(node)
        return self.convolution(node) if node.operator == "contract" else self.plain(node)

    def is_quantized(self, node: Node) -> bool:
        """Tell whether the second operand is decoded from a packed weight."""
        if node.operator not in ("matmul", "contract"):
            return False
        read = self.behind(node.inputs[1], set())
        return bool(read) and read <= self.weights

    def behind(self, value: str, members: set[str]) -> set[str]:
        """Collect the nodes that compute a value; returns the inputs that they read."""
        found: set[str] = set()
        todo = [value]
        while todo:
            node = self.graph.producer(todo.pop())
            if node.operator == "input":
                found.add(node.name)
            elif node.name not in members:
                members.add(node.name)
                todo += node.inputs
        return found

    def quantized(self, node: Node) -> Subgraph:
        """Grow the region along single readers; keep the largest that is a GEMM.

        Raises LadderError if not even the product as the importer wrote it is one.
        """
        members = {node.name}
        self.behind(node.inputs[1], members)
        best, reason, value = self.as_part(members, node.name), "", node.name
        for _ in range(LONGEST_EPILOGUE):
            following = self.single_reader(value)
            if following is None:
                reason = f"%{value} has several readers"
                break
            if is_exact(following):
                reason = "rounded before what follows"
                break
            trial = members | {following.name} | self.vectors(following, value)
            if not get_operator(following.operator).elementwise and following.operator != "convert":
                reason = f"{following.operator} is no epilogue"
                break
            members, value = trial, following.name
            found = self.as_part(members, value)
            if found is None:
                reason = f"{following.operator} is no epilogue"
            elif best is None or not self.is_wider(following, best):
                best, reason = found, ""  # a mere conversion to a wider type is left to its reader
        if best is None:
            raise LadderError(f"the quantized product %{node.name} is no GEMM")
        return replace(best, reason=reason)

    def is_wider(self, last: Node, best: Subgraph) -> bool:
        """Tell whether a region would end in more bits than another, or in a conversion to a wider type."""
        before = self.bits(last.inputs[0]) if last.operator == "convert" else self.bits(last.name)
        return self.bits(last.name) > min(before, self.bits(best.outputs[0]))

    def bits(self, value: str) -> int:
        """Return the bits of an element of a value."""
        return self.graph.tile(value).ttype.elem_bits

    def single_reader(self, value: str) -> Node | None:
        """Return the only reader of a value, if no product has taken it in."""
        readers = self.users.get(value, [])
        reader = readers[0] if len(readers) == 1 else None
        return None if reader is None or reader.name in self.taken else reader

    def vectors(self, node: Node, product: str) -> set[str]:
        """Return the nodes that bring the other operands of a node into shape, from inputs or elsewhere."""
        found: set[str] = set()
        for value in node.inputs:
            operand = self.graph.producer(value)
            while value != product and operand.operator in ("convert", "reshape"):
                found.add(operand.name)
                operand = self.graph.producer(operand.inputs[0])
        return found

    def widened(self, node: Node, product: str) -> set[str]:
        """Return the conversions to wider types through which a node reads its other operands."""
        found: set[str] = set()
        for value in node.inputs:
            operand = self.graph.producer(value)
            converts = value != product and operand.operator == "convert"
            if converts and self.bits(operand.inputs[0]) <= self.bits(value):
                found.add(operand.name)
        return found

    def as_part(self, members: set[str], output: str) -> Subgraph | None:
        """Return the region as a GEMM, or None."""
        region = extract(self.graph, members, [output])
        try:
            found = {node.operator for node in region.nodes}
            gemm = as_window_gemm(region) if "contract" in found else as_gemm(region)
        except LadderError:
            return None
        inputs = outside_inputs(self.graph, members)
        return Subgraph("gemm", region, inputs, (output,), "", gemm, self.roles(gemm, region))

    def roles(self, gemm: Gemm, region: Graph) -> tuple[tuple[str, str], ...]:
        """Return role -> input, from where each input is read."""
        found: dict[str, str] = {}
        multiplied = next(node for node in region.nodes if node.operator in ("matmul", "contract"))
        found["A"] = source_of(region, multiplied.inputs[0])
        for node in region.inputs:
            if node.name in self.weights:
                role = "B" if len(node.tile.shape) == 2 else "row_scale"
            elif node.name == found["A"]:
                continue
            else:
                role = self.role(gemm, node, region)
            found[role] = node.name
        return tuple(sorted(found.items()))

    def role(self, gemm: Gemm, node: Node, region: Graph) -> str:
        """Return what an input is that belongs neither to the weight nor to the activations."""
        if gemm.token_scale:  # shapes do not tell: of a single row, a bias may have more axes as well
            return "bias" if reader_of(region, node.name) == "add" else "token_scale"
        if (gemm.bias or gemm.factor) and self.is_per_column(gemm, node.tile.shape):
            return "factor" if gemm.factor and node.tile.ttype.name == "float32" else "bias"
        return "residual"

    def is_per_column(self, gemm: Gemm, shape: Shape) -> bool:
        """Tell whether an input is a number per column of the result; of a single row also in more axes."""
        return shape == (gemm.n,) if gemm.residual else product(shape) == gemm.n

    def convolution(self, node: Node) -> Subgraph:
        """Take a convolution with as much of what follows as pays."""
        rows = rows_part(self.graph, self.spread(node), self.device)
        return rows or convolution_part(self.regions(node), self.device, self.packable, self.choose)

    def regions(self, node: Node) -> list[Subgraph]:
        """Return a product alone, then with one, two and more element-wise operators of its epilogue."""
        members, value = {node.name}, node.name
        regions = [self.part_of(members, value)]
        for _ in range(LONGEST_EPILOGUE):
            following = self.single_reader(value)
            if following is None or not self.may_join(following):
                break
            members, value = members | {following.name} | self.widened(following, value), following.name
            if self.may_end(following, node):
                regions.append(self.part_of(members, value))
        return regions

    def spread(self, node: Node) -> Iterator[Subgraph]:
        """Yield a product, then with more and more of what reads it: all that has one result for the rest."""
        members = {node.name}
        yield self.part_of(members, node.name)
        for _ in range(LONGEST_EPILOGUE):
            ahead = [r for name in members for r in self.users[name] if r is not None and self.may_follow(r)]
            ahead = [reader for reader in ahead if reader.name not in members]
            if not ahead:
                return
            following = min(ahead, key=lambda reader: self.graph.positions[reader.name])
            members |= {following.name}
            shown = [n for n in members if any(r is None or r.name not in members for r in self.users[n])]
            if len(shown) == 1 and self.may_end(self.graph.producer(shown[0]), node):
                yield self.part_of(members, shown[0])

    def may_end(self, last: Node, product: Node) -> bool:
        """Tell whether a region may end: in the product's type and size, not in what its readers compute."""
        fits = last.tile.ttype == product.tile.ttype and _size(last) == _size(product)
        return fits and (last is product or not is_inlined(self.graph, last))

    def may_join(self, node: Node) -> bool:
        """Tell whether a node may be part of a convolution's epilogue."""
        if node.operator == "reshape":  # on CPUs what multiplies groups adds nothing
            return self.device is not None and self.device.is_gpu and joins_groups(self.graph, node)
        elementwise = is_by_element(node)
        return elementwise and not is_exact(node)

    def may_follow(self, node: Node) -> bool:
        """Tell whether a node is computed element by element, and by no product yet."""
        elementwise = is_by_element(node)
        return elementwise and not is_exact(node) and node.name not in self.taken

    def plain(self, node: Node) -> Subgraph:
        """Take a product: by a kernel of ours with what follows, by torch with the vector added to it."""
        rows = rows_part(self.graph, self.spread(node), self.device)
        if rows is not None:
            return rows
        members = self.with_bias(node) or {node.name}
        return self.part_of(members, max(members, key=self.graph.positions.__getitem__))

    def with_bias(self, node: Node) -> set[str]:
        """Return a product of two matrices with the addition that follows it, in the product's own type.

        ``convert(convert(a · b) + convert(bias))``: torch adds before it rounds. Empty if nothing is added.
        """
        if node.operator != "matmul" or len(node.tile.shape) != 2:
            return set()
        members, following = {node.name}, self.single_reader(node.name)
        value = node.name
        if following is not None and following.operator == "convert":
            members.add(following.name)
            value, following = following.name, self.single_reader(following.name)
        if following is None or following.operator != "add":
            return set()
        other = next((v for v in following.inputs if v != value), None)
        if other is None or not self.is_bias(other, node):
            return set()
        members |= {following.name, *self.vectors(following, value)}
        back = self.single_reader(following.name)
        if self.graph.tile(following.name).ttype == node.tile.ttype:
            return members
        same = back is not None and back.operator == "convert" and back.tile.ttype == node.tile.ttype
        same = same and back is not None and not is_exact(back)
        return members | {back.name} if same and back is not None else set()

    def is_bias(self, value: str, product: Node) -> bool:
        """Tell whether a value is a stored vector along a product's columns, in its type."""
        node = self.graph.producer(value)
        node = self.graph.producer(node.inputs[0]) if node.operator == "convert" else node
        return (
            node.operator == "input"
            and node.tile.shape == product.tile.shape[-1:]
            and (node.tile.ttype == product.tile.ttype)
        )

    def part_of(self, members: set[str], output: str) -> Subgraph:
        """Return a part that torch computes."""
        region = extract(self.graph, members, [output])
        return Subgraph(
            "product", region, outside_inputs(self.graph, members), (output,), "computed by torch"
        )


def _size(node: Node) -> int | str:
    return product(node.tile.shape)


def is_exact(node: Node) -> bool:
    """Tell whether a node is a conversion that rounds where it stands."""
    return node.operator == "convert" and bool(dict(node.attributes).get("exact", False))


def reader_of(graph: Graph, value: str) -> str:
    """Return the operator that reads a value, past conversions and reshapes."""
    reader = next(node for node in graph.nodes if value in node.inputs)
    return reader_of(graph, reader.name) if reader.operator in ("convert", "reshape") else reader.operator


def source_of(graph: Graph, value: str) -> str:
    """Return the input from which a value is converted."""
    node = graph.producer(value)
    return node.name if node.operator == "input" else source_of(graph, node.inputs[0])


MOST_COPIED = 12_000_000
"""Most elements of a matrix that is kept a second time, in the order in which kernels read it."""


def rows_part(graph: Graph, regions: Iterable[Subgraph], device: TileDevice | None) -> Subgraph | None:
    """Return the largest of the regions that a kernel of ours computes; None if it computes none.

    graph: The model.
    regions: A product, then with more and more of what follows it: of kind ``product``.
    device: What runs it.
    """
    registers = registers_of(device)
    if registers is None:
        return None
    found: Subgraph | None = None
    for region in regions:
        form = _form(region, registers)
        if form is None and found is None:
            break
        if form is None:
            continue
        if graph.producer(region.outside[form.matrix]).operator != "input":
            return None
        found = Subgraph("rows", region.graph, region.inputs, region.outputs)
    return found


def _form(region: Subgraph, registers: Registers) -> RowProduct | None:
    try:
        form = as_row_product(region.graph)
    except ShapeError:
        return None
    once = isinstance(form.rows, int) and form.rows <= LEAST_ROWS  # a panel is then read about once
    fits = (once or form.depth <= registers.deepest) and form.depth * form.columns <= MOST_COPIED
    if form.windows is not None and not takes_winograd(form, registers):
        fits = fits and are_few(form.rows, form.depth * form.columns, registers)
    return form if fits else None
