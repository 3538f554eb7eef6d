"""Operators of ONNX in element types that models seldom have: whole numbers of any width, and text."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import ladder
from ladder.frontend.onnx_check import stored_bytes
from ladder.runtime.onnx_ops.values import array_of, given_value


def ran(
    operator: str, given: list[Any], outputs: int = 1, stored: Any = (), opset: int = 20, **attributes: Any
) -> list[Any]:
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
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=10 if opset < 24 else 14,
    )
    model = onnx.shape_inference.infer_shapes(model)
    found = ladder.compile(model)(**{name: given_value(arrays[name]) for name in free})
    return [
        value if isinstance(value, list) else array_of(value)
        for value in ([found] if outputs == 1 else found)
    ]


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


def test_numbers_beyond_signed_ones_are_positive() -> None:
    """Their bits are computed with as int64: magnitudes, signs and the larger of two were those of int64."""
    x = np.array([(1 << 63) + 5, 1, 0, (1 << 64) - 1], np.uint64)
    assert ran("Abs", [x])[0].tolist() == x.tolist()
    assert ran("Sign", [x])[0].tolist() == [1, 1, 0, 1]
    new, at = np.array([3, 1 << 63, 7, 2], np.uint64), np.arange(4)
    for how, function in (("max", np.maximum), ("min", np.minimum), ("add", np.add)):
        wanted = function(x, new).tolist()
        assert ran("ScatterElements", [x, at, new], reduction=how)[0].tolist() == wanted
        assert ran("ScatterND", [x, at.reshape(4, 1), new], reduction=how)[0].tolist() == wanted


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


KINDS = ("object", "bool", "uint16", "uint64", "complex64", "bfloat16")
NARROW = ("float8_e4m3fn", "float8_e8m0fnu", "int4", "float4_e2m1fn")
"""Element types that models seldom have; an object is text."""


def codes(kind: str, *shape: int) -> np.ndarray:
    """Return elements of a type, which differ from each other where the type has enough."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape) % 7
    if kind == "object":
        return np.vectorize(lambda number: "abcdefg"[: number + 1], otypes=[object])(numbers)
    return (numbers % 3).astype(getattr(ml_dtypes, kind, None) or kind)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    kinds = a.dtype == b.dtype and a.shape == b.shape
    if a.dtype == object:
        return bool(kinds and (a == b).all())
    return kinds and a.tobytes() == np.ascontiguousarray(b).tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_elements_of_any_type_are_moved(kind: str) -> None:
    x, new = codes(kind, 3, 4), codes(kind, 1, 4)[:, ::-1].copy()
    (found,) = ran("ScatterND", [x, np.array([[1]]), new], opset=24)
    assert same(found, np.concatenate([x[:1], new, x[2:]]))
    (found,) = ran("ScatterElements", [x, np.array([[2, 0]]), new[:, :2]], opset=24)
    wanted = x.copy()
    wanted[2, 0], wanted[0, 1] = new[0, 0], new[0, 1]
    assert same(found, wanted)
    (found,) = ran("SplitToSequence", [x], keepdims=1, opset=24)
    assert [same(array_of(part), x[at : at + 1]) for at, part in enumerate(found)] == [True] * 3


@pytest.mark.parametrize("kind", [*KINDS, *NARROW])
def test_rows_and_borders_of_any_type(kind: str) -> None:
    x, new = codes(kind, 3, 4), codes(kind, 1, 4)[:, ::-1].copy()
    (found,) = ran("TensorScatter", [x[None], new[None], np.array([2])], opset=25, axis=1)
    assert same(found[0], np.concatenate([x[:2], new]))
    (found,) = ran("Pad", [x, np.array([0, 1, -1, 0]), new[0, 0, ...]], stored=[1], opset=25)
    assert same(found, np.concatenate([np.full((2, 1), new[0, 0], x.dtype), x[:2]], 1))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_out_is_nothing(kind: str) -> None:
    x = codes(kind, 2, 3)
    zero = np.zeros((), np.uint8).view(x.dtype) if x.dtype.itemsize == 1 else np.zeros((), x.dtype)
    zero = np.array("", object) if kind == "object" else zero
    (found,) = ran("Trilu", [x], opset=24)
    assert same(found, np.where(np.tri(2, 3, -1, dtype=bool), zero, x))
    (found,) = ran("CenterCropPad", [x, np.array([2, 5])], stored=[1], opset=24)
    side = np.full((2, 1), zero, x.dtype)
    assert same(found, np.concatenate([side, x, side], 1))


@pytest.mark.parametrize("kind", ["float6_e2m3fn", "float6_e3m2fn"])
def test_elements_of_six_bits(kind: str) -> None:
    x = np.array([0.125, -1.5, 3.0, 0.3, 100.0], np.float32)
    code = helper.np_dtype_to_tensor_dtype(np.dtype(getattr(ml_dtypes, kind)))
    (found,) = ran("Cast", [x], opset=28, to=code)
    assert same(found, x.astype(getattr(ml_dtypes, kind)))
    (found,) = ran("Cast", [found], opset=28, to=onnx.TensorProto.FLOAT)
    assert np.array_equal(found, x.astype(getattr(ml_dtypes, kind)).astype(np.float32))


def test_text_that_is_not_empty() -> None:
    assert ran("NonZero", [np.array(["", "a", "b"], object)])[0].tolist() == [[1, 2]]


@pytest.mark.parametrize(("code", "octets"), [("INT2", 2), ("UINT4", 3), ("FLOAT6E2M3", 4)])
def test_packed_elements_in_another_file(code: str, octets: int) -> None:
    """Five elements take whole bytes together, however many bits one has."""
    tensor = onnx.TensorProto(data_type=onnx.TensorProto.DataType.Value(code), dims=[5])
    assert stored_bytes(tensor) == octets


@pytest.mark.parametrize(("opset", "mask"), [(7, np.float32), (10, np.bool_), (13, np.bool_)])
def test_masks_of_dropout(opset: int, mask: type) -> None:
    x = np.array([[1.0, -2.0]], np.float32)
    found, kept = ran("Dropout", [x], 2, opset=opset)
    assert np.array_equal(found, x)
    assert kept.dtype == mask
    assert kept.all()


@pytest.mark.parametrize("stored", [(), (1, 2, 3, 4)])
@pytest.mark.parametrize("last", [(1 << 31) - 1, (1 << 63) - 1, -(1 << 63)])
def test_backwards_to_the_end(last: int, stored: tuple[int, ...]) -> None:
    """As version 10 words it and onnxruntime does it: the largest end is no place."""
    x = np.arange(5.0, dtype=np.float32)
    given = [x, *(np.array([number]) for number in (-1, last, 0, -1))]
    assert np.array_equal(ran("Slice", given, stored=stored, opset=10)[0], x[::-1])


@pytest.mark.parametrize("stored", [(), (1, 2, 3, 4)])
@pytest.mark.parametrize("step", [3, 1 << 31, (1 << 63) - 1, -(1 << 63)])
def test_long_steps(step: int, stored: tuple[int, ...]) -> None:
    x = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    given = [x, *(np.array([number]) for number in (0 if step > 0 else 2, 3 if step > 0 else -9, 0, step))]
    assert np.array_equal(ran("Slice", given, stored=stored)[0], x[:1] if step > 0 else x[2:])


@pytest.mark.parametrize("reduction", ["none", "add"])
def test_scatters_of_all(reduction: str) -> None:
    """Indices of no axis: each update is one of the whole."""
    x, new = np.ones((2, 3), np.float32), np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    (found,) = ran("ScatterND", [x, np.zeros((2, 0), np.int64), new], reduction=reduction)
    assert np.array_equal(found, new[1] if reduction == "none" else x + new.sum(0))


@pytest.mark.parametrize("stored", [(), (1, 2, 3, 4)])
@pytest.mark.parametrize("version", [7, 8])
def test_normalised_places(version: int, stored: tuple[int, ...]) -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((2, 3, 1, 4)).astype(np.float32)
    scale, bias, mean = draw.standard_normal((3, 3, 1, 4)).astype(np.float32)
    variance = draw.random((3, 1, 4)).astype(np.float32)
    given = [x, scale, bias, mean, variance]
    (found,) = ran("BatchNormalization", given, stored=stored, opset=version, spatial=0, epsilon=0.5)
    np.testing.assert_allclose(found, (x - mean) / np.sqrt(variance + 0.5) * scale + bias, 1e-5, 1e-5)


def test_no_image_is_convolved() -> None:
    empty, weight = np.zeros((0, 2, 3, 3), np.float32), np.ones((4, 2, 2, 2), np.float32)
    (found,) = ran("DeformConv", [empty, weight, np.zeros((0, 8, 2, 2), np.float32)], kernel_shape=[2, 2])
    assert found.shape == (0, 4, 2, 2)


def test_images_are_convolved_at_no_place() -> None:
    """Offsets that are no numbers or infinite lie outside of the image, where there are zeros."""
    offsets = np.zeros((1, 2, 1, 3), np.float32)
    offsets[0, 0, 0] = np.nan, np.inf, -np.inf
    (found,) = ran(
        "DeformConv", [np.ones((1, 1, 1, 3), np.float32), np.ones((1, 1, 1, 1), np.float32), offsets]
    )
    assert found.tolist() == [[[[0, 0, 0]]]]


def test_chances_of_bernoulli_are_bounded() -> None:
    given = np.array([np.nan, -2, 0, 1, 7, np.inf, -np.inf], np.float32)
    assert ran("Bernoulli", [given])[0].tolist() == [0, 0, 0, 1, 1, 1, 0]


def test_numbers_are_written_as_onnxruntime_does() -> None:
    """Conditions as numbers, which are read again; eight digits; the standard's names of infinities."""
    text = onnx.TensorProto.STRING
    given = np.array([0.1, 1e10, 123456789, 1.23456789, -0.0, np.nan, np.inf, -np.inf])
    wanted = ["0.1", "1e+10", "1.2345679e+08", "1.2345679", "-0", "NaN", "INF", "-INF"]
    for dtype in (np.float32, np.float64):
        assert ran("Cast", [given.astype(dtype)], to=text)[0].tolist() == wanted
    assert ran("Cast", [np.array([0.1], np.float16)], to=text)[0].tolist() == ["0.099975586"]
    assert ran("Cast", [np.array([True, False])], to=text)[0].tolist() == ["1", "0"]
    assert ran("Cast", [np.zeros((0, 2), np.float32)], to=text)[0].shape == (0, 2)
    assert ran("Cast", [np.array(["1", "0"], object)], to=onnx.TensorProto.BOOL)[0].tolist() == [True, False]


def test_whole_numbers_are_read_to_the_last_digit() -> None:
    large = [2**53 + 1, -(2**63), 2**63 - 1, 7]
    texts = np.array(list(map(str, large)), object)
    assert ran("Cast", [texts], to=onnx.TensorProto.INT64)[0].tolist() == large
    (found,) = ran("Cast", [np.array([str(2**64 - 1), "1e3"], object)], to=onnx.TensorProto.UINT64)
    assert found.tolist() == [2**64 - 1, 1000]


@pytest.mark.parametrize("factor", [np.inf, np.nan])
def test_scales_that_are_no_extents_are_one_error(factor: float) -> None:
    with pytest.raises(ladder.LadderError, match="Resize"):
        ran(
            "Resize",
            [np.ones((1, 2), np.float32), np.zeros(0, np.float32), np.array([1, factor], np.float32)],
        )


@pytest.mark.parametrize("shape", [[0, 3, -1, 8], [0, 0, -1, 8], [0, -1, 8], [-1, 3, 4, 8], [0, 0, 0, -1]])
@pytest.mark.parametrize("kind", [np.uint8, np.float32, object])
def test_no_elements_are_reshaped_as_some_would_be(shape: list[int], kind: Any) -> None:
    wanted = np.zeros((1, 3, 32, 1)).reshape(
        [(1, 3, 32, 1)[at] if n == 0 else n for at, n in enumerate(shape)]
    )
    (found,) = ran("Reshape", [np.zeros((0, 3, 32, 1), kind), np.array(shape)])
    assert found.shape == (0, *wanted.shape[1:])
