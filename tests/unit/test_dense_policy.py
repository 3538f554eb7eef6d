"""Which products of plain halves are for kernels of ours: as measured on an H200."""

from __future__ import annotations

import pytest

from ladder.ir.gemm import Gemm
from schedules.dense import predict_library, predicted, serves_dense
from targets import get_device

DEVICE = get_device("cuda/sm_90a")

LIBRARY = {(1024, 3072, 768): 10.4, (1576, 3072, 768): 13.9, (512, 4096, 1024): 9.6, (1000, 1024, 256): 3.9}
OURS = {(1024, 3072, 768): 9.4, (1576, 3072, 768): 15.9, (512, 4096, 1024): 8.2, (1000, 1024, 256): 3.1}
"""M, N, K -> microseconds of torch's addmm, and of our fastest kernel."""


def half(n: int, k: int, *epilogue: str) -> Gemm:
    return Gemm(n, k, "float16", "float16", "float16", scale=False, bias=True, epilogue=epilogue)


@pytest.mark.parametrize("point", LIBRARY)
def test_predictions_are_near_measurements(point: tuple[int, int, int]) -> None:
    m, n, k = point
    assert predict_library(DEVICE, half(n, k), m) * 1e6 == pytest.approx(LIBRARY[point], rel=0.15)
    assert predicted(DEVICE, half(n, k), m) * 1e6 == pytest.approx(OURS[point], rel=0.05)


def test_only_functions_and_few_tokens_are_ours() -> None:
    assert serves_dense(DEVICE, half(3072, 768), 4)
    assert not serves_dense(DEVICE, half(3072, 768), 1024)
    assert serves_dense(DEVICE, half(3072, 768, "gelu"), 1024)
    assert not serves_dense(DEVICE, half(3072, 768, "gelu"), 1576)
