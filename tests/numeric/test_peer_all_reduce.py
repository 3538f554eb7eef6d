"""The all-reduce over peers' memory: CUDA source compiled by g++, a thread for each of the GPUs'."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import cuda_text
import ml_dtypes
import numpy as np
import pytest

from ladder.lower.cuda.peer_source import BLOCKS, all_reduce_source

pytestmark = pytest.mark.skipif(bool(cuda_text.missing_tools()), reason=cuda_text.missing_tools())

THREADS = 4
"""Of a block here."""

NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}

MACHINE = r"""
#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define __global__
#define __device__
#define __forceinline__ inline
struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx;
static thread_local std::barrier<>* block_barrier;
static void wait_for_block() { block_barrier->arrive_and_wait(); }
#define __syncthreads wait_for_block
"""

PRIMITIVES = r"""
typedef std::atomic_ref<u64> Word;
static void send(u64 to, u64 first, u64 second) {
  Word(((u64*)to)[1]).store(second, std::memory_order_relaxed);  // one 8 bytes may be there before the other
  std::this_thread::yield();
  Word(((u64*)to)[0]).store(first, std::memory_order_relaxed);
}
static void look(u64 from, u64& first, u64& second) {
  first = Word(((u64*)from)[0]).load(std::memory_order_relaxed);
  std::this_thread::yield();
  second = Word(((u64*)from)[1]).load(std::memory_order_relaxed);
}
static u32 told(u64 from) { return std::atomic_ref<u32>(*(u32*)from).load(); }
static u64 nanoseconds() { return 0; }
static void give_up() { abort(); }
static void wait_for_kernels_before() {}
static void let_next_kernel_start() {}
static float widen_half(unsigned short x) { __half y; memcpy(&y, &x, 2); return __half2float(y); }
static unsigned short narrow_half(float x) {
  __half y = __float2half_rn(x); unsigned short z; memcpy(&z, &y, 2); return z;
}
static float widen_brain(unsigned short x) { u32 y = (u32)x << 16; float z; memcpy(&z, &y, 4); return z; }
static unsigned short narrow_brain(float x) {
  __nv_bfloat16 y = __float2bfloat16_rn(x); unsigned short z; memcpy(&z, &y, 2); return z;
}
static float widen_single(u32 x) { float y; memcpy(&y, &x, 4); return y; }
static u32 narrow_single(float x) { u32 y; memcpy(&y, &x, 4); return y; }
"""

RUN = r"""
// Calls one after the other on each rank; the ranks only know of each other what the kernel tells them.
extern "C" void run(u32 running, u32 calls, u32 ranks, const u32* counts, Item** x, Item** y, u64* buffers,
                    u32** epochs, u32* stop) {
  std::vector<std::thread> gpus;
  for (u32 rank = 0; rank < running; rank++) gpus.emplace_back([=] {
    for (u32 call = 0; call < calls; call++) {
      const u32 bytes = counts[call] * sizeof(Item), blocks = (bytes + 8 * THREADS - 1) / (8 * THREADS);
      Peers peers;
      for (u32 step = 0; step < RANKS; step++) peers.at[step] = buffers[(rank + step) % RANKS];
      std::vector<std::thread> threads;
      std::vector<std::unique_ptr<std::barrier<>>> barriers;
      for (u32 b = 0; b < blocks; b++) barriers.push_back(std::make_unique<std::barrier<>>(THREADS));
      for (u32 b = 0; b < blocks; b++) for (u32 t = 0; t < THREADS; t++) threads.emplace_back([&, b, t] {
        blockIdx = {b}; threadIdx = {t}; block_barrier = barriers[b].get();
        const u32 at = call * ranks + rank;
        all_reduce(x[at], y[at], counts[call], rank, peers, epochs[rank], (u64)stop, 0);
      });
      for (auto& thread : threads) thread.join();
    }
  });
  for (auto& gpu : gpus) gpu.join();
}
"""


CASES = pytest.mark.parametrize(("dtype", "ranks"), [("float16", 2), ("bfloat16", 3), ("float32", 4)])
"""A day's tests are of one case, which is compiled once."""

_BUILT: dict[tuple[str, int], Any] = {}


def built(dtype: str, ranks: int, folder: Path) -> Any:
    """Return the compiled source: ``run``, whose first argument says how many ranks' GPUs are there."""
    if (dtype, ranks) not in _BUILT:
        path = folder / "kernel.cpp"
        path.write_text(MACHINE + all_reduce_source(dtype, ranks, PRIMITIVES, THREADS) + RUN)
        options = ["-O1", "-std=c++20", "-w", "-shared", "-fPIC", "-pthread", f"-I{cuda_text.cuda_include()}"]
        subprocess.run(["g++", *options, "-o", str(folder / "kernel.so"), str(path)], check=True)
        _BUILT[dtype, ranks] = ctypes.CDLL(str(folder / "kernel.so")).run
    return _BUILT[dtype, ranks]


def pointers(arrays: list[Any]) -> Any:
    """Return the arrays' addresses."""
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


def carried_out(dtype: str, given: list[list[Any]], folder: Path, epoch: int = 0) -> list[list[Any]]:
    """Return what every rank has of every call; ``given[call][rank]``."""
    ranks = len(given[0])
    found = [[np.full(x.size + 8, 7, x.dtype) for x in call] for call in given]
    buffers = [np.zeros(2 * ranks * BLOCKS * THREADS * 2 + 2, np.uint64) for _ in range(ranks)]
    aligned = (ctypes.c_void_p * ranks)(*(-(-b.ctypes.data // 16) * 16 for b in buffers))
    epochs = [np.full(BLOCKS, epoch, np.uint32) for _ in range(ranks)]
    counts, stopped = np.array([call[0].size for call in given], np.uint32), np.zeros(1, np.uint32)
    built(dtype, ranks, folder)(
        ranks, len(given), ranks, counts.ctypes.data_as(ctypes.c_void_p),
        pointers([x for call in given for x in call]), pointers([y for call in found for y in call]),
        aligned, pointers(epochs), stopped.ctypes.data_as(ctypes.c_void_p),
    )  # fmt: skip
    for call in found:
        assert all((y[-8:] == 7).all() for y in call), "stored beyond the end"
    return [[y[:-8] for y in call] for call in found]


def summed(call: list[Any]) -> Any:
    """Return the sum in float32, in the order of the ranks, rounded once."""
    total = call[0].astype(np.float32)
    for x in call[1:]:
        total = total + x.astype(np.float32)
    return total.astype(call[0].dtype)


@pytest.mark.costly
@CASES
def test_every_rank_has_the_sum_in_the_order_of_ranks(dtype: str, ranks: int, tmp_path: Path) -> None:
    """Calls of changing sizes follow each other through the same memory; the number of calls begins anew."""
    rng = np.random.default_rng(0)
    sizes = [1, 40, 3, 64, 17, 2, 33, 5]
    given = [[(rng.normal(size=n) * 50).astype(NUMPY[dtype]) for _ in range(ranks)] for n in sizes]
    for at, value in enumerate((np.nan, np.inf, -np.inf, -0.0, 65504.0)):
        given[3][0][at] = value
    given[3][1][1], given[3][-1][3] = -np.inf, -0.0
    with np.errstate(all="ignore"):
        for call, results in zip(given, carried_out(dtype, given, tmp_path, 2**32 - 5), strict=True):
            for y in results:
                np.testing.assert_array_equal(y.astype(np.float32), summed(call).astype(np.float32))
                assert y.tobytes() == results[0].tobytes()


@pytest.mark.costly
@CASES
def test_an_input_at_an_odd_address_is_read(dtype: str, ranks: int, tmp_path: Path) -> None:
    rooms = [np.arange(21).astype(NUMPY[dtype]) * NUMPY[dtype](rank + 1) for rank in range(ranks)]
    given = [[room[1:] for room in rooms]]
    for y in carried_out(dtype, given, tmp_path)[0]:
        np.testing.assert_array_equal(y.astype(np.float32), np.arange(1, 21) * sum(range(1, ranks + 1)))


@pytest.mark.costly
@CASES
def test_who_is_told_to_stop_waits_no_longer(dtype: str, ranks: int, tmp_path: Path) -> None:
    """The other GPUs never send: without being told, the kernel would wait."""
    x, y = np.ones(3, NUMPY[dtype]), np.ones(4, NUMPY[dtype])
    memory = np.zeros(2 * ranks * BLOCKS * THREADS * 2 + 2, np.uint64)
    address = -(-memory.ctypes.data // 16) * 16
    epochs, stop, counts = np.zeros(BLOCKS, np.uint32), np.ones(1, np.uint32), np.array([3], np.uint32)
    built(dtype, ranks, tmp_path)(
        1, 1, ranks, ctypes.c_void_p(counts.ctypes.data), pointers([x] * ranks), pointers([y] * ranks),
        (ctypes.c_void_p * ranks)(*[address] * ranks), pointers([epochs] * ranks),
        ctypes.c_void_p(stop.ctypes.data),
    )  # fmt: skip
    assert epochs[0] == 1
    assert epochs[1:].sum() == 0
