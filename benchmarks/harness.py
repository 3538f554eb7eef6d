"""What every GPU benchmark shares: timing in CUDA graphs, rotation of weights, errors, environment.

Weights rotate over copies that exceed four times the L2 of an H200, so that each call finds
its weight in HBM. Engines that are compared take turns, one graph replay each per round, so
that a drift of clocks or temperature hits all alike.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder.installation import ladder_version, tvm_version

BOUNDS = {"float16": 5e-4, "bfloat16": 3e-3, "fp8_e4m3": 2e-3, "fp8_e5m2": 2e-3, "int8": 1e-5}
"""Largest relative Frobenius error against float64 on the decoded weights, by activation type."""

ROTATION_BYTES = 2.4e8
"""Four times the 60 MB L2 of an H200."""

GRAPH_US = 400.0
"""About how long one graph runs at least, so that the gap before it does not show."""

Call = Callable[[], Any]


def require_gpu(otherwise: str = "") -> None:
    """End the program where there is no NVIDIA GPU; ``otherwise`` says what it does without one."""
    import torch

    if not torch.cuda.is_available():
        rest = f"; without one, {otherwise}" if otherwise else ""
        raise SystemExit(f"measuring needs an NVIDIA GPU{rest}")


def copies_for(nbytes: int) -> int:
    """Return how many copies of a weight exceed the L2 four times; at least two."""
    return max(2, math.ceil(ROTATION_BYTES / nbytes))


# ---- timing ---------------------------------------------------------------------------
@dataclass
class Captured:
    """A CUDA graph that runs all ``calls``, one after the other, and keeps what they refer to."""

    graph: Any
    calls: Sequence[Call]

    def replay_us(self) -> float:
        """Return the microseconds per call of one replay."""
        begin, end = events()
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / len(self.calls)


def events() -> tuple[Any, Any]:
    """Return two CUDA events that can be timed."""
    import torch

    make: Any = torch.cuda.Event
    return make(enable_timing=True), make(enable_timing=True)


def capture(calls: Sequence[Call], *, warm: bool = True) -> Captured:
    """Capture all calls into one graph, by default after each ran once outside it."""
    import torch

    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls if warm else ():
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return Captured(graph, calls)


def capture_long(calls: Sequence[Call], least_us: float = GRAPH_US) -> Captured:
    """Capture whole rotations of ``calls``, as many as take about ``least_us``."""
    captured = capture(calls)
    captured.replay_us()
    once = captured.replay_us() * len(calls)
    rotations = math.ceil(least_us / once)
    return captured if rotations <= 1 else capture(list(calls) * rotations, warm=False)


def graph_time_us(calls: Sequence[Call], repeats: int = 15) -> float:
    """Return the median microseconds per call of a CUDA graph that runs all calls once."""
    captured = capture(calls)
    times = [captured.replay_us() for _ in range(repeats + 2)]
    return statistics.median(times[2:])


def interleaved_us(graphs: Mapping[str, Captured], rounds: int) -> dict[str, list[float]]:
    """Replay every graph once per round, in an order that rotates; two rounds warm up."""
    names = list(graphs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 2):
        for offset in range(len(names)):
            name = names[(turn + offset) % len(names)]
            elapsed = graphs[name].replay_us()
            if turn >= 2:
                times[name].append(elapsed)
    return times


def copy_bandwidth() -> float:
    """Return bytes per second of a large pass over memory, reads and writes counted.

    By an element-wise kernel: in a graph, a copy would go to the copy engine, which is slower.
    """
    import torch

    source = torch.empty(1 << 29, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    calls = [lambda: torch.bitwise_not(source, out=target)] * 2
    return 2 * source.nbytes / (graph_time_us(calls) * 1e-6)


# ---- errors ---------------------------------------------------------------------------
def poison(count: int, dtype: Any) -> None:
    """Fill the allocator's next block of this size with NaN or -1, so that unwritten outputs show."""
    import torch

    torch.full((count * dtype.itemsize,), 0xFF, dtype=torch.uint8, device="cuda")


def relative_error(result: Any, reference: Any) -> float:
    """Return the relative Frobenius error; infinity if the result is not finite."""
    error = float((result.double() - reference).norm() / reference.norm())
    return error if math.isfinite(error) else math.inf


# ---- reports --------------------------------------------------------------------------
def environment() -> dict[str, Any]:
    """Describe the machine, the versions and the command."""
    import torch

    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "versions": {
            "ladder": ladder_version(),
            "apache-tvm": tvm_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "command": command(),
        "commit": revision(),
    }


def revision() -> str:
    """Return the commit that runs, marked where tracked files differ from it; what it is without git."""
    told = [
        subprocess.run(
            ["git", *words], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
        )
        for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    ]
    if any(part.returncode for part in told):
        return "unknown: no git checkout"
    return told[0].stdout.strip() + (" with changes" if told[1].stdout.strip() else "")


def write_record(path: str | Path, report: Mapping[str, Any]) -> None:
    """Write a result as JSON, with the commit that was measured; ``rows`` get a short line each."""
    told = "commit" in report or "commit" in report.get("environment", {})
    stamped = dict(report) if told else {"commit": revision(), **report}
    text = compact(stamped) if "rows" in stamped else json.dumps(stamped, indent=1, default=str) + "\n"
    Path(path).write_text(text, encoding="utf-8")


def command() -> str:
    """Return how this process was started, without the folders of this machine."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = sys.argv[0] if spec is None else f"-m {spec.name.removesuffix('.__main__')}"
    arguments = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return " ".join(["python", name, *arguments])


def compact(report: Mapping[str, Any]) -> str:
    """Return the report as JSON with one short line per row, numbers rounded to four digits."""
    head = json.dumps({name: value for name, value in report.items() if name != "rows"}, indent=1)
    lines = ",\n".join(json.dumps(shortened(row), separators=(",", ":")) for row in report["rows"])
    return f'{head[:-2]},\n "rows": [\n{lines}\n]}}\n'


def shortened(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its floats rounded to four significant digits."""
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
