"""Every weight type x activation x M on a GPU: errors against float64, times against torch.

``python -m benchmarks.gpu_gemm --output results.json`` compiles all kernels in parallel
processes (no GPU needed for that part), then checks every case and times M <= 64. The
baseline is the least that dequantise-then-cuBLAS can cost: cuBLAS measured in the same
run, plus reading the packed weight and writing the dense one at the measured copy
bandwidth. Weights rotate over more than four times the L2, so they come from HBM.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.harness import (
    BOUNDS,
    copies_for,
    copy_bandwidth,
    environment,
    graph_time_us,
    poison,
    relative_error,
    write_record,
)
from ladder.ir.gemm import Gemm, has_power_scales
from ladder.runtime.cores import usable_cores
from tile_types import get_type, type_names
from tile_types.errors import ConversionError

OUTPUTS = {"int8": "float32", "fp8_e4m3": "float16", "fp8_e5m2": "float16"}
SHAPES = ((4096, 4096), (1511, 2003))
"""(N, K); the second divides nothing: both are prime."""

TOKENS = (1, 3, 16, 64, 257, 4096)
TIMED_TOKENS = (1, 3, 16, 64)


@dataclass(frozen=True)
class Case:
    """One weight form with one activation type.

    Parameters
    ----------
    weight
        Type name, block types included.
    activation
        Type of A.
    group_size
        Columns that share a scale; 0 is the type's own or one per row.
    zero
        Kind of zero points.
    """

    weight: str
    activation: str
    group_size: int = 0
    zero: str = "none"

    def __str__(self) -> str:
        group = f" g{self.group_size}" if self.group_size else ""
        return f"{self.weight}{group}{'' if self.zero == 'none' else ' z=' + self.zero} x {self.activation}"


def weight_forms() -> Iterator[tuple[str, int, str]]:
    """Yield (type, group size, zero kind) of the library: plain, grouped, with zero points."""
    for name in type_names():
        ttype = get_type(name)
        if name in ("e8m0", "int32") or ttype.elem_bits > 32:
            continue
        yield name, 0, "none"
        if ttype.is_block or ttype.elem_bits > 8:
            continue
        yield name, 64 if name == "nf4" else 128, "none"
        if name.startswith("uint"):
            yield name, 128, "integer"
            yield name, 64, "float"


def cases(weights: Sequence[str], activations: Sequence[str]) -> list[Case]:
    """Return the matrix of cases, optionally only some weights."""
    forms = [form for form in weight_forms() if not weights or form[0] in weights]
    return [Case(w, a, g, z) for w, g, z in forms for a in activations]


def quantized(case: Case, n: int, k: int, device: str) -> Any:
    """Draw a random weight [n, k] and quantize it as the case says."""
    import torch

    from tile_types import quantize

    generator = torch.Generator(device=device).manual_seed(n + k)
    values = torch.randn(n, k, device=device, generator=generator) * 0.05
    ttype = get_type(case.weight)
    if sign := one_sided(case):
        values = sign * values.abs()
    # Scales in the activation's own type, as checkpoints have them.
    scale = "bfloat16" if case.activation == "bfloat16" else None
    options: dict[str, Any] = {} if ttype.is_block or ttype.elem_bits > 8 else {"scale_type": scale}
    if case.group_size:
        options["group_size"] = case.group_size
    if case.zero != "none":
        options["zero"] = case.zero
    return quantize(values, case.weight, **options)


def problem(case: Case, n: int, k: int) -> Gemm:
    """Return the normal form of a case at one shape."""
    ttype = get_type(case.weight)
    group = ttype.block_size if ttype.is_block else case.group_size
    group = min(group or k, k)
    return Gemm(
        n=n,
        k=k,
        weight=ttype.element_type.name,
        activation=case.activation,
        output=OUTPUTS.get(case.activation, case.activation),
        group_size=group,
        scale=group < k,
        power_scales=group < k and has_power_scales(ttype),
        zero=case.zero,
    )


def refusal(case: Case) -> str | None:
    """Return why the case cannot run, as the library says it, or None."""
    from ladder.api.problem import require_fits

    try:
        require_fits(get_type(case.weight).element_type, case.activation, case.zero)
    except ConversionError as error:
        return str(error)
    return None


def request(case: Case, shape: tuple[int, int], device: str) -> Any:
    """Return what the runtime compiles: both shapes share the kernels chosen for the first."""
    from ladder.runtime.compile import Request
    from schedules.policy import make_plan
    from targets import get_device

    plan = make_plan(problem(case, *SHAPES[0]), get_device(device))
    return Request(problem(case, *shape), device, plan)


# ---- compilation ----------------------------------------------------------------------
def compile_one(case: Case, device: str) -> tuple[Case, str, float]:
    """Build one case's kernels into the disk cache; return what went wrong, if anything."""
    from ladder.runtime.compile import obtain

    start = time.perf_counter()
    try:
        obtain(request(case, SHAPES[0], device))
    except Exception as error:  # a case that breaks is a row of the report, not its end
        return case, f"{type(error).__name__}: {error}", time.perf_counter() - start
    return case, "", time.perf_counter() - start


def compile_all(work: Sequence[Case], device: str, jobs: int) -> dict[Case, str]:
    """Build every case in parallel processes; return the failures."""
    failures = {}
    with ProcessPoolExecutor(jobs) as pool:
        tasks = [pool.submit(compile_one, case, device) for case in work]
        for done, task in enumerate(as_completed(tasks), 1):
            case, failure, seconds = task.result()
            if failure:
                failures[case] = failure
            if done % 20 == 0 or failure:
                print(
                    f"[{done}/{len(tasks)}] {case}: {seconds:.1f} s {failure[:300]}",
                    file=sys.stderr,
                    flush=True,
                )
    return failures


# ---- measuring ------------------------------------------------------------------------
class Baseline:
    """cuBLAS on dense weights of the same shape, cached per (shape, dtype, M)."""

    def __init__(self) -> None:
        self.times: dict[tuple[int, int, str, int], float] = {}
        self.bandwidth = copy_bandwidth()

    def dense_us(self, n: int, k: int, dtype: str, m: int) -> float:
        """Return cuBLAS's time for [m, k] x [k, n]."""
        import torch

        key = (n, k, dtype, m)
        if key not in self.times:
            kind = getattr(torch, dtype)
            copies = range(copies_for(2 * n * k))
            weights = [torch.randn(n, k, device="cuda").to(kind) for _ in copies]
            x = torch.randn(m, k, device="cuda").to(kind)
            calls = [partial(torch.matmul, x, w.t()) for w in weights]
            self.times[key] = graph_time_us(calls)
        return self.times[key]

    def dequantise_us(self, gemm: Gemm, m: int, packed_bytes: int) -> float:
        """Return the floor of dequantise-then-cuBLAS: dense time plus both memory passes."""
        dtype = gemm.activation if gemm.activation in ("float16", "bfloat16") else "float16"
        passes = (packed_bytes + 2 * gemm.n * gemm.k) / self.bandwidth
        return self.dense_us(gemm.n, gemm.k, dtype, m) + passes * 1e6


def one_sided(case: Case) -> int:
    """Return the sign that all weights of a case share, or 0."""
    element = get_type(case.weight).element_type
    if case.zero != "none":
        return 0
    return 1 if element.minimum >= 0 else -1 if element.maximum <= 0 else 0


def activations(case: Case, m: int, k: int) -> Any:
    """Draw A [m, k] in the case's activation type.

    Weights of one sign meet activations of one sign, as behind a ReLU: otherwise the sums
    cancel, and the relative error measures the data's condition instead of the kernel.
    """
    import torch

    from tile_types.arrays import torch_dtype

    generator = torch.Generator(device="cuda").manual_seed(m)
    values = torch.randn(m, k, device="cuda", generator=generator)
    values = values.abs() if one_sided(case) else values
    if case.activation == "int8":
        return (values * 40).round().clamp(-127, 127).to(torch.int8)
    return values.to(torch_dtype(case.activation))


def run_case(
    case: Case, shape: tuple[int, int], device: str, baseline: Baseline | None
) -> Iterator[dict[str, Any]]:
    """Check one case at every M of one shape, and time the small ones."""
    import torch

    from ladder.lower.build import entry_name
    from ladder.runtime.compile import compiled, obtain
    from ladder.runtime.packed import pack
    from targets import get_device

    gemm = problem(case, *shape)
    weight = quantized(case, *shape, "cuda")
    packed = pack(gemm, get_device(device), weight)
    wanted = request(case, shape, device)
    plan, _ = obtain(wanted)
    operator = compiled(wanted.text)
    dense = weight.dequantize("float64")
    timed = baseline is not None and shape == SHAPES[0]
    copies = copies_for(packed.nbytes) if timed else 1
    weights = [packed.tensors] + [[t.clone() for t in packed.tensors] for _ in range(copies - 1)]
    for m in TOKENS:
        x = activations(case, m, gemm.k)
        poison(m * gemm.n, getattr(torch, gemm.output))
        error = relative_error(operator.run(x, weights[0]), x.double() @ dense.t())
        row = {**asdict(case), "n": gemm.n, "k": gemm.k, "m": m, "output": gemm.output}
        name = entry_name(gemm, wanted.target.name, plan.schedule_for(m))
        row |= {"kernel": name, "relative_error": error, "bound": BOUNDS[case.activation]}
        row["ok"] = error <= BOUNDS[case.activation]
        if timed and baseline is not None and m in TIMED_TOKENS:
            row["time_us"] = graph_time_us([partial(operator.run, x, w) for w in weights])
            row["baseline_us"] = baseline.dequantise_us(gemm, m, packed.nbytes)
            row["speedup"] = row["baseline_us"] / row["time_us"]
        yield row


# ---- command --------------------------------------------------------------------------
def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count outcomes and name the worst rows."""
    ran = [row for row in rows if "relative_error" in row]
    timed = [row for row in ran if "speedup" in row]
    return {
        "rows": len(rows),
        "ran": len(ran),
        "passed": sum(row["ok"] for row in ran),
        "refused": sum("refused" in row for row in rows),
        "failed_to_build_or_run": sum("failure" in row for row in rows),
        "worst_error_over_bound": max((row["relative_error"] / row["bound"] for row in ran), default=None),
        "smallest_speedup": min((row["speedup"] for row in timed), default=None),
    }


def measure(work: Sequence[Case], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run all cases; a case that fails yields a row that says so."""
    import torch

    baseline = None if arguments.no_timing else Baseline()
    for case in work:
        for shape in SHAPES:
            try:
                yield from run_case(case, shape, arguments.target, baseline)
            except Exception as error:  # likewise
                yield {
                    **asdict(case),
                    "n": shape[0],
                    "k": shape[1],
                    "failure": f"{type(error).__name__}: {error}"[:500],
                }
                if "CUDA" in str(error):
                    raise
            torch.cuda.empty_cache()


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="cuda/sm_90a")
    parser.add_argument("--weights", default="", help="comma-separated type names; all by default")
    parser.add_argument("--activations", default=",".join(BOUNDS))
    parser.add_argument("--jobs", type=int, default=usable_cores())
    parser.add_argument("--output", default="")
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--compile-only", action="store_true")
    arguments = parser.parse_args()
    every = cases([w for w in arguments.weights.split(",") if w], arguments.activations.split(","))
    refused = {case: reason for case in every if (reason := refusal(case))}
    work = [case for case in every if case not in refused]
    start = time.perf_counter()
    failures = compile_all(work, arguments.target, arguments.jobs)
    print(
        f"compiled {len(work)} cases in {time.perf_counter() - start:.0f} s, {len(failures)} failed",
        flush=True,
    )
    if arguments.compile_only:
        return 1 if failures else 0
    rows: list[dict[str, Any]] = [{**asdict(case), "refused": reason} for case, reason in refused.items()]
    for row in measure([case for case in work if case not in failures], arguments):
        rows.append(row)
        if not row.get("ok", False):
            print("NOT OK", {k: v for k, v in row.items() if k != "bound"}, flush=True)
    rows += [{**asdict(case), "failure": reason} for case, reason in failures.items()]
    outcome = summary(rows)
    report = {"environment": environment(), "summary": outcome, "rows": rows}
    if arguments.output:
        write_record(arguments.output, report)
    print(json.dumps(outcome, indent=1))
    return 0 if outcome["passed"] == outcome["ran"] and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
