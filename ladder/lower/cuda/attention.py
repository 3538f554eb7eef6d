"""Attention for few query tokens: keys and values stream from memory straight into matrix operands.

A block has up to 16 rows of q: tokens times the heads that share keys. Its warps, and those of the other
blocks of its cluster, take fragments of 16 keys in turn. A lane loads K and V in pieces of up to 16 bytes, in
that order of elements in which the pieces *are* operands: ``sᵀ = K qᵀ`` takes rows of K as they lie (q is
loaded in the same order), ``oᵀ = Vᵀ pᵀ`` takes pairs of neighbouring keys, which one byte permutation per
register makes. Nothing passes through shared memory but the sums of the warps at the end (`attention_join`).
Scores stay in float32; sums are rescaled when a larger score comes (online softmax).

Lane ``4 g + c`` has keys ``g`` and ``g + 8`` of a fragment and rows ``2 c`` and ``2 c + 1`` of q, as in the
accumulators of ``mma.m16n8k16``; ``movmatrix`` iterations weights into the B operand of the second product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.attention import Attention
from ladder.lower import builder as b
from ladder.lower.cuda.attention_join import Join
from ladder.lower.cuda.attention_loads import Keys, Limits, find_limits, load_queries, prefetch
from ladder.lower.cuda.attention_place import Place, Spec, choose_spec, find_place
from ladder.lower.cuda.attention_sums import Sums, raw_scores, seen_scores, weight_operands
from ladder.lower.cuda.launch import Overlap
from ladder.lower.gpu.attention import declare_inputs
from schedules.attention import AttentionSchedule
from targets import TileDevice

Expr = Any


def emit(form: Attention, device: TileDevice, schedule: AttentionSchedule, name: str) -> Any:
    """Emit one kernel: ``(numbers..., tensors...)`` as the form names them; tensors have one axis.

    Raises ScheduleError if the head does not divide into fragments.
    """
    with b.function(name, noalias=False) as result:  # nothing may be read before `Overlap.wait`
        _emit_body(choose_spec(form, device, schedule), Overlap(device))
    return result.func


def _emit_body(spec: Spec, overlap: Overlap) -> None:
    """Emit the whole body."""
    inputs = declare_inputs(spec.form)
    cluster = ["clusterCtaIdx.x"] * (spec.schedule.cluster > 1)
    overlap.declare("blockIdx.x", "blockIdx.y", "blockIdx.z", *cluster, "threadIdx.x")
    place = find_place(spec, inputs)
    join = Join(spec, place)
    overlap.release()
    if overlap.possible:
        prefetch(spec, place)
    overlap.wait()
    limits = find_limits(spec, place)
    queries = load_queries(spec, place)
    sums = Sums(spec)
    Walk(spec, place, limits, queries, sums, Keys(spec, place, limits.needed)).emit()
    join.finish(sums)


@dataclass(frozen=True)
class Walk:
    """Emits the loop over a warp's keys.

    spec, place, limits, queries: The kernel's spec, where this thread works, which keys count, and the
        operands of q.
    """

    spec: Spec
    place: Place
    limits: Limits
    queries: list[list[Expr]]
    sums: Sums
    keys: Keys

    def emit(self) -> None:
        """Emit the loop: the loads of the next iteration are in flight while this one is computed."""
        worker, workers, span = self.place.worker, self.place.workers, self.spec.span
        iterations = b.keep((self.limits.needed + span - 1) // span)
        loads: list[Callable[[Expr], None]] = [self.keys.load_keys, self.keys.load_values]
        if self.spec.form.mask:
            loads.insert(0, self.keys.load_mask)
        with b.when(worker < iterations):
            for load in loads:
                load(worker)
        count = b.keep(T.max((iterations - worker + workers - 1) // workers, 0))
        with b.loop(count, rolled=True) as index:
            iteration = b.keep(worker + index * workers)
            following = b.keep(iteration + workers)
            weights = self._weights(iteration)
            with b.when(following < iterations):
                for load in loads[:-1]:
                    load(following)
            self.sums.add(weights, self.keys.values)
            with b.when(following < iterations):
                self.keys.load_values(following)

    def _weights(self, iteration: Expr) -> list[list[list[Expr]]]:
        """Make weights of an iteration's keys, operands by fragment and part; rescale the sums so far."""
        spec, keys = self.spec, self.keys
        raw = raw_scores(spec, self.queries, keys.keys)
        scores = seen_scores(spec, keys, self.limits.rows, self.place.g, iteration, raw)
        self.sums.weigh(scores)
        return [
            [weight_operands(spec, keys, scores, fragment, part) for part in range(spec.parts)]
            for fragment in range(spec.schedule.fragments)
        ]
