"""Schedules of attention on AMD GPUs: how the waves of a block share rows of q and keys."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ladder.ir.attention import Attention
from schedules.schedule import Schedule, check
from schedules.waves import SPARE_REGISTERS, WAVE
from targets import TileDevice
from tile_types.errors import ScheduleError

FRAGMENT = 16
"""Keys, and rows of q, of a matrix instruction."""

MOST_REGISTERS = 256
"""Registers of a lane up to which two waves share a SIMD."""

MOST_WAVES = 4
"""Waves of a block: TVM marks AMD kernels as having at most 256 threads."""

PAD, STATE = 4, 2
"""float32 between rows of sums in LDS, so that lanes of different rows use different banks; and of a row's
largest score and sum of weights."""


@dataclass(frozen=True)
class WaveAttentionSchedule(Schedule):
    """How one launch walks the keys.

    parts: Fragments of 16 rows of q (tokens times heads of a group) of a wave: 1 or 2.
    row_waves: Waves of a block that have rows of their own.
    key_waves: Waves of a block that take the keys of the same rows in turn.
    fragments: Fragments of 16 keys that a wave takes at a time.
    """

    parts: int = 1
    row_waves: int = 1
    key_waves: int = 4
    fragments: int = 2

    def __post_init__(self) -> None:
        check(self.parts in (1, 2), f"a wave has 1 or 2 fragments of rows, got {self.parts}")
        check(
            self.fragments in (1, 2, 4), f"a wave takes 1, 2 or 4 fragments at a time, got {self.fragments}"
        )
        least, waves = min(self.row_waves, self.key_waves), self.waves
        check(least >= 1 and waves <= MOST_WAVES, f"a block has 1 to {MOST_WAVES} waves, got {waves}")

    @property
    def waves(self) -> int:
        """Waves of a block."""
        return self.row_waves * self.key_waves

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.waves * WAVE

    @property
    def wave_rows(self) -> int:
        """Rows of q of a wave."""
        return FRAGMENT * self.parts

    @property
    def rows(self) -> int:
        """Rows of q of a block."""
        return self.row_waves * self.wave_rows

    @property
    def span(self) -> int:
        """Keys of a wave's turn."""
        return FRAGMENT * self.fragments


def shared_words(form: Attention, plan: WaveAttentionSchedule) -> int:
    """Return the words of LDS in which waves leave their sums for each other."""
    return plan.key_waves * plan.rows * (form.size + PAD + STATE) if plan.key_waves > 1 else 0


def check_legal(form: Attention, device: TileDevice, plan: WaveAttentionSchedule) -> None:
    """Check that a kernel can be emitted.

    Raises ScheduleError if the device has no matrix cores, heads do not divide into fragments, or sums do not
        fit LDS.
    """
    check("mfma" in device.features, f"{device.name} has no matrix cores that attention is written for")
    check(
        form.size % FRAGMENT == 0 and FRAGMENT <= form.size <= 256,
        f"heads of {form.size} elements have no kernel",
    )
    check(form.heads % form.kv_heads == 0, "heads of q must divide into groups")
    most, found = device.shared_per_block, 4 * shared_words(form, plan)
    check(
        found <= most, f"sums of {plan.key_waves} waves take {found} bytes of LDS; {device.name} has {most}"
    )


def is_legal(form: Attention, device: TileDevice, plan: WaveAttentionSchedule) -> bool:
    """Whether `check_legal` accepts the schedule."""
    try:
        check_legal(form, device, plan)
    except ScheduleError:
        return False
    return True


LAUNCH, BLOCK = 2.0e-6, 1.0e-6
"""Seconds of a launch, and of a block beside its turns: assumed, no such kernel has run on hardware."""

EXPECTED = 1.25
"""How much longer kernels that no hardware has run are taken to last than what is counted."""

VECTOR_CYCLES = 4
"""Cycles of a wave's vector instruction."""

PER_SCORE, PER_LOAD, PER_TURN = 16, 10, 60
"""Vector instructions of a lane's score, of a load with its address, and of a turn (machine code's)."""

L2_SHARE = 2.0
"""Bandwidth of L2 over that of DRAM: blocks of other rows of q read the same keys again."""


def schedules(form: Attention, device: TileDevice, tokens: int) -> list[WaveAttentionSchedule]:
    """Return the schedules that are considered."""
    few = tokens * form.group <= FRAGMENT
    ways = ((1, 1, keys) for keys in (4, 2, 1)) if few else ((2, 4, 1), (1, 4, 1), (1, 1, 4), (1, 2, 2))
    found = [WaveAttentionSchedule(*way, fragments) for way in ways for fragments in (1, 2, 4)]
    legal = [plan for plan in found if is_legal(form, device, plan)]
    return [plan for plan in legal if registers(form, plan) <= MOST_REGISTERS] or legal[-1:]


def registers(form: Attention, plan: WaveAttentionSchedule) -> int:
    """Return about how many registers a lane has: sums and q, keys and values in flight and as operands."""
    own = plan.parts * (form.size // 4 + form.size // 8)
    moved = plan.fragments * form.size * form.stored_bytes // 8
    return own + moved + plan.fragments * (10 + 6 * plan.parts) + SPARE_REGISTERS


def predict(
    form: Attention, device: TileDevice, plan: WaveAttentionSchedule, batch: int, tokens: int, keys: int
) -> float:
    """Return the seconds that a schedule is predicted to take."""
    dram, size = device.layers[0], form.size
    tiles = ceil(tokens * form.group / plan.rows)
    blocks = batch * form.kv_heads * tiles
    seen = keys / 2 if form.causal and tokens > plan.rows else keys
    turns = ceil(seen / (plan.span * plan.key_waves))
    at_once = max(1, min(device.schedulers * 512 // (registers(form, plan) * plan.waves), 32 // plan.waves))
    rounds = ceil(blocks / (device.units * at_once))
    held = min(at_once, ceil(blocks / device.units)) * plan.waves / device.schedulers
    core = device.core_for(form.ttype)
    products = 4 * FRAGMENT * FRAGMENT * size * plan.fragments * plan.parts
    loads = plan.fragments * size * form.stored_bytes // 32
    scores = 4 * plan.fragments * plan.parts
    vector = (
        PER_TURN + PER_SCORE * scores + PER_LOAD * loads + plan.parts * size // 8 + plan.fragments * size // 8
    )
    cycles = products * device.schedulers / (core.ops_per_cycle * core.sustained) + VECTOR_CYCLES * vector
    turn = max(dram.latency, cycles / device.clock * max(1.0, held))
    moved = blocks * turns * plan.key_waves * plan.span * 2 * size * form.stored_bytes
    streamed = max(moved / tiles, moved / L2_SHARE) / (dram.bandwidth * dram.sustained)
    return LAUNCH + EXPECTED * max(rounds * (BLOCK + turns * turn), BLOCK + streamed)
