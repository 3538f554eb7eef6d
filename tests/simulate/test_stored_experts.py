"""Experts whose 16-bit matrices lie as a model has them: simulated, against a float64 product per expert."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from problems import BOUNDS, NUMPY, SimulatedKernel, mma, wgmma

from ladder.ir.gemm import Gemm
from ladder.lower.build import emit
from ladder.runtime import stored_experts
from ladder.runtime.compile import Request
from ladder.runtime.kernel import CompiledGemm
from ladder.runtime.stored_experts import problem
from ladder.simulate.operator import numpy_of
from schedules.legal import is_legal
from schedules.schedule import GpuSchedule
from targets import get_device

ORDERS = ("rows", "columns")

CASES: dict[str, tuple[str, GpuSchedule, tuple[str, ...]]] = {
    "mma": ("sm_80", mma(), ORDERS),
    "mma, wide": ("sm_80", mma(tile_m=64, tile_n=128, tile_k=128, stages=2, warps=8), ORDERS),
    "wgmma": ("sm_90a", wgmma(tile_n=64, tile_k=64, stages=4), ORDERS),
    "wgmma, walking": ("sm_90a", wgmma(tile_m=48, tile_n=128, tile_k=128, warps=8, persistent=True), ORDERS),
}
"""Architecture, schedule, and the orders that the pipeline serves."""

SIZES = (((3, 0, 17, 1), 136, 200, 2), ((0, 0, 20), 72, 520, 0), ((1, 0), 8, 8, 1))
"""Rows of experts, N, K, and rows of no expert."""

EACH = [(case, order) for case, (_, _, orders) in CASES.items() for order in orders]


def kernel_of(case: str, order: str, dtype: str = "bfloat16") -> SimulatedKernel:
    arch, schedule, _ = CASES[case]
    device = replace(get_device(f"cuda/{arch}"), units=3)
    return SimulatedKernel(emit(problem(dtype, 1, 64, 64, order), device, schedule, "simulated"))


class Experts:
    """Rows, matrices ``[E, N, K]`` and where experts end."""

    def __init__(self, counts: tuple[int, ...], n: int, k: int, further: int, dtype: str) -> None:
        rng, kind = np.random.default_rng(n + k), NUMPY[dtype]
        self.x = rng.normal(size=(sum(counts) + further, k)).astype(kind)
        self.w = rng.normal(size=(len(counts), n, k)).astype(kind)
        self.ends = np.cumsum(counts).astype(np.int32)

    def run(self, kernel: SimulatedKernel, order: str) -> np.ndarray[Any, Any]:
        """Return the result of the kernel, in float64; NaN where it stored nothing."""
        w = self.w if order == "rows" else self.w.transpose(0, 2, 1)
        y = np.full((len(self.x), self.w.shape[1]), np.nan, self.x.dtype)
        kernel(self.x, np.ascontiguousarray(w), self.ends, y)
        return y.astype(np.float64)

    def exact(self) -> np.ndarray[Any, Any]:
        """Return the product in float64; NaN in rows of no expert."""
        y = np.full((len(self.x), self.w.shape[1]), np.nan)
        for e, (start, stop) in enumerate(pairwise((0, *self.ends))):
            with np.errstate(invalid="ignore"):
                y[start:stop] = self.x[start:stop].astype(np.float64) @ self.w[e].astype(np.float64).T
        return y


HALVES = [("mma", "columns"), ("wgmma", "rows")]
"""What is tried in float16 too: only instructions of products differ."""


@pytest.mark.parametrize(
    ("case", "order", "dtype"),
    [(*each, "float16") for each in HALVES] + [(*each, "bfloat16") for each in EACH],
)
def test_matrices_as_they_lie(case: str, order: str, dtype: str) -> None:
    kernel = kernel_of(case, order, dtype)
    for sizes in SIZES:
        experts = Experts(*sizes, dtype)
        found, exact = experts.run(kernel, order), experts.exact()
        assert (np.isnan(found) == np.isnan(exact)).all()
        difference = np.nan_to_num(found - exact)
        assert np.linalg.norm(difference) <= BOUNDS[dtype] * np.linalg.norm(np.nan_to_num(exact))


@pytest.mark.parametrize(("case", "order"), EACH)
def test_what_is_not_finite_stays_with_its_expert_and_row(case: str, order: str) -> None:
    experts = Experts((3, 1, 5, 2), 72, 200, 1, "bfloat16")
    experts.w[0, :, :] = np.inf  # neighbours in memory of what expert 1 has
    experts.w[2, 5, :] = np.nan
    experts.w[3, 7, 11] = -np.inf
    experts.x[4, 3] = np.nan
    experts.x[6, 150] = np.inf
    found, exact = experts.run(kernel_of(case, order), order), experts.exact()
    assert (np.isnan(found) == np.isnan(exact)).all()
    assert (np.isinf(found) == np.isinf(exact)).all()
    assert np.allclose(found, exact, rtol=0.05, atol=1.0, equal_nan=True)


@pytest.mark.parametrize("case", ["mma", "wgmma", "wgmma, walking"])
@pytest.mark.parametrize("ends", [(2, 2, 30, 99), (-4, 3, 9, 12), (9, 5, 5, 5)])
def test_ends_that_are_no_rows_of_x_stay_within_it(case: str, ends: tuple[int, ...]) -> None:
    experts = Experts((4, 4, 4, 4), 72, 72, 0, "float16")
    experts.ends[:] = ends
    found = experts.run(kernel_of(case, "rows", "float16"), "rows")
    owned = np.zeros(16, bool)
    for low, high in pairwise((0, *ends)):
        owned[max(low, 0) : max(min(high, 16), 0)] = True
    assert (np.isnan(found).all(axis=1) == ~owned).all()


@pytest.mark.parametrize(("case", "order"), EACH)
def test_rows_that_name_their_experts(case: str, order: str) -> None:
    arch, schedule, _ = CASES[case]
    named = replace(problem("bfloat16", 1, 64, 64, order), slots=1)
    kernel = SimulatedKernel(emit(named, get_device(f"cuda/{arch}"), schedule, "simulated"))
    experts, owners = Experts((3, 3), 72, 200, 0, "bfloat16"), (1, 0, 2, 1, -1, 0)
    experts.ends = np.array(owners, np.int32)
    found = experts.run(kernel, order)
    for row, owner in enumerate(owners):
        if owner not in (0, 1):
            assert np.isnan(found[row]).all(), "stored rows of no expert"
            continue
        exact = experts.w[owner].astype(np.float64) @ experts.x[row].astype(np.float64)
        assert np.linalg.norm(found[row] - exact) <= BOUNDS["bfloat16"] * np.linalg.norm(exact)


class Launches:
    """Stands for compiled kernels: what they are called with is simulated."""

    def __init__(self) -> None:
        self.orders: list[str] = []

    def __call__(self, text: str, where: torch.device) -> CompiledGemm:
        gemm = Request.parse(text).gemm
        self.orders.append(gemm.stored)

        def launch(*tensors: torch.Tensor) -> None:
            device = get_device("cuda/sm_90a")
            kernel = SimulatedKernel(emit(gemm, device, wgmma(tile_n=64, tile_k=64, stages=4), "simulated"))
            kernel(*map(numpy_of, tensors))

        return CompiledGemm(gemm, "cuda", [1], [launch])


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()
    monkeypatch.setattr(stored_experts, "compiled", found)
    monkeypatch.setattr(stored_experts, "target_of", lambda where: "cuda/sm_90a")
    return found


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("ends_type", [torch.int32, torch.int64])
def test_the_operator_reads_matrices_in_place(
    launches: Launches, turned: bool, ends_type: torch.dtype
) -> None:
    torch.manual_seed(0)
    stored = torch.randn(3, 48, 72, dtype=torch.float16)
    matrices = stored.mT if turned else stored
    x = torch.randn(2 * 9, matrices.shape[1], dtype=torch.float16)[::2]  # rows apart
    ends = torch.tensor([2, 2, 7], dtype=ends_type)
    found = stored_experts.multiply(x, matrices, ends, True)
    assert launches.orders == ["rows" if turned else "columns"]
    assert not found[7:].any()
    for e, (start, stop) in enumerate(((0, 2), (2, 2), (2, 7))):
        torch.testing.assert_close(found[start:stop], x[start:stop] @ matrices[e], rtol=2e-3, atol=2e-2)


def test_the_operator_of_rows_that_name_their_matrices(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    stored, x = torch.randn(3, 48, 72).bfloat16(), torch.randn(4, 72).bfloat16()
    experts = torch.tensor([2, 0, 3, 2], dtype=torch.int32)
    found = stored_experts.multiply_named(x, stored.mT, experts, True)
    assert launches.orders == ["rows"]
    assert not found[2].any()
    monkeypatch.setattr(stored_experts, "_request", lambda *asked: None)
    monkeypatch.setattr(stored_experts, "original", lambda whole: torch.ops.aten._grouped_mm.default)
    again = stored_experts.multiply_named(x, stored.mT, experts, False)
    for row, e in ((0, 2), (1, 0), (3, 2)):
        torch.testing.assert_close(found[row], stored[e] @ x[row], rtol=2e-2, atol=0.1)
        torch.testing.assert_close(again[row], stored[e] @ x[row], rtol=2e-2, atol=0.1)


@pytest.mark.parametrize("whole", [True, False])
def test_what_lies_otherwise_is_the_programs_own_operators(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    asked: list[bool] = []

    def original(whole: bool) -> Any:
        asked.append(whole)
        return lambda x, matrices, ends: x.new_zeros(len(x), matrices.shape[2])

    monkeypatch.setattr(stored_experts, "original", original)
    x, ends = torch.randn(4, 16).bfloat16(), torch.tensor([1, 4], dtype=torch.int32)
    dense = torch.randn(2, 16, 24).bfloat16()
    apart = torch.randn(2, 16, 48).bfloat16()[:, :, ::2]
    unaligned = torch.randn(2 * 16 * 24 + 1).bfloat16()[1:].view(2, 16, 24)
    for matrices in (apart, unaligned, dense[:, :, :20], dense.float(), torch.randn(2, 16, 20).bfloat16()):
        assert stored_experts.multiply(x, matrices, ends, whole).shape == (4, matrices.shape[2])
    assert stored_experts.multiply(x[:0], dense, ends * 0, whole).shape == (0, 24)
    assert asked == [whole] * 6
    assert not launches.orders


def test_volta_has_no_kernels() -> None:
    gemm = problem("float16", 4, 64, 64, "rows")
    assert not is_legal(gemm, get_device("cuda/sm_70"), mma())
    assert is_legal(gemm, get_device("cuda/sm_75"), mma())


def test_kernels_of_other_orders_are_others() -> None:
    each = [problem("float16", 4, 64, 64, order) for order in ORDERS]
    packed = Gemm(64, 64, "float16", scale=False, experts=4)
    assert len({str(gemm.shape_free()) for gemm in (*each, packed)}) == 3
    assert "stored" not in packed.shape_free()
