"""Kernels of what `ladder superopt` found: built for the target, run or simulated, printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ladder.api.fused_check import draw_inputs, meaning_of, resized
from ladder.api.fused_trials import TOLERANCE, built, checked, loaded
from ladder.api.tensor_program import decoded
from ladder.cli.console import Progress, finite
from ladder.runtime.build import Kernel
from ladder.runtime.compile import runs_code_of, target_of
from ladder.runtime.fused import Fused
from ladder.runtime.trials import Trial, candidates_of
from ladder.superopt.generator import Report
from targets import TileDevice, get_device, host_cpu

COLUMNS = (
    *("kernel", "operators", "tiles", "schedule", "registers", "spills", "predicted us", "measured us"),
    *("error", "checked"),
)


@dataclass(frozen=True)
class Lowering:
    """One lowering of a found graph.

    trial: Graph, tiles, schedules, times and error.
    resources: What the device compiler reported, per kernel.
    checked: How the error was found: ``"run"``, ``"simulated at B=16, ..."`` or ``"not"``.
    findings: What the simulator reported.
    """

    trial: Trial
    resources: tuple[dict[str, int], ...]
    checked: str
    findings: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        """Whether nothing speaks against it."""
        error, most = self.trial.error, TOLERANCE[self.trial.lowering.operand]
        return not self.findings and (error is None or error <= most)


def run_kernels(report: Report, target: str, count: int, seed: int, step: Progress) -> list[Lowering]:
    """Build the best kernels and check them against float64.

    Those for this machine run, and are timed, at the program's sizes. The best for another GPU is simulated
    at a smaller size with the same tiles and schedules.

    Raises DeviceError, ScheduleError, MissingToolError if kernels cannot be made for the target.
    """
    device = get_device(target)
    step("ranking tiles and schedules")
    trials = built(candidates_of(report, device, count), device, count, step)
    where = _place(device)
    if where is not None:
        step("running")
        function, inputs = meaning_of(report.program), draw_inputs(report.program, where, seed)
        order = sorted(checked(loaded(trials, device), function, inputs), key=_speed)
        return [Lowering(trial, _resources(fused.kernels), "run") for trial, fused in order]
    step("simulating the best kernel")
    first, *rest = [Lowering(trial, _resources(compiled), "not") for trial, compiled in trials]
    return [_simulated(report, first, device, seed), *rest]


def _place(device: TileDevice) -> str | None:
    """Return torch's name of a device if it is here."""
    if device.name == host_cpu().name:
        return "cpu"
    import torch

    here = torch.cuda.is_available() and runs_code_of(target_of(torch.device("cuda")), device.name)
    return "cuda" if here else None


def _speed(pair: tuple[Trial, Fused]) -> tuple[bool, float]:
    return pair[0].measured is None, pair[0].measured or 0.0


def _resources(kernels: Sequence[Kernel]) -> tuple[dict[str, int], ...]:
    return tuple(dict(report) for kernel in kernels for report in kernel.manifest["resources"].values())


def _simulated(report: Report, kernel: Lowering, device: TileDevice, seed: int) -> Lowering:
    """Simulate a kernel at a few blocks and steps."""
    import torch

    from ladder.simulate.fused import simulate_fused, smaller

    trial = kernel.trial
    lowering = trial.lowering
    factors = smaller(lowering.graph, lowering.schedules, trial.factors)
    small, program = resized(trial, report.program, factors)
    inputs = draw_inputs(program, "cpu", seed)
    result = simulate_fused(small, device, inputs)
    expected = meaning_of(program)(*decoded(inputs, torch.float64)).numpy()
    sizes = ", ".join(f"{name}={size}" for name, size in program.sizes.items())
    error = result.relative_error(expected)
    return Lowering(
        replace(trial, error=error), kernel.resources, f"simulated at {sizes}",
        tuple(str(finding) for finding in result.findings),
    )  # fmt: skip


def kernels_json(kernels: Sequence[Lowering]) -> list[dict[str, Any]]:
    """Return what a report shows of kernels."""
    return [
        {
            **kernel.trial.as_json(), "error": finite(kernel.trial.error),
            "resources": list(kernel.resources),
            "operators": [step.label for step in kernel.trial.found.structure.steps],
            "checked": kernel.checked, "findings": list(kernel.findings), "right": kernel.right,
        }
        for kernel in kernels
    ]  # fmt: skip


def kernel_rows(kernels: Sequence[Lowering]) -> list[tuple[str, ...]]:
    """Return one row per kernel, fastest first."""
    return [
        (
            str(number), " ".join(step.label for step in kernel.trial.found.structure.steps),
            " ".join(f"{name}={extent}" for name, extent in kernel.trial.factors.items()),
            "; ".join(map(_plan, kernel.trial.lowering.schedules)),
            _total(kernel, REGISTERS, max), _total(kernel, SPILLS, sum),
            f"{kernel.trial.predicted * 1e6:.1f}", _microseconds(kernel.trial.measured),
            "-" if kernel.trial.error is None else f"{kernel.trial.error:.1e}",
            kernel.checked if kernel.right else f"WRONG, {kernel.checked}",
        )
        for number, kernel in enumerate(kernels, 1)
    ]  # fmt: skip


def _plan(schedule: Any) -> str:
    """Return what of a schedule is not the default."""
    values = ((field.name, getattr(schedule, field.name), field.default) for field in fields(schedule))
    return " ".join(f"{name}={value}" for name, value, usual in values if value != usual) or "default"


REGISTERS, SPILLS = ("registers", "vgpr"), ("spill_stores", "vgpr_spills")
"""What the device compilers of NVIDIA and AMD call them."""


def _total(kernel: Lowering, names: Sequence[str], of: Any) -> str:
    found = [report[name] for report in kernel.resources for name in names if name in report]
    return str(of(found)) if found else "-"


def _microseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"
