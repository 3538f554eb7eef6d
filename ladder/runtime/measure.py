"""Check and time compiled schedules on the GPU that is here.

Weights are random and rotate over more than four times the L2, so that they come from HBM. A
candidate's launches are one CUDA graph: what a captured model sees, without the host's cost.
Slow candidates leave after a few replays; the rest are replayed in turns, so that clocks and
temperature drift alike for all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ladder.ir.gemm import Gemm
from ladder.ir.rounding import largest_error
from ladder.runtime import library
from ladder.runtime.compile import family_of
from ladder.runtime.compile_pool import Campaign, Trial
from ladder.runtime.packed import pack
from ladder.runtime.recording import recorded
from schedules.cost_model import predict
from schedules.legal import is_legal
from schedules.schedule import GpuSchedule
from schedules.tuning import Measurement
from targets import TileDevice, get_device
from tile_types import get_type, quantize
from tile_types.arrays import torch_dtype

if TYPE_CHECKING:
    import torch

ROTATED_BYTES = 260e6
"""Weights that a graph streams before it comes back to the first copy: over four times 60 MB of L2."""

GRAPH_SECONDS = 3e-3
"""Length of a graph above which it holds fewer launches than there are copies of the weights."""

CHECKED = (320, 1024)
"""N and K at which every kernel is checked; the last row tile is partial."""

ROW_BLOCK = 256
"""Rows of random weights that are drawn and packed; larger matrices repeat them."""

WORTH_TRYING: Mapping[bool, tuple[float, int]] = {False: (1.7, 16), True: (3.0, 1000)}
"""Predicted over best predicted time up to which kernels are tried at a point, and how many: by
whether they are a random sample."""

FINALISTS, IN_REACH = 6, 1.15
"""How many, and how close to the fastest in the first round, reach the second."""

QUICK_REPEATS, FINAL_REPEATS = 3, 9

FINAL_SECONDS = 30e-3
"""Time that the replays of one finalist may take; at least three are made."""


@dataclass(frozen=True)
class Begin:
    """A trial is about to run: if nothing follows, it hangs or has taken the process down."""

    trial: Trial


@dataclass(frozen=True)
class Weights:
    """The weights of a problem are being made: this may take a while."""

    gemm: Gemm


@dataclass(frozen=True)
class Checked:
    """A trial gave the right product."""

    trial: Trial


@dataclass(frozen=True)
class Dropped:
    """A trial that failed or is wrong, and why."""

    trial: Trial
    reason: str


@dataclass(frozen=True)
class Timed:
    """A measurement: of a finalist, or a quick one of all that were tried."""

    gemm: Gemm
    row: Measurement
    final: bool


@dataclass(frozen=True)
class PointDone:
    """One problem has been measured at one M."""

    gemm: Gemm
    m: int


Event = Begin | Weights | Checked | Dropped | Timed | PointDone


@dataclass
class Progress:
    """State of a measurement that a process which takes over need not repeat.

    checked: Trials that are right.
    points: Problems and M that have been measured.
    """

    checked: set[Trial] = field(default_factory=set)
    points: set[tuple[Gemm, int]] = field(default_factory=set)


def measure(campaign: Campaign, done: Progress) -> Iterator[Event]:
    """Check every trial of a campaign, then let them compete at every shape and M; spare what is done."""
    device = get_device(campaign.device)
    entries: dict[Trial, Any] = {}
    yield from _check(campaign, device, done, entries)
    for gemm in campaign.problems:
        left = [m for m in campaign.tokens if (gemm, m) not in done.points]
        yield Weights(gemm)
        bench = Bench(gemm, device, entries, *WORTH_TRYING[campaign.random]) if left else None
        for m in left:
            assert bench is not None
            yield from bench.contest(m)
            yield PointDone(gemm, m)


def _check(
    campaign: Campaign, device: TileDevice, done: Progress, entries: dict[Trial, Any]
) -> Iterator[Event]:
    """Load every trial and compare its product at a small shape with float64."""
    import torch

    gemm = small(campaign.problems[0])
    weight, packed = _weight(gemm, device, gemm.n)
    dense = weight.dequantize("float64")
    for trial in campaign.trials:
        yield Begin(trial)
        try:
            entry = library.load_module(trial.library, family_of(device))[trial.entry]
            error = 0.0 if trial in done.checked else _error(gemm, entry, packed, dense, trial)
        except RuntimeError as failure:
            torch.cuda.synchronize()  # raises again if the context is lost
            yield Dropped(trial, f"does not run: {str(failure)[:200]}")
            continue
        if error <= largest_error(gemm):
            entries[trial] = entry
            yield Checked(trial)
        else:
            yield Dropped(trial, f"is wrong: relative error {error:.2e}")


def checked_entries(campaign: Campaign, device: TileDevice) -> dict[Trial, Any]:
    """Return the loaded trials of a campaign that are right."""
    entries: dict[Trial, Any] = {}
    for _ in _check(campaign, device, Progress(), entries):
        pass
    return entries


def small(gemm: Gemm) -> Gemm:
    """Return the problem at the extents at which kernels are checked."""
    n, k = CHECKED
    return replace(gemm, n=n, k=k, group_size=gemm.group_size if gemm.group_size < gemm.k else k)


def _error(
    gemm: Gemm, entry: Any, packed: Sequence[torch.Tensor], dense: torch.Tensor, trial: Trial
) -> float:
    import torch

    assert isinstance(trial.schedule, GpuSchedule)
    x = activations(gemm, trial.schedule.tile_m + 5)
    y = torch.full((len(x), gemm.columns), float("nan"), dtype=torch_dtype(gemm.output), device="cuda")
    entry(x, *packed, y)
    exact = x.double() @ dense.t()
    error = float((y.double() - exact).norm() / exact.norm())
    return error if math.isfinite(error) else math.inf


def activations(gemm: Gemm, m: int) -> torch.Tensor:
    """Draw A[m, K] on the GPU; weights of one sign meet activations of one sign, so sums do not cancel."""
    import torch

    element = get_type(gemm.weight).element_type
    values = torch.randn(m, gemm.k, device="cuda", generator=torch.Generator("cuda").manual_seed(m))
    if gemm.zero == "none" and (element.minimum >= 0 or element.maximum <= 0):
        values = values.abs()
    if gemm.activation == "int8":
        return (values * 40).round().clamp(-127, 127).to(torch.int8)
    return values.to(torch_dtype(gemm.activation))


def _weight(gemm: Gemm, device: TileDevice, rows: int) -> tuple[Any, list[torch.Tensor]]:
    """Return a random weight of ``rows`` rows, quantized, and its packed arrays."""
    import torch

    element = get_type(gemm.weight).element_type
    values = torch.randn(rows, gemm.k, device="cuda", generator=torch.Generator("cuda").manual_seed(rows))
    values *= 0.05
    if gemm.zero == "none" and (element.minimum >= 0 or element.maximum <= 0):
        values = values.abs() * (1 if element.minimum >= 0 else -1)
    options: dict[str, Any] = {}
    if element.elem_bits <= 8:
        options["scale_type"] = "bfloat16" if gemm.activation == "bfloat16" else None
    if gemm.scale:
        options["group_size"] = gemm.group_size
    if gemm.power_scales:
        options["scale_type"] = "e8m0"
    if gemm.zero != "none":
        options["zero"] = gemm.zero
    weight = quantize(values, gemm.weight, **options)
    return weight, pack(replace(gemm, n=rows), device, weight).tensors


def large_weight(gemm: Gemm, device: TileDevice) -> list[torch.Tensor]:
    """Return packed arrays of the problem's extents; where N allows, a block of rows repeats along N.

    Which axis of an array runs along N shows in how its shape grows from one block to two.
    """
    if gemm.n % ROW_BLOCK:
        return _weight(gemm, device, gemm.n)[1]
    _, once = _weight(gemm, device, ROW_BLOCK)
    _, twice = _weight(gemm, device, 2 * ROW_BLOCK)
    times, arrays = -(-gemm.n // ROW_BLOCK), []
    for block, pair in zip(once, twice, strict=True):
        along_n = [index for index in range(block.dim()) if block.shape[index] != pair.shape[index]]
        repeats = [times if index in along_n else 1 for index in range(block.dim())]
        arrays.append(_repeat(block, repeats))
    return arrays


def _repeat(block: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
    """Repeat by bytes: torch repeats no unsigned words on a GPU."""
    import torch

    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[block.dtype.itemsize]
    return block.view(kind).repeat(*repeats).view(block.dtype)


class Bench:
    """One problem with its weights on the GPU, on which trials compete.

    gemm, device: The problem.
    entries: Loaded trials.
    trust, most: See `WORTH_TRYING`.
    """

    def __init__(
        self, gemm: Gemm, device: TileDevice, entries: dict[Trial, Any], trust: float, most: int
    ) -> None:
        import torch

        self.gemm, self.device, self.trust, self.most = gemm, device, trust, most
        self.entries = {t: e for t, e in entries.items() if is_legal(gemm, device, _gpu(t))}
        first = large_weight(gemm, device)
        copies = math.ceil(ROTATED_BYTES / sum(array.nbytes for array in first))
        self.weights = [first] + [[a.clone() for a in first] for _ in range(max(1, copies))]
        self.output = torch_dtype(gemm.output)
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def contest(self, m: int) -> Iterator[Event]:
        """Time what is worth trying at M = ``m``, then the finalists in turns."""
        import torch

        x = activations(self.gemm, m)
        y = torch.empty((m, self.gemm.columns), dtype=self.output, device="cuda")
        graphs, quick = {}, {}
        for trial in self._worth_trying(m):
            yield Begin(trial)
            graphs[trial] = self._graph(trial, x, y)
            quick[trial] = _median(_seconds(*graphs[trial], QUICK_REPEATS))
            yield self._timed(m, trial, quick[trial], final=False)
        limit = IN_REACH * min(quick.values(), default=0.0)
        finalists = [t for t in sorted(quick, key=lambda t: quick[t]) if quick[t] <= limit][:FINALISTS]
        times: dict[Trial, list[float]] = {trial: [] for trial in finalists}
        length = max((quick[trial] * graphs[trial][1] for trial in finalists), default=1.0)
        for _ in range(max(3, min(FINAL_REPEATS, int(FINAL_SECONDS / length)))):
            for trial in finalists:
                times[trial] += _seconds(*graphs[trial], 1)
        for trial, seconds in times.items():
            yield self._timed(m, trial, _median(seconds), final=True)

    def _timed(self, m: int, trial: Trial, seconds: float, *, final: bool) -> Timed:
        row = Measurement(self.gemm.n, self.gemm.k, m, trial.schedule, seconds)
        return Timed(self.gemm, row, final)

    def _worth_trying(self, m: int) -> list[Trial]:
        predicted = {
            trial: predict(self.gemm, self.device, trial.schedule, m).seconds for trial in self.entries
        }
        limit = self.trust * min(predicted.values(), default=0.0)
        ranked = sorted(predicted, key=lambda trial: predicted[trial])
        return [trial for trial in ranked if predicted[trial] <= limit][: self.most]

    def _graph(self, trial: Trial, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, int]:
        """Capture the launches of one trial; return the graph and how many launches it holds."""
        import torch

        entry = self.entries[trial]
        expected = predict(self.gemm, self.device, trial.schedule, len(x)).seconds
        count = min(len(self.weights), max(2, int(GRAPH_SECONDS / expected)))
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            entry(x, *self.weights[0], y)
        graph = torch.cuda.CUDAGraph()
        with recorded(graph, stream=self.stream):
            for weight in self.weights[:count]:
                entry(x, *weight, y)
        graph.replay()
        return graph, count


def _gpu(trial: Trial) -> GpuSchedule:
    assert isinstance(trial.schedule, GpuSchedule)
    return trial.schedule


def _seconds(graph: Any, count: int, repeats: int) -> list[float]:
    """Return the seconds per launch of each of ``repeats`` replays."""
    import torch

    events = [
        [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        for _ in range(repeats)
    ]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e-3 / count for begin, end in events]


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values))
