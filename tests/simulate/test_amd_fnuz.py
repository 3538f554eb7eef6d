"""OCP fp8 codes as CDNA3 reads them: half the value, no negative zero, NaN for what is not finite."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from amd_kernels import WAVE, compute
from tvm.script import tirx as T

from ladder.lower.rocm.decode import to_fnuz, without_negative_zero

TYPES = {
    "fp8_e4m3": (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz),
    "fp8_e5m2": (ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz),
}
CODES = np.arange(256, dtype=np.uint8)


def _four(lane: Any) -> Any:
    """Return codes 4 * lane to 4 * lane + 3: the lanes of a wave hold all."""
    return T.Cast("uint32", lane) * T.uint32(0x04040404) + T.uint32(0x03020100)


@pytest.mark.parametrize("core", TYPES)
def test_every_code_becomes_half_its_value(core: str) -> None:
    ocp, fnuz = (CODES.view(dtype).astype(np.float64) for dtype in TYPES[core])
    got = compute("gfx942", lambda lane: to_fnuz(_four(lane), core), "uint32").view(np.uint8)
    assert len(got) == 4 * WAVE
    expected = np.where(np.isfinite(ocp), ocp / 2, np.nan)
    assert np.array_equal(fnuz[got], expected, equal_nan=True)
    finite = compute("gfx942", lambda lane: without_negative_zero(_four(lane)), "uint32").view(np.uint8)
    assert np.array_equal(fnuz[finite][np.isfinite(ocp)], ocp[np.isfinite(ocp)] / 2)
