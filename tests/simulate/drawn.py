"""Problems and schedules drawn at random from all that is legal: small, with remainders in every dimension.

Each draw is the one of several that has most of what no draw before it had (`Drawn.features`), so that few
draws reach every extent that `schedules.rules.RULES` allows, every type and every kind of zero point.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ladder.ir.gemm import Gemm
from ladder.lower.build import emit
from schedules.footprint import block_rows
from schedules.legal import is_legal, placement_for
from schedules.rules import AXES, RULES
from schedules.schedule import GpuSchedule
from targets import TileDevice, get_device
from tile_types import list_types
from tile_types.errors import LadderError

SIZES = {"n": (67, 130, 203, 300), "k": (200, 330, 450, 700, 1027)}

CHOICES = 24
"""Legal draws of which the newest is kept."""

MOST_OUTPUTS = 64 * 1024
"""Outputs of a block's tile: larger ones are drawn, but take seconds each."""

OPEN = {"raster": (1, 8)}
"""Values of axes of which a rule allows any."""

OUTPUTS = {"float16": ("float16", "float32"), "bfloat16": ("bfloat16", "float32")}


@dataclass(frozen=True)
class Drawn:
    """One problem, one schedule, one M, and where it runs."""

    gemm: Gemm
    schedule: GpuSchedule
    m: int
    target: str = "cuda/sm_90a"

    @property
    def name(self) -> str:
        """A short name."""
        g, s = self.gemm, self.schedule
        return f"{s.pipeline}-{g.weight}-{g.activation}-{g.n}x{g.k}-g{g.group_size}-{g.zero}-m{self.m}: {s}"

    @property
    def features(self) -> frozenset[tuple[Any, ...]]:
        """What a draw covers: values of the schedule's axes, types, zero points, groups, extents."""
        g, s = self.gemm, self.schedule
        axes = {(s.pipeline, axis, getattr(s, axis)) for axis in AXES}
        types = {
            (s.pipeline, g.activation, g.weight),
            (s.pipeline, "zero", g.zero),
            (s.pipeline, g.group_size),
        }
        more = {
            (s.pipeline, s.tile_n, s.warps),
            (s.pipeline, "m", self.m),
            (s.pipeline, g.token_scale, g.bias),
        }
        return frozenset(axes | types | more)

    def function(self) -> Any:
        """Return the emitted PrimFunc."""
        return _emitted(self)


@lru_cache(maxsize=4)
def _emitted(drawn: Drawn) -> Any:
    return emit(drawn.gemm, get_device(drawn.target), drawn.schedule, "drawn")


def pipelines_of(device: TileDevice) -> list[str]:
    """Return the pipelines that a device's cores have, in the order of the rules."""
    known = {name for core in device.cores for name in core.pipelines}
    return [name for name in RULES if name in known]


def _gemm(r: random.Random, device: TileDevice, pipeline: str) -> Gemm:
    activation = r.choice(sorted({core.a for core in device.cores if pipeline in core.pipelines}))
    narrow = activation not in OUTPUTS
    scale = r.random() < 0.8
    exact = [t for t in list_types() if not t.is_block and t.elem_bits <= 16 and t.name != "e8m0"]
    return Gemm(
        n=r.choice(SIZES["n"]),
        k=r.choice(SIZES["k"]),
        weight=r.choice(exact).name,
        activation=activation,
        group_size=r.choice((32, 64, 128)) if scale else -1,
        scale=scale,
        zero=r.choice(("none", "none", "integer", "float")),
        bias=r.random() < 0.3,
        token_scale=narrow and r.random() < 0.5,
        output="float32" if narrow else r.choice(OUTPUTS[activation]),
        epilogue=("relu",) if r.random() < 0.2 else (),
    )


def _schedule(r: random.Random, gemm: Gemm, pipeline: str) -> GpuSchedule:
    """Draw every axis of a pipeline's rule on its own."""
    rule = RULES[pipeline]
    fields = {axis: r.choice(getattr(rule, axis) or OPEN[axis]) for axis in AXES if axis != "placement"}
    placement = r.choice(rule.placement) if rule.placement else placement_for(gemm)
    return GpuSchedule(pipeline, placement=placement, **fields)


def _attempt(r: random.Random, device: TileDevice, pipeline: str) -> Drawn | None:
    """Return a legal draw of a bearable size, or None."""
    try:
        gemm = _gemm(r, device, pipeline)
        schedule = _schedule(r, gemm, pipeline)
        if not is_legal(gemm, device, schedule):
            return None
    except LadderError:
        return None
    if schedule.tile_m * block_rows(schedule) > MOST_OUTPUTS:
        return None
    m = r.choice((1, 5, 16, 33, 64, 129) if schedule.tile_m > 16 else (1, 5, schedule.tile_m + 1))
    return Drawn(gemm, schedule, m, device.name)


def draw(count: int, seed: int, target: str = "cuda/sm_90a", begin: int = 0) -> Iterator[Drawn]:
    """Yield ``count`` legal problems of all pipelines in turn, from the one numbered ``begin`` on."""
    r, device = random.Random(seed), get_device(target)
    names, seen = pipelines_of(device), set[tuple[Any, ...]]()
    for turn in range(begin, begin + count):
        found: list[Drawn] = []
        while len(found) < CHOICES:
            drawn = _attempt(r, device, names[turn % len(names)])
            found += [drawn] if drawn is not None else []
        found.sort(key=lambda drawn: len(drawn.features - seen), reverse=True)
        best = next(drawn for drawn in found if _emits(drawn))
        seen |= best.features
        yield best


def _emits(drawn: Drawn) -> bool:
    """Whether types, zero points and schedule go together, which only decoders know."""
    try:
        drawn.function()
    except LadderError:
        return False
    return True
