"""Quotients by way of reciprocals: by known numbers, by a number that a row shares, by numbers from 1 on.

The first are as eager PyTorch has them on GPUs, the others as exact as divisions. A row's reciprocal is
computed once for all elements that a thread has. Each quotient is corrected by what it leaves of the dividend
(Markstein, Computation of elementary functions on the IBM RISC System/6000 processor, 1990), in two steps
that a division takes as well; of dividends so small that what is left has too few bits, the last place may
differ. Divisors near the ends of float32's range are scaled first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import tvm_ffi
from tvm.script import tirx as T

from ladder.ir import scalars
from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph
from ladder.lower import Expr

if TYPE_CHECKING:
    from ladder.lower.chain.dialect import Dialect
    from ladder.lower.chain.values import Values

DIVISIONS = ("div", "div_ftz")

ONE = ((), (1,))
"""Last axes of what has one number for a row."""

FAR, SCALE = 2.0**96, 2.0**64
"""Within FAR, and its inverse, divisors stay as they are; others are multiplied by SCALE, or its inverse."""


def divisions_by_numbers(graph: Graph) -> list[str]:
    """Return the nodes that divide by a known number."""
    divisors = {n.name: graph.unconverted(n.inputs[1]) for n in graph.nodes if n.operator == "div"}
    return [name for name, value in divisors.items() if graph.producer(value).operator == "constant"]


def by_number(multiply: Callable[[Expr, Expr], Expr], x: Expr, divisor: Expr) -> Expr:
    """Return ``x`` times the rounded reciprocal of a known divisor: eager PyTorch divides so on GPUs.

    multiply: Makes a product that is rounded by itself.
    """
    number = scalars.known(divisor)
    if number is None:
        return scalars.divide(x, divisor)
    with np.errstate(divide="ignore", over="ignore"):
        reciprocal = 1 / np.dtype(str(divisor.ty.dtype)).type(number)
    return multiply(x, scalars.like(divisor, float(reciprocal)))


def divisions_of_rows(graph: Graph) -> list[str]:
    """Return the nodes that divide float32 elements of a row by one number that is computed or read."""
    found = []
    for node in graph.nodes:
        if node.operator not in DIVISIONS or node.tile.ttype.name != "float32" or node.tile.shape[-1:] in ONE:
            continue
        divisor = graph.producer(node.inputs[1])
        while divisor.operator == "broadcast":
            divisor = graph.producer(divisor.inputs[0])
        if divisor.operator != "constant" and divisor.tile.shape[-1:] in ONE:
            found.append(node.name)
    return found


def divisions_of_shares(graph: Graph) -> list[str]:
    """Return the nodes that divide float32 by 1 and an exponential (sigmoid, SiLU): by numbers from 1 on."""
    found = []
    for node in graph.nodes:
        if node.operator in DIVISIONS and node.tile.ttype.name == "float32":
            divisor = graph.producer(node.inputs[1])
            added = [graph.producer(value) for value in divisor.inputs] if divisor.operator == "add" else []
            one = any(n.operator == "constant" and node_attributes(n)["value"] == 1 for n in added)
            if one and any(n.operator in ("exp", "exp_ftz") for n in added):
                found.append(node.name)
    return found


def quotient(values: Values, dialect: Dialect, x: Expr, divisor: Expr) -> Expr:
    """Return ``x / divisor``; plainly where nothing can be kept for other elements."""
    if dialect.by_inverse is None or values.keep is None or values.guards:
        return scalars.divide(x, divisor)
    key = ("inverse", tvm_ffi.structural_hash(divisor))
    if key not in values.memory:
        values.memory[key] = _inverse(values.keep, values.keep(divisor))
    scale, scaled, inverse = values.memory[key]
    return dialect.by_inverse(dialect.functions["mul"](x, scale), scaled, inverse)


def _inverse(keep: Callable[[Expr], Expr], divisor: Expr) -> tuple[Expr, Expr, Expr]:
    """Return the scale of a divisor, what it is scaled, and the reciprocal of that."""
    size = scalars.absolute(divisor)
    scale = scalars.chosen(scalars.less(size, T.float32(1 / FAR)), T.float32(SCALE), T.float32(1))
    scale = keep(scalars.chosen(scalars.less(T.float32(FAR), size), T.float32(1 / SCALE), scale))
    scaled = keep(scalars.multiply(divisor, scale))
    return scale, scaled, keep(scalars.divide(T.float32(1), scaled))
