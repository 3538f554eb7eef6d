"""Timing side by side, and what the machine could do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from targets.device import TileDevice

if TYPE_CHECKING:
    import torch

Call = Callable[[], object]

MIN_SECONDS, MAX_SECONDS, ROUNDS = 0.4, 6.0, 7
"""Each contender is timed for at least this long and this many rounds, but no longer than the limit."""

REST_SECONDS, WARM_SECONDS, ROUND_SECONDS = 0.02, 0.02, 0.04
"""Between two contenders on a CPU: longer than idle OpenMP workers spin (libgomp: some 4 ms)."""

MAX_COPIES = 64
FALLBACK_CACHE = 64 << 20
"""Bytes assumed for the last-level cache of a CPU that does not tell."""

BANDWIDTH_BUFFER = 256 << 20


def last_level_cache(device: TileDevice) -> int:
    """Return the bytes of the cache next to DRAM."""
    if device.is_gpu:
        return device.layer("l2").capacity
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0))
    return max(sizes, default=FALLBACK_CACHE)


def copies_for(nbytes: int, device: TileDevice) -> int:
    """Return how many copies of a weight to take in turn so that each comes from memory."""
    return min(MAX_COPIES, 2 + 2 * last_level_cache(device) // max(nbytes, 1))


def side_by_side(contenders: Mapping[str, Sequence[Call]], device: TileDevice) -> dict[str, float]:
    """Time several ways of doing the same work in alternating rounds.

    contenders: Name -> calls that do the same work on different copies of the weight.
    device: Where they run.
    Returns: Name -> median over the rounds of the mean time of one call, in µs.
    """
    clock = _gpu_clock if device.kind == "cuda" else _host_clock
    rounds = {name: clock(calls) for name, calls in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    start = time.perf_counter()
    while (spent := time.perf_counter() - start) < MAX_SECONDS:
        if spent > MIN_SECONDS * len(contenders) and len(next(iter(times.values()))) >= ROUNDS:
            break
        for name, timed in rounds.items():
            times[name].append(timed() / len(contenders[name]))
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def _host_clock(calls: Sequence[Call]) -> Callable[[], float]:
    """Return a stopwatch of one pass over the calls.

    Two thread pools in one process disturb each other: the other's workers spin for some
    milliseconds after their last call, and ours, once asleep, take as long to find a core of
    their own. So each reading rests, warms up, and then lasts long enough for both to fade.
    """

    def timed() -> float:
        time.sleep(REST_SECONDS)
        _passes(calls, WARM_SECONDS)
        return _passes(calls, ROUND_SECONDS)

    calls[0]()
    return timed


def _passes(calls: Sequence[Call], seconds: float) -> float:
    """Repeat all calls for at least ``seconds``; return the mean time of one pass."""
    start, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds or not count:
        for call in calls:
            call()
        count += 1
    return spent / count


def _gpu_clock(calls: Sequence[Call]) -> Callable[[], float]:
    """Capture the calls in one CUDA graph, so that the time has no host cost in it."""
    import torch

    from ladder.runtime.recording import recorded

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with recorded(graph):
        kept = [call() for call in calls]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def timed(kept: object = kept) -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    timed()
    return timed


@dataclass(frozen=True)
class Ceiling:
    """Roofline of this machine: bytes per second, operations per second, and where they come from."""

    bandwidth: float
    peak: float
    source: str

    def seconds(self, nbytes: int, flops: int) -> float:
        """Return the least time that moving and computing this much can take."""
        return max(nbytes / self.bandwidth, flops / self.peak)


def ceiling(device: TileDevice, activation: str) -> Ceiling:
    """Return the roofline of a device: its data sheet, or for a CPU the bandwidth measured now."""
    peak = device.peak(device.core_for(activation))
    if device.is_gpu:
        return Ceiling(device.layer("dram").bandwidth, peak, "data sheet")
    clock = f"compute at a nominal {device.clock / 1e9:.1f} GHz"
    return Ceiling(read_bandwidth(), peak, f"bandwidth measured in this run, {clock}")


def read_bandwidth() -> float:
    """Return the bytes per second at which torch's threads read memory: the best of five sums."""
    import torch

    buffer = torch.ones(BANDWIDTH_BUFFER // 4)
    best = min(_seconds(buffer) for _ in range(5))
    return BANDWIDTH_BUFFER / best


def _seconds(buffer: torch.Tensor) -> float:
    start = time.perf_counter()
    buffer.sum()
    return time.perf_counter() - start
