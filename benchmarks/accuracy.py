"""Accuracy against speed, for every type of weights: a language model's perplexity, and a product's time.

``python -m benchmarks.accuracy --output accuracy.json --plot accuracy.svg``. A character-level transformer is
trained here, on the docstrings and the documentation that come with Python. Then its layers are quantized to
each type. What they compute is judged on text that it has not seen: perplexity per character, the divergence
from the model in full precision, how often the likeliest character stays. Torch runs the decoded weights, so
that all types are judged by the same arithmetic. The speed is that of one product with one row of activations
of a large model's layer; its error, against float64 on decoded weights, says whether Ladder's kernel decodes
what torch was given.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import json
import math
import multiprocessing
import platform
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import ladder
from benchmarks.harness import command, copies_for, graph_time_us, relative_error, shortened, write_record
from benchmarks.report.svg import Series, chart
from ladder.installation import ladder_version, tvm_version
from ladder.runtime.compile import target_of
from ladder.runtime.cores import usable_cores
from tile_types.library import get_type, type_names

LETTERS = "\n" + "".join(map(chr, range(32, 127)))
OTHER = len(LETTERS)
"""Code of every other character."""

GROUP = 128
HELD_OUT = 0.1
"""Share of the text, its end, that the model is not trained on."""

LEAST = 1e-8
"""Divergence that the plot shows of types that lose nothing."""

FAMILIES: dict[str, Callable[[str], bool]] = {
    "integers": lambda name: name.startswith("int"),
    "with zero points": lambda name: name.startswith("uint"),
    "floats": lambda name: name.startswith("fp"),
    "MX and NV blocks": lambda name: get_type(name).is_block,
    "other codes": lambda name: not name.startswith(("int", "uint", "fp")) and not get_type(name).is_block,
}

SVG = '<svg xmlns="http://www.w3.org/2000/svg"'
STYLE = (
    "<style>text{font:11px sans-serif;fill:#555}.grid{stroke:#ddd}.s0{fill:#26b}.s1{fill:#c52}"
    ".s2{fill:#283}.s3{fill:#82a}.s4{fill:#a80}</style>"
)


@dataclass(frozen=True)
class Size:
    """Of the model, its training, and what is judged.

    Parameters
    ----------
    width, layers, heads
        Of the transformer; the inner width is four times the width.
    window
        Characters that it sees.
    batch, steps
        Windows per step of training, and steps.
    judged
        Windows of text that every type is judged on.
    shape
        [N, K] of the product that is timed.
    modules
        Files of Python's library that are read, at most.
    """

    width: int = 512
    layers: int = 6
    heads: int = 8
    window: int = 256
    batch: int = 64
    steps: int = 2500
    judged: int = 256
    shape: tuple[int, int] = (8192, 8192)
    modules: int = 10_000


SIZES = {
    "tiny": Size(64, 1, 2, 32, 8, 30, 16, (256, 256), 30),
    "small": Size(128, 2, 4, 128, 16, 800, 64, (2048, 2048)),
    "full": Size(),
}


# the text --------------------------------------------------------------------------------------------
def documentation(modules: int) -> str:
    """Return the documentation that Python installs: its topics, and its library's docstrings."""
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in library.rglob("*.py") if {"site-packages", "test"}.isdisjoint(path.parts))
    texts = [text for path in files[:modules] for text in docstrings(path)]
    return "\n\n".join([*topics.values(), *texts])


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a file, if it can be read."""
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def codes(text: str) -> torch.Tensor:
    """Return a number for each character."""
    known = {letter: at for at, letter in enumerate(LETTERS)}
    return torch.tensor([known.get(letter, OTHER) for letter in text])


# the model -------------------------------------------------------------------------------------------
class Block(nn.Module):
    """A layer of a decoder: attention, then two linear layers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, width = size.heads, size.width
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[B, T, width]``."""
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """A decoder over characters."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS) + 1, size.width)
        self.places = nn.Embedding(size.window, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, len(LETTERS) + 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next character, ``[B, T, letters]``."""
        x = self.letters(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def trained(size: Size, text: torch.Tensor, where: str) -> Model:
    """Return a model that has learned a text."""
    torch.manual_seed(0)
    model = Model(size).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=size.steps)
    text, steps = text.to(where), torch.arange(size.window + 1, device=where)
    for _ in range(size.steps):
        starts = torch.randint(len(text) - size.window - 1, (size.batch, 1), device=where)
        windows = text[starts + steps]
        with torch.autocast(torch.device(where).type, torch.bfloat16, enabled=where != "cpu"):
            logits = model(windows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
    return model.eval().requires_grad_(False)


# types -----------------------------------------------------------------------------------------------
def weight_types() -> list[str]:
    """Return every type of the library that weights can have, but those that files of other tools bring."""
    return [name for name in type_names() if get_type(name).elem_bits <= 8 and name != "e8m0"]


def options(name: str, k: int) -> dict[str, Any]:
    """Return how weights of a type are quantized: in groups, float8 by rows."""
    ttype = get_type(name)
    if ttype.is_block or (name.startswith("fp8") and not ttype.is_block):
        return {}
    return {"group_size": min(GROUP, k), **({"zero": "integer"} if needs_zero(name) else {})}


def needs_zero(name: str) -> bool:
    """Tell whether a type has no positive or no negative values."""
    return name.startswith("uint") or name == "int1"


def layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the layers that are quantized: those of the blocks."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "head":
            yield name, module


def quantized(model: Model, name: str) -> tuple[Model, float]:
    """Return a model of decoded weights, and the bits per weight, scales included."""
    decoded, bits, weights = copy.deepcopy(model), 0, 0
    for path, layer in layers(model):
        given = ladder.quantize(layer.weight, name, **options(name, layer.in_features))
        values = torch.as_tensor(given.dequantize("float32"), device=layer.weight.device)
        decoded.get_submodule(path).weight = nn.Parameter(values, requires_grad=False)
        bits, weights = bits + 8 * given.nbytes, weights + layer.weight.numel()
    return decoded, bits / weights


# accuracy --------------------------------------------------------------------------------------------
def log_probabilities(model: Model, windows: torch.Tensor) -> torch.Tensor:
    """Return those of each next character, of windows with the character that follows."""
    parts = torch.split(windows, 32)
    return torch.cat([F.log_softmax(model(part[:, :-1]).float(), -1) for part in parts])


def accuracy(found: torch.Tensor, exact: torch.Tensor, windows: torch.Tensor) -> dict[str, float]:
    """Return perplexity, divergence in nats, and how often the likeliest character stays."""
    loss = F.nll_loss(found.flatten(0, 1), windows[:, 1:].flatten())
    divergence = (exact.exp() * (exact - found)).sum(-1).mean()
    same = (found.argmax(-1) == exact.argmax(-1)).float().mean()
    return {"perplexity": math.exp(loss), "kl": float(divergence), "same_choice": float(same)}


# speed -----------------------------------------------------------------------------------------------
def product(name: str, shape: tuple[int, int], target: str | None) -> Any:
    """Return the product that is timed; without a target, the CPU's."""
    n, k = shape
    given: dict[str, Any] = options(name, k) | ({"target": target} if target else {})
    return ladder.Matmul(N=n, K=k, weight=name, activation=activation(target), **given)


def activation(target: str | None) -> str:
    """Return the type of activations: on CPUs, torch's own products of halves are slow."""
    return "float16" if target else "float32"


def build(name: str, shape: tuple[int, int], target: str) -> None:
    """Compile a product's kernels into the cache."""
    product(name, shape, target).lower(target)


def build_all(names: list[str], size: Size, target: str, jobs: int) -> None:
    """Compile in parallel processes."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for task in [pool.submit(build, name, size.shape, target) for name in names]:
            task.result()


def seconds_of(calls: list[Any], where: str) -> float:
    """Return the median seconds of calls that take turns."""
    if where == "cuda":
        return graph_time_us(calls) * 1e-6
    for call in calls:
        call()
    times = []
    for _ in range(7):
        start = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - start) / len(calls))
    return statistics.median(times)


def speed(name: str, size: Size, where: str, target: str | None) -> dict[str, float]:
    """Return microseconds of a product with one row, and its error on the decoded weights."""
    n, k = size.shape
    torch.manual_seed(1)
    weight, x = torch.randn(n, k, device=where), torch.randn(1, k, device=where)
    x = x.to(getattr(torch, activation(target)))
    if name == "none":
        plain = weight.to(x.dtype)
        return {"us": 1e6 * seconds_of([functools.partial(F.linear, x, w) for w in rotated(plain)], where)}
    given, op = ladder.quantize(weight, name, **options(name, k)), product(name, size.shape, target)
    packed = op.pack(given)
    exact = x.double() @ torch.as_tensor(given.dequantize("float64"), device=where).T
    calls = [functools.partial(op, x, each) for each in rotated(packed)]
    return {"error": relative_error(op(x, packed), exact), "us": 1e6 * seconds_of(calls, where)}


def rotated(weight: Any) -> list[Any]:
    """Return copies of a weight that take turns, so that none of a large layer's is found in a cache."""
    count = min(copies_for(weight.nbytes), 64)
    return [weight, *(copy.deepcopy(weight) for _ in range(count - 1))]


# the report ------------------------------------------------------------------------------------------
def rows(size: Size, where: str, names: list[str], jobs: int) -> Iterator[dict[str, Any]]:
    """Yield a row for the model as it was trained, and one for each type."""
    target = None if where == "cpu" else target_of(torch.device("cuda", torch.cuda.current_device()))
    if target is not None:
        build_all(names, size, target, jobs)
    text = codes(documentation(size.modules))
    border = int(len(text) * (1 - HELD_OUT))
    model = trained(size, text[:border], where)
    pick = torch.linspace(border, len(text) - size.window - 1, size.judged).long()
    windows = text[pick[:, None] + torch.arange(size.window + 1)].to(where)
    with torch.no_grad():
        exact = log_probabilities(model, windows)
        about = {"bits": 32.0, **accuracy(exact, exact, windows), **speed("none", size, where, target)}
        yield {"type": "as trained", "characters": len(text), **about}
        for name in names:
            decoded, bits = quantized(model, name)
            about = {"bits": bits, **accuracy(log_probabilities(decoded, windows), exact, windows)}
            yield {"type": name, **about, **speed(name, size, where, target)}


COLUMNS = ("type", "bits", "perplexity", "kl", "same_choice", "us")


def table(found: list[dict[str, Any]]) -> str:
    """Return a table in Markdown, the most accurate type first."""
    ordered = [found[0], *sorted(found[1:], key=lambda row: row["kl"])]
    lines = [[str(row["type"]), *(f"{row[name]:.4g}" for name in COLUMNS[1:])] for row in ordered]
    head = [["type", "bits", "perplexity", "KL, nats", "same choice", "product, µs"], ["---"] * len(COLUMNS)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [*head, *lines])


def plot(found: list[dict[str, Any]]) -> str:
    """Return one chart as SVG: time of a product, and divergence; types of a family have one colour."""
    series = []
    for colour, (family, chosen) in enumerate(FAMILIES.items()):
        members = [row for row in found[1:] if chosen(row["type"])]
        points = [(row["us"], max(row["kl"], LEAST), row["type"]) for row in members]
        series.append(Series(family, points, colour, line=False, named=True))
    drawn = chart(series, "product with one row, µs", "KL from full precision, nats per character")
    head, _, body = drawn.partition(">")
    return f"{head.replace('<svg', SVG)}>{STYLE}{body}"


def report(found: list[dict[str, Any]], size: Size) -> dict[str, Any]:
    """Return what is written: how it was found, and the rows."""
    gpu = torch.cuda.is_available()
    return {
        "environment": {
            "date": time.strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine(),
            "versions": {
                "ladder": ladder_version(),
                "apache-tvm": tvm_version(),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "command": command(),
        },
        "size": asdict(size),
        "rows": found,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--types", nargs="*", default=weight_types(), help="all by default")
    parser.add_argument(
        "--size", choices=SIZES, default="full", help="small: minutes on a CPU; tiny: seconds"
    )
    parser.add_argument("--jobs", type=int, default=usable_cores())
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args(arguments)
    for name in given.types:
        get_type(name)  # unknown ones are named before the model is trained
    size, found = SIZES[given.size], []
    for row in rows(size, given.device, given.types, given.jobs):
        found.append(row)
        print(json.dumps(shortened(row)), flush=True)
        if given.output is not None:
            write_record(given.output, report(found, size))
        if given.plot is not None:
            given.plot.write_text(plot(found))
    print(table(found))


if __name__ == "__main__":
    main()
