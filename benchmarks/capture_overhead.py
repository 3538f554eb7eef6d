"""What a matched run costs beyond its graph, beside torch.compile's guards: BERT-base layers, or models.

``python -m benchmarks.capture_overhead [--device meta|cpu|cuda] [--width 768] [--output FILE]``
``python -m benchmarks.capture_overhead --models [NAME ...] [--audited]``: small models of `benchmarks.zoo`
on the CPU, also where the interpreter has an audit hook, as on monitored machines

Three ways to run one graph take turns: `ladder.capture`, `torch.compile` with the same backend, and the
graph alone. The backend runs the graph operator by operator and notes how long that took; what the call
took beyond it is guard, mock and call. On the device ``meta`` operators only dispatch, so that the caches of
the CPU hold what they hold where a GPU computes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import write_record
from benchmarks.zoo import made
from ladder.capture import capture
from ladder.capture.python.words import words


class Layer(nn.Module):
    """One encoder layer in the shape of BERT's code: separate query, key, value and output modules."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation, self.dropout = nn.GELU(), nn.Dropout(0.1)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.size(-1))
        weights = self.dropout(torch.softmax(scores, dim=-1))
        mixed = torch.matmul(weights, value).transpose(1, 2).contiguous()
        result: torch.Tensor = self.output(mixed.view(x.size(0), x.size(1), -1))
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first_norm(x + self.dropout(self.attend(x)))
        result: torch.Tensor = self.second_norm(x + self.dropout(self.down(self.activation(self.up(x)))))
        return result


def stack(layers: int, width: int, heads: int) -> nn.Module:
    """Return a stack of layers in evaluation mode."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(width, heads) for _ in range(layers))).eval()


class Timed:
    """Runs a graph and notes the seconds that took."""

    def __init__(self, module: torch.fx.GraphModule, _: list[Any]) -> None:
        self.forward = module.forward
        self.seconds = 0.0
        self.given: tuple[Any, ...] = ()

    def __call__(self, *inputs: Any) -> Any:
        start = time.perf_counter()
        result = self.forward(*inputs)
        self.seconds += time.perf_counter() - start
        self.given = inputs
        return result


def overheads(
    calls: dict[str, Callable[[], object]], graphs: dict[str, list[Timed]], rounds: int
) -> dict[str, Any]:
    """Return for each way the quartiles of its microseconds beyond the graph, and the graph's own."""
    beyond: dict[str, list[float]] = {name: [] for name in calls}
    inside: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            for graph in graphs[name]:
                graph.seconds = 0.0
            start = time.perf_counter()
            call()
            total = time.perf_counter() - start
            inside[name].append(sum(graph.seconds for graph in graphs[name]) * 1e6)
            beyond[name].append(total * 1e6 - inside[name][-1])
    return {
        name: {
            "beyond_us": [round(value, 1) for value in statistics.quantiles(beyond[name], n=4)],
            "graph_us": round(statistics.median(inside[name]), 1),
        }
        for name in calls
    }


def measure(device: str, layers: int, width: int, rounds: int) -> dict[str, Any]:
    """Return what was measured, with what."""
    torch.set_num_threads(1)
    model = stack(layers, width, 12).to(device)
    x = torch.zeros(1, 8, width, device=device)
    noted: list[Timed] = []

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Timed:
        noted.append(Timed(module, examples))
        return noted[-1]

    with torch.no_grad():
        captured, compiled = capture(model, backend=backend), torch.compile(model, backend=backend)
        for call in (captured, compiled):
            call(x)
        ours = noted[0]
        captured(x)
        given = ours.given
        calls = {
            "capture": lambda: captured(x),
            "torch.compile": lambda: compiled(x),
            "graph": lambda: ours(*given),
        }
        graphs = {"capture": [ours], "torch.compile": [noted[1]], "graph": [ours]}
        overheads(calls, graphs, 20)
        found = overheads(calls, graphs, rounds)
    record = captured.records[0]
    found["operators"], found["checks"] = record.operators, len(record.checks)
    found["bars"] = {
        "at most 60 us more than the graph": _median(found, "capture") - _median(found, "graph") <= 60,
        "below torch.compile": _median(found, "capture") < _median(found, "torch.compile"),
    }
    return found


MODELS = words(
    """
    hf/llama hf/gpt2 hf/gemma2 hf/mixtral hf/bert hf/t5 hf/bart hf/vit hf/swin hf/convnext hf/mamba hf/deberta
    """
)


def of_model(name: str, rounds: int) -> dict[str, Any]:
    """Return what steady calls of one model take beyond their graphs, under capture and torch.compile."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    model, inputs = made(name)
    graphs: dict[str, list[Timed]] = {"capture": [], "torch.compile": []}

    def backend(way: str) -> Callable[..., Timed]:
        def note(module: torch.fx.GraphModule, examples: list[Any]) -> Timed:
            graphs[way].append(Timed(module, examples))
            return graphs[way][-1]

        return note

    with torch.no_grad():
        captured = capture(model, backend=backend("capture"))
        compiled = torch.compile(model, backend=backend("torch.compile"))
        calls = {
            "capture": lambda: captured(**inputs[0]),
            "torch.compile": lambda: compiled(**inputs[0]),
        }
        overheads(calls, graphs, 20)
        found = overheads(calls, graphs, rounds)
    found["graphs"] = {way: len(each) for way, each in graphs.items()}
    found["below torch.compile"] = _median(found, "capture") <= _median(found, "torch.compile")
    return found


def _print_models(names: list[str], rounds: int) -> dict[str, Any]:
    rows = {}
    for name in names:
        row = rows[name] = of_model(name, rounds)
        ours, theirs = _median(row, "capture"), _median(row, "torch.compile")
        print(f"{name:24} capture {ours:7.1f} us, torch.compile {theirs:7.1f} us", row["graphs"], flush=True)
    return {
        "models": rows,
        "bars": {"below torch.compile": all(r["below torch.compile"] for r in rows.values())},
    }


def _median(found: dict[str, Any], name: str) -> float:
    return float(found[name]["beyond_us"][1])


def main() -> None:
    """Measure, print, and write a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="meta")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--audited", action="store_true")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.audited:
        sys.addaudithook(lambda event, arguments: None)
    if given.models is not None:
        found = _print_models(given.models or list(MODELS), given.rounds)
    else:
        found = measure(given.device, given.layers, given.width, given.rounds)
    found |= {
        "command": " ".join(["python -m benchmarks.capture_overhead", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }
    print(json.dumps(found, indent=1))
    if given.output is not None:
        write_record(given.output, found)


if __name__ == "__main__":
    main()
