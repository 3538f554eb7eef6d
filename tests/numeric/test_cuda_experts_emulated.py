"""One launch multiplies the tokens of every expert: generated CUDA, run thread by thread on the host.

The reference is a float64 product per expert (`test_cuda_mma_emulated.Problem`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import cuda_emulator
import numpy as np
import pytest
from test_cuda_mma_emulated import BOUNDS, NUMPY, Problem

from ladder.ir.gemm import Gemm
from ladder.lower.build import emit
from schedules.schedule import GpuSchedule
from targets import get_device

pytestmark = pytest.mark.skipif(bool(cuda_emulator.missing_tools()), reason=cuda_emulator.missing_tools())

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

    def run(self, kernel: cuda_emulator.Kernel, **order: bool) -> float:
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


def _gemm(**fields: Any) -> Gemm:
    return Gemm(**{"n": 67, "k": 200, "weight": "uint4", "scale": False, "output": "float32", **fields})


def _gemv(**fields: Any) -> GpuSchedule:
    return GpuSchedule(**{"pipeline": "gemv", "tile_m": 8, "stages": 2, "warps": 8, "split_k": 2, **fields})


def _mma(**fields: Any) -> GpuSchedule:
    return GpuSchedule(**{"pipeline": "mma", "tile_m": 16, "stages": 2, "warps": 4, **fields})


CASES: dict[str, tuple[str, Gemm, GpuSchedule, tuple[tuple[int, ...], ...]]] = {
    "mma groups, zeros, bias": (
        "sm_80",
        _gemm(group_size=64, scale=True, zero="integer", bias=True, epilogue=("relu",)),
        _mma(),
        ((3, 0, 17, 1), (0, 0, 0, 40), (1,), (0, 5, 0)),
    ),
    "mma int8 with token scales": (
        "sm_90a",
        _gemm(activation="int8", group_size=128, scale=True, token_scale=True, k=130),
        _mma(placement="accumulator", tile_m=8),
        ((9, 0, 2),),
    ),
    "gemv groups, zeros, bias": (
        "sm_90a",
        _gemm(group_size=64, scale=True, zero="integer", bias=True, epilogue=("relu",), k=600),
        _gemv(),
        ((3, 0, 9, 1), (0, 0, 0, 20), (1,), (0, 5, 0)),
    ),
    "gemv int8 with token scales": (
        "sm_80",
        _gemm(activation="int8", group_size=128, scale=True, token_scale=True, k=130),
        _gemv(placement="accumulator", tile_m=16),
        ((19, 0, 2),),
    ),
    "gemv exponents of MX scales": (
        "sm_90a",
        _gemm(weight="fp4_e2m1", group_size=32, scale=True, power_scales=True, k=330),
        _gemv(),
        ((3, 0, 9, 1),),
    ),
    "mma many experts": (
        "sm_80",
        _gemm(n=64, k=64, weight="int2"),
        _mma(),
        (tuple(i % 3 for i in range(70)),),
    ),
    "mma real zeros, wide tiles": (
        "sm_80",
        _gemm(weight="uint3", n=130, group_size=32, scale=True, zero="float"),
        _mma(tile_n=128, warps=8, raster=1),
        ((33, 2),),
    ),
}


@pytest.mark.daily(3)
@pytest.mark.parametrize("case", CASES)
def test_tokens_follow_each_other(case: str, tmp_path: Path) -> None:
    arch, gemm, schedule, sizes = CASES[case]
    kernel = _kernel(replace(gemm, experts=1), schedule, arch, tmp_path)
    for counts in sizes:
        problem = GroupedProblem(gemm, counts)
        assert problem.run(kernel) <= BOUNDS[gemm.activation]
        assert problem.run(kernel, eager=True, reverse=True) <= BOUNDS[gemm.activation]


@pytest.mark.daily(2)
@pytest.mark.parametrize("case", [case for case in CASES if "bias" in case or "scales" in case])
def test_counted_slots(case: str, tmp_path: Path) -> None:
    arch, gemm, schedule, _ = CASES[case]
    kernel = _kernel(replace(gemm, experts=1, masked=True), schedule, arch, tmp_path)
    for counts, slot in (((3, 0, 17, 1), 17), ((5,), 40), ((0, 8), 9)):
        assert GroupedProblem(gemm, counts, slot).run(kernel) <= BOUNDS[gemm.activation]


@pytest.mark.daily(1)
@pytest.mark.parametrize("offsets", [(2, 9, 9, 30), (-4, 3, 99, 120), (5, 2, 0, 4)])
def test_offsets_that_do_not_cover_x_stay_within_it(offsets: tuple[int, ...], tmp_path: Path) -> None:
    gemm = _gemm(k=64)
    kernel = _kernel(replace(gemm, experts=1), _mma(tile_m=8), "sm_80", tmp_path)
    problem = GroupedProblem(gemm, (10, 10, 12))
    arrays = problem.arrays()
    arrays[problem.names.index("ranges")] = np.array(offsets, np.int32)
    memory = np.full((8 + 32 + 8, gemm.n), 77, np.float32)
    y = memory[8:40]
    kernel(*arrays, y)
    assert (memory[:8] == 77).all(), "stored before the output"
    assert (memory[40:] == 77).all(), "stored beyond the output"
    owned = np.zeros(32, bool)
    for low, high in pairwise(offsets):
        owned[max(low, 0) : max(min(high, 32), 0)] = True
    assert ((y != 77).all(axis=1) == owned).all()
    assert np.isfinite(y).all()


def _kernel(gemm: Gemm, schedule: GpuSchedule, arch: str, folder: Path) -> cuda_emulator.Kernel:
    device = get_device(f"cuda/{arch}")
    return cuda_emulator.Kernel(emit(gemm, device, schedule, "emulated"), device, folder)
