"""One program to kernels: searched, proved, built, checked and timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ladder import knobs
from ladder.api.fused_trials import (
    Progress,
    TrialCache,
    built,
    checked,
    in_turns,
    loaded,
    seconds_of,
    torch_seconds,
)
from ladder.api.superopt_calls import Contract
from ladder.installation import cache_root
from ladder.ir.graph import Graph
from ladder.ir.ops import get_operator
from ladder.runtime.compile import runs_code_of
from ladder.runtime.cores import usable_cores
from ladder.runtime.fused import Fused
from ladder.runtime.spills import warn_of_spills
from ladder.runtime.trials import Trial, candidates_of, variants
from ladder.superopt.generator import Database, Limits, Program, Report, search
from ladder.superopt.partition import OUTSIDE
from ladder.superopt.verifier import Certificate, Stability, refusal
from targets import TileDevice, get_device
from tile_types.errors import ConversionError, DeviceError, ScheduleError, VerificationError

ROUNDS = 2
"""Times at most that kernels near the fastest are built and timed, too, as many each time."""

MOST_WORKERS = 16
"""Processes that search, at most: as many as there are cores."""

SECONDS = 60.0
"""Time budget of a search unless the limits say another."""


@dataclass(frozen=True)
class Superoptimized:
    """A function as fused kernels.

    program: What was optimised.
    report: Of the search: states, pruned, candidates, verified, rejected.
    trials: What was built, fastest first.
    fused: The fastest, loaded; None if it is for a device that is not here.
    contract: What the function takes and returns; None if these are kernels of a part of one.
    torch: Seconds that the program takes as torch runs it; infinity if that was not timed.
    unfused: The program, if torch runs it faster than any of the kernels.
    """

    program: Program
    report: Report
    trials: tuple[Trial, ...]
    fused: Fused | None
    contract: Contract | None = None
    torch: float = math.inf
    unfused: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Run the fastest kernels; the program itself where torch is faster.

        *inputs: Tensors of the shapes that were optimised for (kernels get copies of those that are not
            contiguous), and quantized matrices: each is packed once, for as long as it lives.
        Raises ShapeError, DTypeError, DeviceError, ConversionError if an argument is not what the function
            was optimised for, or gradients are asked for.
        """
        if self.fused is None:
            raise DeviceError("these kernels were built for a device that is not here; superoptimize there")
        if self.contract is None:
            return self._run(*inputs)
        if self.unfused is None:
            return self.contract.call(self._run, inputs)
        self.contract.require(inputs)
        return self._run(*inputs)

    def _run(self, *inputs: Any) -> Any:
        assert self.fused is not None  # the caller has looked
        if self.unfused is None:
            return self.fused(*self.fused.packed(inputs))
        with torch.no_grad():
            return self.unfused(*inputs)

    def __str__(self) -> str:
        """Say what was found, where it comes from, how fast it is and what is proved."""
        proof, best = self.certificate, self.best
        time = "not timed" if best.measured is None else f"{best.measured * 1e6:.1f} us"
        error = "" if best.error is None else f", relative error {best.error:.1e}"
        plans = "; ".join(map(str, best.lowering.schedules))
        copied = self.contract.copies if self.contract else ""
        return (
            f"{self.program.name}: {len(self.report.found)} graphs {self.report.origin}; best of"
            f" {len(self.trials)} kernels {time}{error} ({plans}); equal but with probability"
            f" {proof.error:.1e} ({proof.rounds} rounds){beside_torch(self)}{copied}"
        )

    @property
    def best(self) -> Trial:
        """The trial that `__call__` runs."""
        return self.trials[0]

    @property
    def graph(self) -> Graph:
        """The kernel graph that `__call__` runs."""
        return self.best.lowering.graph

    @property
    def certificate(self) -> Certificate:
        """The proof that it equals the function, with the bound on the error of all proofs of the search."""
        return replace(self.best.found.certificate, delta=self.report.delta)

    @property
    def stability(self) -> Stability:
        """Its floating-point behaviour, against float64."""
        return self.best.found.stability

    def as_json(self) -> dict[str, Any]:
        """Return what a report shows."""
        counts = self.report.counts
        return {
            "program": self.program.name, "sizes": dict(self.program.sizes), "delta": self.certificate.error,
            "verified": len(self.report.found), "states": counts.states, "pruned": counts.pruned,
            "rejected": counts.rejected, "seconds": self.report.seconds,
            "from_database": self.report.recalled, "certificate": self.certificate.as_json(),
            "graph": str(self.graph), "trials": [trial.as_json() for trial in self.trials],
            "torch": None if math.isinf(self.torch) else self.torch, "unfused": self.unfused is not None,
        }  # fmt: skip


@dataclass(frozen=True)
class Task:
    """How programs are optimised: the arguments of `superoptimize`, and where inputs are."""

    here: str
    limits: Limits | None
    target: str | None
    trials: int
    checkpoint: Path | None
    seed: int | None
    step: Progress | None
    reuse: bool
    constants: Collection[int]
    seconds: float = SECONDS

    def shorter(self) -> Task:
        """Return the task for a half of what nothing was found for: both take half as long."""
        return replace(self, seconds=self.seconds / 4)

    @property
    def device(self) -> TileDevice:
        """The device that kernels are built for."""
        return get_device(self.target or self.here)

    @property
    def is_here(self) -> bool:
        """Whether inputs are on the device that kernels are built for."""
        return runs_code_of(self.here, self.device.name)

    @property
    def database(self) -> Database | None:
        """Where reports and kernels are kept; None if the cache is off."""
        return Database(cache_root()) if knobs.settings.cache else None

    def run(
        self,
        program: Program,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        constants: Collection[int] = (),
    ) -> Superoptimized:
        """Optimise a program, which a function is of tensors; ``constants`` are some of its own inputs.

        Raises ScheduleError if no graph was found, or none can be lowered.
        Raises VerificationError if no kernel is accurate.
        """
        report = self.searched(program)
        if not report.found:
            why = f"of up to {report.limits.operators} operators" if report.complete else "in the time given"
            raise ScheduleError(
                f"no block graph {why} equals {program.name}; allow more operators or seconds"
            )
        fixed = tuple(node.name for i, node in enumerate(program.symbolic.inputs) if i in constants)
        kept = TrialCache(self.database, report, self.device, self.trials, fixed) if self.database else None
        known = kept.read() if kept and self.reuse else None
        if known and not (self.is_here and known[0][0].measured is None):  # kept where nothing was timed
            trials, torch = known
            best = loaded(built(trials[:1], self.device, 1), self.device) if self.is_here else []
            found = Superoptimized(program, report, tuple(trials), best[0][1] if best else None)
            return _faster(found, torch, function)
        candidates = candidates_of(report, self.device, self.trials, fixed)
        kernels = built(candidates, self.device, self.trials, self.step)
        if not self.is_here:  # where nothing is timed, what does not spill goes before what does
            kernels.sort(key=lambda found: any(kernel.spilled for kernel in found[1]))
            warn_of_spills(kernels[0][1], self.device)
        order, fused, torch = tuple(trial for trial, _ in kernels), None, math.inf
        if self.is_here:
            right = self._fastest(program, checked(loaded(kernels, self.device), function, inputs))
            right = in_turns(self._improved(program, right, function, inputs), inputs)
            order, fused = tuple(trial for trial, _ in right), right[0][1]
            torch = torch_seconds(function, inputs)
        if kept:
            kept.write(order, torch)
        return _faster(Superoptimized(program, report, order, fused), torch, function)

    def _improved(
        self,
        program: Program,
        found: list[tuple[Trial, Fused]],
        function: Callable[..., Any],
        inputs: Sequence[Any],
    ) -> list[tuple[Trial, Fused]]:
        """Try what is near the fastest, as long as that is faster: the model errs by some percent."""
        for _ in range(ROUNDS if self.trials > 1 else 0):
            best = found[0][0]
            near = variants(best, [trial for trial, _ in found], self.device, 2 * self.trials)
            try:
                kernels = built(near, self.device, self.trials, self.step)
            except ScheduleError:
                break  # none is near that can be emitted
            found = self._fastest(program, found + checked(loaded(kernels, self.device), function, inputs))
            if found[0][0] is best:
                break
        return found

    def searched(self, program: Program) -> Report:
        """Return the report of the program's search, from the database if there is one."""
        cores = min(MOST_WORKERS, usable_cores())
        limits = self.limits or Limits.of(program, self.device.name, seconds=self.seconds, workers=cores)

        def searched() -> Report:
            return search(program, limits, checkpoint=self.checkpoint, step=self.step, seed=self.seed)

        if self.database is None:
            return searched()
        if self.reuse:
            return self.database.recall(program, limits, searched)
        report = searched()
        self.database.add(report)
        return report

    @staticmethod
    def _fastest(program: Program, trials: list[tuple[Trial, Fused]]) -> list[tuple[Trial, Fused]]:
        """Return the trials that are right, fastest first."""
        good = [pair for pair in trials if pair[0].measured is not None]
        if not good:
            errors = [f"{trial.error:.1e}" for trial, _ in trials if trial.error is not None]
            raise VerificationError(
                f"no kernel of {program.name} is accurate: relative errors {', '.join(errors)}"
            )
        return sorted(good, key=seconds_of)


def beside_torch(found: Any) -> str:
    """Say of a result of `superoptimize` what torch takes, and whether torch runs it."""
    if math.isinf(found.torch):
        return ""
    chosen = "" if found.unfused is None else ": none is faster, so torch runs it"
    return f"; as torch runs it {found.torch * 1e6:.1f} us{chosen}"


def _faster(found: Superoptimized, torch: float, function: Callable[..., Any]) -> Superoptimized:
    """Return what was found with the seconds that torch takes; with the program, if that is less."""
    measured = found.best.measured
    slower = found.fused is not None and measured is not None and torch < measured
    return replace(found, torch=torch, unfused=function if slower else None)


def require_type(result: Any, inputs: Sequence[torch.Tensor]) -> None:
    """Check that a result has the inputs' type, as kernels store it; ConversionError otherwise."""
    types = {x.dtype for x in inputs}
    if len(types) > 1:
        raise ConversionError(f"inputs of types {' and '.join(sorted(map(str, types)))}: convert them to one")
    wanted = inputs[0].dtype
    found = getattr(result, "dtype", wanted)
    if found != wanted:
        raise ConversionError(f"the result is {found} and the inputs are {wanted}: convert it to their type")


def require_provable(program: Program) -> None:
    """Check that equality with a program can be decided at all.

    Raises VerificationError: Names what is outside LAX.
    """
    small = program.graph(dict.fromkeys(program.sizes, 2))
    rows = [get_operator(node.operator) for _, node in small.walk()]
    outside = [row.name for row in rows if row.lax == OUTSIDE]
    reason = f"{outside[0]} has no finite-field semantics: it is outside LAX" if outside else refusal(small)
    if reason:
        raise VerificationError(f"{program.name} is not optimised: {reason}")
