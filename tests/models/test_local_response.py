"""Local response normalization: averages of volumes and the power 3/4 in kernels, with eager's values."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional

import ladder
from ladder.capture.captured import Captured

Function = Callable[[torch.Tensor], torch.Tensor]
NORM: Function = partial(functional.local_response_norm, size=5, alpha=1e-4, beta=0.75, k=1.0)
SPECIAL = (0.0, -0.0, 1.0, -1.0, 16.0, 1e-45, 1e-38, 3.4e38, float("inf"), -float("inf"), float("nan"))


def kinds(fast: Captured) -> set[str]:
    return {row[0] for built in fast.models for row in built.plan.table()}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_norm_is_computed_by_kernels(layout: torch.memory_format) -> None:
    fast = ladder.compile(lambda x: NORM(x.relu()))
    for seed, batch in enumerate((1, 1, 3, 2)):
        x = torch.randn(batch, 12, 9, 7, generator=torch.Generator().manual_seed(seed))
        x = x.contiguous(memory_format=layout)
        torch.testing.assert_close(fast(x), NORM(x.relu()), rtol=1e-6, atol=1e-6)
    assert kinds(fast) <= {"chain", "view", "rows"}


@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (partial(functional.avg_pool3d, kernel_size=2), (2, 3, 6, 5, 4)),
        (partial(functional.avg_pool3d, kernel_size=3, stride=1, padding=1), (2, 3, 6, 5, 4)),
        (partial(functional.avg_pool3d, kernel_size=(1, 3, 2), stride=(2, 1, 3)), (2, 3, 6, 5, 4)),
        (partial(functional.avg_pool3d, kernel_size=(2, 1, 2), padding=(1, 0, 1)), (3, 6, 5, 4)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_averages_of_volumes_are_kernels(pool: Function, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    fast = ladder.compile(pool)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for _ in range(3):
        torch.testing.assert_close(fast(x), pool(x))
    assert kinds(fast) <= {"chain", "view", "rows"}


@pytest.mark.parametrize(
    "pool",
    [
        partial(functional.avg_pool3d, kernel_size=2, ceil_mode=True),
        partial(functional.avg_pool3d, kernel_size=2, padding=1, count_include_pad=False),
        partial(functional.avg_pool3d, kernel_size=2, divisor_override=3),
    ],
)
def test_other_averages_stay_calls(pool: Function) -> None:
    fast = ladder.compile(pool)
    x = torch.randn(2, 3, 5, 7, 5, generator=torch.Generator().manual_seed(2))
    for _ in range(3):
        torch.testing.assert_close(fast(x), pool(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_special_values_of_three_quarters(dtype: torch.dtype) -> None:
    x = torch.tensor(SPECIAL * 3, dtype=torch.float64).to(dtype)
    fast = ladder.compile(lambda x: x**0.75)
    for _ in range(3):
        found, expected = fast(x), x**0.75
        torch.testing.assert_close(found, expected, equal_nan=True)
        zero = expected == 0
        assert torch.equal(found[zero].signbit(), expected[zero].signbit())
