"""Several small chains as one kernel of one block, which computes them one after the other.

A barrier of the block lies between two chains: what the first gives is in memory, and the next reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from ladder.ir.extents import product
from ladder.ir.graph import Graph
from ladder.lower import builder as b
from ladder.lower.chain.approximate import may_be_approximate
from ladder.lower.chain.cuda import CudaDialect
from ladder.lower.chain.dialect import Early
from ladder.lower.chain.element_types import stored_type
from ladder.lower.chain.gpu_nest import SLOTS, GpuNest
from ladder.lower.chain.gpu_rows import RowLoops
from ladder.lower.chain.gpu_vectors import VectorLoops
from ladder.lower.chain.scatter import Chain
from ladder.lower.chain.vectors import WIDE
from ladder.movement.decompose import contracted, decompose
from ladder.movement.mapping import HELD, Mapping, held_columns, held_width
from ladder.partition.rows import REDUCTIONS, loop_axes
from schedules.schedule import check
from targets import TileDevice
from tile_types.tile import Tile

Expr = Any

THREADS = 512
"""Threads of the block."""

FEW_ROWS = 4
"""Rows up to which all threads take one together; else each warp takes one."""


@dataclass(frozen=True)
class Stage:
    """A chain, and which values it reads and makes.

    graph: The chain, of known sizes; rows that it scatters go into what the caller gives.
    inputs, outputs: Numbers of values, one for each input and each result of the graph.
    """

    graph: Graph
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def arguments_of(stages: Sequence[Stage]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the values that kernels take: what is read and made by none, and what is made."""
    made = [value for stage in stages for value in stage.outputs]
    read = dict.fromkeys(value for stage in stages for value in _read(stage).values())
    return tuple(value for value in read if value not in made), tuple(made)


def _read(stage: Stage) -> dict[str, int]:
    """Return input of a chain -> its value; not the tensors into which rows are scattered."""
    kept = {node.name for node in Chain.of(stage.graph).graph.inputs}
    names = (node.name for node in stage.graph.inputs)
    return {name: value for name, value in zip(names, stage.inputs, strict=True) if name in kept}


class _Dialect(CudaDialect):
    """CUDA within a kernel that has begun: the blocks of a chain are turns of a loop."""

    def __init__(self, device: TileDevice, thread: Expr, shared: Any) -> None:
        super().__init__(device)
        self.thread, self.shared, self.turns = thread, shared, ExitStack()

    def start(self, blocks: Expr, threads: int, words: int, inputs: Sequence[Early]) -> tuple[Expr, Expr]:
        check(threads == THREADS, f"a chain for {threads} threads in a block of {THREADS}")
        return self.turns.enter_context(b.loop(blocks, rolled=True)), self.thread

    def end(self, exchanges: bool) -> None:
        """End the loop; ``exchanges``: its turns use the same places of shared memory."""
        if exchanges:
            self.sync()
        self.turns.close()


class _Nest(GpuNest):
    """A chain whose arguments are declared already."""

    def __init__(self, chain: Chain, dialect: _Dialect, mapping: Mapping, cheap: bool, known: Any) -> None:
        self.known = known
        super().__init__(chain, dialect, mapping, cheap)

    def buffer(self, name: str, tile: Tile) -> Any:
        return self.known[name]


def emit_sequence(stages: Sequence[Stage], device: TileDevice, name: str) -> Any:
    """Emit the PrimFunc ``(values that no chain makes..., values that chains make...)``.

    Raises ScheduleError if a chain is no loop over rows that one block takes.
    """
    check(device.kind == "cuda", f"chains one after the other have no kernels for {device.name}")
    with b.function(name, noalias=False) as result:
        _emit(stages, device)
    return result.func


def _emit(stages: Sequence[Stage], device: TileDevice) -> None:
    chains = [Chain.of(stage.graph) for stage in stages]
    check(not any(chain.sizes for chain in chains), "sizes are open")
    tiles: dict[int, Tile] = {}
    for stage, chain in zip(stages, chains, strict=True):
        for name, value in zip(stage.graph.outputs, stage.outputs, strict=True):
            scatter = chain.scatters.get(name)
            tiles[value] = stage.graph.tile(name) if scatter is None else scatter.base
        for name, value in _read(stage).items():
            tiles.setdefault(value, stage.graph.tile(name))
    given, made = arguments_of(stages)
    buffers = {value: _declared(f"a{value}", tiles[value]) for value in (*given, *made)}
    dialect = CudaDialect(device)
    _, thread = dialect.start(1, THREADS, SLOTS * dialect.wave, ())
    for number, (stage, chain) in enumerate(zip(stages, chains, strict=True)):
        if number:
            dialect.sync()
        known = {name: _seen(buffers[v], stage.graph.tile(name)) for name, v in _read(stage).items()}
        results = [buffers[value] for value in stage.outputs]
        _emit_stage(chain, _Dialect(device, thread, dialect.shared), known, results)


def _declared(name: str, tile: Tile) -> Any:
    return b.tensor(name, tile.shape or (1,), stored_type(tile.ttype.name), align=WIDE)


def _seen(buffer: Any, tile: Tile) -> Any:
    """Return a tensor in the shape in which a chain reads it."""
    shape = tuple(map(int, tile.shape)) or (1,)
    if tuple(int(extent) for extent in buffer.shape) == shape:
        return buffer
    return b.shown_as(buffer, shape)


def _emit_stage(chain: Chain, dialect: _Dialect, known: dict[str, Any], results: Sequence[Any]) -> None:
    cheap, graph = may_be_approximate(chain.graph), decompose(chain.graph)
    graph = contracted(graph) if cheap else graph
    known |= {f"{name}_result": result for name, result in zip(graph.outputs, results, strict=True)}
    mapping = mapping_of(graph)
    nest = _Nest(replace(chain, graph=graph), dialect, mapping, cheap, known)
    (VectorLoops(nest) if mapping.lanes == 1 else RowLoops(nest)).emit()
    dialect.end(mapping.lanes > dialect.wave)


def mapping_of(graph: Graph) -> Mapping:
    """Return how a chain lies over one block."""
    if not any(node.operator in REDUCTIONS for node in graph.nodes):
        return Mapping(threads=THREADS)
    rows = loop_axes(graph, graph.outputs)
    check(rows is not None, f"chain {graph.name!r} is no loop over rows")
    count = int(product(graph.tile(graph.outputs[0]).shape[:rows]))
    columns = held_columns(graph, int(rows or 0))
    lanes = THREADS if count <= FEW_ROWS else 32
    width = held_width(graph)
    turns = 0 if columns is None else -(-columns // (width * lanes))
    return Mapping(lanes, turns if turns * width <= HELD else 0, THREADS // lanes)


def work_of(graph: Graph) -> int:
    """Return the elements that a chain of known sizes computes, inputs and views apart."""
    free = ("input", "reshape", "convert", "constant", "slice", "transpose", "expand", "iota")
    nodes = [node for node in graph.nodes if node.operator not in free]
    reduced = [graph.tile(node.inputs[0]).shape for node in nodes if node.operator in REDUCTIONS]
    shapes = [tile.shape for node in nodes for tile in node.tiles if node.operator != "put"] + reduced
    return sum(int(product(shape)) for shape in shapes)
