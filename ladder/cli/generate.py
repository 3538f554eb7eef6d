"""``ladder generate``: text by a model of transformers, its weights quantized, its forward pass compiled."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

import ladder
from ladder.cli.console import Progress, silent
from tile_types.errors import CheckpointError, DeviceError, LadderError, MissingToolError, ValueRangeError
from tile_types.library import get_type

CONFIG = "config.json"
KEPT = "none"
"""Name of the weight type under which weights stay as they are in the folder."""


@dataclass(frozen=True)
class Request:
    """Options of a generation.

    path: Folder with ``config.json``, weights and a tokenizer.
    prompt: Text to continue.
    weight: Type of the weights; ``"none"`` leaves them as the folder has them.
    group_size: Elements along K per scale.
    tokens: Tokens to generate at most.
    dtype: Type that the model computes in.
    device: ``"cpu"``, ``"cuda"``, or None for a GPU if there is one.
    temperature: 0: the likeliest token each time.
    seed: Of the drawing of tokens.
    compiled: Whether the model runs compiled; otherwise eagerly, to compare.
    """

    path: Path
    prompt: str
    weight: str = "int4"
    group_size: int = 128
    tokens: int = 64
    dtype: str = "bfloat16"
    device: str | None = None
    temperature: float = 0.0
    seed: int = 0
    compiled: bool = True


class Ready(NamedTuple):
    """A model that can generate, its tokenizer, where it is, and how many seconds loading took."""

    tokenizer: Any
    model: Any
    device: str
    seconds: float


class Clock:
    """A streamer for `generate`: notes when each token came, and writes the text.

    tokenizer: Makes text of tokens.
    write: Called with each piece of text.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], Any]) -> None:
        from transformers import TextStreamer

        self.streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.streamer.on_finalized_text = self.say
        self.write = write
        self.pieces: list[str] = []
        self.times: list[float] = []
        self.prompted = False

    def say(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append(text)
        self.write(text)

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then a token at a time."""
        if self.prompted:
            self.times.append(time.perf_counter())
        self.prompted = True
        self.streamer.put(value.cpu())

    def end(self) -> None:
        self.streamer.end()


def load(request: Request, step: Progress = silent) -> Ready:
    """Read a folder's model and tokenizer; weights are quantized one by one as they are read.

    Raises
    ------
    UnknownNameError
        If there is no such type of weights.
    CheckpointError
        If the folder holds no model or no tokenizer.
    DeviceError
        If the device is not here.
    MissingToolError
        If transformers is not installed.
    """
    start, config = time.perf_counter(), request.path / CONFIG
    if request.weight != KEPT:
        get_type(request.weight)
    step(f"loading {request.path}")
    if not config.is_file():
        raise CheckpointError(f"{request.path} is no folder of a model: it has no config.json")
    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("this torch sees no GPU; `ladder doctor` says what is missing")
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise MissingToolError(
            "`ladder generate` needs transformers: pip install 'transformers>=5'"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(request.path, local_files_only=True)
    except ImportError as error:  # transformers imports its parts, and packages beside it, when it needs them
        raise MissingToolError(
            f"transformers does not work here: {str(error).partition(chr(10))[0]}"
        ) from error
    except Exception as error:  # packages beneath transformers have classes of their own
        raise CheckpointError(f"{request.path} has no tokenizer: {_one_line(error)}") from error
    model = _model(request)
    return Ready(tokenizer, model.eval().to(device), device, time.perf_counter() - start)


def _one_line(error: Exception) -> str:
    """Return the beginning of what an error says; its class if that is nothing."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _model(request: Request) -> Any:
    """Read the model of a folder.

    Raises CheckpointError if transformers cannot load it, or the folder lacks tensors of it.
    Raises LadderError if it cannot be quantized so.
    """
    from transformers import AutoModelForCausalLM

    from ladder.integrations.loading import require_whole
    from ladder.integrations.transformers import LadderConfig, load_pretrained

    options: dict[str, Any] = {"dtype": getattr(torch, request.dtype), "output_loading_info": True}
    try:
        config = json.loads((request.path / CONFIG).read_text())
        method = (config.get("quantization_config") or {}).get("quant_method")
        if method not in (None, "ladder"):
            model, info = load_pretrained(AutoModelForCausalLM, request.path, **options)
        else:
            if method is None and request.weight != KEPT:
                options["quantization_config"] = LadderConfig(request.weight, group_size=request.group_size)
            model, info = AutoModelForCausalLM.from_pretrained(request.path, local_files_only=True, **options)
    except LadderError:
        raise
    except Exception as error:
        raise CheckpointError(f"{request.path}: transformers cannot load it: {_one_line(error)}") from error
    require_whole(str(request.path), model, info["missing_keys"])
    return model


def run_generate(request: Request, ready: Ready, write: Callable[[str], Any]) -> dict[str, Any]:
    """Generate text.

    ready: The model.
    write: Called with each piece of text as it comes.
    Returns: JSON-able: ``text``, ``tokens``, ``load_s``, ``first_s`` (seconds until the first token,
        compiling included), ``token_ms`` (median of the later ones), ``tokens_per_s``, ``memory`` (bytes, the
        most in use), ``device``, ``graphs``.
    Raises ValueRangeError if the prompt is empty, or it and the tokens take more positions than there are.
    """
    model = ladder.compile(ready.model) if request.compiled else ready.model
    clock = Clock(ready.tokenizer, write)
    tokens = ready.tokenizer(request.prompt, return_tensors="pt").to(ready.device)
    tokens.pop("token_type_ids", None)
    if not tokens["input_ids"].numel():
        raise ValueRangeError("the prompt has no tokens")
    _require_positions(ready.model, tokens["input_ids"].shape[-1], request.tokens)
    options: dict[str, Any] = {"do_sample": request.temperature > 0}
    if request.temperature:
        options["temperature"] = request.temperature
    if ready.device == "cuda":
        options |= {"cache_implementation": "static", "disable_compile": True}
    torch.manual_seed(request.seed)
    start = time.perf_counter()
    with torch.no_grad():
        model.generate(**tokens, max_new_tokens=request.tokens, streamer=clock, **options)
    each = median([b - a for a, b in pairwise(clock.times)] or [0.0])
    return {
        "text": "".join(clock.pieces),
        "tokens": len(clock.times),
        "load_s": round(ready.seconds, 2),
        "first_s": round(clock.times[0] - start, 3),
        "token_ms": round(1e3 * each, 3),
        "tokens_per_s": round(1 / each, 1) if each else None,
        "memory": _memory(ready.device),
        "device": ready.device,
        "graphs": model.explain().partition("\n")[0] if request.compiled else "eager",
    }


def _require_positions(model: Any, prompt: int, more: int) -> None:
    """Raise `ValueRangeError` if a model was not made for a text of so many tokens."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(most, int) and prompt + more > most:
        raise ValueRangeError(
            f"a prompt of {prompt} tokens and {more} more take {prompt + more} positions;"
            f" {type(model).__name__} has {most}"
        )


def _memory(device: str) -> int:
    """Return the most bytes that were in use: of the GPU, or of this process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def as_fields(found: dict[str, Any]) -> dict[str, str]:
    """Return the figures as named lines."""
    rate = found["tokens_per_s"]
    return {
        "tokens": f"{found['tokens']} on {found['device']}",
        "loaded in": f"{found['load_s']:.1f} s",
        "first token": f"after {found['first_s']:.2f} s, compiling included",
        "then": "-" if rate is None else f"{rate:.1f} tokens/s (median of {found['token_ms']:.2f} ms each)",
        "memory": f"{found['memory'] / 1e9:.2f} GB at most",
        "graphs": found["graphs"],
    }
