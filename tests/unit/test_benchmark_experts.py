"""What `benchmarks.experts` compiles."""

from __future__ import annotations

from benchmarks.experts import MIXTURES, candidates, operator
from schedules.legal import placement_for


def test_every_candidate_is_placed_as_the_product_needs() -> None:
    gemm = operator(MIXTURES[0], *MIXTURES[0].products[0], "cuda/sm_90a").gemm
    found = candidates(gemm, "cuda/sm_90a")
    assert len(found) > 20
    assert {schedule.placement for schedule in found} == {placement_for(gemm)}
