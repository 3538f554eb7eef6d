"""The result of ``ladder gemm``: one value that prints for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ladder.cli.console import finite

if TYPE_CHECKING:
    from ladder.api.evidence import Evidence
    from ladder.cli.check import SimulatedCheck, TokenCheck


@dataclass(frozen=True)
class GemmReport:
    """Result of ``ladder gemm``. None marks what was not asked for or could not be run.

    target, m, n, k, weight, activation, output, group_size, zero, bias, epilogue, seed: The problem with its
        defaults resolved.
    kernel, schedule: Name of the kernel that serves this M, and how it is tiled.
    compile_s, from_cache: Seconds until the kernel was ready, and whether it came from the cache.
    bytes, flops: What any kernel must move and compute.
    tolerance, relative_error, passed: What rounding explains; the Frobenius norm of the difference to float64
        on the decoded weights over the norm of the latter; whether the second is within the first. Where the
        kernel could not run, they are those of the simulation.
    time_us, baseline_us, baseline, baselines_us: Median time of a call; the fastest way torch has, its name,
        and every way tried, from the same run, with weights that come from memory.
    roofline_fraction, roofline: Least time that the machine could take over the time taken, and what that
        rests on.
    not_run: Why nothing ran.
    evidence, simulated: Of a GPU kernel: what its code takes and how long it should, and what the simulator
        found.
    tokens: The same of the kernel that quantises x before, where it has 8 bits.
    experts: Products in the launch, each with ``m`` tokens at most; 0 for one alone.
    """

    target: str
    m: int
    n: int
    k: int
    weight: str
    activation: str
    output: str
    group_size: int
    zero: str
    bias: bool
    epilogue: tuple[str, ...]
    seed: int
    kernel: str
    schedule: str
    compile_s: float
    from_cache: bool
    bytes: int
    flops: int
    tolerance: float
    relative_error: float | None = None
    passed: bool | None = None
    time_us: float | None = None
    baseline_us: float | None = None
    baseline: str | None = None
    baselines_us: Mapping[str, float] | None = None
    roofline_fraction: float | None = None
    roofline: str | None = None
    not_run: str | None = None
    evidence: Evidence | None = None
    simulated: SimulatedCheck | None = None
    tokens: TokenCheck | None = None
    experts: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the report as one JSON-able object, the evidence's fields among its own."""
        checks = {"evidence", "simulated", "tokens"}
        own = {name: value for name, value in vars(self).items() if name not in checks}
        own["epilogue"] = list(self.epilogue)
        own["relative_error"] = finite(self.relative_error)
        own["simulated"] = None if self.simulated is None else self.simulated.as_json()
        own["tokens"] = None if self.tokens is None else self.tokens.as_json()
        return own if self.evidence is None else {**own, **self.evidence.as_json()}

    def as_text(self) -> dict[str, str]:
        """Return the report as named lines for people."""
        origin = "from the cache" if self.from_cache else "compiled"
        lines = {
            "target": self.target,
            "problem": self._problem_text(),
            "kernel": f"{self.kernel}, {origin} in {self.compile_s:.2f} s",
            "schedule": self.schedule,
            **(self.evidence.as_text() if self.evidence else {}),
            "simulated": self.simulated.as_text() if self.simulated else None,
            "quantising": self.tokens.as_text() if self.tokens else None,
            "not run": self.not_run,
            "error": self._error_text(),
            "time": self._time_text(),
            "torch": self._baseline_text(),
            "roofline": self._roofline_text(),
        }
        return {name: text for name, text in lines.items() if text is not None}

    @property
    def failure(self) -> str:
        """Reason why a report did not pass."""
        for check in (self.simulated, self.tokens):
            if check is not None and check.findings:
                return f"the simulator found {len(check.findings)} faults: {check.findings[0]}"
        return f"relative error {self.relative_error:.2e} exceeds {self.tolerance:.0e}"

    def _problem_text(self) -> str:
        experts = f"{self.experts} experts, each " if self.experts else ""
        shape = f"{experts}M={self.m} N={self.n} K={self.k}"
        group = f"group {self.group_size}" if self.group_size < self.k else "one scale per row"
        types = f"{self.activation} x {self.weight} ({group}) -> {self.output}"
        extras = [f"{self.zero} zero points"] * (self.zero != "none") + ["bias"] * self.bias
        return ", ".join([shape, types, *extras, *self.epilogue])

    def _error_text(self) -> str | None:
        if self.relative_error is None:
            return None
        return f"{self.relative_error:.1e} relative to float64 (rounding explains {self.tolerance:.0e})"

    def _time_text(self) -> str | None:
        return None if self.time_us is None else f"{self.time_us:.1f} µs"

    def _baseline_text(self) -> str | None:
        if self.time_us is None or self.baseline_us is None:
            return None
        ratio = self.baseline_us / self.time_us
        return f"{self.baseline_us:.1f} µs ({self.baseline}): ladder is {ratio:.2f}x as fast"

    def _roofline_text(self) -> str | None:
        if self.time_us is None or self.roofline_fraction is None:
            return None
        rates = f"{self.bytes / self.time_us / 1e3:.1f} GB/s, {self.flops / self.time_us / 1e3:.1f} GFLOP/s"
        return f"{self.roofline_fraction:.0%} ({rates}; {self.roofline})"
