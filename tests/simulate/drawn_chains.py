"""What random chains are drawn of, whether their sizes are known or open."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from ladder.ir import GraphBuilder

DTYPES: dict[str, Any] = {"float16": np.float16, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
BOUNDS = {"float16": 3e-3, "float32": 3e-5, "bfloat16": 3e-2}
BINARY = ("add", "sub", "mul", "maximum")


class Drawn:
    """A chain being drawn, of two inputs of one shape and a row.

    shapes: Of the inputs.
    unary: Operators of one value.
    """

    shapes: ClassVar[Sequence[tuple[Any, ...]]]
    unary: ClassVar[Sequence[str]]

    def __init__(
        self, seed: int, ttypes: Sequence[str] = ("float16", "float16", "float32", "bfloat16")
    ) -> None:
        self.random = random.Random(seed)
        self.graph = GraphBuilder("chain")
        self.shape = self.random.choice(self.shapes)
        self.ttype = self.random.choice(ttypes)
        self.values = [self.graph.input(name, self.ttype, self.shape) for name in "xy"]
        self.row = self.graph.input("w", self.ttype, self.shape[-1:])


def unary(d: Drawn, a: str, b: str) -> str:
    bounded = d.graph.add("minimum", a, d.graph.add("constant", value=3.0, type=d.ttype))
    return d.graph.add(d.random.choice(d.unary), bounded)


def binary(d: Drawn, a: str, b: str) -> str:
    return d.graph.add(d.random.choice(BINARY), a, b)


def times_row(d: Drawn, a: str, b: str) -> str:
    return d.graph.add("mul", a, d.row)


def softmax(d: Drawn, a: str, b: str) -> str:
    last = len(d.shape) - 1
    powers = d.graph.add("exp", d.graph.add("sub", a, d.graph.add("reduce_max", a, axis=last)))
    return d.graph.add("div", powers, d.graph.add("reduce_sum", powers, axis=last))


def turned(d: Drawn, a: str, b: str) -> str:
    order = list(range(len(d.shape)))
    d.random.shuffle(order)
    return d.graph.add("reshape", d.graph.add("transpose", a, permutation=tuple(order)), shape=d.shape)
