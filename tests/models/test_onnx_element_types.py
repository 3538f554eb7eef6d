"""Operators of ONNX in element types that models seldom have: whole numbers of any width, and text."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import ladder
from ladder.runtime.onnx_ops.values import array_of, given_value


def ran(operator: str, given: list[Any], outputs: int = 1, stored: Any = (), **attributes: Any) -> list[Any]:
    """Return the results of one node as arrays; operands whose places are in ``stored`` are initializers."""
    arrays = {f"x{at}": np.asarray(array) for at, array in enumerate(given)}
    node = helper.make_node(operator, list(arrays), [f"y{at}" for at in range(outputs)], **attributes)
    kinds = {
        name: onnx.TensorProto.STRING
        if array.dtype == object
        else helper.np_dtype_to_tensor_dtype(array.dtype)
        for name, array in arrays.items()
    }
    inits = [numpy_helper.from_array(arrays[f"x{at}"], f"x{at}") for at in stored]
    free = [name for name in arrays if name not in {init.name for init in inits}]
    infos = [helper.make_tensor_value_info(name, kinds[name], arrays[name].shape) for name in free]
    results = [helper.make_empty_tensor_value_info(name) for name in node.output]
    model = helper.make_model(
        helper.make_graph([node], "one", infos, results, inits),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    model = onnx.shape_inference.infer_shapes(model)
    found = ladder.compile(model)(**{name: given_value(arrays[name]) for name in free})
    return [array_of(value) for value in ([found] if outputs == 1 else found)]


@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize("order", [0, 1])
def test_different_words(order: int, axis: int | None) -> None:
    x = np.array([["b", "a", "b"], ["", "ü", ""]], object)
    chosen = {} if axis is None else {"axis": axis}
    words, first, inverse, counts = ran("Unique", [x], 4, sorted=order, **chosen)
    flat = x.reshape(-1) if axis is None else x.T
    rows = [tuple(np.atleast_1d(row)) for row in flat]
    wanted = sorted(set(rows)) if order else list(dict.fromkeys(rows))
    found = [tuple(np.atleast_1d(row)) for row in (words if axis is None else words.T)]
    assert found == wanted
    assert [rows[at] for at in first] == wanted
    assert [wanted[at] for at in inverse] == rows
    assert counts.tolist() == [rows.count(row) for row in wanted]


def test_different_numbers_beyond_signed_ones() -> None:
    x = np.array([1 << 63, 3, 1 << 63], np.uint64)
    values, *_, counts = ran("Unique", [x], 4)
    assert values.dtype == np.uint64
    assert (values.tolist(), counts.tolist()) == ([3, 1 << 63], [1, 2])


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.uint64, np.bool_])
@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_borders_of_whole_numbers(kind: Any, mode: str) -> None:
    x = np.array([[1, 0, 7], [2, 5, 0]], kind)
    (found,) = ran("Pad", [x, np.array([0, 1, 1, 2])], stored=[1], mode=mode)
    assert found.dtype == x.dtype
    assert np.array_equal(found, np.pad(x, [(0, 1), (1, 2)], mode))


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_means_of_whole_numbers_are_not_those_of_float32(kind: Any) -> None:
    x = np.array([[2**31 - 1, -3], [1, 1]], kind)
    assert ran("ReduceMean", [x, np.array([1])], stored=[1], keepdims=0)[0].tolist() == [(2**31 - 4) // 2, 1]


def test_fractions_multiply_products_of_whole_numbers() -> None:
    a, b, c = np.array([[4, 2]], np.int64), np.array([[3], [1]], np.int64), np.array([[6]], np.int64)
    assert ran("Gemm", [a, b, c], stored=[1], alpha=0.5, beta=1.5)[0].tolist() == [[16]]


@pytest.mark.parametrize(("given", "wanted"), [({"noop_with_empty_axes": 1}, [0, 2]), ({"keepdims": 0}, 2)])
def test_logarithms_of_whole_numbers_are_whole(given: dict[str, int], wanted: Any) -> None:
    (found,) = ran("ReduceLogSum", [np.array([1, 9], np.int32)], **given)
    assert found.dtype == np.int32
    assert found.tolist() == wanted
