"""Products with matrices of GGUF files on a GPU, beside the bytes of the file and `int4`.

``python -m benchmarks.gguf_products --output FILE.json`` draws super-blocks of each type, reads them as those
of a file, and times `ladder.Linear` by float16 rows in CUDA graphs, by turns, weights from HBM. The floor is
the bytes that the file has for the matrix, over the bandwidth of a copy in the same run.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ladder
from benchmarks.checkpoints import gguf_blocks
from benchmarks.harness import (
    capture_long,
    copies_for,
    copy_bandwidth,
    environment,
    interleaved_us,
    relative_error,
    require_gpu,
    write_record,
)
from ladder.formats.gguf import read
from ladder.formats.gguf_blocks import BLOCKS
from ladder.formats.layer import Layer, TensorInMemory
from tile_types.quantized import QuantizedTensor

TYPES = ("q4_k", "q6_k", "iq4_xs", "q4_0", "q8_0", "q5_k", "q3_k", "q2_k")
SHAPE = (28672, 8192)
TOKENS = (1, 16, 4096)
INT4 = "int4 g128"
ROUNDS = 9

SMALL = 2.0**-8
"""Standard deviation of activations, with which no product overflows in float16."""


def drawn(name: str, n: int, k: int) -> tuple[QuantizedTensor, int]:
    """Return a matrix [N, K] of a GGUF type, and its bytes in a file."""
    number, row = next(item for item in BLOCKS.items() if item[1].name == name)
    octets = gguf_blocks(number, n * k).reshape(n, -1)
    found = read(row, Layer("w", {"": TensorInMemory(octets)}))
    assert isinstance(found, QuantizedTensor)
    return found, octets.nbytes


def layers(types: Sequence[str], n: int, k: int) -> Iterator[tuple[str, Any, Any, int]]:
    """Yield the name, layer, decoded matrix and bytes of each type, of `int4` first."""
    held = ladder.quantize(torch.randn(n, k, device="cuda") * k**-0.5, "int4", group_size=128)
    for name in (INT4, *types):
        matrix, nbytes = (held, 0) if name == INT4 else drawn(name, n, k)
        matrix = matrix.to("cuda")
        layer = ladder.Linear.from_quantized(matrix, activation="float16", keep_canonical=False)
        yield name, layer, matrix.dequantize("float32"), nbytes


def packed_bytes(layer: Any) -> int:
    """Return the bytes of a layer's packed weight."""
    return sum(buffer.nbytes for buffer in layer.buffers())


def rows(types: Sequence[str], shape: tuple[int, int], tokens: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield times and errors at each number of rows, types beside each other."""
    n, k = shape
    bandwidth, made = copy_bandwidth(), list(layers(types, n, k))
    for m in tokens:
        x = (torch.randn(m, k, device="cuda") * SMALL).half()
        graphs, errors = {}, {}
        for name, layer, dense, _ in made:
            exact = x[:16].double() @ dense.double().T
            errors[name] = relative_error(layer(x)[:16], exact)
            copies = [layer, *(copy.deepcopy(layer) for _ in range(copies_for(packed_bytes(layer)) - 1))]
            graphs[name] = capture_long([partial(one, x) for one in copies])
        times = {name: statistics.median(us) for name, us in interleaved_us(graphs, ROUNDS).items()}
        for name, layer, _, nbytes in made:
            yield {
                "type": name, "n": n, "k": k, "m": m, "us": round(times[name], 2), "error": errors[name],
                "file_bytes": nbytes, "packed_bytes": packed_bytes(layer),
                "floor_us": round(nbytes / bandwidth * 1e6, 2),
                "of_int4": round(times[name] / times[INT4], 3),
            }  # fmt: skip


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--types", nargs="+", default=list(TYPES), choices=[row.name for row in BLOCKS.values()]
    )
    parser.add_argument("--shape", type=int, nargs=2, default=SHAPE, metavar=("N", "K"))
    parser.add_argument("-m", "--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    require_gpu()
    n, k = arguments.shape
    with torch.no_grad():
        found = []
        for row in rows(arguments.types, (n, k), arguments.tokens):
            found.append(row)
            print(row, flush=True)
            write_record(arguments.output, {"environment": environment(), "rows": found})


if __name__ == "__main__":
    main()
