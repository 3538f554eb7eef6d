"""Mappings of a chain's elements to blocks, warps and lanes, and the candidates to try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ladder.ir.build import is_along_last, node_attributes, reduced_axis
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.movement.column_scans import scanned_columns
from ladder.movement.reductions import positions, reduced_elements, reduced_extents, reduces_columns
from ladder.movement.row_joins import between_rows, is_of_frames
from ladder.movement.whole_rows import reduces_short_rows, whole_rows
from ladder.partition.rows import REDUCTIONS, SCANS, column_axes, loop_axes
from tile_types.errors import ScheduleError
from tile_types.tile import Extent, Tile

WARP = 32


@dataclass(frozen=True)
class Mapping:
    """A parallelism of a chain's kernel.

    lanes: Threads that share a row; 1: every thread takes vectors of any row.
    num: Vectors of a row that each lane holds in registers; 0: as many as come by, read again for each use.
        Of lanes alone: vectors that each reads before it stores one.
    teams: Rows that a block takes side by side.
    tile: Rows and columns that a block exchanges through shared memory; (0, 0): none.
    threads: Threads of a block that takes tiles or single vectors.
    across: Of lanes that share reductions along an axis before the last: neighbouring vectors of ``num``
        columns that a block takes, its other lanes further positions along that axis; 0: no such reductions.
    axes: Trailing axes of results whose elements are such columns, one after the other.
    """

    lanes: int = 1
    num: int = 0
    teams: int = 1
    tile: tuple[int, int] = (0, 0)
    threads: int = 256
    across: int = 0
    axes: int = 1

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.lanes * self.teams if self.lanes > 1 else self.threads

    def __str__(self) -> str:
        if self.tile[0]:
            shape = f"tile {self.tile[0]}x{self.tile[1]}"
            return f"{shape}, {self.lanes} lanes" if self.lanes > 1 else f"{shape}, {self.threads} threads"
        if self.across:
            return (
                f"columns of {self.across} lanes x {self.num}, {self.lanes // self.across} positions at once"
            )
        if self.lanes == 1:
            return f"{max(1, self.num)} vectors each, {self.threads} threads"
        return f"rows of {self.lanes} lanes x {self.num or 'all'}, {self.teams} per block"


VECTORS = (Mapping(), Mapping(num=2), Mapping(num=4, threads=128), Mapping(threads=128), Mapping(threads=512))
TILES = (
    Mapping(tile=(64, 64)),
    Mapping(tile=(32, 64)),
    Mapping(tile=(64, 32)),
    Mapping(tile=(64, 64), threads=128),
)
"""Mappings of chains without reductions."""

MANY_REDUCTIONS = 4
"""More reductions of a row than this count as many."""

HELD = 32
"""Elements of a row that a lane holds at most: more spill, or leave too few warps."""

TILE_BYTES = 100 << 10
"""Shared memory of a tile at most: two blocks then fit into a multiprocessor."""

ACCESS = 16
"""Bytes of an access at most."""

MOST_ACROSS = 256
"""Bytes side by side that a block reads of a row at most, of reductions along other axes."""

FEW_POSITIONS = 8
"""Positions up to which a warp takes columns only: so few leave lanes idle that share a column."""

FEW_COLUMNS = 4
"""Columns up to which each lane takes all, and computes once what they share, as the distance of a pair."""

POSITIONS_EACH = 8
"""Positions that such a lane has at least: it exchanges what it found of every column with all others."""

WINDOW = 64
"""Elements up to which one thread reduces alone."""

LEAST_HELD = 8
"""Elements of a row from which on lanes may share it, where one thread could reduce it alone."""

FEW_REDUCED = 16
"""Elements up to which one thread reduces alone what other results need as well."""

LARGE_WINDOW = 1024
"""The same, of windows of which there are `BUSY_ROWS`."""

BUSY_ROWS = 132 * 512
"""Rows that keep a GPU busy with one thread each."""

SHARED_BLOCK = 128
"""Threads of a block of several rows that are read again for each use."""

MOST_ROW_THREADS = 1024
"""Most threads that share a row."""

SIZES = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "int8", "uint8", "fp8_e4m3", "fp8_e5m2"), 2),
}
"""Bytes by which vectors are chosen: elements of 8 bits go by eights too, as wider ones beside them do."""


MOVES = ("reshape", "transpose", "broadcast", "slice", "concat", "pad", "map", "repeat", "convert")
"""Operators of which each element is one of an operand's."""


def mappings(
    graph: Graph, tiles: bool = False, wave: int = WARP, most: int = MOST_ROW_THREADS
) -> list[Mapping]:
    """Return the mappings that a chain can have, best guess first.

    tiles: Those that pass tiles through shared memory instead.
    wave: Threads of which blocks are made.
    most: Threads of a block at most.
    Raises ScheduleError if the chain is no loop over rows.
    """
    every = _all_mappings(graph, tiles, wave)
    found = [mapping for mapping in every if mapping.block <= most and mapping.block % wave == 0]
    return found or ([] if tiles else [Mapping(most)])


def _all_mappings(graph: Graph, tiles: bool, wave: int) -> list[Mapping]:
    rows = loop_axes(graph, graph.outputs)
    if rows is None and (axes := column_axes(graph, graph.outputs)) is not None:
        if tiles or not any(node.operator in SCANS for node in graph.nodes):
            return [] if tiles else _across(graph, axes[1])
        threads, several, beside = scanned_columns(graph, *axes)
        return [Mapping(threads, several, across=beside, axes=axes[1])]
    if rows is None:
        raise ScheduleError(f"chain {graph.name!r} is no loop over rows")
    if scans := [node.tile.shape[-1] for node in graph.nodes if node.operator in SCANS]:
        count = product(graph.tile(graph.outputs[0]).shape[:rows])
        return [] if tiles else _held(int(scans[0]), count, row_width(graph, rows))
    extents = reduced_extents(graph)
    numbers = all(product(graph.tile(value).shape[rows:]) == 1 for value in graph.outputs)
    each = reduced_elements(graph, graph.outputs)
    count = product(graph.tile(graph.outputs[0]).shape[:rows])
    across = [] if tiles or not numbers else _across(graph)
    windows = any(node.operator == "map" for node in graph.nodes)
    columns = held_columns(graph, rows)
    if not extents or (numbers and isinstance(each, int) and each <= _alone(graph, count)):
        shares = columns is not None and columns >= LEAST_HELD and not windows
        held = _held(int(columns or 0), count, row_width(graph, rows)) if shares else []
        return _tiles(graph) if tiles else [*VECTORS, *([] if windows else across), *held]
    few = isinstance(each, int) and each <= (WINDOW if reduces_short_rows(graph) else FEW_REDUCED)
    if few and (columns is None or whole_rows(graph) is not None):
        return [] if tiles else [*VECTORS]
    if columns is None:
        return [] if tiles else [*across, *_streaming(_streaming_lanes(graph, rows, wave), wave)]
    width = row_width(graph, rows)
    return (_row_tiles if tiles else _held)(columns, count, width)


def _alone(graph: Graph, count: Extent) -> int:
    """Return the elements up to which one thread reduces a row alone; more where neighbours share lines."""
    shared = any(node.operator == "map" for node in graph.nodes) or 0 not in _behind(graph)
    return LARGE_WINDOW if shared and isinstance(count, int) and count >= BUSY_ROWS else WINDOW


def _tiles(graph: Graph) -> list[Mapping]:
    """Return tiles of results that have axes, one with columns that leave little of the last tile empty."""
    shape = graph.tile(graph.outputs[0]).shape
    if not shape:
        return []
    columns = shape[-1]
    if not isinstance(columns, int):
        return list(TILES)
    fitting = min(range(40, 97, 8), key=lambda wide: (-columns % wide, abs(wide - 64)))
    return [*TILES, *([Mapping(tile=(64, fitting), threads=4 * fitting)] if fitting != 64 else [])]


def _across(graph: Graph, axes: int = 0) -> list[Mapping]:
    """Return the mappings of reductions along axes before the last, whose neighbours are columns.

    axes: Trailing axes of results that are columns; 0: those behind all that is reduced, if they are one.
    """
    shape = graph.tile(graph.outputs[0]).shape
    behind = _behind(graph)
    if not behind or not shape or not isinstance(shape[-1], int) or 0 in behind:
        return []
    if not axes and not reduces_columns(graph, axes := _together(graph, min(behind))):
        return []
    columns = prod(int(extent) for extent in shape[-axes:])
    tiles = [node.tile for node in graph.inputs if len(node.tile.shape) > axes]
    read = [tile for tile in tiles if tile.shape[-axes:] == shape[-axes:]] or _largest(tiles)
    sizes = [SIZES.get(tile.ttype.name, ACCESS) for tile in read]
    width = ACCESS // min(sizes, default=ACCESS)
    while columns % width:
        width //= 2
    vectors = -(-columns // width)
    few = all(isinstance(extent, int) and extent <= FEW_POSITIONS for extent in reduced_extents(graph))
    most = WARP if few else MOST_ACROSS // (width * min(sizes, default=ACCESS))
    beside = [lanes for lanes in (2, 4, 8, 16, 32) if lanes <= most and (lanes == 2 or lanes < 2 * vectors)]
    if columns <= FEW_COLUMNS:
        longest = max(
            (extent for extent in reduced_extents(graph) if isinstance(extent, int)), default=1 << 30
        )
        enough = [threads for threads in (128, 256, 512, 1024) if POSITIONS_EACH * threads <= longest]
        return [Mapping(threads, columns, across=1, axes=axes) for threads in (64, *enough)]
    blocks = (128, 256, 512, 1024)
    sides = [(lanes, threads) for lanes in beside for threads in blocks if lanes * width <= threads]
    return [Mapping(threads, width, across=lanes, axes=axes) for lanes, threads in sides]


def _largest(tiles: Sequence[Tile]) -> list[Tile]:
    """Return the tile of the most elements of those whose extents are known."""
    known = [tile for tile in tiles if isinstance(product(tile.shape), int)]
    return sorted(known, key=lambda tile: int(product(tile.shape)))[-1:]


def _together(graph: Graph, most: int) -> int:
    """Return how many trailing axes of results, of ``most``, have known extents and are one in memory."""
    shape = graph.tile(graph.outputs[0]).shape
    read = [n.tile.shape for n in graph.inputs if len(n.tile.shape) >= len(shape)]
    for axes in range(min(most, len(shape)), 1, -1):
        columns = shape[-axes:]
        known = all(isinstance(extent, int) for extent in columns)
        if known and read and all(other[-axes:] == columns for other in read):
            return axes
    return 1


def _behind(graph: Graph) -> list[int]:
    """Return of each reduction how many axes of what it reads lie behind the one along which it runs."""
    reduced = [node for node in graph.nodes if node.operator in REDUCTIONS]
    return [len(graph.tile(node.inputs[0]).shape) - 1 - reduced_axis(graph, node) for node in reduced]


def _row_tiles(columns: int, count: Extent, width: int) -> list[Mapping]:
    """Return tiles of whole rows that fit into shared memory, each row taken by one warp or a part of it."""
    vectors = -(-columns // width)
    found = []
    for rows in (64, 32, 16):
        if not isinstance(count, int) or count % rows or rows * columns * 2 > TILE_BYTES:
            continue
        for lanes in (4, 8, 16, 32):
            num = -(-vectors // lanes)
            teams = min(rows, 256 // lanes)
            if num * width <= HELD and num * lanes < 2 * vectors:
                found.append(Mapping(lanes, num, teams, (rows, columns)))
    return found


def held_columns(graph: Graph, rows: int) -> int | None:
    """Return the columns of rows that lanes can hold: all results and reductions run along one axis.

    Axes of one element may lie before it. Some results may be short, of a number per lane: what few are
    chosen of a row, say.
    """
    lengths: set[Extent] = set()
    apart, moved = between_rows(graph, rows), moved_inputs(graph)
    for value in graph.outputs:
        columns = graph.tile(value).shape[rows:]
        if set(columns[:-1]) - {1}:
            return None
        lengths |= set(columns[-1:])
    several = bool(lengths - {1})
    for node in graph.nodes:
        if node.operator in REDUCTIONS:
            shape = graph.tile(node.inputs[0]).shape
            if not is_along_last(graph, node):
                return None
            if product(shape[:-1]) != product(graph.tile(graph.outputs[0]).shape[:rows]):
                return None
            lengths.add(shape[-1])
        cuts = node.operator in ("concat", "pad", "map", "repeat") and node.name not in apart
        if cuts and not (several and node.name in moved) and not _joins_known(graph, node):
            return None
    known = {length for length in lengths if isinstance(length, int)}
    if len(known) < len(lengths) or not known:
        return None
    most = max(known)
    return most if all(length <= WARP for length in known - {most}) else None


def moved_inputs(graph: Graph) -> set[str]:
    """Return the values that have elements of inputs, or of numbers, at other places: nothing is computed."""
    found = set[str]()
    for node in graph.nodes:
        if node.operator in ("input", "constant") or (
            node.operator in MOVES and found.issuperset(node.inputs)
        ):
            found.update(node.values)
    return found


def _joins_known(graph: Graph, node: Node) -> bool:
    """Tell whether a node joins numbers of each row, no more than a warp has lanes, or a few known pieces.

    Of pads, whether they fill up the last of equal parts.
    """
    if node.operator == "pad":
        return any(reader.operator == "reshape" and node.name in reader.inputs for reader in graph.nodes)
    if node.operator == "map":
        return is_of_frames(node)
    if node.operator != "concat":
        return False
    axis = node_attributes(node)["axis"] % len(node.tile.shape)
    parts = {graph.tile(value).shape[axis] for value in node.inputs}
    pieces = len(node.inputs) <= MOST_PIECES and axis == len(node.tile.shape) - 1
    known = all(isinstance(part, int) and part > 1 for part in parts)
    return (parts == {1} and len(node.inputs) <= WARP) or (pieces and known)


def held_width(graph: Graph) -> int:
    """Return the neighbouring columns that a lane takes at once."""
    rows = loop_axes(graph, graph.outputs)
    return row_width(graph, 0 if rows is None else rows)


def row_width(graph: Graph, rows: int) -> int:
    """Return the columns that a lane takes at once: 16 bytes of the narrowest result, or its share of a row.

    Where results are numbers of rows, 16 bytes of what is reduced.

    Where rows are reduced again and again all lanes of a warp share them: the work of a lane is unrolled, and
    its instructions, which no other warp needs, come from memory as they are executed.
    """
    tiles = [graph.tile(value) for value in graph.outputs if product(graph.tile(value).shape[rows:]) != 1]
    tiles = (tiles or _reduced_rows(graph)) + [n.tile for n in graph.nodes if n.operator in SCANS]
    width = min(8, max((ACCESS // SIZES.get(tile.ttype.name, ACCESS) for tile in tiles), default=1))
    while width > 1 and any(not isinstance(t.shape[-1], int) or t.shape[-1] % width for t in tiles):
        width //= 2
    lengths = [tile.shape[-1] for tile in (*tiles, *_reduced_rows(graph))]
    longest = max((length for length in lengths if isinstance(length, int)), default=0)
    while 1 < width == longest:  # two lanes share a row at least
        width //= 2
    extents = reduced_extents(graph)
    reduced = max((extent for extent in extents if isinstance(extent, int)), default=0)
    while width > 1 and len(extents) > MANY_REDUCTIONS and reduced < WARP * width:
        width //= 2
    return width


MOST_PIECES = 4
"""Pieces that a row is joined of in registers: lanes take vectors of each in turn."""


def _reduced_rows(graph: Graph) -> list[Tile]:
    """Return the tiles of what is reduced along its last axis, in the narrowest type that is read of it."""
    nodes = (node for node in graph.nodes if node.operator in REDUCTIONS)
    reduced = [graph.tile(node.inputs[0]) for node in nodes if is_along_last(graph, node)]
    read = [node.tile.ttype for node in graph.inputs if len(node.tile.shape) > 1]
    narrow = min(read, key=lambda ttype: SIZES.get(ttype.name, ACCESS), default=None)
    return [tile if narrow is None else replace(tile, ttype=narrow) for tile in reduced]


def _held(columns: int, count: Extent, width: int) -> list[Mapping]:
    """Return rows in registers: fewer lanes with more each where rows are many."""
    vectors = -(-columns // width)
    found = []
    for lanes in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        num = -(-vectors // lanes)
        if num * width > 2 * HELD or (num == 1 and lanes > 32 and vectors <= lanes // 2):
            continue
        if lanes < 32 and (vectors <= lanes // 2 or (lanes == 2 < vectors)):
            continue
        for threads in (128, 256) if lanes <= 32 else (lanes,):
            teams = threads // lanes
            found.append(Mapping(lanes, num, teams))
    found.sort(key=lambda m: _preference(m, count, width))
    again = all(mapping.num * width > HELD for mapping in found)  # where they spill
    return [*found, *([Mapping(MOST_ROW_THREADS)] if again else [])]


def _preference(mapping: Mapping, count: Extent, width: int) -> float:
    """Return how far a mapping is from two vectors of 16 bytes per lane and from filling the GPU."""
    rows = count if isinstance(count, int) else 1 << 16
    threads = rows * mapping.lanes
    idle = max(0.0, 3 - threads / (132 * 256))
    return abs(mapping.num * width - 16) / 16 + idle


def _streaming(lanes: int, wave: int) -> list[Mapping]:
    """Return rows that are read again for each use: short ones several to a block, a part of a warp each."""
    shared = [count for count in (lanes // 4, lanes // 2, lanes) if lanes <= 2 * wave and count <= wave]
    return [Mapping(lanes), *(Mapping(count, 0, SHARED_BLOCK // count) for count in shared)]


def _streaming_lanes(graph: Graph, rows: int, wave: int) -> int:
    """Return the threads that share a row which is read again for each use."""
    counts = [product(graph.tile(value).shape[rows:]) for value in graph.outputs]
    counts += [positions(graph, node) for node in graph.nodes if node.operator in REDUCTIONS]
    known = [count for count in counts if isinstance(count, int)]
    width = row_width(graph, rows)
    largest = max(known) if len(known) == len(counts) else MOST_ROW_THREADS * width
    vectors = -(-largest // (width * 2))
    return min(MOST_ROW_THREADS, max(wave, 1 << max(0, vectors - 1).bit_length()))
