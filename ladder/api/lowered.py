"""The stages of a compiled operator: TIR, source text, machine code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from ladder.api.evidence import Evidence, gather, report_of
from ladder.ir import gemm_graph
from ladder.ir.gemm import Gemm
from ladder.runtime.build import Kernel
from ladder.runtime.compile import Request, obtain, plan_for, serving, tuning_database
from schedules.cpu_policy import tile_program
from schedules.schedule import GpuSchedule, Plan, Schedule, TransformList
from targets import TileDevice
from tile_types.errors import DeviceError, unknown_name

STAGES: Mapping[str, tuple[str, ...]] = {
    "llvm": ("ir", "schedule", "tile", "tir", "llvm", "asm"),
    "cuda": ("ir", "schedule", "tir", "cuda", "ptx", "sass"),
    "rocm": ("ir", "schedule", "tir", "asm"),
}
"""Kind of device -> the stages of a kernel that can be shown; some kernels of CPUs have no tile program."""


def require_stage(stage: str, device: TileDevice, known: Sequence[str]) -> None:
    """Raise UnknownNameError unless a stage is among those that are known."""
    if stage not in known:
        raise unknown_name(f"stage of {device.name}", stage, known)


def stage_of(kernel: Kernel, stage: str, device: TileDevice) -> str:
    """Return a stage that a build kept, or that is made from one, as text.

    Raises UnknownNameError if this kernel has no such stage, MissingToolError if a tool is not installed.
    """
    from ladder.lower.build import derive_stage

    sources = kernel.sources()
    text = sources.get(stage) or derive_stage(stage, sources, device)
    if text is None:
        others = [name for name in STAGES[device.kind] if name != stage]
        raise unknown_name(f"stage of this kernel for {device.name}", stage, others)
    return str(text)


@dataclass(frozen=True)
class Lowered:
    """An operator on one target.

    Parameters
    ----------
    request
        Problem, target and perhaps a plan.
    """

    request: Request

    @property
    def plan(self) -> Plan:
        """Which schedule serves which M: once kernels are compiled, none that spills."""
        return self._built[0] if "_built" in vars(self) else self._chosen

    @cached_property
    def _chosen(self) -> Plan:
        return plan_for(self.request)

    @cached_property
    def _built(self) -> tuple[Plan, list[Kernel]]:
        return obtain(self.request)

    @property
    def kernels(self) -> list[Kernel]:
        """The compiled kernel of each entry of the plan."""
        return self._built[1]

    def kernel(self, m: int = 1) -> Kernel:
        """Return the kernel that serves M = ``m``."""
        plan, kernels = self._built
        return kernels[plan.index(m)]

    def source(self, stage: str, m: int = 1) -> str:
        """Return one stage as text.

        Parameters
        ----------
        stage
            ``"ir"``, ``"schedule"``, ``"tir"``; ``"cuda"``, ``"ptx"``, ``"sass"`` for GPUs of NVIDIA;
            ``"asm"`` for those of AMD; ``"tile"`` (the tile program), ``"llvm"`` and ``"asm"`` for CPUs.
        m
            Rows of the activations: chooses the kernel.

        Raises
        ------
        UnknownNameError
            If the target has no such stage; the message names those it has.
        MissingToolError
            If the stage needs a tool that is not installed.
        """
        target = self.request.target
        require_stage(stage, target, STAGES[target.kind])
        if stage == "ir":
            return str(gemm_graph(self.request.gemm))
        if stage == "schedule":
            return str(self.plan)
        schedule = self.plan.schedule_for(m)
        if stage == "tile" and isinstance(schedule, TransformList):
            return str(tile_program(self.request.gemm, target, schedule))
        return stage_of(self.kernel(m), stage, target)

    def serving(self, m: int) -> Lowered:
        """Return the operator with only the schedule that serves M = ``m``, for any M; compiles it."""
        return Lowered(serving(self.request, m))

    def evidence(self, m: int = 1) -> Evidence:
        """Return what the kernel that serves M = ``m`` takes and how long it should; compiles it.

        Raises
        ------
        DeviceError
            If the target is no GPU.
        MissingToolError, CompilerError
            If the kernel cannot be compiled.
        """
        from ladder.lower.build import derive_stage
        from schedules.cost_model import predict

        device = self.request.target
        if not device.is_gpu:
            raise DeviceError(f"evidence is of GPU kernels, not of those for {device.name}")
        served = self.serving(m)
        schedule, kernel = served.plan.schedule_for(m), served.kernel(m)
        sources = kernel.sources()
        cost = predict(self.request.gemm, device, schedule, m)
        return gather(
            device, report_of(kernel), sources, cost, partial(derive_stage, sources=sources, device=device)
        )

    def explain(self) -> str:
        """Return which schedule serves which M, what it is predicted to cost, and how weights travel."""
        from schedules.cost_model import predict
        from schedules.policy import typical_m

        gemm, device = self.request.gemm, self.request.target
        measured = self._measured()
        lines = [f"{gemm}", f"on {device.name}: {device.title}", ""]
        for limit, schedule in self.plan.entries:
            m = typical_m(limit)
            cost = predict(gemm, device, schedule, m)
            title = schedule.instruction if isinstance(schedule, TransformList) else schedule
            lines.append(f"M <= {limit}: {title}")
            lines.append(f"  predicted at M={m}: {cost.seconds * 1e6:.1f} µs")
            if m in measured.get(schedule, {}):
                lines[-1] += f", measured: {measured[schedule][m] * 1e6:.1f} µs"
            lines += [f"  {step}" for step in _steps(gemm, schedule)]
        return "\n".join(lines)

    def _measured(self) -> dict[Schedule, dict[int, float]]:
        """Return seconds by schedule and M, as the tuning database has them of this very shape and device."""
        gemm = self.request.gemm
        found: dict[Schedule, dict[int, float]] = {}
        for row in tuning_database().measurements(self.request.target, gemm):
            if (row.n, row.k) == (gemm.n, gemm.k) and not row.device:
                found.setdefault(row.schedule, {})[row.m] = row.seconds
        return found


def _steps(gemm: Gemm, schedule: Schedule) -> list[str]:
    """Return the lines that say how a schedule brings tiles to the instructions."""
    from schedules.policy import schedule_transform

    if isinstance(schedule, GpuSchedule):
        return list(schedule_transform(gemm, schedule))
    return str(schedule).splitlines()
