"""What lanes give one another on AMD GPUs, and what blocks at the edge of a matrix read."""

from __future__ import annotations

import numpy as np
import pytest
from amd_kernels import WAVE, compute
from problems import emitted, gemm, mma, require_right

from ladder.lower.chain.rocm import RocmDialect
from ladder.lower.rocm import dialect
from targets import get_device

TARGETS = ("gfx90a", "gfx942", "gfx950")
DISTANCES = (1, 2, 4, 8, 16, 32)
LANES = np.arange(WAVE)


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("distance", DISTANCES)
def test_lanes_shuffle_with_the_other_half(arch: str, distance: int) -> None:
    """Of twice as many lanes as the distance; far ones with the lane at the distance."""
    shuffle = RocmDialect(get_device(f"rocm/{arch}")).shuffle
    partner = compute(arch, lambda lane: shuffle(lane, distance, lane))
    assert np.array_equal(partner // (2 * distance), LANES // (2 * distance))
    assert not np.any(partner // distance == LANES // distance)
    assert sorted(partner) == list(LANES)
    if distance not in dialect.MOVES:
        assert np.array_equal(partner, LANES ^ distance)


@pytest.mark.parametrize("distance", DISTANCES)
def test_lanes_take_the_value_at_a_distance(distance: int) -> None:
    found = compute("gfx942", lambda lane: dialect.shuffle_xor(lane * 3, "int32", lane, distance))
    assert np.array_equal(found, (LANES ^ distance) * 3)


@pytest.mark.parametrize("tile_n", [64, 128])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_blocks_at_the_edge_read_no_tile_beyond_the_last(arch: str, tile_n: int) -> None:
    """Three tiles of weights: the last block has room for more."""
    problem = gemm(n=130, k=130, group_size=64, scale=True, zero="integer")
    require_right(emitted(problem, mma(tile_n=tile_n), arch), problem, 5, f"cuda/{arch}")
