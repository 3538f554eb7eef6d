"""``ladder first-run``: what a GPU that nobody has tried makes of Ladder's kernels, in one file to send."""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ladder.cli.console import Progress, silent
from ladder.cli.gemm import run_gemm
from ladder.cli.problem import Problem, why_not_here
from ladder.runtime import hip
from targets import get_device, rocm_architectures, visible_gpus
from tile_types.errors import DeviceError, LadderError, UnknownNameError
from tile_types.files import replacing, require_writable

WEIGHTS: Mapping[str, tuple[str, ...]] = {
    "float16": ("float16", "int4", "nf4", "mxfp4", "fp6_e3m2"),
    "bfloat16": ("bfloat16", "int4", "mxfp4"),
    "int8": ("int8", "int4", "ternary"),
    "fp8_e4m3": ("fp8_e4m3", "int4"),
    "fp8_e5m2": ("fp8_e5m2",),
}
"""Activations -> weights that are tried with them."""

ROWS = (1, 16, 48, 300)
"""M: of each pipeline at least one."""

SHAPE = (4096, 4096)
"""N and K."""


def target_here() -> str:
    """Return the target of this machine's first GPU.

    Raises DeviceError if there is none that Ladder has a target for.
    """
    shown = [gpu.device for gpu in visible_gpus()] + [f"rocm/{arch}" for arch in rocm_architectures()]
    for name in shown:
        if name is not None:
            return name
    raise DeviceError("no GPU is visible here; `ladder doctor` says what this machine has")


def problems(target: str, shape: tuple[int, int] = SHAPE) -> Iterator[Problem]:
    """Yield the products that are tried: every activation type of a target, few and many rows."""
    device = get_device(target)
    n, k = shape
    for activation, weights in WEIGHTS.items():
        if device.cores_for(activation):
            for weight in weights:
                for m in ROWS:
                    yield Problem(weight, activation, m=m, n=n, k=k, target=target)


def tried(problem: Problem) -> dict[str, Any]:
    """Return what running a product gives, or the error in its place."""
    name = f"{problem.weight} x {problem.activation_type}, M={problem.m}"
    try:
        report = run_gemm(problem, simulated=False)
    except Exception as error:
        known = isinstance(error, LadderError)
        return {
            "problem": name,
            "passed": False,
            "error": f"{'' if known else type(error).__name__ + ': '}{error}",
        }
    return {"problem": name, **report.as_json()}


def machine(target: str) -> dict[str, Any]:
    """Return what the results depend on: versions, driver, GPU."""
    from ladder.cli.doctor import as_json, diagnose

    found = {"target": target, "system": platform.platform(), "doctor": as_json(diagnose())["tools"]}
    if get_device(target).kind == "rocm":
        here = hip.runtime()
        found["gpu"], found["hip"] = here.device_name(), here.version()
    return found


def run_first(
    path: Path, target: str = "", shape: tuple[int, int] = SHAPE, step: Progress = silent
) -> dict[str, Any]:
    """Run the products of `problems`, `kernel_cases` and `graph_cases`, and write the file; returns it.

    Raises UnknownNameError if the target is no GPU.
    Raises DeviceError if it is not here, with the reason.
    Raises ArtifactError if the file cannot be written.
    """
    target = target or target_here()
    device = get_device(target)
    if not device.is_gpu:
        raise UnknownNameError(f"nothing to run: {device.name} is no GPU")
    if reason := why_not_here(device):
        raise DeviceError(f"nothing can run: {reason}")
    require_writable(path)
    found: dict[str, Any] = {"machine": machine(target), "results": []}
    for problem in problems(target, shape):
        step(f"{problem.weight} x {problem.activation_type}, M={problem.m}")
        found["results"].append(tried(problem))
        _write(path, found)  # a kernel that hangs leaves what was found before
    from ladder.cli.first_graphs import graph_cases
    from ladder.cli.first_kernels import kernel_cases, run_case

    for case in itertools.chain(kernel_cases(device), graph_cases(device)):
        step(case.name)
        found["results"].append(run_case(case, device))
        _write(path, found)
    return found


def _write(path: Path, found: Mapping[str, Any]) -> None:
    with replacing(path) as part:
        part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def summary(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a line for each product."""
    return [(str(row["problem"]), _outcome(row)) for row in found["results"]]


def _outcome(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    said = "right" if row["passed"] else "WRONG"
    return f"{said}, error {row['relative_error']:.1e}, {row['time_us']} us"
