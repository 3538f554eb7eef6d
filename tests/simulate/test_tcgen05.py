"""Kernels of the pipeline ``tcgen05``: right on the simulator, and bugs planted in them are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from problems import SimulatedKernel, bound_of, emitted, gemm, require_caught, require_right
from rewriting import Once, argument, called, of_one_block, remove
from test_expert_kernels import GroupedProblem
from tvm import tirx
from tvm.backend.cuda.cpp.descriptors import encode_instr_descriptor_dense_uint32
from tvm.script import tirx as T
from tvm.tirx.layout import tcgen05_atom_layout
from tvm_ffi import structural_equal

import ladder
from ladder.api.lowered import Lowered
from ladder.ir.gemm import Gemm
from ladder.lower.cuda.tcgen05_memory import instruction_descriptor
from ladder.lower.gpu.proven import packed_layout
from ladder.runtime.compile import ANY_M, Request
from ladder.runtime.packed import pack
from ladder.simulate import simulate_launch
from ladder.simulate.nvidia.tcgen05 import SHAPES, Fragment
from ladder.simulate.operator import simulate
from ladder.simulate.translate import CallView
from schedules.schedule import GpuSchedule, Plan
from targets import get_device
from tile_types import get_type
from tile_types.errors import ScheduleError

B200 = get_device("cuda/sm_100a")


def tcgen05(**fields: Any) -> GpuSchedule:
    """Return a small schedule."""
    small = {"pipeline": "tcgen05", "tile_m": 16, "tile_n": 128, "stages": 3, "warps": 4}
    return GpuSchedule(**{**small, **fields})


CASES: dict[str, tuple[Gemm, GpuSchedule, int, str]] = {
    "float16": (gemm(weight="float16", n=130), tcgen05(), 16, "together"),
    "one row, one column": (gemm(weight="float16", n=1, k=1), tcgen05(), 1, "random"),
    "bfloat16 by int8, deep stages": (
        gemm(
            weight="int8", activation="bfloat16", n=203, k=700, output="bfloat16", group_size=128,
            scale=True,
        ),
        tcgen05(tile_m=96, tile_k=256, stages=2, warps=8),
        130,
        "last warps first",
    ),
    "widest tile": (
        gemm(weight="float16", n=130, k=330),
        tcgen05(tile_m=256, stages=2),
        257,
        "first warps first",
    ),
    "zero points, bias, function": (
        gemm(
            weight="uint4", n=203, k=450, group_size=64, scale=True, zero="integer", bias=True,
            epilogue=("relu",), output="float16",
        ),
        tcgen05(tile_m=32, warps=8),
        70,
        "random",
    ),
    "codebook from shared memory": (
        gemm(weight="nf4", n=140, k=450, group_size=64, scale=True, output="bfloat16"),
        tcgen05(tile_m=48, tile_k=128),
        50,
        "together",
    ),
    "fp8": (
        gemm(weight="fp8_e4m3", activation="fp8_e5m2", n=140, k=450, token_scale=True, output="float16"),
        tcgen05(tile_k=128, tile_m=32, warps=8, placement="accumulator"),
        70,
        "random",
    ),
    "clusters": (
        gemm(weight="int4", n=420, k=700, group_size=64, scale=True, output="float16"),
        tcgen05(cluster=2, tile_m=48),
        100,
        "random",
    ),
    "four blocks to a cluster": (
        gemm(weight="float16", n=600, k=330),
        tcgen05(cluster=4, tile_m=64, tile_k=128, warps=8),
        60,
        "last warps first",
    ),
    "int8": (
        gemm(weight="int8", activation="int8", n=140, k=700, token_scale=True),
        tcgen05(tile_k=128, tile_m=32, placement="accumulator"),
        40,
        "random",
    ),
    "int8 by uint3": (
        gemm(weight="uint3", activation="int8", n=67, k=330),
        tcgen05(tile_k=256, warps=8, placement="accumulator"),
        3,
        "together",
    ),
    "fp8 by fp4": (
        gemm(weight="fp4_e2m1", activation="fp8_e4m3", n=67, k=130),
        tcgen05(tile_k=256, placement="accumulator"),
        3,
        "together",
    ),
    "a pair, one row": (
        gemm(weight="float16", n=1, k=1),
        tcgen05(cluster=2, pair=True, tile_m=32),
        1,
        "random",
    ),
    "a pair, int4": (
        gemm(
            weight="int4", n=420, k=700, group_size=64, scale=True, zero="integer", bias=True,
            output="float16",
        ),
        tcgen05(cluster=2, pair=True, tile_m=64),
        100,
        "random",
    ),
    "a pair, widest tile": (
        gemm(weight="float16", n=130, k=330),
        tcgen05(tile_m=256, stages=2, cluster=2, pair=True),
        257,
        "first warps first",
    ),
    "a pair, bfloat16, deep stages": (
        gemm(
            weight="int8", activation="bfloat16", n=203, k=700, output="bfloat16", group_size=128,
            scale=True,
        ),
        tcgen05(tile_m=96, tile_k=256, stages=2, warps=8, cluster=2, pair=True),
        130,
        "last warps first",
    ),
    "a pair, fp8": (
        gemm(weight="fp8_e4m3", activation="fp8_e5m2", n=340, k=450, token_scale=True, output="float16"),
        tcgen05(tile_k=128, tile_m=32, warps=8, placement="accumulator", cluster=2, pair=True),
        70,
        "random",
    ),
    "a pair, int8": (
        gemm(weight="int8", activation="int8", n=140, k=700, token_scale=True),
        tcgen05(tile_k=128, tile_m=96, placement="accumulator", cluster=2, pair=True),
        40,
        "together",
    ),
    "exponents for scales": (
        gemm(
            weight="fp4_e2m1", activation="bfloat16", n=67, k=330, group_size=32, scale=True,
            power_scales=True,
        ),
        tcgen05(tile_k=128, warps=8),
        20,
        "random",
    ),
}  # fmt: skip
"""Problem, schedule, M, and order of warps; remainders in every dimension."""


@pytest.mark.parametrize("name", CASES)
def test_kernels(name: str) -> None:
    problem, schedule, m, order = CASES[name]
    result = require_right(emitted(problem, schedule, "sm_100a"), problem, m, B200.name, order=order)
    assert result.counts["tcgen05"] > 0


def test_b300_has_the_kernels_of_b200_but_for_integers() -> None:
    """tcgen05 of sm_103a has no kind::i8."""
    for problem, schedule, _, _ in CASES.values():
        if problem.activation == "int8":
            with pytest.raises(ScheduleError, match="no core multiplies int8 in this pipeline"):
                emitted(problem, schedule, "sm_103a")
            continue
        kernels = (emitted(problem, schedule, arch) for arch in ("sm_100a", "sm_103a"))
        assert structural_equal(*kernels)


@pytest.mark.parametrize(
    ("shape", "dtype"), [("16x256b", "float32"), ("16x128b", "float16"), ("32x32b", "float32")]
)
def test_fragments_are_those_of_tvm(shape: str, dtype: str) -> None:
    """TVM has its own table of which thread has which element of tensor memory."""
    each, rows, columns = 4 // np.dtype(dtype).itemsize, 32 if shape == "32x32b" else 16, 32
    modifiers = ("ld", "sync", "aligned", shape, f"x{columns // SHAPES[shape][1]}", "b32")
    fragment = Fragment.of(CallView("", (), modifiers, 0, ""))
    layout = tcgen05_atom_layout(shape, (4 * rows, columns * each), dtype)
    for row, column in np.ndindex(rows, columns * each):
        place = layout.apply(row, column, shape=[4 * rows, columns * each])
        lane = int(place.get("laneid", place.get("tid_in_wg", 0)))
        register = int(place["m"]) // each
        assert (fragment.row[lane, register], fragment.column[lane, register]) == (row, column // each)


@pytest.mark.parametrize(
    "kinds", [("float16", "float16"), ("bfloat16", "bfloat16"), ("fp8_e5m2", "fp8_e4m3"), ("int8", "int8")]
)
def test_instruction_descriptors_are_those_of_tvm(kinds: tuple[str, str]) -> None:
    names = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    sums = "int32" if kinds[0] == "int8" else "float32"
    types = (sums, *(names.get(kind, kind) for kind in kinds))
    k = 16 if kinds[0].endswith("float16") else 32
    for blocks, columns in ((1, 16), (1, 144), (1, 256), (2, 32), (2, 160), (2, 256)):
        theirs = encode_instr_descriptor_dense_uint32(
            128 * blocks, columns, k, *types, False, False, cta_group=blocks
        )
        assert instruction_descriptor(*kinds, columns, blocks) == theirs


def test_after_passes() -> None:
    problem, schedule, m, _ = CASES["zero points, bias, function"]
    require_right(emitted(problem, schedule, "sm_100a"), problem, m, B200.name, stage="passed")


@pytest.mark.parametrize("k", [64, 192])
def test_infinities_and_nan(k: int) -> None:
    """Also where slabs beyond K repeat a tile of weights, whose infinities zeros of x must not make NaN."""
    problem = gemm(weight="float16", n=128, k=k, group_size=k)
    w, x = np.zeros((128, k), np.float16), np.ones((5, k), np.float16)
    w[3, k - 1], w[4, 0], w[5, 1], w[6, 2] = np.inf, -np.inf, np.nan, -0.0
    x[1], x[2], x[3, 3], x[4, k - 1] = -1.0, 0.0, np.inf, np.nan
    layout = packed_layout(get_type("float16"), "float16")
    words = layout.pack(w.view(np.uint16), 0).numpy().reshape(layout.packed_shape(128, k))
    y = np.full((5, 128), 7.0, np.float32)
    function = emitted(problem, tcgen05(tile_k=128), "sm_100a")
    result = simulate_launch(function, [x, words, np.ones(128, np.float32), y])
    assert not result.findings, result.report()
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(y, x.astype(np.float32) @ w.astype(np.float32).T)


def test_residual_and_factor() -> None:
    rng = np.random.default_rng(3)
    w, x, residual = (rng.normal(size=shape).astype(np.float16) for shape in ((77, 130), (20, 130), (20, 77)))
    factor = rng.uniform(0.5, 2, 77).astype(np.float32)
    problem = gemm(
        weight="float16", n=77, k=130, group_size=130, output="float16", residual=True, factor=True,
        epilogue=("relu",),
    )  # fmt: skip
    exact = np.maximum(x.astype(np.float64) @ w.astype(np.float64).T * factor + residual, 0)
    given = {"residual": torch.from_numpy(residual), "factor": torch.from_numpy(factor)}
    result = _simulate(problem, w, x, **given, expected=exact)
    assert not result.findings, result.report()


@pytest.mark.parametrize(
    ("fields", "changes", "words"),
    [
        ({"experts": 4}, {"cluster": 2}, "one expert each"),
        ({"token_group": 64, "token_scale": True}, {}, "token_group"),
        (
            {"activation": "int8", "zero": "integer"},
            {"placement": "accumulator", "tile_k": 128},
            "cannot meet",
        ),
        (
            {"activation": "fp8_e4m3", "group_size": 64, "scale": True},
            {"placement": "accumulator", "tile_k": 128},
            "cannot meet sums",
        ),
        ({}, {"tile_m": 24}, "tile_m=24"),
        ({}, {"tile_n": 64}, "tile_n=64"),
        ({}, {"split_k": 2}, "split_k=2"),
        ({}, {"cluster": 8}, "cluster=8"),
        ({}, {"cluster": 4}, "cannot share 16 activation rows"),
        ({}, {"persistent": True}, "persistent=True"),
        ({}, {"pair": True}, "cluster of two"),
        ({}, {"pair": True, "cluster": 2, "tile_m": 16}, "multiple of 32"),
        ({}, {"placement": "accumulator"}, "apply on the operand"),
        ({"weight": "float16"}, {"tile_m": 256, "stages": 8}, "shared memory"),
    ],
)
def test_refused_by_name(fields: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        emitted(gemm(**fields), tcgen05(**changes), "sm_100a")


@pytest.mark.parametrize("counts", [(3, 0, 17, 1), (0, 0, 0, 40), (1,), (0, 5, 0)])
def test_experts(counts: tuple[int, ...]) -> None:
    problem = gemm(group_size=64, scale=True, zero="integer", bias=True, epilogue=("relu",))
    kernel = SimulatedKernel(emitted(replace(problem, experts=1), tcgen05(), "sm_100a"), target=B200.name)
    assert GroupedProblem(problem, counts).run(kernel) <= bound_of(problem)


def test_other_devices_refuse() -> None:
    with pytest.raises(ScheduleError, match="lacks 'tcgen05'"):
        emitted(gemm(), tcgen05(), "sm_90a")


def _simulate(problem: Gemm, w: Any, x: Any, **operands: Any) -> Any:
    """Pack weights and run a kernel."""
    kernel = Lowered(Request(problem, B200.name, Plan(((ANY_M, tcgen05(tile_k=128)),))))
    weight = ladder.quantize(torch.from_numpy(w), problem.weight)
    return simulate(kernel, torch.from_numpy(x), pack(problem, B200, weight), **operands)


@dataclass(frozen=True)
class Mutant:
    """A bug: what changes, the kind of finding (and words of it) that must name it, and the kernel."""

    change: Callable[[], Any]
    kind: str
    words: str = ""
    kernel: str = "one"


WAIT, INIT, SYNC = "tirx.cuda.mbarrier_wait", "tirx.ptx.mbarrier_init", "tirx.cuda.cta_sync"
FENCE, TENSOR_WAIT = "tirx.ptx.tcgen05_fence", "tirx.ptx.tcgen05_wait"
PRODUCT, COMMIT, LOAD = "tirx.ptx.tcgen05_mma_ts", "tirx.ptx.tcgen05_commit", "tirx.ptx.tcgen05_ld"
COMMIT_TO_ALL = "tirx.ptx.tcgen05_commit_multicast"
STORE, ALLOCATE, FREE = "tirx.ptx.tcgen05_st", "tirx.ptx.tcgen05_alloc", "tirx.ptx.tcgen05_dealloc"


def _plus(amount: int, dtype: str = "uint32") -> Callable[[Any], Any]:
    return lambda e: e + tirx.IntImm(dtype, amount)


def _number(value: int) -> Callable[[Any], Any]:
    return lambda e: tirx.IntImm("uint32", value)


def _arrives_at_once() -> Once:
    """Return a change after which a stage is free when its products are started, not when they are done."""

    def change(s: Any) -> Any:
        barrier = s.value.args[0].args[0]
        return tirx.Evaluate(T.ptx.mbarrier.arrive.shared.b64(barrier, T.uint32(1)))

    return Once(lambda s: called(s) == COMMIT, change, 1, 3)


def _elected_by_none() -> Once:
    """Return a change after which all threads of a warp start products."""

    def matches(s: Any) -> bool:
        return type(s).__name__ == "IfThenElse" and "elect" in str(getattr(s.condition, "op", ""))

    return Once(matches, lambda s: s.then_case, 1)


def _to_first_block(which: int) -> Once:
    """Return a change of a commit after which products arrive at the first block alone."""
    return argument(COMMIT_TO_ALL, 1, lambda e: tirx.IntImm("uint16", 1), which)


def _by_both() -> Once:
    """Return a change after which the second block of a pair starts products too."""

    def matches(s: Any) -> bool:
        return type(s).__name__ == "IfThenElse" and type(s.condition).__name__ == "And"

    return Once(matches, lambda s: tirx.IfThenElse(s.condition.a, s.then_case, s.else_case))


MUTANTS: dict[str, Mutant] = {
    "sums read before they are finished": Mutant(lambda: remove(WAIT, 5), "race", "reads tensor memory"),
    "sums read without a fence": Mutant(lambda: remove(FENCE, 6), "asynchronous", "after_thread_sync"),
    "sums used before their load is done": Mutant(
        lambda: remove(TENSOR_WAIT, 2), "asynchronous", "before the wait"
    ),
    "sums of other lanes": Mutant(
        lambda: argument(LOAD, 8, _plus(16 << 16)), "out of bounds", "accesses lanes"
    ),
    "sums of other columns": Mutant(lambda: argument(LOAD, 8, _plus(8)), "uninitialised"),
    "weights overwritten while products read them": Mutant(
        lambda: remove(WAIT, 1), "race", "overwrites tensor memory that others still read"
    ),
    "weights overwritten without a fence": Mutant(
        lambda: remove(FENCE, 4), "asynchronous", "after_thread_sync"
    ),
    "weights handed over before their store is done": Mutant(
        lambda: remove(TENSOR_WAIT, 0), "race", "reads tensor memory"
    ),
    "weights handed over without a fence": Mutant(lambda: remove(FENCE, 5), "race", "reads tensor memory"),
    "weights in other columns": Mutant(lambda: argument(STORE, 0, _plus(2)), "wrong values"),
    "products before weights are decoded": Mutant(lambda: remove(WAIT, 8), "uninitialised", "nothing wrote"),
    "products without a fence": Mutant(lambda: remove(FENCE, 8), "asynchronous", "after_thread_sync"),
    "products and words before their copies": Mutant(lambda: remove(WAIT, 0, 7), "race", "reads bytes"),
    "products by every thread": Mutant(_elected_by_none, "divergence", "one product each"),
    "products of another row of x": Mutant(lambda: argument(PRODUCT, 2, _plus(8, "uint64")), "wrong values"),
    "products of other columns of weights": Mutant(lambda: argument(PRODUCT, 1, _plus(8), 0), "wrong values"),
    "products that add to what was there": Mutant(
        lambda: argument(PRODUCT, 8, lambda e: tirx.IntImm("bool", 1), 0), "uninitialised"
    ),
    "products of another type": Mutant(
        lambda: argument(PRODUCT, 3, lambda e: tirx.IntImm("uint32", int(e.value) | 1 << 7)), "wrong values"
    ),
    "x overwritten while products read it": Mutant(_arrives_at_once, "race", "overwrites bytes read by"),
    "weights never given back": Mutant(lambda: remove(COMMIT, 0), "deadlock"),
    "sums never finished": Mutant(lambda: remove(COMMIT, 4), "deadlock"),
    "too few columns": Mutant(lambda: argument(ALLOCATE, 1, _number(64)), "out of bounds", "not allocated"),
    "columns of no power of two": Mutant(
        lambda: argument(ALLOCATE, 1, _number(96)), "out of bounds", "power of two"
    ),
    "columns kept": Mutant(lambda: remove(FREE), "barrier", "columns of tensor memory allocated"),
    "columns freed while sums are read": Mutant(lambda: remove(SYNC, 1), "race", "frees tensor memory"),
    "address used before it is written": Mutant(lambda: remove(SYNC, 0), "race"),
    "cluster: products leave one block's stage only": Mutant(
        lambda: argument(COMMIT_TO_ALL, 1, lambda e: tirx.IntImm("uint16", 1)), "deadlock", "", "cluster"
    ),
    "cluster: products leave stages beyond the cluster": Mutant(
        lambda: argument(COMMIT_TO_ALL, 1, lambda e: tirx.IntImm("uint16", 7)),
        "barrier",
        "beyond the cluster",
        "cluster",
    ),
    "cluster: a block ends while products arrive there": Mutant(
        lambda: remove(WAIT, 7), "barrier", "without having waited", "cluster"
    ),
    "cluster: the other block's products not waited for": Mutant(
        lambda: argument(INIT, 1, _number(5), 6, 8, 10), "race", "overwrites bytes read by", "cluster"
    ),
    "pair: products before the other block's weights are decoded": Mutant(
        lambda: argument(INIT, 1, _number(4), 0, 2), "deadlock", "", "pair"
    ),
    "pair: weights given back to one block only": Mutant(lambda: _to_first_block(0), "deadlock", "", "pair"),
    "pair: a stage given back to one block only": Mutant(lambda: _to_first_block(2), "deadlock", "", "pair"),
    "pair: sums finished for one block only": Mutant(lambda: _to_first_block(4), "deadlock", "", "pair"),
    "pair: a block ends while products arrive there": Mutant(
        lambda: remove(WAIT, 6), "barrier", "without having waited", "pair"
    ),
    "pair: sums read before they are finished": Mutant(
        lambda: remove(WAIT, 5), "barrier", "without having waited", "pair"
    ),
    "pair: weights overwritten while products read them": Mutant(
        lambda: remove(WAIT, 1), "race", "overwrites tensor memory that others still read", "pair"
    ),
    "pair: products of another row of x": Mutant(
        lambda: argument(PRODUCT, 2, _plus(8, "uint64")), "wrong values", "", "pair"
    ),
    "pair: columns allocated for one block alone": Mutant(
        lambda: of_one_block(ALLOCATE), "barrier", "cta_group::2 in a kernel", "pair"
    ),
    "pair: both blocks start products": Mutant(
        lambda: _by_both(), "deadlock", "needs 8 of 8 arrivals", "pair"
    ),
}


KERNELS = {
    "one": (gemm(weight="float16", n=130, k=700), tcgen05(), 16),
    "cluster": (gemm(weight="float16", n=260, k=700), tcgen05(cluster=2), 16),
    "pair": (gemm(weight="float16", n=260, k=700), tcgen05(cluster=2, pair=True, tile_m=32), 32),
}
"""Kernels that mutants are made of, with M."""


@cache
def _kernel(name: str) -> Any:
    problem, schedule, _ = KERNELS[name]
    return emitted(problem, schedule, "sm_100a")


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_without_bugs(name: str) -> None:
    problem, _, m = KERNELS[name]
    require_right(_kernel(name), problem, m, B200.name)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str) -> None:
    mutant = MUTANTS[name]
    problem, _, m = KERNELS[mutant.kernel]
    require_caught(mutant, _kernel(mutant.kernel), problem, m, B200.name)
