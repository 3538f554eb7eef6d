"""Which few schedules serve every M, and where one takes over from the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GAIN = 0.0015
"""Least mean share of time by which one more schedule must shorten calls to be worth compiling:
2 % over one octave of the thirteen from M = 1 to 8192."""

LEAST_EXCHANGE = 1e-6
"""What an exchange of schedules must shorten the mean by, beyond rounding."""

SWITCH = 0.02
"""A schedule takes over from that of more rows of x once it is faster by this share.

With fewer rows a kernel takes no longer than with more, so that only where another takes over can a call take
longer than one of more rows.
"""


def m_grid(largest: int = 8192) -> tuple[int, ...]:
    """Return the M at which schedules are compared: where any tile of activation rows can begin.

    Token tiles are multiples of 8, so nothing changes between two multiples of 8; beyond 256
    activation rows, tiles below a sixteenth of M do not compete, and the steps grow with M: by sixteens up to
    1024, a tile's multiple lies near.
    """
    grid = [1, 2, 4]
    m = 8
    while m <= largest:
        grid.append(m)
        m += max(8, (1 << m.bit_length()) // 64)
    return tuple(grid)


def octave_weights(grid: Sequence[int]) -> np.ndarray:
    """Return the weights of a mean over the grid in which every octave of M counts the same."""
    logs = np.log2([*grid, 2 * grid[-1]])
    steps = np.diff(logs)
    return np.asarray(steps / steps.sum())


def cover(costs: np.ndarray, weights: np.ndarray, most: int, gain: float = GAIN) -> list[int]:
    """Return the rows of ``costs[schedule, M]`` that together are nearly the fastest everywhere.

    Rows are taken greedily: each shortens the weighted mean of log time most, until ``most`` are
    taken or the next one gains less than ``gain``. Then rows that others have made superfluous are exchanged.
    """
    logs = np.log(costs)
    chosen: list[int] = []
    current = np.full(costs.shape[1], logs.max() + 1.0)
    while len(chosen) < min(most, len(costs)):
        gains = np.maximum(current - logs, 0.0) @ weights
        best = int(gains.argmax())
        if chosen and gains[best] < gain:
            break
        chosen.append(best)
        current = np.minimum(current, logs[best])
    while _exchange(logs, weights, chosen):
        pass
    return chosen


def _exchange(logs: np.ndarray, weights: np.ndarray, chosen: list[int]) -> bool:
    """Exchange each of the ``chosen`` rows for the best one there; return whether the mean got shorter."""
    before = logs[chosen].min(axis=0) @ weights
    for place in range(len(chosen)):
        others = logs[chosen[:place] + chosen[place + 1 :]].min(axis=0, initial=logs.max())
        means = np.minimum(others, logs) @ weights
        best = int(means.argmin())
        if means[best] < means[chosen[place]]:
            chosen[place] = best
    return bool(logs[chosen].min(axis=0) @ weights < before - LEAST_EXCHANGE)


def segments(costs: np.ndarray, chosen: Sequence[int], switch: float = SWITCH) -> list[int]:
    """Return for each M which of the ``chosen`` rows serves it, with few changes from the largest M down."""
    served: list[int] = []
    for column in costs.T[::-1]:
        best = min(chosen, key=lambda row: float(column[row]))
        if served and column[served[-1]] <= (1 + switch) * column[best]:
            best = served[-1]
        served.append(best)
    return served[::-1]
