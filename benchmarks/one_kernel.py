"""What one persistent kernel for a decode step could gain, by hand-written CUDA (`one_kernel.cu`).

``python -m benchmarks.one_kernel --output one_kernel.json`` moves the bytes of 32 decoder layers of
Llama-3.1-8B (int4, batch 1) through dependent launches of a CUDA graph and through one kernel, with equal
results. It needs a toolkit's nvcc with its static runtime, and a Hopper GPU with 4 GB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import write_record
from ladder.lower.cuda.toolkit import nvcc

FLAGS = ("-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a")


def rows() -> Iterator[dict[str, Any]]:
    """Compile the program, run it, and yield its rows: the device first."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "one_kernel"
        source = Path(__file__).with_suffix(".cu")
        subprocess.run([nvcc(), *FLAGS, "-o", program, source], check=True)
        with subprocess.Popen([program], stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None  # a pipe, as asked for
            yield from map(json.loads, running.stdout)
        if running.returncode:
            raise RuntimeError(f"{source.name} ended with status {running.returncode}")


def main() -> int:
    """Print every row, and write all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found = []
    for row in rows():
        found.append(row)
        print(*(f"{value:<62}" if name == "variant" else value for name, value in row.items()), flush=True)
    if arguments.output:
        write_record(arguments.output, {"rows": found})
    wrong = [row for row in found if row.get("check") == "different"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
