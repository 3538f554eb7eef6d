"""Pools whose windows reach over an image's edge: counts that round up, and means of what lies inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chain_targets import run_chain
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import ladder
from ladder.frontend.torch_fx import import_fx
from ladder.rewrite import simplify
from ladder.runtime.model.prepared import prepare
from targets import get_device

CASES: dict[str, Any] = {
    "rounded up": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
    "rounded up within a border": lambda x: F.max_pool2d(x, 2, 2, 1, ceil_mode=True),
    "no window beyond the image": lambda x: F.max_pool2d(x, 2, 3, 1, ceil_mode=True),
    "gaps": lambda x: F.max_pool2d(x, 3, (2, 3), 1, 2, ceil_mode=True),
    "mean of what is inside": lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    "mean, rounded up": lambda x: F.avg_pool2d(x, (3, 2), 2, 1, True),
    "mean, rounded up, of what is inside": lambda x: F.avg_pool2d(x, 3, 2, 1, True, False),
    "divisor": lambda x: F.avg_pool2d(x, 2, 2, 1, True, True, 3),
    "volumes": lambda x: F.avg_pool3d(x[:, None], 2, 2, 1, True, False),
    "one image": lambda x: F.avg_pool2d(x[0], 3, 2, 1, True, False),
}


def special(*shape: int) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(shape)
    x.view(-1)[[1, 40, 77]] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    return x


@pytest.mark.parametrize("size", [(7, 8), (6, 5), (2, 2)])
@pytest.mark.parametrize("name", CASES)
def test_pools_are_kernels_of_ours_on_cpus(name: str, size: tuple[int, int]) -> None:
    if name == "gaps" and size == (2, 2):
        pytest.skip("windows of five elements, an image of four")
    x, pool = special(2, 24, *size), CASES[name]

    def program(x: Tensor) -> Tensor:
        return pool(x * 2) + 1  # type: ignore[no-any-return]

    fast = ladder.compile(program)
    torch.testing.assert_close(fast(x), program(x), rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(fast(x), program(x), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert "library" not in fast.plan()


@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
@pytest.mark.parametrize("name", ["rounded up", "mean, rounded up, of what is inside"])
def test_pools_on_gpus(name: str, target: str) -> None:
    x, pool = special(2, 8, 7, 8), CASES[name]
    graph = import_fx(make_fx(pool)(x), [x]).graph
    (found,) = run_chain(simplify(graph, get_device(target)), [x], target)
    torch.testing.assert_close(found, pool(x), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_positions_and_open_sizes_stay_with_torch() -> None:
    x = special(2, 24, 7, 8)
    fast = ladder.compile(lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True, return_indices=True))
    found, expected = fast(x), F.max_pool2d(x, 3, 2, ceil_mode=True, return_indices=True)
    torch.testing.assert_close(found, expected, equal_nan=True)
    wide = ladder.compile(lambda x: F.avg_pool2d(x + 1, 3, 2, 1, True, False))
    for size in (7, 9, 12, 5, 6):
        x = special(2, 24, size, size + 1)
        expected = F.avg_pool2d(x + 1, 3, 2, 1, True, False)
        torch.testing.assert_close(wide(x), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("window", "parts"), [(3, 1), (5, 2)])
def test_one_step_is_made_again_for_each_small_window_on_gpus(window: int, parts: int) -> None:
    """So nothing is stored for windows of nine elements; those of 25 read what is stored."""
    x = special(2, 8, 24, 32)

    def thickness(x: Tensor) -> Tensor:
        return F.max_pool2d(x, window, 1, window // 2) + F.max_pool2d(-x, window, 1, window // 2)

    program = import_fx(make_fx(thickness)(x), [x])
    prepared = prepare(program, get_device("cuda/sm_90a"))
    assert [part.kind for part in prepared.parts] == ["chain"] * parts
    if parts == 1:
        (found,) = run_chain(prepared.parts[0].graph, [x], "cuda/sm_90a")
        torch.testing.assert_close(found, thickness(x), equal_nan=True)
