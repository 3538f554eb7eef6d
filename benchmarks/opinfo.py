"""torch's own operator database through the compiler: right, refused, wrong or crashed, per operator.

Every operator of ``torch.testing``'s database, on its own sample inputs in float32 and float16, as plans and
by eager torch: values, types, shapes and strides. Samples of one operator make up one graph; where that does
not come out right, each is tried alone. Random operators start from the same seed.

    python -m benchmarks.opinfo                          # all samples; parts run in torch, no kernel is built
    python -m benchmarks.opinfo --kernels --samples 3    # with kernels, on few samples of each operator
    python -m benchmarks.opinfo --only softmax add       # names, or beginnings of names
    python -m benchmarks.opinfo --kernels --part 3/16    # every 16th operator, so that 16 processes do all
    python -m benchmarks.opinfo --special                # operands that hold NaN, infinities, -0 and extremes
    python -m benchmarks.opinfo --dtypes bfloat16        # another type of the samples
    python -m benchmarks.opinfo --kernels --device cuda  # samples and kernels on a GPU; float32 stays whole
    python -m benchmarks.opinfo --device rocm/gfx942     # kernels as an AMD GPU's machine code, emulated

What is compared with tolerance: results of floats, relative to their largest value, by as many roundings as
sums of the sample's size may differ in; where that fails, an error against float64 that eager's exceeds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.fx
from torch.utils._pytree import tree_flatten, tree_map

from benchmarks.emulated import on_amd
from benchmarks.harness import write_record
from ladder import knobs
from ladder.api.compiler import Compiler
from ladder.capture.values.aliasing import aliasing_of, version_of
from ladder.runtime.model import build

DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool", "complex64")
}
USUAL = ("float32", "float16")
OUTCOMES = ("right", "refused", "wrong", "crashed")

DATABASE = "torch.testing._internal.common_methods_invocations"

TOGETHER = 16
"""Samples of one graph."""

ROUNDINGS = 16
"""In which results may differ from eager's."""

CANCELLED = 4
"""Roundings of the largest operand that may be left where sums cancel."""

BY_ADDRESS = "jiterator_"
"""Operators that launch a kernel on whatever address a fake tensor has; capture calls them as they are."""

UNSAFE = ("linalg.eigvals",)
"""Operators of torch that write outside their memory where operands are special (LAPACK balances them)."""

SEED = 7

SPECIAL = ("nan", "inf", "-inf", "-0.0", "0.0", "max", "-max", "tiny")
"""What is put into operands: numbers, or fields of `torch.finfo`."""

SPECIAL_SHARE = 0.15
"""Of an operand's elements."""


@dataclass
class Row:
    """What became of the samples of an operator.

    Parameters
    ----------
    operator, dtype
        Which.
    counts
        Outcome -> samples.
    notes
        The first few messages of what is not right.
    """

    operator: str
    dtype: str
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, outcome: str, note: str = "", count: int = 1) -> None:
        """Count samples."""
        self.counts[outcome] = self.counts.get(outcome, 0) + count
        if note and len(self.notes) < 3 and note not in self.notes:
            self.notes.append(f"{outcome}: {note}")


@dataclass(frozen=True)
class Sample:
    """A call: ``function(*args, **kwargs)``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str


def _copied(value: Any) -> Any:
    """Return a tensor of its own memory that lies as the given one."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided:
        return value.clone()
    steps = zip(value.shape, value.stride(), strict=True)
    reach = 1 + sum((extent - 1) * step for extent, step in steps) if value.numel() else 0
    memory = value.as_strided((reach,), (1,)).clone()
    return memory.as_strided(value.shape, value.stride(), 0)


def graph_of(samples: Sequence[Sample]) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """Return the graph that calls every sample, and its tensors."""
    graph, tensors = torch.fx.Graph(), []

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(_copied(value))
        return graph.placeholder(f"t{len(tensors)}")

    given = [tree_map(place, (list(sample.args), sample.kwargs)) for sample in samples]
    found = [
        graph.call_function(_whole(sample.function), tuple(args), kwargs)
        for sample, (args, kwargs) in zip(samples, given, strict=True)
    ]
    graph.output(tuple(found))
    return torch.fx.GraphModule(torch.nn.Module(), graph), tensors


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that graphs can name."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    called.__module__ = __name__
    return called


def flattened(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a graph that gives the tensors among the results of another."""

    def run(*tensors: Any) -> Any:
        leaves, _ = tree_flatten(module(*tensors))
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    graph = torch.fx.Graph()
    places = [graph.placeholder(node.name) for node in module.graph.nodes if node.op == "placeholder"]
    graph.output(graph.call_function(_whole(run), tuple(places)))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def compiled_run(samples: Sequence[Sample]) -> tuple[list[Any], list[str]]:
    """Return the tensors that the samples give as a plan, and why they are none."""
    module, tensors = graph_of(samples)
    compiler, whole = Compiler(), flattened(module)
    whole.meta["aliasing"] = _observed(module, tensors)
    run = compiler(whole, tensors)
    torch.manual_seed(SEED)
    return list(run(*tensors)), compiler.refused


def _observed(module: torch.fx.GraphModule, tensors: Sequence[torch.Tensor]) -> Any:
    """Return what capture would see of memory: fakes of some operators lie otherwise than their results."""
    tensors = [_copied(tensor) for tensor in tensors]
    before = [version_of(tensor) for tensor in tensors]
    torch.manual_seed(SEED)
    leaves, _ = tree_flatten(module(*tensors))
    results = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    writes = before != [version_of(tensor) for tensor in tensors]
    return aliasing_of(tensors, results, writes=writes, before=before)


def eager_run(samples: Sequence[Sample]) -> list[Any]:
    """Return the tensors that the samples give."""
    module, tensors = graph_of(samples)
    torch.manual_seed(SEED)
    return [leaf for leaf in tree_flatten(module(*tensors))[0] if isinstance(leaf, torch.Tensor)]


def difference(found: torch.Tensor, wanted: torch.Tensor, *, filled: bool = True) -> str:
    """Return how a result differs from eager's, empty if it does not; `filled`: whether it has values."""
    for name in ("dtype", "shape", "device", "layout"):
        if getattr(found, name) != getattr(wanted, name):
            return f"{name} {getattr(found, name)}, eager has {getattr(wanted, name)}"
    if wanted.layout is torch.strided and wanted.numel() and found.stride() != wanted.stride():
        lies = zip(wanted.shape, found.stride(), wanted.stride(), strict=True)
        if any(size > 1 and mine != its for size, mine, its in lies):
            return f"strides {found.stride()}, eager has {wanted.stride()}"
    return _values_differ(found, wanted) if filled else ""


def _values_differ(found: torch.Tensor, wanted: torch.Tensor) -> str:
    if wanted.layout is not torch.strided:
        return _values_differ(found.to_dense(), wanted.to_dense())
    if wanted.is_complex():
        return _values_differ(*(torch.view_as_real(value.resolve_conj()) for value in (found, wanted)))
    if not wanted.is_floating_point():
        return "" if torch.equal(found, wanted) else f"{int((found != wanted).sum())} numbers differ"
    a, b = found.double(), wanted.double()
    special = ~torch.isfinite(b)
    if not torch.equal(special, ~torch.isfinite(a)) or not torch.equal(
        a[special].nan_to_num(nan=0.5), b[special].nan_to_num(nan=0.5)
    ):
        return "infinities or NaNs elsewhere"
    a, b = a[~special], b[~special]
    if not a.numel():
        return ""
    most = float((a - b).abs().max())
    allowed = ROUNDINGS * torch.finfo(wanted.dtype).eps * max(float(b.abs().max()), 1e-30)
    return "" if most <= allowed else f"error {most:.3g}, allowed {allowed:.3g}"


def _largest(value: Any) -> float:
    """Return the largest size of a tensor's finite numbers; 0 for anything else."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return 0.0
    return float(value.nan_to_num(0.0, 0.0, 0.0).abs().max())


def nearer_than_eager(found: Sequence[Any], wanted: Sequence[Any], samples: Sequence[Sample]) -> bool:
    """Tell whether results are as near to those in float64 as eager's are, up to roundings."""

    def wide(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.double() if floats else value

    try:
        exact = eager_run(
            [replace(s, **tree_map(wide, {"args": s.args, "kwargs": s.kwargs})) for s in samples]
        )
    except Exception:
        return False
    operands = (leaf for sample in samples for leaf in tree_flatten((sample.args, sample.kwargs))[0])
    most = max(map(_largest, operands), default=0.0)
    for a, b, e in zip(found, wanted, exact, strict=True):
        if (
            a.layout is not torch.strided
            or (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride())
            or not b.is_floating_point()
        ):
            return False
        if not _kind(a).eq(_kind(b)).logical_or(_kind(a) == _kind(e.to(b.dtype))).all():
            return False
        ok = torch.isfinite(a) & torch.isfinite(b) & torch.isfinite(e)
        mine, its = (float((x[ok].double() - e[ok]).abs().max()) if ok.any() else 0.0 for x in (a, b))
        scale = float(e[ok].abs().max()) if ok.any() else 0.0
        if mine > 2 * its + torch.finfo(b.dtype).eps * (ROUNDINGS * scale + CANCELLED * most):
            return False
    return True


def _kind(value: torch.Tensor) -> torch.Tensor:
    """Return 2 for NaN, 1 and -1 for infinities, 0 for other numbers."""
    return torch.where(value.isnan(), 2, value.isposinf().int() - value.isneginf().int())


def tried(samples: Sequence[Sample]) -> tuple[str, str]:
    """Return the outcome of samples in one graph, and what is to be said of it."""
    wanted = eager_run(samples)
    try:
        found, refused = compiled_run(samples)
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    if len(found) != len(wanted):
        return "wrong", f"{len(found)} results, eager has {len(wanted)}"
    filled = "empty" not in samples[0].name
    pairs = zip(found, wanted, strict=True)
    differing = [text for pair in pairs if (text := difference(*pair, filled=filled))]
    if differing and not nearer_than_eager(found, wanted, samples):
        return "wrong", differing[0]
    return ("refused", refused[0][:200]) if refused else ("right", "")


def with_specials(value: Any) -> Any:
    """Return a copy of a tensor of floats in which some elements are special; anything else as it is."""
    floats = isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout is torch.strided
    if not floats:
        return value
    limits = torch.finfo(value.dtype)
    numbers = {"max": limits.max, "-max": limits.min, "tiny": limits.smallest_normal}
    source = torch.tensor([numbers.get(name) or float(name) for name in SPECIAL], dtype=value.dtype)
    generator = torch.Generator().manual_seed(SEED)
    where = torch.rand(value.shape, generator=generator) < SPECIAL_SHARE
    which = torch.randint(len(SPECIAL), value.shape, generator=generator)
    made = _copied(value)
    return made.copy_(torch.where(where.to(value.device), source[which].to(value.device), value))


def samples_of(
    info: Any, dtype: torch.dtype, most: int, *, special: bool = False, device: str = "cpu"
) -> Iterator[Sample]:
    """Yield the samples of an operator that eager torch takes and that give tensors."""
    if special and title(info) in UNSAFE:
        return
    generated = info.sample_inputs(device, dtype, requires_grad=False)
    for given in islice(generated, most or None):
        args, kwargs = (given.input, *given.args), dict(given.kwargs)
        if special:
            args, kwargs = tree_map(with_specials, (args, kwargs))
        sample = Sample(info.op, args, kwargs, info.name)
        with contextlib.suppress(Exception):
            if eager_run([sample]):
                yield sample


def row_of(info: Any, name: str, most: int, *, special: bool = False, device: str = "cpu") -> Row:
    """Try all samples of an operator in one type."""
    row = Row(title(info), name)
    samples = list(samples_of(info, DTYPES[name], most, special=special, device=device))
    for begin in range(0, len(samples), TOGETHER):
        group = samples[begin : begin + TOGETHER]
        if tried(group)[0] == "right":
            row.add("right", count=len(group))
            continue
        for sample in group:
            row.add(*tried([sample]))
    return row


def title(info: Any) -> str:
    """Return the name of an operator and its variant."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def wanted_operators(
    only: Sequence[str], part: str = "0/1", dtypes: Sequence[str] = USUAL, device: str = "cpu"
) -> list[tuple[Any, str]]:
    """Return (operator, type) of everything to try; ``"3/16"`` is every 16th operator from the fourth on."""
    from torch.testing._internal.common_methods_invocations import op_db

    named = [info for info in op_db if not only or any(title(info).startswith(name) for name in only)]
    found = [info for info in named if not title(info).startswith(BY_ADDRESS)]
    first, step = (int(number) for number in part.split("/"))
    return [
        (info, name)
        for info in found[first::step]
        for name in dtypes
        if info.supports_dtype(DTYPES[name], device)
    ]


def in_torch(parts: Any, requests: Any, device: Any) -> Any:
    """Stand in for `build_kernels`: every part runs in torch."""
    chosen = [number for number, part in enumerate(parts) if part.kind in build.JOBS]
    return {}, [], dict.fromkeys(chosen, "no kernel is built")


def unseeded() -> Any:
    """Let the database's random operators not seed themselves, as no program does."""
    return patch(f"{DATABASE}.wrapper_set_seed", _plain_call)


def _plain_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def child(arguments: argparse.Namespace) -> None:
    """Print a row as JSON for every operator from a number on."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    emulated = arguments.device.startswith("rocm")
    builds = {} if arguments.kernels or emulated else {"build_kernels": in_torch}
    strict = knobs.override(strict=True, num_threads=1)
    torch.backends.cudnn.allow_tf32 = False
    gpu = on_amd(arguments.device) if emulated else contextlib.nullcontext()
    where = "cpu" if emulated else arguments.device
    tries = wanted_operators(arguments.only, arguments.part, arguments.dtypes, where)
    with torch.no_grad(), strict, patch.dict(vars(build), builds), gpu, unseeded():
        for at, (info, name) in enumerate(tries[arguments.begin :], arguments.begin):
            print(json.dumps({"begin": at, "operator": title(info), "dtype": name}), flush=True)
            row = row_of(info, name, arguments.samples, special=arguments.special, device=where)
            if where == "cuda":
                torch.cuda.synchronize()
            print(json.dumps({"row": asdict(row)}), flush=True)


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of children; the operator at which one dies has crashed, and another goes on behind."""
    begin, ended = 0, False
    while not ended:
        command = [sys.executable, "-m", "benchmarks.opinfo", "--child", "--begin", str(begin)]
        command += ["--part", arguments.part, "--device", arguments.device, "--dtypes", *arguments.dtypes]
        command += ["--samples", str(arguments.samples), *(["--kernels"] if arguments.kernels else [])]
        command += ["--special"] if arguments.special else []
        command += ["--only", *arguments.only] if arguments.only else []
        now: dict[str, Any] = {}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, text=True, **pipes) as process:
            for line in process.stdout or ():
                if not line.startswith("{"):
                    continue
                said = json.loads(line)
                if "row" in said:
                    yield Row(**said["row"])
                    now = {}
                else:
                    now, begin = said, said["begin"] + 1
        ended = not now
        if now:
            row = Row(now["operator"], now["dtype"])
            row.add("crashed", f"the process ended with {process.returncode}")
            yield row


def main() -> None:
    """Try operators, print a line for each that is not all right, and totals."""
    as_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_is)
    parser.add_argument("--only", nargs="*", default=[], help="operators, or beginnings of their names")
    parser.add_argument("--samples", type=int, default=0, help="at most so many of an operator; 0: all")
    parser.add_argument("--kernels", action="store_true", help="build the kernels of ours, and run them")
    parser.add_argument("--special", action="store_true", help="put special values into operands")
    parser.add_argument("--part", default="0/1", help="I/N: every Nth operator from number I on")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=USUAL, help="of the samples")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or an AMD GPU to emulate")
    parser.add_argument("--output", type=Path, help="write all rows as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--begin", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    found, total = [], Counter[str]()
    for row in rows(arguments):
        found.append(row)
        total += row.counts
        if set(row.counts) - {"right"}:
            counts = ", ".join(f"{row.counts[name]} {name}" for name in OUTCOMES if name in row.counts)
            print(f"{row.operator:48} {row.dtype:8} {counts}  {'; '.join(row.notes)}", flush=True)
    whole = sum(not set(row.counts) - {"right"} for row in found)
    print(f"{whole} of {len(found)} operators and types all right; samples:", dict(total))
    if arguments.output:
        write_record(arguments.output, {"rows": [asdict(row) for row in found]})


if __name__ == "__main__":
    main()
