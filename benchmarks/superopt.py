"""The superoptimizer's programs on a GPU: fused kernels against torch, in CUDA graphs, in one run.

``python -m benchmarks.superopt --output FILE.json`` builds a few lowerings of each program's block graph
(those that measurements on an H200 left over), checks each against float64, and times the fastest beside
torch's eager mode and torch.compile (``--max-autotune`` adds that mode). With an int4 weight the baseline is
what one writes with Ladder's own kernels without fusion. Inputs rotate over four times the L2.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import superopt_graphs as graphs
from benchmarks.harness import (
    capture_long,
    copies_for,
    environment,
    interleaved_us,
    poison,
    relative_error,
    require_gpu,
    write_record,
)
from benchmarks.superopt_choices import CHOICES, Choice
from ladder.lower.blocks import BlockSchedule
from ladder.runtime.cores import usable_cores
from tile_types import group_scaled
from tile_types.errors import LadderError

INT4 = group_scaled("int4", 128).name
MOST_COPIES = 120
"""Copies of inputs at most: smaller programs then stay in L2, for all engines alike."""

LARGEST_ERROR = 2e-3
"""Relative Frobenius error against float64 that fused kernels may have."""

WEIGHTS = {"rmsnorm_matmul": ("W",), "gated_mlp": ("GATE", "UP"), "lora": ("W", "A", "C")}
"""Inputs of programs that are parameters: nothing writes them while they are served."""

CONSTANTS = "constants"
"""Ends the labels of choices whose weights are declared constant (`ladder.runtime.fused.Lowering`)."""

ROUNDS = 9


@dataclass(frozen=True)
class Point:
    """A program at one size.

    Parameters
    ----------
    program
        A function of `benchmarks.superopt_graphs`.
    sizes
        Its arguments before the tiles.
    options
        Its keyword arguments.
    bar
        Least wanted speed over the best baseline.
    rotated
        First input that differs from copy to copy (weights; 0 for all).
    scales
        Standard deviation of each input.
    """

    program: str
    sizes: tuple[int, ...]
    bar: float
    options: tuple[tuple[str, Any], ...] = ()
    rotated: int = 1
    scales: tuple[float, ...] = (1.0, 0.02, 0.02, 0.06)

    def case(self, tiles: Sequence[int]) -> graphs.Case:
        """Return the block graph at these tiles."""
        build: Callable[..., graphs.Case] = getattr(graphs, self.program)
        return build(*self.sizes, *tiles, **dict(self.options))

    @property
    def constants(self) -> tuple[str, ...]:
        """The weights: inputs that nothing writes while the program may run."""
        return WEIGHTS.get(self.program, ())

    @property
    def quantized(self) -> bool:
        """Whether weights are packed int4."""
        return "weight" in dict(self.options)


def points() -> dict[str, Point]:
    """Return the programs of `/shared/H200_BASELINES.md` and the int4 ones, by name."""
    attention = (0.35, 0.35, 1.0)
    found = {
        "rmsnorm_matmul b=1": Point("rmsnorm_matmul", (2, 4096, 6144), 1.25),
        "rmsnorm_matmul b=8": Point("rmsnorm_matmul", (16, 4096, 6144), 1.25),
        "gated_mlp b=1": Point("gated_mlp", (8, 4096, 4096), 1.35),
        "gated_mlp b=8": Point("gated_mlp", (64, 4096, 4096), 1.35),
        "lora": Point("lora", (16, 256, 4096, 16), 1.6, scales=(1.0, 0.06, 0.06, 0.06)),
        "gqa b=1": Point("attention", (2, 256, 64, 4096), 1.5, scales=attention),
        "gqa b=8": Point("attention", (16, 256, 64, 4096), 1.3, scales=attention),
        "ntrans b=1": Point("norm_transition", (16, 4096), 1.0, rotated=0, scales=(1.0, 1.0, 0.3)),
        "ntrans b=8": Point("norm_transition", (128, 4096), 1.0, rotated=0, scales=(1.0, 1.0, 0.3)),
    }
    norm = (("norm", True),)
    for batch in (1, 8):
        sizes = (2 * batch, 256, 64, 4096)
        found[f"qknorm_attention b={batch}"] = Point("attention", sizes, 1.5, norm, scales=(1.0,) * 3)
    weight = (("weight", INT4),)
    for tokens in (1, 8):
        found[f"int4 rmsnorm_matmul M={tokens}"] = Point("rmsnorm_matmul", (tokens, 4096, 6144), 1.2, weight)
        found[f"int4 gated_mlp M={tokens}"] = Point("gated_mlp", (tokens, 4096, 4096), 1.2, weight)
        found[f"int4 lora M={tokens}"] = Point("lora", (tokens, 4096, 4096, 16), 1.2, weight)
    return found


# ---- what torch runs ------------------------------------------------------------------------------------
def torch_function(point: Point) -> Callable[..., Any]:
    """Return the program as one writes it in torch."""
    import torch
    import torch.nn.functional as F

    def norm(x: Any) -> Any:
        return F.rms_norm(x, (x.shape[-1],))

    def gqa(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k, -1) @ v

    def column_norm(k: Any) -> Any:
        return k * torch.rsqrt((k * k).mean(-2, keepdim=True))

    functions: dict[str, Callable[..., Any]] = {
        "rmsnorm_matmul": lambda x, w: norm(x) @ w,
        "gated_mlp": lambda x, gate, up: F.silu(x @ gate) * (x @ up),
        "lora": lambda x, w, a, c: x @ w + (x @ a) @ c,
        "attention": (lambda q, k, v: gqa(norm(q), column_norm(k), v))
        if dict(point.options).get("norm")
        else gqa,
        "norm_transition": lambda x, h, a: norm(x + a * (norm(h) - x)),
    }
    return functions[point.program]


class Packed:
    """A quantized weight: its operator for the unfused baseline, its arrays for the fused kernels."""

    def __init__(self, values: Any, tokens: int) -> None:
        import ladder

        self.stored = ladder.quantize(values, "int4", group_size=128)
        n, k = values.shape
        self.operator = ladder.Matmul(N=n, K=k, weight="int4", group_size=128, plan=plan_of(n, k, tokens))
        self.packed = self.operator.pack(self.stored)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed arrays."""
        return int(self.packed.nbytes)

    def clone(self) -> Packed:
        """Return a copy whose packed arrays lie elsewhere."""

        other = copy.copy(self)
        arrays = {name: array.clone() for name, array in self.packed.arrays.items()}
        other.packed = replace(self.packed, arrays=arrays)
        return other

    def __call__(self, x: Any) -> Any:
        """Multiply by Ladder's own kernel."""
        return self.operator(x, self.packed)

    @property
    def exact(self) -> Any:
        """The decoded weight as ``[K, N]`` in float64."""
        return self.stored.dequantize().double().t()


def plan_of(n: int, k: int, tokens: int) -> Any:
    """Return the policy's schedule for one M alone, so that one kernel is built."""
    from ladder.api.problem import gemm_for
    from ladder.runtime.compile import ANY_M
    from schedules.policy import make_plan
    from schedules.schedule import Plan
    from targets import get_device

    plan = make_plan(gemm_for(n, k, "int4", "float16", group_size=128), get_device("cuda/sm_90a"))
    return Plan(((ANY_M, plan.entries[plan.index(tokens)][1]),))


def unfused(point: Point) -> Callable[..., Any]:
    """Return the program by Ladder's kernels and torch's, one after the other."""
    import torch
    import torch.nn.functional as F

    join = torch.compile(lambda gate, up: F.silu(gate) * up, dynamic=False)
    functions: dict[str, Callable[..., Any]] = {
        "rmsnorm_matmul": lambda x, w: w(F.rms_norm(x, (x.shape[-1],))),
        "gated_mlp": lambda x, gate, up: join(gate(x), up(x)),
        "lora": lambda x, w, a, c: torch.addmm(w(x), x @ a, c),
    }
    return functions[point.program]


# ---- building ----------------------------------------------------------------------------------------------
def lowered(point: Point, choice: Choice) -> Any:
    """Return a choice as a `ladder.runtime.fused.Lowering`."""
    from ladder.runtime.fused import Lowering

    tiles, schedule, constants = choice
    return Lowering(
        point.case(tiles).graph, (BlockSchedule(**schedule),), point.constants if constants else ()
    )


def build(job: tuple[str, int]) -> str:
    """Build one choice into the cache; returns what went wrong, if anything."""
    from ladder.runtime.build import find_or_build
    from targets import get_device

    name, index = job
    try:
        find_or_build(lowered(points()[name], CHOICES[name][index]).jobs(get_device("cuda/sm_90a")))
    except LadderError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def build_baseline(name: str) -> None:
    """Build Ladder's own kernels of an int4 program into the cache."""
    from ladder.api.problem import gemm_for
    from ladder.runtime.compile import Request, obtain

    tokens, k, n = points()[name].sizes[:3]
    gemm = gemm_for(n, k, "int4", "float16", group_size=128)
    obtain(Request(gemm, "cuda/sm_90a", plan_of(n, k, tokens)))


# ---- measuring ---------------------------------------------------------------------------------------------
class Measured:
    """One program: inputs, engines, times."""

    def __init__(self, name: str, point: Point) -> None:
        import torch

        self.name, self.point = name, point
        inputs = point.case(CHOICES[name][0][0]).graph.inputs
        torch.manual_seed(0)
        shared = [self._draw(i, node.tile) for i, node in enumerate(inputs[: point.rotated])]
        each = [self._draw(i, node.tile) for i, node in enumerate(inputs) if i >= point.rotated]
        size = sum(x.nbytes for x in each)
        self.copies = [[*shared, *each]]
        for _ in range(min(copies_for(size), MOST_COPIES) - 1):
            self.copies.append([*shared, *(x.clone() for x in each)])
        exact = [x.exact if isinstance(x, Packed) else x.double() for x in self.copies[0]]
        self.exact = torch_function(point)(*exact)
        self.errors: dict[str, float] = {}
        self.graphs: dict[str, Any] = {}

    def _draw(self, index: int, tile: Any) -> Any:
        import torch

        values = torch.randn(tile.known_shape, device="cuda") * self.point.scales[index]
        return Packed(values, self.point.sizes[0]) if tile.ttype.is_block else values.half()

    def engine(self, label: str, call: Callable[..., Any], bound: float = math.inf) -> None:
        """Check a way to run the program, and capture it if its error is within a bound."""
        poison(self.exact.numel(), self.copies[0][0].dtype)
        self.errors[label] = relative_error(call(*self.copies[0]), self.exact)
        if self.errors[label] <= bound:
            self.graphs[label] = capture_long([partial(call, *x) for x in self.copies])

    def baselines(self, max_autotune: bool) -> None:
        """Add what is compared with."""
        import torch

        if self.point.quantized:
            self.engine("unfused", unfused(self.point))
            return
        function = torch_function(self.point)
        self.engine("eager", function)
        modes = ("default", "max-autotune-no-cudagraphs") if max_autotune else ("default",)
        for mode in modes:
            torch._dynamo.reset()
            self.engine(f"compile {mode}", torch.compile(function, dynamic=False, mode=mode))

    def fused(self) -> None:
        """Add every choice that was built."""
        from ladder.runtime.fused import Fused
        from targets import get_device

        for choice in CHOICES[self.name]:
            label = f"fused {short(choice)}"
            try:
                program = Fused.build(lowered(self.point, choice), get_device("cuda/sm_90a"))
            except LadderError as error:
                print(f"{self.name} {label}: {error}", flush=True)
                continue
            self.engine(label, _on_packed(program), LARGEST_ERROR)

    def row(self) -> dict[str, Any]:
        """Time all engines in turns and return what the report shows."""
        times = {label: statistics.median(x) for label, x in interleaved_us(self.graphs, ROUNDS).items()}
        ours = {label: us for label, us in times.items() if label.startswith("fused")}
        theirs = {label: us for label, us in times.items() if label not in ours}
        plain = {label: us for label, us in ours.items() if not label.endswith(CONSTANTS)}
        best, variable, rival = (min(x, key=x.__getitem__) if x else "" for x in (ours, plain, theirs))
        ratios = [
            theirs[rival] / us[mine] if mine and rival else 0.0
            for us, mine in ((ours, best), (plain, variable))
        ]
        return {
            "program": self.name, "bar": self.point.bar, "ratio": round(ratios[0], 3), "best": best,
            "ratio without constants": round(ratios[1], 3), "best without constants": variable,
            "rival": rival,
            "us": {label: round(us, 2) for label, us in times.items()}, "errors": self.errors,
        }  # fmt: skip


def _on_packed(program: Callable[..., Any]) -> Callable[..., Any]:
    """Return the program as a function of what `Measured` draws."""
    return lambda *inputs: program(*(x.packed if isinstance(x, Packed) else x for x in inputs))


def short(choice: Choice) -> str:
    """Return a choice in a few letters."""
    tiles, schedule, constants = choice
    plan = BlockSchedule(**schedule)
    letters = f"g{plan.groups} r{plan.row_warps} c{plan.column_warps} s{plan.stages} k{plan.cluster}"
    words = ["x".join(map(str, tiles)), letters, plan.copies]
    words += [plan.release] * (plan.release != "begin")
    words += [f"lead {plan.lead}"] * (plan.lead > 0)
    words += [plan.products] * (plan.products != "mma")
    return " ".join([*words, *[CONSTANTS] * constants])


def measure(names: Sequence[str], max_autotune: bool) -> Iterator[dict[str, Any]]:
    """Yield a row per program."""
    for name in names:
        measured = Measured(name, points()[name])
        measured.fused()
        measured.baselines(max_autotune)
        yield measured.row()


def main(arguments: Sequence[str] | None = None) -> None:
    """Build, measure, and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--programs", default="", help="parts of names, separated by commas")
    parser.add_argument("--max-autotune", action="store_true")
    parser.add_argument("--jobs", type=int, default=usable_cores())
    options = parser.parse_args(arguments)
    require_gpu()
    wanted = [part for part in options.programs.split(",") if part]
    names = [name for name in points() if not wanted or any(part in name for part in wanted)]
    began = time.perf_counter()
    with ProcessPoolExecutor(options.jobs) as pool:
        baselines = [pool.submit(build_baseline, name) for name in names if points()[name].quantized]
        jobs = [(name, index) for name in names for index in range(len(CHOICES[name]))]
        for job, failure in zip(jobs, pool.map(build, jobs), strict=True):
            if failure:
                print(f"{job}: {failure}", flush=True)
        for task in baselines:
            task.result()
    print(f"built {len(jobs)} kernels in {time.perf_counter() - began:.1f} s", flush=True)
    rows: list[Mapping[str, Any]] = []
    for row in measure(names, options.max_autotune):
        rows.append(row)
        mark = "ok" if row["ratio"] >= row["bar"] else "BELOW"
        us = row["us"]
        ours, theirs = us.get(row["best"], 0.0), us.get(row["rival"], 0.0)
        print(f"{row['program']:26s} {ours:7.2f} us, {row['rival']} {theirs:7.2f} us:", end=" ")
        print(f"x{row['ratio']:.2f} (bar {row['bar']}) {mark}  {row['best']}", end="; ")
        print(f"x{row['ratio without constants']:.2f} without constants", flush=True)
        write_record(options.output, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
