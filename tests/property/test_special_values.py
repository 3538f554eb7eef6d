"""Every row of the operator table on NaN, infinities, zeros of two signs, subnormals, limits, as torch.

On CPUs compiled and run, on GPUs simulated. Rows that only add, multiply, compare or round give torch's bits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from chain_targets import TARGETS, TORCH, run_chain

from ladder.ir import Graph, GraphBuilder
from ladder.ir.ops import OPERATORS
from ladder.partition.rows import REDUCTIONS

NAN, INF = math.nan, math.inf
TINY, MOST = 2.0**-126, 3.4028234663852886e38
SPECIAL = (
    *(NAN, INF, -INF, 0.0, -0.0, 2.0**-149, -(2.0**-149), 1e-40, -3e-39, TINY, -TINY, MOST, -MOST),
    *(1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.5, 0.049, -0.3, 12.5, -88.0, 88.9, -100.0, 104.0),
    *(2.0**24 + 2, 12582912.0, -1e30, 65504.0),
)
"""32 numbers; a 16-bit type rounds them."""

EXACT: Mapping[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "abs": torch.abs,
    "square": torch.square,
    "sqrt": lambda x: x.double().sqrt().to(x.dtype),
    "floor": torch.floor,
    "round": torch.round,
    "less": torch.lt,
    "less_equal": torch.le,
    "equal": torch.eq,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "relu": torch.relu,
    "fmod": lambda x, y: torch.from_numpy(np.fmod(x.double().numpy(), y.double().numpy())).to(x.dtype),
}
"""Rows whose results are torch's, bit for bit; torch's root of a vector is not always the nearest number, and
what its vectors leave of huge quotients is NaN."""

ZEROS = ("maximum", "minimum", "relu")
"""Rows whose zeros have either sign, as torch's on vectors and on single elements."""

TRUTHS: Mapping[str, Callable[..., torch.Tensor]] = {
    "both": torch.logical_and,
    "either": torch.logical_or,
    "negation": torch.logical_not,
}

AS_BITS = {"bits": torch.int32, "of_bits": torch.float32}
"""Rows that take bits for another type -> which."""

BITS: Mapping[str, Callable[..., torch.Tensor]] = {
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
}

CLOSE: Mapping[str, Callable[..., torch.Tensor]] = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5))),
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "erf": torch.erf,
    "log": torch.log,
    "log10": torch.log10,
    "log2": torch.log2,
    "log1p": torch.log1p,
    "logaddexp": torch.logaddexp,
    "sin": torch.sin,
    "cos": torch.cos,
    "pow": torch.pow,
    "exp_ftz": torch.exp,
    "div_ftz": torch.div,
    "fused": lambda x, y: x.double() * y + x,
}
"""Rows that a polynomial or an instruction approximates; torch's own gelu of infinity is NaN in vectors."""

ROUNDING = {"float32": 4e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Relative error: of approximations in float32, of one rounding otherwise."""

LEAST = {"float32": 2.0**-147, "float16": 2.0**-24, "bfloat16": 2.0**-133}
"""Absolute error: a few of the least subnormals."""

FLUSHED = {"exp_ftz": 2.0**-126}
"""Rows whose results may be 0 below the normal range."""

NEAR = {"div_ftz": 1}
"""Rows that promise nothing for a divisor whose reciprocal is no normal number -> which operand that is."""

APART = {"gelu": 2e-7, "gelu_tanh": 2e-7, "erf": 2e-7, "logaddexp": 2e-7}
"""Rows whose error is relative to their operand, or to 1."""


DAY = int(os.environ["LADDER_TEST_DAY"])

TTYPES = ("float32", ("float16", "bfloat16")[DAY % 2])
"""The types of a day."""


def test_every_row_is_here() -> None:
    rows = {name for name, row in OPERATORS.items() if row.elementwise}
    assert rows == {*EXACT, *TRUTHS, *CLOSE, "select", "quotient", *AS_BITS, *BITS}  # of integers: below
    assert set(REDUCTIONS) == {"reduce_sum", "reduce_max"}


def pairs(ttype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all pairs of special values."""
    values = torch.tensor(SPECIAL).to(TORCH[ttype])
    return values.repeat_interleave(len(values)).reshape(32, 32), values.repeat(len(values)).reshape(32, 32)


def operands(name: str, x: str, y: str) -> tuple[str, ...]:
    """Return the operands of a row."""
    return {1: (x,), 2: (x, y), 3: (x, y, x)}[OPERATORS[name].arity[0]]


def chain_of(names: tuple[str, ...], ttype: str) -> Graph:
    """Return a chain with a result for every row."""
    g = GraphBuilder("rows")
    x, y = (g.input(name, ttype, (32, 32)) for name in "xy")
    return g.finish(*(g.add(name, *operands(name, x, y)) for name in names))


def assert_same(
    got: torch.Tensor, want: torch.Tensor, name: str, *at: torch.Tensor, signed: bool = True
) -> None:
    """Compare bits; any NaN is as good as another."""
    if got.is_floating_point() and got.element_size() == 1:  # torch has no sign bits of these
        got, want = got.float(), want.float()
    same = (got == want) | (got.isnan() & want.isnan())
    if signed and got.is_floating_point():
        same &= (got.signbit() == want.signbit()) | got.isnan()
    wrong = [tuple(float(x[place]) for x in (*at, got, want)) for place in _where(~same)]
    assert not wrong, f"{name}: (operands, got, torch) {wrong[:5]}"


def _where(found: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(place) for place in found.nonzero().tolist()]


@pytest.mark.parametrize("ttype", TTYPES)
@pytest.mark.parametrize("target", TARGETS)
def test_exact_rows(target: str, ttype: str) -> None:
    names = tuple(EXACT)
    x, y = pairs(ttype)
    for name, got in zip(names, run_chain(chain_of(names, ttype), (x, y), target), strict=True):
        want = EXACT[name](*operands(name, x, y))
        assert_same(got, want, name, x, y, signed=name not in ZEROS)


@pytest.mark.parametrize("ttype", TTYPES)
@pytest.mark.parametrize("target", TARGETS)
def test_close_rows(target: str, ttype: str) -> None:
    names = tuple(CLOSE)
    x, y = pairs(ttype)
    for name, got in zip(names, run_chain(chain_of(names, ttype), (x, y), target), strict=True):
        exact = CLOSE[name](*(value.float() for value in operands(name, x, y)[:2]))
        want = exact.to(TORCH[ttype])
        bound = (
            exact.abs().double() * ROUNDING[ttype]
            + max(LEAST[ttype], FLUSHED.get(name, 0))
            + APART.get(name, 0) * x.float().abs().clip(0, 1)
        )
        finite = want.isfinite() & got.isfinite()
        close = torch.where(finite, (got.double() - exact).abs() <= bound, got == want)
        close |= (got.isnan() & want.isnan()) | (got == want)
        if name in NEAR:
            size = (x, y)[NEAR[name]].float().abs()
            close |= (size < 2.0**-126) | ((size > 2.0**126) & size.isfinite())
        wrong = [tuple(float(v[at]) for v in (x, y, got, want)) for at in _where(~close)]
        assert not wrong, f"{name}: (operands, got, torch) {wrong[:5]}"


REDUCED = {"reduce_sum": torch.Tensor.sum, "reduce_max": torch.Tensor.amax}


@pytest.mark.parametrize("target", TARGETS)
def test_reductions(target: str) -> None:
    """Each special value at another place of its row, among numbers and alone; along either axis."""
    rows = torch.arange(32 * 40).reshape(32, 40) % 7 - 3.0
    rows[torch.arange(32), torch.arange(32)] = torch.tensor([v if abs(v) < 1e30 else NAN for v in SPECIAL])
    alone = torch.tensor(SPECIAL)[:, None].repeat(1, 40)
    for x, axis in ((rows, 1), (rows.t().contiguous(), 0), (alone, 1)):
        g = GraphBuilder("reduced")
        value = g.input("x", "float32", tuple(x.shape))
        graph = g.finish(*(g.add(name, value, axis=axis, keep=False) for name in REDUCED))
        for function, got in zip(REDUCED.values(), run_chain(graph, (x,), target), strict=True):
            torch.testing.assert_close(got, function(x, axis), rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("target", TARGETS)
def test_conversions(target: str) -> None:
    """Between all types; to integers what they hold, and exact ones to 16 bits within a kernel."""
    whole = torch.tensor([0.0, -0.0, 1.0, 1.9, 2.5, 100.0, 127.0, 0.5, 3.0, 77.0, 1e-40, 30.0]).repeat(4)
    pairs = [(source, name) for source in TORCH for name in TORCH if name != source]
    given = {source: whole.to(TORCH[source]) for source in TORCH}
    g = GraphBuilder("converted")
    inputs = {source: g.input(source, source, (48,)) for source in TORCH}
    graph = g.finish(*(g.add("convert", inputs[source], type=name) for source, name in pairs))
    found = run_chain(graph, tuple(given.values()), target)
    for (source, name), got in zip(pairs, found, strict=True):
        assert_same(got, given[source].to(TORCH[name]), f"{source} to {name}", given[source])


@pytest.mark.parametrize("target", TARGETS)
def test_exact_conversions(target: str) -> None:
    """Round within a kernel, also what overflows and what is subnormal."""
    values, halves = torch.tensor(SPECIAL), ("float16", "bfloat16")
    g = GraphBuilder("rounded")
    x = g.input("x", "float32", (32,))
    rounded = [g.add("convert", x, type=half, exact=True) for half in halves]
    graph = g.finish(*(g.add("convert", value, type="float32") for value in rounded))
    for half, got in zip(halves, run_chain(graph, (values,), target), strict=True):
        assert_same(got, values.to(TORCH[half]).float(), half, values)


@pytest.mark.parametrize("ttype", ["int32", "int64"])
@pytest.mark.parametrize("target", TARGETS)
def test_bits_of_integers(target: str, ttype: str) -> None:
    """Shifts by more than the width and by negative numbers too."""
    info = torch.iinfo(getattr(torch, ttype))
    found = [0, 1, -1, 5, 31, 32, 63, 64, -7, info.max, info.min, 0x5A5A5A5A]
    x = torch.tensor(found, dtype=getattr(torch, ttype))
    a_, b_ = x.repeat_interleave(len(found)), x.repeat(len(found))
    g = GraphBuilder("bits")
    a, b = (g.input(name, ttype, (len(found) ** 2,)) for name in "ab")
    graph = g.finish(*(g.add(name, a, b) for name in BITS))
    for (name, function), got in zip(BITS.items(), run_chain(graph, (a_, b_), target), strict=True):
        assert_same(got, function(a_, b_), name, a_, b_)


@pytest.mark.parametrize("target", TARGETS)
def test_bits_of_floats(target: str) -> None:
    """There, and back with the sign turned; of numbers that are known too."""
    values = torch.tensor(SPECIAL)
    g = GraphBuilder("bits")
    x, known = g.input("x", "float32", (32,)), g.add("constant", value=-0.0, type="float32")
    bits = g.add("bits", x)
    sign = g.add("bits", g.add("neg", g.add("abs", known)))
    graph = g.finish(bits, g.add("of_bits", g.add("bitwise_xor", bits, sign)))
    got, turned = run_chain(graph, (values,), target)
    numbers = ~values.isnan()
    assert torch.equal(got[numbers], values.view(torch.int32)[numbers])
    assert_same(turned, -values, "of_bits", values)


@pytest.mark.parametrize("ttype", ["int32", "int64"])
@pytest.mark.parametrize("target", TARGETS)
def test_quotients_of_integers(target: str, ttype: str) -> None:
    """Rounded toward 0; 0 by 0 and the least number by -1, where processors trap, are a * b as it wraps."""
    info = torch.iinfo(getattr(torch, ttype))
    found = [0, 1, -1, 2, -3, 7, info.max, info.min, info.min + 1, 1 << 20, -441]
    x = torch.tensor(found, dtype=getattr(torch, ttype))
    g = GraphBuilder("quotients")
    a, b = (g.input(name, ttype, (len(found) ** 2,)) for name in "ab")
    a_, b_ = x.repeat_interleave(len(found)), x.repeat(len(found))
    (got,) = run_chain(g.finish(g.add("quotient", a, b)), (a_, b_), target)
    for dividend, divisor, value in zip(a_.tolist(), b_.tolist(), got.tolist(), strict=True):
        if divisor in (0, -1):
            want = dividend * divisor
            want = (want - info.min) % (1 << info.bits) + info.min
        else:
            want = abs(dividend) // abs(divisor) * (1 if (dividend < 0) == (divisor < 0) else -1)
        assert value == want, (dividend, divisor)
