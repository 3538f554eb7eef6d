"""What a matched run costs beyond its graph, for a stack of BERT-base layers: run as a script.

Prints microseconds per call, medians of interleaved rounds: the graph alone, the captured call, and
`torch.compile` with a backend that also only replays its graph.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from ladder.capture import capture


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
        return self.output(mixed.view(x.size(0), x.size(1), -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first_norm(x + self.dropout(self.attend(x)))
        return self.second_norm(x + self.dropout(self.down(self.activation(self.up(x)))))


def stack(layers: int, width: int, heads: int) -> nn.Module:
    """Return a stack of layers in evaluation mode."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(width, heads) for _ in range(layers))).eval()


def microseconds(call: Callable[[], object], repeats: int) -> float:
    """Return the time of one call."""
    start = time.thread_time()
    for _ in range(repeats):
        call()
    return (time.thread_time() - start) / repeats * 1e6


def main(layers: int = 12) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    model, x = stack(layers, 8, 2), torch.randn(1, 2, 8)
    captured = capture(model)
    with torch.no_grad():
        captured(x)
        captured(x)
        record = captured.records[0]
        print(captured.outcome, len(record.checks), "checks,", record.operators, "operators")
        inputs: list[object] = []
        forward, names = record.graph.forward, record.run.__globals__
        places = [name for name in names if names[name] is forward or names[name] == forward]
        names[places[0]] = lambda *given: inputs.extend(given) or forward(*given)
        captured(x)
        names[places[0]] = forward
        calls = {"graph": lambda: forward(*inputs), "captured": lambda: captured(x)}
        names_only = dict(names) | {places[0]: (results := forward(*inputs)) and (lambda *given: results)}
        guard = type(record.run)(record.run.__code__, names_only)
        calls["guard and mock"] = lambda: guard(x)
        if "--torch" in sys.argv:
            compiled = torch.compile(model, backend=lambda module, examples: module.forward)
            compiled(x)
            calls["torch.compile"] = lambda: compiled(x)
        rounds = [{name: microseconds(call, 20) for name, call in calls.items()} for _ in range(15)]
    for name in calls:
        print(f"{name:16s} {statistics.median(row[name] for row in rounds):9.1f} us")


if __name__ == "__main__":
    main()
