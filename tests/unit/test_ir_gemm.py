"""The bridge between graphs and the GEMM normal form."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from ladder.ir import (
    Gemm,
    apply,
    compute,
    evaluate,
    gemm_graph,
    gemm_reference,
    sum_,
    tensor,
    to_graph,
    verify,
)
from ladder.ir.ops import unary_operators
from ladder.rewrite import as_gemm
from tile_types.errors import ConversionError, DTypeError, ShapeError, UnknownNameError, VerificationError
from tile_types.quantize import quantize

rng = np.random.default_rng(0)
N, K = 24, 96

GEMMS = [
    Gemm(N, K, weight, activation, output, group, scale, zero, token, bias, epilogue)
    for (weight, zero), activation, output, (group, scale), (token, bias, epilogue) in itertools.product(
        [("int4", "none"), ("uint3", "integer"), ("uint4", "float"), ("fp4_e2m1", "none")],
        ["float16", "bfloat16", "fp8_e4m3", "int8", "float32"],
        ["float16", "float32"],
        [(32, True), (K, False), (32, False)],
        [(False, False, ()), (True, True, ("silu",)), (False, True, ("neg", "gelu"))],
    )
    if not (group < K and not scale and zero == "none")
]


@pytest.mark.parametrize("gemm", GEMMS, ids=str)
def test_round_trip(gemm):
    graph = gemm_graph(gemm)
    verify(graph)
    assert as_gemm(graph) == gemm


@pytest.mark.parametrize("weight_group", [K, 32])
def test_scales_of_token_groups(weight_group):
    gemm = Gemm(
        N, K, "fp8_e4m3", "fp8_e4m3", group_size=weight_group, scale=weight_group < K,
        token_scale=True, token_group=64,
    )  # fmt: skip
    graph = gemm_graph(gemm)
    verify(graph)
    assert as_gemm(graph) == gemm
    with pytest.raises(ShapeError, match="multiple of 64"):
        Gemm(N, K, "int4", "int8", token_scale=True, token_group=48)


@pytest.mark.parametrize("name", unary_operators())
def test_every_unary_operator_is_an_epilogue(name):
    gemm = Gemm(N, K, "nf4", group_size=32, epilogue=(name,))
    assert as_gemm(gemm_graph(gemm)) == gemm


def test_a_group_that_spans_k_is_a_row_scale():
    assert as_gemm(gemm_graph(Gemm(N, K, "nf4", scale=True))) == Gemm(N, K, "nf4", scale=False)


def quantized(gemm: Gemm):
    zero = None if gemm.zero == "none" else gemm.zero
    size = gemm.group_size if gemm.scale or zero else -1
    return quantize(rng.standard_normal((gemm.n, gemm.k)), gemm.weight, group_size=size, zero=zero)


@pytest.mark.parametrize("gemm", [g for g in GEMMS if g.scale or g.zero == "none"][::4], ids=str)
def test_the_graph_means_what_the_reference_says(gemm):
    w, a = quantized(gemm), rng.standard_normal((5, gemm.k))
    bias, token = rng.standard_normal(gemm.n), rng.random(5)
    extra = {"bias": bias} if gemm.bias else {}
    extra |= {"token_scale": token} if gemm.token_scale else {}
    expected = gemm_reference(gemm, a, w, bias=extra.get("bias"), token_scale=extra.get("token_scale"))
    inputs = {"A": a, "B": w, **extra}
    if not gemm.scale:
        inputs["row_scale"] = np.asarray(w.scale, np.float64)[:, 0]
        inputs["B"] = w.codes() if w.ttype.is_block else w.ttype.decode_codes(w.codes())
    assert np.allclose(evaluate(gemm_graph(gemm), inputs), expected, rtol=1e-12)


@pytest.mark.parametrize("last", [False, True])
def test_gates(last):
    gemm = Gemm(128, K, "int4", group_size=32, bias=True, gate="silu", gate_last=last)
    w, a, bias = quantized(gemm), rng.standard_normal((5, K)), rng.standard_normal(128)
    expected = gemm_reference(gemm, a, w, bias=bias)
    assert expected.shape == (5, gemm.columns) == (5, 64)
    y = gemm_reference(Gemm(128, K, "int4", group_size=32, bias=True), a, w, bias=bias)
    gate, other = (y[:, 64:], y[:, :64]) if last else (y[:, :64], y[:, 64:])
    assert np.allclose(expected, gate / (1 + np.exp(-gate)) * other, rtol=1e-12)
    assert np.allclose(evaluate(gemm_graph(gemm), {"A": a, "B": w, "bias": bias}), expected, rtol=1e-12)
    with pytest.raises(ShapeError):
        as_gemm(gemm_graph(gemm))
    with pytest.raises((DTypeError, UnknownNameError)):
        gemm_graph(Gemm(128, K, "int4", gate="add"))


def test_zero_points_without_group_scale():
    gemm = Gemm(N, K, "uint4", group_size=K, scale=False, zero="integer")
    w = quantize(rng.standard_normal((N, K)), "uint4", group_size=K, zero="integer")
    a = rng.standard_normal((5, K))
    inputs = {"A": a, "B": w, "row_scale": np.asarray(w.scale, np.float64)[:, 0]}
    assert np.allclose(evaluate(gemm_graph(gemm), inputs), gemm_reference(gemm, a, w), rtol=1e-12)


def test_reference_against_torch():
    gemm = Gemm(N, K, "int4", group_size=32, bias=True, token_scale=True, epilogue=("silu",))
    w = quantized(gemm)
    a, bias, token = (torch.randn(shape, dtype=torch.float64) for shape in ((5, K), (N,), (5,)))
    product = (a @ torch.from_numpy(w.dequantize()).T) * token[:, None] + bias
    expected = torch.nn.functional.silu(product)
    assert np.allclose(gemm_reference(gemm, a, w, bias, token), expected, rtol=1e-12)
    with pytest.raises(ShapeError, match=r"needs bias\[24\]"):
        gemm_reference(gemm, a, w, token_scale=token)
    with pytest.raises(ShapeError, match=r"bias must have shape \[24\], got \[23\]"):
        gemm_reference(gemm, a, w, bias[1:], token)
    with pytest.raises(ShapeError, match="cannot take"):
        gemm_reference(gemm, a[:, 1:], w, bias, token)


def expression(weight="nf4", order="ab", out="mn", epilogue=None, activation="float16", **group):
    a, b = tensor("A", ("M", K), activation), tensor("B", (N, K), weight, **group)
    epilogue = epilogue or (lambda value, m, n: value)

    def body(m, n, k):
        factors = {"a": a[m, k], "b": b[n, k]}
        return epilogue(sum_(factors[order[0]] * factors[order[1]], k), m, n)

    if out == "nm":
        return compute((N, "M"), lambda n, m, k: body(m, n, k), reduce={"k": K})
    return compute(("M", N), body, reduce={"k": K})


BIAS = tensor("bias", (N,), "float16")
TOKEN = tensor("t", ("M",), "float32")
ROW = tensor("r", (N,), "float32")


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (expression(group_size=32), Gemm(N, K, "nf4", group_size=32)),
        (expression(order="ba", group_size=32), Gemm(N, K, "nf4", group_size=32)),
        (expression("int4", group_size=-1), Gemm(N, K, "int4", scale=False)),
        (expression("mxfp4"), Gemm(N, K, "fp4_e2m1", group_size=32, power_scales=True)),
        (expression("nvfp4"), Gemm(N, K, "fp4_e2m1", group_size=16)),
        (expression("uint4", group_size=32, zero="float"), Gemm(N, K, "uint4", group_size=32, zero="float")),
        (expression("float16"), Gemm(N, K, "float16", scale=False)),
        (expression("int8"), Gemm(N, K, "int8", scale=False)),
        (expression("int4", activation="int8"), Gemm(N, K, "int4", "int8", scale=False)),
        (
            expression(epilogue=lambda v, m, n: apply("silu", v + BIAS[n]), group_size=32),
            Gemm(N, K, "nf4", group_size=32, bias=True, epilogue=("silu",)),
        ),
        (
            expression(epilogue=lambda v, m, n: apply("gelu", -(BIAS[n] + v)), group_size=32),
            Gemm(N, K, "nf4", group_size=32, bias=True, epilogue=("neg", "gelu")),
        ),
        (
            expression("int4", activation="int8", epilogue=lambda v, m, n: v * ROW[n] * TOKEN[m] + BIAS[n]),
            Gemm(N, K, "int4", "int8", scale=False, token_scale=True, bias=True),
        ),
    ],
)
def test_expressions_normalise(program, expected):
    graph = to_graph(program)
    verify(graph)
    assert as_gemm(graph) == expected


@pytest.mark.parametrize(
    ("program", "error", "reason"),
    [
        (expression(out="nm", group_size=32), ShapeError, r"weight must be numbers|stored as B\[N,K\]"),
        (expression(epilogue=lambda v, m, n: v / BIAS[n]), ShapeError, r"is no GEMM: %div"),
        (expression(epilogue=lambda v, m, n: v + 1.0), ShapeError, r"is no GEMM: %add"),
        (expression(epilogue=lambda v, m, n: apply("maximum", v, 0.0)), ShapeError, "is no GEMM: %maximum"),
        (
            expression(activation="fp6_e2m3", weight="fp8_e4m3"),
            ConversionError,
            "must be an input in the core's type",
        ),
        (compute(("M", N), lambda m, n: TOKEN[m] * BIAS[n]), ShapeError, "is no GEMM"),
    ],
)
def test_what_is_no_gemm_is_refused(program, error, reason):
    with pytest.raises(error, match=reason):
        as_gemm(to_graph(program))


def test_unknown_names_in_a_gemm():
    with pytest.raises(UnknownNameError, match="did you mean 'silu'"):
        gemm_graph(Gemm(N, K, "int4", epilogue=("silo",)))
    with pytest.raises(DTypeError, match="not a unary"):
        gemm_graph(Gemm(N, K, "int4", epilogue=("add",)))
    with pytest.raises(UnknownNameError, match="nf4"):
        gemm_graph(Gemm(N, K, "nf5"))


def test_a_broken_graph_is_not_recognised():
    graph = gemm_graph(Gemm(N, K, "int4", group_size=32))
    object.__setattr__(graph, "outputs", ("nothing",))
    with pytest.raises(VerificationError, match="returns %nothing"):
        as_gemm(graph)
