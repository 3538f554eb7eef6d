"""`QuantizedTensor`: consistency, dequantize by hand, moving and saving."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from tile_types import QuantizedTensor, get_type, quantize
from tile_types.errors import ArtifactError, DTypeError, ShapeError, UnknownNameError

WEIGHTS = np.random.default_rng(7).standard_normal((6, 70)).astype(np.float32)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("int4", {"group_size": 32}),
    ("int3", {}),
    ("uint4", {"group_size": 16, "zero": "integer"}),
    ("uint2", {"group_size": 16, "zero": "float", "scale_type": "bfloat16"}),
    ("mxfp4", {}),
    ("nvfp4", {}),
    ("fp8_e4m3", {"block": (4, 32)}),
    ("float16", {}),
    ("tfloat32", {}),
]


def pickled(value: QuantizedTensor) -> QuantizedTensor:
    return pickle.loads(pickle.dumps(value))


def by_hand() -> QuantizedTensor:
    """Two rows of three uint4 codes in groups of two."""
    codes = np.array([[1, 2, 3], [4, 5, 15]], np.uint8)
    scale = np.array([[0.5, 2.0], [1.0, 4.0]], np.float16)
    zero = np.array([[1, 0], [8, 15]], np.uint8)
    return QuantizedTensor.from_codes(
        codes,
        "uint4",
        (1, 2),
        scale=scale,
        zero=zero,
        zero_kind="integer",
        scale_type="float16",
        tensor_scale=2.0,
    )


def test_dequantize_by_hand() -> None:
    quantized = by_hand()
    expected = 2.0 * np.array([[0.0, 0.5, 6.0], [-4.0, -3.0, 0.0]])
    np.testing.assert_array_equal(quantized.dequantize(), expected)
    np.testing.assert_array_equal(quantized.dequantize("float32"), expected.astype(np.float32))
    assert quantized.dequantize("float32").dtype == np.float32
    assert quantized.dequantize(np.float16).dtype == np.float16
    assert quantized.storage.tolist() == [[0x21, 0x03], [0x54, 0x0F]]
    assert quantized.nbytes == 4 + 8 + 4 + 4
    assert quantized.group_size == 2


def test_blocks_of_rows_share_a_scale() -> None:
    codes = np.arange(12, dtype=np.uint8).reshape(4, 3) % 8
    scale = np.array([[1.0, 10.0], [100.0, 1000.0]], np.float32)
    quantized = QuantizedTensor.from_codes(codes, "uint4", (3, 2), scale=scale, scale_type="float32")
    rows, columns = np.arange(4)[:, None] // 3, np.arange(3)[None, :] // 2
    np.testing.assert_array_equal(quantized.dequantize(), codes * scale[rows, columns])


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_saving_and_moving_keep_every_bit(name: str, options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    original = quantize(WEIGHTS, name, **options)
    there = original.to("cpu")
    assert isinstance(there.storage, torch.Tensor)
    for other in (there, there.numpy(), *map(pickled, (original, there)), copy.deepcopy(there)):
        np.testing.assert_array_equal(other.numpy().dequantize(), original.dequantize())
        assert other.nbytes == original.nbytes
    for source in (original, there):
        saved = source.to_dict()
        metadata = json.loads(json.dumps(saved["metadata"]))
        loaded = QuantizedTensor.from_dict({"arrays": saved["arrays"], "metadata": metadata})
        np.testing.assert_array_equal(loaded.numpy().dequantize(), original.dequantize())
        assert (loaded.shape, loaded.block, loaded.ttype) == (original.shape, original.block, original.ttype)


def test_torch_dtypes_are_accepted() -> None:
    torch = pytest.importorskip("torch")
    quantized = by_hand().to("cpu")
    assert quantized.dequantize(torch.bfloat16).dtype == torch.bfloat16
    assert quantized.codes().dtype == torch.uint8


@pytest.mark.parametrize(
    "change",
    [
        {"scale": np.ones((2, 3), np.float16)},
        {"zero": np.ones((1, 2), np.uint8)},
        {"zero": None},
        {"zero_kind": "none"},
        {"shape": (2, 5)},
        {"block": (1, 3)},
        {"ttype": get_type("mxfp4")},
    ],
    ids=str,
)
def test_inconsistent_fields_are_refused(change: dict[str, Any]) -> None:
    from dataclasses import replace

    with pytest.raises(ShapeError):
        replace(by_hand(), **change)


def test_unknown_dtype() -> None:
    with pytest.raises(UnknownNameError, match="float32"):
        by_hand().dequantize("float23")


@pytest.mark.parametrize("missing", ["ttype", "shape", "block", "version", "scale_type"])
def test_damaged_metadata(missing: str) -> None:
    saved = by_hand().to_dict()
    del saved["metadata"][missing]
    with pytest.raises(ArtifactError, match="export it again"):
        QuantizedTensor.from_dict(saved)


def test_truncated_arrays_and_other_versions() -> None:
    saved = by_hand().to_dict()
    truncated = {**saved, "arrays": {**saved["arrays"], "storage": saved["arrays"]["storage"][:1]}}
    with pytest.raises(ArtifactError, match="storage"):
        QuantizedTensor.from_dict(truncated)
    unscaled = {name: array for name, array in saved["arrays"].items() if name != "scale"}
    with pytest.raises(ArtifactError, match="its scales, of type float16, are missing"):
        QuantizedTensor.from_dict({**saved, "arrays": unscaled})
    with pytest.raises(ArtifactError, match="version 99"):
        QuantizedTensor.from_dict({**saved, "metadata": {**saved["metadata"], "version": 99}})
    with pytest.raises(ArtifactError):
        QuantizedTensor.from_dict({})


CODES = np.arange(16, dtype=np.uint8).reshape(4, 4)
HALVES = np.full((4, 2), 0.5, np.float32)


@pytest.mark.parametrize(("name", "bits"), [("e8m0", 126), ("fp8_e4m3", 0x30), ("fp8_e5m2", 0x38)])
@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_bits_of_scales_are_numbers_of_their_type(name: str, bits: int, kind: Any) -> None:
    given = QuantizedTensor.from_codes(
        kind(CODES), "uint4", (1, 2), scale=kind(np.full((4, 2), bits, np.uint8)), scale_type=name
    )
    for found in (given, QuantizedTensor.from_dict(given.to_dict()), pickled(given)):
        np.testing.assert_array_equal(found.dequantize(), CODES * 0.5)


def test_scales_name_their_own_type() -> None:
    given = QuantizedTensor.from_codes(CODES, "uint4", (1, 2), scale=HALVES)
    assert given.scale_type == "float32"
    assert QuantizedTensor.from_dict(given.to_dict()).scale_type == "float32"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"scale": HALVES, "scale_type": "float16"}, "scales are float32, but scale_type is 'float16'"),
        ({"scale": HALVES, "scale_type": "e8m0"}, "scales are float32, but scale_type is 'e8m0'"),
        ({"scale": CODES[:, :2]}, "scales are real numbers, got uint8"),
        ({"scale": HALVES, "zero": CODES[:, :2].astype(np.int64), "zero_kind": "integer"}, "not int64"),
        ({"scale": HALVES, "zero": HALVES.astype(np.float16), "zero_kind": "float"}, "not float16"),
    ],
)
def test_arrays_of_other_types_are_refused_where_they_are_given(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(DTypeError, match=says):
        QuantizedTensor.from_codes(CODES, "uint4", (1, 2), **fields)
