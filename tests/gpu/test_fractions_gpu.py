"""Fractions that change from call to call, on a GPU: plans and recorded graphs of launches take them anew."""

from __future__ import annotations

from typing import Any

import pytest

import ladder

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]


def program(x: Any, t: float) -> Any:
    return (x * t).float(), (t - x).float(), (x / t).float(), (t / x).float(), (x + (1 - t)).float()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32"])
def test_every_call_takes_its_own(dtype: str) -> None:
    torch.manual_seed(0)
    x = (torch.randn(65, 33, device="cuda") * 50 + 120).to(getattr(torch, dtype))
    fast = ladder.compile(program)
    rounding = {"float16": 2e-3, "bfloat16": 1.6e-2}.get(dtype, 1e-6)
    with torch.no_grad():
        for call in range(14):
            t = 0.37 + 0.11 * call
            for got, wanted in zip(fast(x, t), program(x, t), strict=True):
                assert torch.allclose(got, wanted, rtol=rounding, atol=0)
    assert fast.calls["recorded"] == 3
