"""Planted bugs are found, each with its reason: mutants of shipped kernels, made by rewriting their TIR.

Every mutant is what somebody could have written: a barrier, wait or fence forgotten, a count or an
address that is off by one, a swizzle on one side only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from problems import emitted, gemm, gemv, mma, require_caught, require_right, wgmma
from rewriting import NOTHING, Once, argument, called, remove, rewrite_expression, with_arguments
from tvm import ir, tirx

KERNELS = {
    "gemv": (gemm(group_size=64, scale=True, k=1000), gemv(), 3),
    "gemv long": (gemm(weight="int4", k=4200, group_size=128, scale=True), gemv(stages=4, warps=4), 8),
    "mma": (gemm(group_size=64, scale=True, k=450), mma(), 17),
    "mma three stages": (gemm(weight="int8", k=700), mma(stages=3, tile_n=128, warps=8), 40),
    "wgmma": (gemm(group_size=64, scale=True, output="float16", k=700), wgmma(), 16),
    "wgmma two tiles": (gemm(k=450, n=130, output="float32"), wgmma(tile_n=128), 16),
    "cluster": (
        gemm(group_size=64, scale=True, output="float16", k=700, n=203),
        wgmma(cluster=2, persistent=True, tile_m=32),
        70,
    ),
    "split": (gemm(output="float16", k=700, n=130), wgmma(split_k=2, tile_n=128), 16),
    "columns": (gemm(output="float16", k=700, n=130), wgmma(split_k=2, tile_n=128, tile_m=40), 40),
    "stream": (
        gemm(k=700, n=300, group_size=64, scale=True, output="float16"),
        wgmma(persistent=True, stream_k=True, tile_n=128),
        40,
    ),
    "tails": (
        gemm(k=700, n=300, group_size=64, scale=True, output="float16"),
        wgmma(persistent=True, stream_k=True, tails=True, tile_n=128),
        40,
    ),
    "copied": (
        gemm(weight="fp8_e4m3", activation="fp8_e4m3", k=300, n=136, output="float16"),
        wgmma(tile_m=144, tile_k=128, persistent=True, placement="accumulator"),
        160,
    ),
    "int8": (
        gemm(activation="int8", group_size=128, scale=True, k=1500),
        wgmma(tile_k=128, placement="accumulator"),
        16,
    ),
}
"""Kernels that mutants are made of, with M."""

MAIN_WGMMA = "tirx.ptx.wgmma_f16_rs"
SCALE_D = 13
"""Position of scale-d in a wgmma with 8 sums and A in registers."""


def _int(change: Callable[[int], int], dtype: str = "uint32") -> Callable[[Any], Any]:
    return lambda e: tirx.IntImm(dtype, change(int(e.value)))


def _plus(amount: int, dtype: str = "int32") -> Callable[[Any], Any]:
    return lambda e: e + tirx.IntImm(dtype, amount)


def _without_xor(e: Any) -> Any:
    return rewrite_expression(e, lambda part: part.a if type(part).__name__ == "BitwiseXor" else None)


def _index(position: int, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Change one index of the buffer element whose address an argument takes."""

    def apply(e: Any) -> Any:
        def inside(part: Any) -> Any:
            if type(part).__name__ != "TensorLoad" or len(part.indices) <= position:
                return None
            indices = list(part.indices)
            indices[position] = change(indices[position])
            return part.source.vload(indices)

        return rewrite_expression(e, inside)

    return apply


def _store_to(name_ends: int, change: Callable[[Any], Any]) -> Once:
    """Change stores to global buffers with so many axes."""

    def matches(s: Any) -> bool:
        return (
            type(s).__name__ == "BufferStore" and len(s.indices) == name_ends and s.buffer.scope() == "global"
        )

    return Once(matches, change)


def _shifted_row(s: Any) -> Any:
    row, *rest = s.indices
    return tirx.BufferStore(s.buffer, s.value, [row + 1, *rest])


def _uninitialised_sums() -> Once:
    """Forget to clear accumulators: the first stores of zero to registers."""

    def matches(s: Any) -> bool:
        return (
            type(s).__name__ == "BufferStore"
            and s.buffer.scope() == "local"
            and str(s.buffer.dtype) == "float32"
            and type(s.value).__name__ == "FloatImm"
        )

    return Once(matches, lambda s: NOTHING)


def _moved_up(name: str, before: str) -> Callable[[Any], Any]:
    """Return a change that runs the branch that calls ``name`` before the next call of ``before``."""

    def change(s: Any) -> Any:
        if type(s).__name__ != "SeqStmt":
            return None
        parts = list(s.seq)
        places = [i for i, p in enumerate(parts) if called(p) == before]
        early = [
            i for i, p in enumerate(parts) if type(p).__name__ == "IfThenElse" and called(p.then_case) == name
        ]
        pairs = [(w, a) for w in places for a in early if a == w + 1]
        if not pairs:
            return None
        for wait, arrival in pairs:
            parts[wait], parts[arrival] = parts[arrival], parts[wait]
        return tirx.SeqStmt(parts)

    return change


def _without_cluster_sync(which: int) -> Once:
    """Return a change that removes a barrier of the cluster: its arrival and its wait."""
    parts = ("tirx.ptx.barrier_cluster_arrive", "tirx.ptx.barrier_cluster_wait")
    return Once(lambda s: called(s) in parts, lambda s: NOTHING, 2 * which, 2 * which + 1)


@dataclass(frozen=True)
class Mutant:
    """A bug: the kernel, what changes, and the kind of finding (and words of it) that must name it."""

    kernel: str
    change: Callable[[], Any]
    kind: str
    words: str = ""


SYNC, WAIT, COMMIT = "tirx.cuda.cta_sync", "tirx.ptx.cp_async_wait_group", "tirx.ptx.cp_async_commit_group"
GROUP_WAIT, FENCE = "tirx.ptx.wgmma_wait_group", "tirx.ptx.wgmma_fence"
MBARRIER_WAIT, EXPECT, INIT = (
    "tirx.cuda.mbarrier_wait",
    "tirx.ptx.mbarrier_arrive_expect_tx",
    "tirx.ptx.mbarrier_init",
)
STORE, STORE_COMMIT, STORE_WAIT = (
    "tirx.ptx.cp_async_bulk_tensor_s2g",
    "tirx.ptx.cp_async_bulk_commit_group",
    "tirx.ptx.cp_async_bulk_wait_group",
)
BULK, TENSOR = "tirx.ptx.cp_async_bulk_g2s_cluster", "tirx.ptx.cp_async_bulk_tensor_g2s_cluster"

MUTANTS: dict[str, Mutant] = {
    # ---- barriers of blocks ---------------------------------------------------------------------
    "gemv: barrier after the wait removed": Mutant(
        "gemv", lambda: remove(SYNC, 0), "race", "reads bytes written by"
    ),
    "gemv: a buffer of x refilled without a barrier": Mutant("gemv long", lambda: remove(SYNC, 0), "race"),
    "gemv: sums of warps joined without a barrier": Mutant("gemv", lambda: remove(SYNC, 3), "race"),
    "mma: barrier of the main loop removed": Mutant(
        "mma", lambda: remove(SYNC, 0), "race", "cp.async of warp"
    ),
    "mma: results reuse stages without a barrier": Mutant(
        "mma", lambda: remove(SYNC, 1), "race", "bytes read by"
    ),
    "mma: results read without a barrier": Mutant("mma", lambda: remove(SYNC, 2), "race", "bytes written by"),
    # ---- groups of asynchronous copies ------------------------------------------------------------
    "gemv: wait for copies removed": Mutant("gemv", lambda: remove(WAIT, 0), "race", "not waited for"),
    "mma: wait for copies removed": Mutant("mma", lambda: remove(WAIT, 0), "race", "not waited for"),
    "mma: one group too few waited for": Mutant(
        "mma", lambda: argument(WAIT, 0, _int(lambda n: n + 1), 0), "race"
    ),
    "mma: three stages, one group too few": Mutant(
        "mma three stages", lambda: argument(WAIT, 0, _int(lambda n: n + 1), 0), "race", "not waited for"
    ),
    "mma: a group not committed": Mutant("mma", lambda: remove(COMMIT, 1), "race"),
    # ---- addresses ----------------------------------------------------------------------------------
    "mma: swizzle missing where x is read": Mutant(
        "mma", lambda: argument("tirx.ptx.ldmatrix", 4, _without_xor), "wrong values"
    ),
    "mma: a packed tile too far": Mutant(
        "mma", lambda: argument("tirx.ptx.cp_async_cg", 1, _index(0, _plus(1))), "out of bounds", "argument 1"
    ),
    "mma: copies by one word": Mutant(
        "mma", lambda: argument("tirx.ptx.cp_async_cg", 1, _index(2, _plus(1))), "misaligned"
    ),
    "mma: stores one row too far": Mutant("mma", lambda: _store_to(2, _shifted_row), "out of bounds"),
    "gemv: stores one row too far": Mutant("gemv", lambda: _store_to(2, _shifted_row), "out of bounds"),
    "wgmma: stores one row too far": Mutant("wgmma", lambda: _store_to(2, _shifted_row), "unwritten"),
    "gemv: fragments by 16 bytes": Mutant(
        "gemv", lambda: argument("tirx.ptx.ldmatrix", 4, _plus(16, "uint32")), "wrong values"
    ),
    "wgmma: tensor map with another swizzle": Mutant(
        "wgmma", lambda: argument("tirx.tvm_call_packed", 13, _int(lambda n: 2, "int32")), "wrong values"
    ),
    "wgmma: descriptor with another swizzle": Mutant(
        "wgmma",
        lambda: argument(
            MAIN_WGMMA,
            12,
            lambda e: rewrite_expression(
                e, lambda p: tirx.IntImm("uint64", 2 << 62 | 64 << 32) if _is_high(p) else None
            ),
        ),
        "wrong values",
    ),
    "wgmma: descriptor with half the stride": Mutant(
        "wgmma",
        lambda: argument(
            MAIN_WGMMA,
            12,
            lambda e: rewrite_expression(
                e, lambda p: tirx.IntImm("uint64", 1 << 62 | 32 << 32) if _is_high(p) else None
            ),
        ),
        "wrong values",
    ),
    "wgmma: one slab of x too far": Mutant("wgmma", lambda: argument(TENSOR, 2, _plus(64)), "wrong values"),
    "wgmma: one packed tile too far": Mutant(
        "wgmma", lambda: argument(BULK, 1, _index(0, _plus(1)), 0), "out of bounds"
    ),
    "wgmma: copies to another stage": Mutant(
        "wgmma", lambda: argument(TENSOR, 0, _index(0, _plus(1))), "race"
    ),
    # ---- registers --------------------------------------------------------------------------------------
    "mma: sums not cleared": Mutant("mma", _uninitialised_sums, "uninitialised"),
    "gemv: sums not cleared": Mutant("gemv", _uninitialised_sums, "uninitialised"),
    "wgmma: stale accumulator": Mutant(
        "wgmma",
        lambda: argument(MAIN_WGMMA, SCALE_D, lambda e: tirx.IntImm("bool", 1)),
        "uninitialised",
        "stale",
    ),
    "int8: stale accumulator": Mutant(
        "int8",
        lambda: argument("tirx.ptx.wgmma_int_rs", SCALE_D, lambda e: tirx.IntImm("bool", 1)),
        "uninitialised",
        "stale",
    ),
    "wgmma: products of one step overwrite": Mutant(
        "wgmma", lambda: argument(MAIN_WGMMA, SCALE_D, lambda e: tirx.IntImm("bool", 0), 2), "wrong values"
    ),
    "wgmma: first wait in the loop removed": Mutant(
        "wgmma", lambda: remove(GROUP_WAIT, 0), "asynchronous", "operand register"
    ),
    "wgmma: second wait in the loop removed": Mutant(
        "wgmma", lambda: remove(GROUP_WAIT, 1), "asynchronous", "operand register"
    ),
    "wgmma: last wait removed": Mutant(
        "wgmma", lambda: remove(GROUP_WAIT, 2), "asynchronous", "reads a register"
    ),
    "wgmma: wait for one group too few": Mutant(
        "wgmma",
        lambda: argument(GROUP_WAIT, 0, _int(lambda n: n + 1, "int32"), 2),
        "asynchronous",
        "reads a register",
    ),
    "int8: wait before the promotion removed": Mutant("int8", lambda: remove(GROUP_WAIT, 0), "asynchronous"),
    "wgmma: fence removed": Mutant("wgmma", lambda: remove(FENCE, 0), "asynchronous", "wgmma.fence"),
    "int8: fence removed": Mutant("int8", lambda: remove(FENCE, 0), "asynchronous", "wgmma.fence"),
    "wgmma: group not committed": Mutant(
        "wgmma", lambda: remove("tirx.ptx.wgmma_commit_group", 0), "asynchronous"
    ),
    # ---- the ring ------------------------------------------------------------------------------------------
    "wgmma: producer does not wait for a free stage": Mutant(
        "wgmma", lambda: remove(MBARRIER_WAIT, 0), "race"
    ),
    "wgmma: first stage not waited for": Mutant(
        "wgmma", lambda: remove(MBARRIER_WAIT, 1), "race", "not waited for"
    ),
    "wgmma: next stage not waited for": Mutant(
        "wgmma", lambda: remove(MBARRIER_WAIT, 2), "race", "not waited for"
    ),
    "wgmma: stage freed before its products are done": Mutant(
        "wgmma", lambda: _moved_up("tirx.ptx.mbarrier_arrive", GROUP_WAIT), "race", "overwrites bytes read by"
    ),
    "wgmma: stage never freed": Mutant(
        "wgmma", lambda: remove("tirx.ptx.mbarrier_arrive"), "deadlock", "4 of 4 arrivals"
    ),
    "wgmma: a stage freed by too few warps": Mutant(
        "wgmma", lambda: argument(INIT, 1, _int(lambda n: n - 1), 1), "race"
    ),
    "wgmma: a stage freed by too many warps": Mutant(
        "wgmma", lambda: argument(INIT, 1, _int(lambda n: n + 1), 1), "deadlock", "1 of 5 arrivals"
    ),
    "wgmma: expect_tx too small": Mutant(
        "wgmma", lambda: argument(EXPECT, 1, lambda e: e - tirx.IntImm("uint32", 128)), "race"
    ),
    "wgmma: expect_tx too large": Mutant(
        "wgmma", lambda: argument(EXPECT, 1, _plus(128, "uint32")), "deadlock", "128 bytes more"
    ),
    "wgmma: wrong parity": Mutant(
        "wgmma",
        lambda: argument(MBARRIER_WAIT, 1, lambda e: tirx.BitwiseXor(e, tirx.IntImm("int32", 1)), 1),
        "deadlock",
    ),
    "wgmma: barriers used before they are initialised": Mutant(
        "wgmma", lambda: remove(SYNC, 0), "race", '"init"'
    ),
    "wgmma: initialisation not fenced": Mutant(
        "wgmma", lambda: remove("tirx.ptx.fence_mbarrier_init"), "proxy"
    ),
    "wgmma: a barrier not initialised": Mutant(
        "wgmma", lambda: remove(INIT, 2), "barrier", "no initialised mbarrier"
    ),
    # ---- the epilogue ---------------------------------------------------------------------------
    "wgmma: staging read without a barrier": Mutant(
        "wgmma", lambda: remove("tirx.ptx.bar_sync_count", 0), "race"
    ),
    "wgmma: staging reused without a barrier": Mutant(
        "wgmma two tiles", lambda: remove("tirx.ptx.bar_sync_count", 1), "race", "overwrites bytes read by"
    ),
    "copied: staging not fenced": Mutant("copied", lambda: remove("tirx.ptx.fence_proxy", 1), "proxy"),
    "copied: staging copied without a barrier": Mutant(
        "copied", lambda: remove("tirx.ptx.bar_sync_count", 1), "race", "reads bytes written by"
    ),
    "copied: a buffer staged again without a barrier": Mutant(
        "copied", lambda: remove("tirx.ptx.bar_sync_count", 4), "race", "overwrites bytes read by"
    ),
    "copied: a buffer staged again before it was read": Mutant(
        "copied", lambda: remove(STORE_WAIT, 2), "race", "overwrites bytes read by"
    ),
    "copied: copies of two turns in one group": Mutant("copied", lambda: remove(STORE_COMMIT, 1), "race"),
    "copied: memory left before it was read": Mutant(
        "copied", lambda: remove(STORE_WAIT, 3), "race", "ended before"
    ),
    "copied: stores one row too far": Mutant("copied", lambda: argument(STORE, 2, _plus(1)), "wrong values"),
    "copied: from half a row": Mutant(
        "copied", lambda: argument(STORE, 3, _plus(64, "uint32")), "misaligned"
    ),
    "split: staging read without a warp barrier": Mutant(
        "split", lambda: remove("tirx.cuda.warp_sync", 0), "race"
    ),
    # ---- clusters -------------------------------------------------------------------------------
    "cluster: blocks start without each other": Mutant("cluster", lambda: _without_cluster_sync(0), "race"),
    "cluster: blocks end without each other": Mutant(
        "cluster", lambda: _without_cluster_sync(1), "barrier", "may have ended"
    ),
    "cluster: a block beyond the cluster": Mutant(
        "cluster",
        lambda: argument(TENSOR, 5, lambda e: tirx.IntImm("uint16", 7)),
        "barrier",
        "beyond the cluster",
    ),
    "cluster: copies only to itself": Mutant(
        "cluster", lambda: argument(TENSOR, 5, lambda e: tirx.IntImm("uint16", 1)), "deadlock"
    ),
    "cluster: freed for one producer only": Mutant(
        "cluster", lambda: argument("ladder_arrive_at", 2, lambda e: tirx.IntImm("int32", 0)), "deadlock"
    ),
    "stream: flags raised before the sums are stored": Mutant(
        "stream",
        lambda: _both(_source("ladder_announce", "bar.sync"), _source("ladder_hand_over", "bar.arrive")),
        "race",
        "does not vouch for",
    ),
    "stream: sums taken in without waiting for their flag": Mutant(
        "stream", lambda: _source("ladder_take_over", "while (found"), "race", "does not vouch for"
    ),
    "stream: nobody raises flags": Mutant(
        "stream", lambda: _source("ladder_announce", "", remove_call=True), "deadlock", "a flag"
    ),
    "tails: flags raised before the sums are stored": Mutant(
        "tails",
        lambda: _both(_source("ladder_announce", "bar.sync"), _source("ladder_hand_over", "bar.sync")),
        "race",
        "does not vouch for",
    ),
    "tails: sums taken in without waiting for their flag": Mutant(
        "tails", lambda: _source("ladder_take_over", "while (found"), "race", "does not vouch for"
    ),
    "tails: nobody meets those who hand over": Mutant(
        "tails", lambda: _source("ladder_announce", "", remove_call=True), "deadlock"
    ),
    "split: sums not waited for": Mutant("split", lambda: remove(MBARRIER_WAIT, 3), "race"),
    "split: sums sent before the barriers are ready": Mutant(
        "split", lambda: remove("tirx.ptx.barrier_cluster_wait"), "race", '"init"'
    ),
    "columns: sums not waited for": Mutant("columns", lambda: remove(MBARRIER_WAIT, 3), "race"),
    "columns: sums sent to the wrong block": Mutant(
        "columns", lambda: argument("ladder_send4", 3, lambda e: tirx.IntImm("int32", 0)), "deadlock"
    ),
    "columns: sums to the wrong place": Mutant(
        "columns", lambda: argument("ladder_send4", 1, _index(3, _plus(1))), "wrong values"
    ),
    "split: sums sent to the wrong block": Mutant(
        "split", lambda: argument("ladder_send4", 3, lambda e: tirx.IntImm("int32", 0)), "deadlock"
    ),
    "split: sums to the wrong place": Mutant(
        "split", lambda: argument("ladder_send4", 1, _index(3, _plus(1))), "wrong values"
    ),
}


def _source(helper: str, line: str, remove_call: bool = False) -> Once:
    """Return a change that drops the line of a helper's source that holds a text, or the helper's call."""

    def without(arguments: list[Any]) -> list[Any]:
        place = [i for i, part in enumerate(arguments) if type(part).__name__ == "StringImm"][1]
        kept = [part for part in str(arguments[place].value).splitlines() if line not in part]
        arguments[place] = ir.StringImm("\n".join(kept))
        return arguments

    def change(s: Any) -> Any:
        return NOTHING if remove_call else with_arguments(s, without)

    return Once(lambda s: called(s).startswith(helper), change)


def _both(first: Once, second: Once) -> Callable[[Any], Any]:
    def change(s: Any) -> Any:
        found = first(s)
        return second(s) if found is None else found

    return change


def _is_high(e: Any) -> bool:
    return type(e).__name__ == "IntImm" and str(e.ty) == "uint64" and int(e.value) > 1 << 60


@cache
def _kernel(name: str) -> Any:
    problem, schedule, _ = KERNELS[name]
    return emitted(problem, schedule)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_without_bugs(name: str) -> None:
    problem, _, m = KERNELS[name]
    require_right(_kernel(name), problem, m)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str) -> None:
    mutant = MUTANTS[name]
    problem, _, m = KERNELS[mutant.kernel]
    require_caught(mutant, _kernel(mutant.kernel), problem, m)
