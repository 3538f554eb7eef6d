"""The pipelines of AMD: x through two buffers of LDS, weights from memory to registers.

``out^T = W · x^T``: a block owns weight rows and ``tile_m`` activation rows. Packed words lie in the order
of the matrix cores' operands, so a lane loads what it decodes and multiplies, one stage ahead
(`gemm_weights`). x is loaded to registers a stage ahead too, and written to LDS when the stage at hand is
done (`gemm_activations`): one barrier per stage. Waves may split K; their sums are added up through LDS
(`gemm_results`). ``mfma`` multiplies with matrix instructions, of whose result a lane holds four
neighbouring weight rows of an activation row, ``dot`` multiplies few activation rows with dot products
within lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.gpu.accumulators import Accumulators
from ladder.lower.gpu.activation_tile import CHUNK_WORDS
from ladder.lower.gpu.arguments import declare_arguments
from ladder.lower.gpu.groups import GroupRegisters, left_by
from ladder.lower.gpu.tile_multiplier import TileMultiplier
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.decode import left_by_fnuz
from ladder.lower.rocm.gemm_activations import SPAN_GROUPS, Activations
from ladder.lower.rocm.gemm_place import Place, Spec, choose_spec, find_place
from ladder.lower.rocm.gemm_results import Results
from ladder.lower.rocm.gemm_scales import ColumnAccumulators, Columns
from ladder.lower.rocm.gemm_weights import Weights
from schedules.schedule import GpuSchedule
from targets import TileDevice

Expr = Any


class WaveGemm:
    """Emits one kernel."""

    def __init__(self, gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> None:
        self.spec = choose_spec(gemm, device, schedule)

    def emit(self) -> None:
        """Emit the whole body."""
        spec = self.spec
        place = find_place(spec, declare_arguments(spec.gemm))
        shared = d.shared(spec.geo.shared_bytes // 4)
        columns = Columns(spec, place, shared) if spec.has_columns else None
        x, weights = Activations(spec, place, shared, columns), Weights(spec, place, columns)
        body = Body(spec, place, shared, _accumulators(spec, columns), x, weights, columns)
        with b.when(place.exists):
            body.emit()


def _accumulators(spec: Spec, columns: Columns | None) -> Accumulators:
    """Allocate the accumulators of a lane."""
    geo, activation = spec.geo, spec.gemm.activation
    left = left_by(spec.decoder, spec.gemm) if spec.raw else left_by_fnuz(spec.device, activation)
    sizes = (spec.groups, spec.step, spec.decoder.operand, geo.row_blocks, geo.m_blocks, left)
    return Accumulators(*sizes) if columns is None else ColumnAccumulators(*sizes, columns.known_sums)


@dataclass(frozen=True)
class Body:
    """Emits what a block does once it knows its tile.

    shared: LDS, as uint32 words.
    columns: The groups of K of the lane's column of matrix instructions, where columns have different ones.
    """

    spec: Spec
    place: Place
    shared: Any
    sums: Accumulators
    x: Activations
    weights: Weights
    columns: Columns | None = None

    def emit(self) -> None:
        """Emit the first stage, the walk over K and the stores."""
        geo, args = self.spec.geo, self.place.args
        # Two iterations at a time: registers and LDS of a stage change places without copies. Were the second
        # conditional, LLVM would sink its loads into it.
        two = 2 * geo.stage_tiles
        pairs = b.keep((args.k_tiles + two - 1) // two)
        self.x.fetch(T.int32(0))
        self.weights.fetch(T.int32(0), 0)
        self.x.write(0, T.int32(0))
        if self.columns is not None:
            self.columns.begin()
        multiplier = TileMultiplier(self.spec.decoder, self.sums)
        with b.loop(pairs, rolled=True) as pair:
            is_last = pair == pairs - 1
            for half in range(2):
                self._iteration(multiplier, b.bind(2 * pair + half), half, is_last)
            if self.columns is not None:
                self.columns.end_pair(multiplier, pair, is_last)
        if self.sums.periods == {0}:
            multiplier.flush_all(self.weights.first_groups)
        Results(self.spec, self.place, self.shared, self.sums).store()

    def _iteration(self, multiplier: TileMultiplier, iteration: Expr, half: int, is_last: Expr) -> None:
        """Multiply a stage, which is in set ``half`` of registers and LDS; fetch the next to the other."""
        other = 1 - half
        d.block_sync(self.spec.device)
        ahead = b.bind(iteration + 1)
        self.x.fetch(ahead)
        d.schedule_fence()  # x is awaited first: loads return in order
        self.weights.fetch(ahead, other)
        d.schedule_fence()
        self._multiply(multiplier, iteration, half, is_last, lambda: self.x.write(other, ahead))

    def _multiply(
        self, multiplier: TileMultiplier, iteration: Expr, half: int, is_last: Expr, write: Callable[[], None]
    ) -> None:
        """Decode and multiply this wave's tiles of a stage; near its end ``write`` what was fetched."""
        spec, place, geo, sums = self.spec, self.place, self.spec.geo, self.sums
        step_m, parts = spec.step.columns, range(spec.step.parts)
        stage, last = half * geo.stage_chunks, (geo.slice_tiles - 1, geo.tile_chunks // SPAN_GROUPS - 1, 0)
        before = place.slice * geo.slice_tiles * geo.tile_chunks
        own = b.bind(place.wave_m + (place.lane % step_m if step_m > 1 else 0))
        groups = [b.bind(before + spec.step.k_group(place.lane, part)) for part in parts]
        for step in range(geo.slice_tiles):
            blocks = range(geo.row_blocks)
            registers: list[GroupRegisters] = [self.weights.group(step, block, half) for block in blocks]
            taken = None if self.columns is None else self.columns.takes(iteration, step)
            tile, index, period = self.weights.tile(iteration, step), *self._place_in_run(half, step)
            for each in registers:
                each.tile = tile if period % 2 else index

            def load_activations(
                m_block: int, span: int, out: Any, step: int = step, taken: Expr | None = taken
            ) -> None:
                if (step, span, m_block) == last:
                    d.schedule_fence()  # before, waiting for what was fetched would stop the work
                    write()
                ahead = step * geo.tile_chunks + span * SPAN_GROUPS
                row = own + m_block * step_m
                for part in parts:
                    at = (stage + geo.x_tile.place(row, groups[part] + ahead)) * CHUNK_WORDS
                    at = at if taken is None else T.Select(taken, at, geo.zeros_beside(ahead))
                    d.load(out, self.shared, at, width=CHUNK_WORDS, at=part * CHUNK_WORDS)

            due = self._due(iteration, half, step, is_last)
            real = T.min(tile, place.args.k_tiles - 1)
            sums.scale_columns(place.args, place.lane, place.first_m + place.wave_m, real)
            multiplier.emit_flushing(self.weights.tile_words(step, half), registers, load_activations, due)
            if geo.joins:
                d.schedule_fence()  # or LLVM decodes all tiles of a stage at once, in hundreds of registers

    def _place_in_run(self, half: int, step: int) -> tuple[int, int]:
        """Return which of a run of neighbouring tiles a wave's tile is, and how many those are.

        Runs begin at multiples of their length: two stages, or one where other waves have what follows.
        """
        tiles = self.spec.geo.slice_tiles
        return (half * tiles + step, 2 * tiles) if self.spec.schedule.split_k == 1 else (step, tiles)

    def _due(self, iteration: Expr, half: int, step: int, is_last: Expr) -> Expr:
        """Return whether sums must be flushed after a wave's tile ``step`` of a stage.

        Tiles beyond K add nothing and have the scales of the last one. Where K is split, a wave's next
        tile after a stage is in another group, unless groups are longer than a stage.
        """
        tiles, periods = self.spec.geo.slice_tiles, sorted(self.sums.periods - {0})
        last, (index, run) = step == tiles - 1, self._place_in_run(half, step)
        if not periods or any((index + 1) % p == 0 for p in periods if run % p == 0):
            return bool(periods)
        if last and self.spec.schedule.split_k > 1:
            return True
        tile = self.weights.tile(iteration, step)
        due = [(tile + 1) % p == 0 for p in periods if run % p and (last or p % tiles)]
        due += [is_last] if last and half else []
        return reduce(T.Or, due) if due else False
