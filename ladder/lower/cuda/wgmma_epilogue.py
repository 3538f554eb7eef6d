"""Epilogue of the wgmma pipeline: from accumulator fragments to rows of the output.

Accumulators hold ``out^T``: a thread owns scattered (weight row, activation row) pairs, always of the same
two weight rows of each row tile. Scales, bias and operators apply to them in registers; then each warpgroup
transposes a chunk of activation rows of its 64 weight rows through shared memory, so that its threads, or
tensor copies (`wgmma_stores`), store whole lines of 128 bytes. Where a cluster splits K, blocks first add
their sums (`wgmma_cluster_sums`), and of tiles of few activation rows each warp transposes its sixteen weight
rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.functions import rounded_pair
from ladder.lower.cuda.wgmma_cluster_sums import ClusterSums, Sum
from ladder.lower.cuda.wgmma_geometry import (
    WARP_ROWS,
    MathThread,
    Spec,
    accumulator_m,
    accumulator_row,
    swizzled_run,
)
from ladder.lower.cuda.wgmma_grid import Piece
from ladder.lower.cuda.wgmma_stores import TensorStores
from ladder.lower.cuda.wgmma_stream import Stream
from ladder.lower.gpu.arguments import Arguments
from ladder.lower.gpu.epilogue import activate, finish_float
from schedules.layouts import TILE

RUN_WORDS = 4
"""Registers of the 16 bytes that a thread loads at once."""


@dataclass(frozen=True)
class Residual:
    """Loads runs of the tensor that is added, 16 bytes each, a turn of the epilogue ahead.

    Loads that waited for each other would leave memory idle: a block that walks over tiles alone on its
    multiprocessor has as few in flight as it has threads.

    run: Elements of a run.
    """

    args: Arguments
    run: int

    def load(self, rows: Sequence[Expr], column: Expr) -> Any:
        """Start loading a run of each of ``rows`` from ``column`` on; return registers, four of each run.

        What lies beyond the tensor is not read: something within stands for it. Where rows do not begin at
        multiples of 16 bytes nothing is loaded.
        """
        tensor, args = self.args.residual, self.args
        words = b.local(RUN_WORDS * len(rows), "uint32")
        for index in range(RUN_WORDS * len(rows)):
            b.store(
                words, T.uint32(0), index
            )  # else they would take registers all the time between two tiles
        with b.when(args.n % self.run == 0):
            inside = b.bind(T.min(column, args.n - self.run))
            for number, row in enumerate(rows):
                registers = [words[RUN_WORDS * number + i] for i in range(RUN_WORDS)]
                source = tensor.ptr_to([T.min(row, args.m - 1), inside])
                # Not a plain read: the compiler would move it ahead of the wait for the kernel before.
                b.ptx("ld.global.v4.u32", *registers, source)
        return words

    def element(self, words: Any, number: int, index: int) -> Expr:
        """Return element ``index`` of the loaded run ``number``, as float32."""
        first = RUN_WORDS * number
        if str(self.args.residual.dtype) == "float32":
            return T.reinterpret("float32", words[first + index])
        half = T.Cast("uint16", words[first + index // 2] >> T.uint32(16 * (index % 2)))
        return T.Cast("float32", T.reinterpret(str(self.args.residual.dtype), half))


WARP = 32
TEAM_BARRIER = 8
"""Named barrier of the first warpgroup's epilogue; those that take turns have 1 and 2, stream-K has 3."""

WAYS = 2
"""Loads from staging that are in flight at once."""


@dataclass(frozen=True)
class PerRow:
    """A per-row tensor of which a thread keeps the rows it serves; its index is the register's."""

    registers: Any
    dtype: str

    def __getitem__(self, index: int) -> Expr:
        """Return the value of row ``index`` of this thread: 2 * m64 tile + half."""
        return T.reinterpret(self.registers[index], dtype=self.dtype)


class PerActivationRow:
    """Scales of neighbouring activation rows, which the lanes of each warp keep between them.

    Its index is the accumulator's (of one row tile). All lanes of a warp must ask together.

    args, lane: The kernel's tensors, and the lane of the warp.
    count: Activation rows.
    """

    def __init__(self, args: Arguments, lane: Expr, count: int) -> None:
        self.args, self.lane = args, lane
        self.count = -(-count // WARP)
        self.registers = b.local(self.count, "uint32")
        self.fetched: dict[int, Expr] = {}

    def load(self, first_m: Expr, *group: Expr) -> None:
        """Load the scales from row ``first_m`` on, of one group of K if there are groups."""
        for part in range(self.count):
            place = T.min(first_m + part * WARP + self.lane, self.args.m - 1)
            source = self.args.token_scale.ptr_to([place, *group])
            # As in `Epilogue.load`: not a plain read.
            b.ptx("ld.global.u32", self.registers[part], source)

    def forget(self) -> None:
        """Have scales exchanged again: registers are not kept for long."""
        self.fetched.clear()

    def __getitem__(self, index: int) -> Expr:
        """Return the scale of an accumulator's activation row; both weight rows of a thread share it."""
        first = index // 4 * 8
        key = first + index % 2
        if key not in self.fetched:
            source = first % WARP + accumulator_m(self.lane, index % 2)
            held = T.reinterpret("float32", self.registers[first // WARP])
            value = b.local(1, "float32")
            b.store(value, b.shuffle(held, source), 0)
            self.fetched[key] = value[0]
        return self.fetched[key]


@dataclass(frozen=True)
class Epilogue:
    """The end of a tile.

    staging: Where each team transposes its sums.
    cluster_sums, stream: What adds the sums of a cluster, and of pieces of a tile; None where there are none.
    stores: Tensor copies to the output; None where threads store.
    """

    spec: Spec
    args: Arguments
    who: MathThread
    staging: Any
    cluster_sums: ClusterSums | None
    stream: Stream | None
    stores: TensorStores | None = None

    def load(self, piece: Piece) -> dict[str, Any]:
        """Load what belongs to this thread's rows of both operands, long before it is used."""
        geo, args = self.spec.geo, self.args
        wanted = {"row_scale": (args.row_scale, args.n_tiles * TILE), "bias": (args.bias, args.n)}
        wanted["factor"] = (args.factor, args.n)
        held: dict[str, Any] = {}
        if args.token_scale is not None and not self.spec.gemm.token_group:
            held["token_scale"] = PerActivationRow(args, self.who.lane, self.spec.schedule.tile_m)
            held["token_scale"].load(piece.first_m)
        for name, (tensor, extent) in wanted.items():
            if tensor is None:
                continue
            bits = 32 if str(tensor.dtype) == "float32" else 16
            registers = b.local(2 * geo.m64, f"uint{bits}")
            for m in range(geo.m64):
                row = self.first_row(piece.row_tile, m) + accumulator_row(self.who.warp, self.who.lane, 0)
                for half in (0, 1):
                    source = tensor.ptr_to([T.min(row + half * 8, extent - 1)])
                    # Not a plain read: the compiler would move it ahead of the wait for the kernel before.
                    b.ptx(f"ld.global.u{bits}", registers[2 * m + half], source)
            held[name] = PerRow(registers, str(tensor.dtype))
        if self.cluster_sums is None and self.stream is None and geo.adds_early(self.spec.device):
            store = _TeamStore(self, held, piece)
            held["added"] = store.fetch(store.first_row(0), range(self.spec.schedule.tile_m)[: geo.chunk])
        return held

    def first_row(self, row_tile: Expr, m: int) -> Expr:
        """Return the first weight row of row tile ``m`` of the warpgroup."""
        return (row_tile + self.who.group * self.spec.geo.m64 + m) * TILE

    def finish(self, piece: Piece, held: Mapping[str, Any], value: Sum, registers: Any = None) -> None:
        """Write one finished tile.

        piece: The tile.
        held: What `load` loaded for it.
        value: Returns a finished sum.
        registers: The sums, where pieces of a tile are added.
        """
        store = _TeamStore(self, held, piece)
        if self.cluster_sums is not None:
            self.cluster_sums.finish(self.who, value, store.tile)
            return

        def whole() -> None:
            for m in range(self.spec.geo.m64):
                store.tile(m, value, range(self.spec.schedule.tile_m))

        if self.stream is not None:
            self.stream.finish(piece, registers, whole)
        else:
            whole()


class _TeamStore:
    """Stores the rows of each row tile that a team holds: a warpgroup, or a warp."""

    def __init__(self, end: Epilogue, held: Mapping[str, Any], piece: Piece) -> None:
        self.end, self.spec, self.geo, self.who, self.piece = end, end.spec, end.spec.geo, end.who, piece
        # A residual is added to what was staged, where threads have whole runs of it.
        gemm, who, first_m = self.spec.gemm, end.who, piece.first_m
        self.gemm = replace(gemm, epilogue=()) if gemm.residual else gemm
        held = dict(held)
        self.added = held.pop("added", None)
        self.args = replace(end.args, residual=None, **held)
        self.wide = self.gemm.output == "float32"
        self.run = 4 if self.wide else 8
        team = self.geo.team
        self.runs = team * WARP_ROWS // self.run
        self.residual = Residual(end.args, self.run) if gemm.residual else None
        if team == 1:
            self.slot, self.member, self.thread = b.bind(who.group * 4 + who.warp), 0, who.lane
        else:
            self.slot, self.member, self.thread = who.group, who.warp, who.group_thread
        tile = self.spec.schedule.tile_m
        # Tiles that are cut at different K round differently: what two of them hold, only one may store.
        self.own = None if end.stream is None else b.keep((first_m + (tile - 1)) // tile * tile)

    def first_row(self, m: int) -> Expr:
        """Return the first weight row of the team's row tile ``m``."""
        alone = self.who.warp * WARP_ROWS if self.geo.team == 1 else 0
        return b.bind(self.end.first_row(self.piece.row_tile, m) + alone)

    def tile(self, m: int, value: Sum, rows: range) -> None:
        """Store activation rows of row tile ``m`` of the warpgroup, whose sums ``value`` returns."""
        first_row = self.first_row(m)
        turns = [rows[first : first + self.geo.chunk] for first in range(0, len(rows), self.geo.chunk)]
        if self.end.stores is not None:
            for number, turn in enumerate(turns, m * len(turns)):
                self._copied_chunk(self.end.stores, m, turn, number, first_row, value)
            return
        added = self.fetch(first_row, turns[0]) if m or self.added is None else self.added
        for turn, following in zip(turns, [*turns[1:], None], strict=True):
            added = self._chunk(m, turn, following, first_row, value, added)

    def fetch(self, first_row: Expr, turn: range | None) -> Any:
        """Start loading what is added to a turn of activation rows; None: nothing is."""
        if self.residual is None or turn is None:
            return None
        first_m = b.bind(self.piece.first_m + turn.start + self.thread // self.runs)
        rows = [first_m + place for place in range(0, len(turn), self._pass)]
        return self.residual.load(rows, b.bind(first_row + self.thread % self.runs * self.run))

    def _chunk(
        self, m: int, turn: range, following: range | None, first_row: Expr, value: Sum, added: Any
    ) -> Any:
        """Transpose and store a turn of activation rows of row tile ``m``.

        added: What `fetch` loaded for it.
        Returns: What it loads for the ``following`` turn, once sums of this one have left their registers.
        """
        self._stage(m, turn, value, self.slot)
        fetched = self.fetch(first_row, following)
        self._meet()
        first_m = b.bind(self.piece.first_m + turn.start)
        self._store(first_row, first_m, len(turn), self.slot, added)
        # The next chunk overwrites what this one still reads.
        self._meet()
        return fetched

    def _copied_chunk(
        self, stores: TensorStores, m: int, turn: range, number: int, first_row: Expr, value: Sum
    ) -> None:
        """Transpose turn ``number`` of a tile and store it by tensor copies.

        Threads store it where its rows are no multiples of 16 bytes.
        """
        slot, first_m = stores.slot(self.slot, number), b.bind(self.piece.first_m + turn.start)
        stores.await_buffer(number)
        self._meet()
        self._stage(m, turn, value, slot)
        stores.publish()
        self._meet()
        b.either(
            self.args.n % self.run == 0,
            lambda: stores.store(slot, first_row, first_m, len(turn)),
            lambda: self._store(first_row, first_m, len(turn), slot, None),
        )

    def _stage(self, m: int, turn: range, value: Sum, slot: Expr) -> None:
        """Transpose a turn of activation rows of row tile ``m``."""
        if isinstance(self.args.token_scale, PerActivationRow):
            self.args.token_scale.forget()
        (self._stage_floats if self.wide else self._stage_halves)(m, turn, value, slot)

    def _store(self, first_row: Expr, first_m: Expr, count: int, slot: Expr, added: Any) -> None:
        """Store ``count`` staged activation rows by threads."""
        b.either(
            self.args.n % self.run == 0,
            lambda: self._store_vectors(first_row, first_m, count, slot, added),
            lambda: self._store_parts(first_row, first_m, count, slot),
        )

    def _meet(self) -> None:
        """Wait for the whole team."""
        if self.geo.team == 1:
            b.emit(T.cuda.warp_sync())
        else:
            barrier = TEAM_BARRIER + T.Cast("uint32", self.slot)
            b.emit(T.ptx.bar.sync(barrier, T.uint32(self.geo.team * WARP)))

    @property
    def _pass(self) -> int:
        """Activation rows that a team's threads cover, 16 bytes each."""
        return self.geo.team * WARP // self.runs

    def _sum(self, m: int, index: int, value: Sum) -> Expr:
        """Return the finished output of accumulator ``index``, as float32."""
        total = value(m * self.geo.accumulators + index)
        return finish_float(self.gemm, total, index, 2 * m + index // 2 % 2, self.args)

    def _stage_halves(self, m: int, turn: range, value: Sum, slot: Expr) -> None:
        """Round to 16 bits and store transposed 8x8 matrices: two halves of the rows by up to 16 columns."""
        lane = self.who.lane
        for start in range(0, len(turn), 16):
            count = min(16, len(turn) - start) // 4
            registers = []
            for matrix in range(count):
                index = (turn.start + start) // 2 + 2 * matrix
                low, high = (self._sum(m, index + i, value) for i in (0, 1))
                registers.append(rounded_pair(low, high, self.gemm.output))
            place = start + lane // 16 % (count // 2) * 8 + lane % 8
            target = swizzled_run(place, self.member * 2 + lane // 8 % 2, self.runs) * self.run
            spelling = f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16"
            b.ptx(spelling, self.end.staging.ptr_to([slot, target]), *registers)

    def _stage_floats(self, m: int, turn: range, value: Sum, slot: Expr) -> None:
        """Store each sum at its activation row and weight row."""
        lane = self.who.lane
        for index in range(turn.start // 2, turn.stop // 2):
            place = accumulator_m(lane, index) - turn.start
            row = self.member * WARP_ROWS + lane // 4 + index // 2 % 2 * 8
            b.store(self.end.staging, self._sum(m, index, value), slot, place * self.geo.pitch + row)

    def _store_vectors(self, first_row: Expr, first_m: Expr, count: int, slot: Expr, added: Any) -> None:
        """Store 16 bytes per thread, of as many activation rows as the team covers, a few times at once."""
        row = b.bind(first_row + self.thread % self.runs * self.run)
        with b.when(row < self.args.n):
            self._store_whole(row, first_m, count, slot, added)

    def _store_whole(self, row: Expr, first_m: Expr, count: int, slot: Expr, added: Any) -> None:
        """Store all of the thread's runs of a turn, which begin at weight row ``row``."""
        iterations = -(-count // self._pass)
        ways = gcd(iterations, WAYS)
        held = slot, [b.local(self.run, self.gemm.output) for _ in range(ways)]
        if added is not None:  # in registers, which have no computed index
            for first in range(0, iterations, ways):
                self._store_runs(range(first, first + ways), row, first_m, count, held, added)
            return
        # Rolled: addresses of all stores at once would not leave registers for the sums.
        with b.loop(iterations // ways, rolled=True) as iteration:
            numbers = [iteration * ways + way for way in range(ways)]
            self._store_runs(numbers, row, first_m, count, held, None)

    def _store_runs(
        self,
        numbers: Sequence[Expr],
        row: Expr,
        first_m: Expr,
        count: int,
        through: tuple[Expr, Sequence[Any]],
        added: Any,
    ) -> None:
        """Store the thread's runs ``numbers`` of a turn, from a slot through registers of one each."""
        first, (slot, held) = self.thread // self.runs, through
        places = [b.bind(number * self._pass + first) for number in numbers]
        for place, values in zip(places, held, strict=True):
            with b.when(place < count), b.vector(self.run) as v:
                b.store(values, self.end.staging[slot, self._source(place) + v], v)
        for number, place, values in zip(numbers, places, held, strict=True):
            with b.when(self._inside(place, first_m, count)):
                if self.residual is not None:
                    for index in range(self.run):
                        element = self.residual.element(added, number, index)
                        b.store(values, self._sum_with(values[index], element), index)
                with b.vector(self.run) as v:
                    b.store(self.args.y, values[v], first_m + place, row + v)

    def _store_parts(self, first_row: Expr, first_m: Expr, count: int, slot: Expr) -> None:
        """Store as many elements at once as N is a multiple of; those of neighbouring threads follow."""
        parts = [self.run // 2, *([2] if self.run > 4 else [])]

        def store(*widths: int) -> None:
            if not widths:
                self._store_some(1, first_row, first_m, count, slot)
                return
            b.either(
                self.args.n % widths[0] == 0,
                lambda: self._store_some(widths[0], first_row, first_m, count, slot),
                lambda: store(*widths[1:]),
            )

        store(*parts)

    def _store_some(self, width: int, first_row: Expr, first_m: Expr, count: int, slot: Expr) -> None:
        """Store a turn, ``width`` elements of an activation row per thread at once; N is a multiple of it."""
        parts = self.geo.team * WARP_ROWS // width
        rows = max(1, self.geo.team * WARP // parts)
        column, values = b.bind(self.thread % parts * width), b.local(width, self.gemm.output)
        row = b.bind(first_row + column)
        with b.loop(-(-count // rows), rolled=True) as iteration:
            place = b.bind(iteration * rows + self.thread // parts)
            with b.when(T.And(self._inside(place, first_m, count), row < self.args.n)):
                with b.vector(width) as v:
                    b.store(values, self.end.staging[slot, self._source(place, column) + v], v)
                for index in range(width if self.spec.gemm.residual else 0):
                    element = T.Cast("float32", self.end.args.residual[first_m + place, row + index])
                    b.store(values, self._sum_with(values[index], element), index)
                with b.vector(width) as v:
                    b.store(self.args.y, values[v], first_m + place, row + v)

    def _sum_with(self, value: Expr, added: Expr) -> Expr:
        total = T.Cast("float32", value) + T.Cast("float32", added)
        return T.Cast(self.gemm.output, activate(self.spec.gemm, total))

    def _inside(self, place: Expr, first_m: Expr, count: int) -> Expr:
        """Whether a staged row of the ``count`` from row ``first_m`` on is this tile's to store."""
        inside = T.And(place < count, first_m + place < self.args.m)
        return inside if self.own is None else T.And(inside, first_m + place >= self.own)

    def _source(self, place: Expr, column: Expr = None) -> Expr:
        """Return where column ``column`` of a staged row lies; None: where the thread's run starts."""
        part = self.thread % self.runs if column is None else column // self.run
        within = 0 if column is None else column % self.run
        if self.wide:
            return place * self.geo.pitch + part * self.run + within
        return swizzled_run(place, part, self.runs) * self.run + within
