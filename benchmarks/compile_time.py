"""How long `ladder.compile` takes: cold (an empty cache of kernels) and warm (a new process, same cache).

``python -m benchmarks.compile_time --models "llama 8b" "resnet 50" --device cuda``. Measured from the call of
`ladder.compile` to the first result of the compiled plan: capture, import, partition, kernels, loading. Each
measurement is a process of its own; making the model and importing packages do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import ladder
from benchmarks.harness import (
    environment,
    require_gpu,
    write_record,
)
from benchmarks.model_cases import Step, decoder, zoo_model

DECODERS = {
    "llama 8b": (Step("8b", 1, 1, 1024, 32), "int4"),
    "llama 8b fp16": (Step("8b", 1, 1, 1024, 32), ""),
    "llama tiny": (Step("tiny", 1, 1, 64, 32), "int4"),
}
"""Model -> decode step with all its layers, type of the weights."""


def model_of(name: str, device: str) -> tuple[Any, Any]:
    """Return a model and its arguments."""
    if name not in DECODERS:
        return zoo_model(name, device)
    step, weight = DECODERS[name]
    return decoder(step, device, weight)[0], step.arguments(device)


def measure(name: str, device: str, through: str) -> dict[str, Any]:
    """Compile once, in this process."""
    model, arguments = model_of(name, device)
    with torch.no_grad():
        start = time.perf_counter()
        fast: Any = ladder.compile(model)
        if through == "torch":
            from ladder.integrations.dynamo import backend

            fast = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
        times = []
        for _ in range(3):
            fast(*arguments)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    # ladder.compile runs the model itself at its first call, and the plan from the second on.
    return {"seconds": times[0 if through == "torch" else 1], "calls_s": times}


def in_process(name: str, options: argparse.Namespace, cache: str) -> dict[str, Any]:
    """Compile in a new process with a folder for kernels."""
    command = [sys.executable, "-m", "benchmarks.compile_time", "--child", name, "--device", options.device]
    environment_ = {**os.environ, "LADDER_CACHE_DIR": cache}
    done = subprocess.run(
        [*command, "--through", options.through],
        env=environment_,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure cold, then warm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["llama 8b", "resnet 50"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--through", choices=("ladder", "torch"), default="ladder", help="who captures")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        require_gpu("--device cpu times this machine")
    if options.child:
        print(json.dumps(measure(options.child, options.device, options.through)))
        return 0
    rows = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                found = in_process(name, options, cache)
                rows.append({"case": name, "state": state, "device": options.device, **found})
                print(f"{name:20} {state}: {found['seconds']:.1f} s on {options.device}", flush=True)
    if options.output:
        head = environment() if options.device == "cuda" else {}
        write_record(options.output, {**head, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
