"""AMD code objects executed instruction by instruction: values, waits, barriers, exchanges between lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import test_amd_experts as experts
import test_quantize
import test_random_chains as chains
import torch
from amd_kernels import run
from tvm.script import tirx as T
from user_types import user_type

import ladder
from ladder.api.lowered import Lowered
from ladder.api.problem import gemm_for
from ladder.cli.operands import cancellation, make_operands
from ladder.cli.problem import Problem
from ladder.lower import builder as b
from ladder.lower.build import emit_quantizer
from ladder.lower.rocm import dialect as d
from ladder.runtime.compile import ANY_M, Request
from ladder.runtime.packed import pack
from ladder.runtime.tokens import quantize_tokens
from ladder.simulate import operator, simulate_launch
from schedules.legal import is_legal
from schedules.policy import rank
from schedules.quantization import Quantization
from schedules.schedule import GpuSchedule, Plan
from targets import get_device
from tile_types import get_type
from tile_types.errors import LadderError

ARCHITECTURES = ("gfx90a", "gfx942", "gfx950")
RADEON = ("gfx1100", "gfx1201")


@pytest.fixture
def machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every simulation execute machine code."""
    for function in (simulate_launch, operator.simulate):
        assert function.__kwdefaults__ is not None
        monkeypatch.setitem(function.__kwdefaults__, "stage", "code")


DOT = GpuSchedule("dot", 2, 64, 64, 2, 4, 2, placement="accumulator", warp_rows=32)
MFMA = GpuSchedule("mfma", 16, 64, 64, 2, 4, 2, placement="accumulator")
WIDE = GpuSchedule("mfma", 32, 64, 64, 2, 4, placement="accumulator")
OPERAND = GpuSchedule("mfma", 32, 64, 64, 2, 4, placement="operand")

WMMA = GpuSchedule("wmma", 16, 64, 64, 2, 8, 4, placement="accumulator")
SPLIT = replace(WMMA, pipeline="wmma_split")
GROUPS = GpuSchedule("mfma_groups", 1, 64, 64, 2, 4, 4, placement="accumulator", warp_rows=32)
DOT32 = GpuSchedule("dot32", 2, 64, 64, 2, 4, 2, placement="accumulator", warp_rows=32)

LEGAL = {each.pipeline: each for each in (WIDE, DOT, GROUPS, WMMA, SPLIT, DOT32)}

PRODUCTS = {
    "mfma": ("gfx942", "int4", "float16", "float16", 13, MFMA),
    "dot": ("gfx90a", "nf4", "float16", "float32", 2, DOT),
    "mfma of fp8": ("gfx950", "fp8_e4m3", "fp8_e4m3", "float32", 40, WIDE),
    "mfma of int8": ("gfx90a", "int3", "int8", "float32", 17, WIDE),
    "bfloat16": ("gfx942", "int4", "bfloat16", "bfloat16", 9, OPERAND),
    "wmma": ("gfx1100", "int4", "float16", "float16", 13, WMMA),
    "wmma of bfloat16": ("gfx1100", "int4", "bfloat16", "bfloat16", 9, replace(OPERAND, pipeline="wmma")),
    "wmma of int8": ("gfx1100", "int8", "int8", "float32", 17, WMMA),
    "dot32": ("gfx1100", "nf4", "float16", "float32", 2, DOT32),
    "dot32 of int8": ("gfx1100", "int3", "int8", "float32", 1, DOT32),
    "wmma_split": ("gfx1201", "nf4", "float16", "float16", 17, SPLIT),
    "wmma_split of fp8": ("gfx1201", "fp8_e4m3", "fp8_e4m3", "float32", 17, SPLIT),
    "dot32 of fp8": ("gfx1201", "fp6_e3m2", "fp8_e4m3", "float32", 2, DOT32),
    "converted e2m1": ("gfx950", "mxfp4", "bfloat16", "float32", 9, OPERAND),
    "converted e4m3": ("gfx950", "mxfp8_e4m3", "float16", "float16", 2, replace(DOT, placement="operand")),
    "converted e5m2": ("gfx950", "fp8_e5m2", "bfloat16", "bfloat16", 40, WIDE),
    "dot of bfloat16": ("gfx950", "mxfp4", "bfloat16", "float32", 2, DOT),
    "dot32 of bfloat16": ("gfx1100", "int4", "bfloat16", "float32", 3, DOT32),
    "any five bits": ("gfx942", "random5", "bfloat16", "bfloat16", 9, OPERAND),
    "any six bits": ("gfx1100", "posit6", "float16", "float16", 13, WMMA),
}

VECTORS = ("gfx950", "nf4", "bfloat16", "bfloat16", 5, MFMA)
"""Its rows of results are stored as vectors, with a bias of bfloat16."""


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, machine_code: None) -> None:
    check_product(*PRODUCTS[name], 83, 264)


def test_results_stored_as_vectors(machine_code: None) -> None:
    check_product(*VECTORS, 40, 64)


@pytest.mark.parametrize(
    ("arch", "weight", "activation", "group", "k", "schedule"),
    [
        ("gfx950", "int4", "float16", 64, 2184, GROUPS),  # the last sixteen groups are not all there
        ("gfx942", "nf4", "bfloat16", 128, 1216, replace(GROUPS, tile_k=128, warp_rows=64)),
    ],
)
def test_columns_hold_groups(
    arch: str, weight: str, activation: str, group: int, k: int, schedule: GpuSchedule, machine_code: None
) -> None:
    check_product(arch, weight, activation, activation, 1, schedule, 83, k, group)


@pytest.mark.parametrize(("arch", "weight"), [("gfx942", "fp8_e5m2"), ("gfx950", "int4")])
def test_columns_hold_groups_of_one_scale(arch: str, weight: str, machine_code: None) -> None:
    """Nothing multiplies the sums of columns before they are added."""
    check_product(arch, weight, "float16", "float32", 1, GROUPS, 83, 328, 328)


@pytest.mark.parametrize(
    ("arch", "weight", "m", "pipeline"),
    [
        ("gfx1201", "int8", 17, "wmma_split"),
        ("gfx1100", "int4", 9, "wmma"),
        ("gfx1100", "int8", 9, "dot32"),
        ("gfx1100", "int8", 130, "dot32"),
    ],
)
def test_short_groups_of_bytes(arch: str, weight: str, m: int, pipeline: str, machine_code: None) -> None:
    """Scales of two groups of a step leave RDNA3's matrix instructions no registers for bytes."""
    gemm = gemm_for(83, 264, weight, "int8", output="float32", group_size=32, bias=True)
    chosen = rank(gemm, get_device(f"rocm/{arch}"), m)[0].schedule
    assert isinstance(chosen, GpuSchedule)
    assert chosen.pipeline == pipeline
    check_product(arch, weight, "int8", "float32", m, chosen, 83, 264)


def check_product(
    arch: str, weight: str, activation: str, output: str, m: int, schedule: GpuSchedule, n: int, k: int,
    group: int = 32,
) -> None:  # fmt: skip
    torch.manual_seed(7)
    user_type(weight)
    group_size = None if get_type(weight).is_block else group
    op = ladder.Matmul(
        n, k, weight, activation, group_size=group_size, output=output, bias=True, target=f"rocm/{arch}",
        plan=Plan(((ANY_M, schedule),)),
    )  # fmt: skip
    quantized = ladder.quantize(torch.randn(n, k), weight, group_size=group_size)
    x, bias, scale = torch.randn(m, k), torch.randn(n).to(getattr(torch, output)), None
    if activation in ("int8", "fp8_e4m3"):
        x, scale = quantize_tokens(x, activation)
    else:
        x = x.to(getattr(torch, activation))
    factor = 1 if scale is None else scale.double()[:, None]
    exact = x.double() @ torch.as_tensor(quantized.dequantize("float64")).T * factor + bias.double()
    result = ladder.simulate(op, x, op.pack(quantized), bias, scale, expected=exact)
    assert not result.findings, result.report()
    assert result.counts["s_barrier"]


@pytest.mark.parametrize("arch", ARCHITECTURES + RADEON)
def test_chains(arch: str, machine_code: None) -> None:
    chains.check((ARCHITECTURES + RADEON).index(arch) + 4, f"rocm/{arch}")
    chains.number_of_rows(f"rocm/{arch}")


@pytest.mark.parametrize("name", ["counts of fp8", "offsets of few tokens"])
def test_experts(name: str, machine_code: None) -> None:
    result, _ = experts.simulated(name)
    assert not result.findings, result.report()


@pytest.mark.parametrize(
    ("case", "arch"), [("float32", "gfx90a"), ("groups of 128", "gfx942"), ("odd K", "gfx950")]
)
def test_quantizers(case: str, arch: str, machine_code: None) -> None:
    test_quantize.test_codes_and_scales(case, f"rocm/{arch}")


def test_ties_of_quantizers_go_to_even_of_the_rounded_product() -> None:
    """The product of x and 1 / scale is rounded before the code is: no multiply-add joins the two."""
    most = np.arange(1, 65, dtype=np.float32)[:, None] / 7
    x = np.concatenate([most, most * (np.arange(63, dtype=np.float32) * 2 + 1) / 254], axis=1)
    codes, scale = np.zeros(x.shape, np.int8), np.zeros(len(x), np.float32)
    function = emit_quantizer(
        Quantization("float32", "int8", threads=64, chunks=1), get_device("rocm/gfx942"), "k"
    )
    result = simulate_launch(function, [x, codes, scale], target="gfx942", outputs=(1, 2), stage="code")
    assert not result.findings, result.report()
    expected, expected_scale = quantize_tokens(torch.from_numpy(x), "int8")
    np.testing.assert_array_equal(scale, expected_scale.numpy())
    np.testing.assert_array_equal(codes, expected.numpy())


@pytest.mark.parametrize("uniform", [True, False])
def test_products_are_rounded_before_sums_take_them(uniform: bool) -> None:
    """Also those of numbers that are the same in all lanes."""
    with b.function("k") as kernel:
        x, y = b.tensor("x", (3, 64), "float32"), b.tensor("y", (64,), "float32")
        _, lane = d.launch(1, 64)
        place = 0 if uniform else lane
        b.store(y, d.separate(x[0, place] * x[1, place]) + x[2, place], lane)
    given = np.random.default_rng(0).uniform(1, 2, (3, 64)).astype(np.float32)
    given[2] = -(given[0] * given[1])
    found = np.full(64, np.nan, np.float32)
    result = simulate_launch(kernel.func, [given, found], target="gfx942", stage="code")
    assert not result.findings, result.report()
    assert not found.any()


# ---- all families, by --long -------------------------------------------------------------------------
WEIGHTS = (
    "int4",
    "nf4",
    "mxfp4",
    "int3",
    "fp6_e3m2",
    "fp8_e4m3",
    "nvfp4",
    "ternary",
    "int8",
    "float16",
    "uint2",
)
ACTIVATIONS = ("float16", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2")
TOKENS = {"dot": 3, "mfma": 19, "mfma_groups": 1, "dot32": 3, "wmma": 19, "wmma_split": 21}


@pytest.mark.slow
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("arch", ARCHITECTURES + RADEON)
def test_all_products(arch: str, weight: str, long_test: None) -> None:
    for activation, (pipeline, m) in product(ACTIVATIONS, TOKENS.items()):
        zero = "float" if weight == "uint2" and activation in ("float16", "bfloat16") else "none"
        group = None if weight.startswith(("mx", "nv", "float")) else 32
        target = f"rocm/{arch}"
        form = Problem(weight, activation, group, m, 99, 330, zero, output="float32", target=target, seed=m)
        try:
            gemm, device = form.gemm, form.device
            ranked = [found.schedule for found in rank(gemm, device, m)]
            fitting = [found for found in (*ranked, LEGAL[pipeline]) if found.pipeline == pipeline]
            if not is_legal(gemm, device, fitting[0]):
                continue
            operands = make_operands(form, gemm)
        except LadderError:  # the core does not hold the weight's values, or there is none
            continue
        exact = operands.x.double().numpy() @ np.asarray(operands.weight.dequantize("float64")).T
        if operands.token_scale is not None:
            exact = exact * operands.token_scale.double().numpy()[:, None]
        result = operator.simulate(
            Lowered(Request(gemm, device.name, Plan(((ANY_M, fitting[0]),)))),
            operands.x, pack(gemm, device, operands.weight), None, operands.token_scale,
            expected=exact, cancellation=cancellation([operands], exact), stage="code",
        )  # fmt: skip
        assert not result.findings, f"{arch} {weight} {activation} {fitting[0]}: {result.report()}"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(300, 420, 15))
@pytest.mark.parametrize("arch", ARCHITECTURES + RADEON)
def test_all_chains(arch: str, first: int, machine_code: None, long_test: None) -> None:
    begin = first + (ARCHITECTURES + RADEON).index(arch) % 3
    for seed in range(begin, first + 15, 3):
        chains.check(seed, f"rocm/{arch}")


@pytest.mark.slow
@pytest.mark.parametrize("name", experts.CASES)
def test_all_experts(name: str, machine_code: None, long_test: None) -> None:
    result, _ = experts.simulated(name)
    assert not result.findings, result.report()


@pytest.mark.slow
@pytest.mark.parametrize(("case", "target"), test_quantize._kernels())
def test_all_quantizers(case: str, target: str, machine_code: None, long_test: None) -> None:
    if target.startswith("rocm"):
        test_quantize.test_codes_and_scales(case, target)


# ---- what goes wrong is found ------------------------------------------------------------------------
def _turned(sync: Callable[[], None]) -> Any:
    """Each thread stores its number and reads that of the thread across the block."""

    def body(thread: Any, shared: Any, y: Any) -> None:
        b.store(shared, T.Cast("uint32", thread), thread)
        sync()
        b.store(y, shared[255 - thread], thread)

    return body


@pytest.mark.parametrize(
    ("sync", "kinds"),
    [
        (partial(d.block_sync, get_device("gfx942")), set()),
        (lambda: b.emit(T.tvm_storage_sync("shared")), {"barrier"}),
        (lambda: None, {"race"}),
    ],
)
def test_barriers_wait_for_lds(sync: Callable[[], None], kinds: set[str]) -> None:
    result = run("gfx942", _turned(sync), 256, 256, stage="code")
    assert result.kinds() == kinds
    assert kinds or np.array_equal(result.y, np.arange(255, -1, -1))


def _exchanged(call: Callable[..., Any]) -> Any:
    """Each lane takes a sum from another lane; only some store it."""

    def body(thread: Any, shared: Any, y: Any) -> None:
        value = b.bind(thread * thread + 1)
        other = b.bind(call("int32", "llvm.amdgcn.ds.bpermute", T.bitwise_xor(thread, 32) * 4, value))
        with b.when(thread < 32):
            b.store(y, T.Cast("uint32", other), thread)

    return body


def _pure(dtype: str, name: str, *operands: Any) -> Any:
    return T.call_llvm_pure_intrin(dtype, name, *operands)


@pytest.mark.parametrize("stage", ["passed", "code"])
def test_exchanges_that_passes_move_into_a_branch(stage: str) -> None:
    assert run("gfx942", _exchanged(_pure), 64, 64).kinds() <= {"unwritten"}
    assert "divergence" in run("gfx942", _exchanged(_pure), 64, 64, stage=stage).kinds()
    kept = run("gfx942", _exchanged(d.cross_lane), 64, 64, stage=stage)
    assert "divergence" not in kept.kinds()
    assert np.array_equal(kept.y[:32], (np.arange(32) + 32) ** 2 + 1)
