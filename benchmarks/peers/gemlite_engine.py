"""GemLite: Triton kernels that tune themselves at the first call of a shape and range of M.

``GEMLITE_CONFIG`` names a file of tuning results to read and to extend, by default one in the
folder for temporary files. ``GEMLITE_TUNED=1`` says that it is complete, so that processes need
not take turns. Results that the library ships for the H100 are read too: none ships for the H200.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.peers.engine import Engine, Operand, Work
from tile_types import get_type

PROCESSORS: Mapping[str, str] = {
    "int4": "A16W4_HQQ_INT",
    "int2": "A16W2_HQQ_INT",
    "int1": "A16W1_HQQ_INT",
    "mxfp4": "A16W4_MXFP",
}
"""GemLite's way to make a layer, by weight type."""


class GemliteOperand(Operand):
    """A layer of GemLite made of Ladder's codes."""

    def __init__(self, held: Any, dtype: torch.dtype) -> None:
        self.held, self.dtype = held, dtype
        self.layer = layer_of(held, dtype)
        self.nbytes = held.nbytes

    def dense(self) -> Any:
        return self.held.dequantize("float64")

    def clone(self) -> Operand:
        return GemliteOperand(self.held, self.dtype)

    def __call__(self, *given: Any) -> Any:
        return self.layer(given[0])


def layer_of(held: Any, dtype: torch.dtype) -> Any:
    """Return a GemLite layer with the codes of a `QuantizedTensor`."""
    name = held.type_name
    processor = getattr(import_module("gemlite.helper"), PROCESSORS[name])(device="cuda", dtype=dtype)
    codes = torch.as_tensor(held.codes()).to(torch.uint8)
    if get_type(name).is_block:
        return processor.from_weights(codes, torch.as_tensor(held.scale).to(torch.float32))
    offset = 1 << (held.ttype.elem_bits - 1)  # two's complement to offset binary
    scale = torch.as_tensor(held.scale).to(dtype)
    return processor.from_weights(codes ^ offset, scale, torch.full_like(scale, offset))


class Gemlite(Engine):
    """GemLite's layers for 16-bit activations."""

    distribution: ClassVar[str] = "gemlite"
    module: ClassVar[str] = "gemlite"
    warms: ClassVar[bool] = True

    LARGEST_M = 64
    SHAPES = ((4096, 4096), (8192, 8192))

    def refusal(self, work: Work, n: int, k: int, m: int) -> str:
        if work.weight not in PROCESSORS:
            return f"GemLite has no layer for {work}"
        if m > self.LARGEST_M:
            return f"not run above M = {self.LARGEST_M}, where it was three times slower than cuBLAS"
        if (n, k) not in self.SHAPES:
            return (
                "run at 4096 × 4096 and 8192 × 8192 only: it tunes for long, and was never the fastest there"
            )
        return ""

    def prepare(self, work: Work, weight: Any, tokens: tuple[int, ...]) -> Operand:
        dtype = getattr(torch, work.source)
        operand = GemliteOperand(work.quantized(weight), dtype)
        with tuning():
            for m in tokens:
                operand(torch.zeros(m, weight.shape[1], dtype=dtype, device="cuda"))
            torch.cuda.synchronize()
        return operand


@contextlib.contextmanager
def tuning() -> Iterator[None]:
    """Let one process tune at a time, with the results that ship for the H100 and those of earlier runs."""
    gemlite = import_module("gemlite")
    shipped = Path(str(gemlite.__file__)).parent / "configs" / "h100.json"
    kept = Path(os.environ.get("GEMLITE_CONFIG") or Path(tempfile.gettempdir()) / "ladder-gemlite.json")
    if os.environ.get("GEMLITE_TUNED"):
        load(shipped, kept)
        yield
        return
    with open(f"{kept}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        load(shipped, kept)
        yield
        gemlite.cache_config(str(kept))


def load(*paths: Path) -> None:
    """Read files of tuning results, those that exist."""
    for path in paths:
        if path.is_file():
            import_module("gemlite").load_config(str(path))
