"""Captured programs on special values, in 16 bits and at extents 0 and 1, as torch computes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tvm_ffi
from tvm import ir, tirx

import ladder
from ladder.ir.build import GraphBuilder
from ladder.lower.chain import emit_chain
from ladder.simulate import simulate_launch
from targets import get_device

NAN, INF = math.nan, math.inf
VALUES = (
    *(NAN, INF, -INF, 0.0, -0.0, 2.0**-149, 1e-40, 2.0**-126, 3.4e38, -3.4e38, 1.0, -1.0, 0.5, -0.5),
    *(1.5, 2.5, -2.5, 0.1, 12.5, -88.0, 88.9, -100.0, 2.0**24 + 2, 300.7),
)

Function = Callable[[Any, Any], Any]

ELEMENTWISE: Mapping[str, Function] = {
    "cancelled": lambda x, y: (x + y) - y,
    "rounded by a large number": lambda x, y: (x + 12582912.0) - 12582912.0,
    "compensation": lambda x, y: y - ((x + y) - x),
    "product cancelled": lambda x, y: x * y - y * x,
    "difference of squares": lambda x, y: x * x - y * y,
    "nothing": lambda x, y: (x - x, x * 0, x * -0.0, x + 0.0, x + -0.0, 0.0 / x, x / 0.0),
    "itself": lambda x, y: (x == x, x != x, x < x, ~(x < y), x >= y),
    "scalars compared": lambda x, y: (x == 0.1, x <= 3.4e38, x < 0.1, x != 0),
    "tests": lambda x, y: (torch.isnan(x), torch.isinf(y), torch.isfinite(x), torch.nan_to_num(y)),
    "bounds": lambda x, y: (
        x.clamp(-1, 2),
        torch.clamp(x, y, y + 1),
        torch.maximum(x, y),
        torch.minimum(x, y),
    ),
    "truth": lambda x, y: (x.bool(), torch.logical_not(y), torch.logical_and(x, y), x.bool().float()),
    "choice": lambda x, y: (torch.where(x > y, x, y), x.masked_fill(y > 0, -INF), torch.where(x > 0, x, 0.1)),
    "whole": lambda x, y: (torch.floor(x), torch.round(y), torch.floor_divide(x, y)),
    "powers": lambda x, y: (x**0, x**2, x**3),
    "there and back": lambda x, y: (
        x.half().float(),
        y.bfloat16().float() + x,
        torch.relu(x).bfloat16().float() * 3.0,
    ),
}
"""Programs that give torch's bits but for signs of NaN, and of zeros of extremes."""

CLOSE: Mapping[str, Function] = {
    "softmax": lambda x, y: (torch.softmax(x + y, -1), torch.softmax(y[:, 7:9], -1)),
    "softmax of nothing": lambda x, y: torch.softmax(x * 0 - INF, -1),
    "norms": lambda x, y: (F.layer_norm(y[:, 10:18], (8,)), F.rms_norm(y[:, 10:18], (8,))),
    "extremes": lambda x, y: (y.amax(-1), x.amax(0), y.amin(-1), x[3:].amin(0), y.max()),
    "sums": lambda x, y: (x[1:9].sum(-1), x[3:8].mean(0), y[:, 10:18].var(-1)),
    "pooling": lambda x, y: (
        F.max_pool2d(x[None, None], 3, 2, 1), F.max_pool2d((y * 0 - INF)[None, None], 3, 2, 1),
        F.avg_pool2d(x[None, None, 10:], 2),
    ),
    "functions": lambda x, y: (F.gelu(y[:, 10:]), F.silu(x), torch.tanh(x), torch.exp(y), torch.log(x)),
}  # fmt: skip
"""Programs whose sums and functions are rounded otherwise."""


def twice(compiled: Any, *arguments: Any) -> Any:
    """Call a compiled function until its plan runs."""
    with torch.no_grad():
        compiled(*arguments)
        return compiled(*arguments)


def each(value: Any) -> Sequence[torch.Tensor]:
    return value if isinstance(value, tuple) else (value,)


def pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.tensor(VALUES).to(dtype)
    count = len(values)
    return values.repeat_interleave(count).reshape(count, count), values.repeat(count).reshape(count, count)


def assert_equal(got: Any, want: Any) -> None:
    for a, b in zip(each(got), each(want), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elements_are_those_of_torch(name: str) -> None:
    x, y = pairs(torch.float32)
    compiled = ladder.compile(ELEMENTWISE[name])
    assert_equal(twice(compiled, x, y), ELEMENTWISE[name](x, y))
    assert not compiled.refused


def beyond(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Numbers that no float32 holds are infinite beside one."""
    return x * 2 + 1e300, x > 1e300, x - 1e300, -1e39 / x, torch.maximum(x * -1e39, x), x / 1e300


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_numbers_beyond_the_largest(dtype: torch.dtype) -> None:
    x = torch.tensor([-torch.inf, -2.0, -0.0, 0.0, 1.0, 3e38, torch.inf, torch.nan]).to(dtype)
    compiled = ladder.compile(beyond)
    assert_equal(twice(compiled, x), beyond(x))
    assert not compiled.refused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_precise_rounds_between_operators(dtype: torch.dtype) -> None:
    """All programs at once, but for one with a number that float16 lacks."""

    def program(x: Any, y: Any) -> Any:
        steps = x + 1 + 1 + 1, x / y * y, F.relu(x * y) - y, torch.sqrt(x * x - y * y)
        rest = (f(x, y) for name, f in ELEMENTWISE.items() if "large number" not in name)
        return (*steps, *(part for found in rest for part in each(found)))

    x, y = pairs(dtype)
    assert_equal(twice(ladder.compile(program, precise=True), x, y), program(x, y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_precise_rounds_numbers_where_eager_does(dtype: torch.dtype) -> None:
    """Its kernels for CPUs round those of sums and exponents to 16 bits, and of products not."""

    def program(x: Any, y: Any) -> Any:
        sums = x + 1.1, 0.3 - x, x - 1e-3, y + torch.tensor(0.7), torch.rsub(x, -2.7)
        scaled = torch.add(x, y, alpha=1.1), torch.sub(x, y, alpha=-0.3), torch.add(x, 1.1, alpha=3)
        return *sums, *scaled, y.abs() ** 1.1, x * 1.1, x / 0.3, x == 1.1, (x + 300.7) - x

    x, y = (torch.randn(64, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    assert_equal(twice(ladder.compile(program, precise=True), x, y), program(x, y))


MOST, LEAST = 3e38, 1e-30
SPREAD = torch.tensor(
    [[MOST, -MOST, MOST, 1e38], [MOST] * 4, [2e19, -2e19, 1, 1], [LEAST, 2 * LEAST, 0, 1e-28]]
)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
def test_moments_of_the_largest_and_smallest_numbers(name: str, dtype: torch.dtype) -> None:
    """Torch sums squares of float32 and bfloat16 in float64 on CPUs; too few elements divide by 0; beside an
    infinity even the mean is NaN."""
    function = getattr(torch, name)

    def program(x: Any) -> Any:
        rows = (function(x, -1), function(x, 0, correction=0, keepdim=True), function(x, 1, correction=7))
        few = function(x[:, :1], 1), function(x[:, :0], 1)
        return tuple(part for found in (*rows, *few) for part in each(found))

    compiled = ladder.compile(program)
    for x in (SPREAD.to(dtype), torch.where(SPREAD == 1, math.inf, SPREAD).to(dtype)):
        for a, b in zip(twice(compiled, x), program(x), strict=True):
            torch.testing.assert_close(a, b, rtol=2 * torch.finfo(dtype).eps, atol=0, equal_nan=True)
    assert not compiled.refused


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8, torch.int8])
def test_bounds_that_are_tensors_of_rank_0_are_converted_first(dtype: torch.dtype) -> None:
    """1e-8 is 0 in float16, 300 is 44 in uint8: so rows of zeros have a cosine of NaN."""
    x, low, high = (torch.arange(40) % 7).to(dtype), torch.tensor(1e-8), torch.tensor(300)

    def program(x: Any) -> Any:
        bounds = low if dtype.is_floating_point else high
        return x / torch.maximum(x, bounds), x / torch.clamp(x * 0, min=bounds), torch.minimum(x, high)

    assert_equal(twice(ladder.compile(program), x), program(x))
    if dtype.is_floating_point:
        zeros = torch.zeros(4, 33, dtype=dtype)
        norms = ladder.compile(lambda x: (F.cosine_similarity(x, x, -1), F.normalize(x, dim=-1)))
        assert_equal(twice(norms, zeros), (F.cosine_similarity(zeros, zeros, -1), F.normalize(zeros, dim=-1)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_integers_beside_16_bits_are_rounded_to_them_first(dtype: torch.dtype) -> None:
    """2049 is 2048 in float16, 70000 infinite: infinity through it is NaN; a number of rank 0 stays whole.

    As in eager on GPUs; its kernels for CPUs round that too, as programs that ask for `precise` do.
    """
    x = torch.tensor([1.0, 2.0, INF, 1.0], dtype=dtype)
    codes = torch.tensor([2049, 70000, 2**31 - 1, 3], dtype=torch.int32)

    def program(x: Any, codes: Any) -> Any:
        return x + codes, x / codes, x - codes.long(), x * codes.clamp(max=2000).short(), codes[0] + x

    expected = (*program(x, codes)[:-1], (codes[0].double() + x.double()).to(dtype))
    for left, right in zip(twice(ladder.compile(program), x, codes), expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
    (rounded,) = ladder.compile(lambda x, codes: (codes[0] + x,), precise=True)(x, codes)
    torch.testing.assert_close(rounded, program(x, codes)[-1], rtol=0, atol=0, equal_nan=True)


def test_what_torch_negates_where_it_is_read() -> None:
    """The imaginary part of a conjugate, as an argument and within a program."""

    def program(x: Any, y: Any) -> Any:
        return torch.view_as_complex(torch.stack([x, x], -1)).conj().imag * 2, y + x

    x = torch.randn(5)
    y = torch.complex(x, x).conj().imag
    assert y.is_neg()
    assert_equal(twice(ladder.compile(program), x, y), program(x, y))


def test_sixteen_bits_stay_wide_unless_precise() -> None:
    x = torch.full((64,), 256.0, dtype=torch.bfloat16)

    def program(x: Any) -> Any:
        return x + 1 + 1 + 1

    assert twice(ladder.compile(program), x)[0] == 260
    assert twice(ladder.compile(program, precise=True), x)[0] == program(x)[0] == 256


def _steps(x: Any, y: Any) -> tuple[Any, ...]:
    """Steps of products of 16 bits, also of views of them, and of float32 that is cast to 16 bits."""
    product, cast, square = x * y, (x.float() * 1.0009).to(x.dtype), x * x
    whole = product.floor(), (x * y).ceil(), (x * 1.5).round(), cast.trunc(), product.T.floor(), cast.frac()
    tests = product > y, cast == x, cast.float() == x, square.isinf(), square.isfinite(), (x * 1e-6).sign()
    codes = product.to(torch.int32), cast.clamp(-99, 99).to(torch.int8), cast.long(), (x * 1e-6).bool()
    other = torch.bfloat16 if x.dtype == torch.float16 else torch.float16
    return *whole, *tests, *codes, torch.logical_and(x * 1e-6, y), product.to(other).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_see_what_16_bits_hold(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(16, 16, generator=draw) * 3 for _ in range(2))
    x[0] = torch.tensor([0.999, -1.0004, 2.9999, 257.0, 300.0, -0.0, 0.0, 1.5, -1.5, *range(7)])
    x, y = x.to(dtype), y.to(dtype)
    compiled = ladder.compile(_steps)
    assert_equal(twice(compiled, x, y), _steps(x, y))
    assert not compiled.refused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_of_products_and_vectors_see_one_rounding(dtype: torch.dtype) -> None:
    """Sums that float32 holds: in any order, and beside a vector, they are rounded to 16 bits once."""

    def program(x: Any, weight: Any, bias: Any) -> tuple[Any, ...]:
        found = F.linear(x, weight, bias)
        steps = found.floor(), F.linear(x * 2, weight, bias) > 7.3, (x * 0.5 @ weight.T).round()
        return *steps, found, x @ weight.T  # the same product, rounded by itself

    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 64, generator=draw).mul(8).round().div(8).to(dtype) for size in (24, 48))
    bias = torch.randn(48, generator=draw).to(dtype)
    assert_equal(twice(ladder.compile(program), x, weight, bias), program(x, weight, bias))


def _widened(x: Any) -> tuple[Any, ...]:
    """What a program casts to 16 bits, moved, chosen or negated, and read as wider floats."""
    half, rows = x.bfloat16(), x.half().view(4, 4)
    mixed = x - half, half * x, x / half, torch.where(x > 0, half, x), torch.cat([half, x]), x.double() + half
    bounds = (
        torch.maximum(half, -x),
        torch.clamp(x, half, x + 1),
        x.clone().copy_(half),
        torch.stack([half, x]),
    )
    moved = (
        rows.float(),
        rows.T - x.view(4, 4),
        half[3:9].float(),
        half.flip(0).float(),
        F.pad(half, (1, 2)).float(),
    )
    chosen = (
        half.neg().float(),
        half.abs().float(),
        half.relu().float(),
        torch.where(x > 0, half, -half).float(),
    )
    whole = (
        half.sum(dtype=torch.float32),
        half.max().float(),
        rows.amax(1).double(),
        half.softmax(0, torch.float32),
    )
    return *mixed, *bounds, *moved, *chosen, *whole


def test_casts_to_16_bits_are_rounded_where_what_they_give_is_widened() -> None:
    x = torch.randn(16, generator=torch.Generator().manual_seed(0)) * 9
    x[:6] = torch.tensor([0.999, -1.0004, 2.99999, 257.0, -0.0, 0.1])
    compiled = ladder.compile(_widened)
    for got, want in zip(twice(compiled, x), _widened(x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9, equal_nan=True)
    assert not compiled.refused


def test_precise_keeps_operators_apart() -> None:
    """A batch norm is not folded into a convolution, nor GELU found in what is spelt out."""
    weight, scale = torch.randn(8, 4, 3, 3), torch.rand(8) + 0.5

    def program(x: Any) -> Any:
        x = F.batch_norm(F.conv2d(x, weight), scale, scale, scale, scale)
        return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))

    x = torch.randn(1, 4, 6, 6)
    compiled = ladder.compile(program, precise=True)
    twice(compiled, x)
    assert "erf" in compiled.plan()
    assert "gelu" not in compiled.plan()


@pytest.mark.parametrize("name", CLOSE)
def test_sums_and_functions(name: str) -> None:
    x, y = pairs(torch.float32)
    want = CLOSE[name](x, y)
    for a, b in zip(each(twice(ladder.compile(CLOSE[name]), x, y)), each(want), strict=True):
        torch.testing.assert_close(a, b, rtol=4e-6, atol=3e-7, equal_nan=True)


def test_integers() -> None:
    """Of 8 bits they wrap around; the least of a type is a value as any other; 2**60 + 1 is no float."""
    low = torch.tensor([[-(2**31), 5, 7], [2**31 - 1, 0, 1]], dtype=torch.int32)
    small = torch.tensor([[100, -100, 127], [-128, 3, 1]], dtype=torch.int8)

    def program(low: Any, small: Any) -> Any:
        wide = low.long() + (2**60 + 1)
        sums = small + small, (small + small).float() * 0.5, (small * 3) < 0
        return low.amin(-1), low.amax(-1), small.amin(0), wide, *sums, low.to(torch.uint8), small.bool()

    assert_equal(twice(ladder.compile(program), low, small), program(low, small))


LARGE = 2**53 + 1
"""A whole number that is no float64."""
WITH_CONSTANTS: dict[str, Callable[[Any], Any]] = {
    "filled": lambda x: torch.full((7,), LARGE) + x,
    "chosen": lambda x: torch.where(x > 0, LARGE, x),
    "masked": lambda x: x.masked_fill(x > 0, -LARGE),
    "padded": lambda x: F.pad(x, (1, 1), value=LARGE) * 3,
    "largest": lambda x: torch.full((7,), 2**63 - 1) * x,
    "least": lambda x: torch.full((7,), -(2**63)) + x,
    "compared": lambda x: x * (2**40 + 1) > LARGE,
    "less zero": lambda x: (torch.arange(7) - 0) * x,
    "from zero": lambda x: (0 - torch.arange(7)) + x,
    "one counter": lambda x: (torch.arange(1) - 0) * x,
    "zeros": lambda x: torch.zeros(7, dtype=torch.int64) - x,
    "counted in large steps": lambda x: (torch.arange(7) * LARGE >= LARGE) & (x > 0),
}


@pytest.mark.parametrize("name", WITH_CONSTANTS)
def test_integers_with_constants(name: str) -> None:
    """None goes through a float; those that are 0 have bits, too."""
    x = torch.tensor([[0, 1, -1, 2**53, -(2**53), LARGE, 5]])
    assert_equal(twice(ladder.compile(WITH_CONSTANTS[name]), x), WITH_CONSTANTS[name](x))


@pytest.mark.parametrize("name", ["int32", "int64"])
def test_integers_wrap_around(name: str) -> None:
    """Also where a comparison with an operand would say that they cannot."""
    dtype = getattr(torch, name)
    most, least = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    edges = [
        most,
        least,
        most - 1,
        least + 1,
        0,
        1,
        -1,
        2,
        most // 2 + 1,
        least // 2 - 1,
        1 << 30,
        -(1 << 30),
    ]
    x = torch.tensor(edges, dtype=dtype).repeat_interleave(len(edges)).reshape(12, 12)
    y = torch.tensor(edges, dtype=dtype).repeat(len(edges)).reshape(12, 12)

    def program(x: Any, y: Any) -> Any:
        compared = x - y < x, x < x + 1, x * y < x, x.abs() < 0, (x + y) - y == x, -x == x, x * x < 0
        return x + y, x - y, x * y, -x, x.abs(), x * 2 - 1, (x + y).long(), *compared

    assert_equal(twice(ladder.compile(program), x, y), program(x, y))
    whole = ladder.compile(lambda x, y: (x - y < x, x + y < x))
    assert_equal(twice(whole, x, y), (x - y < x, x + y < x))


@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
def test_integers_wrap_around_on_gpus(target: str) -> None:
    """What is emitted tells no compiler that integers do not overflow."""
    g = GraphBuilder("g")
    x, y = (g.input(name, "int32", (64,)) for name in "xy")
    values = [g.add(name, x, y) for name in ("add", "sub", "mul")]
    graph = g.finish(*values, g.add("less", values[1], x), g.add("neg", x), g.add("abs", y))
    function = emit_chain(graph, get_device(target), "chain")
    low, high = -(2**31), 2**31 - 1
    operands = [np.array(row * 16, np.int32) for row in ([low, high, 5, -7], [1, high, low, high])]
    results = [np.zeros(64, np.dtype(bool if at == 3 else np.int32)) for at in range(6)]
    simulate_launch(function, [*operands, *results], target=target, outputs=tuple(range(2, 8)))
    with np.errstate(over="ignore"):
        a, b = operands
        wanted = [a + b, a - b, a * b, a - b < a, -a, np.abs(b)]
    for found, want in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(found, want)
    tvm_ffi.structural_walk(function.body, (ir.Expr, require_no_signed_sum))


def require_no_signed_sum(part: Any) -> None:
    """Require that no 32-bit signed sum, difference or product is of data."""
    if not isinstance(part, tirx.Add | tirx.Sub | tirx.Mul) or str(part.ty.dtype) != "int32":
        return
    inside: list[Any] = []
    tvm_ffi.structural_walk(part, (ir.Expr, inside.append))
    assert not any(type(each).__name__ == "TensorLoad" for each in inside), part


CASTS = tuple(
    getattr(torch, name)
    for name in ("float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")
)


def test_casts() -> None:
    """From each type to each: to integers what they hold, to booleans NaN as well."""
    finite = torch.tensor([0.0, -0.0, 1.0, 1.9, 2.5, 100.0, 127.0, 0.5, 3.0, 255.5, 77.0, 1e-40])
    every = torch.cat([finite, torch.tensor([NAN, INF, -INF, -1.5])])

    def program(*sources: Any) -> Any:
        whole = (x.to(t) for x in sources[:8] for t in CASTS)
        return (*whole, *(x.to(t) for x in sources[8:] for t in (*CASTS[:3], torch.bool)))

    sources = (*(finite.to(t) for t in CASTS), *(every.to(t) for t in CASTS[:3]))
    assert_equal(twice(ladder.compile(program), *sources), program(*sources))


def test_casts_through_64_bits() -> None:
    """Types whose codes nobody lists, between others and behind bounds."""

    def program(x: Any) -> tuple[Any, ...]:
        wide = x.half().clamp(-1, 1).double().clamp(-2, 2).float(), x.clamp(-3, 3).long().clamp(-9, 9).float()
        return *wide, (x > 0).long().float(), x.to(torch.int8).double().to(torch.int8), x.bfloat16().double()

    x = torch.linspace(-9, 9, 12)
    assert_equal(twice(ladder.compile(program), x), program(x))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (1, 7), (7, 1), (3, 0, 2)])
def test_extents_zero_and_one(shape: tuple[int, ...]) -> None:
    """Sums of nothing are 0 and their means NaN."""

    def program(x: Any) -> Any:
        return torch.relu(x) + 1, x.sum(-1), x.mean(0), torch.softmax(x, -1), x.transpose(0, -1) * 2

    x = torch.randn(shape)
    for a, b in zip(twice(ladder.compile(program), x), program(x), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reductions_alone(dtype: torch.dtype) -> None:
    """Each is a kernel of its own, whose result is rounded right after it."""
    x = torch.arange(3.0 * 5 * 7).reshape(3, 5, 7).remainder(11).to(dtype)
    for reduce in (torch.sum, torch.amax, torch.mean):
        compiled = ladder.compile(
            lambda x, reduce=reduce: [
                reduce(x, axes, keepdim=keep) for axes in (0, 1, -1, (0, 2)) for keep in (False, True)
            ]
        )
        torch.testing.assert_close(compiled(x), compiled.function(x))


@pytest.mark.parametrize("biased", [False, True])
def test_zeros_of_batch_norms(biased: bool) -> None:
    """Torch multiplies and adds once per channel, also where there is no bias: ``-0`` becomes ``0``."""
    zeros, ones, x = torch.zeros(2), torch.ones(2), torch.tensor([[-0.0, 0.0], [1.0, -1.0]])

    def program(x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, zeros, ones, ones, -zeros if biased else None)

    found, wanted = ladder.compile(program)(x), program(x)
    torch.testing.assert_close(found, wanted)
    assert torch.equal(torch.signbit(found), torch.signbit(wanted))
