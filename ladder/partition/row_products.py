"""Products of rows with constant matrices on CPUs, with their epilogues."""

from __future__ import annotations

from collections.abc import Iterable

from ladder.ir.graph import Graph
from ladder.ir.row_product import RowProduct, as_row_product
from ladder.partition.subgraphs import Subgraph
from schedules.row_panels import LEAST_ROWS, Registers, are_few, registers_of, takes_winograd
from targets import TileDevice
from tile_types.errors import ShapeError

MOST = 12_000_000
"""Elements of a matrix of which a second copy is kept, in the order in which kernels read it."""


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
    fits = (once or form.depth <= registers.deepest) and form.depth * form.columns <= MOST
    if form.windows is not None and not takes_winograd(form, registers):
        fits = fits and are_few(form.rows, form.depth * form.columns, registers)
    return form if fits else None
