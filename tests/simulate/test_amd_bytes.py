"""Conversions of 8-bit floats on AMD GPUs, as both simulators have them, take and fill one half of a word."""

from __future__ import annotations

import numpy as np
import pytest

from ladder.simulate.amd.arithmetic import from_bytes, to_bytes
from ladder.simulate.amd.mfma import FNUZ, OCP
from ladder.simulate.values import NUMPY


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("dtype", [*FNUZ.values(), *OCP.values()])
def test_conversions_take_and_fill_one_half(dtype: str, upper: int) -> None:
    low = np.arange(256, dtype=np.uint32)
    half, old = low | low[::-1] << np.uint32(8), np.full(256, 0x5A3CA5C3, np.uint32)
    shift = np.uint32(16 * upper)
    given = half << shift | old & ~(np.uint32(0xFFFF) << shift)
    pair = from_bytes(given, np.uint32(upper), NUMPY[dtype])
    assert np.array_equal(
        pair[:, 0], low.astype(np.uint8).view(NUMPY[dtype]).astype(np.float32), equal_nan=True
    )
    assert np.array_equal(pair[:, 1], pair[::-1, 0], equal_nan=True)
    found = to_bytes(pair[:, 0], pair[:, 1], old, np.uint32(upper), NUMPY[dtype])
    numbers = ~np.isnan(pair).any(axis=1)
    assert numbers.sum() > 200
    assert np.array_equal(found[numbers], given[numbers])
