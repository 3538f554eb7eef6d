"""One decode expression gives equal values in numpy, torch and compiled TIR, for every code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tile_types import NumpyOps, TirOps, TorchOps, TType, get_type, list_types

ELEMENTS = [t.name for t in list_types() if not t.is_block and t.elem_bits <= 16]
NAMES = [*ELEMENTS, "fp5_e3m1", "fp8_e7m0", "fp3_e1m1"]
WIDE = ["float32", "tfloat32"]


def expression(code: Any, ops: Any) -> Any:
    """Use every operation."""
    doubled = ops.bitcast(ops.cast(code, "float32") * ops.constant(2.0, "float32"), "uint32")
    real = ops.bitcast(doubled, "float32") + ops.exp2(ops.cast(code & 3, "float32"))
    entry = ops.lookup((0.5, -1.5, 4.0, 8.0, 16.0), ops.select(code < 5, code, 4))
    return ops.select(code == 3, 100.0, real * entry) * ops.select(code >= 16, -1.0, 1.0)


EXPRESSION = TType("expression_of_tests", 5, expression)


def expected_of_expression() -> np.ndarray:
    code = np.arange(32)
    entry = np.array([0.5, -1.5, 4.0, 8.0, 16.0])[np.minimum(code, 4)]
    return np.where(code == 3, 100.0, (2.0 * code + 2.0 ** (code & 3)) * entry) * np.where(code >= 16, -1, 1)


def types() -> list[TType]:
    return [get_type(name) for name in NAMES] + [EXPRESSION]


def test_numpy_evaluates_every_operation() -> None:
    np.testing.assert_array_equal(EXPRESSION.values(), expected_of_expression())


@pytest.mark.parametrize("name", [*NAMES, *WIDE])
def test_torch_equals_numpy(name: str) -> None:
    torch = pytest.importorskip("torch")
    ttype = get_type(name)
    codes = ttype.probe_codes()
    got = ttype.evaluate(torch.from_numpy(codes.astype(np.int64)), TorchOps()).double().numpy()
    np.testing.assert_array_equal(got, ttype.decode_codes(codes))


def test_torch_evaluates_every_operation() -> None:
    torch = pytest.importorskip("torch")
    got = EXPRESSION.evaluate(torch.arange(32), TorchOps())
    np.testing.assert_array_equal(got.double().numpy(), expected_of_expression())


@pytest.fixture(scope="module")
def compiled() -> Any:
    """Compile one loop per type for the host."""
    tvm = pytest.importorskip("tvm")
    functions = {f"decode_{t.name}": _loop(t) for t in types()}
    return tvm.compile(tvm.IRModule(functions), target="llvm")


def _loop(ttype: TType) -> Any:
    from tvm import tirx
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as builder

    count, name = 1 << ttype.elem_bits, f"decode_{ttype.name}"
    with IRBuilder() as ib, builder.prim_func():
        builder.func_name(name)
        source = builder.arg("codes", builder.buffer((count,), "uint32"))
        target = builder.arg("values", builder.buffer((count,), "float32"))
        with builder.serial(0, count) as i:
            value = ttype.evaluate(source[i], TirOps())
            builder.buffer_store(target, tirx.Cast("float32", value), [i])
    return ib.get().with_attr("global_symbol", name)


@pytest.mark.parametrize("name", [*NAMES, EXPRESSION.name])
def test_compiled_tir_equals_numpy(compiled: Any, name: str) -> None:
    import tvm

    ttype = EXPRESSION if name == EXPRESSION.name else get_type(name)
    codes = tvm.runtime.tensor(np.arange(1 << ttype.elem_bits, dtype=np.uint32))
    values = tvm.runtime.tensor(np.zeros(1 << ttype.elem_bits, np.float32))
    compiled[f"decode_{name}"](codes, values)
    with np.errstate(invalid="ignore"):
        got = values.numpy().astype(np.float64)
    np.testing.assert_array_equal(got, ttype.values())


@pytest.mark.parametrize("ttype", [*types(), *map(get_type, WIDE)], ids=str)
def test_kernels_read_expressions_that_mean_the_same(ttype: TType) -> None:
    """Numpy says of TIR what the compiled loops of above compute: no table takes the expression's place."""
    pytest.importorskip("tvm")
    assert ttype.kernel_table == ()


def test_integers_wrap_alike() -> None:
    torch = pytest.importorskip("torch")
    codes = np.array([0, 1, 200, 255], np.uint32)
    for dtype in ("uint8", "int8", "int32", "uint32"):
        ours = NumpyOps().cast(codes - np.uint32(1), dtype).astype(np.int64)
        theirs = TorchOps().cast(torch.from_numpy(codes.astype(np.int64)) - 1, dtype).to(torch.int64)
        np.testing.assert_array_equal(ours, theirs.numpy())


def test_constants_are_typed() -> None:
    torch = pytest.importorskip("torch")
    assert NumpyOps().constant(1.5, "float32").dtype == np.float32
    assert TorchOps().constant(1.5, "float32").dtype == torch.float32
    assert TorchOps().constant(3, "uint32").dtype == torch.int64
