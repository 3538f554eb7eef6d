"""How long a call takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

REPEATS = 10


def milliseconds(call: Callable[[], Any], where: str) -> float:
    """Return the median milliseconds of a call, after one that warms up.

    call: What to time; on a GPU, what it launches.
    where: Type of the device: ``"cuda"`` or ``"cpu"``.
    """
    call()
    times = []
    for _ in range(REPEATS):
        if where == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if where == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3
