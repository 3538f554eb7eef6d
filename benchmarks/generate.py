"""Greedy decoding by transformers' own models over a static cache, batch 1, Python's loop included.

``python -m benchmarks.generate [--model llama-3.1-8b] [--layers N] [--weights float16 int4] [--output FILE]``

A model has the shape of a published one and random weights. Ways that take turns: eager, ``torch.compile``
in mode ``reduce-overhead`` (weights of 16 bits) and `ladder.compile`. Each decodes the same prompt; the time
of a token is that of one call of the model and of choosing the next token from it. Errors are those of the
logits of the first decoded token against eager. "ms" is the time of a loop over all tokens by their number:
the next token stays on the GPU, so Python runs ahead; "ms read" is that of a loop that reads each token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ladder
from benchmarks.harness import (
    environment,
    require_gpu,
    write_record,
)

LLAMA = {
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.2-1b": ("llama", {
        **LLAMA, "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192,
        "num_attention_heads": 32, "tie_word_embeddings": True,
    }),
    "llama-3.1-8b": ("llama", {
        **LLAMA, "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32,
    }),
    "llama-3.1-70b": ("llama", {
        **LLAMA, "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672,
        "num_attention_heads": 64,
    }),
    "qwen3-30b-a3b": ("qwen3_moe", {
        "num_hidden_layers": 48, "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 8192,
    }),
}  # fmt: skip
"""Name of a published model -> architecture of transformers, and what its configuration says."""

Model = Callable[..., Any]

DENSE = ("float16", "bfloat16")
"""Weights that are not quantized."""


def model_of(name: str, device: str, dtype: torch.dtype = torch.float16, **shape: Any) -> Any:
    """Return a model of `MODELS` with random weights on `device`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture, published = MODELS[name]
    config = AutoConfig.for_model(architecture, **{**published, **shape})
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model.eval()


class Decoding:
    """One sequence that is decoded by `model`, over a cache of its own."""

    def __init__(self, eager: Any, model: Model, prompt: torch.Tensor, room: int) -> None:
        from transformers import StaticCache

        config = eager.config
        self.model = eager
        self.cache = StaticCache(config=config, max_cache_len=prompt.shape[1] + room)
        self.position = torch.arange(prompt.shape[1], device=prompt.device)
        self.token, self.logits = prompt, torch.empty(0)
        self.step()  # the prompt, eagerly: it makes the cache's tensors, which a graph may then rely on
        self.model = model

    def step(self) -> None:
        """Decode one token."""
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        found = self.model(
            self.token, past_key_values=self.cache, use_cache=True, cache_position=self.position
        )
        self.logits = found.logits[:, -1:].clone()
        self.token = self.logits.argmax(-1)
        self.position = self.position[-1:] + 1


def decoded(eager: Any, model: Model, prompt: torch.Tensor, warm: int, tokens: int) -> dict[str, Any]:
    """Decode, and return what was chosen, the first logits, seconds until warm and milliseconds per token."""
    begun = time.perf_counter()
    work = Decoding(eager, model, prompt, warm + 2 * tokens + 1)
    work.step()
    first = work.logits.float()
    for _ in range(warm):
        work.step()
    torch.cuda.synchronize()
    ready, times, chosen = time.perf_counter() - begun, [], []
    for _ in range(tokens):
        start = time.perf_counter()
        work.step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
        chosen.append(int(work.token))
    start = time.perf_counter()
    for _ in range(tokens):
        work.step()
    torch.cuda.synchronize()
    ahead = 1e3 * (time.perf_counter() - start) / tokens
    read = statistics.median(times)
    return {"ms": ahead, "ms read": read, "first_s": ready, "tokens": chosen, "logits": first}


def ways_of(model: Any, weights: str) -> dict[str, Callable[[], Model]]:
    """Return how to run a model, by name."""
    ways: dict[str, Callable[[], Model]] = {"eager": lambda: model}
    if weights in DENSE:
        ways["torch reduce-overhead"] = lambda: torch.compile(model, mode="reduce-overhead")
    ways["ladder"] = lambda: ladder.compile(model)
    return ways


def measured(arguments: argparse.Namespace, weights: str) -> dict[str, Any]:
    """Decode with one type of weights in every way; print and return the figures."""
    layers = {} if arguments.layers is None else {"num_hidden_layers": arguments.layers}
    dtype = torch.bfloat16 if weights == "bfloat16" else torch.float16
    model = model_of(arguments.model, "cuda", dtype, **layers)
    if weights not in DENSE:
        ladder.quantize_(model, weights, group_size=128)
    prompt = torch.randint(0, 1000, (1, arguments.context), device="cuda")
    rows: dict[str, Any] = {}
    for name, make in ways_of(model, weights).items():
        if name not in arguments.ways:
            continue
        fast: Any = make()
        found = decoded(model, fast, prompt, arguments.warm, arguments.tokens)
        reference = rows.get("eager", found)  # without eager, differences are 0
        logits = found.pop("logits")
        found["error"] = float((logits - reference.get("kept", logits)).norm() / logits.norm())
        found["same_tokens"] = sum(a == b for a, b in zip(found["tokens"], reference["tokens"], strict=True))
        if name == "ladder":
            found["explain"] = fast.explain()
        rows[name] = {**found, "kept": logits}
        print(
            f"{weights:8} {name:22} {found['ms']:7.3f} ms per token, {found['ms read']:7.3f} read,"
            f" ready after {found['first_s']:.1f} s,"
            f" error {found['error']:.1e}, {found['same_tokens']}/{arguments.tokens} tokens",
            flush=True,
        )
        print(found.get("explain", ""), flush=True)
    return {name: {key: row[key] for key in row if key != "kept"} for name, row in rows.items()}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--weights", nargs="+", default=["float16", "int4"])
    parser.add_argument("--ways", nargs="+", default=["eager", "torch reduce-overhead", "ladder"])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--warm", type=int, default=8, help="tokens before those that are timed")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    require_gpu()
    with torch.no_grad():
        results = {weights: measured(arguments, weights) for weights in arguments.weights}
    if arguments.output is not None:
        found = {"environment": environment(), "model": arguments.model, **results}
        write_record(arguments.output, found)


if __name__ == "__main__":
    main()
