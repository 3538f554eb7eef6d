"""Schedules: frozen values that print, parse and replay.

A schedule says how one kernel is tiled and pipelined on one kind of device. It
holds no shapes, so one schedule serves every shape whose tiles it fits.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from tile_types.errors import ParseError, ScheduleError

GPU_PIPELINES = ("gemv", "digits", "mma", "wgmma", "mfma", "mfma32", "dot")
"""Skeletons of GPU kernels: ``mfma`` and ``dot`` on AMD, the others on NVIDIA."""


def check(condition: bool, message: str) -> None:
    """Raise `ScheduleError` unless ``condition`` holds."""
    if not condition:
        raise ScheduleError(message)


@dataclass(frozen=True)
class Schedule:
    """Base of all schedules; ``str()`` gives text that `parse_schedule` reads back."""

    def __str__(self) -> str:
        body = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
        return f"{type(self).__name__}({body})"


@dataclass(frozen=True)
class GpuSchedule(Schedule):
    """How a GPU kernel walks ``out[M,N] = A[M,K] · B[N,K]ᵀ``.

    Parameters
    ----------
    pipeline
        The skeleton that hosts the kernel, one of `GPU_PIPELINES`.
    tile_m, tile_n, tile_k
        Activation rows, weight rows and K elements that one block handles per step.
    stages
        Shared-memory buffers in flight.
    warps
        Warps that compute (a wgmma warpgroup is four).
    split_k
        Slices of K that different blocks (or, for ``gemv`` and ``digits``, warps of one block) sum.
    persistent
        Whether a fixed grid walks all tiles.
    raster
        Tiles of N visited before M advances (L2 reuse).
    placement
        Where scales apply: on the decoded ``"operand"`` or on the ``"accumulator"``.
    warp_rows
        Weight rows of a ``gemv``, ``digits`` or ``dot`` warp: 16, or 32 or 64 that share the fragments of A.
        With 32, an ``mfma`` block has so many for each wave of a slice of K, in place of ``tile_n``.
    cluster
        Blocks of a cluster: along N, that load each tile of A once between them (TMA multicast, ``wgmma``),
        or that split K (``gemv``).
    stream_k
        Whether a persistent grid shares its last tiles evenly, cutting K wherever a share ends.
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

    def __post_init__(self) -> None:
        check(self.pipeline in GPU_PIPELINES, f"unknown GPU pipeline {self.pipeline!r}")
        check(self.placement in ("operand", "accumulator"), f"unknown scale placement {self.placement!r}")
        check(self.warp_rows in (16, 32, 64), f"a warp serves 16, 32 or 64 rows, got {self.warp_rows}")
        for name in ("tile_m", "tile_n", "tile_k", "stages", "warps", "split_k", "raster", "cluster"):
            check(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        check(
            self.tile_n % 64 == 0,
            f"tile_n must be a multiple of the packed tile's 64 rows, got {self.tile_n}",
        )
        check(
            self.tile_k % 64 == 0,
            f"tile_k must be a multiple of the packed tile's 64 columns, got {self.tile_k}",
        )


@dataclass(frozen=True)
class CpuSchedule(Schedule):
    """How a CPU kernel walks ``out[M,N] = A[M,K] · B[N,K]ᵀ``.

    Parameters
    ----------
    core
        Name of the compute instruction of the device (``"avx512_bf16"``, ``"avx512_vnni"``,
        ``"amx_bf16"``, ``"amx_int8"``, ``"fma"``).
    tile_m, tile_n
        Rows of A and of B whose accumulators stay in registers.
    tile_k
        Elements of K decoded at a time.
    decode
        ``"register"`` decodes next to the multiply; ``"scratch"`` decodes a tile once into
        cache and reuses it for every row of A.
    """

    pipeline: ClassVar[str] = "cpu"
    core: str
    tile_m: int = 1
    tile_n: int = 16
    tile_k: int = 64
    decode: str = "register"

    def __post_init__(self) -> None:
        check(self.decode in ("register", "scratch"), f"unknown decode place {self.decode!r}")
        for name in ("tile_m", "tile_n", "tile_k"):
            check(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")


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
        return "\n".join(f"m<={limit}: {schedule}" for limit, schedule in self.entries)


SCHEDULE_KINDS: Mapping[str, type[Schedule]] = {"GpuSchedule": GpuSchedule, "CpuSchedule": CpuSchedule}


def parse_schedule(text: str) -> Schedule:
    """Read back what ``str(schedule)`` printed.

    Raises
    ------
    ParseError
        If the text is no schedule of a known kind.
    """
    match = re.fullmatch(r"\s*(\w+)\((.*)\)\s*", text, re.DOTALL)
    if match is None or match[1] not in SCHEDULE_KINDS:
        raise ParseError(f"not a schedule: {text!r}; expected one of {', '.join(SCHEDULE_KINDS)}(...)")
    try:
        call = ast.parse(f"f({match[2]})", mode="eval").body
        assert isinstance(call, ast.Call)
        values = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        return SCHEDULE_KINDS[match[1]](**values)
    except (SyntaxError, ValueError, TypeError) as error:
        raise ParseError(f"cannot parse schedule {text!r}: {error}") from error


def parse_plan(text: str) -> Plan:
    """Read back what ``str(plan)`` printed."""
    entries = []
    for line in text.strip().splitlines():
        match = re.fullmatch(r"m<=(\d+): (.*)", line.strip())
        if match is None:
            raise ParseError(f"not a line of a plan: {line!r}; expected 'm<=LIMIT: Schedule(...)'")
        entries.append((int(match[1]), parse_schedule(match[2])))
    return Plan(tuple(entries))
