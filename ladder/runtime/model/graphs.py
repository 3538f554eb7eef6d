"""CUDA graphs of a frame: all launches of a plan replayed by one call.

Arguments that are the same tensors at the same address from call to call (weights) are read where they are;
the others are copied into buffers of the graph. What the plan writes into an argument is written there.
Other results are copied out, and lie as they lay: the next replay overwrites them. A graph is recorded only
where the call before tells that the launches which it saves take longer than these copies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false as _is_dense

from ladder.runtime import peers
from ladder.runtime.compile import target_of
from ladder.runtime.model.arguments import lies_once, span_of
from ladder.runtime.model.bound_plan import BoundPlan
from ladder.runtime.recording import recorded
from targets import get_device

ALIGNMENT = 16
"""Bytes; those of the longest element."""


LISTED = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
"""Types of which a device copies many tensors in one launch."""

MOST_LISTED = 8192
"""Elements of a tensor that is copied with others in one launch: of it few blocks would copy more."""


class Lent(NamedTuple):
    """A result that lies in the memory of an argument.

    result: As recorded.
    argument: Its position.
    strides: The argument's, in the recording.
    offset: First element, counted from the argument's.
    """

    result: torch.Tensor
    argument: int
    strides: tuple[int, ...]
    offset: int


class Replayed:
    """Makes tensors of a call of what a graph has written.

    results: Of the recording; the next replay overwrites them.
    wanted: Positions of those that are asked for.
    given: Arguments of the recording.
    """

    def __init__(
        self, results: Sequence[Any] = (), wanted: Collection[int] = (), given: Sequence[Any] = ()
    ) -> None:
        self.results = list(results)
        self.alone: list[tuple[int, torch.Tensor]] = []
        """Results that a plain copy serves."""
        self.listed: list[tuple[list[int], list[torch.Tensor]]] = []
        """Those of one type that are copied at once, with their positions."""
        self.together: list[tuple[torch.Tensor, list[tuple[int, torch.Tensor, int]]]] = []
        """Bytes, and results that lie in them with their first elements."""
        self.lent: dict[int, Lent] = {}
        arguments = {_memory(value): at for at, value in reversed([*enumerate(given)]) if _has_memory(value)}
        groups: dict[int, list[int]] = {}
        for at in sorted(wanted):
            result = results[at]
            if not _has_memory(result):
                self.alone.append((at, result))
            elif _memory(result) in arguments:
                argument = arguments[_memory(result)]
                whole = given[argument]
                offset = result.storage_offset() - whole.storage_offset()
                self.lent[at] = Lent(result, argument, whole.stride(), offset)
            else:
                groups.setdefault(_memory(result), []).append(at)
        for group in groups.values():
            if len(group) == 1 and _is_dense(results[group[0]]):
                self.alone.append((group[0], results[group[0]]))
            else:
                self.together.append(_bytes_of([(at, results[at]) for at in group]))
        for dtype in LISTED:
            places = [at for at, result in self.alone if _is_listed(result) and result.dtype == dtype]
            if len(places) > 1:
                self.listed.append((places, [results[at] for at in places]))
                self.alone = [(at, result) for at, result in self.alone if at not in places]

    def fits(self, values: Sequence[Any]) -> bool:
        """Say whether results that lie in arguments can be taken from those of a call."""
        return all(
            values[lent.argument].stride() == lent.strides
            and values[lent.argument].dtype == lent.result.dtype
            for lent in self.lent.values()
        )

    def of(self, values: Sequence[Any]) -> list[Any]:
        """Return the results by position, None for what is not wanted; `values` are a call's arguments."""
        found: list[Any] = [None] * len(self.results)
        for at, result in self.alone:
            found[at] = result.clone()
        for places, listed in self.listed:
            copies = [torch.empty_like(result) for result in listed]
            torch._foreach_copy_(copies, listed)
            for at, copy in zip(places, copies, strict=True):
                found[at] = copy
        for memory, results in self.together:
            copy = memory.clone()
            for at, result, first in results:
                found[at] = _like(result, _typed(copy, result), first)
        for at, lent in self.lent.items():
            whole = values[lent.argument].detach()
            found[at] = _like(lent.result, whole, whole.storage_offset() + lent.offset)
        return found


def lying_as(value: torch.Tensor) -> torch.Tensor:
    """Return a copy with the strides of a tensor; a dense one where some of its elements are one."""
    if _is_dense(value) or not lies_once(value) or not _has_memory(value):
        return value.clone()
    memory, [(_, _, first)] = _bytes_of([(0, value)])
    return _like(value, _typed(memory.clone(), value), first)


def _bytes_of(
    group: Sequence[tuple[int, torch.Tensor]],
) -> tuple[torch.Tensor, list[tuple[int, torch.Tensor, int]]]:
    """Return the bytes that results in one memory span, and each result with its first element in these."""
    _, one = group[0]
    spans = [span_of(value) for _, value in group]
    start, end = min(first for first, _ in spans), max(last for _, last in spans)
    start -= (start - _memory(one)) % ALIGNMENT
    memory = torch.empty(0, dtype=torch.uint8, device=one.device)
    memory.set_(one.untyped_storage(), start - _memory(one), (end - start,), (1,))
    placed = zip(spans, group, strict=True)
    return memory, [(at, value, (first - start) // value.itemsize) for (first, _), (at, value) in placed]


def _typed(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return bytes as elements of a tensor's type."""
    return memory[: len(memory) // like.itemsize * like.itemsize].view(like.dtype)


def _like(value: torch.Tensor, memory: torch.Tensor, first: int) -> torch.Tensor:
    """Return the tensor in another memory that lies as a value does, from an element on."""
    found = memory.as_strided(value.shape, value.stride(), first)
    found = found.conj() if value.is_conj() else found
    return torch._neg_view(found) if value.is_neg() else found


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0


def _is_listed(value: Any) -> bool:
    return _has_memory(value) and value.numel() <= MOST_LISTED and not value.is_conj() and not value.is_neg()


def _launches(values: Sequence[torch.Tensor]) -> int:
    """Return how many launches copy tensors, of which one copies all small ones."""
    large = sum(value.numel() > MOST_LISTED for value in values)
    return large + (large < len(values))


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


log = logging.getLogger("ladder.model")

COPIED = 64 << 20
"""Bytes of arguments and results that a graph for one of many sets of sizes may hold."""

MODE = "thread_local"
"""A recording forbids its own thread alone what cannot be recorded: others, as NCCL's, go on meanwhile."""

WARM = 2
"""Calls before a graph is recorded: the first loads kernels, the second shows which arguments stay."""

CALLS_PER_RECORDING = 4
"""Calls for each recording, before there is another: arguments that never stay are not recorded each time."""


BUSY_RATIO = 1.25
"""How many times as long as the host a device works that is behind: it waits for no launch."""

LAUNCH = 50e-6
"""Seconds that a step takes the host at most: in what is longer it waited, for memory or another process."""

OF_HOST, OF_DEVICE = 0.5, 0.05
"""Share of a call's time that copies may take: of one that waits for launches, and of one that does not."""


class Stopwatch:
    """Times some steps on a device: what launching them takes the host, and all of them the device."""

    def __init__(self, where: torch.device, steps: int) -> None:
        self._steps, self._longest = steps, steps * LAUNCH
        self._stream = torch.cuda.current_stream(where)
        self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._bandwidth = get_device(target_of(where)).layer("dram").bandwidth
        self._host = 0.0

    def __enter__(self) -> None:
        self._begin.record(self._stream)
        self._host = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._host = min(time.perf_counter() - self._host, self._longest)
        self._end.record(self._stream)

    def allows(self, copied: int, copies: int) -> bool:
        """Say whether a graph of the same would be faster that copies so many bytes by so many launches.

        A graph takes the host as long as a launch.
        """
        if self._steps <= copies + 1:
            return False
        self._end.synchronize()
        copying, device = 2 * copied / self._bandwidth, self._begin.elapsed_time(self._end) * 1e-3
        return copying <= (OF_DEVICE * device if device > BUSY_RATIO * self._host else OF_HOST * self._host)


_with_collectives: WeakSet[Replay] = WeakSet()
"""Recordings that hold a group's connections: NCCL ends a group only when none is left."""


def release_collectives() -> None:
    """Drop all CUDA graphs with collectives, and memory shared with peers, so that groups can be destroyed.

    Calls record anew.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    for replay in list(_with_collectives):
        replay.graph, replay.listed, replay.alone, replay.replayed = None, [], [], Replayed()
    peers.forget()


class Replay:
    """Runs a plan, as a CUDA graph from the third call on.

    step_by_step: Runs all steps with arguments; returns the plan's outputs.
    owner: The plan, bound to arguments.
    """

    def __init__(self, step_by_step: Callable[[Sequence[Any]], list[Any]], owner: BoundPlan) -> None:
        self.step_by_step, self.owner = step_by_step, owner
        self.calls = self.recordings = 0
        self.generation = 0
        self.refused = ""
        self.stopwatch: Stopwatch | None = None
        """Of the call before the first recording; None if that one was part of a graph of the program's."""
        self.given = self.given_by = 0
        """Bytes of its results, and launches that copy them."""
        self.graph: Any = None
        self.listed: list[tuple[int, torch.Tensor]] = []
        """Arguments and their buffers in the graph, of those that one launch copies."""
        self.alone: list[tuple[int, torch.Tensor]] = []
        """Those of larger ones."""
        self.replayed = Replayed()

    def run(self, values: Sequence[Any], generation: int) -> list[Any]:
        """Run with arguments, those of a generation; returns the graph's outputs."""
        self.calls += 1
        if self.graph is None or generation != self.generation:
            if self.calls == WARM and not torch.cuda.is_current_stream_capturing():
                return self._timed(values)
            if self.refused or self.calls <= max(WARM, CALLS_PER_RECORDING * self.recordings):
                return self.step_by_step(values)
            self.record(values, self.owner.arguments.moving)
            self.generation = generation
            if self.graph is None:
                return self.step_by_step(values)
        if not self.replayed.fits(values):
            return self.step_by_step(values)
        if self.listed:
            torch._foreach_copy_([copy for _, copy in self.listed], [values[at] for at, _ in self.listed])
        for at, copy in self.alone:
            copy.copy_(values[at])
        self.graph.replay()
        found = self.replayed.of(values)
        for at, argument in self.owner.written.items():
            found[at] = values[argument]
        return found

    def _timed(self, values: Sequence[Any]) -> list[Any]:
        launches = [step for step in self.owner.plan.steps if step.part.kind != "view" and not step.constant]
        self.stopwatch = Stopwatch(self.owner.where, len(launches))
        with self.stopwatch:
            given = self.step_by_step(values)
        results = [given[at] for at in self.owner.wanted - self.owner.written.keys()]
        self.given, self.given_by = sum(result.nbytes for result in results), _launches(results)
        return given

    def record(self, values: Sequence[Any], moving: Collection[int]) -> None:
        """Record the steps; what cannot be recorded runs step by step from then on."""
        moved = sum(values[at].nbytes for at in moving) + self.given
        if self.owner.names and moved > COPIED:
            self.graph = None
            self.refused = f"{moved} bytes of arguments that change and of results, for one of many sizes"
            return
        copies = _launches([values[at] for at in moving]) + self.given_by
        if self.stopwatch is not None and not self.stopwatch.allows(moved, copies):
            self.graph, self.refused = None, f"{copies} copies of {moved} bytes take longer than launches"
            return
        static = [lying_as(value) if at in moving else value for at, value in enumerate(values)]
        buffers = [(at, static[at]) for at in sorted(moving)]
        self.listed = [(at, buffer) for at, buffer in buffers if buffer.numel() <= MOST_LISTED]
        self.alone = [(at, buffer) for at, buffer in buffers if buffer.numel() > MOST_LISTED]
        self.graph = None
        self.recordings += 1
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize(self.owner.where)
            with recorded(graph, self.owner.where, capture_error_mode=MODE):
                results = self.step_by_step(static)
        except RuntimeError as error:
            self.refused = str(error)
            log.warning("no CUDA graph of a plan: %s", error)
            return
        self.graph = graph
        self.replayed = Replayed(results, self.owner.wanted - self.owner.written.keys(), static)
        if not self.owner.plan.is_pure():
            _with_collectives.add(self)
