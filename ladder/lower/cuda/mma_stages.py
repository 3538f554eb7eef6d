"""Stages of the pipeline ``mma`` in shared memory, and the copies into them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.cuda.activations import Copier
from ladder.lower.cuda.mma_activations import ActivationSource
from ladder.lower.cuda.mma_geometry import Spec
from ladder.lower.cuda.mma_place import Place
from ladder.lower.gpu.activation_tile import CHUNK_BYTES, each_piece
from ladder.lower.gpu.emission import SharedTable, allocate_table
from ladder.lower.gpu.groups import array_dtype
from schedules.layouts import TILE

Expr = Any

ELEMENT_BYTES = {"float32": 4, "uint32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class Stages:
    """Shared memory of a block.

    table: The decode table, if the decoder has one.
    x, words, scales, zeros: Stages of x, packed words, scales and zero points; None where absent.
    results: Where results are transposed; reuses the memory of everything else.
    """

    table: SharedTable | None
    x: Any
    words: Any
    scales: Any
    zeros: Any
    results: Any


def allocate_stages(spec: Spec, place: Place) -> Stages:
    """Allocate shared memory."""
    geo, stages = spec.geo, spec.schedule.stages
    pool = b.shared_pool()
    table = allocate_table(pool, spec.decoder.table_words, place.lane)
    x = pool.alloc((stages, geo.x_tile.words(spec.schedule.tile_m)), "uint32", align=128)
    extents = (stages, geo.row_tiles, geo.stage_tiles, geo.tile_words)
    words = pool.alloc(extents, "uint32", align=128)
    scales = _group_rows(spec, pool, 1, array_dtype(place.args.scales))
    zeros = _group_rows(spec, pool, geo.zero_parts, array_dtype(place.args.zeros))
    pool.move_base_to(0)
    results = pool.alloc((geo.staged_m, geo.pitch), "float32", align=128)
    pool.commit()
    return Stages(table, x, words, scales, zeros, results)


def _group_rows(spec: Spec, pool: Any, parts: int, dtype: str | None) -> Any:
    """Allocate stages of rows of scales or zero points; None where absent."""
    if dtype is None:
        return None
    extents = (spec.schedule.stages, spec.geo.group_rows, parts, spec.schedule.tile_n)
    return pool.alloc(extents, dtype, align=128)


@dataclass(frozen=True)
class StageCopies:
    """Emits this thread's share of the copies of a stage."""

    spec: Spec
    place: Place
    copier: Copier
    stages: Stages
    x: ActivationSource

    def emit(self, stage: Expr, iteration: Expr) -> None:
        """Emit the copies of the stage of iteration ``iteration``."""
        tile = b.bind(iteration * self.spec.geo.stage_tiles)
        self.x.copy(stage, tile)
        self._copy_words(stage, tile)
        self._copy_groups(stage, tile, self.place.args.scales, self.stages.scales, 1)
        self._copy_groups(stage, tile, self.place.args.zeros, self.stages.zeros, self.spec.geo.zero_parts)

    def _row_tile(self, index: Expr) -> Expr:
        """Return a packed tile along N; tiles beyond N repeat the last one."""
        return T.min(self.place.row_tile + index, self.place.args.n_tiles - 1)

    def _k_tile(self, tile: Expr) -> Expr:
        """Return a packed tile along K; tiles beyond K repeat the last one, against zeros of x."""
        return tile if self.spec.geo.stage_tiles == 1 else T.min(tile, self.place.args.k_tiles - 1)

    def _copy_words(self, stage: Expr, tile: Expr) -> None:
        """Copy packed words as they lie."""
        geo = self.spec.geo
        per_tile = geo.tile_words // 4

        def copy(piece: Expr) -> None:
            which, at = b.bind(piece // per_tile), b.bind(piece % per_tile * 4)
            row, step = b.bind(which // geo.stage_tiles), b.bind(which % geo.stage_tiles)
            source = self.place.args.words.ptr_to([self._row_tile(row), self._k_tile(tile + step), at])
            self.copier.chunk(self.stages.words.ptr_to([stage, row, step, at]), source)

        each_piece(geo.row_tiles * geo.stage_tiles * per_tile, geo.threads, self.place.thread, copy)

    def _copy_groups(self, stage: Expr, tile: Expr, array: Any, buffer: Any, parts: int) -> None:
        """Copy the rows of scales or zero points that serve a stage."""
        if buffer is None:
            return
        geo, groups = self.spec.geo, self.spec.groups
        per_chunk = CHUNK_BYTES // ELEMENT_BYTES[str(array.dtype)]
        per_row, per_tile = self.spec.schedule.tile_n // per_chunk, groups.per_tile

        def copy(piece: Expr) -> None:
            line, column = b.bind(piece // per_row), b.bind(piece % per_row * per_chunk)
            row, part = b.bind(line // parts), b.bind(line % parts)
            group = groups.row(self._k_tile(tile + row // per_tile), row % per_tile)
            at = self._row_tile(column // TILE) * TILE + column % TILE
            source = [group, part, at] if parts == 2 else [group, at]
            self.copier.chunk(buffer.ptr_to([stage, row, part, column]), array.ptr_to(source))

        each_piece(geo.group_rows * parts * per_row, geo.threads, self.place.thread, copy)
