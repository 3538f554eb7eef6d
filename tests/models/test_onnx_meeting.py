"""Operands that broadcast only while a size keeps to a limit."""

from __future__ import annotations

import onnx
import pytest
import torch

import ladder
from ladder.frontend.onnx_meeting import limit_of
from tile_types.errors import ShapeError

POSITIONS = """
    <ir_version: 10, opset_import: ["" : 21]>
    embeds (float[B, S, 2] x) => (float[B, S, 2] y, int64[B, S] z)
    <float[1, 5, 2] table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, int64[1] zero = {0}, int64[1] one = {1},
     int64[1, 5] types = {7, 6, 5, 4, 3}>
    {
        length = Shape <start = 1, end = 2> (x)
        shape = Shape <start = 0, end = 2> (x)
        rows = Slice(table, zero, length, one)
        y = Add(x, rows)
        cut = Slice(types, zero, length, one)
        z = Expand(cut, shape)
    }"""


def test_a_table_cut_to_a_length_is_one_plan_up_to_its_rows() -> None:
    fast = ladder.compile(onnx.parser.parse_model(POSITIONS))
    assert "node" not in fast.plan()
    table = torch.arange(10.0).reshape(1, 5, 2)
    for batch, length in [(2, 3), (1, 1), (2, 5), (3, 0), (0, 2)]:
        x = torch.randn(batch, length, 2)
        y, z = fast(x)
        assert torch.equal(y, x + table[:, :length])
        assert torch.equal(z, torch.tensor([7, 6, 5, 4, 3])[:length].expand(batch, length))
    with pytest.raises(ShapeError, match="S <= 5, this call has 6 and 5"):
        fast(torch.randn(2, 6, 2))


PYRAMID = """
    <ir_version: 10, opset_import: ["" : 21]>
    joins (float[B, 2, H] x) => (float[B, 4, R] y) <float[3] twice = {1, 1, 2}> {
        half = MaxPool <kernel_shape = [2], strides = [2], pads = [0, 1]> (x)
        quarter = MaxPool <kernel_shape = [2], strides = [2], pads = [0, 1]> (half)
        large = Resize <coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"
            > (quarter, , twice)
        y = Concat <axis = 1> (large, half)
    }"""


def test_levels_of_a_pyramid_are_joined_in_a_plan_where_they_meet() -> None:
    """``2*ceil(H/4)`` is ``ceil(H/2)`` of some sizes only: of others no one can join them."""
    fast = ladder.compile(onnx.parser.parse_model(PYRAMID))
    assert "onnx.Concat" not in fast.plan()
    assert "node" not in fast.plan()
    for batch, high in [(1, 8), (2, 3), (1, 4), (1, 8), (3, 12), (1, 7)]:
        x = torch.randn(batch, 2, high)
        half = torch.nn.functional.max_pool1d(x, 2, 2, ceil_mode=True)
        large = torch.nn.functional.max_pool1d(half, 2, 2, ceil_mode=True).repeat_interleave(2, 2)
        assert torch.equal(fast(x), torch.cat([large, half], 1))
    with pytest.raises(ShapeError, match="this call has 4 and 3"):
        fast(torch.randn(1, 2, 5))


@pytest.mark.parametrize(
    ("extent", "whole", "limit"),
    [
        ("S - max(S - 512, 0)", "S", 512),
        ("S - max(S - 1, 0)", "S", None),  # one element broadcasts with any number
        ("S - max(S - 512, 0)", "T", None),
        ("max(S - 512, 0)", "S", None),
        ("S", "S", None),
        (5, "S", None),
        ("2*S - max(2*S - 8, 0)", "2*S", 8),
    ],
)
def test_limits_of_extents(extent: str, whole: str, limit: int | None) -> None:
    assert limit_of(extent, whole) == limit
