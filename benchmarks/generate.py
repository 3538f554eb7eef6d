"""Greedy decoding by transformers' own models over a static cache, batch 1, Python's loop included.

``python -m benchmarks.generate [--model llama-3.1-8b] [--layers N] [--weights float16 int4] [--output FILE]``

A model has the shape of a published one and random weights. Ways that take turns: decoded (torch's eager
model of the weights that codes stand for, rounded to 16 bits; only if asked), eager (of the quantized
layers), ``torch.compile`` in mode ``reduce-overhead`` (weights of 16 bits) and `ladder.compile`. The first
reads the prompt for all; what is compiled is one call of the model, the choice of the next token and the step
to its position, which stay in the same tensors. "ms" is the time of a loop over tokens by their number:
nothing is read from the GPU, so Python runs ahead; "ms read" is that of a loop that reads each token; "ms
replay" that of the CUDA graph of `ladder.compile` alone. Where tokens part from the first way's, the gap of
its logits between the two choices stands beside the rounding step of the larger: a gap of a few steps is a
tie of rounding; all later tokens differ.

With random weights the largest of 128,256 logits leads by little, and one tie changes all that follows.
``--forced N`` therefore gives N tokens to three models alike: in float32 with the weights that the codes
stand for, which chooses them; torch's eager one of the same weights rounded to 16 bits; `ladder.compile`.
Of the latter two it tells how far their logits are from float32's, how often they choose the same token,
and the largest lead of float32's token where they do not.
"""

from __future__ import annotations

import argparse
import copy
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
from ladder.api.stacked_experts import HOME

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

    The prompt is read eagerly, which makes the cache's tensors; `again` copies them, before any token.
    """

    def __init__(self, model: Any, step: Step, prompt: torch.Tensor, room: int) -> None:
        from transformers import StaticCache

        length = prompt.shape[1]
        self.call, self.cache = step, StaticCache(config=model.config, max_cache_len=length + room)
        position = torch.arange(length, device=prompt.device)
        found = model(prompt, past_key_values=self.cache, use_cache=True, cache_position=position)
        self.token, self.position = found.logits[:, -1:].argmax(-1), position[-1:] + 1
        self.mark()

    def mark(self) -> None:
        """Tell torch that token and position stay in place, else it records no graph that writes them."""
        for tensor in (self.token, self.position):
            torch._dynamo.mark_static_address(tensor)

    def again(self, step: Step) -> Decoding:
        """Return the same sequence for another way to decode, over a copy of the cache."""
        twin = copy.copy(self)
        state = self.cache, self.token.clone(), self.position.clone()
        twin.call, (twin.cache, twin.token, twin.position) = step, copy.deepcopy(state)
        twin.mark()
        return twin

    def read(self, token: torch.Tensor) -> torch.Tensor:
        """Read a token that is given; return the logits of the next in double precision."""
        self.token.copy_(token)
        logits: torch.Tensor = self.call(self.token, self.position, self.cache)
        return logits.double()

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
    ahead = timed(work.step, min(tokens, 64))
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
    ways: dict[str, Callable[[Step], Any]] = {"decoded": lambda step: step, "eager": lambda step: step}
    if weights in DENSE:
        ways["torch reduce-overhead"] = lambda step: torch.compile(step, mode="reduce-overhead")
    ways["ladder"] = ladder.compile
    return ways


def first_difference(found: list[int], first: list[int], logits: list[torch.Tensor]) -> dict[str, float]:
    """Return where tokens part from the first way's, the gap of its logits there, and their rounding step."""
    at = next((at for at, (a, b) in enumerate(zip(found, first, strict=True)) if a != b), None)
    if at is None or not logits:
        return {}
    chosen, other = float(logits[at][first[at]]), float(logits[at][found[at]])
    step = torch.finfo(logits[at].dtype).eps * 2.0 ** math.floor(math.log2(abs(chosen)))
    return {"at": at, "gap": chosen - other, "step": step}


def decoded_values(model: Any, name: str) -> torch.Tensor:
    """Return the values of a parameter, in float32 those that codes stand for."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    layer = dict(getattr(module, HOME, {})).get(last, module)  # experts keep their layers there
    if not isinstance(layer, ladder.Linear) or (layer is module and last != "weight"):
        found: torch.Tensor = getattr(module, last)
        return found
    place = next(layer.buffers()).device
    assert layer.canonical is not None  # `ladder.quantize_` keeps it
    values: torch.Tensor = layer.canonical.to(place).dequantize("float32")
    return values


def decoded_model(model: Any, dtype: torch.dtype) -> Any:
    """Return a plain model of transformers with the weights that a model's codes stand for, rounded once."""
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False  # the head may be quantized where the embedding is not
    with torch.device(next(model.buffers()).device):
        plain = type(model)._from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(decoded_values(model, name).reshape(parameter.shape))
    return plain


def logits_of(model: Any) -> Step:
    """Return what reads one token and gives the logits of the next."""

    def step(token: torch.Tensor, position: torch.Tensor, cache: Any) -> Any:
        found = model(token, past_key_values=cache, use_cache=True, cache_position=position)
        position.add_(1)
        return found.logits[0, -1]

    return step


def forced(model: Any, prompt: torch.Tensor, tokens: int) -> dict[str, Any]:
    """Give the same tokens to a model in float32, to torch's of 16 bits and to ours; compare logits."""
    exact, eager = (decoded_model(model, dtype) for dtype in (torch.float32, model.dtype))
    exact_work = Decoding(exact, logits_of(exact), prompt, tokens + 1)
    begun = Decoding(eager, logits_of(eager), prompt, tokens + 1)
    works = {"eager": begun.again(begun.call), "ladder": begun.again(ladder.compile(logits_of(model)))}
    found: dict[str, Any] = {name: {"errors": [], "same": 0, "lead": 0.0} for name in works}
    token = exact_work.token.clone()
    for _ in range(tokens):
        right = exact_work.read(token)
        spread = float(right.std())
        for name, work in works.items():
            near, row = work.read(token), found[name]
            row["errors"].append(float((near - right).norm() / right.norm()))
            chosen = int(near.argmax())
            row["same"] += chosen == int(right.argmax())
            row["lead"] = max(row["lead"], float(right.max() - right[chosen]) / spread)
        token = right.argmax().view(1, 1)
    for name, row in found.items():
        row["of"] = tokens
        print(
            f"forced tokens, {name:6}: logits {statistics.median(row['errors']):.2e} (most"
            f" {max(row['errors']):.2e}) from float32's, {row['same']} of {tokens} tokens the same, float32's"
            f" leads by at most {row['lead']:.3f} standard deviations at others",
            flush=True,
        )
    return found


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
    work: Decoding | None = None
    for name, make in ways_of(weights).items():
        if name not in arguments.ways:
            continue
        source = decoded_model(model, dtype) if name == "decoded" else model
        step: Any = make(step_of(source, None if rows or name == "ladder" else logits.append))
        work = work or Decoding(source, step, prompt, room)
        found = decoded(work.again(step), arguments.warm, arguments.tokens)
        reference = next(iter(rows.values()), None)
        if reference is not None:
            pairs = zip(found["tokens"], reference["tokens"], strict=True)
            found["same_tokens"] = sum(a == b for a, b in pairs)
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
            f" {found.get('same_tokens', '-')}/{len(found['tokens'])} tokens as the first way's",
            flush=True,
        )
        if found.get("parts"):
            print("tokens part at {at}: gap {gap:.4f}, rounding step {step:.4f}".format(**found["parts"]))
        print(found.get("explain", ""), flush=True)
    if arguments.forced:
        rows["forced"] = forced(model, prompt, arguments.forced)
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
    parser.add_argument("--forced", type=int, default=0, help="tokens that are given to compare logits")
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
