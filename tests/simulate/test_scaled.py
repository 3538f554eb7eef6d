"""Block-scaled products: right on the simulator, the layout of scales by exhaustion, planted bugs found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from rewriting import argument, of_one_block, remove, rewrite
from tvm import tirx
from tvm.backend.cuda.cpp.descriptors import (
    encode_instr_descriptor_block_scaled_uint32,
    encode_smem_descriptor_base_uint64,
)
from tvm_ffi import structural_equal

import ladder
from ladder.ir.scaled import FORMATS, ScaledGemm
from ladder.lower.cuda.scaled import SCALES_HIGH, emit, instruction_descriptor
from ladder.runtime.scaled import ScaledOperand, arguments, operand_of, quantize_rows
from ladder.simulate import simulate_launch
from schedules.scaled import (
    ScaledSchedule,
    is_legal,
    place_scales,
    predict,
    schedules,
    tensor_columns,
)
from schedules.scaled_choice import choose
from targets import get_device
from tile_types.errors import ConversionError, DeviceError, DTypeError, LadderError, ScheduleError, ShapeError

B200 = get_device("cuda/sm_100a")
ML = {"e8m0": ml_dtypes.float8_e8m0fnu, "fp8_e4m3": ml_dtypes.float8_e4m3fn}
ML |= {"fp4_e2m1": ml_dtypes.float4_e2m1fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
ML |= {"fp6_e2m3": ml_dtypes.float6_e2m3fn, "fp6_e3m2": ml_dtypes.float6_e3m2fn}
KINDS = [name for name, own in FORMATS.items() if own.bits != 6]
"""Block types that are multiplied with themselves on this GPU."""


def product(kind: str, n: int = 130, k: int = 700, **fields: Any) -> ScaledGemm:
    """Return a small problem with float32 results."""
    return ScaledGemm(n, k, kind, fields.pop("activation", kind), "float32", **fields)


def values(kind: str, codes: np.ndarray, scales: np.ndarray, k: int) -> np.ndarray:
    """Return the values of stored codes and scales, by ml_dtypes alone."""
    own = FORMATS[kind]
    bits = np.unpackbits(codes, axis=1, bitorder="little")
    bits = bits[:, : bits.shape[1] // own.bits * own.bits].reshape(len(codes), -1, own.bits)
    codes = np.packbits(bits, axis=-1, bitorder="little")[..., 0]
    element = codes.view(ML[own.element]).astype(np.float64)[:, :k]
    scale = scales.view(ML[own.scale]).astype(np.float64)
    return element * np.repeat(scale, own.group, axis=1)[:, :k]


@dataclass(frozen=True)
class Matrix:
    """Random codes and scales, every one of them valid, and their values."""

    operand: ScaledOperand
    exact: np.ndarray


def random_matrix(form: ScaledGemm, kind: str, rows: int, seed: int) -> Matrix:
    """Draw any finite code, and scales of some range."""
    own, rng = FORMATS[kind], np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, -(-form.k * own.bits // 8))).astype(np.uint8)
    if own.bits == 8:
        codes[~np.isfinite(codes.view(ML[own.element]).astype(np.float32))] = 0
    elif form.k * own.bits % 8:
        codes[:, -1] &= (1 << form.k * own.bits % 8) - 1
    low, high = (120, 134) if own.scale == "e8m0" else (1, 127)
    scales = rng.integers(low, high, (rows, -(-form.k // own.group))).astype(np.uint8)
    factor = torch.tensor([float(rng.uniform(0.5, 2))])
    padded = np.pad(codes, ((0, 0), (0, own.row_bytes(form.k) - codes.shape[1])))
    placed = place_scales(torch.from_numpy(scales), own, form.k)
    operand = ScaledOperand(kind, (rows, form.k), torch.from_numpy(padded), placed, factor)
    return Matrix(operand, values(kind, codes, scales, form.k) * factor.item())


def launch(
    function: Any, form: ScaledGemm, x: ScaledOperand, w: ScaledOperand, bias: Any = None, **options: Any
) -> tuple[Any, np.ndarray]:
    """Simulate a kernel on a poisoned result."""
    y = torch.full((x.shape[0], form.n), float("nan"))
    arrays = [array.numpy() for array in arguments(x, w, bias, y)]
    return simulate_launch(function, arrays, target=B200, **options), arrays[-1]


def error_of(y: np.ndarray, exact: np.ndarray) -> float:
    """Return the relative Frobenius error."""
    return float(np.linalg.norm(y - exact) / np.linalg.norm(exact))


CASES = {
    "one row, one column": (1, 1, 1, ScaledSchedule(32, 2), "random"),
    "a short tile": (3, 67, 200, ScaledSchedule(32, 3), "together"),
    "tiles of a quarter atom": (70, 130, 300, ScaledSchedule(32, 4), "random"),
    "tiles of half an atom": (140, 130, 1000, ScaledSchedule(64, 3), "last warps first"),
    "whole atoms, two columns of tiles": (140, 259, 1333, ScaledSchedule(128, 2), "first warps first"),
    "two atoms": (300, 130, 700, ScaledSchedule(256, 2), "random"),
    "two blocks share K": (5, 200, 1100, ScaledSchedule(32, 2, 2), "random"),
    "eight blocks share K": (5, 60, 2600, ScaledSchedule(32, 4, 8), "last warps first"),
    "a pair, one row, one column": (1, 1, 1, ScaledSchedule(32, 2, pair=True), "random"),
    "a pair, a quarter atom": (70, 130, 300, ScaledSchedule(32, 4, pair=True), "random"),
    "a pair, half an atom": (140, 300, 1000, ScaledSchedule(64, 3, pair=True), "last warps first"),
    "a pair, whole atoms": (140, 259, 1333, ScaledSchedule(128, 2, pair=True), "first warps first"),
    "a pair, two atoms": (300, 400, 700, ScaledSchedule(256, 2, pair=True), "random"),
    "half the weight rows, one row": (1, 1, 1, ScaledSchedule(32, 2, rows=64), "random"),
    "half the weight rows": (8, 128, 512, ScaledSchedule(32, 3, rows=64), "together"),
    "half the weight rows, many rows": (70, 250, 300, ScaledSchedule(32, 4, rows=64), "random"),
    "half the weight rows, four blocks share K": (5, 200, 2600, ScaledSchedule(32, 4, 4, rows=64), "random"),
}
"""M, N, K, schedule, order of warps."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_kernels(kind: str, name: str) -> None:
    m, n, k, schedule, order = CASES[name]
    form = product(kind, n, k, bias=True)
    x, w = random_matrix(form, kind, m, 1), random_matrix(form, kind, n, 2)
    bias = torch.from_numpy(np.random.default_rng(3).normal(size=n).astype(np.float32))
    result, y = launch(emit(form, B200, schedule, "k"), form, x.operand, w.operand, bias, order=order)
    assert not result.findings, result.report()
    assert error_of(y, x.exact @ w.exact.T + bias.numpy()) <= 1e-6
    assert result.counts["tcgen05"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_b300_has_the_kernels_of_b200(kind: str) -> None:
    """What is simulated of one is so of the other."""
    b300 = get_device("cuda/sm_103a")
    for _, n, k, schedule, _ in CASES.values():
        form = product(kind, n, k, bias=True)
        assert structural_equal(emit(form, b300, schedule, "k"), emit(form, B200, schedule, "k"))


def test_types_of_one_kind_mix() -> None:
    form = product("mxfp8_e5m2", activation="mxfp8_e4m3")
    x, w = random_matrix(form, form.activation, 20, 1), random_matrix(form, form.weight, 130, 2)
    result, y = launch(emit(form, B200, ScaledSchedule(32, 2), "k"), form, x.operand, w.operand)
    assert not result.findings, result.report()
    assert error_of(y, x.exact @ w.exact.T) <= 1e-6


# ---- where scales lie ------------------------------------------------------------------------------
@pytest.mark.parametrize(("rows", "groups"), [(128, 4), (129, 5), (1, 1), (300, 33)])
def test_every_scale_lies_where_the_isa_says(rows: int, groups: int) -> None:
    form = product("nvfp4", k=16 * groups)
    marks = np.arange(rows * groups).reshape(rows, groups)
    for shift in (0, 8):  # a byte holds part of a mark
        part = (marks >> shift & 255).astype(np.uint8)
        placed = place_scales(torch.from_numpy(part), form.format, form.k).numpy()
        flat = placed.reshape(-1)
        seen = np.zeros(flat.size, bool)
        for row, group in np.ndindex(rows, groups):
            atom = row // 128 * placed.shape[1] + group // 4
            at = atom * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4
            assert flat[at] == part[row, group]
            seen[at] = True
        assert not flat[~seen].any()


@pytest.mark.parametrize("kind", ["mxfp8_e4m3", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("side", ["weight", "activation"])
@pytest.mark.parametrize(
    "schedule",
    [
        ScaledSchedule(64, 2),
        ScaledSchedule(256, 2),
        ScaledSchedule(256, 2, 1, True),
        ScaledSchedule(32, 2, rows=64),
    ],
    ids=str,
)
def test_every_scale_reaches_its_block(kind: str, side: str, schedule: ScaledSchedule) -> None:
    """One block of K at a time is not zero: each row's result then is its own scale there."""
    own, rows, other = FORMATS[kind], 256 if side == "activation" else 128, 16
    form = product(kind, rows if side == "weight" else other, 128 * 8 // own.bits)
    groups, one = form.k // own.group, {4: 2, 8: 0x38}[own.bits]
    rng = np.random.default_rng(5)
    low, high = (100, 150) if own.scale == "e8m0" else (8, 120)
    scales = rng.integers(low, high, (rows, groups)).astype(np.uint8)
    ones = np.full((other, groups), 127 if own.scale == "e8m0" else 0x38, np.uint8)
    function = emit(form, B200, schedule, "k")
    for group in range(groups):
        full = np.zeros(form.k, np.uint8)
        full[group * own.group : (group + 1) * own.group] = one
        bytes_ = full if own.bits == 8 else full[::2] | full[1::2] << 4
        parts = {}
        for name, held in (("own", scales), ("other", ones)):
            codes = torch.from_numpy(np.tile(bytes_, (len(held), 1)))
            placed = place_scales(torch.from_numpy(held), own, form.k)
            parts[name] = ScaledOperand(kind, (len(held), form.k), codes, placed, torch.ones(1))
        x, w = (parts["other"], parts["own"]) if side == "weight" else (parts["own"], parts["other"])
        _, y = launch(function, form, x, w)
        exact = scales[:, group].view(ML[own.scale]).astype(np.float32) * own.group
        np.testing.assert_array_equal(y if side == "weight" else y.T, np.tile(exact, (other, 1)))


TVM_NAMES = {"mxfp8_e4m3": "float8_e4m3fn", "mxfp8_e5m2": "float8_e5m2", "mxfp4": "float4_e2m1fn"}
TVM_NAMES["nvfp4"] = "float4_e2m1fn"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [32, 64, 256])
def test_descriptors_are_those_of_tvm(kind: str, columns: int) -> None:
    own, name = FORMATS[kind], TVM_NAMES[kind]
    scale = {"e8m0": "float8_e8m0fnu", "fp8_e4m3": "float8_e4m3fn"}[own.scale]
    for blocks in (2, 1):
        given = (128 * blocks, columns, 256 // own.bits, "float32", name, name, scale, False, False)
        theirs = encode_instr_descriptor_block_scaled_uint32(*given, cta_group=blocks)
        assert instruction_descriptor(product(kind), columns, blocks=blocks) == theirs
    for byte in range(0, 4, own.scale_vec):  # which TVM patches in, per product
        assert instruction_descriptor(product(kind), columns, byte) == theirs | byte << 4 | byte << 29
    assert encode_smem_descriptor_base_uint64(1, 8, 0) == SCALES_HIGH << 32 | 1 << 16


# ---- values ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", FORMATS)
def test_activations_are_quantized_as_by_quantize(kind: str) -> None:
    form = product(kind, k=77)
    x = torch.randn(40, 77, generator=torch.Generator().manual_seed(0))
    x *= torch.exp(4 * torch.randn(40, 1, generator=torch.Generator().manual_seed(1)))
    x[0], x[1, 32:64], x[2, 5], x[3] = 0.0, 0.0, -0.0, x[3] * 1e-38
    x[4, 0], x[5, :3] = 1e30, torch.tensor([0.25, 0.75, 6.0])
    found, wanted = quantize_rows(form, x), operand_of(form, kind, ladder.quantize(x, kind))
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scales, wanted.scales)
    assert torch.equal(found.factor, wanted.factor)
    assert quantize_rows(form, x[:0]).codes.shape == (0, form.row_bytes)
    assert torch.equal(quantize_rows(form, x[:1]).codes, torch.zeros(1, form.row_bytes, dtype=torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_its_row_nan(kind: str, bad: float) -> None:
    op = ladder.Matmul(N=33, K=100, weight=kind, activation=kind, output="float32", target=B200.name)
    x = torch.ones(3, 100)
    x[1, 70] = bad
    y = ladder.simulate(op, x, op.pack(ladder.quantize(torch.ones(33, 100), kind))).y
    assert np.isnan(y[1]).all()
    np.testing.assert_allclose(y[[0, 2]], 100, rtol=1e-6)


@pytest.mark.parametrize("kind", ["mxfp8_e4m3", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("output", ["bfloat16", "float16"])
def test_users_simulate(kind: str, output: str) -> None:
    op = ladder.Matmul(130, 333, kind, kind, output=output, bias=True, target=B200.name)
    generator = torch.Generator().manual_seed(1)
    w = ladder.quantize(torch.randn(130, 333, generator=generator), kind)
    x, bias = torch.randn(2, 3, 333, generator=generator), torch.ones(130, dtype=getattr(torch, output))
    stored = ladder.quantize(x.reshape(6, 333), kind)
    expected = stored.dequantize("float64") @ w.dequantize("float64").T + 1
    for given in (x, stored):
        result = ladder.simulate(op, given, op.pack(w), bias, expected=expected)
        assert not result.findings, result.report()
    assert ladder.simulate(op, x, op.pack(w), bias, expected=expected + 1).findings


# ---- linear layers, refusals -----------------------------------------------------------------------
def test_linear_layers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 64, dtype=torch.bfloat16))
    expected = ladder.quantize(model[0].weight, "nvfp4")
    bias = model[0].bias.detach().clone()
    ladder.quantize_(model, "nvfp4", activation="nvfp4")
    layer = model[0]
    assert "nvfp4" in repr(layer)
    assert layer.problem == ScaledGemm(64, 100, "nvfp4", "nvfp4", "bfloat16", True)
    same = operand_of(layer.problem, "nvfp4", expected)
    assert all(torch.equal(getattr(layer.packed, name), getattr(same, name)) for name in ("codes", "scales"))
    assert torch.equal(layer.bias, bias)
    twin = ladder.Linear.from_linear(torch.nn.Linear(100, 64).bfloat16(), "nvfp4", activation="nvfp4")
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin.packed.factor, same.factor)
    assert twin.half().problem.output == "float16"
    assert twin.factor.dtype == torch.float32
    with pytest.raises(DeviceError, match="16-bit activation"):
        layer(torch.ones(1, 100, dtype=torch.bfloat16))
    with pytest.raises(ConversionError, match="batch_invariant"):
        ladder.Linear.from_quantized(expected, activation="nvfp4", batch_invariant=True)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: ScaledGemm(8, 8, "mxfp4", "nvfp4"), ConversionError, "one type"),
        (lambda: choose(ScaledGemm(8, 8, "mxfp4", "mxfp8_e4m3"), B200, 1), DeviceError, "by itself"),
        (lambda: choose(ScaledGemm(8, 8, "mxfp6_e2m3", "mxfp6_e2m3"), B200, 1), DeviceError, "by itself"),
        (lambda: ladder.Matmul(8, 8, "int4", "mxfp4"), LadderError, "block-scaled operand"),
        (lambda: ladder.Matmul(8, 8, "mxfp4", "mxfp4", epilogue=("relu",)), ConversionError, "epilogue"),
        (lambda: ladder.Matmul(8, 8, "mxfp4", "mxfp4", output="int8"), DTypeError, "int8"),
        (lambda: ladder.Matmul(0, 8, "mxfp4", "mxfp4"), ShapeError, "at least 1"),
        (lambda: ScaledSchedule(48), ScheduleError, "tile_m=48"),
        (lambda: ScaledSchedule(64, 2, 2), ScheduleError, "share K"),
        (lambda: ScaledSchedule(32, 2, 2, True), ScheduleError, "not in pairs"),
        (lambda: ScaledSchedule(64, 2, rows=64), ScheduleError, "32 activation rows"),
        (lambda: ScaledSchedule(32, 2, 1, True, 64), ScheduleError, "no pairs"),
        (lambda: ScaledSchedule(32, 2, rows=32), ScheduleError, "rows=32"),
        (lambda: emit(product("mxfp4"), B200, ScaledSchedule(32, 2, 4), "k"), ScheduleError, "slabs"),
        (lambda: emit(product("nvfp4"), B200, ScaledSchedule(256, 5), "k"), ScheduleError, "shared memory"),
        (lambda: emit(product("nvfp4"), get_device("cuda/sm_90a"), ScaledSchedule(), ""), DeviceError, "no"),
        (lambda: _op().pack(ladder.quantize(torch.ones(8, 64), "int4")), DTypeError, "int4"),
        (lambda: _op().pack(ladder.quantize(torch.ones(9, 64), "mxfp4")), ShapeError, "9"),
        (lambda: _op()(torch.ones(2, 63), _packed()), ShapeError, "63"),
        (lambda: _op()(torch.ones(2, 64, dtype=torch.int8), _packed()), DTypeError, "int8"),
        (lambda: _op()(torch.ones(2, 64), _packed(), torch.ones(8)), ShapeError, "without a bias"),
        (lambda: _op().lower().source("asm"), LadderError, "asm"),
        (lambda: ladder.Linear(64, 8, weight="mxfp4", activation="mxfp4"), ConversionError, "from_linear"),
    ],
)  # fmt: skip
def test_refused_by_name(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def _op() -> Any:
    return ladder.Matmul(8, 64, "mxfp4", "mxfp4")


def _packed() -> Any:
    return _op().pack(ladder.quantize(torch.ones(8, 64), "mxfp4"), "cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_of_a_square_layer_are_predicted_near_the_memory(kind: str) -> None:
    """Twice as many blocks read the weights, none waits for another's sums."""
    form = ScaledGemm(8192, 8192, kind, kind, "bfloat16")
    best = choose(form, B200, 1)
    assert best.rows == 64
    dram = B200.layer("dram")
    least = 8192 * (form.row_bytes + 4 * form.scale_atoms) / dram.sustained_bandwidth
    assert predict(form, B200, best, 1).seconds < 1.6 * least
    if kind == "nvfp4":
        assert predict(form, B200, best, 1).seconds <= 8e-6


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_fit(kind: str) -> None:
    form = product(kind, 4096, 8192)
    options = list(schedules(form, B200))
    assert {option.tile_m for option in options} == {32, 64, 128, 256}
    for option in options:
        assert tensor_columns(form, option) <= 512
        assert is_legal(form, B200, option)
        assert predict(form, B200, option, 64).seconds > 0
    assert not is_legal(form, B200, ScaledSchedule(256, 8))


# ---- planted bugs ----------------------------------------------------------------------------------
WAIT = "tirx.cuda.mbarrier_wait"
PRODUCT, COPY = "tirx.ptx.tcgen05_mma_block_scale_ss", "tirx.ptx.tcgen05_cp"
COMMIT, FENCE, BULK = (
    "tirx.ptx.tcgen05_commit",
    "tirx.ptx.tcgen05_fence",
    "tirx.ptx.cp_async_bulk_g2s_cluster",
)
LOAD, ALLOCATE = "tirx.ptx.tcgen05_ld", "tirx.ptx.tcgen05_alloc"


def plus(amount: int, dtype: str = "uint32") -> Callable[[Any], Any]:
    """Return a change that adds a number."""
    return lambda e: e + tirx.IntImm(dtype, amount)


def number(change: Callable[[int], int]) -> Callable[[Any], Any]:
    """Return a change of a constant."""
    return lambda e: tirx.IntImm("uint32", change(int(e.value)))


@dataclass(frozen=True)
class Mutant:
    """A bug: what changes, the kind of finding (and words of it) that must name it, and the kernel."""

    change: Callable[[], Any]
    kind: str
    words: str = ""
    kernel: str = "nvfp4"


def _one_place_for_scales() -> Callable[[Any], Any]:
    """Return a change after which all stages have their scales in the first one's columns."""

    def change(s: Any) -> Any:
        if type(s).__name__ != "BufferStore" or "* T.uint32(32)" not in str(s.value):
            return None
        return tirx.BufferStore(s.buffer, s.value.a, s.indices)  # without the stage's own columns

    return change


def _to_first_block(which: int) -> Any:
    """Return a change of a commit after which products arrive at the first block alone."""
    return argument(COMMIT + "_multicast", 1, lambda e: tirx.IntImm("uint16", 1), which)


MUTANTS = {
    "scales of another atom": Mutant(lambda: argument(PRODUCT, 4, plus(4), 0), "wrong values"),
    "scales of x of another atom": Mutant(lambda: argument(PRODUCT, 5, plus(4), 0), "wrong values"),
    "scales of another byte": Mutant(
        lambda: argument(PRODUCT, 3, number(lambda v: v ^ 1 << 29), 1), "wrong values", "", "mxfp8_e4m3"
    ),
    "scales of x of another byte": Mutant(
        lambda: argument(PRODUCT, 3, number(lambda v: v ^ 2 << 4), 1), "wrong values", "", "mxfp4"
    ),
    "scales copied to other columns": Mutant(lambda: argument(COPY, 0, plus(4), 0), "wrong values"),
    "scales copied askew": Mutant(lambda: argument(COPY, 0, plus(1), 0), "out of bounds", "atom"),
    "scales not copied": Mutant(lambda: remove(COPY, 0), "uninitialised", "nothing wrote"),
    "scales of the atom after": Mutant(lambda: argument(COPY, 1, plus(32, "uint64"), 1), "wrong values"),
    "scales not brought": Mutant(lambda: remove(BULK, 0), "deadlock"),
    "scales of other types": Mutant(
        lambda: argument(PRODUCT, 3, number(lambda v: v ^ 1 << 7), 0), "wrong values", "", "mxfp8_e4m3"
    ),
    "scales overwritten while products read them": Mutant(_one_place_for_scales, "race", "still read"),
    "products before their copies": Mutant(lambda: remove(WAIT, 2), "race", "reads bytes"),
    "products without a fence": Mutant(lambda: remove(FENCE, 4), "asynchronous", "after_thread_sync"),
    "products of a step after": Mutant(lambda: argument(PRODUCT, 2, plus(2, "uint64"), 1), "wrong values"),
    "products of other weights": Mutant(lambda: argument(PRODUCT, 1, plus(8, "uint64"), 1), "wrong values"),
    "products that add to what was there": Mutant(
        lambda: argument(PRODUCT, 6, lambda e: tirx.IntImm("bool", 1), 0), "uninitialised"
    ),
    "columns used before their allocation is known": Mutant(lambda: remove(FENCE, 0), "race", "allocated"),
    "products never counted": Mutant(lambda: remove(COMMIT, 0), "deadlock"),
    "sums never finished": Mutant(lambda: remove(COMMIT, 1), "deadlock"),
    "stages filled while products read them": Mutant(lambda: remove(WAIT, 1), "race", "overwrites bytes"),
    "sums read before they are finished": Mutant(lambda: remove(WAIT, 0), "race", "reads tensor memory"),
    "sums of other columns": Mutant(lambda: argument(LOAD, 32, plus(8)), "wrong values"),
    "too few columns": Mutant(
        lambda: argument(ALLOCATE, 1, number(lambda v: v // 2)), "out of bounds", "not allocated"
    ),
    "sums of the cluster not waited for": Mutant(lambda: remove(WAIT, 1), "race", "", "cluster"),
    "pair: products before the other block's copies": Mutant(lambda: remove(WAIT, 3), "race", "", "pair"),
    "pair: stages given back to one block only": Mutant(lambda: _to_first_block(0), "deadlock", "", "pair"),
    "pair: sums finished for one block only": Mutant(lambda: _to_first_block(1), "deadlock", "", "pair"),
    "pair: a block ends while products arrive there": Mutant(
        lambda: remove(WAIT, 2), "barrier", "without having waited", "pair"
    ),
    "pair: scales copied for one block alone": Mutant(
        lambda: of_one_block(COPY), "barrier", "cta_group::1 in a kernel", "pair"
    ),
    "pair: scales of x of another atom": Mutant(
        lambda: argument(PRODUCT, 5, plus(4), 0), "wrong values", "", "pair"
    ),
    "pair: products of another row of x": Mutant(
        lambda: argument(PRODUCT, 2, plus(8, "uint64"), 1), "wrong values", "", "pair"
    ),
    "half: products of the next rows": Mutant(
        lambda: argument(PRODUCT, 1, plus(64, "uint64"), 1), "wrong values", "", "half"
    ),
}

KERNELS = {
    "nvfp4": (product("nvfp4", 130, 1300), ScaledSchedule(32, 2)),
    "mxfp4": (product("mxfp4", 130, 1300), ScaledSchedule(32, 2)),
    "mxfp8_e4m3": (product("mxfp8_e4m3", 130, 700), ScaledSchedule(32, 2)),
    "cluster": (product("nvfp4", 130, 1300), ScaledSchedule(32, 2, 2)),
    "pair": (product("nvfp4", 300, 1300), ScaledSchedule(32, 2, pair=True)),
    "half": (product("nvfp4", 130, 1300), ScaledSchedule(32, 2, rows=64)),
}


@cache
def _kernel(name: str) -> tuple[Any, Matrix, Matrix]:
    form, schedule = KERNELS[name]
    x, w = random_matrix(form, form.activation, 20, 1), random_matrix(form, form.weight, form.n, 2)
    return emit(form, B200, schedule, "k"), x, w


def _check(function: Any, name: str) -> tuple[Any, float]:
    form, _ = KERNELS[name]
    _, x, w = _kernel(name)
    result, y = launch(function, form, x.operand, w.operand)
    return result, error_of(y, x.exact @ w.exact.T)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_without_bugs(name: str) -> None:
    result, error = _check(_kernel(name)[0], name)
    assert not result.findings, result.report()
    assert error <= 1e-6


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str) -> None:
    mutant = MUTANTS[name]
    function = _kernel(mutant.kernel)[0]
    changed = rewrite(function, mutant.change())
    assert changed.script() != function.script(), "the mutation changed nothing"
    result, error = _check(changed, mutant.kernel)
    if mutant.kind == "wrong values":
        assert not error <= 1e-4
        return
    named = [str(f) for f in result.findings if f.kind == mutant.kind and mutant.words in str(f)]
    assert named, f"expected {mutant.kind} ({mutant.words}), got error {error:.1e} and\n{result.report()}"
