"""Schedules of attention on AMD GPUs: how the waves of a block share rows of q and keys."""

from __future__ import annotations

from dataclasses import dataclass

from ladder.ir.attention import Attention
from schedules.schedule import Schedule, check
from schedules.waves import WAVE
from targets import TileDevice

FRAGMENT = 16
"""Keys, and rows of q, of a matrix instruction."""

MOST_WAVES = 4
"""Waves of a block: TVM marks AMD kernels as having at most 256 threads."""

PAD, STATE = 4, 2
"""float32 between rows of sums in LDS, so that lanes of different rows use different banks; and of a row's
largest score and sum of weights."""


@dataclass(frozen=True)
class WaveAttentionSchedule(Schedule):
    """How one launch walks the keys.

    Parameters
    ----------
    parts
        Fragments of 16 rows of q (tokens times heads of a group) of a wave: 1 or 2.
    row_waves
        Waves of a block that have rows of their own.
    key_waves
        Waves of a block that take the keys of the same rows in turn.
    fragments
        Fragments of 16 keys that a wave takes at a time.
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

    Raises
    ------
    ScheduleError
        If the device has no matrix cores, heads do not divide into fragments, or sums do not fit LDS.
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
