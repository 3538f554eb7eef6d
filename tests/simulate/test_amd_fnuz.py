"""OCP fp8 codes as CDNA3 reads them: half the value, no negative zero, NaN for what is not finite."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from amd_kernels import WAVE, compute
from tvm.script import tirx as T

import ladder
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


@pytest.mark.parametrize("name", [*TYPES, "special3_of_fnuz"])
def test_weights_that_are_not_finite_make_their_rows_nan(name: str) -> None:
    """Their codes were read as numbers."""
    values = (0.0, 1.0, -1.0, 2.0, float("nan"), float("inf"), -0.0, -2.0)
    ttype = ladder.TType("special3_of_fnuz", 3, lambda code, ops: ops.lookup(values, code))
    weight = ladder.register_type(ttype) if name == ttype.name else ladder.get_type(name)
    held = weight.values()
    codes = torch.full((20, 64), int(np.flatnonzero(held == 1)[0]), dtype=torch.uint8)
    special = np.flatnonzero(~np.isfinite(held))[:8].tolist()
    for row, code in enumerate(special):
        codes[row, 9 * row] = code
    given = ladder.QuantizedTensor.from_codes(
        codes, weight, (1, 64), scale=torch.ones(20, 1), scale_type="float32"
    )
    op = ladder.Matmul(20, 64, weight, "fp8_e5m2", target="rocm/gfx942")
    for rows in (1, 33):
        x = torch.ones(rows, 64).to(torch.float8_e5m2)
        result = ladder.simulate(op, x, op.pack(given, "cpu"), token_scale=torch.ones(rows))
        assert not result.findings, result.report()
        y = np.asarray(result.y, np.float32)
        assert np.isnan(y[:, : len(special)]).all()
        assert (y[:, len(special) :] == 64).all()
