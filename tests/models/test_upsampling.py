"""Upsampling in plans: as eager, for infinities too, and for all sizes by one plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import ladder
from ladder.frontend.upsampling import OPERATORS

CASES = [
    (mode, axes, options)
    for mode, axes in [*OPERATORS, ("area", 2)]
    for options in ({"scale_factor": 1.5}, {"size": (9, 8, 7)[:axes]})
] + [("nearest", 2, {"scale_factor": 2.0, "recompute_scale_factor": True})]


def pixels(*shape: int) -> Tensor:
    """Return random pixels, some of them special."""
    x = torch.randn(shape)
    flat = x.view(-1)
    flat[3], flat[11], flat[-1], flat[-8] = torch.inf, torch.nan, -torch.inf, -0.0
    return x


@pytest.mark.parametrize(("mode", "axes", "options"), CASES)
def test_every_mode(mode: str, axes: int, options: dict[str, Any]) -> None:
    mode, _, smooth = mode.partition(" ")
    if smooth:
        options = options | {"antialias": True}

    def program(x: Tensor) -> tuple[Tensor, ...]:
        found = F.interpolate(x, mode=mode, **options)
        if mode in ("area", "nearest", "nearest-exact"):
            return (found,)
        again = F.interpolate(x, mode=mode, align_corners=True, **options)
        return found, again

    fast = ladder.compile(program)
    with torch.no_grad():
        for extent in (5, 4, 7, 12):
            x = pixels(2, 3, *(extent, 6, 5)[:axes])
            for found, wanted in zip(fast(x), program(x), strict=True):
                torch.testing.assert_close(found, wanted, equal_nan=True)
                assert found.stride() == wanted.stride()
    assert fast.outcome == "whole"
    assert mode == "area" or not fast.refused


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("kind", [torch.contiguous_format, torch.channels_last])
def test_whole_factors_without_interpolation_are_moves(mode: str, kind: torch.memory_format) -> None:
    def program(x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        large = F.interpolate(x, scale_factor=(2, 3), mode=mode)
        same, torn = (F.interpolate(x, scale_factor=s, mode=mode) for s in (1, (1.5, 2)))
        flat = F.interpolate(other, size=2 * other.shape[2], mode=mode)
        return (
            torch.cat([large, F.relu(large)], 1),
            F.interpolate(x, scale_factor=41, mode=mode),
            same,
            flat,
            torn,
        )

    fast = ladder.compile(program)
    with torch.no_grad():
        for extent in (5, 4, 7, 1, 12):
            x, other = pixels(2, 3, extent, 6).to(memory_format=kind), pixels(1, 8, 5).to(torch.bfloat16)
            for found, wanted in zip(fast(x, other), program(x, other), strict=True):
                torch.testing.assert_close(found, wanted, equal_nan=True, rtol=0, atol=0)
                assert found.stride() == wanted.stride()
                assert found.data_ptr() != x.data_ptr()
    assert (fast.outcome, fast.refused) == ("whole", [])
    # What keeps its size, factors that are not whole, and 41, whose reciprocal is rounded down in float32.
    assert fast.plan().count("torch upsample") == (3 if mode == "nearest" else 2) * len(fast.records)


def test_one_plan_serves_all_sizes() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        half = F.interpolate(x, scale_factor=0.5)
        back = F.interpolate(half, size=x.shape[2:], mode="bilinear")
        return half, x - back, F.interpolate(x, scale_factor=1.25)

    fast = ladder.compile(program)
    with torch.no_grad():
        for extent in (8, 9, 14, 21, 30):
            x = torch.randn(1, 2, extent, 8)
            for found, wanted in zip(fast(x), program(x), strict=True):
                torch.testing.assert_close(found, wanted)
                assert found.stride() == wanted.stride()
    assert (len(fast.records), fast.refused) == (2, [])
    assert "torch upsample" in fast.plan()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": 4, "scale_factor": 2},
        {"scale_factor": 2, "align_corners": True},
        {"scale_factor": (2, 2, 2)},
        {"scale_factor": 2, "antialias": True},
        {"size": (4, 4), "recompute_scale_factor": True},
        {"scale_factor": 2, "mode": "linear"},
        {"scale_factor": 0.01},
    ],
)
def test_what_torch_refuses_is_refused_by_torch(options: dict[str, Any]) -> None:
    x = torch.randn(1, 2, 6, 6)
    with pytest.raises((ValueError, NotImplementedError, RuntimeError)) as wanted:
        F.interpolate(x, **options)
    fast = ladder.compile(lambda x: F.interpolate(x, **options))
    for _ in range(3):
        with torch.no_grad(), pytest.raises(type(wanted.value)) as found:
            fast(x)
        assert str(found.value) == str(wanted.value)
