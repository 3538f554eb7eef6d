"""Time Ladder's CPU kernels beside torch's in one interleaved run.

    python -m benchmarks.cpu_gemm

Every contender of a shape runs a short burst per round, in an order that rotates, so that a busy
moment of the machine hits all alike. Before a burst come a pause, in which the idle threads of
the previous contender's pool stop spinning, and one call that is not counted. Weights rotate
over several copies that together exceed the last cache, so that they come from memory. Reported
per contender: median and minimum time, the relative Frobenius error against float64 on its own
decoded weights, and the bytes it must read per second beside the read bandwidth measured in the
same rounds. Results go to benchmarks/results as JSON. Use an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.harness import write_record
from ladder.runtime import threads
from ladder.runtime.allocate import empty

RESULTS = Path(__file__).parent / "results"
SHAPES = ((4096, 4096), (14336, 4096))
TOKENS = (1, 16, 128)
GROUP = 128
BARS = {("bf16", 1): 1.3, ("bf16", 16): 1.3, ("bf16", 128): 1.0, ("int8", 16): 2.0}
"""Required ratio of the fastest torch time to ours, by Ladder variant and M."""

BANDWIDTH_BAR = 0.8
"""Required part of the measured read bandwidth at M = 1."""


SETTLE_SECONDS = 0.03
"""Longer than the thread pools of torch and TVM spin after their last task."""

BURST, BURST_SECONDS = 10, 0.02
"""Counted calls per burst, at most, and for about how long."""


@dataclass
class Contender:
    """Something that multiplies; ``run(i)`` uses copy ``i`` of the weight, ``sets[i]``."""

    name: str
    run: Callable[[int], Any]
    sets: list[Any]
    expected: Any
    bytes_read: int
    times: list[float] = field(default_factory=list)
    calls: int = 0

    def measure(self) -> None:
        """Time one burst."""
        time.sleep(SETTLE_SECONDS)
        last = self._call()
        for _ in range(min(BURST, max(1, int(BURST_SECONDS / last)))):
            last = self._call()
            self.times.append(last)

    def _call(self) -> float:
        """Return the seconds of one call on the next copy of the weight."""
        self.calls += 1
        start = time.perf_counter()
        threads.keep_apart()
        self.run(self.calls % len(self.sets))
        return time.perf_counter() - start

    def error(self) -> float:
        """Return the relative Frobenius error of one call."""
        result = self.run(0).double()
        return float((result - self.expected).norm() / self.expected.norm())

    def summary(self) -> dict[str, Any]:
        """Return what is reported."""
        median = statistics.median(self.times)
        return {
            "median_us": round(median * 1e6, 1),
            "min_us": round(min(self.times) * 1e6, 1),
            "gb_per_s": round(self.bytes_read / median / 1e9, 2),
            "relative_error": self.error(),
        }


def copies_of(tensors: list[Any], last_cache: int) -> list[list[Any]]:
    """Return enough copies that no weight is still in the last cache when its turn comes again."""
    size = sum(tensor.nbytes for tensor in tensors)
    count = max(2, -(-2 * last_cache // size))
    return [[held_as_packed(tensor) for tensor in tensors] for _ in range(count)]


def held_as_packed(tensor: Any) -> Any:
    """Return a copy in memory as operators keep packed weights in: large pages, if the system has any."""
    return empty(*tensor.shape, dtype=tensor.dtype).copy_(tensor)


SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Types of activations -> their names in results."""


def ladder_float(
    n: int, k: int, x: Any, quantized: Any, last_cache: int, activation: str = "bfloat16"
) -> Contender:
    """Ladder, int4 weights times activations of a floating-point type as they are."""
    import torch

    entry, arrays = build(activation, n, k, quantized, x.shape[0])
    sets = copies_of(list(arrays.values()), last_cache)
    x = x.to(getattr(torch, activation))
    y = torch.empty(x.shape[0], n, dtype=x.dtype)

    def run(turn: int) -> Any:
        entry(x, *sets[turn], y)
        return y

    return Contender(f"ladder {SHORT[activation]}", run, sets, reference(x, quantized), nbytes(sets[0]))


def ladder_int8(n: int, k: int, x: Any, quantized: Any, last_cache: int) -> Contender:
    """Ladder, bfloat16 activations quantized to int8 per token within the timed call."""
    import torch

    entry, arrays = build("int8", n, k, quantized, x.shape[0])
    quantizer = build_quantizer()
    sets = copies_of(list(arrays.values()), last_cache)
    y = torch.empty(x.shape[0], n, dtype=torch.bfloat16)
    codes, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[0])

    def run(turn: int) -> Any:
        quantizer(x, codes, scale)
        entry(codes, *sets[turn], scale, y)
        return y

    return Contender("ladder int8", run, sets, reference(x, quantized), nbytes(sets[0]))


def build(activation: str, n: int, k: int, quantized: Any, m: int) -> tuple[Any, dict[str, Any]]:
    """Compile the policy's schedule for ``m`` and pack the weight."""
    from ladder.ir.gemm import Gemm
    from ladder.lower import cpu
    from ladder.lower.build import emit
    from ladder.lower.cpu.toolchain import compile_module
    from schedules.cpu_policy import cpu_schedule
    from targets import host_cpu

    integers = activation == "int8"
    output = "bfloat16" if integers else activation
    gemm = Gemm(n, k, "int4", activation, output, GROUP, token_scale=integers)
    device = host_cpu()
    schedule = cpu_schedule(gemm, device, m)
    module = compile_module({"entry": emit(gemm, device, schedule, "entry")}, device)
    return module["entry"], cpu.pack(gemm, quantized)


def build_quantizer() -> Any:
    """Compile the kernel that quantizes activations."""
    from ladder.lower import cpu
    from ladder.lower.cpu.toolchain import compile_module
    from targets import host_cpu

    return compile_module({"q": cpu.emit_quantize("bfloat16", host_cpu(), "q")}, host_cpu())["q"]


def torch_int4(n: int, k: int, x: Any, quantized: Any, last_cache: int) -> Contender:
    """torch._weight_int4pack_mm_for_cpu with the same codes, groups and (rounded) scales."""
    import torch

    codes = torch.as_tensor(quantized.codes()).to(torch.int32) ^ 8  # two's complement to offset 8
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scale = torch.as_tensor(quantized.scale).to(torch.bfloat16)
    scales = torch.stack([scale, torch.zeros_like(scale)], -1).transpose(0, 1).contiguous()
    sets = copies_of([packed, scales], last_cache)

    def run(turn: int) -> Any:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, sets[turn][0], GROUP, sets[turn][1])

    return Contender("torch int4", run, sets, reference(x, quantized), nbytes(sets[0]))


def torch_bf16(n: int, k: int, x: Any, quantized: Any, last_cache: int) -> Contender:
    """F.linear on bfloat16 weights."""
    import torch

    weight = torch.as_tensor(quantized.dequantize("float32")).to(torch.bfloat16)
    sets = copies_of([weight], last_cache)
    expected = x.double() @ weight.double().T
    return Contender(
        "torch bf16",
        lambda turn: torch.nn.functional.linear(x, sets[turn][0]),
        sets,
        expected,
        nbytes(sets[0]),
    )


def torch_int8(n: int, k: int, x: Any, quantized: Any, last_cache: int) -> Contender:
    """torch._int_mm on int8 weights and activations that are quantized beforehand (context, no baseline)."""
    import torch

    codes = torch.as_tensor(quantized.codes()).to(torch.int8)
    weight = torch.where(codes > 7, codes - 16, codes)
    sets = [[w.t()] for (w,) in copies_of([weight], last_cache)]
    scale = x.float().abs().amax(1, keepdim=True) / 127
    fixed = (x.float() / scale).round().to(torch.int8)
    return Contender(
        "torch _int_mm",
        lambda turn: torch._int_mm(fixed, sets[turn][0]),
        sets,
        fixed.double() @ weight.double().T,
        nbytes(sets[0]),
    )


def read_bandwidth(ladder: Contender) -> Contender:
    """Read the very words that Ladder multiplies, with Ladder's threads and nothing else to do.

    The same memory, because pages differ in how fast they are on a virtual machine.
    """
    import torch

    slices = 64
    sets = [tensors[0].view(torch.int32).reshape(-1) for tensors in ladder.sets]
    count = sets[0].numel() // (slices * 128) * slices * 128
    sets = [words[:count].view(torch.uint32) for words in sets]
    result = torch.empty(slices, dtype=torch.int32)
    entry = build_reader()

    def run(turn: int) -> Any:
        entry(sets[turn], result.view(torch.uint32))
        return result

    sums = sets[0].view(torch.int32).to(torch.int64).reshape(slices, -1).sum(1)
    return Contender("read", run, sets, sums.to(torch.int32).double(), sets[0].nbytes)


def build_reader() -> Any:
    """Compile a kernel that sums uint32 words in slices, eight accumulators each."""
    from ladder.lower import builder as b
    from ladder.lower.cpu import vectors as v
    from ladder.lower.cpu.toolchain import compile_module
    from targets import host_cpu

    with b.function("read") as emitted:
        count, slices = b.symbol("count"), b.symbol("slices")
        words = b.tensor("words", (count,), "uint32", align=4)
        result = b.tensor("result", (slices,), "uint32", align=4)
        with v.parallel(slices) as part:
            totals = v.scratch(128, "uint32")
            for index in range(8):
                b.store(totals, v.constant(0, "uint32"), v.lanes(16 * index))
            length = b.bind(count // slices)
            with b.loop(length // 128) as step:
                for index in range(8):
                    at = v.lanes(16 * index)
                    b.store(totals, totals[at] + words[v.lanes(part * length + step * 128 + 16 * index)], at)
            total = totals[0]
            for index in range(1, 128):
                total = total + totals[index]
            b.store(result, total, part)
    return compile_module({"read": emitted.func}, host_cpu())["read"]


def nbytes(tensors: list[Any]) -> int:
    """Return the bytes of all tensors."""
    return sum(int(tensor.nbytes) for tensor in tensors)


def reference(x: Any, quantized: Any) -> Any:
    """Return the product in float64 on the decoded weights."""
    import torch

    return x.double() @ torch.as_tensor(quantized.dequantize()).double().T


def interleave(contenders: list[Contender], rounds: int) -> None:
    """Run a burst of every contender per round; the first round warms up."""
    for contender in contenders:
        contender.measure()
        contender.times.clear()
    for turn in range(rounds):
        for offset in range(len(contenders)):
            contenders[(turn + offset) % len(contenders)].measure()


def run_shape(n: int, k: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one weight shape at every M."""
    import torch

    from tile_types import quantize

    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0))
    quantized = quantize(weight, "int4", group_size=GROUP, scale_type="bfloat16")
    makers = [ladder_float, ladder_int8, torch_int4, torch_bf16, torch_int8]
    results = []
    for m in TOKENS:
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        # torch._int_mm takes more than 16 rows only.
        chosen = [make for make in makers if make is not torch_int8 or m > 16]
        contenders = [make(n, k, x, quantized, args.last_cache) for make in chosen]
        contenders.append(read_bandwidth(contenders[0]))
        interleave(contenders, args.rounds)
        results.append(report(n, k, m, {contender.name: contender.summary() for contender in contenders}))
    return results


def report(n: int, k: int, m: int, times: dict[str, Any]) -> dict[str, Any]:
    """Print one line per contender and return the record with ratios and verdicts."""
    fastest = min(times[name]["median_us"] for name in ("torch int4", "torch bf16"))
    ratios = {
        variant: round(fastest / times[f"ladder {variant}"]["median_us"], 3) for variant in ("bf16", "int8")
    }
    part = round(times["ladder bf16"]["gb_per_s"] / times["read"]["gb_per_s"], 3)
    verdicts = {
        f"{variant} >= {bar}x": ratios[variant] >= bar for (variant, at), bar in BARS.items() if at == m
    }
    if m == 1:
        verdicts[f">= {BANDWIDTH_BAR} of read bandwidth"] = part >= BANDWIDTH_BAR
    print(f"N={n} K={k} M={m}: ratios to fastest torch {ratios}, part of read bandwidth {part}, {verdicts}")
    for name, row in times.items():
        print(
            f"  {name:14} median {row['median_us']:10.1f} us  min {row['min_us']:10.1f} us"
            f"  {row['gb_per_s']:6.1f} GB/s  error {row['relative_error']:.1e}"
        )
    return {
        "n": n,
        "k": k,
        "m": m,
        "times": times,
        "ratio_to_fastest_torch": ratios,
        "part_of_read_bandwidth": part,
        "bars": verdicts,
    }


def cpu_name() -> str:
    """Return the CPU's model name."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def last_cache_bytes() -> int:
    """Return the size of the last-level cache, 32 MiB if the system does not tell."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 1 << 10, "M": 1 << 20}
    texts = [path.read_text(encoding="utf-8").strip() for path in sizes]
    return max((int(text[:-1]) * units[text[-1]] for text in texts), default=32 << 20)


def main() -> int:
    """Run the benchmark; exit code 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20, help="bursts per contender, shape and M")
    parser.add_argument(
        "--output", type=Path, help="JSON file (default: benchmarks/results/cpu_gemm_DATE.json)"
    )
    args = parser.parse_args()
    args.last_cache = last_cache_bytes()
    threads.prepare_environment(args.threads)
    import torch
    import tvm  # noqa: F401  its runtime registers the thread pool

    torch.set_num_threads(args.threads)
    load = os.getloadavg()
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    results = [row for n, k in SHAPES for row in run_shape(n, k, args)]
    record = {
        "date": started,
        "cpu": cpu_name(),
        "threads": args.threads,
        "nice": os.nice(0),
        "last_cache_bytes": args.last_cache,
        "versions": {name: version(name) for name in ("torch", "apache-tvm", "numpy")},
        "command": f"python -m benchmarks.cpu_gemm --threads {args.threads} --rounds {args.rounds}",
        "load_average": {"before": load, "after": os.getloadavg()},
        "results": results,
    }
    path = args.output or RESULTS / f"cpu_gemm_{started[:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, record)
    print(f"written to {path.name}")
    return 0 if all(all(row["bars"].values()) for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
