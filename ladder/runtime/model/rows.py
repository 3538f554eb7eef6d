"""Products of rows with a float matrix on CPUs: their kernels, and calls of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ladder.ir.extents import product
from ladder.ir.graph import Graph
from ladder.ir.printer import print_graph
from ladder.ir.row_product import as_row_product
from ladder.lower.chain import emit_rows
from ladder.lower.chain.panels import panels, with_winograd
from ladder.lower.chain.scatter import size_names
from ladder.runtime.build import Job, function_job
from ladder.runtime.compile import target_of
from ladder.runtime.model.chains import canonical_chain, kernel_of
from ladder.runtime.model.convolutions import contract_run
from ladder.runtime.model.nodes import graph_run
from ladder.runtime.model.sizes import CallSizes
from schedules.row_panels import SERIAL, Registers, registers_of, takes_winograd
from targets import TileDevice, get_device


def rows_job(graph: Graph, device: TileDevice) -> Job:
    """Return the kernel that a product of rows wants."""
    form = as_row_product(graph)
    chain, depth = canonical_chain(form.chain), form.depth
    windows, registers = form.windows, known_registers(device)
    winograd = takes_winograd(form, registers)
    facts = {"rows": print_graph(chain), "depth": depth, "windows": repr(windows)}
    if winograd:
        facts["products"] = "winograd"
    name = f"ladder_rows_{hashlib.sha256(repr(facts).encode()).hexdigest()[:10]}"

    def emit(name: str) -> Any:
        return emit_rows(chain, depth, windows, registers, name, winograd)

    return function_job(facts, name, device, emit)


def known_registers(device: TileDevice) -> Registers:
    """Return the registers of a device that plans have row kernels for."""
    found = registers_of(device)
    assert found is not None  # no other gets parts of rows
    return found


class Rows:
    """Calls of one product of rows.

    graph: Of the part.
    now: The sizes of the call at hand.
    where: The device.
    """

    def __init__(self, graph: Graph, now: CallSizes, where: torch.device) -> None:
        self.graph, self.form, self.now = graph, as_row_product(graph), now
        self.registers = known_registers(get_device(target_of(where)))
        self.winograd = takes_winograd(self.form, self.registers)
        self.numbers = now.numbers(size_names(self.form.chain))
        self.chain = graph_run(self.form.chain, now, where)
        node = next(node for node in graph.nodes if node.operator in ("matmul", "contract"))
        self.contract = contract_run(graph, node, now) if self.form.windows is not None else None
        given = 1 if self.form.windows is None else 2
        self.others = self.form.chain.inputs[given:]
        self.shapes = [now.numbers(node.tile.shape) for node in self.others]
        self.flat = (-1, self.form.columns)
        """Shapes in which kernels take the result, the rows, and what goes with them."""
        self.flat_x = (-1, self.form.depth) if self.form.windows is None else (-1,)
        self.flat_others = [self.flat[2 - len(node.tile.shape) :] or (1,) for node in self.others]

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the matrix as ``[N, K]``."""
        return weight.t() if self.form.turned else weight.reshape(self.form.columns, self.form.depth)

    def order(self, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the matrix as kernels read it."""
        matrix = self.matrix(weight)
        return panels(with_winograd(matrix) if self.winograd else matrix, self.registers)

    def ordered_as(self, value: str) -> tuple[str, bool, int, int, bool]:
        """Return what tells a matrix in order from others: the value that it is, and how kernels read it."""
        return value, self.form.turned, self.form.columns, self.form.depth, self.winograd

    def kernel(self, entry: Any) -> Callable[[], Any]:
        """Return what gives the kernel for the sizes of the call at hand."""
        products = product((self.form.rows, self.form.depth, self.form.columns))
        return kernel_of(entry, self.now, (products,), SERIAL)

    def by_torch(
        self, x: torch.Tensor, weight: torch.Tensor, others: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        if not out.numel():
            return
        product, image = self.product(x, weight).reshape(-1, self.form.columns), []
        if self.form.windows is not None:
            image = [x]
        beside = [value.reshape(shape()) for value, shape in zip(others, self.shapes, strict=True)]
        out.copy_(self.chain(product, *image, *beside).reshape(out.shape))

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.form.windows is None:
            return torch.mm(x.reshape(-1, self.form.depth), self.matrix(weight).t())
        assert self.contract is not None  # that is what products of windows have
        return self.contract(x, weight)

    def by_kernel(self, entry: Any, still: Collection[str]) -> Callable[..., None]:
        """Return ``(x, panels, others..., out)`` that computes by a kernel of ours.

        still: Inputs of the part's graph, and ``""`` for the result, that are the same memory in each call.
        """
        form, numbers = self.form, self.numbers
        rank = len(self.graph.tile(form.x).shape)
        flat_x = flattened(self.flat_x, rank, form.x in still)
        flat_out = flattened(self.flat, len(self.graph.tile(self.graph.outputs[0]).shape), "" in still)
        flat = [
            flattened(shape, len(self.graph.tile(name).shape), name in still)
            for name, shape in zip(form.others, self.flat_others, strict=True)
        ]

        kernel = self.kernel(entry)

        def run(
            x: torch.Tensor, panels: torch.Tensor, others: Sequence[torch.Tensor], out: torch.Tensor
        ) -> None:
            beside = [view(value) for view, value in zip(flat, others, strict=True)]
            kernel()(*numbers(), flat_x(x), panels, *beside, flat_out(out))

        return run


def flattened(shape: tuple[int, ...], rank: int, still: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what shows tensors of a rank in another shape, contiguous; what stays keeps its view."""
    of: torch.Tensor | None = None
    made = torch.empty(0)

    def view(value: torch.Tensor) -> torch.Tensor:
        nonlocal of, made
        if value is of:
            return made
        found = value if rank == len(shape) else value.reshape(shape)
        if still:
            of, made = value, found
        return found if found.is_contiguous() else found.contiguous()

    return view
