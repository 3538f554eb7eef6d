"""Commands `ladder inspect` and `ladder convert`: list other tools' checkpoints, write them in our form."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ladder.cli.console import Progress, silent
from ladder.formats.checkpoint import Checkpoint, Entry, load_checkpoint
from ladder.formats.native_write import write

COLUMNS = ("tensor", "format", "shape", "bytes", "bits per element")


def run_inspect(path: str) -> dict[str, Any]:
    """Describe a checkpoint from its headers.

    Returns: JSON-able: ``path``, ``formats`` and how many tensors each has, ``config``, ``bytes``,
        ``tensors``.
    """
    checkpoint = load_checkpoint(path)
    entries = list(checkpoint.entries())
    return {
        "path": str(checkpoint.path),
        "formats": dict(Counter(entry.format or "not quantized" for entry in entries)),
        "config": json.loads(json.dumps(checkpoint.config, default=str), parse_constant=lambda name: None),
        "bytes": sum(entry.nbytes for entry in entries),
        "tensors": [_described(entry) for entry in entries],
    }


def _described(entry: Entry) -> dict[str, Any]:
    count = 1
    for extent in entry.shape:
        count *= extent
    return {
        "name": entry.name,
        "format": entry.format or entry.dtype,
        "shape": list(entry.shape),
        "bytes": entry.nbytes,
        "bits": round(8 * entry.nbytes / count, 3) if count else 0.0,
    }


def as_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a line per tensor."""
    for tensor in found["tensors"]:
        shape = " x ".join(map(str, tensor["shape"])) or "one number"
        yield tensor["name"], tensor["format"], shape, f"{tensor['bytes']:,}", f"{tensor['bits']:.3f}"


def run_convert(path: str, output: Path, step: Progress = silent) -> dict[str, Any]:
    """Write a checkpoint as safetensors of canonical storage, one tensor at a time.

    Returns: JSON-able: ``path``, ``tensors``, ``quantized``, ``read`` and ``written`` bytes, ``seconds``.
    """
    start = time.perf_counter()
    checkpoint: Checkpoint = load_checkpoint(path)
    total = len(checkpoint)
    names = iter(checkpoint)

    def told() -> Iterator[str]:
        for number, name in enumerate(names):
            step(f"converting {name}", number / total)
            yield name

    written = write(checkpoint, output, told())
    return {
        "path": str(output),
        "tensors": total,
        "quantized": len(checkpoint.layers),
        "read": sum(entry.nbytes for entry in checkpoint.entries()),
        "written": written,
        "seconds": round(time.perf_counter() - start, 2),
    }


def as_fields(found: dict[str, Any]) -> dict[str, str]:
    """Return what was written as named lines."""
    return {
        "file": f"{found['path']}, {found['written'] / 1e6:.2f} MB of {found['read'] / 1e6:.2f} MB read",
        "tensors": f"{found['tensors']}, {found['quantized']} of them quantized",
        "time": f"{found['seconds']:.1f} s",
    }
