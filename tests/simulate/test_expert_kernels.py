"""One launch multiplies the rows of every expert: simulated, against a float64 product per expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from problems import BOUNDS, NUMPY, Problem, SimulatedKernel, emitted, gemm, gemv, mma, wgmma

from ladder.ir.gemm import Gemm
from ladder.lower.build import emit
from schedules.schedule import GpuSchedule
from targets import get_device

TOKEN_NAMES = ("x", "token_scale")
"""Arguments whose first axis is tokens; all others belong to an expert's weight."""


class GroupedProblem:
    """Experts with their own weights and tokens, as one grouped kernel takes them."""

    def __init__(self, gemm: Gemm, counts: tuple[int, ...], slot: int = 0) -> None:
        self.gemm = replace(gemm, experts=len(counts), masked=slot > 0)
        self.parts = [Problem(gemm, slot or count, seed) for seed, count in enumerate(counts)]
        self.counts, self.slot = counts, slot
        offsets = np.cumsum([0, *counts]).astype(np.int32)
        self.ranges = np.array(counts, np.int32) if slot else offsets
        flags = {"scales": gemm.scale, "zeros": gemm.zero != "none", "row_scale": True}
        flags |= {"ranges": True, "token_scale": gemm.token_scale, "bias": gemm.bias}
        self.names = ["x", "words", *(name for name, used in flags.items() if used)]

    def arrays(self) -> list[Any]:
        """Return the kernel's arguments but for y."""
        plain = [name for name in self.names if name != "ranges"]
        joined = {
            name: (np.concatenate if name in TOKEN_NAMES else np.stack)(
                [part.arrays[index] for part in self.parts]
            )
            for index, name in enumerate(plain)
        }
        joined["ranges"] = self.ranges
        return [np.ascontiguousarray(joined[name]) for name in self.names]

    def run(self, kernel: Callable[..., None], **order: bool) -> float:
        """Run on a poisoned output; return the relative error of the rows that experts have."""
        arrays = self.arrays()
        y = np.full((len(arrays[0]), self.gemm.n), np.nan, NUMPY[self.gemm.output])
        kernel(*arrays, y, **order)
        first, found, expected = 0, [], []
        for part, count in zip(self.parts, self.counts, strict=True):
            rows = self.slot or count
            found.append(y[first : first + count].astype(np.float64))
            expected.append(part.expected[:count])
            assert np.isnan(y[first + count : first + rows].astype(np.float64)).all(), "stored beyond a slot"
            first += rows
        value, exact = np.concatenate(found), np.concatenate(expected)
        assert np.isfinite(value).all(), "some outputs were not stored"
        return float(np.linalg.norm(value - exact) / np.linalg.norm(exact))


CASES: dict[str, tuple[str, Gemm, GpuSchedule, tuple[tuple[int, ...], ...]]] = {
    "mma groups, zeros, bias": (
        "sm_80",
        gemm(group_size=64, scale=True, zero="integer", bias=True, epilogue=("relu",)),
        mma(),
        ((3, 0, 17, 1), (0, 0, 0, 40), (1,), (0, 5, 0)),
    ),
    "mma int8 with token scales": (
        "sm_90a",
        gemm(activation="int8", group_size=128, scale=True, token_scale=True, k=130),
        mma(placement="accumulator"),
        ((9, 0, 2),),
    ),
    "gemv groups, zeros, bias": (
        "sm_90a",
        gemm(group_size=64, scale=True, zero="integer", bias=True, epilogue=("relu",), k=600),
        gemv(),
        ((3, 0, 9, 1), (0, 0, 0, 20), (1,), (0, 5, 0)),
    ),
    "gemv scaled sums": (
        "sm_90a",
        gemm(activation="bfloat16", group_size=128, scale=True, k=390),
        gemv(placement="accumulator", split_k=2, warp_rows=32),
        ((3, 0, 9, 1), (0, 0, 0, 20)),
    ),
    "gemv int8 with token scales": (
        "sm_80",
        gemm(activation="int8", group_size=128, scale=True, token_scale=True, k=130),
        gemv(placement="accumulator", tile_m=16),
        ((19, 0, 2),),
    ),
    "gemv exponents of MX scales": (
        "sm_90a",
        gemm(weight="fp4_e2m1", group_size=32, scale=True, power_scales=True, k=330),
        gemv(split_k=4, warp_rows=32),
        ((3, 0, 9, 1),),
    ),
    "mma many experts": (
        "sm_80",
        gemm(n=64, k=64, weight="int2"),
        mma(),
        (tuple(i % 3 for i in range(70)),),
    ),
    "mma real zeros, wide tiles": (
        "sm_80",
        gemm(weight="uint3", n=130, group_size=32, scale=True, zero="float"),
        mma(tile_n=128, warps=8, raster=1),
        ((33, 2),),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_experts(case: str) -> None:
    arch, problem, schedule, sizes = CASES[case]
    kernel = SimulatedKernel(emitted(replace(problem, experts=1), schedule, arch))
    for counts in sizes:
        assert GroupedProblem(problem, counts).run(kernel) <= BOUNDS[problem.activation]


WALKS: dict[str, tuple[Gemm, dict[str, int], tuple[tuple[int, ...], ...], int]] = {
    "groups, zeros, bias": (
        gemm(n=130, k=200, group_size=64, scale=True, zero="integer", bias=True, epilogue=("relu",)),
        {},
        ((3, 0, 17, 1), (0, 0, 0, 40), (1,)),
        0,
    ),
    "exponents, columns of one row block": (
        gemm(weight="fp4_e2m1", group_size=32, scale=True, power_scales=True, n=300, k=330),
        {"tile_m": 48, "tile_n": 128, "tile_k": 128, "warps": 8, "raster": 1},
        ((50, 0, 9, 1),),
        0,
    ),
    "counted slots": (gemm(n=130, k=200, group_size=64, scale=True, bias=True), {}, ((3, 0, 17, 1),), 17),
    "many experts": (gemm(n=64, k=64, weight="int2"), {"tile_k": 128}, (tuple(i % 3 for i in range(70)),), 0),
}
"""Problem, fields of the schedule, rows of experts, and rows of a slot if they lie in slots."""


@pytest.mark.parametrize("case", WALKS)
def test_blocks_that_walk_over_tiles_of_all_experts(case: str) -> None:
    problem, fields, sizes, slot = WALKS[case]
    device = replace(get_device("cuda/sm_90a"), units=3)
    grouped = replace(problem, experts=1, masked=slot > 0)
    kernel = SimulatedKernel(emit(grouped, device, wgmma(persistent=True, **fields), "simulated"))
    for counts in sizes:
        assert GroupedProblem(problem, counts, slot).run(kernel) <= BOUNDS[problem.activation]


@pytest.mark.parametrize("case", [case for case in CASES if "bias" in case or "scales" in case])
def test_counted_slots(case: str) -> None:
    arch, problem, schedule, _ = CASES[case]
    kernel = SimulatedKernel(emitted(replace(problem, experts=1, masked=True), schedule, arch))
    for counts, slot in (((3, 0, 17, 1), 17), ((5,), 40), ((0, 8), 9)):
        assert GroupedProblem(problem, counts, slot).run(kernel) <= BOUNDS[problem.activation]


@pytest.mark.parametrize("case", [case for case in CASES if "bias" in case or "scales" in case])
@pytest.mark.parametrize(("owners", "rows"), [((1, 0, 1, 2, -1, 7, 0), 1), ((2, 9, 0), 11)])
def test_slots_that_name_their_experts(case: str, owners: tuple[int, ...], rows: int) -> None:
    arch, problem, schedule, _ = CASES[case]
    kernel = SimulatedKernel(emitted(replace(problem, experts=1, slots=1), schedule, arch))
    experts = GroupedProblem(problem, (rows,) * 3)
    given = dict(zip(experts.names, experts.arrays(), strict=True))
    chosen = [min(max(owner, 0), 2) for owner in owners]
    for name in {*TOKEN_NAMES} & {*given}:
        each = given[name].reshape(3, rows, -1)
        given[name] = each[chosen].reshape(-1, *given[name].shape[1:])
    given["ranges"] = np.array(owners, np.int32)
    y = np.full((len(owners) * rows, problem.n), np.nan, NUMPY[problem.output])
    kernel(*given.values(), y)
    for slot, owner in enumerate(owners):
        found = y[slot * rows : (slot + 1) * rows].astype(np.float64)
        if owner in range(3):
            exact = experts.parts[owner].expected
            assert np.linalg.norm(found - exact) <= BOUNDS[problem.activation] * np.linalg.norm(exact)
        else:
            assert np.isnan(found).all(), "stored rows of no expert"


@pytest.mark.parametrize("offsets", [(2, 9, 9, 30), (-4, 3, 99, 120), (5, 2, 0, 4)])
def test_offsets_that_do_not_cover_x_stay_within_it(offsets: tuple[int, ...]) -> None:
    small = gemm(k=64)
    kernel = SimulatedKernel(emitted(replace(small, experts=1), mma(), "sm_80"))
    problem = GroupedProblem(small, (10, 10, 12))
    arrays = problem.arrays()
    arrays[problem.names.index("ranges")] = np.array(offsets, np.int32)
    memory = np.full((8 + 32 + 8, small.n), 77, np.float32)
    y = memory[8:40]
    kernel(*arrays, y)
    assert (memory[:8] == 77).all(), "stored before the output"
    assert (memory[40:] == 77).all(), "stored beyond the output"
    owned = np.zeros(32, bool)
    for low, high in pairwise(offsets):
        owned[max(low, 0) : max(min(high, 32), 0)] = True
    assert ((y != 77).all(axis=1) == owned).all()
    assert np.isfinite(y).all()
