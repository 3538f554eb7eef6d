"""How the waves of an AMD block divide its tile of weight rows and tokens."""

from __future__ import annotations

from dataclasses import dataclass

from schedules.schedule import GpuSchedule

WAVE = 64
"""Lanes of a wave."""

STEP_ROWS = 32
"""Weight rows of one step of a wave: two MFMA 16x16, which share the packed words of 32 rows."""

STEP_TOKENS = 16
"""Tokens of one step."""


@dataclass(frozen=True)
class Division:
    """The division of one block's tile.

    Parameters
    ----------
    row_waves, token_waves
        Waves along weight rows and along tokens: each of the latter decodes the same weights again,
        each of the former reads x again.
    """

    row_waves: int
    token_waves: int


def divisions(schedule: GpuSchedule, tokens: int = STEP_TOKENS) -> list[Division]:
    """Return every even division of a tile, ``tokens`` of them in a step; none if waves do not fit."""
    return [
        Division(schedule.warps // split, split)
        for split in range(1, schedule.warps + 1)
        if schedule.warps % split == 0
        and schedule.tile_m % (tokens * split) == 0
        and schedule.tile_n % (STEP_ROWS * (schedule.warps // split)) == 0
    ]


def division(schedule: GpuSchedule, tokens: int = STEP_TOKENS) -> Division:
    """Return the division in which a wave's tile is as square as it can be, rather longer along tokens.

    Raises
    ------
    ValueError
        If the waves divide the tile in no way.
    """
    found = divisions(schedule, tokens)
    if not found:
        tile = f"{schedule.tile_m} tokens x {schedule.tile_n} rows"
        raise ValueError(f"{schedule.warps} waves do not divide a tile of {tile}")

    def excess(each: Division) -> tuple[int, int]:
        wave = schedule.tile_m // each.token_waves + schedule.tile_n // each.row_waves
        return wave, each.token_waves

    return min(found, key=excess)
