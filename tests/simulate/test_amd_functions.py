"""Every operator of floats as AMD machine code, on special values and large angles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ladder.ir import GraphBuilder, evaluate
from ladder.lower.chain import emit_chain
from ladder.simulate import simulate_launch
from targets import get_device

VALUES = (
    *(np.nan, np.inf, -np.inf, 0.0, -0.0, 2.0**-149, 1e-40, 2.0**-126, 3.4e38, -3.4e38, 1.0, -1.0, 0.5, -0.5),
    *(1.5, 2.5, -2.5, 3.0, -7.0, 0.1, 12.5, -80.0, 88.9, -88.0, 2.0**24 + 2, 300.7, 1e-4, 0.999, 1.001),
)
HARDEST = 16367173 * 2.0**72
"""The float32 that is nearest to a whole number of quarter turns."""

ANGLES = (
    *(np.nan, np.inf, 0.0, 1e-40, 0.7853, 1.5707964, -3.1415927, 4.0, -1000.0, 31415.926, 2e5, -1048575.9),
    *(-np.inf, 2.0**20, -4.1e6, 1.7e10, -1e30, HARDEST, -HARDEST, 3.4028235e38),
)

UNARY = (
    *("neg", "exp", "sigmoid", "tanh", "relu", "silu", "gelu", "square", "sqrt", "rsqrt", "log", "abs"),
    *("floor", "round", "erf", "log1p"),
)
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "pow", "less", "less_equal", "equal")
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
BOUNDS = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
LEAST = 1e-37
"""Below it results may be 0."""

APPROXIMATE = {"gelu": 1e-6, "erf": 3e-7}
"""Functions that are computed to an absolute error."""


def check(target: str, ttype: str, operators: Sequence[str], *operands: np.ndarray) -> None:
    """Compare one kernel of some operators with the interpreter, element by element."""
    device, g = get_device(target), GraphBuilder("chain")
    inputs = [g.input(f"x{at}", ttype, x.shape) for at, x in enumerate(operands)]
    outputs = [g.add(operator, *inputs) for operator in operators]
    graph = g.finish(*outputs)
    kinds = [bool if graph.tile(value).ttype.name == "bool" else TYPES[ttype] for value in outputs]
    results = [np.full(operands[0].shape, 77).astype(kind) for kind in kinds]
    places = tuple(range(len(operands), len(operands) + len(results)))
    found = simulate_launch(
        emit_chain(graph, device, "chain"), [*operands, *results], target=device, outputs=places, stage="code"
    )  # fmt: skip
    assert not found.findings, found.report()
    exact: Any = evaluate(graph, list(operands))
    for operator, got, want in zip(operators, results, exact, strict=True):
        want = want.astype(got.dtype)
        np.testing.assert_allclose(
            got.astype(np.float64),
            want.astype(np.float64),
            BOUNDS[ttype],
            APPROXIMATE.get(operator, LEAST),
            err_msg=operator,
        )


@pytest.mark.costly
@pytest.mark.parametrize("ttype", TYPES)
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_operators_on_special_values(arch: str, ttype: str) -> None:
    target, dtype = f"rocm/{arch}", TYPES[ttype]
    with np.errstate(all="ignore"):
        values = np.array(VALUES).astype(dtype)
        count = len(values)
        check(target, ttype, UNARY, values)
        check(target, ttype, BINARY, np.repeat(values, count), np.tile(values, count))
        check(target, ttype, ("sin", "cos"), np.array(ANGLES).astype(dtype))


def test_angles_of_every_exponent() -> None:
    mantissas = np.random.default_rng(3).integers(0, 1 << 23, (255, 128), dtype=np.uint32)
    mantissas[:, :2] = 0, (1 << 23) - 1
    x = (np.arange(255, dtype=np.uint32)[:, None] << 23 | mantissas).view(np.float32)
    x[0, 2], x[:, 64:] = HARDEST, -x[:, :64]
    g = GraphBuilder("chain")
    value = g.input("x", "float32", x.shape)
    graph, device = g.finish(g.add("sin", value), g.add("cos", value)), get_device("rocm/gfx942")
    results = [np.full_like(x, 77) for _ in graph.outputs]
    found = simulate_launch(emit_chain(graph, device, "chain"), [x, *results], target=device, outputs=(1, 2))
    assert not found.findings, found.report()
    for function, got in zip((math.sin, math.cos), results, strict=True):
        want = np.vectorize(function)(x.astype(np.float64))
        np.testing.assert_allclose(got, want, rtol=2.0**-22, atol=2.0**-149, err_msg=function.__name__)


@pytest.mark.parametrize("base", [1.0001, -1.0001, 0.37, 1e-39, 7e4])
def test_powers_are_as_near_as_products(base: float) -> None:
    """The exponent is taken of a logarithm in two parts: results near the largest float32 have all digits."""
    exponents = np.arange(-40, 41, dtype=np.float32) * (500 if abs(base) < 1.1 and abs(base) > 1 else 1)
    check("rocm/gfx942", "float32", ("pow", "add"), np.full_like(exponents, base), exponents)
