"""Greedy decoding by transformers' own models over a static cache, batch 1, Python's loop included.

``python -m benchmarks.generate [--model llama-3.1-8b] [--layers N] [--weights float16 int4] [--output FILE]``

A model has the shape of a published one and random weights. Ways that take turns: eager, ``torch.compile``
in mode ``reduce-overhead`` (weights of 16 bits) and `ladder.compile`. Each decodes the same prompt; what is
compiled is one call of the model, the choice of the next token and the step to its position, which stay in
the same tensors. "ms" is the time of a loop over all tokens by their number: nothing is read from the GPU, so
Python runs ahead; "ms read" is that of a loop that reads each token; "ms replay" that of the CUDA graph of
`ladder.compile` alone. Where tokens part from eager's, the gap of its logits between the two choices stands
beside the rounding step of the larger: a gap of a few steps is a tie of rounding; all later tokens differ.
"""

from __future__ import annotations

import argparse
import math
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

Step = Callable[[torch.Tensor, torch.Tensor, Any], Any]
"""Decodes one token: ``(token[1, 1], position[1], cache)``; both become the next."""

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


def step_of(model: Any, keep: Callable[[torch.Tensor], None] | None = None) -> Step:
    """Return what decodes one token by a model, greedily, and hands its logits to `keep`."""

    def step(token: torch.Tensor, position: torch.Tensor, cache: Any) -> None:
        found = model(token, past_key_values=cache, use_cache=True, cache_position=position)
        token.copy_(found.logits[:, -1:].argmax(-1))
        position.add_(1)
        if keep is not None:
            keep(found.logits[0, -1])

    return step


class Decoding:
    """One sequence that is decoded over a cache of its own.

    The prompt is read eagerly, which makes the cache's tensors.
    """

    def __init__(self, model: Any, step: Step, prompt: torch.Tensor, room: int) -> None:
        from transformers import StaticCache

        length = prompt.shape[1]
        self.call, self.cache = step, StaticCache(config=model.config, max_cache_len=length + room)
        position = torch.arange(length, device=prompt.device)
        found = model(prompt, past_key_values=self.cache, use_cache=True, cache_position=position)
        self.token, self.position = found.logits[:, -1:].argmax(-1), position[-1:] + 1
        for tensor in (self.token, self.position):
            torch._dynamo.mark_static_address(tensor)  # else torch records no CUDA graph that writes it

    def step(self) -> None:
        """Decode one token."""
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        self.call(self.token, self.position, self.cache)


def decoded(work: Decoding, warm: int, tokens: int) -> dict[str, Any]:
    """Decode, and return what was chosen, seconds until warm and milliseconds per token."""
    begun, chosen = time.perf_counter(), []
    for _ in range(1 + warm):
        work.step()
        chosen.append(int(work.token))
    ready, times = time.perf_counter() - begun, []
    for _ in range(tokens):
        start = time.perf_counter()
        work.step()
        chosen.append(int(work.token))
        times.append(1e3 * (time.perf_counter() - start))
    ahead = timed(work.step, tokens)
    return {"ms": ahead, "ms read": statistics.median(times), "first_s": ready, "tokens": chosen}


def timed(call: Callable[[], object], times: int) -> float:
    """Return the milliseconds of a call, of many one after the other."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / times


def ways_of(weights: str) -> dict[str, Callable[[Step], Any]]:
    """Return how to compile a step, by name."""
    ways: dict[str, Callable[[Step], Any]] = {"eager": lambda step: step}
    if weights in DENSE:
        ways["torch reduce-overhead"] = lambda step: torch.compile(step, mode="reduce-overhead")
    ways["ladder"] = ladder.compile
    return ways


def first_difference(found: list[int], eager: list[int], logits: list[torch.Tensor]) -> dict[str, float]:
    """Return where tokens part from eager's, the gap of its logits there, and their rounding step."""
    at = next((at for at, (a, b) in enumerate(zip(found, eager, strict=True)) if a != b), None)
    if at is None:
        return {}
    chosen, other = float(logits[at][eager[at]]), float(logits[at][found[at]])
    step = torch.finfo(logits[at].dtype).eps * 2.0 ** math.floor(math.log2(abs(chosen)))
    return {"at": at, "gap": chosen - other, "step": step}


def measured(arguments: argparse.Namespace, weights: str) -> dict[str, Any]:
    """Decode with one type of weights in every way; print and return the figures."""
    layers = {} if arguments.layers is None else {"num_hidden_layers": arguments.layers}
    dtype = torch.bfloat16 if weights == "bfloat16" else torch.float16
    model = model_of(arguments.model, "cuda", dtype, **layers)
    if weights not in DENSE:
        ladder.quantize_(model, weights, group_size=128)
    prompt = torch.randint(0, 1000, (1, arguments.context), device="cuda")
    room = arguments.warm + 3 * arguments.tokens + 1
    rows: dict[str, Any] = {}
    logits: list[torch.Tensor] = []
    for name, make in ways_of(weights).items():
        if name not in arguments.ways:
            continue
        step: Any = make(step_of(model, logits.append if name == "eager" else None))
        found = decoded(Decoding(model, step, prompt, room), arguments.warm, arguments.tokens)
        reference = rows.get("eager", found)  # without eager, all are the same
        found["same_tokens"] = sum(a == b for a, b in zip(found["tokens"], reference["tokens"], strict=True))
        found["parts"] = first_difference(found["tokens"], reference["tokens"], logits)
        if name == "ladder":
            found["explain"] = step.explain()
            graphs = [graph for built in step.models for graph in built.executable.recorded()]
            if len(graphs) == 1:
                found["ms replay"] = timed(graphs[0].replay, arguments.tokens)
        rows[name] = found
        print(
            f"{weights:8} {name:22} {found['ms']:7.3f} ms per token, {found['ms read']:7.3f} read,"
            f" {found.get('ms replay', float('nan')):7.3f} replay, ready after {found['first_s']:.1f} s,"
            f" {found['same_tokens']}/{len(found['tokens'])} tokens",
            flush=True,
        )
        if found["parts"]:
            print("tokens part at {at}: gap {gap:.4f}, rounding step {step:.4f}".format(**found["parts"]))
        print(found.get("explain", ""), flush=True)
    return rows


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
