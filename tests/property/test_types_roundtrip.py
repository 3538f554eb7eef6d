"""Properties of packing, encoding and quantization over random shapes, types and values."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tile_types import QuantizedTensor, get_type, list_types, pack_codes, quantize, unpack_codes
from tile_types.errors import ValueRangeError
from tile_types.packing import storage_bytes

SMALL = [t.name for t in list_types() if not t.is_block and t.elem_bits <= 8]
SIGNED = [name for name in SMALL if get_type(name).minimum < 0 < get_type(name).maximum]
REAL = st.floats(-1e4, 1e4, width=32)
MATRIX = hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 41)), elements=REAL)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 8), st.integers(0, 3), st.integers(1, 67))
def test_unpack_inverts_pack(data: st.DataObject, bits: int, rows: int, count: int) -> None:
    codes = data.draw(hnp.arrays(np.uint8, (rows, count), elements=st.integers(0, 2**bits - 1)))
    storage = pack_codes(codes, bits)
    assert storage.nbytes == rows * storage_bytes(count, bits)
    np.testing.assert_array_equal(unpack_codes(storage, bits, count), codes)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*SMALL, "fp5_e3m1", "fp7_e2m4"]), st.floats(-1e5, 1e5))
def test_encode_finds_a_nearest_value(name: str, value: float) -> None:
    ttype = get_type(name)
    grid = ttype.probe_values()
    got = float(ttype.decode_codes(ttype.encode(np.array([value])))[0])
    assert abs(got - value) == np.abs(grid - value).min()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(SMALL), st.floats(-100, 100), st.floats(-100, 100))
def test_encode_is_monotone(name: str, a: float, b: float) -> None:
    ttype = get_type(name)
    low, high = ttype.decode_codes(ttype.encode(np.sort([a, b])))
    assert low <= high


@settings(max_examples=150, deadline=None)
@given(MATRIX, st.sampled_from(SIGNED), st.integers(1, 41))
def test_error_is_at_most_half_a_step(values: np.ndarray, name: str, group: int) -> None:
    quantized = quantize(values, name, group_size=min(group, values.shape[1]), scale_type="float32")
    scale = np.repeat(quantized.scale.astype(np.float64), quantized.group_size, 1)[:, : values.shape[1]]
    grid = np.unique(get_type(name).probe_values())
    units = values / scale
    index = np.clip(np.searchsorted(grid, units, side="right") - 1, 0, len(grid) - 2)
    step = (grid[index + 1] - grid[index]) * scale
    inside = (units >= grid[0]) & (units <= grid[-1])
    error = np.abs(quantized.dequantize() - values)
    assert (error[inside] <= step[inside] / 2 * (1 + 1e-12)).all()


@settings(max_examples=100, deadline=None)
@given(MATRIX, st.integers(1, 8), st.integers(1, 41), st.sampled_from(["integer", "float"]))
def test_zero_points_bound_the_error(values: np.ndarray, bits: int, group: int, zero: str) -> None:
    quantized = quantize(
        values, f"uint{bits}", group_size=min(group, values.shape[1]), zero=zero, scale_type="float32"
    )
    scale = np.repeat(quantized.scale.astype(np.float64), quantized.group_size, 1)[:, : values.shape[1]]
    # One rounding of the code and, at the ends of the range, one of the zero point: a step in all.
    assert (np.abs(quantized.dequantize() - values) <= scale * (1 + 1e-4)).all()


@settings(max_examples=60, deadline=None)
@given(MATRIX, st.sampled_from([t.name for t in list_types() if t.is_block]))
def test_block_types_give_finite_values_and_keep_signs(values: np.ndarray, name: str) -> None:
    try:
        restored = quantize(values, name).dequantize()
    except ValueRangeError:  # all would become 0
        assert np.abs(values).max() < np.finfo(np.float32).tiny
        return
    assert np.isfinite(restored).all()
    assert (restored * values >= 0).all()


def encode_again(once: QuantizedTensor, values: np.ndarray) -> np.ndarray:
    """Encode with the scales and zero points of an earlier quantization."""
    columns = values.shape[1]
    units = values / np.repeat(once.scale.astype(np.float64), once.group_size, 1)[:, :columns]
    if once.zero is not None:
        units = units + np.repeat(once.zero.astype(np.float64), once.group_size, 1)[:, :columns]
    return once.ttype.encode(units)


@settings(max_examples=60, deadline=None)
@given(MATRIX, st.sampled_from(["int4", "int8", "uint4_g8_zi"]))
def test_quantizing_twice_changes_nothing_with_float32_scales(values: np.ndarray, name: str) -> None:
    element = get_type(name).element_type
    options = {"zero": "integer"} if element.minimum >= 0 else {}
    once = quantize(values, element, group_size=min(8, values.shape[1]), scale_type="float32", **options)
    restored = once.dequantize()
    again = encode_again(once, restored)
    np.testing.assert_array_equal(again, once.codes())
