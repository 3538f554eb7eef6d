"""Models at real sizes beside torch.compile with CUDA graphs: calls from Python, on a GPU.

``python -m benchmarks.compiled NAME ... [--jobs N] [--limit S] [--seconds S] --output F``

A NAME is ``timm/resnet50``, ``tv/resnet50`` or ``hf/BertModel`` (a class of transformers with its default
configuration, cut to `LAYERS` layers), with ``@N`` for N images or texts instead of 16 or 2, and ``+mask``
for texts of different lengths. Each has random weights, float16 or bfloat16 by its name, and runs in a
process of its own, `--jobs` at a time; one after the other they take the GPU for timings, others compile.

Of each: milliseconds of a call, the host's part included (least of `ROUNDS` by turns, of `CALLS` each), the
first call's seconds, the most memory beside the model's own in MB (first and later calls), the largest
relative difference of a result from float32's, where graphs end, and how often each kind of step occurs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import fcntl
import functools
import inspect
import os
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import ladder
from benchmarks.forked import Row, rows_of, write_row
from benchmarks.harness import environment, require_gpu, write_record
from benchmarks.zoo import Inputs, Made, import_torchvision
from benchmarks.zoo_compare import difference
from benchmarks.zoo_inputs import inputs_of

LAYERS = {"wide": 2, "narrow": 12}
"""Layers of a model of transformers, at most: rows of more than 1,024 numbers are wide."""

ROUNDS, CALLS, SETTLING = 20, 5, 12

WAYS: dict[str, Callable[[Any], Any]] = {
    "ladder": ladder.compile,
    "torch_compile_graphs": functools.partial(torch.compile, mode="reduce-overhead"),
}


def made(name: str, dtype: torch.dtype) -> Made:
    """Return a model on the GPU and its inputs, one set."""
    kind, count, mask = re.fullmatch(r"([^@+]+)(?:@(\d+))?(\+mask)?", name).groups()  # type: ignore[union-attr]
    library, _, kind = kind.partition("/")
    torch.manual_seed(0)
    import_torchvision()
    if library == "hf":
        return of_transformers(kind, dtype, int(count or 2), masked=bool(mask))
    if library == "timm":
        import timm

        model: Any = timm.create_model(kind, pretrained=False)
        size = model.default_cfg["input_size"]
    else:
        import torchvision

        model = torchvision.models.get_model(kind, weights=None)
        size = (3, 8, 112, 112) if "video" in type(model).__module__ else (3, 224, 224)
    images = torch.randn(int(count or 16), *size, dtype=dtype)
    return model.to("cuda", dtype).eval(), [{"x": images.cuda()}]


def of_transformers(kind: str, dtype: torch.dtype, count: int, *, masked: bool) -> Made:
    """Return a model of transformers with its default configuration, and texts of 512 tokens (one: 128)."""
    import transformers

    model_class = getattr(transformers, kind)
    config = model_class.config_class()
    wide = getattr(config, "hidden_size", 0)
    most = LAYERS["wide" if isinstance(wide, int) and wide > 1024 else "narrow"]
    for field in ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "n_layer"):
        layers = getattr(config, field, None)
        if isinstance(layers, int) and layers > most:
            setattr(config, field, most)
            if isinstance(getattr(config, "layer_types", None), list):
                config.layer_types = config.layer_types[:most]
    with torch.device("cuda"):
        model = model_class(config).to(dtype).eval()
    length = min(128 if count == 1 else 512, getattr(config, "max_position_embeddings", None) or 512)
    inputs: dict[str, Any] = {**inputs_of(model, config, [(count, length)])[0]}
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    if masked:
        lengths = torch.linspace(length, length // 4, count, device="cuda").long()
        places = torch.arange(length, device="cuda")
        inputs["attention_mask"] = (places < lengths[:, None]).long()
    return model, [inputs]


def of_type(dtype: torch.dtype, values: Any) -> Any:
    """Return values with all floating tensors in them converted."""

    def converted(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return torch.utils._pytree.tree_map(converted, values)


@contextlib.contextmanager
def alone(path: str) -> Iterator[None]:
    """Wait until no other process is within this block with this path."""
    with open(path, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def megabytes(call: Callable[[], Any]) -> float:
    """Return the most memory that a call held beside what was held before, in MB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def least_ms(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the milliseconds of a call of each way, the least of `ROUNDS` by turns."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for way, call in ways.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            torch.cuda.synchronize()
            best[way] = min(best[way], 1e3 * (time.perf_counter() - start) / CALLS)
    return best


def first_calls(way: str, compiled: Any, inputs: Inputs, expected: Any) -> tuple[Row, Callable[[], Any]]:
    """Make the calls after which nothing is compiled; return what they took, and a call."""

    def call() -> Any:
        return compiled(**inputs)

    start = time.perf_counter()
    first = megabytes(call)
    row: Row = {f"{way}_first_s": time.perf_counter() - start, f"{way}_first_mb": first}
    for _ in range(SETTLING):
        found = call()
    torch.cuda.synchronize()
    return {**row, f"{way}_error": difference(expected, found), f"{way}_mb": megabytes(call)}, call


def of_plan(compiled: Any) -> Row:
    """Return what became of a model: graphs, where they end, steps by kind."""
    told = compiled.explain().partition("\n")[0]
    lines = (line for line in compiled.plan().splitlines() if line and not line.startswith("graph"))
    kinds = (line.split()[0] for line in lines)
    splits = sorted({f"{record.split}: {record.where[-1]}" for record in compiled.records if record.split})
    row: Row = {"records": len(compiled.records), "splits": splits, "steps": dict(collections.Counter(kinds))}
    return {**row, "refused": compiled.refused, "told": told}


def measure(name: str, output: Path, lock: str, ways: Sequence[str]) -> None:
    """Write the row of a model, or how it failed."""
    warnings.simplefilter("ignore")
    dtype = torch.float16 if sum(map(ord, name)) % 2 else torch.bfloat16
    row: Row = {"name": name, "dtype": str(dtype).removeprefix("torch."), "outcome": "failed"}
    try:
        with torch.no_grad():
            model, (inputs,) = made(name, dtype)
            exact = copy.deepcopy(model).float()
            expected = of_type(dtype, exact(**of_type(torch.float32, inputs)))
            del exact
            told, eager = first_calls("eager", model, inputs, expected)
            row.update(told)
            calls = {"eager": eager}
            for way in ways:
                compiled = WAYS[way](copy.deepcopy(model))
                try:
                    told, calls[way] = first_calls(way, compiled, inputs, expected)
                    row.update(told, **of_plan(compiled) if way == "ladder" else {})
                except Exception as error:
                    row[f"{way}_failed"] = f"{type(error).__name__}: {error}"[:300]
                write_row(row, output)
            with alone(lock):
                row.update({f"{way}_ms": ms for way, ms in least_ms(calls).items()}, outcome="timed")
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:500]
        row["at"] = traceback.format_exc().splitlines()[-8:]
    write_row(row, output)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    require_gpu()
    bounds = {key: getattr(arguments, key) for key in ("jobs", "limit", "seconds")}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        work = functools.partial(measure, lock=f"{folder}/gpu.lock", ways=arguments.ways)
        for row in rows_of(arguments.names, work, Path(folder), method="spawn", **bounds):
            rows.append(row)
            rival = row.get("torch_compile_graphs_ms", 0.0) / row.get("ladder_ms", float("inf"))
            told = (row.get(key, "") for key in ("splits", "error"))
            print(row["name"], row["outcome"], f"{rival:.2f}", *told, flush=True)
            write_record(arguments.output, {**environment(), "rows": rows})


if __name__ == "__main__":
    main()
