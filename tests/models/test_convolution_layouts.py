"""Convolutions on the CPU: how images lie when torch computes them, and which are sums of ours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ladder
from ladder.runtime.model.convolutions import is_faster_last


class Mixed(nn.Module):
    """Channels last between layers, a convolution of each channel by itself, and one of points."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.own = nn.Conv2d(channels, channels, taps, padding=taps // 2, groups=channels)
        self.points = nn.Conv2d(channels, 2 * channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.own(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return self.points(torch.nn.functional.adaptive_avg_pool2d(y, 2)).relu()


@pytest.mark.parametrize(("taps", "ours"), [(3, True), (7, False)])
def test_sums_over_small_windows_are_ours(taps: int, ours: bool) -> None:
    torch.manual_seed(0)
    model, x = Mixed(16, taps).eval(), torch.randn(2, 16, 8, 8)
    fast = ladder.compile(model)
    with torch.no_grad():
        expected = model(x)
        for _ in range(2):
            found = fast(x)
            assert torch.allclose(found, expected, atol=1e-5)
            assert found.stride() == expected.stride()
    assert not fast.refused
    operators = [" ".join(step.part.operators) for step in fast.models[0].plan.steps]
    assert any("map" in text and "mul reduce_sum reduce_sum" in text for text in operators) == ours


def test_which_images_lie_otherwise() -> None:
    def asked(channels: int, extent: int, groups: int, dtype: torch.dtype = torch.float32) -> bool:
        x = torch.empty(2, channels, extent, extent, dtype=dtype)
        return is_faster_last(x, torch.empty(channels, channels // groups, 3, 3), groups)

    assert asked(16, 8, 16)
    assert asked(16, 2, 1)
    assert not asked(16, 64, 16)  # copies would take longer
    assert not asked(16, 8, 4)
    assert not asked(16, 8, 1)
    assert not asked(16, 1, 1)
    assert not asked(16, 8, 16, torch.float64)
