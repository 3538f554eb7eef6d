"""Schedules: frozen values that print, parse and replay.

A schedule says how one kernel is tiled and pipelined on one kind of device. It
holds no shapes, so one schedule serves every shape whose tiles it fits. It is a list of
transforms where its family is ported to tile programs (CPUs), else a `GpuSchedule`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

from schedules.instructions import INSTRUCTIONS
from schedules.transforms import Transform, Use, parse_transform
from tile_types.errors import ParseError, ScheduleError

GPU_PIPELINES = (
    "gemv",
    "digits",
    "mma",
    "wgmma",
    "tcgen05",
    "mfma",
    "mfma_groups",
    "dot",
    "wmma",
    "wmma_split",
    "dot32",
)
"""Skeletons of GPU kernels: from ``mfma`` on AMD's, the others NVIDIA's."""

CLASSES: Mapping[str, str] = {
    "GpuSchedule": "schedules.schedule",
    "AttentionSchedule": "schedules.attention",
    "WaveAttentionSchedule": "schedules.wave_attention",
    "ScaledSchedule": "schedules.scaled",
    "WaveScaledSchedule": "schedules.wave_scaled",
}
"""Class of schedules with fields -> its module."""


def check(condition: bool, message: str) -> None:
    """Raise `ScheduleError` unless ``condition`` holds."""
    if not condition:
        raise ScheduleError(message)


def passes(check_legal: Callable[..., object], *arguments: object) -> bool:
    """Whether a check accepts its arguments: it raises no `ScheduleError`."""
    try:
        check_legal(*arguments)
    except ScheduleError:
        return False
    return True


@dataclass(frozen=True)
class Schedule:
    """Base of all schedules; ``str()`` gives text that `parse_schedule` reads back."""

    def __str__(self) -> str:
        body = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
        return f"{type(self).__name__}({body})"


@dataclass(frozen=True)
class GpuSchedule(Schedule):
    """How a GPU kernel walks ``out[M,N] = A[M,K] · B[N,K]ᵀ``.

    pipeline: The skeleton that hosts the kernel, one of `GPU_PIPELINES`.
    tile_m, tile_n, tile_k: Activation rows, weight rows and K elements that one block handles per step.
    stages: Shared-memory buffers in flight.
    warps: Warps that compute (a wgmma warpgroup is four); of ``tcgen05``, those that decode.
    split_k: Slices of K that different blocks (or, for ``gemv`` and ``digits``, warps of one block) sum.
    persistent: Whether a fixed grid walks all tiles.
    raster: Tiles of N visited before M advances (L2 reuse).
    placement: Where scales apply: on the decoded ``"operand"`` or on the ``"accumulator"``.
    warp_rows: Weight rows of a ``gemv``, ``digits`` or ``dot`` warp: 16, or 32 or 64 that share the fragments
        of A. With 32, an ``mfma`` block has so many for each wave of a slice of K, in place of ``tile_n``.
    cluster: Blocks of a cluster: along N, that load each tile of A once between them (TMA multicast,
        ``wgmma``), or that split K (``gemv``).
    stream_k: Whether a persistent grid shares its last tiles evenly, cutting K wherever a share ends.
    tails: Whether stream-K cuts off the last turns of the tiles of the last round alone, so that all blocks
        keep step in K: for operands that L2 does not hold.
    pair: Whether the two blocks of a cluster multiply together, each with half of the activation rows in its
        shared memory (``tcgen05``, ``cta_group::2``).
    deal: Slices to which ``wgmma`` deals K in runs of 128 columns, as ``gemv`` does: ``split_k`` blocks, as
        many or one, sum each apart and add them in order.
    """

    pipeline: str
    tile_m: int
    tile_n: int = 64
    tile_k: int = 64
    stages: int = 4
    warps: int = 4
    split_k: int = 1
    persistent: bool = False
    raster: int = 8
    placement: str = "operand"
    warp_rows: int = 16
    cluster: int = 1
    stream_k: bool = False
    pair: bool = False
    deal: int = 1
    tails: bool = False

    def __post_init__(self) -> None:
        problem = next(self._problems(), "")
        if problem:
            raise ScheduleError(problem)

    def __hash__(self) -> int:
        """Return the hash of the fields, which plans ask for thousands of times: it is kept."""
        found: int | None = self.__dict__.get("_hash")
        if found is None:
            found = hash(tuple(self.__dict__.values()))
            object.__setattr__(self, "_hash", found)
        return found

    def __getstate__(self) -> dict[str, object]:
        """Leave the hash behind: another process has others."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    def varied(self, **fields: object) -> GpuSchedule:
        """Return a copy with other values of fields that a rule allows: unlike `replace`, none is checked."""
        other = object.__new__(GpuSchedule)
        other.__dict__.update(self.__dict__, **fields)
        other.__dict__.pop("_hash", None)
        return other

    def _problems(self) -> Iterator[str]:
        """Yield what is no schedule of any pipeline."""
        if self.pipeline not in GPU_PIPELINES:
            yield f"unknown GPU pipeline {self.pipeline!r}"
        if self.placement not in ("operand", "accumulator"):
            yield f"unknown scale placement {self.placement!r}"
        if self.warp_rows not in (16, 32, 64):
            yield f"a warp serves 16, 32 or 64 rows, got {self.warp_rows}"
        least = min(self.tile_m, self.stages, self.warps, self.split_k, self.raster, self.cluster, self.deal)
        if least < 1:
            names = ("tile_m", "stages", "warps", "split_k", "raster", "cluster", "deal")
            yield next(f"{n} must be at least 1, got {least}" for n in names if getattr(self, n) == least)
        if self.tile_n % 64 or self.tile_n < 1:
            yield f"tile_n must be a multiple of the packed tile's 64 rows, got {self.tile_n}"
        if self.tile_k % 64 or self.tile_k < 1:
            yield f"tile_k must be a multiple of the packed tile's 64 columns, got {self.tile_k}"


@dataclass(frozen=True)
class TransformList(Schedule):
    """A schedule that is nothing but its transforms: one line each, applied in order.

    transforms: What `schedules.transforms.apply_all` applies to a block graph.
    """

    transforms: tuple[Transform, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.transforms))

    @property
    def instruction(self) -> str:
        """The instruction that multiplies; empty if no transform says so."""
        return next((step.instruction for step in self.transforms if isinstance(step, Use)), "")

    @property
    def pipeline(self) -> str:
        """The skeleton that emits the instruction's nest.

        Raises ScheduleError if no instruction is used, or an unknown one.
        """
        check(self.instruction in INSTRUCTIONS, f"use one of {', '.join(INSTRUCTIONS)} for matmul")
        return INSTRUCTIONS[self.instruction].skeleton


@dataclass(frozen=True)
class Plan:
    """Which schedule serves which M: ``entries`` are (largest M, schedule), ascending.

    The last entry serves every larger M as well.
    """

    entries: tuple[tuple[int, Schedule], ...]

    def __post_init__(self) -> None:
        check(len(self.entries) > 0, "a plan needs at least one schedule")
        limits = [limit for limit, _ in self.entries]
        check(limits == sorted(set(limits)), f"plan limits must ascend, got {limits}")

    def index(self, m: int) -> int:
        """Return the position of the entry that serves M = ``m``."""
        for position, (limit, _) in enumerate(self.entries):
            if m <= limit:
                return position
        return len(self.entries) - 1

    def schedule_for(self, m: int) -> Schedule:
        """Return the schedule that serves M = ``m``."""
        return self.entries[self.index(m)][1]

    def __str__(self) -> str:
        return "\n".join(f"m<={limit}:{_indented(str(schedule))}" for limit, schedule in self.entries)


def _indented(text: str) -> str:
    """Return one line after a blank, several below each other."""
    lines = text.splitlines()
    return f" {text}" if len(lines) == 1 else "".join(f"\n  {line}" for line in lines)


def parse_schedule(text: str) -> Schedule:
    """Read back what ``str(schedule)`` printed: a class of `CLASSES` with its fields, or a transform a line.

    Raises ParseError if the text is neither.
    """
    match = re.fullmatch(r"\s*(\w+)\((.*)\)\s*", text, re.DOTALL)
    if match is None:
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            raise ParseError("an empty text is no schedule")
        return TransformList(tuple(map(parse_transform, lines)))
    try:
        kind: type[Schedule] = getattr(import_module(CLASSES[match[1]]), match[1])
        return kind(**_fields_in(match[2], kind))
    except (SyntaxError, ValueError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise ParseError(
            f"cannot parse schedule {text[:400]!r}: {error or 'it is nested too deep'}"
        ) from error


def _fields_in(text: str, kind: type[Schedule]) -> dict[str, Any]:
    """Return the values of ``name=value, ...``; raises ValueError unless these are fields, each once."""
    call = ast.parse(f"f({text})", mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError("it has other than named fields")
    values = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    types = {field.name: field.type for field in fields(kind)}
    wrong = [name for name, value in values.items() if type(value).__name__ != types.get(name)]
    if wrong or len(values) < len(call.keywords):
        raise ValueError(f"{wrong[0]} is no field of that type" if wrong else "a field occurs twice")
    return values


def parse_plan(text: str) -> Plan:
    """Read back what ``str(plan)`` printed.

    Raises ParseError if the text is no plan.
    """
    parts = re.split(r"^m<=(\d{1,18}):", text.strip(), flags=re.MULTILINE)
    if parts[0].strip() or len(parts) < 3:
        raise ParseError(f"not a plan: {text[:80]!r}; expected 'm<=LIMIT: schedule' for every range of M")
    limits, texts = parts[1::2], [part.strip() for part in parts[2::2]]
    schedules = {text: parse_schedule(text) for text in dict.fromkeys(texts)}  # ranges apart share some
    return Plan(tuple((int(m), schedules[text]) for m, text in zip(limits, texts, strict=True)))
