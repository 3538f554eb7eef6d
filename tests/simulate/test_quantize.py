"""Quantising kernels round rows as defined, executed by the simulator."""

from __future__ import annotations

import numpy as np
import pytest
from problems import SimulatedKernel
from rewriting import argument, remove, rewrite
from test_cuda_quantize_emulated import CASES, NUMPY, _expected

from ladder.lower.cuda.quantize import Quantization, emit
from ladder.simulate import simulate_launch
from targets import get_device


def _row(plan: Quantization, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x and poisoned outputs."""
    rng = np.random.default_rng(3)
    x = (rng.normal(size=(4, k)) * np.array([[1], [1e-3], [1e3], [0]])).astype(NUMPY[plan.source])
    codes = np.full(x.shape, 77, np.uint8).view(NUMPY[plan.activation])
    return x, codes, np.full(_expected(x, plan)[1].shape, np.nan, np.float32)


@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales(case: str) -> None:
    plan, k = CASES[case]
    x, codes, scale = _row(plan, k)
    SimulatedKernel(emit(plan, get_device("cuda/sm_90a"), "simulated"), (1, 2))(x, codes, scale)
    expected, expected_scale = _expected(x, plan)
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(codes.astype(np.float64), expected)


def test_the_barrier_matters() -> None:
    plan, k = CASES["rows longer than the registers"]
    function = rewrite(emit(plan, get_device("cuda/sm_90a"), "simulated"), remove("tirx.cuda.cta_sync", 0))
    result = simulate_launch(function, _row(plan, k), outputs=(1, 2))
    assert "race" in result.kinds()


def test_stores_beyond_the_row() -> None:
    from tvm import tirx

    plan, k = CASES["one warp"]

    def later(e: tirx.Expr) -> tirx.Expr:
        load = e.args[0]
        row, column = load.indices
        from tvm import ir

        return ir.Call(e.op, [load.source.vload([row, column + 8])], e.attrs, e.ty_args, e.span, e.ty)

    function = emit(plan, get_device("cuda/sm_90a"), "simulated")
    changed = rewrite(function, argument("tirx.ptx.st_vec", 0, later))
    result = simulate_launch(changed, _row(plan, k), outputs=(1, 2))
    assert {"out of bounds", "unwritten"} <= result.kinds()
