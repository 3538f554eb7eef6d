"""Attention as one problem: what a kernel of ours is made for. Extents that it leaves open are arguments."""

from __future__ import annotations

from dataclasses import dataclass

LOG2_E = 1.4426950408889634

POSITIONS = ("int32", "int64")
"""Types of the positions that say how many keys count."""

CODES = ("int8", "fp8_e4m3", "fp8_e5m2")
"""Types of keys and values that have a float32 scale per token and head beside them."""


@dataclass(frozen=True)
class Attention:
    """``softmax(q kᵀ scale + mask) v`` for few query tokens; batch, tokens and keys are open.

    Parameters
    ----------
    heads, kv_heads
        Heads of q, and of k and v: each serves ``heads / kv_heads`` of q's.
    size
        Elements of a head.
    ttype
        Type of q and of the result.
    stored
        Type of k and v, `ttype` or one of `CODES`.
    mask
        Type of a tensor ``[batch, heads, tokens, keys]``: ``"bool"`` chooses, others are added; empty: none.
    position
        Type of ``[batch, tokens]`` positions (any of the two axes may be shared), one of `POSITIONS`: query
        token s sees the keys ``t < position + reach``; empty: none.
    reach
        0, or 1 where the key at the position itself is seen.
    causal
        Whether query token s sees only keys ``t <= s``.
    scale
        What scores are multiplied with.
    """

    heads: int
    kv_heads: int
    size: int
    ttype: str
    stored: str
    mask: str = ""
    position: str = ""
    reach: int = 0
    causal: bool = False
    scale: float = 1.0

    @property
    def group(self) -> int:
        """Heads of q that share keys."""
        return self.heads // self.kv_heads

    @property
    def stored_bytes(self) -> int:
        """Bytes of an element of k and v."""
        return 1 if self.stored in CODES else 2

    def keys_bytes(self, batch: int, keys: int) -> int:
        """Return the bytes of k and v with their scales."""
        scales = 4 if self.stored in CODES else 0
        return 2 * batch * self.kv_heads * keys * (self.size * self.stored_bytes + scales)
