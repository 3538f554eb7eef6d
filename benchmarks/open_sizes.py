"""Models whose sizes change from call to call: one plan for all, beside eager torch and plans of one size.

Every result is compared with the model in float64. "New sizes" are calls of sizes not seen before, so
without a CUDA graph; "again" is one size repeated.

    python -m benchmarks.open_sizes --device cuda --output open_sizes.json
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ladder
from benchmarks.harness import write_record
from benchmarks.model_cases import zoo

BERT = ((2, 16), (3, 40), (4, 128), (1, 33), (8, 100), (5, 384), (16, 64), (7, 17), (2, 255), (9, 31))
"""Batch and length of successive calls; the first three decide what is open."""

PROMPTS = (24, 65, 130, 512, 33, 200, 1000)
STEPS = 40
"""Tokens that are decoded, each with a cache that is one longer."""


def error(found: Any, exact: Any) -> float:
    """Return the largest relative error among tensors."""
    pairs = zip(_tensors(found), _tensors(exact), strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors(item)


def timed(call: Callable[[], Any], rounds: int = 20) -> float:
    """Return the median microseconds of a call, the device idle before and after."""
    times = []
    for _ in range(rounds):
        _wait()
        start = time.perf_counter()
        call()
        _wait()
        times.append((time.perf_counter() - start) * 1e6)
    return round(statistics.median(times), 1)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Case:
    """A model in half precision (single on CPUs), compiled, and as reference in double."""

    def __init__(self, model: nn.Module, device: str) -> None:
        torch.manual_seed(0)
        self.exact = copy.deepcopy(model).eval().to(device, torch.float64)
        self.model = model.eval().to(device, torch.float16 if device == "cuda" else torch.float32)
        self.fast: Any = ladder.compile(self.model)

    def rows(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[dict[str, Any]]:
        """Return one row per call: error, plans made so far, and times."""
        found = []
        for name, given in calls:
            start = time.perf_counter()
            result = self.fast(*given)
            _wait()
            first = time.perf_counter() - start
            row = {"call": name, "plans": len(self.fast.models), "first us": round(first * 1e6)}
            row["error"] = error(result, self.exact(*_wide(given)))
            row["eager error"] = error(self.model(*given), self.exact(*_wide(given)))
            row["again us"] = timed(partial(self.fast, *given))
            row["eager us"] = timed(partial(self.model, *given))
            found.append(row)
            print(json.dumps(row), flush=True)
        print(json.dumps(self.summary()), flush=True)
        return found

    def summary(self) -> dict[str, Any]:
        """Return what was built: the last plan is the open one."""
        models = self.fast.models
        kernels = [len(built.kernels) for built in models]
        sites = [*self.fast.entries.values(), *self.fast.sites.values()]
        fixed = sorted({path for site in sites for path in site.unliftable})
        return {
            "plans": len(models),
            "kernels of each": kernels,
            "refused": self.fast.refused,
            "sizes that stay fixed": fixed,
        }


def _wide(value: Any) -> Any:
    """Return arguments with floats in double."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return type(value)(map(_wide, value)) if isinstance(value, list | tuple) else value


def bert(device: str, small: bool) -> dict[str, Any]:
    """Return rows of an encoder with changing batch and length."""
    sizes = (100, 64, 4, 2, 512) if small else (30522, 768, 12, 12, 512)
    case = Case(zoo.Bert(*sizes), device)

    def given(batch: int, length: int) -> tuple[Tensor, Tensor]:
        mask = torch.ones(batch, length, device=device)
        mask[:, length // 2 + 1 :] = 0
        return torch.randint(1, 99, (batch, length), device=device), mask

    rows = case.rows([(f"{b} x {t}", given(b, t)) for b, t in BERT])
    fixed = given(*BERT[-1])
    alone: Any = ladder.compile(case.model)
    alone(*fixed)
    return {"rows": rows, "fixed plan us": timed(lambda: alone(*fixed)), **case.summary()}


def llama(device: str, small: bool) -> dict[str, Any]:
    """Return rows of prompts of changing length, then of steps with growing caches."""
    sizes = (100, 64, 4, 2, 160, 2) if small else (32000, 2048, 32, 8, 8192, 4)
    case = Case(zoo.Llama(*sizes), device)
    prompts = [torch.randint(0, 99, (1, length), device=device) for length in PROMPTS]
    found: dict[str, Any] = {"prompts": case.rows([(f"prompt {p.shape[1]}", (p,)) for p in prompts])}
    token = torch.randint(0, 99, (1, 1), device=device)
    start = [list(layer) for layer in case.model(prompts[-1])[1]]
    worst, plans, past, times = 0.0, [], start, []
    for step in range(STEPS):
        before = time.perf_counter()
        logits, new = case.fast(token, past)
        _wait()
        times.append((time.perf_counter() - before) * 1e6)
        plans.append(len(case.fast.models))
        if step % 8 < 4:
            worst = max(worst, error([logits, new], case.exact(token, _wide(past))))
        past = [list(layer) for layer in new]
    found |= {"steps": STEPS, "worst error of steps": worst, "plans by step": plans}
    found["new sizes, us per step"] = round(statistics.median(times[8:]), 1)
    found["eager us per step"] = timed(lambda: case.model(token, past))
    found["again us per step"] = timed(lambda: case.fast(token, past))
    alone: Any = ladder.compile(case.model)
    alone(token, past)
    found["fixed plan us per step"] = timed(lambda: alone(token, past))
    print(json.dumps(found), flush=True)
    return found | case.summary()


CASES = {"bert": bert, "llama": llama}


def main() -> None:
    """Run the cases and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="toy sizes")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with torch.no_grad():
        found = {name: CASES[name](given.device, given.small) for name in given.cases}
    print(json.dumps(found, indent=1))
    if given.output:
        write_record(given.output, found)


if __name__ == "__main__":
    main()
