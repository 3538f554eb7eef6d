"""Attention on AMD GPUs: keys and values stream from memory straight into operands of MFMA or WMMA 16x16.

A wave has 16 or 32 rows of q: tokens times the heads that share keys. ``sᵀ = K qᵀ`` leaves a lane four
neighbouring keys of one row of q (eight in waves of 32 lanes), which is how ``oᵀ = Vᵀ pᵀ`` takes weights:
nothing moves between lanes but the largest score and, on RDNA3, whose operands both halves of a wave hold,
operands. A lane loads pieces of K in the order in which they are operands (q is loaded
likewise); of V it loads pieces of its neighbouring keys, of which byte permutations make operands. Waves of
a block have other rows, or take the keys of the same rows in turn and join their sums through LDS
(`attention_join`). No such kernel has run on hardware yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ladder.ir.attention import Attention
from ladder.lower import builder as b
from ladder.lower.gpu.attention import declare_inputs
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.attention_join import Join
from ladder.lower.rocm.attention_loads import Keys, Limits, find_limits, load_queries
from ladder.lower.rocm.attention_place import Place, Spec, choose_spec, find_place
from ladder.lower.rocm.attention_sums import Sums
from schedules.wave_attention import WaveAttentionSchedule
from targets import TileDevice

Expr = Any


def emit(form: Attention, device: TileDevice, schedule: WaveAttentionSchedule, name: str) -> Any:
    """Emit one kernel: ``(numbers..., tensors...)`` as the form names them; tensors have one axis.

    Raises ScheduleError as `schedules.wave_attention.check_legal`.
    """
    with b.function(name) as result:
        spec = choose_spec(form, device, schedule)
        place = find_place(spec, declare_inputs(form))
        limits, queries = find_limits(spec, place), load_queries(spec, place)
        sums = Sums(spec, place)
        Walk(spec, place, limits, queries, sums, Keys(spec, place, limits.needed)).emit()
        Join(spec, place, sums).finish()
    return result.func


@dataclass(frozen=True)
class Walk:
    """Emits the loop over a wave's keys.

    spec, place, limits, queries: The kernel's spec, where this lane works, which keys count, and the operands
        of q.
    """

    spec: Spec
    place: Place
    limits: Limits
    queries: list[list[Expr]]
    sums: Sums
    keys: Keys

    def emit(self) -> None:
        """Emit the loop: the loads of the next iteration are in flight while this one is computed.

        All waves that share keys take as many iterations. Of an iteration beyond the last key weights are 0.
        """
        plan, keys, sums = self.spec.schedule, self.keys, self.sums
        own = plan.span * plan.key_waves
        count = b.keep((self.limits.needed + (own - 1)) // own)
        loads: list[Callable[[Expr], None]] = [keys.load_keys, keys.load_values]
        if self.spec.form.mask:
            loads.insert(0, keys.load_mask)
        with b.when(count > 0):
            for load in loads:
                load(self.place.key_wave)
        with b.loop(count, rolled=True) as index:
            iteration = b.keep(index * plan.key_waves + self.place.key_wave)
            following = b.keep(iteration + plan.key_waves)
            raw = sums.raw_scores(self.queries, keys)
            weights = sums.seen_scores(keys, self.limits, iteration, raw)
            for load in loads[:-1]:
                load(following)
            d.schedule_fence()
            sums.weigh(weights)
            sums.add(weights, keys)
            keys.load_values(following)
            d.schedule_fence()
