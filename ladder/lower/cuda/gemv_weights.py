"""Weights of a gemv kernel: packed words from global memory to registers, and the values of their groups.

Each thread keeps ``stages`` tiles of its slice of K in flight. Tiles go to the slices in *runs* of
neighbours, so that tiles of a group share one load of its scale and zero point.

A lane multiplies rows g, g + 8, ... of each fragment. Values of groups of whole tiles are few: it loads its
own (`OwnValues`). Of smaller groups that would be many loads of two bytes, all of them by four lanes, and as
many registers. There the lanes load for each other (`SharedValues`): each a *piece*, which is the values of
eight neighbouring rows for one group, of all tiles of a run at once. While in flight these take a register
for two values; then they pass through shared memory of the warp, from which ``ldmatrix.trans`` reads the
values of one row for two neighbouring groups into a word of each lane that needs them (PTX ISA, ldmatrix).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.gemv_geometry import STRIP, Spec
from ladder.lower.cuda.gemv_place import Place, half_words
from ladder.lower.gpu.activation_tile import CHUNK_BYTES, CHUNK_WORDS
from ladder.lower.gpu.decode import load_order
from ladder.lower.gpu.emission import helper
from ladder.lower.gpu.groups import OPERAND_ROWS, GroupRegisters, array_dtype
from schedules.group_values import value_parts
from schedules.layouts import TILE

PIECE_ROWS = 8
"""Rows of a piece: 16 bytes, and a row of a matrix that ldmatrix loads."""

LANES = 32

LOAD_PIECE = "ld.global.L1::no_allocate.v4.u32"

TWICE = "{{.reg .b16 l, h; mov.b32 {{l, h}}, %1; mov.b32 %0, {{{half}, {half}}};}}"
"""A half of a word, twice; ptxas makes it a modifier of the instruction that takes it."""


class OwnValues:
    """Values that every lane loads for itself, after the last tile of a group."""

    def __init__(self, spec: Spec, place: Place, run: b.Variable) -> None:
        self.spec, self.place, self.run = spec, place, run
        geo, groups = spec.geo, spec.groups
        types = (array_dtype(place.args.scales), array_dtype(place.args.zeros))
        self.registers = [
            [GroupRegisters(groups, spec.step, place.warp.lane, types) for _ in range(geo.row_blocks)]
            for _ in range(spec.schedule.stages // geo.group_tiles)
        ]

    def due(self, slot: int) -> int | None:
        """Return how many tiles before a slot's the values begin that are loaded with it, if any are."""
        before = self.spec.geo.group_tiles - 1
        return before if slot % self.spec.geo.group_tiles == before else None

    def load(self, slot: int, distance: int, *, guarded: bool) -> None:
        """Emit the loads of the values of a slot's tile, ``distance`` tiles after the current run's first."""
        del guarded  # the caller's guard suffices
        for block, registers in enumerate(self.registers[slot // self.spec.geo.group_tiles]):
            registers.fetch(partial(self._read, distance, block))

    def share(self, slot: int, exists: Expr) -> None:
        """Emit what the run that begins with a slot needs before its first tile: nothing."""

    def read(self, slot: int) -> list[GroupRegisters]:
        """Return the values of a slot's tile, of each fragment."""
        return self.registers[slot // self.spec.geo.group_tiles]

    def _read(self, distance: int, block: int, name: str, granule: int, part: int, row: Expr) -> Expr:
        """Return one scale or zero point of a K tile."""
        array, length = getattr(self.place.args, name), self.spec.geo.run
        run = self.run.value + distance // length
        group = self.spec.groups.run_row(run, length, distance % length, granule)
        half, own = divmod(block, self.spec.geo.own_blocks)
        column = self.place.column + half * self.place.args.n + own * STRIP + row
        if name == "zeros" and self.spec.gemm.zero == "float":
            return array[group, part, column]
        return array[group, column]


class Pieces:
    """The pieces of an array: of a run ``[pair of groups][part][group of the pair][eight rows]``.

    array, parts: Scales or zero points, and of how many numbers each consists.
    first: Where the pieces begin in the warp's shared memory, in bytes.
    """

    def __init__(self, spec: Spec, place: Place, array: Any, parts: int, first: int) -> None:
        self.array, self.parts, self.first, self.lane = array, parts, first, place.warp.lane
        self.last_group = place.args.groups - 1
        self.eights = spec.schedule.warp_rows // PIECE_ROWS
        self.groups = spec.geo.run * spec.groups.per_tile
        self.count = self.groups * parts * self.eights
        """Pieces of a run."""
        rows = place.args.n_tiles * TILE
        self.pitch = b.keep(rows * parts)
        units = range(0, self.count, LANES)
        places = [self._place(spec, place, rows, T.min(self.lane + unit, self.count - 1)) for unit in units]
        self.places = [(b.keep(group), b.keep(column)) for group, column in places]
        runs = spec.schedule.stages // spec.geo.run
        self.held = [[b.local(CHUNK_WORDS, "uint32") for _ in units] for _ in range(runs)]
        self.matrices = spec.groups.per_tile // 2 * parts * self.eights
        """Matrices of a tile: of two groups, one part and eight rows each."""
        self.words = b.local(self.matrices, "uint32")

    @property
    def nbytes(self) -> int:
        """Bytes of a run's pieces."""
        return self.count * CHUNK_BYTES

    def _place(self, spec: Spec, place: Place, rows: Expr, piece: Expr) -> tuple[Expr, Expr]:
        """Return the group of a run to which a piece belongs, and its first element's place in that group."""
        geo, (above, eight) = spec.geo, _divided(piece, self.eights)
        above, odd = _divided(above, 2)
        pair, part = _divided(above, self.parts)
        half, own = _divided(eight // 2, geo.own_blocks)
        column = place.column + half * place.args.n + own * STRIP + eight % 2 * PIECE_ROWS
        return pair * 2 + odd, part * rows + column

    def load(self, slot: int, run: Expr, *, guarded: bool) -> None:
        """Emit the loads of run ``run``; guarded, groups beyond the array are its last one."""
        for words, (own, column) in zip(self.held[slot], self.places, strict=True):
            group = run * self.groups + own
            group = T.min(group, self.last_group) if guarded else group
            at = self.array.ptr_to([0] * self.parts + [group * self.pitch + column])
            b.ptx(LOAD_PIECE, *(words[i] for i in range(CHUNK_WORDS)), at)

    def store(self, slot: int, start: Expr) -> None:
        """Emit what was loaded going to shared memory from byte ``start`` on."""
        for unit, words in enumerate(self.held[slot]):
            left, at = self.count - unit * LANES, self.first + unit * LANES * CHUNK_BYTES
            with b.when(self.lane < left if left < LANES else True):
                place = start + T.Cast("uint32", self.lane * CHUNK_BYTES) + T.uint32(at)
                b.ptx("st.shared.v4.u32", place, *(words[i] for i in range(CHUNK_WORDS)))

    def row(self) -> Expr:
        """Return the byte, from the first matrix on, of the row that a lane names to ldmatrix.

        Even rows of a matrix are the pair's first group, odd ones its second.
        """
        (high, low), odd = _divided(self.lane // PIECE_ROWS, self.eights), self.lane % 2
        return ((high * 2 + odd) * self.eights + low) * CHUNK_BYTES

    def read(self, tile: int, start: Expr) -> None:
        """Emit the loads of the values of a tile of the run into ``words``."""
        count = 4 if self.matrices % 4 == 0 else 2
        for matrix in range(0, self.matrices, count):
            high, low = divmod(tile * self.matrices + matrix, self.eights)
            at = self.first + (high * 2 * self.eights + low) * CHUNK_BYTES
            words = (self.words[matrix + i] for i in range(count))
            b.ptx(f"ldmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16", *words, start + T.uint32(at))


def _divided(value: Expr, by: int) -> tuple[Expr, Expr]:
    """Return quotient and remainder."""
    return value // by, value % by


class SharedValues:
    """Values that the lanes of a warp load for each other.

    run: The run that is multiplied, counted over all slices.
    shared: Words of shared memory, `warp_words` for each warp.
    """

    def __init__(self, spec: Spec, place: Place, run: b.Variable, shared: Any) -> None:
        self.length, self.run = spec.geo.run, run
        names = (name for name in ("scales", "zeros") if getattr(place.args, name) is not None)
        self.arrays: dict[str, Pieces] = {}
        first = 0
        for name, parts in zip(names, value_parts(spec.gemm), strict=True):
            self.arrays[name] = Pieces(spec, place, getattr(place.args, name), parts, first)
            first += self.arrays[name].nbytes
        own = shared.ptr_to([place.warp.warp * warp_words(spec)])
        self.start = b.Variable("uint32", T.cuda.cvta_generic_to_shared(own))
        row = next(iter(self.arrays.values())).row()  # the same of all arrays
        self.rows = b.Variable("uint32", self.start.value + T.Cast("uint32", row))
        self.registers: list[GroupRegisters] = [
            SharedRegisters(spec, place.warp.lane, self.arrays, block) for block in range(spec.geo.row_blocks)
        ]

    def due(self, slot: int) -> int | None:
        """Return how many tiles before a slot's the values begin that are loaded with it, if any are."""
        return self.length - 1 if slot % self.length == self.length - 1 else None

    def load(self, slot: int, distance: int, *, guarded: bool) -> None:
        """Emit the loads of the values of the run that holds the tile ``distance`` after this run's first."""
        for pieces in self.arrays.values():
            pieces.load(slot // self.length, self.run.value + distance // self.length, guarded=guarded)

    def share(self, slot: int, exists: Expr) -> None:
        """Emit the values of the run that begins with a slot, if it ``exists``, being handed out."""
        with b.when(exists):
            b.emit(T.cuda.warp_sync())
            for pieces in self.arrays.values():
                pieces.store(slot // self.length, self.start.value)
            b.emit(T.cuda.warp_sync())

    def read(self, slot: int) -> list[GroupRegisters]:
        """Emit the loads of the values of a slot's tile, and return those of each fragment."""
        for pieces in self.arrays.values():
            pieces.read(slot % self.length, self.rows.value)
        return self.registers


def warp_words(spec: Spec) -> int:
    """Return the words of shared memory through which the lanes of a warp hand out the values of a run."""
    pieces = spec.geo.run * spec.groups.per_tile * spec.schedule.warp_rows // PIECE_ROWS
    return pieces * sum(value_parts(spec.gemm)) * CHUNK_WORDS


class SharedRegisters(GroupRegisters):
    """Values of one fragment's rows, each in half a word of `Pieces`."""

    def __init__(self, spec: Spec, lane: Expr, arrays: dict[str, Pieces], block: int) -> None:
        super().__init__(spec.groups, spec.step, lane, (None, None))
        self.arrays, self.block = arrays, block
        self.scales, self.zeros = arrays.get("scales"), arrays.get("zeros")

    def _word(self, array: str, at: int) -> tuple[Expr, int]:
        """Return the word that holds an element, and in which half."""
        pieces = self.arrays[array]
        others, row = divmod(at, OPERAND_ROWS)
        granule, part = divmod(others, pieces.parts)
        matrix = (granule // 2 * pieces.parts + part) * pieces.eights + OPERAND_ROWS * self.block + row
        return pieces.words[matrix], granule % 2

    def replicated(self, array: str, at: int) -> Expr:
        word, half = self._word(array, at)
        name = f"ladder_twice_{'lh'[half]}"
        return b.call_inline(name, helper(name, TWICE.format(half="lh"[half]), 1), "uint32", word)

    def number(self, array: str, at: int) -> Expr:
        word, half = self._word(array, at)
        bits = T.Cast("uint16", word >> T.uint32(16) if half else word & T.uint32(0xFFFF))
        return T.Cast("float32", T.reinterpret(bits, dtype=self.groups.gemm.activation))


LOADS = {width: f"ld.global.L1::no_allocate{'' if width == 1 else f'.v{width}'}.u32" for width in (1, 2, 4)}
"""Weights are read once: they bypass L1. ``.nc`` would let ptxas move loads before `Overlap.wait`."""


class Cursor:
    """Where a slice of K is: its current run, and where that run's words start."""

    def __init__(self, spec: Spec, place: Place) -> None:
        geo, first = spec.geo, place.share.first_run + place.warp.slice
        self.spec, self.share = spec, place.share
        self.run = b.Variable("int32", first)
        """The run being multiplied, counted over all slices."""
        tile = place.warp.strip // geo.tile_strips * place.args.k_tiles + first * geo.run
        start = b.bind(tile * spec.groups.tile_words)
        self.words = {
            width: b.Variable("int64", T.Cast("int64", start + place.owner * width))
            for _, width in load_order(spec.groups.bits)
        }
        """Width of a load -> where the lane's words of the run start."""

    def inside(self, distance: int) -> Expr:
        """Return whether the tile ``distance`` after the first of the current run lies within K."""
        return self.run.value * self.spec.geo.run + distance < self.share.end

    def advance(self) -> None:
        """Go to the slice's next run."""
        self.run.set(self.run.value + self.spec.schedule.split_k)
        for at in self.words.values():
            at.set(at.value + T.int64(self.spec.geo.round_tiles * self.spec.groups.tile_words))


class Weights:
    """Registers of the tiles in flight, and their loads.

    shared: Shared memory through which lanes hand out scales and zero points, if they do.
    """

    def __init__(self, spec: Spec, place: Place, cursor: Cursor, shared: Any = None) -> None:
        self.spec, self.place, self.cursor = spec, place, cursor
        geo, groups, stages = spec.geo, spec.groups, spec.schedule.stages
        self.half_words = half_words(place.args, geo, groups.tile_words)
        self.words = [[b.local(groups.bits, "uint32") for _ in range(geo.row_blocks)] for _ in range(stages)]
        kind = OwnValues if shared is None else partial(SharedValues, shared=shared)
        self.values: OwnValues | SharedValues = kind(spec, place, cursor.run)

    def fill(self) -> None:
        """Emit the loads of the first tiles."""
        geo = self.spec.geo
        for slot in range(self.spec.schedule.stages):
            self.load(slot, slot // geo.run * geo.round_tiles + slot % geo.run, guarded=True)

    def load(self, slot: int, distance: int, *, guarded: bool) -> None:
        """Emit the loads of a tile's words and, where they are due, of scales and zero points.

        ``distance`` counts tiles from the first of the current run.
        """
        gemm, inside = self.spec.gemm, self.cursor.inside
        with b.when(inside(distance) if guarded else True):
            for block, words in enumerate(self.words[slot]):
                self._load_words(words, block, distance)
        before = self.values.due(slot)
        if before is not None and (gemm.scale or gemm.zero != "none"):
            with b.when(inside(distance - before) if guarded else True):
                self.values.load(slot, distance - before, guarded=guarded)

    def begin(self, slot: int, *, guarded: bool) -> None:
        """Emit what the run that begins with a slot needs before its first tile."""
        self.values.share(slot, self.cursor.inside(0) if guarded else True)

    def _load_words(self, target: Any, block: int, distance: int) -> None:
        """Emit the loads of a thread's words of one fragment's rows of a tile."""
        at = 0
        half, own = divmod(block, self.spec.geo.own_blocks)
        for offset, width in load_order(self.spec.groups.bits):
            word = self.cursor.words[width].value
            word = word + T.int64(distance * self.spec.groups.tile_words + offset + own * 32 * width)
            word = word + T.Cast("int64", self.half_words) if half else word
            registers = (target[at + i] for i in range(width))
            b.ptx(LOADS[width], *registers, self.place.args.words.ptr_to([0, 0, word]))
            at += width
