"""Codes of evenly spaced values become numbers that arithmetic decodes; all others stay as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ladder
from ladder.lower.build import entry_name
from ladder.lower.gpu.proven import packed_layout
from ladder.runtime.packed import PackedWeight, pack
from schedules.codes import evenly_spaced, looked_up
from schedules.schedule import GpuSchedule
from targets import get_device
from tile_types import QuantizedTensor, TType, get_type, list_types, register_type
from tile_types.codebooks import CODEBOOKS
from tile_types.errors import ArtifactError
from tile_types.forms import affine_forms
from tile_types.held import held


def _table(name: str, bits: int, values: Any, **options: Any) -> TType:
    listed = tuple(float(value) for value in values)
    return TType(name, bits, lambda code, ops: ops.lookup(listed, code), **options)


def _gray(code: int) -> int:
    return code ^ (code >> 1)


def _negabinary(code: int) -> int:
    return sum((-2) ** bit * (code >> bit & 1) for bit in range(8))


ORDERS: dict[str, Callable[[int, int], float]] = {
    "gray": lambda code, top: _gray(code) - top,
    "magnitude": lambda code, top: -(code - top) if code >= top else code,
    "complement": lambda code, top: code - 2 * top + 1 if code >= top else code,
    "negabinary": lambda code, top: _negabinary(code),
    "falling": lambda code, top: 3 - code,
    "halves": lambda code, top: _gray(code) / 2 - 0.75,
}


@pytest.mark.parametrize("bits", range(3, 9))
@pytest.mark.parametrize("order", ORDERS)
def test_evenly_spaced_values_are_numbered(order: str, bits: int) -> None:
    ttype = _table(f"{order}{bits}", bits, [ORDERS[order](c, 1 << (bits - 1)) for c in range(1 << bits)])
    kept = held(ttype)
    codes = np.arange(1 << bits, dtype=np.uint8)
    assert any(form.factor > 0 for form in affine_forms(kept.ttype))
    np.testing.assert_array_equal(kept.ttype.values()[kept.renumbered(codes)], ttype.values())
    np.testing.assert_array_equal(kept.renumbered(torch.from_numpy(codes)).numpy(), kept.renumbered(codes))


@given(st.integers(1, 8), st.data())
def test_any_table_keeps_its_values(bits: int, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(-200, 200), min_size=1 << bits, max_size=1 << bits))
    ttype = _table("drawn", bits, values)
    kept = held(ttype)
    codes = np.arange(1 << bits, dtype=np.uint8)
    np.testing.assert_array_equal(kept.ttype.values()[kept.renumbered(codes)], ttype.values())
    assert (kept.table is None) == (kept.ttype is ttype)


@pytest.mark.parametrize("element", [t.name for t in list_types() if not t.is_block])
def test_types_that_are_listed_keep_their_codes(element: str) -> None:
    assert held(get_type(element)).table is None


def test_what_is_not_even_exact_or_finite_keeps_its_codes() -> None:
    uneven = [
        get_type(name) for name in CODEBOOKS if name != "iq3_s"
    ]  # whose values are 1, 3, 5, ... either sign
    uneven += [_table("nan3", 3, [np.nan, *range(7)]), _table("far3", 3, [0, 1, 2, 3, 4, 5, 9, 7])]
    uneven += [_table("rounded3", 3, [3, 1, 2, 0, 4, 5, 6, 7], exact=False), _table("one3", 3, [2] * 8)]
    for ttype in uneven:
        assert held(ttype).table is None


def test_kernels_read_what_is_packed_and_no_table() -> None:
    ttype = register_type(_table("gray6_held", 6, [_gray(code) - 32 for code in range(64)]))
    for core in ("float16", "bfloat16", "int8"):
        assert evenly_spaced(ttype.name)
        assert not looked_up(ttype.name, core)
    codes = torch.arange(64 * 64).reshape(64, 64).to(torch.uint8) % 64
    weight = QuantizedTensor.from_codes(codes, ttype, (1, 64), scale=torch.ones(64, 1), scale_type="float32")
    gemm = ladder.Matmul(64, 64, ttype).gemm
    packed = pack(gemm, get_device("cuda/sm_90a"), weight)
    layout = packed_layout(held(ttype).ttype, "float16")
    found = layout.unpack(packed.arrays["words"].flatten(), 64, 64).long()
    assert torch.equal(
        torch.tensor(held(ttype).ttype.values())[found], torch.tensor(ttype.values())[codes.long()]
    )


def test_what_was_packed_by_codes_of_their_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels would read other values; a kernel's name tells the two apart too."""
    ttype = register_type(_table("gray4_held", 4, [_gray(code) - 8 for code in range(16)]))
    weight = ladder.quantize(torch.randn(64, 64), ttype.name)
    packed = pack(ladder.Matmul(64, 64, ttype).gemm, get_device("cuda/sm_90a"), weight)
    described = json.loads(packed.describe())
    assert PackedWeight.from_arrays(json.dumps(described), packed.arrays).layout == packed.layout
    with pytest.raises(ArtifactError, match="form 2, but form 3"):
        PackedWeight.from_arrays(json.dumps(described | {"packing": 2}), packed.arrays)
    schedule = GpuSchedule("gemv", 8, 64, 64, stages=2, warps=8)
    name = entry_name(packed.gemm, "cuda/sm_90a", schedule)
    monkeypatch.setattr("ladder.lower.build.is_renumbered", lambda weight: False)
    assert entry_name(packed.gemm, "cuda/sm_90a", schedule) != name
