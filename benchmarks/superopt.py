"""The superoptimizer's programs on a GPU, as `ladder.superoptimize` chooses them, against torch in one run.

``python -m benchmarks.superopt --output FILE.json`` calls `ladder.superoptimize` on each program, without and
(unless ``--undeclared``) with its weights declared constant, and times what it returns beside torch's eager
mode and torch.compile (``--max-autotune`` adds that mode), in CUDA graphs; inputs rotate over four times the
L2. With int4 weights the rival is what users write without it: `ladder.Matmul`, with the shipped tuning
database, and torch between them. Reports of searches are kept in the cache: ``--search-only`` makes them,
without a GPU.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ladder
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
from ladder.api.tensor_program import decoded
from tile_types.errors import LadderError
from tile_types.quantized import QuantizedTensor

GROUP = 128
"""Columns that share a scale of int4 weights."""

MOST_COPIES = 120
"""Copies of inputs at most: smaller programs then stay in L2, for all engines alike."""

LARGEST_ERROR = 2e-3
"""Relative Frobenius error against float64 that fused kernels may have: two units in the last place, or what
torch's eager mode has, which rounds every value between operators."""

CONSTANTS = "fused, constants"
"""Label of kernels whose weights are declared constant (`ladder.superoptimize`)."""

SDPA_BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
"""Of torch's attention: rivals of the program that is nothing else."""

ROUNDS = 9

TARGET = "cuda/sm_90a"
"""What searches without a GPU are made for."""


@dataclass(frozen=True)
class Point:
    """A program at one size.

    Parameters
    ----------
    program
        A row of `PROGRAMS`.
    shapes
        Of its inputs; those of weights are ``[K, N]``.
    bar
        Least wanted speed over the best baseline.
    scales
        Standard deviation of each input.
    weights
        Inputs that are parameters: nothing writes them while they are served.
    packed
        Inputs that are quantized to int4.
    rotated
        First input that differs from copy to copy (0 for all).
    """

    program: str
    shapes: tuple[tuple[int, ...], ...]
    bar: float
    scales: tuple[float, ...]
    weights: tuple[int, ...] = ()
    packed: tuple[int, ...] = ()
    rotated: int = 1

    @property
    def function(self) -> Callable[..., Any]:
        """The program as one writes it in torch; quantized weights come to it decoded, ``[N, K]``."""
        plain = PROGRAMS[self.program]
        return lambda *x: plain(*(v.t() if i in self.packed else v for i, v in enumerate(x)))

    def drawn(self, device: str) -> list[Any]:
        """Return inputs: float16 tensors, and quantized matrices."""
        import torch

        torch.manual_seed(0)
        return [self._input(i, torch.randn(shape, device=device)) for i, shape in enumerate(self.shapes)]

    def _input(self, index: int, values: Any) -> Any:
        values = values * self.scales[index]
        if index in self.packed:
            return ladder.quantize(values.t().contiguous(), "int4", group_size=GROUP)
        return values.half()


def _norm(x: Any) -> Any:
    import torch.nn.functional as F

    return F.rms_norm(x, (x.shape[-1],))


def _gqa(q: Any, k: Any, v: Any) -> Any:
    import torch

    return torch.softmax(q @ k, -1) @ v


def _layer_norm(x: Any) -> Any:
    import torch.nn.functional as F

    return F.layer_norm(x, (x.shape[-1],))


def _column_norm(k: Any) -> Any:
    import torch

    return k * torch.rsqrt((k * k).mean(-2, keepdim=True))


def _gated(x: Any, gate: Any, up: Any) -> Any:
    import torch.nn.functional as F

    return F.silu(x @ gate) * (x @ up)


def _geglu(x: Any, gate: Any, up: Any) -> Any:
    import torch.nn.functional as F

    return F.gelu(x @ gate, approximate="tanh") * (x @ up)


PROGRAMS: Mapping[str, Callable[..., Any]] = {
    "rmsnorm_matmul": lambda x, w: _norm(x) @ w,
    "layer_norm_matmul": lambda x, w: _layer_norm(x) @ w,
    "gated_mlp": _gated,
    "geglu": _geglu,
    "lora": lambda x, w, a, c: x @ w + (x @ a) @ c,
    "gqa": _gqa,
    "qknorm_attention": lambda q, k, v: _gqa(_norm(q), _column_norm(k), v),
    "ntrans": lambda x, h, a: _norm(x + a * (_norm(h) - x)),
}
"""What each program computes, of tensors."""


def _rows(program: str, m: int, k: int, n: int, bar: float, **rest: Any) -> Point:
    """Return a program of ``m`` rows and weights ``k`` by ``n``."""
    weights = 2 if program in ("gated_mlp", "geglu") else 1
    shapes = ((m, k), *((k, n),) * weights)
    return Point(program, shapes, bar, (1.0, 0.02, 0.02), tuple(range(1, 1 + weights)), **rest)


def _lora(m: int, k: int, n: int, rank: int, bar: float, scales: tuple[float, ...], **rest: Any) -> Point:
    return Point("lora", ((m, k), (k, n), (k, rank), (rank, n)), bar, scales, (1, 2, 3), **rest)


def _attention(program: str, groups: int, bar: float, scales: tuple[float, ...]) -> Point:
    """Return attention of 256 queries over 4096 keys of 64 elements, for some groups of heads."""
    return Point(program, ((groups, 256, 64), (groups, 64, 4096), (groups, 4096, 64)), bar, scales)


def points() -> dict[str, Point]:
    """Return the programs by name."""
    attention = (0.35, 0.35, 1.0)
    found = {
        "rmsnorm_matmul b=1": _rows("rmsnorm_matmul", 2, 4096, 6144, 1.25),
        "rmsnorm_matmul b=8": _rows("rmsnorm_matmul", 16, 4096, 6144, 1.25),
        "layer_norm_matmul b=1": _rows("layer_norm_matmul", 2, 4096, 6144, 1.0),
        "gated_mlp b=1": _rows("gated_mlp", 8, 4096, 4096, 1.35),
        "gated_mlp b=8": _rows("gated_mlp", 64, 4096, 4096, 1.35),
        "geglu b=1": _rows("geglu", 8, 4096, 4096, 1.0),
        "lora b=1": _lora(16, 256, 4096, 16, 1.6, (1.0, 0.06, 0.06, 0.06)),
        "gqa b=1": _attention("gqa", 2, 1.5, attention),
        "gqa b=8": _attention("gqa", 16, 1.3, attention),
    }
    for batch, rows in ((1, 16), (8, 128)):
        shapes = ((rows, 4096), (rows, 4096), (1, 4096))
        found[f"ntrans b={batch}"] = Point("ntrans", shapes, 1.0, (1.0, 1.0, 0.3), rotated=0)
        found[f"qknorm_attention b={batch}"] = _attention("qknorm_attention", 2 * batch, 1.5, (1.0,) * 3)
    for m in (1, 8):
        found[f"int4 rmsnorm_matmul M={m}"] = _rows("rmsnorm_matmul", m, 4096, 6144, 1.2, packed=(1,))
        found[f"int4 gated_mlp M={m}"] = _rows("gated_mlp", m, 4096, 4096, 1.2, packed=(1, 2))
        scales = (1.0, 0.02, 0.02, 0.06)
        found[f"int4 lora M={m}"] = _lora(m, 4096, 4096, 16, 1.2, scales, packed=(1,))
    return found


class Product:
    """A quantized weight by Ladder's own kernel, as users call it."""

    def __init__(self, stored: QuantizedTensor) -> None:
        n, k = stored.shape
        self.operator = ladder.Matmul(N=n, K=k, weight="int4", group_size=GROUP)
        self.packed = self.operator.pack(stored)

    def clone(self) -> Product:
        """Return a copy whose packed arrays lie elsewhere."""
        other = copy.copy(self)
        arrays = {name: array.clone() for name, array in self.packed.arrays.items()}
        other.packed = replace(self.packed, arrays=arrays)
        return other

    def __call__(self, x: Any) -> Any:
        """Multiply."""
        return self.operator(x, self.packed)


def unfused(program: str) -> Callable[..., Any]:
    """Return a program of `Product` by Ladder's kernels and torch's, one after the other."""
    import torch
    import torch.nn.functional as F

    join = torch.compile(lambda gate, up: F.silu(gate) * up, dynamic=False)
    functions: dict[str, Callable[..., Any]] = {
        "rmsnorm_matmul": lambda x, w: w(_norm(x)),
        "gated_mlp": lambda x, gate, up: join(gate(x), up(x)),
        "lora": lambda x, w, a, c: torch.addmm(w(x), x @ a, c),
    }
    return functions[program]


# ---- measuring ---------------------------------------------------------------------------------------------
class Measured:
    """One program: inputs, engines, times."""

    def __init__(self, name: str, point: Point) -> None:
        import torch

        self.name, self.point = name, point
        self.inputs = point.drawn("cuda")
        self.exact = point.function(*decoded(self.inputs, torch.float64))
        self.bound = max(LARGEST_ERROR, relative_error(point.function(*decoded(self.inputs)), self.exact))
        self.errors: dict[str, float] = {}
        self.graphs: dict[str, Any] = {}
        self.about: dict[str, str] = {}

    def copies(self, inputs: Sequence[Any]) -> list[list[Any]]:
        """Return inputs, and copies that take turns with them."""
        shared, each = list(inputs[: self.point.rotated]), inputs[self.point.rotated :]
        size = sum(x.packed.nbytes if isinstance(x, Product) else x.nbytes for x in each)
        count = min(copies_for(size), MOST_COPIES)
        return [[*shared, *each], *([*shared, *map(_clone, each)] for _ in range(count - 1))]

    def engine(
        self, label: str, call: Callable[..., Any], inputs: Sequence[Any], bound: float = math.inf
    ) -> None:
        """Check a way to run the program, and capture it if its error is within a bound."""
        import torch

        poison(self.exact.numel(), torch.float16)
        self.errors[label] = relative_error(call(*inputs), self.exact)
        if self.errors[label] <= bound:
            self.graphs[label] = capture_long([partial(call, *x) for x in self.copies(inputs)])

    def baselines(self, max_autotune: bool) -> None:
        """Add what is compared with."""
        import torch

        if self.point.packed:
            inputs = [Product(x) if i in self.point.packed else x for i, x in enumerate(self.inputs)]
            self.engine("unfused", unfused(self.point.program), inputs)
            return
        self.engine("eager", self.point.function, self.inputs)
        if self.point.program == "gqa":
            self.attentions()
        modes = ("default", "max-autotune-no-cudagraphs") if max_autotune else ("default",)
        for mode in modes:
            torch._dynamo.reset()
            compiled = torch.compile(self.point.function, dynamic=False, mode=mode)
            self.engine(f"compile {mode}", compiled, self.inputs)

    def attentions(self) -> None:
        """Add the backends of torch's attention that take the shapes; their keys lie as they take them."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (x.unsqueeze(0) for x in self.inputs)
        for backend in SDPA_BACKENDS:

            def call(q: Any, k: Any, v: Any, backend: str = backend) -> Any:
                with sdpa_kernel(getattr(SDPBackend, backend)):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)[0]

            try:
                self.engine(f"sdpa {backend}", call, (q, k.mT.contiguous(), v))
            except RuntimeError as error:  # a backend without a kernel for them
                self.about[f"sdpa {backend}"] = str(error).partition("\n")[0]

    def fused(self, declared: bool) -> None:
        """Add what `ladder.superoptimize` returns; if wanted, also with weights ``declared`` constant."""
        ways = [("fused", ())] + [(CONSTANTS, self.point.weights)] * (declared and bool(self.point.weights))
        for label, constants in ways:
            try:
                found = ladder.superoptimize(self.point.function, self.inputs, constants=constants)
            except LadderError as error:
                self.about[label] = f"{type(error).__name__}: {error}"
                continue
            self.about[label] = str(found)
            self.engine(label, found, self.inputs, self.bound)

    def row(self) -> dict[str, Any]:
        """Time all engines in turns and return what the report shows."""
        times = {label: statistics.median(x) for label, x in interleaved_us(self.graphs, ROUNDS).items()}
        rival = min((label for label in times if not label.startswith("fused")), key=times.__getitem__)
        plain = times[rival] / times["fused"] if "fused" in times else 0.0
        fixed = times[rival] / times[CONSTANTS] if CONSTANTS in times else plain
        return {
            "program": self.name, "bar": self.point.bar, "ratio": round(max(plain, fixed), 3),
            "ratio without constants": round(plain, 3), "rival": rival,
            "us": {label: round(us, 2) for label, us in times.items()}, "errors": self.errors,
            "chosen": self.about,
        }  # fmt: skip


def _clone(x: Any) -> Any:
    if isinstance(x, QuantizedTensor):
        return copy.deepcopy(x)
    return x.clone()


def measure(names: Sequence[str], max_autotune: bool, declared: bool) -> Iterator[dict[str, Any]]:
    """Yield a row per program."""
    for name in names:
        measured = Measured(name, points()[name])
        measured.fused(declared)
        measured.baselines(max_autotune)
        yield measured.row()


def search(names: Sequence[str]) -> None:
    """Search the programs and build their kernels, for `TARGET`; the cache keeps both."""
    for name in names:
        point = points()[name]
        found = ladder.superoptimize(point.function, point.drawn("cpu"), target=TARGET)
        print(f"{name}: {found}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Build, measure, and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--programs", default="", help="parts of names, separated by commas: in this order")
    parser.add_argument("--max-autotune", action="store_true")
    parser.add_argument("--undeclared", action="store_true", help="never declare weights constant")
    parser.add_argument("--search-only", action="store_true")
    options = parser.parse_args(arguments)
    wanted = [part for part in options.programs.split(",") if part]
    names = [name for part in wanted or [""] for name in points() if part in name]
    if options.search_only:
        search(names)
        return
    if options.output is None:
        parser.error("--output is needed")
    require_gpu("--search-only searches and builds")
    rows: list[Mapping[str, Any]] = []
    for row in measure(names, options.max_autotune, not options.undeclared):
        rows.append(row)
        mark = "ok" if row["ratio"] >= row["bar"] else "BELOW"
        print(f"{row['program']:26s} x{row['ratio']:.2f} (bar {row['bar']}) {mark}", end="; ")
        print(f"x{row['ratio without constants']:.2f} without constants; us {row['us']}", flush=True)
        write_record(options.output, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
