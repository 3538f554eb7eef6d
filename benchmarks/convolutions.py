"""Convolutions of whole networks on a GPU: errors against float64, times beside cuDNN's.

``python -m benchmarks.convolutions --output results.json`` compiles the kernels in parallel processes,
checks each on every layer, and times it with images, weights and results that rotate over more than
four times the L2. Baselines in the same rounds: torch's ``conv2d`` with bias and ReLU, channels last, as it
stands and as cuDNN's fused ``cudnn_convolution_relu``; and, for what is gathered first (im2col), the
same product over rows plus the time to write its windows at the measured copy bandwidth.
``--sweep`` times many schedules; by default the policy's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import (
    BOUNDS,
    Captured,
    capture_long,
    copies_for,
    copy_bandwidth,
    environment,
    interleaved_us,
    poison,
    relative_error,
    require_gpu,
    write_record,
)
from ladder.ir.gemm import Gemm
from ladder.ir.windows import Windows
from ladder.runtime.cores import usable_cores
from schedules.schedule import GpuSchedule, Plan, Schedule
from tile_types.errors import LadderError

BATCH = 8
"""Images, as in `benchmarks.model_cases`."""

ROUNDS = 5

PEAK = 8e14
"""FLOPs per second that tensor cores of an H200 sustain in float16."""


@dataclass(frozen=True)
class Layer:
    """One distinct convolution of a network."""

    net: str
    inputs: int
    outputs: int
    kernel: int
    stride: int
    size: int

    @property
    def windows(self) -> Windows:
        """Return what it gathers."""
        k, s, p = self.kernel, self.stride, self.kernel // 2
        return Windows((k, k), (s, s), (p, p))

    @property
    def channels(self) -> int:
        """Channels as kernels take them: a multiple of eight."""
        return -(-self.inputs // 8) * 8

    @property
    def rows(self) -> int:
        """Return M."""
        p, q = self.windows.extents(self.size, self.size)
        return BATCH * p * q

    def __str__(self) -> str:
        return (
            f"{self.net} {self.kernel}x{self.kernel}/{self.stride} {self.inputs}->{self.outputs} @{self.size}"
        )


def resnet() -> Iterator[Layer]:
    """Yield the distinct convolutions of ResNet-50."""
    yield Layer("resnet50", 3, 64, 7, 2, 224)
    inputs, size = 64, 56
    for at, width in enumerate((64, 128, 256, 512)):
        stride = 1 if at == 0 else 2
        yield Layer("resnet50", inputs, width, 1, 1, size)
        yield Layer("resnet50", width, width, 3, stride, size)
        if stride > 1:
            yield Layer("resnet50", inputs, 4 * width, 1, stride, size)
        size //= stride
        yield Layer("resnet50", width, 4 * width, 1, 1, size)
        yield Layer("resnet50", 4 * width, width, 1, 1, size)
        if stride > 1:
            yield Layer("resnet50", width, width, 3, 1, size)
        inputs = 4 * width


def efficientnet() -> Iterator[Layer]:
    """Yield the distinct convolutions of EfficientNet-B0 that are not depthwise."""
    yield Layer("efficientnet", 3, 32, 3, 2, 224)
    points = (
        (32, 16, 112), (16, 96, 112), (96, 24, 56), (24, 144, 56), (144, 24, 56), (144, 40, 28),
        (40, 240, 28), (240, 40, 28), (240, 80, 14), (80, 480, 14), (480, 80, 14), (480, 112, 14),
        (112, 672, 14), (672, 112, 14), (672, 192, 7), (192, 1152, 7), (1152, 192, 7), (1152, 320, 7),
        (320, 1280, 7),
    )  # fmt: skip
    for inputs, outputs, size in points:
        yield Layer("efficientnet", inputs, outputs, 1, 1, size)


NETS: dict[str, Callable[[], Iterator[Layer]]] = {"resnet50": resnet, "efficientnet": efficientnet}


def problem(layer: Layer, weight: str, windows: bool = True) -> Gemm:
    """Return a layer's normal form: bias and ReLU in the epilogue; without ``windows``, of gathered rows."""
    from ladder.api.problem import gemm_for

    at = layer.windows
    name, _, group = weight.partition(":")
    k = at.points * layer.channels
    options: dict[str, Any] = {"group_size": int(group)} if group else {}
    held = None if at.are_rows or not windows else at
    return gemm_for(layer.outputs, k, name, "float16", bias=True, epilogue=("relu",), windows=held, **options)


# ---- schedules ------------------------------------------------------------------------
def sweep(gemm: Gemm, m: int, count: int) -> list[Schedule]:
    """Return the ``count`` best predicted schedules, and of dense weights a coarse grid of them all."""
    from schedules.legal import is_legal
    from schedules.policy import rank
    from targets import get_device

    device = get_device("cuda/sm_90a")
    found: list[Schedule] = [candidate.schedule for candidate in rank(gemm, device, m)[:count]]
    if gemm.weight != "float16":
        return found
    if gemm.channels % 64 and gemm.windows:
        grid = product((64, 128), (64,), (64,), (2, 3, 4), (4, 8), (1,), (1,))
    else:
        grid = product((64, 128, 256), (64, 128), (64, 128), (6, 4, 3), (4, 8), (1, 2, 4), (1, 2))
    pipeline, seen = "mma" if gemm.channels % 64 and gemm.windows else "wgmma", set()
    for tile_m, tile_n, tile_k, stages, warps, split, cluster in grid:
        schedule = GpuSchedule(pipeline, tile_m, tile_n, tile_k, stages, warps, split, cluster=cluster)
        key = (tile_m, tile_n, tile_k, warps, split, cluster, stages if pipeline == "mma" else 0)
        blocks = -(-m // tile_m) * -(-gemm.n // tile_n) * split
        fits = device.units // 4 <= blocks and (split == 1 or blocks <= 3 * device.units)
        odd = cluster > 1 and (tile_k == 64 or split > 1)
        if key not in seen and fits and not odd and is_legal(gemm, device, schedule):
            seen.add(key)
            found.append(schedule)
    return list(dict.fromkeys(found))


def chosen(gemm: Gemm, m: int, count: int) -> list[Schedule]:
    """Return the policy's schedule."""
    from schedules.policy import choose
    from targets import get_device

    del count
    return [choose(gemm, get_device("cuda/sm_90a"), m).schedule]


def request(gemm: Gemm, schedule: Schedule) -> Any:
    """Return what the runtime compiles."""
    from ladder.runtime.compile import ANY_M, Request

    return Request(gemm, "cuda/sm_90a", Plan(((ANY_M, schedule),)))


def compile_one(work: Any) -> str:
    """Build one kernel into the disk cache; return what went wrong."""
    from ladder.runtime.compile import obtain

    try:
        obtain(work)
    except Exception as error:  # a schedule that breaks is a row of the report, not its end
        return f"{type(error).__name__}: {error}"[:300]
    return ""


# ---- measuring ------------------------------------------------------------------------
class Operands:
    """Copies of a layer's image, dense weight and bias, enough to come from HBM."""

    def __init__(self, layer: Layer) -> None:
        import torch

        self.layer = layer
        generator = torch.Generator(device="cuda").manual_seed(1)
        shape = (BATCH, layer.size, layer.size, layer.channels)
        x = torch.randn(shape, device="cuda", generator=generator).half()
        x[..., layer.inputs :] = 0
        self.weight = torch.randn(
            layer.outputs, layer.kernel, layer.kernel, layer.channels, device="cuda", generator=generator
        )
        self.weight *= (layer.inputs * layer.kernel**2) ** -0.5
        self.weight[..., layer.inputs :] = 0
        self.bias = torch.randn(layer.outputs, device="cuda", generator=generator).half()
        moved = 2 * (x.numel() + layer.rows * layer.outputs + self.weight.numel())
        self.count = min(64, copies_for(moved))
        self.images = [x.clone() for _ in range(self.count)]

    def gathered(self) -> list[Any]:
        """Return copies of the windows as rows ``[M, K]``, as gathering them first would leave them."""
        import torch

        at = self.layer.windows
        image = self.images[0].permute(0, 3, 1, 2)
        found = torch.nn.functional.unfold(image, at.kernel, at.dilation, at.padding, at.stride)
        rows = found.view(BATCH, self.layer.channels, at.points, -1).permute(0, 3, 2, 1).reshape(-1, self.k)
        return [rows.clone() for _ in range(copies_for(rows.nbytes))]

    @property
    def k(self) -> int:
        """Elements of a window."""
        return self.layer.windows.points * self.layer.channels

    def expected(self, matrix: Any) -> Any:
        """Return the layer of a decoded weight ``[N, K]`` in float64."""
        import torch

        at = self.layer.windows
        kernel = matrix.double().view(self.weight.shape).permute(0, 3, 1, 2)
        image = self.images[0].double().permute(0, 3, 1, 2)
        with torch.backends.cudnn.flags(benchmark=False):
            found = torch.nn.functional.conv2d(image, kernel, self.bias.double(), at.stride, at.padding)
        return found.relu().permute(0, 2, 3, 1)

    def torch_calls(self) -> dict[str, list[Callable[[], Any]]]:
        """Return torch's ways to compute the layer in float16, channels last."""
        import torch

        at, kept = self.layer.windows, self.layer.inputs
        last: Any = torch.channels_last
        dense = self.weight[..., :kept].permute(0, 3, 1, 2).half().contiguous(memory_format=last)
        weights = [dense.clone(memory_format=torch.preserve_format) for _ in range(self.count)]
        images = [x[..., :kept].permute(0, 3, 1, 2).contiguous(memory_format=last) for x in self.images]
        pairs = list(zip(images, weights, strict=True))

        def plain(x: Any, w: Any) -> Any:
            return torch.nn.functional.conv2d(x, w, self.bias, at.stride, at.padding).relu_()

        def bare(x: Any, w: Any) -> Any:
            return torch.nn.functional.conv2d(x, w, None, at.stride, at.padding)

        def fused(x: Any, w: Any) -> Any:
            return torch.cudnn_convolution_relu(x, w, self.bias, at.stride, at.padding, at.dilation, 1)

        ways = {"torch conv2d, bias, relu": plain, "torch conv2d alone": bare, "cudnn fused": fused}
        return {name: [partial(way, x, w) for x, w in pairs] for name, way in ways.items()}


def measure_layer(
    layer: Layer, weights: Sequence[str], work: dict[Any, list[Any]]
) -> Iterator[dict[str, Any]]:
    """Check and time every schedule of a layer, beside torch."""
    import torch

    operands = Operands(layer)
    graphs: dict[str, Captured] = {}
    rows: dict[str, dict[str, Any]] = {}
    facts = {
        "layer": str(layer),
        "m": layer.rows,
        "n": layer.outputs,
        "k": layer.windows.points * layer.inputs,
    }
    for name, calls in operands.torch_calls().items():
        try:
            graphs[name] = capture_long(calls)
        except RuntimeError as error:
            rows[name] = {**facts, "way": name, "failure": str(error)[:200]}
            continue
        rows[name] = {**facts, "way": name}
    for weight in weights:
        for way, extra, captured in ours(layer, weight, operands, work.get((layer, weight), [])):
            rows[way] = {**facts, "weight": weight, "way": way, **extra}
            if captured is not None:
                graphs[way] = captured
    for name, times in interleaved_us(graphs, ROUNDS).items():
        rows[name]["us"] = median(times)
    del graphs
    torch.cuda.empty_cache()
    yield from rows.values()


def ours(
    layer: Layer, weight: str, operands: Operands, requests: Sequence[Any]
) -> Iterator[tuple[str, dict[str, Any], Captured | None]]:
    """Yield each kernel's name, its error, and its graph."""
    import torch

    from ladder.runtime.compile import compiled
    from ladder.runtime.convolve import launch
    from ladder.runtime.packed import pack
    from targets import get_device
    from tile_types import quantize

    gemm = problem(layer, weight)
    matrix = operands.weight.flatten(1)
    options: dict[str, Any] = {} if weight == "float16" else {"group_size": gemm.group_size}
    code = quantize(matrix.half() if weight == "float16" else matrix, weight.partition(":")[0], **options)
    packed = pack(gemm, get_device("cuda/sm_90a"), code)
    copies = [[t.clone() for t in packed.tensors] for _ in range(operands.count)]
    expected = operands.expected(code.dequantize("float64"))
    gathered_rows = None
    for item in requests:
        gathered = "" if item.gemm.windows or layer.windows.are_rows else "rows "
        way = f"{gathered}{weight} {short(item.plan.entries[0][1])}"
        facts = {"schedule": str(item.plan.entries[0][1]), "windows": bool(item.gemm.windows)}
        try:
            kernel = compiled(item.text)
            images = operands.images
            if gathered:
                gathered_rows = gathered_rows or operands.gathered()
                images = gathered_rows
            poison(expected.numel(), torch.float16)
            y = launch(kernel, images[0], copies[0], operands.bias)
            error = relative_error(y.view(expected.shape), expected)
            facts |= {"error": error, "ok": error <= BOUNDS["float16"]}
            pairs = zip(cycle(images), copies, strict=False)
            calls = [partial(launch, kernel, x, w, operands.bias) for x, w in pairs]
            yield way, facts, capture_long(calls)
        except (LadderError, RuntimeError) as error:
            yield way, {**facts, "failure": f"{type(error).__name__}: {error}"[:300]}, None


def short(schedule: Any) -> str:
    """Return a schedule in few letters."""
    tail = "t" * schedule.tails or "s" * schedule.stream_k or "p" * schedule.persistent
    return (
        f"{schedule.pipeline} {schedule.tile_m}x{schedule.tile_n}x{schedule.tile_k} s{schedule.stages}"
        f" w{schedule.warps} k{schedule.split_k} c{schedule.cluster}{tail}"
    )


def report(rows: Sequence[dict[str, Any]], bandwidth: float) -> None:
    """Print for every layer the fastest way of each weight type beside torch's fastest, and the floors."""
    for name in dict.fromkeys(row["layer"] for row in rows):
        here = [row for row in rows if row["layer"] == name and "us" in row]
        torch_us = {row["way"]: row["us"] for row in here if "weight" not in row}
        best = min(torch_us.get(way, 1e9) for way in ("torch conv2d, bias, relu", "cudnn fused"))
        text = f"{name:38} torch {torch_us.get('torch conv2d, bias, relu', 0):6.2f}"
        text += (
            f" fused {torch_us.get('cudnn fused', 0):6.2f} alone {torch_us.get('torch conv2d alone', 0):6.2f}"
        )
        for weight in dict.fromkeys(row["weight"] for row in here if "weight" in row):
            mine = [row for row in here if row.get("weight") == weight]
            ways = [row for row in mine if not row["way"].startswith("rows")]
            for own in sorted(ways, key=lambda row: row["us"])[:1]:
                text += f" | {own['way']} {own['us']:6.2f} x{best / own['us']:.2f}"
            for row in mine:
                if row["way"].startswith("rows"):  # whose windows must be written first
                    first = 2 * row["m"] * row["k"] / bandwidth * 1e6
                    text += f" (gathered first: {first:.1f} + {row['us']:.1f})"
        m, n, k = (here[0][key] for key in "mnk")
        moved = 2 * (m * n + n * k) + 2 * m * k / max(1, int(name.split()[1][0]) ** 2)
        floors = moved / bandwidth * 1e6, 2 * m * n * k / PEAK * 1e6
        print(f"{text} | floors {floors[0]:.2f} us bytes, {floors[1]:.2f} us FLOPs")


def requests_of(
    layers: Sequence[Layer], weights: Sequence[str], arguments: argparse.Namespace
) -> dict[tuple[Layer, str], list[Any]]:
    """Return what is compiled for every layer and weight type: as a file says, a sweep, or the policy."""
    from ladder.runtime.compile import Request

    work: dict[tuple[Layer, str], list[Any]] = {}
    given = json.loads(Path(arguments.candidates).read_text()) if arguments.candidates else None
    for layer, weight in product(layers, weights):
        if given is not None:
            work[layer, weight] = [Request.parse(text) for text in given.get(f"{layer}|{weight}", ())]
            continue
        try:
            gemm = problem(layer, weight)
            pick = sweep if arguments.sweep else chosen
            found = [request(gemm, s) for s in pick(gemm, layer.rows, arguments.sweep)]
            if weight in arguments.rows.split(",") and not layer.windows.are_points:
                rows = problem(layer, weight, windows=False)
                found += [request(rows, s) for s in chosen(rows, layer.rows, 1)]
        except LadderError as error:
            print(f"{layer} {weight}: {error}", flush=True)
            continue
        work[layer, weight] = found
    return work


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", default="resnet50,efficientnet")
    parser.add_argument("--weights", default="float16,int4:64,int8")
    parser.add_argument("--kinds", default="", help="kernel/stride, comma-separated: only these layers")
    parser.add_argument("--sweep", type=int, default=0, help="best predicted schedules beside a coarse grid")
    parser.add_argument("--rows", default="", help="weights whose products of gathered windows are timed too")
    parser.add_argument(
        "--candidates", default="", help="JSON of what to compile, as --write-candidates wrote"
    )
    parser.add_argument("--write-candidates", default="", help="write what would be compiled, and stop")
    parser.add_argument("--compile-only", action="store_true", help="fill the cache, measure nothing")
    parser.add_argument("--prepared", action="store_true", help="all kernels are in the cache")
    parser.add_argument("--jobs", type=int, default=usable_cores())
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds after which no layer begins"
    )
    parser.add_argument("--output", default="")
    arguments = parser.parse_args()
    if not arguments.compile_only and not arguments.write_candidates:
        require_gpu("--compile-only fills the cache")
    start = time.perf_counter()
    layers = [layer for net in arguments.nets.split(",") for layer in NETS[net]()]
    kinds = [kind for kind in arguments.kinds.split(",") if kind]
    layers = [layer for layer in layers if not kinds or f"{layer.kernel}/{layer.stride}" in kinds]
    layers.sort(key=lambda layer: (layer.net != "resnet50", -layer.kernel, -layer.stride))
    weights = arguments.weights.split(",")
    work = requests_of(layers, weights, arguments)
    if arguments.write_candidates:
        texts = {f"{layer}|{weight}": [r.text for r in found] for (layer, weight), found in work.items()}
        Path(arguments.write_candidates).write_text(json.dumps(texts, indent=0))
        return 0
    distinct = {(str(sorted(r.gemm.shape_free().items())), str(r.plan)): r for w in work.values() for r in w}
    failures: list[str] = []
    if not arguments.prepared:
        with ProcessPoolExecutor(arguments.jobs) as pool:
            failures = [text for text in pool.map(compile_one, distinct.values()) if text]
    print(
        f"{len(distinct)} kernels, {time.perf_counter() - start:.0f} s, failures: {failures[:3]}", flush=True
    )
    if arguments.compile_only:
        return 1 if failures else 0
    import torch

    torch.backends.cudnn.benchmark = True
    rows: list[dict[str, Any]] = []
    bandwidth = copy_bandwidth()
    try:
        for layer in layers:
            if time.perf_counter() - start < arguments.limit:
                rows += measure_layer(layer, weights, work)
    finally:
        if arguments.output:
            write_record(arguments.output, {"environment": environment(), "rows": rows})
    report(rows, bandwidth)
    wrong = [row for row in rows if "failure" in row or not row.get("ok", True)]
    for row in wrong:
        print("NOT OK", row)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
