"""What `benchmarks.experts` compiles."""

from __future__ import annotations

from benchmarks.experts import MIXTURES, candidates, operator
from schedules.expert_tiles import EXPERT_TILES
from schedules.legal import placement_for


def test_every_candidate_is_placed_as_the_product_needs() -> None:
    gemm = operator(MIXTURES[0], *MIXTURES[0].products[0], "cuda/sm_90a").gemm
    found = candidates(gemm, "cuda/sm_90a")
    assert len(found) > 20
    shipped = {tile for tiles in EXPERT_TILES.values() for tile in tiles}
    others = [schedule for schedule in found if schedule.placement != placement_for(gemm)]
    assert others
    assert set(others) <= shipped
