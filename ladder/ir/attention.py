"""Attention as one problem: what a kernel of ours is made for. Extents that it leaves open are arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ladder.ir.attention_row import operand_names
from ladder.ir.build import GraphBuilder, node_attributes
from ladder.ir.graph import Graph, Node
from tile_types.errors import DTypeError, ShapeError

LOG2_E = 1.4426950408889634

POSITIONS = ("int32", "int64")
"""Types of the positions that say how many keys count."""

FLOATS = ("float16", "bfloat16")
"""Types that tensor cores of all generations from sm_80 on multiply."""

MASKS = ("bool", "float32", *FLOATS)

AXES: Mapping[str, str] = {
    "q": "bhs", "k": "bhs", "v": "bhs", "k_scale": "bhs", "v_scale": "bhs", "mask": "bhs", "position": "bs",
    "out": "bhs",
}  # fmt: skip
"""Tensor -> axes whose strides a kernel takes: batch, head, token; the last axis is contiguous."""

STEP_ELEMENTS = 16
"""Elements of a head that a step of matrix cores multiplies, or sums."""

HEAD_MULTIPLE, MOST_HEAD_ELEMENTS = 8, 256
"""Heads that kernels take have a multiple of the first number of elements, and at most the second."""

CODES = ("int8", "fp8_e4m3", "fp8_e5m2")
"""Types of keys and values that have a float32 scale per token and head beside them."""


Case = tuple[int, int, int]
"""Batch, tokens and keys of a call."""


@dataclass(frozen=True)
class Attention:
    """``softmax(q kᵀ scale + mask) v`` for few query tokens; batch, tokens and keys are open.

    heads, kv_heads: Heads of q, and of k and v: each serves ``heads / kv_heads`` of q's.
    size: Elements of a head.
    ttype: Type of q and of the result.
    stored: Type of k and v, `ttype` or one of `CODES`.
    mask: Type of a tensor ``[batch, heads, tokens, keys]``: ``"bool"`` chooses, others are added; empty:
        none.
    position: Type of ``[batch, tokens]`` positions (any of the two axes may be shared), one of `POSITIONS`:
        query token s sees the keys ``t < position + reach``; empty: none.
    reach: 0, or 1 where the key at the position itself is seen.
    causal: Whether query token s sees only keys ``t <= s``.
    scale: What scores are multiplied with.
    strict: Whether rows that see no key are NaN, as softmax has them, or 0, as torch's operator has.
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
    strict: bool = False

    @property
    def group(self) -> int:
        """Heads of q that share keys."""
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """Elements of a head as matrix cores multiply it: made up by zeros to whole fragments and words."""
        whole = 2 * STEP_ELEMENTS // self.stored_bytes
        return -(-self.size // whole) * whole

    @property
    def stored_bytes(self) -> int:
        """Bytes of an element of k and v."""
        return 1 if self.stored in CODES else 2

    def keys_bytes(self, batch: int, keys: int) -> int:
        """Return the bytes of k and v with their scales."""
        scales = 4 if self.stored in CODES else 0
        return 2 * batch * self.kv_heads * keys * (self.size * self.stored_bytes + scales)

    def tensors(self, without: str = "") -> dict[str, str]:
        """Return the tensors that a kernel takes, in order, with their types.

        without: One that it makes itself.
        """
        found = {"q": self.ttype, "k": self.stored, "v": self.stored}
        if self.mask:
            found["mask"] = self.mask
        if self.position:
            found["position"] = self.position
        if self.stored in CODES:
            found |= {"k_scale": "float32", "v_scale": "float32"}
        found["out"] = self.ttype
        return {name: ttype for name, ttype in found.items() if name != without}

    def numbers(self, without: str = "") -> list[str]:
        """Return the names of the integers that a kernel takes before its tensors; ``without`` as there."""
        return [
            "batch",
            "tokens",
            "keys",
            *(f"{name}_{axis}" for name in self.tensors(without) for axis in AXES[name]),
        ]


def head_problem(form: Attention) -> str:
    """Say why no kernel has such heads; empty if they do.

    Rows of q, k and v begin at multiples of 16 bytes: eight elements of 16 bits, sixteen codes.
    """
    unit = HEAD_MULTIPLE if form.stored_bytes > 1 else STEP_ELEMENTS
    fits = form.size % unit == 0 and HEAD_MULTIPLE <= form.size <= MOST_HEAD_ELEMENTS
    return "" if fits else f"heads of {form.size} elements have no kernel"


def as_attention(
    graph: Graph | GraphBuilder, node: Node, types: Sequence[str] = FLOATS, *, alike: bool = True
) -> Attention:
    """Return the problem that an ``attention`` node is.

    types: Of q that a device multiplies.
    alike: Whether heads of values must have as many elements as those of keys.
    Raises ShapeError, DTypeError if it is none; the message says why.
    """
    given = node_attributes(node)
    tiles = {
        name: graph.tile(value)
        for name, value in zip(operand_names(len(node.inputs), given), node.inputs, strict=True)
    }
    named = {name: tile.ttype.name for name, tile in tiles.items()}
    q, k, v = (tiles[name].shape for name in "qkv")
    heads, kv_heads, size = q[-3], k[-3], q[-1]
    if len(q) != 4 or not (isinstance(heads, int) and isinstance(kv_heads, int) and isinstance(size, int)):
        raise ShapeError("it needs four axes, and known heads and sizes")
    if k[:-1] != v[:-1] or (alike and k != v) or heads % kv_heads:
        raise ShapeError("keys and values differ in shape, or heads are no groups")
    if named["q"] not in types or named["k"] != named["v"]:
        raise DTypeError(f"it is of {named['q']}, {named['k']} and {named['v']}")
    scaled = "k_scale" in named
    if scaled != (named["k"] in CODES) or not (scaled or named["k"] == named["q"]):
        raise DTypeError(f"keys are {named['k']} where q is {named['q']}")
    mask, position = named.get("mask", ""), named.get("position", "")
    if (mask and mask not in MASKS) or (mask == "bool") != bool(given["choose"]):
        raise DTypeError(f"its mask is of {mask}")
    scale = float(size) ** -0.5 if given["scale"] is None else float(given["scale"])
    how = given["reach"], given["causal"], scale, given["strict"]
    return Attention(heads, kv_heads, size, named["q"], named["k"], mask, position, *how)


def open_extents(graph: Graph | GraphBuilder, node: Node) -> tuple[object, object, object]:
    """Return batch, tokens and keys of an ``attention`` node: numbers or expressions."""
    q, k = (graph.tile(value).shape for value in node.inputs[:2])
    return q[0], q[-2], k[-2]
