"""Memory-bound chains as TIR: loops over rows, everything else is an expression of the element's index.

`values` gives the expression of any value of a chain at an index, whatever views and joins lie between; it
is the same for all targets. `cpu` is the loop nest for CPUs. A kernel takes the chain's inputs and outputs
in order; symbolic sizes come first, as integers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ladder.partition.rows import REDUCTIONS, column_axes, loop_axes, separate_loops
from tile_types.errors import DeviceError, ScheduleError

if TYPE_CHECKING:
    from ladder.ir.graph import Graph
    from ladder.ir.windows import Windows
    from ladder.lower.chain.scatter import Chain
    from ladder.movement.mapping import Mapping
    from schedules.row_panels import Registers
    from targets import TileDevice


def emit_chain(graph: Graph, device: TileDevice, name: str, mapping: Mapping | None = None) -> Any:
    """Emit the PrimFunc ``(sizes..., inputs..., outputs...)`` of a chain; GPU arguments begin at 16 bytes.

    mapping: How it lies over a GPU; by default the best of `ladder.movement.mapping.mappings`.
    Raises DeviceError if nothing emits chains for the device.
    Raises ScheduleError if the chain is no loop over rows, or on a GPU reduces what has no elements.
    Raises DTypeError if a type has no TIR form.
    """
    if device.kind not in NESTS:
        raise DeviceError(f"chains of memory-bound operators have no kernels for {device.name} yet")
    from ladder.lower.chain.scatter import Chain

    return NESTS[device.kind](Chain.of(graph), device, name, mapping)


def emit_rows(
    graph: Graph, depth: int, windows: Windows | None, registers: Registers, name: str, winograd: bool = False
) -> Any:
    """Emit the PrimFunc ``(sizes..., x, matrix, others..., y)`` of a CPU chain that reads a product first.

    depth, windows, registers: See `ladder.lower.chain.cpu_rows.RowNest`.
    winograd: Whether windows are multiplied by Winograd's products.
    """
    from ladder.lower.chain.cpu_rows import RowNest
    from ladder.lower.chain.scatter import Chain
    from ladder.lower.chain.winograd import WinogradNest

    plain = _decomposed(Chain.of(graph))
    if winograd and windows is not None:
        return _emitted(name, True, partial(WinogradNest, plain, depth, registers, windows))
    return _emitted(name, True, partial(RowNest, plain, depth, registers, windows))


def _decomposed(chain: Chain, whole: Collection[str] = ()) -> Chain:
    """Return a chain of decomposed operators: results that are equal then have other names."""
    from ladder.movement.decompose import decompose

    graph = decompose(chain.graph, whole)
    named = [*zip(chain.graph.outputs, graph.outputs, strict=True)]
    scatters = {new: chain.scatters[old] for old, new in named if old in chain.scatters}
    orders = {new: chain.orders[old] for old, new in named if old in chain.orders}
    return replace(chain, graph=graph, scatters=scatters, orders=orders)


def _cpu(chain: Chain, device: TileDevice, name: str, mapping: Mapping | None) -> Any:
    from ladder.lower.chain.cpu import CpuChain

    return _emitted(name, True, partial(CpuChain, _decomposed(chain)))


def _gpu(chain: Chain, device: TileDevice, name: str, mapping: Mapping | None) -> Any:
    """Emit the first mapping that has a kernel: tiles need alignments that only the emitter proves."""
    from ladder.lower.chain.gpu import DIALECTS, GpuChain
    from ladder.lower.chain.side_by_side import SideBySide
    from ladder.movement.choose import machine_of, ranked

    if reduced := _reduces_nothing(chain.graph):
        raise ScheduleError(f"kernels for GPUs reduce at least one element, {reduced} has none")
    chain = chain.with_rows()
    plain, cheap = plain_chain(chain, DIALECTS[device.kind].functions)
    outputs = plain.graph.outputs
    whole = mapping is not None or any(
        axes(plain.graph, outputs) is not None for axes in (loop_axes, column_axes)
    )
    if not whole and separate_loops(plain.graph, outputs):
        dialect = DIALECTS[device.kind](device)
        return _emitted(name, dialect.noalias, partial(SideBySide, plain, dialect, cheap))
    best = [] if mapping is not None else ranked(chain.graph, machine_of(device))
    wanted = [mapping] if mapping is not None else [moves.mapping for moves in best]
    if chain.scatters or chain.orders:
        wanted = [candidate for candidate in wanted if not candidate.tile[0]]
    for number, candidate in enumerate(wanted):
        try:
            dialect = DIALECTS[device.kind](device)
            return _emitted(name, dialect.noalias, partial(GpuChain, plain, dialect, candidate, cheap))
        except ScheduleError:
            if number == len(wanted) - 1:
                raise
    raise ScheduleError(f"chain {chain.graph.name!r} has no mapping")


def plain_chain(chain: Chain, functions: Collection[str]) -> tuple[Chain, bool]:
    """Return a chain for a GPU in operators that kernels have, and whether functions may be approximate.

    functions: Operators that the GPU computes as they are.
    """
    from ladder.lower.chain.approximation import may_be_approximate
    from ladder.lower.chain.narrowing import narrowed
    from ladder.movement.decompose import contracted

    cheap = may_be_approximate(chain.graph)
    plain = _decomposed(chain, () if cheap else functions)
    if cheap:
        plain = replace(plain, graph=contracted(plain.graph))
    return narrowed(plain), cheap


def _reduces_nothing(graph: Graph) -> str | None:
    """Return the first value of a chain that has no elements and is reduced to some that are there."""
    for node in graph.nodes:
        empty = [value for value in node.inputs if 0 in graph.tile(value).shape]
        if node.operator in REDUCTIONS and empty and 0 not in node.tile.shape:
            return empty[0]
    return None


def _emitted(name: str, noalias: bool, nest: Callable[[], Any]) -> Any:
    from ladder.lower import builder as b

    with b.function(name, noalias=noalias) as result:
        nest().emit()
    return result.func


NESTS: dict[str, Callable[..., Any]] = {"llvm": _cpu, "cuda": _gpu, "rocm": _gpu}
"""Target kind -> emits the PrimFunc."""
