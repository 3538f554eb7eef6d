"""A transformer encoder as an ONNX model, weights of few bits, beside onnxruntime in float32: one CPU thread.

    python -m benchmarks.onnx_int4 --output onnx_int4.json

The encoder has the sizes of MiniLM (384, 12 heads, 1,536) and three layers; its weights are random, since the
time does not depend on them. Every product with a stored matrix states the types by attributes. Then single
`MatMulNBits`, as exporters of language models write them, float32 in and out, beside onnxruntime's own.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import torch
from torch import nn

import ladder
from benchmarks.harness import (
    command,
    write_record,
)
from benchmarks.onnx_models import distance, interleaved, started

INPUTS = {"128 tokens": (1, 128), "8 x 64 tokens": (8, 64)}
"""What is timed -> batch and length."""

CASES: Mapping[str, Mapping[str, Any]] = {
    "float32": {},
    "int4 g128 x int8": {"weight_ttype": "int4", "group_size": 128, "activation_ttype": "int8"},
    "int4 g32 x int8": {"weight_ttype": "int4", "group_size": 32, "activation_ttype": "int8"},
}
"""What is compiled -> attributes of its products."""


PRODUCTS = [(size, block, m) for size in (1024, 2048) for block in (32, 128) for m in (1, 8, 64)]
"""Extent of a square weight, elements that share a scale, rows."""


class Layer(nn.Module):
    """A layer of BERT: attention over 12 heads, then two products around a GELU."""

    def __init__(self, width: int = 384, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = (linear(x) for linear in (self.query, self.key, self.value))
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        scores = (
            q @ k.transpose(2, 3) / (width // self.heads) ** 0.5 + (1 - mask[:, None, None].float()) * -1e9
        )
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = self.norms[0](x + self.out(mixed))
        return self.norms[1](x + self.narrow(nn.functional.gelu(self.wide(x))))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Three layers over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 384)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return x  # type: ignore[no-any-return]


def encoder(folder: Path) -> Path:
    """Write the encoder in float32, with open batch and length."""
    torch.manual_seed(0)
    ids, path, names = torch.randint(1000, (2, 16)), folder / "encoder.onnx", ["ids", "mask"]
    axes = {name: {0: "batch", 1: "length"} for name in (*names, "y")}
    torch.onnx.export(
        Encoder().eval(), (ids, torch.ones_like(ids)), str(path), input_names=names, output_names=["y"],
        dynamic_axes=axes, dynamo=False, opset_version=17,
    )  # fmt: skip
    return path


def stated(path: Path, attributes: Mapping[str, Any]) -> Any:
    """Return a model whose products with stored matrices have attributes."""
    model = onnx.load(str(path))
    stored = {tensor.name for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type in ("MatMul", "Gemm") and node.input[1] in stored:
            node.attribute.extend(onnx.helper.make_attribute(*item) for item in attributes.items())
    return model


def rows(path: Path, rounds: int) -> list[dict[str, Any]]:
    """Return times and errors of all cases and inputs."""
    session = started(str(path), exact=False)
    models = {name: ladder.compile(stated(path, attributes)) for name, attributes in CASES.items()}
    found = []
    for title, shape in INPUTS.items():
        ids = torch.randint(1000, shape)
        given = {"ids": ids, "mask": torch.ones_like(ids)}
        arrays = {name: value.numpy() for name, value in given.items()}
        calls = {name: partial(model, **given) for name, model in models.items()}
        times = interleaved({**calls, "onnxruntime": partial(session.run, None, arrays)}, rounds)
        wanted = session.run(None, arrays)
        for name, call in calls.items():
            result = call()
            own = distance(result if isinstance(result, tuple) else (result,), wanted)
            ratio = times[f"{name} ms"] / times["onnxruntime ms"]
            row = {
                "input": title,
                "case": name,
                "ms": times[f"{name} ms"],
                "over onnxruntime": ratio,
                "error": own,
            }
            print(row, flush=True)
            found.append(row)
    return found


def product(size: int, block: int) -> Any:
    """Return a model of one product by random codes of 4 bits."""
    draw = np.random.default_rng(0)
    codes = draw.integers(0, 256, (size, size // block, block // 2), dtype=np.uint8)
    scales = (np.abs(draw.standard_normal(size * size // block)) / 100).astype(np.float32)
    node = f"MatMulNBits <K: int = {size}, N: int = {size}, bits: int = 4, block_size: int = {block}>"
    text = f"g (float[m, {size}] x) => (float[m, {size}] y) {{ y = com.microsoft.{node} (x, codes, scales) }}"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 17, "com.microsoft" : 1]> {text}')
    stored = {"codes": codes, "scales": scales}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, name) for name, v in stored.items())
    return model


def products(rounds: int) -> list[dict[str, Any]]:
    """Return times and errors of single products."""
    found = []
    for size, block, m in PRODUCTS:
        model, x = product(size, block), torch.randn(m, size)
        session, ours = started(model.SerializeToString(), exact=False), ladder.compile(model)
        calls = {"ladder": partial(ours, x), "onnxruntime": partial(session.run, None, {"x": x.numpy()})}
        own = distance((ours(x),), calls["onnxruntime"]())
        row = {"size": size, "block": block, "rows": m, "error": own, **interleaved(calls, rounds)}
        print(row := {**row, "over onnxruntime": row["ladder ms"] / row["onnxruntime ms"]}, flush=True)
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "command": command(),
            "threads": os.environ.get("OMP_NUM_THREADS", "1"),
            "rows": rows(encoder(Path(folder)), chosen.rounds),
            "products": products(chosen.rounds),
        }
    if chosen.output:
        write_record(chosen.output, report)


if __name__ == "__main__":
    main()
