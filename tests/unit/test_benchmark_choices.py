"""How `benchmarks.choices` reads what was measured."""

from __future__ import annotations

from benchmarks.choices import times_of


def test_classes_that_differ_in_zero_points_alone_are_apart() -> None:
    plain = {"weight": "uint4", "activation": "float16", "group_size": 32, "scale": True, "zero": "none"}
    parts = [
        {"class": plain | {"zero": zero}, "schedules": ["gemv"], "rows": [[64, 128, 1, 0, us]]}
        for zero, us in (("none", 40.7), ("float", 64.7))
    ]
    found = times_of({"quick": [], "final": parts})
    assert sorted(times["gemv"] for times in found.values()) == [40.7, 64.7]
