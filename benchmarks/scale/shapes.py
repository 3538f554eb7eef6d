"""Shapes of public decoder models, as their configuration files have them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """Attention by groups of heads, or by one latent vector per token where ``latent`` is not 0.

    Parameters
    ----------
    heads, kv_heads, size
        Heads, heads of keys and values, numbers in a head.
    latent, rotary, query
        Of latent attention: numbers of the latent vector, of the rotary part, of the queries' low rank;
        ``size`` is then that of a head's keys without the rotary part, and of its values.
    window
        Every second layer sees only so many tokens; 0 if none does.
    """

    heads: int
    kv_heads: int
    size: int
    latent: int = 0
    rotary: int = 0
    query: int = 0
    window: int = 0

    def weights(self, width: int) -> int:
        """Return the numbers in a layer's matrices."""
        if not self.latent:
            return 2 * width * self.size * (self.heads + self.kv_heads)
        queries = width * self.query + self.query * self.heads * (self.size + self.rotary)
        keys = width * (self.latent + self.rotary) + self.latent * self.heads * 2 * self.size
        return queries + keys + self.heads * self.size * width

    @property
    def kept(self) -> int:
        """Numbers that a layer's cache keeps of a token."""
        return self.latent + self.rotary if self.latent else 2 * self.kv_heads * self.size

    def copies(self, tensor: int) -> int:
        """Return on how many of ``tensor`` GPUs each number of the cache lies: a head is never cut."""
        return max(1, tensor // (1 if self.latent else self.kv_heads))

    def seen(self, context: int) -> float:
        """Return the tokens that a layer reads, the mean of both kinds of layers."""
        return (context + min(context, self.window)) / 2 if self.window else float(context)

    def work(self, context: int) -> float:
        """Return the operations of one token over its cache, in one layer."""
        per_token = 2 * self.latent + self.rotary if self.latent else 2 * self.size
        return 2.0 * self.heads * per_token * self.seen(context)


@dataclass(frozen=True)
class Shape:
    """A decoder.

    Parameters
    ----------
    name, layers, width, vocabulary
        What they say.
    attention
        That of every layer.
    hidden
        Inner numbers of the gated network of layers without experts.
    experts, active, expert_hidden, shared
        Experts of a layer, how many a token takes, their inner numbers, and experts that all tokens take.
    dense_layers
        Layers without experts.
    bits
        Of a weight with its share of the scale.
    published
        Parameters, as the authors say.
    source
        Where the numbers are from.
    """

    name: str
    layers: int
    width: int
    vocabulary: int
    attention: Attention
    hidden: int
    experts: int = 0
    active: int = 0
    expert_hidden: int = 0
    shared: int = 0
    dense_layers: int = 0
    bits: float = 4.125
    published: float = 0.0
    source: str = ""

    @property
    def expert(self) -> int:
        """Numbers of one expert."""
        return 3 * self.width * self.expert_hidden

    @property
    def dense(self) -> float:
        """Numbers that every token reads in a layer, the mean of all layers."""
        experts = (self.shared * self.expert + self.experts * self.width) if self.experts else 0
        plain = 3 * self.width * self.hidden
        share = self.expert_layers / self.layers
        return self.attention.weights(self.width) + share * experts + (1 - share) * plain

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def parameters(self) -> float:
        """All numbers, input and output embeddings included."""
        experts = self.expert_layers * self.experts * self.expert
        return self.layers * self.dense + experts + 2 * self.vocabulary * self.width


INT4, MXFP4 = 4 + 16 / 128, 4 + 8 / 32
"""Bits of a weight: float16 scales of groups of 128, E8M0 scales of groups of 32."""

SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-3.1-8b", 32, 4096, 128256, Attention(32, 8, 128), 14336, bits=INT4,
              published=8.03e9, source="meta-llama/Llama-3.1-8B, config.json"),
        Shape("llama-3.1-70b", 80, 8192, 128256, Attention(64, 8, 128), 28672, bits=INT4,
              published=70.6e9, source="meta-llama/Llama-3.1-70B, config.json"),
        Shape("mixtral-8x7b", 32, 4096, 32000, Attention(32, 8, 128), 0, 8, 2, 14336, bits=INT4,
              published=46.7e9, source="mistralai/Mixtral-8x7B-v0.1, config.json"),
        Shape("gpt-oss-120b", 36, 2880, 201088, Attention(64, 8, 64, window=128), 0, 128, 4, 2880,
              bits=MXFP4, published=116.8e9, source="openai/gpt-oss-120b, config.json and model card"),
        Shape("deepseek-v3", 61, 7168, 129280, Attention(128, 128, 128, 512, 64, 1536), 18432, 256, 8, 2048,
              1, 3, INT4, 671e9, "DeepSeek-V3 Technical Report, section 4.2; config.json"),
        Shape("kimi-k2", 61, 7168, 163840, Attention(64, 64, 128, 512, 64, 1536), 18432, 384, 8, 2048, 1,
              1, INT4, 1.04e12, "Kimi K2: Open Agentic Intelligence, table 2; config.json"),
    )
}  # fmt: skip
"""Models by name. The multi-token heads of the last two are left out."""
