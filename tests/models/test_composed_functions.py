"""Functions of one number that are made of several operators: as near to float64 as torch, in our kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import ladder

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "log10": torch.log10,
    "elu": lambda x: F.elu(x, 0.7),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 1.3),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "mish": F.mish,
    "asin": torch.asin,
    "acos": torch.acos,
    "atan": torch.atan,
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "isnan": torch.isnan,
    "trunc": torch.trunc,
    "frac": torch.frac,
}

UNITS = {torch.float32: 6, torch.float16: 1, torch.bfloat16: 1}
"""Units in the last place, of the type, by which results may differ from float64's, beside torch's own."""


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Return values of all magnitudes, whole ones, and such that are no numbers."""
    near = torch.linspace(-3, 3, 3001, dtype=torch.float64)
    far = torch.logspace(-6, 2.2, 400, dtype=torch.float64)
    special = torch.tensor([0.0, -0.0, 1, -1, 2, -2, torch.nan, torch.inf, -torch.inf, 20, 88, -88])
    return torch.cat((near, far, -far, special)).to(dtype)


@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, dtype: torch.dtype) -> None:
    function, x = FUNCTIONS[name], numbers(dtype)
    fast = ladder.compile(lambda x: function(x))
    fast(x)  # records
    found, expected, exact = fast(x), function(x), function(x.double())
    assert all(step.part.kind in ("chain", "view") for step in fast.models[0].plan.steps)
    assert found.dtype == expected.dtype
    if not found.is_floating_point():
        assert torch.equal(found, expected)
        return
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    finite = exact.isfinite() & expected.isfinite()
    assert torch.equal(found.signbit()[finite & (exact == 0)], expected.signbit()[finite & (exact == 0)])
    unit = torch.finfo(dtype).eps * exact.abs().clamp(min=torch.finfo(dtype).tiny)
    allowed = UNITS[dtype] * unit + (expected.double() - exact).abs()
    worst = ((found.double() - exact).abs() - allowed)[finite]
    assert worst.max() <= 0, f"at {x[finite][worst.argmax()].item()}"


@pytest.mark.parametrize("name", ["expm1", "log1p", "elu", "mish"])
def test_functions_of_float64_are_calls(name: str) -> None:
    """Polynomials to the precision of float32 are none for float64."""
    function, x = FUNCTIONS[name], numbers(torch.float64)
    fast = ladder.compile(lambda x: function(x))
    fast(x)
    assert torch.equal(fast(x).nan_to_num(7), function(x).nan_to_num(7))
    assert f"aten.{name}.default has no kernel of ours" in fast.plan()


EXTREMES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "largest": torch.max,
    "least": torch.min,
    "largest along": lambda x: x.max(-1).values,
    "least along, kept": lambda x: x.min(1, keepdim=True)[0],
    "any": lambda x: (x > 0).any(),
    "any along": lambda x: (x > 0).any(-1, keepdim=True),
    "all along two": lambda x: (x > 0).all((0, 2)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(name: str, dtype: torch.dtype) -> None:
    """Of rows with and without numbers, where nobody asks where they are."""
    x = (7 * torch.randn(4, 5, 40)).to(dtype)
    if dtype.is_floating_point:
        x[0, 0, 0], x[1], x[2, 1] = torch.nan, -torch.inf, torch.inf
    program = EXTREMES[name]
    fast = ladder.compile(lambda x: program(x))
    fast(x)  # records
    torch.testing.assert_close(fast(x), program(x), rtol=0, atol=0, equal_nan=True)
    assert "no kernel of ours" not in fast.plan()


@pytest.mark.parametrize("order", [1, 2, torch.inf])
@pytest.mark.parametrize("axes", [None, 1, (0, 2)])
def test_norms(order: float, axes: int | tuple[int, ...] | None) -> None:
    """Of magnitudes that may be no numbers."""
    x = torch.randn(3, 5, 40)
    x[0, 0, 0], x[1, 1, 1] = torch.nan, -torch.inf
    program = lambda x: torch.linalg.vector_norm(x, order, axes, keepdim=True)  # noqa: E731
    fast = ladder.compile(program)
    fast(x)
    torch.testing.assert_close(fast(x), program(x), equal_nan=True)
    assert "linalg_vector_norm" not in fast.plan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norms_of_one_element_are_its_magnitude(dtype: torch.dtype) -> None:
    """Squares of such elements are infinite, or 0."""
    x = torch.tensor([[1e30], [-1e-30], [-0.0], [math.nan], [-math.inf], [1e200]], dtype=dtype)
    program = lambda x: (torch.linalg.vector_norm(x, dim=-1), x.norm(dim=1, keepdim=True), x[1].norm())  # noqa: E731
    fast = ladder.compile(program)
    fast(x)
    torch.testing.assert_close(fast(x), program(x), rtol=0, atol=0, equal_nan=True)
    assert "linalg_vector_norm" not in fast.plan()


PRODUCTS = {
    "floats": torch.linspace(-2, 2, 60).view(5, 4, 3),
    "halves": torch.linspace(-2, 2, 60).view(5, 4, 3).half(),
    "whole": torch.arange(-30, 30).view(5, 4, 3),
    "bytes": torch.arange(60, dtype=torch.uint8).view(5, 4, 3),
    "no numbers": torch.tensor([[math.nan, 0.0], [math.inf, 0.0], [-0.0, 3.0], [-0.0, -0.0]]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_along_a_short_axis(name: str) -> None:
    x = PRODUCTS[name]
    fast = ladder.compile(lambda x: (x.prod(-1), x.prod(0, keepdim=True)))
    fast(x)  # records
    wide = x.double() if x.is_floating_point() else x
    for found, exact in zip(fast(x), (wide.prod(-1), wide.prod(0, keepdim=True)), strict=True):
        expected = exact.to(x.dtype) if x.is_floating_point() else exact
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, equal_nan=True)
        if found.is_floating_point():
            assert torch.equal(found.signbit() | found.isnan(), expected.signbit() | expected.isnan())
    assert "aten.prod" not in fast.plan()
