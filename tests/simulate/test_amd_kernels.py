"""Kernels in AMD's dialect of TIR on the simulator: waves of 64, static LDS, vectors, MFMA, and faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from amd_kernels import WAVE, launch, run
from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.lower import builder as b
from ladder.simulate import SimulationResult, simulate_launch
from ladder.simulate.machine import ORDERS

SYNC = "shared"


def sync(scope: str = SYNC) -> None:
    b.emit(T.tvm_storage_sync(scope))


def _exchange(with_barrier: bool) -> Any:
    """Each thread stores its number and reads that of the thread across the block."""

    def body(thread: Any, shared: Any, y: Any) -> None:
        b.store(shared, T.Cast("uint32", thread), thread)
        if with_barrier:
            sync()
        b.store(y, shared[255 - thread], thread)

    return body


@pytest.mark.parametrize("order", ORDERS)
def test_waves_exchange_through_lds(order: str) -> None:
    result = run("gfx942", _exchange(True), 256, 256, order=order)
    assert not result.findings, result.report()
    assert np.array_equal(result.y, np.arange(255, -1, -1))


@pytest.mark.parametrize("order", ORDERS)
def test_without_the_barrier_waves_race(order: str) -> None:
    assert "race" in run("gfx942", _exchange(False), 256, 256, order=order).kinds()


def _neighbours(scope: str | None) -> Any:
    """Lanes of one wave exchange; nothing but a barrier orders them for the compiler."""

    def body(thread: Any, shared: Any, y: Any) -> None:
        b.store(shared, T.Cast("uint32", thread), thread)
        if scope:
            sync(scope)
        b.store(y, shared[thread // WAVE * WAVE + (WAVE - 1 - thread % WAVE)], thread)

    return body


def test_lanes_of_a_wave_need_a_barrier_of_the_wave() -> None:
    assert not run("gfx942", _neighbours("warp"), 128, 128).findings
    assert run("gfx942", _neighbours(None), 128, 128).kinds() == {"race"}


def test_a_block_is_whole_waves_of_64() -> None:
    with pytest.raises(Exception, match="96 threads"):
        run("gfx942", _exchange(True), 96, 96)


def _wide(step: int, offset: int = 0) -> Any:
    """Each thread stores four words ``step`` words apart with one instruction, and reads them back."""

    def body(thread: Any, shared: Any, y: Any) -> None:
        four = T.ramp(thread * step + offset, 1, 4)
        b.store(shared, T.Broadcast(T.Cast("uint32", thread), 4), four)
        held = b.local(4, "uint32")
        b.store(held, shared[four], T.ramp(0, 1, 4))
        b.store(y, held[0] + held[3], thread)

    return body


def test_vectors_are_one_wide_access() -> None:
    result = run("gfx90a", _wide(4), 64, 256)
    assert not result.findings, result.report()
    assert np.array_equal(result.y, 2 * np.arange(64))
    assert result.traffic["shared write"] == result.traffic["shared read"] == 64 * 16
    assert not result.bank_conflicts


def test_what_wide_accesses_get_wrong() -> None:
    assert "misaligned" in run("gfx942", _wide(4, 1), 64, 260).kinds()
    assert "out of bounds" in run("gfx942", _wide(4), 64, 250).kinds()
    assert "race" in run("gfx942", _wide(0), 64, 256).kinds()
    assert run("gfx942", _wide(32), 64, 2048).bank_conflicts


def test_lds_that_nobody_wrote_is_noted() -> None:
    def body(thread: Any, shared: Any, y: Any) -> None:
        b.store(y, shared[thread], thread)

    result = run("gfx942", body, 64, 64)
    assert not result.findings
    assert {note.kind for note in result.notes} == {"unwritten bytes"}
    assert (result.y == 0xFFFFFFFF).all()


def test_a_barrier_that_some_waves_miss_never_opens() -> None:
    def body(thread: Any, shared: Any, y: Any) -> None:
        with b.when(thread < WAVE):
            sync()
        b.store(y, T.uint32(1), thread)

    assert "deadlock" in run("gfx942", body, 128, 128).kinds()


def test_mfma_needs_all_lanes() -> None:
    def body(thread: Any, shared: Any, y: Any) -> None:
        acc = b.local(4, "float32")
        b.store(acc, T.Broadcast(T.float32(0), 4), T.ramp(0, 1, 4))
        ones = T.Broadcast(T.float16(1), 4)
        with b.when(thread < 32):
            b.store(acc, _mfma(ones, ones, acc), T.ramp(0, 1, 4))
        b.store(y, T.Cast("uint32", acc[0]), thread)

    assert run("gfx942", body, 64, 64).kinds() == {"divergence"}


def _mfma(a: Any, weights: Any, acc: Any) -> Any:
    zeros = [T.int32(0)] * 3
    name = "llvm.amdgcn.mfma.f32.16x16x16f16"
    return T.call_llvm_pure_intrin("float32x4", name, a, weights, acc[T.ramp(0, 1, 4)], *zeros)


def gemm(fault: str = "") -> Any:
    """C[16 M, 16] = A · B over K in steps of 16: A through two buffers of LDS, B from registers."""
    with b.function("gemm") as result:
        m, k = b.symbol("M"), b.symbol("K")
        x, w = b.tensor("x", (m, k), "float16"), b.tensor("w", (16, k), "float16")
        y = b.tensor("y", (m, 16), "float32")
        block, lane = launch("blockIdx.x", m // 32), launch("threadIdx.x", 2 * WAVE)
        tile = I.alloc_buffer((2 * 32 * 16,), "float16", scope="shared")
        acc = b.local(4, "float32")
        if fault != "sums begin unwritten":
            b.store(acc, T.Broadcast(T.float32(0), 4), T.ramp(0, 1, 4))
        wave, row, part = lane // WAVE, lane % 16, lane % WAVE // 16
        with b.loop(k // 16) as step:
            buffer = step % 2
            with b.vector(4) as v:
                b.store(tile, x[block * 32 + lane // 4, step * 16 + lane % 4 * 4 + v],
                        buffer * 512 + lane // 4 * 16 + lane % 4 * 4 + v)  # fmt: skip
            if fault != "first barrier":
                sync()
            place = buffer * 512 + (wave * 16 + row) * 16 + (3 - part if fault == "lane" else part) * 4
            b.store(acc, _mfma(tile[T.ramp(place, 1, 4)], w[row, T.ramp(step * 16 + part * 4, 1, 4)], acc),
                    T.ramp(0, 1, 4))  # fmt: skip
            if fault != "second barrier":
                sync()
        for i in range(4):
            b.store(y, acc[i], block * 32 + wave * 16 + part * 4 + i, row)
    return result.func


def _simulated(function: Any, **options: Any) -> tuple[SimulationResult, float]:
    random = np.random.default_rng(0)
    x, w = (random.standard_normal((rows, 96)).astype(np.float16) for rows in (64, 16))
    y = np.zeros((64, 16), np.float32)
    result = simulate_launch(function, [x, w, y], target="gfx942", **options)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    return result, float(np.linalg.norm(y - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("order", ORDERS)
def test_a_product_through_two_buffers(order: str) -> None:
    result, error = _simulated(gemm(), order=order)
    assert not result.findings, result.report()
    assert error < 1e-6
    assert result.counts["mfma"] == 4 * 6


def test_two_buffers_need_one_barrier_per_step() -> None:
    result, error = _simulated(gemm("second barrier"))
    assert not result.findings, result.report()
    assert error < 1e-6


@pytest.mark.parametrize("fault", ["first barrier", "sums begin unwritten", "lane"])
def test_faults_of_a_product_are_found(fault: str) -> None:
    result, error = _simulated(gemm(fault))
    assert result.findings or error > 1e-3, fault
