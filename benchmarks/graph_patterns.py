"""Patterns of today's language models: what the shipped database of proven graphs is made for.

A pattern is a program over any sizes and numbers. Its weights are packed, or plain matrices ``[N, K]``, as
``torch.nn.Linear`` stores them, or ``[K, N]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ladder.superopt.canonical import Canonical, canonical
from ladder.superopt.operators import OPERATORS
from ladder.superopt.tracer import Traced, Tracer
from tile_types.errors import unknown_name

ROWS, DEPTH, WIDTH, RANK = 16, 4096, 6144, 64
"""Sizes at which graphs are searched: of decoding."""

EPSILON = 1e-5

TYPES, PACKED = ("float16", "bfloat16"), "int4_g128"

WEIGHTS = ("packed", "rows", "columns")
"""How weights lie: packed ``[N, K]``, plain ``[N, K]``, plain ``[K, N]``."""


class Inputs:
    """Declares the inputs of a pattern.

    weights: One of `WEIGHTS`.
    """

    def __init__(self, weights: str) -> None:
        self.tracer, self.weights = Tracer(), weights
        self.packed: dict[str, str] = {}

    def rows(self, width: int) -> Traced:
        """Declare activations ``[rows, width]``."""
        return self.tracer.input((ROWS, width), (0,))

    def vector(self, width: int) -> Traced:
        """Declare one number per column."""
        return self.tracer.input((1, width))

    def product(self, x: Traced, depth: int, width: int, *, plain: bool = False) -> Traced:
        """Return the product with a weight of its own; plain ones are never packed."""
        layout = "rows" if plain and self.weights == "packed" else self.weights
        if layout == "columns":
            return OPERATORS["matmul"](self.tracer, x, self.tracer.input((depth, width)))
        packed = layout == "packed"
        weight = (self.tracer.weight if packed else self.tracer.input)((width, depth))
        self.packed |= {f"X{weight.number}": PACKED} if packed else {}
        return OPERATORS["linear"](self.tracer, x, weight)

    def do(self, operator: str, *operands: Traced) -> Traced:
        """Apply an operator."""
        return OPERATORS[operator](self.tracer, *operands)

    def norm(self, x: Traced, *, gain: bool = True, epsilon: float = EPSILON) -> Traced:
        """Return the rows divided by their root mean squares."""
        weight = self.vector(DEPTH) if gain else None
        return OPERATORS["rms_norm"](self.tracer, x, (DEPTH,), weight, epsilon)


def _norm_product(i: Inputs) -> Traced:
    return i.product(i.norm(i.rows(DEPTH)), DEPTH, WIDTH)


def _plain_norm_product(i: Inputs) -> Traced:
    return i.product(i.norm(i.rows(DEPTH), gain=False), DEPTH, WIDTH)


def _gated_mlp(i: Inputs) -> Traced:
    x = i.rows(DEPTH)
    return i.do("mul", i.do("silu", i.product(x, DEPTH, WIDTH)), i.product(x, DEPTH, WIDTH))


def _residual_product(i: Inputs) -> Traced:
    return i.do("add", i.rows(WIDTH), i.product(i.rows(DEPTH), DEPTH, WIDTH))


def _lora(i: Inputs) -> Traced:
    x = i.rows(DEPTH)
    low = i.product(i.product(x, DEPTH, RANK, plain=True), RANK, WIDTH, plain=True)
    return i.do("add", i.product(x, DEPTH, WIDTH), low)


@dataclass(frozen=True)
class Pattern:
    """A pattern.

    name: What plans call it.
    define: Gives its result.
    """

    name: str
    define: Callable[[Inputs], Traced]

    def program(self, weights: str, ttype: str = TYPES[0]) -> Canonical:
        """Return it for one kind of weights and one type of the others, in canonical form."""
        inputs = Inputs(weights)
        result = self.define(inputs)
        program = inputs.tracer.program(self.name, result, ttype)
        return canonical(replace(program, packed=inputs.packed))


PATTERNS: Mapping[str, Pattern] = {
    pattern.name: pattern
    for pattern in (
        Pattern("norm, product", _norm_product),
        Pattern("norm without gain, product", _plain_norm_product),
        Pattern("gated MLP", _gated_mlp),
        Pattern("product, residual", _residual_product),
        Pattern("LoRA", _lora),
    )
}
"""Patterns by name."""


def get_pattern(name: str) -> Pattern:
    """Return a pattern by name; raises UnknownNameError with the nearest names."""
    if name not in PATTERNS:
        raise unknown_name("pattern", name, PATTERNS)
    return PATTERNS[name]
