"""The operator table: each row's columns agree with each other and with independent references."""

from __future__ import annotations

import itertools
import operator
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from ir_examples import BITS, CASES, EXAMPLES, of_matmul_blocks, of_softmax_blocks, operands

from ladder.ir import GraphBuilder, bind, evaluate, interpret, parse, verify
from ladder.ir.build import node_attributes
from ladder.ir.finite import Field, Residues
from ladder.ir.interpret import abstract_expressions, finite_domain, lax_classes
from ladder.ir.operator import LAX_CLASSES, ROLES
from ladder.ir.ops import OPERATORS, get_operator, unary_operators
from ladder.ir.scalars import reinterpreted, unsigned
from ladder.superopt.verifier.values import COMPOSED
from tile_types.errors import DTypeError, LadderError, ShapeError, UnknownNameError, VerificationError

TORCH = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "neg": torch.neg,
    "square": torch.square,
    "exp": torch.exp,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "matmul": torch.matmul,
    "contract": lambda a, b: a @ b.T,
    "reduce_sum": lambda x: x.sum(1, keepdim=True),
    "reduce_max": lambda x: x.amax(0),
    "scan_sum": lambda x: x.cumsum(1),
    "scan_max": lambda x: x.cummax(1).values,
    "scan_product": lambda x: x.cumprod(1),
    "scan_logsumexp": lambda x: x.logcumsumexp(1),
    "broadcast": lambda x: x.expand(4, 6),
    "reshape": lambda x: x.reshape(8, 3),
    "transpose": lambda x: x.permute(2, 0, 1),
    "restride": lambda x: x.permute(2, 0, 1),
    "concat": lambda a, b: torch.cat([a, b], 1),
    "repeat": lambda x: x.repeat_interleave(4, 1)[:, :10],
    "slice": lambda x: x[1:7:2, 2:6],
    "map": lambda x: x.unfold(0, 3, 1),
    "pad": lambda x: torch.nn.functional.pad(x, (0, 2, 1, 0), value=2.0),
    "convert": lambda x: x,
    "encode": lambda x: x.round(),
    "iota": lambda: torch.arange(3, 12, 2)[None],
    "size": lambda: torch.tensor(5.0),
    "take": lambda table, ids: table[ids.long()],
    "gather": lambda x, ids: x[:, ids.long()],
    "put": lambda base, ids, rows: base.index_copy(1, ids.long(), rows),
    "attention": lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, scale=0.25, enable_gqa=True
    ),
    **{
        name: getattr(torch, name)
        for name in (
            "log",
            "log2",
            "log10",
            "log1p",
            "exp2",
            "logaddexp",
            "sin",
            "cos",
            "abs",
            "floor",
            "round",
            "erf",
            "pow",
        )
    },
    **{name: getattr(torch, name) for name in ("bitwise_and", "bitwise_or", "bitwise_xor")},
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
    "fmod": torch.fmod,
    "bits": lambda x: x.float().view(torch.int32).double(),
    "of_bits": lambda x: x.int().view(torch.float32).double(),
    "quotient": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "less": torch.lt,
    "less_equal": torch.le,
    "equal": torch.eq,
    "both": torch.logical_and,
    "either": torch.logical_or,
    "negation": torch.logical_not,
    "exp_ftz": torch.exp,
    "div_ftz": torch.div,
    "fused": lambda a, b, c: a * b + c,
    "select": lambda condition, yes, no: torch.where(condition != 0, yes, no),
}
"""The same operators in torch, for the examples' attributes; inputs are within int4's range."""

ELEMENTWISE = [name for name, row in OPERATORS.items() if row.elementwise]


def test_every_operator_has_an_example():
    assert set(EXAMPLES) == set(OPERATORS)
    for name, graph in EXAMPLES.items():
        assert name in {node.operator for _, node in graph.walk()}


@pytest.mark.parametrize("name", OPERATORS)
def test_examples_verify_print_and_evaluate(name):
    graph = EXAMPLES[name]
    verify(graph)
    assert parse(str(graph)) == graph
    if name == "call":
        with pytest.raises(LadderError, match=r"aten\.topk"):
            evaluate(graph, operands(graph))
        return
    result = evaluate(graph, operands(graph))
    assert result.shape == bind(graph, {"M": 37}).tile(graph.outputs[0]).shape
    assert np.isfinite(result).all()


OF_POSITIVES = (
    *("sqrt", "rsqrt", "encode", "div", "log", "log2", "log10", "log1p", "pow"),
    *("take", "gather", "put", "of_bits"),
)
"""Operators whose examples are of positive numbers."""


@pytest.mark.parametrize("name", CASES)
def test_reference_agrees_with_torch(name):
    graph = EXAMPLES[name]
    inputs = operands(graph, seed=1)
    if name not in OF_POSITIVES:
        inputs = {key: value - 2.2 for key, value in inputs.items()}
    if name in BITS:
        inputs = {key: value.round().astype(np.int64) for key, value in inputs.items()}
    expected = TORCH[name](*map(torch.from_numpy, inputs.values())).numpy()
    assert np.allclose(evaluate(graph, inputs), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", OPERATORS)
def test_rows_are_consistent(name):
    row = OPERATORS[name]
    assert row.name == name
    assert row.role in ROLES
    graph, node = next(pair for pair in EXAMPLES[name].walk() if pair[1].operator == name)
    attributes = node_attributes(node, graph)
    assert row.lax_class(attributes) in LAX_CLASSES
    if row.role == "value":
        provable = row.finite is not None or (name in COMPOSED and row.lax == "exp")
        assert provable == (row.lax_class(attributes) != "other")
        tiles = [graph.tile(value) for value in node.inputs]
        expression = row.abstract([f"v{i}" for i in range(len(tiles))], tiles, attributes)
        assert expression is not None
        assert isinstance(row.flops(tiles, node.tile, attributes), int)


@pytest.mark.parametrize("name", [n for n in CASES if OPERATORS[n].lax == "multilinear"])
def test_finite_field_is_a_homomorphism_of_the_integers(name):
    """On integers, the residues of the float64 result are the result on residues."""
    graph, field = EXAMPLES[name], Field()
    generator = np.random.default_rng(3)
    values = [generator.integers(-9, 9, node.tile.shape).astype(np.float64) for node in graph.inputs]
    exact = evaluate(graph, values).astype(np.int64)
    residues = [
        Residues(field.array(v.astype(np.int64) % field.p), field.array(v.astype(np.int64) % field.q))
        for v in values
    ]
    (result,) = interpret(graph, residues, finite_domain(field))
    assert np.array_equal(result.p, exact % field.p)
    assert np.array_equal(result.q, exact % field.q)


def test_unary_operators_fit_epilogues():
    assert {"silu", "relu", "gelu", "tanh"} <= set(unary_operators())
    assert "add" not in unary_operators()


def test_abstract_expressions_see_through_blocks():
    assert abstract_expressions(bind(of_matmul_blocks(), {"M": 32})) == (
        ("silu", ("mul", ("const", -1.0), ("sum", 3, ("sum", 32, ("mul", "A", "B"))))),
    )


def test_softmax_blocks_equal_the_plain_definition():
    graph = of_softmax_blocks()
    inputs = operands(graph, seed=5)
    x, v = torch.from_numpy(inputs["X"] * 50), torch.from_numpy(inputs["V"])
    expected = torch.softmax(x, -1) @ v
    assert np.allclose(evaluate(graph, {"X": x, "V": v}), expected, rtol=1e-13)
    assert "maximum" in lax_classes(graph)


def test_block_graphs_equal_the_plain_product_for_odd_sizes():
    graph = of_matmul_blocks("M", 41, 77)
    inputs = operands(graph, seed=2, rows=35)
    product = -(inputs["A"] @ inputs["B"].T)
    assert np.allclose(evaluate(graph, inputs), product / (1 + np.exp(-product)), rtol=1e-13)


def test_finite_field_of_block_graph_equals_plain_product():
    field, generator = Field(), np.random.default_rng(0)
    graph = bind(of_matmul_blocks("M", 48, 96), {"M": 32})
    a, b = field.random((32, 96), generator), field.random((48, 96), generator)
    (result,) = interpret(graph, [a, b], finite_domain(field))
    g = GraphBuilder("plain")
    x = g.add(
        "matmul", g.input("A", "float16", (32, 96)), g.input("B", "float16", (48, 96)), transpose_b=True
    )
    (expected,) = interpret(g.finish(g.add("silu", g.add("neg", x))), [a, b], finite_domain(field))
    assert np.array_equal(result.p, expected.p)
    assert result.q is None


def test_two_exponentials_and_operators_outside_lax_are_refused():
    g = GraphBuilder("twice")
    graph = g.finish(g.add("exp", g.add("exp", g.input("x", "float32", (3,)))))
    x = Field().random((3,), np.random.default_rng(0))
    with pytest.raises(VerificationError, match="outside LAX"):
        interpret(graph, [x], finite_domain(Field()))
    with pytest.raises(VerificationError, match="maximum has no finite-field"):
        interpret(EXAMPLES["maximum"], [x, x], finite_domain(Field()))


def test_bad_nodes_are_refused_when_built():
    g = GraphBuilder("bad")
    x, h = g.input("x", "float32", (2, 3)), g.input("h", "float16", (2, 3))
    w = g.input("w", "int4_g32", (2, 32))
    with pytest.raises(UnknownNameError, match="did you mean 'silu'"):
        g.add("silo", x)
    with pytest.raises(DTypeError, match="convert one"):
        g.add("add", x, h)
    with pytest.raises(DTypeError, match="decode it"):
        g.add("exp", w)
    with pytest.raises(ShapeError, match="takes 2 operands"):
        g.add("add", x)
    with pytest.raises(ShapeError, match="contracts"):
        g.add("matmul", x, x)
    with pytest.raises(LadderError, match="needs the attribute axis"):
        g.add("reduce_sum", x)
    with pytest.raises(LadderError, match="must be int"):
        g.add("reduce_sum", x, axis="1")
    with pytest.raises(UnknownNameError, match="kind"):
        g.add("accumulate", x, kind="total")
    with pytest.raises(UnknownNameError, match="attribute of exp"):
        g.add("exp", x, axis=1)
    with pytest.raises(ShapeError, match="no metadata 'zero'"):
        g.add("metadata", w, field="zero")


def test_get_operator_suggests():
    with pytest.raises(UnknownNameError, match="matmul"):
        get_operator("matmull")


def test_importing_the_ir_loads_neither_torch_nor_tvm():
    code = "import sys, ladder.ir; print(sorted({'torch', 'tvm'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_bits_of_a_known_number_are_computed(dtype: str) -> None:
    tirx = pytest.importorskip("tvm").tirx
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    whole = 2 ** (8 * kind.itemsize)
    for value in (0.0, -0.0, 1.5, -2.0, 0.1):
        for sign in ("uint", "int"):
            bits = f"{sign}{8 * kind.itemsize}"
            found = reinterpreted(bits, tirx.const(value, dtype))
            assert type(found).__name__ == "IntImm"
            assert found.value % whole == np.array(value, kind).view(bits).item() % whole
            assert str(found.ty.dtype) == bits


@pytest.mark.parametrize(("bits", "value"), [(0x3F800000, 1.0), (0xFF800000, -np.inf), (0x80000000, -0.0)])
def test_a_number_of_known_bits_is_computed(bits: int, value: float) -> None:
    tirx = pytest.importorskip("tvm").tirx
    found = reinterpreted("float32", tirx.const(bits, "uint32"))
    assert str(found.ty.dtype) == "float32"
    assert (found.value, np.signbit(found.value)) == (value, np.signbit(value))


def test_addresses_in_another_type_have_no_bits_to_compute() -> None:
    from tvm import ir, tirx

    from ladder.lower.passes import _bits_if_known

    address = ir.PointerType(ir.PrimType("float16"))
    call = ir.Call(ir.Op.get("tirx.reinterpret"), [tirx.Var("words", "uint64")], ret_ty=address)
    assert _bits_if_known(call, every=True) is call


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("function", [operator.add, operator.sub, operator.mul])
def test_known_integers_wrap_around(function, dtype: str) -> None:
    """Also 0 less a number, which TVM does not compute of unsigned ones."""
    from tvm import tirx

    kind, ends = getattr(np, dtype), np.iinfo(dtype)
    numbers = [0, 1, -1, 7, int(ends.min), int(ends.max)]
    for a, b in itertools.product(numbers, numbers):
        found = unsigned(function)(tirx.IntImm(dtype, a), tirx.IntImm(dtype, b))
        with np.errstate(over="ignore"):
            assert (int(found), str(found.ty.dtype)) == (int(function(kind(a), kind(b))), dtype)
