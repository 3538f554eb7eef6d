"""How fast checkpoints of other tools are loaded from the page cache, and with how much memory.

``python -m benchmarks.checkpoints [--layers 1] [--threads 1]`` writes layers of Llama-3.1-8B's shapes with
random bits in each format, reads every tensor as a `QuantizedTensor`, one at a time, and prints GB of the
file per second of wall time and of processor time, and the largest memory, mapped pages included.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.harness import write_record
from ladder.formats.gguf_blocks import BLOCKS
from tile_types import get_type
from tile_types.stored_blocks import Factors

SHAPES = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}
"""Name -> outputs and inputs of the linear layers of one block."""

GROUP = 128
Arrays = dict[str, torch.Tensor]


def words(*shape: int) -> torch.Tensor:
    """Return random bits."""
    return torch.randint(-(1 << 31), (1 << 31) - 1, shape, dtype=torch.int32)


def gptq(n: int, k: int) -> Arrays:
    scales = torch.rand(k // GROUP, n).half()
    zeros = torch.full((k // GROUP, n // 8), 0x77777777, dtype=torch.int32)
    return {"qweight": words(k // 8, n), "qzeros": zeros, "scales": scales}


def awq(n: int, k: int) -> Arrays:
    scales = torch.rand(k // GROUP, n).half()
    return {"qweight": words(k, n // 8), "qzeros": words(k // GROUP, n // 8), "scales": scales}


def packed(n: int, k: int) -> Arrays:
    scales = torch.rand(n, k // GROUP).bfloat16()
    return {"weight_packed": words(n, k // 8), "weight_scale": scales, "weight_shape": torch.tensor([n, k])}


def fp8(n: int, k: int) -> Arrays:
    codes = words(n, k // 4).view(torch.uint8).clamp(max=0x70).view(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": torch.rand(n // 128, k // 128)}


def mxfp4(n: int, k: int) -> Arrays:
    return {
        "weight_packed": words(n, k // 8).view(torch.uint8),
        "weight_scale": torch.randint(118, 128, (n, k // 32)).to(torch.uint8),
    }


def nf4(n: int, k: int) -> Arrays:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [n, k]}
    return {
        "weight": words(n * k // 8, 1).view(torch.uint8).reshape(-1, 1),
        "weight.absmax": torch.rand(n * k // 64),
        "weight.quant_map": torch.from_numpy(get_type("nf4").values().astype("float32")),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode())).byte(),
    }


CONFIGS: dict[str, tuple[Callable[[int, int], Arrays], dict[str, object]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP}),
    "pack-quantized": (packed, {"quant_method": "compressed-tensors"}),
    "mxfp4": (mxfp4, {"quant_method": "compressed-tensors"}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "fp8-blocks": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}
"""Format -> what makes a layer's arrays, and the configuration."""

GGUF = {"gguf q4_0": 2, "gguf q4_k": 12, "gguf q6_k": 14, "gguf iq4_xs": 23}
"""Format -> ggml's number of its type."""


def write(name: str, folder: Path, layers: int) -> Path:
    """Write a checkpoint with random bits."""
    if name in GGUF:
        return write_gguf(folder / "model.gguf", GGUF[name], layers)
    save_file(layer_arrays(name, layers), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": CONFIGS[name][1]}))
    return folder


def layer_arrays(name: str, layers: int) -> dict[str, torch.Tensor]:
    """Return the arrays of some layers in a format, by their names in a checkpoint."""
    make = CONFIGS[name][0]
    return {
        f"model.layers.{layer}.{module}.{part}": value
        for layer in range(layers)
        for module, shape in SHAPES.items()
        for part, value in make(*shape).items()
    }


def gguf_blocks(number: int, count: int) -> torch.Tensor:
    """Return the bytes of blocks of so many elements: random codes, scales as normal weights have them.

    Numbers of blocks are between 0.0078 and 2, integer scales and minima in the uppermost quarter of their
    range, of which the greatest in a super-block is the end: none is zero. In random bits, a 64th is.
    """
    row = BLOCKS[number]
    blocks = words(count // row.elements * row.nbytes // 4).view(torch.uint8).reshape(-1, row.nbytes) & 0x3F
    factors = [part for part in row.form.numbers if isinstance(part, Factors)]
    halves = [part.number[0][0] // 8 + 1 for part in factors]
    halves += [part.at + 1 for part in row.form.numbers if not isinstance(part, Factors) and part.count == 2]
    for at in halves:
        blocks[:, at] |= 0x20
    for part in factors:
        for pieces in part.integers:
            highest = max(pieces, key=lambda piece: piece[2])
            for bit in (1, 2)[: highest[1]]:
                octet, place = divmod(highest[0] + highest[1] - bit, 8)
                blocks[:, octet] |= 1 << place
    return blocks.flatten()


def write_gguf(path: Path, number: int, layers: int) -> Path:
    """Write a GGUF file of one type."""
    header, data, at = b"", [], 0
    for layer in range(layers):
        for module, (n, k) in SHAPES.items():
            name = f"blk.{layer}.{module}".encode()
            octets = gguf_blocks(number, n * k).numpy()
            header += struct.pack("<Q", len(name)) + name + struct.pack("<IQQIQ", 2, k, n, number, at)
            data.append(octets)
            at += len(octets) + -len(octets) % 32
    start = b"GGUF" + struct.pack("<IQQ", 3, layers * len(SHAPES), 0) + header
    with path.open("wb") as file:
        file.write(start + bytes(-len(start) % 32))
        for octets in data:
            file.write(octets.tobytes() + bytes(-len(octets) % 32))
    return path


def measure(path: str, threads: int) -> dict[str, float]:
    """Read every tensor of a checkpoint twice; the second time counts."""
    import ladder

    torch.set_num_threads(threads)

    checkpoint, start = ladder.load_checkpoint(path), peak_memory()
    total = sum(entry.nbytes for entry in checkpoint.entries())
    for _ in range(2):
        wall, processor = time.perf_counter(), time.process_time()
        for name in ladder.load_checkpoint(path):
            checkpoint[name]
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return {"bytes": total, "wall": wall, "processor": processor, "start": start, "peak": peak_memory()}


def peak_memory() -> float:
    """Return the largest memory of this process in bytes, mapped files included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def run(name: str, layers: int, threads: int) -> dict[str, Any]:
    """Measure one format in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(name, Path(folder), layers)
        call = f"measure({str(path)!r}, {threads})"
        code = f"import json; from benchmarks.checkpoints import measure; print(json.dumps({call}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {"format": name, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--formats", default=",".join([*CONFIGS, *GGUF]))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.formats.split(","):
        row = run(name, arguments.layers, arguments.threads)
        size, wall, processor = (float(row[key]) for key in ("bytes", "wall", "processor"))
        print(
            f"{name:16} {size / 1e6:7.1f} MB  {size / 1e9 / wall:6.2f} GB/s"
            f"  {size / 1e9 / processor:6.2f} GB per processor second"
            f"  memory {row['start'] / 1e6:.0f} -> {row['peak'] / 1e6:.0f} MB",
            flush=True,
        )
        rows.append(row)
    if arguments.output:
        found = {"cores": os.cpu_count(), "threads": arguments.threads, "rows": rows}
        write_record(arguments.output, found)


if __name__ == "__main__":
    main()
