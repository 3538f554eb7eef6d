"""Models at their real sizes with random weights: decoder layers with a cache, and those of the tests."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ladder
from benchmarks.peers.engine import Work
from tile_types import get_type

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "models"))
zoo: Any = importlib.import_module("model_zoo")

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Sizes:
    """A decoder layer of the Llama family."""

    width: int
    heads: int
    kv_heads: int
    hidden: int

    @property
    def weights(self) -> int:
        """Numbers in all matrices of a layer."""
        size = self.width // self.heads
        attention = 2 * self.width * self.width + 2 * self.width * self.kv_heads * size
        return attention + 3 * self.width * self.hidden


LAYERS = {"8b": Sizes(4096, 32, 8, 14336), "70b": Sizes(8192, 64, 8, 28672), "tiny": Sizes(256, 4, 2, 512)}
"""Model -> sizes of its layers."""


class CachedAttention(nn.Module):
    """Attention whose keys and values are kept in tensors that each step updates in place."""

    keys: Tensor
    values: Tensor

    def __init__(self, sizes: Sizes, batch: int, context: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = sizes.heads, sizes.kv_heads, sizes.width // sizes.heads
        narrow = self.kv_heads * self.size
        self.q_proj = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k_proj = nn.Linear(sizes.width, narrow, bias=False)
        self.v_proj = nn.Linear(sizes.width, narrow, bias=False)
        self.o_proj = nn.Linear(sizes.width, sizes.width, bias=False)
        shape = (batch, self.kv_heads, context, self.size)
        self.register_buffer("keys", torch.randn(shape).to(dtype))
        self.register_buffer("values", torch.randn(shape).to(dtype))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor) -> Tensor:
        """Return ``[B, T, width]``; the last token sees the whole cache."""
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.size).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv_heads, self.size).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.size).transpose(1, 2)
        q, k = q * cos + zoo.rotate_half(q) * sin, k * cos + zoo.rotate_half(k) * sin
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        mixed = F.scaled_dot_product_attention(q, self.keys, self.values, is_causal=t > 1, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(b, t, -1))  # type: ignore[no-any-return]


class CachedLayer(nn.Module):
    """A decoder layer."""

    def __init__(self, sizes: Sizes, batch: int, context: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = zoo.RMSNorm(sizes.width)
        self.post_attention_layernorm = zoo.RMSNorm(sizes.width)
        self.self_attn = CachedAttention(sizes, batch, context, dtype)
        self.mlp = zoo.LlamaMLP(sizes.width, sizes.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor) -> Tensor:
        """Return ``[B, T, width]``."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, position)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Decoder layers one after the other, each with memory of its own."""

    def __init__(self, layer: nn.Module, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(count))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor) -> Tensor:
        """Return ``[B, T, width]``."""
        for layer in self.layers:
            x = layer(x, cos, sin, position)
        return x


@dataclass(frozen=True)
class Step:
    """A step of a stack of decoder layers.

    Parameters
    ----------
    model
        One of `LAYERS`.
    batch, tokens, context
        Sequences, new tokens of each, tokens in each cache with the new ones.
    layers
        How many.
    """

    model: str = "8b"
    batch: int = 1
    tokens: int = 1
    context: int = 1024
    layers: int = 4

    @property
    def name(self) -> str:
        """Name in reports."""
        kind = f"decode context {self.context}" if self.tokens == 1 else f"prefill {self.tokens}"
        return f"llama {self.model} {kind} batch {self.batch}"

    def floor_bytes(self, bits: float) -> float:
        """Return the bytes that a layer must read: weights of ``bits`` each, the cache in 16 bits."""
        sizes = LAYERS[self.model]
        cache = self.batch * self.context * 2 * sizes.kv_heads * (sizes.width // sizes.heads) * 2
        return sizes.weights * bits / 8 + cache

    def arguments(self, where: str) -> Arguments:
        """Return x, the rotary tables and the positions of the new tokens."""
        sizes, generator = LAYERS[self.model], torch.Generator().manual_seed(1)
        x = torch.randn(self.batch, self.tokens, sizes.width, generator=generator)
        position = torch.arange(self.context - self.tokens, self.context)
        cos, sin = zoo.rotary_table(position, sizes.width // sizes.heads)
        return x.half().to(where), cos.half().to(where), sin.half().to(where), position.to(where)


def group_of(weight: str, activation: str) -> int:
    """Return the group size of a step's weights; 0 for the type's own blocks or whole rows."""
    return 0 if not weight or activation or get_type(weight).is_block else 128


def decoder(step: Step, where: str, weight: str = "") -> tuple[nn.Module, nn.Module]:
    """Return a stack in half precision and its layer in float32, of the same values.

    Parameters
    ----------
    weight
        Type of the weights, in groups of 128 or its own blocks; ``weight:activation`` quantizes rows, and
        tokens too. Types of one sign clip. Empty: they stay halves.
    """
    weight, _, activation = weight.partition(":")
    sizes = LAYERS[step.model]
    torch.manual_seed(0)
    with torch.device(where):
        layer = (
            CachedLayer(sizes, step.batch, step.context, torch.float16).half().eval().requires_grad_(False)
        )
    exact = copy.deepcopy(layer)
    work = Work(weight, activation or "float16", group_of(weight, activation))
    for name, module in list(layer.named_modules()) if weight else []:
        if isinstance(module, nn.Linear):
            quantized = work.quantized(module.weight)
            values = torch.as_tensor(quantized.dequantize("float32"), device=where)
            exact.get_submodule(name).weight.data = values
            owner, _, field = name.rpartition(".")
            given: dict[str, Any] = {"dtype": torch.float16, "device": where, "keep_canonical": False}
            low = ladder.Linear.from_quantized(quantized, activation=activation or None, **given)
            setattr(layer.get_submodule(owner), field, low)
    return Stack(layer, step.layers).eval(), exact.float()


def exact_result(layer: nn.Module, step: Step, arguments: Arguments) -> Tensor:
    """Return what a stack of equal layers computes in float64: each begins with the same caches."""
    wide = layer.double()
    caches = {name: buffer.clone() for name, buffer in wide.named_buffers()}
    x, *rest = (value.double() if value.is_floating_point() else value for value in arguments)
    for _ in range(step.layers):
        x = wide(x, *rest)
        for name, buffer in wide.named_buffers():
            buffer.copy_(caches[name])
    return x  # type: ignore[no-any-return]


def _photo(batch: int, size: int) -> Callable[[str], Arguments]:
    return lambda where: (torch.randn(batch, 3, size, size).half().to(where),)


def _ids(batch: int, tokens: int, vocabulary: int) -> Callable[[str], Arguments]:
    return lambda where: (torch.randint(1, vocabulary, (batch, tokens)).to(where),)


def _masked(batch: int, tokens: int, vocabulary: int) -> Callable[[str], Arguments]:
    def make(where: str) -> Arguments:
        return (
            *_ids(batch, tokens, vocabulary)(where),
            torch.ones(batch, tokens, dtype=torch.int64).to(where),
        )

    return make


def _with_past(batch: int, past: int, layers: int, heads: int, size: int) -> Callable[[str], Arguments]:
    def make(where: str) -> Arguments:
        def kept() -> Tensor:
            return torch.randn(batch, heads, past, size).half().to(where)

        return (*_ids(batch, 1, 50257)(where), [(kept(), kept()) for _ in range(layers)])

    return make


def _frames(batch: int) -> Callable[[str], Arguments]:
    return lambda where: (torch.randn(batch, 1000, 80).half().to(where),)


BATCHES = (1, 128)
"""Batches of LADDER's figure 8."""

BATCHED: Mapping[str, tuple[int, Callable[[], nn.Module], Callable[[int], Callable[[str], Arguments]]]] = {
    "vit b/16": (8, lambda: zoo.ViT(224, 16, 768, 12, 12, 1000), lambda batch: _photo(batch, 224)),
    "resnet 50": (8, zoo.ResNet, lambda batch: _photo(batch, 224)),
    "shufflenet v2": (8, zoo.ShuffleNet, lambda batch: _photo(batch, 224)),
    "conformer m-shaped": (4, lambda: zoo.Conformer(80, 256, 4, 31, 16, 1000), _frames),
}
"""Model of that figure -> batch of the other tables, how to make it, and its arguments for a batch."""

MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[str], Arguments]]] = {
    "llama 1b-shaped, 8 layers": (lambda: zoo.Llama(32000, 2048, 32, 8, 8192, 8), _ids(1, 512, 32000)),
    "bloom 560m-shaped": (lambda: zoo.Bloom(64000, 1024, 16, 24), _ids(1, 512, 64000)),
    "bert base": (lambda: zoo.Bert(30522, 768, 12, 12, 512), _masked(8, 128, 30522)),
    **{
        f"{name}{f', batch {batch}' if batch in BATCHES else ''}": (make, given(batch))
        for name, (usual, make, given) in BATCHED.items()
        for batch in (usual, *BATCHES)
    },
    "efficientnet b0": (zoo.EfficientNet, _photo(8, 224)),
    "gpt2, cache of 512": (lambda: zoo.GPT2(50257, 768, 12, 12, 1024), _with_past(1, 512, 12, 12, 64)),
}
"""Model -> how to make it and its arguments, at the size that its authors gave it."""


def zoo_model(name: str, where: str) -> tuple[nn.Module, Arguments]:
    """Return a model of `MODELS` in half precision, with statistics as training leaves them."""
    make, arguments = MODELS[name]
    torch.manual_seed(0)
    with torch.device(where):
        model = make()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.8, 1.2)  # type: ignore[arg-type]
    return model.half().eval().requires_grad_(False), arguments(where)
