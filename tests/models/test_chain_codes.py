"""Chains of 8-bit elements and short integers, on all targets: floats as ml_dtypes rounds them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from chain_targets import TARGETS, TORCH, run_chain
from test_gpu_chains import simulated

import ladder
from ladder.frontend.importer import saturates
from ladder.ir import Graph, GraphBuilder
from ladder.lower.chain import emit_chain
from targets import get_device

KINDS = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}

ENDS = (
    *(0.0, 448, 463.9, 464, 464.1, 479, 480, 1e9, np.inf, np.nan, 57344, 61439, 61440, 61441, 65536, 1e-40),
    *(2.0**e * m for e in (-6, -9, -10, -14, -16, -17) for m in (0.99, 1, 1.01, 1.5)),
)
"""Where formats end, and where one of two neighbours is nearer."""


def numbers() -> torch.Tensor:
    """Return float32 of all sizes: `ENDS`, values between all codes, and bits drawn at random."""
    codes = np.concatenate(
        [np.arange(256, dtype=np.uint8).view(kind).astype(np.float32) for kind in KINDS.values()]
    )
    codes = np.sort(codes[np.isfinite(codes)])
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 1500, dtype=np.uint32).view(np.float32)
    found = [
        np.array(ENDS, np.float32),
        -np.array(ENDS, np.float32),
        codes,
        (codes[1:] + codes[:-1]) / 2,
        drawn,
    ]
    return torch.from_numpy(np.concatenate(found)[:2496])


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compare numbers bit for bit; NaN is NaN."""
    got, want = got.double(), want.double()
    here = ~want.isnan()
    assert torch.equal(here, ~got.isnan())
    assert torch.equal(got[here], want[here])
    assert torch.equal(got[here].signbit(), want[here].signbit())


def of_type(array: Any, name: str) -> torch.Tensor:
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.from_numpy(array.astype(KINDS[name]).view(np.uint8)).view(TORCH[name])


@pytest.mark.parametrize("target", [*TARGETS, "cuda/sm_80"])
@pytest.mark.parametrize("columns", [1, 32])
def test_float32_becomes_the_nearest_code(target: str, columns: int) -> None:
    x = numbers().reshape(-1, columns)
    g = GraphBuilder("chain")
    given = g.input("x", "float32", tuple(x.shape))
    graph = g.finish(*(g.add("convert", given, type=name) for name in KINDS))
    for name, got in zip(KINDS, run_chain(graph, (x,), target), strict=True):
        assert_same(got, of_type(x.numpy(), name))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("columns", [5, 16])
def test_codes_become_their_numbers(target: str, columns: int) -> None:
    rows = -(-256 // columns)
    codes = torch.arange(rows * columns).to(torch.uint8).reshape(rows, columns)
    g = GraphBuilder("chain")
    inputs = [g.input(name, name, (rows, columns)) for name in KINDS]
    wide = [g.add("convert", x, type="float32") for x in inputs]
    moved = (
        g.add("concat", g.add("transpose", inputs[0], permutation=(1, 0)), inputs[0], axis=0)
        if columns == rows
        else inputs[0]
    )
    graph = g.finish(*wide, g.add("convert", inputs[0], type="fp8_e5m2"), moved)
    given = [codes.view(TORCH[name]) for name in KINDS]
    *found, other, same = run_chain(graph, given, target)
    for got, x in zip(found, given, strict=True):
        assert_same(got, x.float())
    assert_same(other, of_type(given[0].float().numpy(), "fp8_e5m2"))
    x = given[0]
    assert_same(same, torch.cat([x.t().float(), x.float()]) if columns == rows else x)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_converted_on_the_host(kind: str) -> None:
    """What only looks at a chain's reads emits no instructions of the device."""
    g = GraphBuilder("chain")
    wide = g.add("convert", g.input("x", "bfloat16", (64, 64)), type="float32")
    function = emit_chain(g.finish(g.add("convert", wide, type=kind)), get_device("cuda/sm_90a"), "chain")
    host, _, device = str(function).partition("device_entry")
    assert "narrow_pair" in device
    assert "narrow_pair" not in host


def tokens(kind: str, rows: int, columns: int) -> Graph:
    """Return codes of rows over their largest magnitude, and their scales: dynamic quantization."""
    g = GraphBuilder("chain")
    x = g.add("convert", g.input("x", "bfloat16", (rows, columns)), type="float32")
    most = g.add(
        "constant", value=127.0 if kind == "int8" else float(ml_dtypes.finfo(KINDS[kind]).max), type="float32"
    )
    scale = g.add("div", g.add("reduce_max", g.add("abs", x), axis=1, keep=True), most)
    codes = g.add("div", x, scale)
    if kind == "int8":
        return g.finish(g.add("encode", codes, type=kind), scale)
    return g.finish(g.add("convert", codes, type=kind), scale)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["int8", *KINDS])
@pytest.mark.parametrize("columns", [256, 90, 33])
def test_tokens_are_quantized(target: str, kind: str, columns: int) -> None:
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scale = run_chain(tokens(kind, 5, columns), (x,), target)
    step = 1 / 127 if kind == "int8" else torch.finfo(TORCH[kind]).eps
    error = (codes.float() * scale - x.float()).abs()
    bound = step * x.float().abs().amax(1, keepdim=True) if kind == "int8" else step * x.float().abs()
    assert (error <= 0.5001 * bound + 1e-3 * scale).all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16"])
@pytest.mark.parametrize("columns", [64, 20, 7])
def test_vectors_of_codes_are_read_and_written(target: str, kind: str, columns: int) -> None:
    """What is read by vectors beside a wider operand, reduced, turned and cut; sums wrap around."""
    codes = (torch.arange(9 * columns) * 997).to(TORCH[kind]).reshape(9, columns)
    x = torch.randn(9, columns, generator=torch.Generator().manual_seed(0))
    g = GraphBuilder("chain")
    a, b = g.input("a", kind, (9, columns)), g.input("b", "float32", (9, columns))
    wide = g.add("convert", a, type="float32")
    less = g.add("sub", g.add("mul", wide, b), g.add("reduce_max", wide, axis=1, keep=True))
    graph = g.finish(less, g.add("convert", g.add("add", wide, g.add("abs", wide)), type=kind))
    got, twice = run_chain(graph, (codes, x), target)
    assert_same(got, codes.float() * x - codes.float().amax(1, keepdim=True))
    assert torch.equal(twice, (codes.int() + codes.int().abs()).to(TORCH[kind]))


@pytest.mark.parametrize("target", TARGETS)
def test_gated_groups_are_quantized(target: str) -> None:
    """On GPUs by approximate functions: the program rounds what they give to 16 bits."""
    a, b = torch.randn(2, 5, 2, 32, generator=torch.Generator().manual_seed(0)).mul(4).bfloat16()
    g = GraphBuilder("chain")
    x, y = (g.add("convert", g.input(name, "bfloat16", tuple(a.shape)), type="float32") for name in "ab")
    wide = g.add("convert", g.add("convert", g.add("silu", x), type="bfloat16"), type="float32")
    product = g.add("mul", wide, y)
    most = g.add("constant", value=448.0, type="float32")
    scale = g.add("div", g.add("reduce_max", g.add("abs", product), axis=2, keep=True), most)
    graph = g.finish(g.add("convert", g.add("div", product, scale), type="fp8_e4m3"), scale)
    codes, got = run_chain(graph, (a, b), target)
    exact = torch.nn.functional.silu(a.double()) * b.double()
    torch.testing.assert_close(got.double(), exact.abs().amax(2, keepdim=True) / 448, rtol=2**-15, atol=0)
    error = (codes.double() * got - exact).abs()
    assert (error <= 0.501 * torch.finfo(TORCH["fp8_e4m3"]).eps * exact.abs() + 1e-3 * got).all()


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "cpu"])
@pytest.mark.parametrize("size", [16, 5])
def test_rows_of_codes_are_put_into_caches(target: str, size: int) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, size)).astype(np.float32)
    g = GraphBuilder("chain")
    given, ids = g.input("x", "float32", x.shape), g.input("ids", "int64", (3,))
    base = g.input("base", "fp8_e4m3", (2, 8, size))
    graph = g.finish(g.add("put", base, ids, g.add("convert", given, type="fp8_e4m3"), axis=1))
    cache = np.arange(16 * size, dtype=np.uint8).reshape(2, 8, size)
    got = cache.view(KINDS["fp8_e4m3"]).copy()
    result = simulated(
        emit_chain(graph, get_device(target), "chain"), target, [x, np.array([-3, 0, 20]), got], (2,)
    )
    assert {finding.kind for finding in result.findings} <= {"unwritten"}, result.report()
    cache[:, [5, 0]] = x.astype(KINDS["fp8_e4m3"]).view(np.uint8)[:, :2]  # the third lies beyond the end
    assert np.array_equal(got.view(np.uint8), cache)


def test_caches_of_codes_are_written_in_place() -> None:
    class Cache(torch.nn.Module):
        rows: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(1, 16, 8).to(torch.float8_e4m3fn))

        def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            self.rows[:, position] = x.to(torch.float8_e4m3fn)
            return self.rows.float().sum(1)

    ours, theirs = Cache(), Cache()
    fast = ladder.compile(ours)
    with torch.no_grad():
        for at in range(4):
            x, position = torch.randn(1, 1, 8), torch.tensor([at])
            torch.testing.assert_close(fast(x, position), theirs(x, position))
            assert_same(ours.rows, theirs.rows)
    assert "operator by operator" not in fast.plan()


def test_programs_that_convert_are_whole() -> None:
    """As eager torch, which keeps numbers beyond the largest e4m3 at that, or not, by its release."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
        codes = (x / scale).to(torch.float8_e4m3fn)
        wide = x.to(torch.float8_e4m3fn), x.to(torch.float8_e5m2)
        return (
            codes,
            codes.float() * scale,
            codes.to(torch.bool),
            codes.t().contiguous(),
            *wide,
            wide[1].to(codes.dtype),
        )

    fast = ladder.compile(program)
    for x in (
        numbers().reshape(-1, 32).nan_to_num(3.0, 1e30, -1e30),
        numbers().reshape(-1, 8),
        torch.empty(0, 8),
    ):
        for _ in range(2):
            found = fast(x)
        for got, want in zip(found, program(x), strict=True):
            assert (got.dtype, got.stride()) == (want.dtype, want.stride())
            assert_same(got, want)
    assert (fast.outcome, fast.refused) == ("whole", [])
    assert "operator by operator" not in fast.plan()
    assert saturates() == bool(torch.tensor(480.0).to(torch.float8_e4m3fn).float().isfinite())
