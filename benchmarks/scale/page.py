"""The tables of benchmarks/SCALE.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.scale.machines import MACHINES
from benchmarks.scale.shapes import SHAPES
from benchmarks.scale.step import Cut, Load, best, exchange, layer, prefill_idle

RESULTS = Path(__file__).parents[1] / "results"
PAGE = Path(__file__).parents[1] / "SCALE.md"

DEEP_EP = {16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}
"""GPUs -> µs of dispatch and of combine: DeepEP, docs/legacy.md, low-latency kernels, 128 tokens of 7168
numbers to 8 experts each, fp8 with scales there, bfloat16 back; H800 with 400 Gb/s each."""

Row = Sequence[object]


def table(head: Row, rows: Iterable[Row]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def parameters() -> str:
    """Compare the shapes' parameters with the published ones."""
    rows = [
        (
            name,
            f"{shape.parameters / 1e9:.1f}",
            f"{shape.published / 1e9:.1f}",
            f"{shape.parameters * shape.bits / 8 / 1e9:.0f}",
            f"{shape.attention.kept * 2 * shape.layers / 1e3:.0f}",
            shape.source,
        )
        for name, shape in SHAPES.items()
    ]
    head = ("model", "10⁹ parameters", "published", "GB at 4 bits", "kB of cache a token", "source")
    return table(head, rows)


def measured() -> list[tuple[str, float, float]]:
    """Return (what, predicted, measured) in µs per layer: our records of one and two H200."""
    h200 = MACHINES["H200"]
    models = json.loads((RESULTS / "h200_models_2026-11-22.json").read_text())["rows"]
    two = json.loads((RESULTS / "h200_tensor_parallel_2026-11-23.json").read_text())
    found = []
    for model in ("8b", "70b"):
        for batch in (1, 32):
            case = f"llama {model} decode context 1024 batch {batch}"
            # The last record of a case is the one side by side with torch.
            us = [r["us_per_layer"] for r in models if (r["case"], r["engine"]) == (case, "ladder int4")][-1]
            made = layer(SHAPES[f"llama-3.1-{model}"], h200, Cut(), Load(batch, 1024))
            found.append((f"{model}, batch {batch}, one GPU", made.total * 1e6, us))
    made = layer(SHAPES["llama-3.1-70b"], h200, Cut(2), Load(1, 1024))
    cut: Any = two["cut, 8 layers"]["us_per_layer"]
    found.append(
        (
            "70b, batch 1, two GPUs, no sums",
            (made.total - made.sums) * 1e6,
            two["without collectives"]["us_per_layer"],
        )
    )
    found.append(("70b, batch 1, two GPUs", made.total * 1e6, cut))
    return found


def exchanged() -> list[tuple[str, float, float]]:
    """Return (what, predicted, published) in µs: DeepEP's exchanges between 16 and more GPUs."""
    h100, found = MACHINES["H100"], []
    sizes = {"dispatch": 128 * 8 * (7168 + 7168 // 128 * 4 + 16), "combine": 128 * 8 * 7168 * 2}
    for gpus, published in DEEP_EP.items():
        for (name, size), us in zip(sizes.items(), published, strict=True):
            found.append((f"{name}, {gpus} GPUs", exchange(size, gpus, h100) * 1e6, float(us)))
    return found


def compared(found: Iterable[tuple[str, float, float]], against: str) -> str:
    """Return a table of predictions with their errors."""
    rows = [
        (what, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs - 1:+.1%}") for what, ours, theirs in found
    ]
    return table(("what", "model, µs", against, "error"), rows)


def served(machine: str, each: int = 16, context: int = 8192, most: float = 0.05) -> str:
    """Return the best cut of every model on 8 to 512 GPUs."""
    rows: list[Row] = []
    for name, shape in SHAPES.items():
        for gpus in (8, 64, 512):
            found = best(shape, MACHINES[machine], gpus, Load(gpus * each, context), most)
            if found is None:
                rows.append((name, gpus, "does not fit", *[""] * 7))
                continue
            cut, made = found
            shares = [
                getattr(made.terms, term) / made.terms.total for term in ("launches", "sums", "exchanges")
            ]
            rows.append(
                (
                    name,
                    gpus,
                    cut,
                    f"{made.weights / 1e9:.1f}",
                    f"{made.cache / 1e9:.1f}",
                    f"{made.terms.total * 1e3:.1f}",
                    f"{made.rate:.0f}",
                    *(f"{share:.0%}" for share in shares),
                    made.terms.limit,
                )
            )
    rows = [(*row, "")[:11] for row in rows]
    head = (
        "model",
        "GPUs",
        "tensor x pipeline x data",
        "weights, GB",
        "cache, GB",
        "ms a token",
        "tokens/s a GPU",
        "launches",
        "sums",
        "exchanges",
        "largest term",
    )
    return table(head, rows)


def bubbles() -> str:
    """Return the idle share of a pipeline that fills and drains."""
    parts = (1, 4, 8, 16, 32, 64)
    rows = [(p, *(f"{prefill_idle(p, part):.0%}" for part in parts)) for p in (2, 4, 8, 16)]
    return table(("stages", *(f"{part} parts" for part in parts)), rows)


TABLES: dict[str, Callable[[], str]] = {
    "parameters": parameters,
    "measured": lambda: compared(measured(), "measured, µs"),
    "exchanged": lambda: compared(exchanged(), "published, µs"),
    **{machine: partial(served, machine) for machine in MACHINES},
    "bubbles": bubbles,
}


def with_tables(text: str) -> str:
    """Return the page with its tables made anew."""
    for name, made in TABLES.items():
        marked = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = marked.subn(lambda match, made=made: f"{match[1]}{made()}\n{match[2]}", text)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"{PAGE.name} has {count} tables {name!r}, not one")
    return text
