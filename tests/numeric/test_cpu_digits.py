"""CPU products of activations in pieces: integer digits of 16 and of 8 bits, terms of bfloat16."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from ladder.ir.gemm import Gemm
from ladder.lower import cpu
from ladder.lower.build import emit
from ladder.lower.cpu.toolchain import assembly_of, compile_module
from schedules.cpu_policy import cpu_schedule, proposal, takes_digits
from schedules.instructions import INSTRUCTIONS, SPLITS
from targets import get_device, host_cpu
from tests.numeric.cpu_problems import BOUNDS, activations, compile_entries, problem, relative_error
from tile_types import QuantizedTensor, TType, get_type, register_type
from tile_types.errors import ScheduleError

HOST = host_cpu()

BYTES = pytest.mark.skipif(
    not {"avx512_vnni", "avx512_vbmi"} <= HOST.features, reason="this CPU has no AVX-512 VNNI and VBMI"
)
DIGITS = pytest.mark.skipif("avx512_vnni" not in HOST.features, reason="this CPU has no AVX-512 VNNI")


@DIGITS
@pytest.mark.parametrize(("weight", "group"), [("int8", 480), ("uint8", 256), ("int4", 2048)])
def test_sums_of_digits_stay_in_32_bits(weight: str, group: int) -> None:
    """The largest digits by the largest weights, of as many columns as an instruction takes."""
    case, element = problem(weight, "bfloat16", 16, 2 * group, group), get_type(weight)
    assert takes_digits(case.gemm, HOST) or HOST.name in ("cpu/avx512_bf16", "cpu/znver4")
    (entry,) = compile_entries(case.gemm, HOST, [proposal(case.gemm, HOST, "avx512_vnni16", 2, 16)])
    largest = max(element.values(), key=abs)
    codes = np.full((16, 2 * group), int(element.encode(np.array([largest]))[0]), np.uint8)
    weights = QuantizedTensor.from_codes(codes, element, (1, group), scale=np.ones((16, 2), np.float16))
    x = torch.tensor([[1.0], [-255 / 256]]).bfloat16().repeat(1, 2 * group)
    y = torch.empty(2, 16)
    entry(x, *cpu.pack(case.gemm, weights).values(), y)
    assert torch.equal(y, x[:, :1].float() * 2 * group * float(largest) * torch.ones(1, 16))


@BYTES
@pytest.mark.parametrize(
    ("weight", "group"), [("int8", 4096), ("uint8", 65760), ("fp4_e2m1", 64), ("uint1", 32)]
)
@pytest.mark.parametrize(
    ("activation", "core", "output"),
    [
        ("float16", "avx512_vnni8", "float32"),
        ("float32", "avx512_vnni8", "float32"),
        ("bfloat16", "avx512_vnni8x2", "bfloat16"),
    ],
)
def test_sums_of_bytes_stay_in_32_bits(
    weight: str, group: int, activation: str, core: str, output: str
) -> None:
    """The largest digits by the largest weights, and the least, of as many columns as it takes."""
    case, element = problem(weight, activation, 16, 2 * group, group, output=output), get_type(weight)
    (entry,) = compile_entries(case.gemm, HOST, [proposal(case.gemm, HOST, core, 2, 16)])
    ends = np.array([element.values().min(), element.values().max()])
    codes = np.repeat(element.encode(ends).astype(np.uint8), 8)[:, None].repeat(2 * group, 1)
    weights = QuantizedTensor.from_codes(codes, element, (1, group), scale=np.ones((16, 2), np.float16))
    # The top digit is the largest that there is: below 254 / 128 powers of two are one less.
    x = torch.tensor([[253 / 128], [-253 / 128]]).to(getattr(torch, activation)).repeat(1, 2 * group)
    y = torch.empty(2, 16, dtype=getattr(torch, output))
    entry(x, *cpu.pack(case.gemm, weights).values(), y)
    exact = x[:, :1].double() * 2 * group * torch.from_numpy(ends).repeat_interleave(8)
    assert torch.allclose(y.double(), exact, rtol=2**-22 if output == "float32" else 2**-9, atol=0)


@pytest.mark.parametrize(
    ("device", "activation", "weight", "group", "chosen"),
    [
        ("avx512_bf16", "float16", "int4", 128, {1: True, 16: True, 128: True}),
        ("avx512_bf16", "float32", "fp4_e2m1", 64, {1: True, 16: True}),
        ("avx512_bf16", "bfloat16", "int4", 128, {1: True, 2: True, 4: False}),
        ("avx512_bf16", "bfloat16", "int8", 128, {1: True, 4: True, 8: False}),
        ("avx512_bf16", "float16", "int4", 32, {1: True, 16: True}),
        ("avx512_bf16", "float16", "int4", 16, {1: True, 16: True}),
        ("avx512_bf16", "float32", "int6", 16, {1: True, 16: True}),
        ("avx512_bf16", "float16", "uint1", 16, {1: False}),
        ("avx512_bf16", "bfloat16", "int8", 16, {1: True, 4: True, 8: False}),
        ("avx512_bf16", "bfloat16", "int4", 32, {1: False}),
        ("avx512_bf16", "bfloat16", "int8", 32, {1: True}),
        ("avx512_bf16", "float16", "nf4", 128, {1: False}),
        ("avx512_bf16", "float16", "int5", 128, {1: True, 16: True}),
        ("avx512_bf16", "bfloat16", "int6", 128, {1: True, 4: True, 8: False}),
        ("avx512_bf16", "float16", "int8", 0, {1: True, 16: True}),
        ("avx512_bf16", "float32", "ternary", 0, {1: True, 16: True}),
        ("amx", "float16", "int4", 128, {1: False}),
    ],
)
def test_bytes_are_chosen_where_they_pay(
    device: str, activation: str, weight: str, group: int, chosen: dict[int, bool]
) -> None:
    gemm = Gemm(256, 512, weight, activation, activation, group, group != 0)
    found = {m: cpu_schedule(gemm, get_device(f"cpu/{device}"), m).instruction for m in chosen}
    core = "avx512_vnni8" if activation == "float32" else "avx512_vnni8x2"
    assert {m: name == core for m, name in found.items()} == chosen


@pytest.mark.parametrize(("activation", "most"), [("float16", 2), ("bfloat16", 2), ("float32", 3)])
def test_results_of_16_bits_take_two_digits_and_float32_three(activation: str, most: int) -> None:
    """Half of what two digits leave out is below a rounding of the result, in float32 it would not be."""
    device = get_device("cpu/avx512_bf16")
    for output, digits in ((activation, most), ("float32", 3)):
        core = cpu_schedule(Gemm(256, 512, "int8", activation, output, 128), device, 1).instruction
        assert SPLITS[INSTRUCTIONS[core].split][activation] == digits
    short = Gemm(256, 512, "int4", "bfloat16", "float32", 128)
    with pytest.raises(ScheduleError, match="two digits are for results that are rounded to 16 bits"):
        emit(short, device, proposal(short, device, "avx512_vnni8x2", 2, 16), "entry")


@pytest.mark.parametrize(
    ("device", "group", "columns"),
    [("avx512_bf16", 64, 16), ("avx512_bf16", 512, 16), ("avx512_bf16", 32, 128), ("amx", 128, 128)],
)
def test_one_row_of_int8_is_read_in_order_where_that_was_measured(
    device: str, group: int, columns: int
) -> None:
    """One row block at a time, whose steps take partial sums in turn."""
    gemm = Gemm(256, 512, "int4", "int8", "float32", group)
    assert f"slice n by {columns} over threads" in str(cpu_schedule(gemm, get_device(f"cpu/{device}"), 1))


@pytest.mark.parametrize(
    ("weight", "group", "columns"), [("int4", 128, 16), ("int4", 64, 64), ("int8", 64, 16), ("int8", 32, 64)]
)
def test_bytes_of_one_row_are_read_in_order_where_groups_are_long(
    weight: str, group: int, columns: int
) -> None:
    gemm = Gemm(256, 512, weight, "float16", "float16", group)
    found = cpu_schedule(gemm, get_device("cpu/avx512_bf16"), 1)
    assert f"slice n by {columns} over threads" in str(found)


def shuffled(bits: int) -> str:
    """Register integers that are no bits of their codes, so that they are looked up."""
    values = tuple(float(v) for v in range(3 * ((1 << bits) - 4), -12, -3))
    decode = partial(lambda code, ops, table: ops.lookup(table, code), table=values)
    return register_type(TType(f"shuffled{bits}", bits, decode)).name


@BYTES
@pytest.mark.parametrize("weight", ["int3", "uint5", "int6", "uint7", "int7", "fp6_e2m3", 3, 5, 6])
@pytest.mark.parametrize("group", [16, 20, 64])
def test_codes_of_several_planes_are_bytes(weight: str | int, group: int) -> None:
    """Bits of a code lie in words of their own; every code occurs, and columns that divide nothing.

    weight: A type, or the bits of one that is looked up.
    """
    weight = shuffled(weight) if isinstance(weight, int) else weight
    for activation, output, zero in (("float16", "float16", "none"), ("float32", "float32", "float")):
        case = problem(weight, activation, 37, 131, group, zero=zero, output=output)
        core = "avx512_vnni8" if output == "float32" else "avx512_vnni8x2"
        (entry,) = compile_entries(case.gemm, HOST, [proposal(case.gemm, HOST, core, 2, 16)])
        assert relative_error(case, entry, 3) <= BOUNDS[output]


@BYTES
@pytest.mark.parametrize("weight", ["int8", "ternary", "int5"])
@pytest.mark.parametrize("k", [1, 127, 128, 131, 400])
def test_digits_of_rows_with_one_scale_have_units_of_their_own_runs_of_columns(weight: str, k: int) -> None:
    """What is far larger at one end takes nothing from the other; NaN and infinity stay in their rows."""
    case = problem(weight, "float32", 37, k)
    (entry,) = compile_entries(case.gemm, HOST, [cpu_schedule(case.gemm, HOST, 3)])
    x = activations(case.gemm, 5)
    x[1, 0] = 2.0**30
    x[3, -1], x[4, 0] = torch.nan, torch.inf
    y, exact = torch.empty(5, 37), x.double() @ torch.from_numpy(case.values).T
    entry(x, *cpu.pack(case.gemm, case.weight).values(), y)
    assert (y[:3] - exact[:3]).norm(dim=1).le(1e-6 * exact[:3].norm(dim=1)).all()
    assert y[3].isnan().all()
    assert torch.equal(y[4].isfinite(), exact[4].isfinite())
    if k > 256:
        x[1, :128], rest = 0, x[1, 128:].double() @ torch.from_numpy(case.values[:, 128:]).T
        entry(x, *cpu.pack(case.gemm, case.weight).values(), y)
        assert (y[1] - rest).norm() <= 1e-6 * rest.norm()


@BYTES
@pytest.mark.parametrize(
    ("weight", "group"), [("uint1", 16), ("int8", 65792 + 32), ("fp6_e3m2", 64), ("nf4", 64)]
)
def test_what_bytes_cannot_hold_is_refused(weight: str, group: int) -> None:
    case = problem(weight, "float16", 16, group + 32, group)
    with pytest.raises(ScheduleError, match=r"columns|hold every value"):
        emit(case.gemm, HOST, proposal(case.gemm, HOST, "avx512_vnni8", 2, 16), "entry")


@BYTES
def test_elements_far_below_the_largest_of_their_group_are_exact_in_bytes() -> None:
    """One element of 2**11 beside elements of 1 to 2: float16 has no digits below those of three bytes."""
    case = problem("int4", "float16", 16, 128, 64)
    (entry,) = compile_entries(case.gemm, HOST, [proposal(case.gemm, HOST, "avx512_vnni8", 1, 16)])
    codes = np.full((16, 128), 1, np.uint8)
    codes[:, 5] = 0
    weights = QuantizedTensor.from_codes(codes, get_type("int4"), (1, 64), scale=np.ones((16, 2), np.float16))
    x, y = torch.ones(1, 128).half() + 2**-10, torch.empty(1, 16)
    x[0, 5] = 2047.0
    entry(x, *cpu.pack(case.gemm, weights).values(), y)
    assert torch.equal(y, torch.full((1, 16), 127 * (1 + 2**-10)))


@BYTES
@pytest.mark.parametrize(
    ("core", "activation", "bits"),
    [("avx512_vnni8x2", "float16", 16), ("avx512_vnni8x2", "bfloat16", 16), ("avx512_vnni8", "float32", 24)],
)
def test_elements_are_off_by_half_a_unit_of_their_group(core: str, activation: str, bits: int) -> None:
    """Row i reads element i alone; the power of two above the largest of its group bounds its error."""
    output = activation if activation == "float32" else "bfloat16"
    case = problem("int4", activation, 128, 128, 64, output=output)
    (entry,) = compile_entries(case.gemm, HOST, [proposal(case.gemm, HOST, core, 1, 16)])
    weights = QuantizedTensor.from_codes(
        np.eye(128, dtype=np.uint8), get_type("int4"), (1, 64), scale=np.ones((128, 2), np.float16)
    )
    random = torch.Generator().manual_seed(0)
    for largest in (1.0, 1.98, 1.9999, 3.0, 2.0**-10):
        x = torch.rand(1, 128, generator=random) * 2 * largest - largest
        x[0, 5] = largest
        x, y = x.to(getattr(torch, activation)), torch.empty(1, 128, dtype=getattr(torch, output))
        entry(x, *cpu.pack(case.gemm, weights).values(), y)
        # Magnitudes above 127 of every digit take the next power of two.
        above = x.double().abs().reshape(2, 64).amax(1) / (1 - 2.0**-7)
        bound = 2.0 ** (above.log2().ceil() - bits).repeat_interleave(64)
        rounding = x.double().abs()[0] * (0 if output == "float32" else 2.0**-8)
        assert bool(((y.double() - x.double()).abs()[0] <= bound + rounding).all())


def drawn(m: int, k: int) -> Iterator[tuple[str, torch.Tensor, list[int]]]:
    """Yield activations by their distribution, and the columns whose weights are to be 0."""
    random = torch.Generator().manual_seed(3)
    normal = torch.randn(m, k, generator=random, dtype=torch.float64)
    signs = torch.randn(m, k, generator=random).sign()
    yield "normal", normal, []
    yield "log-normal", torch.exp(2 * normal) * signs, []
    yield "Laplace", -torch.log(torch.rand(m, k, generator=random, dtype=torch.float64)) * signs, []
    yield "gated", torch.nn.functional.silu(normal) * signs * normal.roll(1, 1), []
    yield "sparse", normal * (normal > 1.5), []
    for ratio in (30, 1000, 10000):
        outlier = normal.clone()
        outlier[:, 77] = ratio
        yield f"an outlier of {ratio}", outlier, [77]
    channels = normal.clone()
    channels[:, [1, 40, 300]] *= torch.tensor([100.0, 1000.0, 300.0])
    yield "channels", channels, []
    yield "channels without weight", channels, [1, 40, 300]


@BYTES
@pytest.mark.parametrize(
    ("activation", "m", "group", "zero"),
    [
        ("float16", 1, 64, "none"),
        ("float16", 16, 20, "integer"),
        ("bfloat16", 2, 16, "integer"),
        ("float32", 9, 32, "none"),
    ],
)
def test_errors_are_those_of_dense_products(activation: str, m: int, group: int, zero: str) -> None:
    """Dense: x by the weights in float32, rounded to the type of x."""
    case, dtype = problem("uint4", activation, 64, 320, group, zero=zero), getattr(torch, activation)
    gemm = replace(case.gemm, output=activation)
    core = "avx512_vnni8" if activation == "float32" else "avx512_vnni8x2"
    (entry,) = compile_entries(gemm, HOST, [proposal(gemm, HOST, core, min(m, 8), 16)])
    for name, given, without in drawn(m, 320):
        weight = case.weight
        if without:
            codes, zeros = np.array(weight.codes()), np.asarray(0 if weight.zero is None else weight.zero)
            codes[:, without] = zeros.repeat(group, -1)[:, without] if zeros.ndim else 0
            weight = QuantizedTensor.from_codes(
                codes, get_type("uint4"), (1, group), scale=weight.scale, zero=weight.zero, zero_kind=zero
            )
        x, y = given.to(dtype), torch.empty(m, 64, dtype=dtype)
        entry(x, *cpu.pack(gemm, weight).values(), y)
        values = torch.from_numpy(np.asarray(weight.dequantize("float64"))).T
        exact, dense = x.double() @ values, (x.float() @ values.float()).to(dtype).double()
        assert (y.double() - exact).norm() <= 1.5 * (dense - exact).norm(), name


@BYTES
@pytest.mark.parametrize(
    ("core", "weight"), [("avx512_vnni8", "int4"), ("avx512_vnni8x2", "int4"), ("avx512_vnni8w2", "nf4")]
)
def test_special_values_beside_rows_of_outliers(core: str, weight: str) -> None:
    """Rows of one tile, of which one takes a second pass over the first group."""
    case = problem(weight, "bfloat16", 64, 256, 64, output="bfloat16")
    (entry,) = compile_entries(case.gemm, HOST, [proposal(case.gemm, HOST, core, 8, 16)])
    x, y = activations(case.gemm, 8), torch.empty(8, 64, dtype=torch.bfloat16)
    x[0, 3], x[1, 4], x[2, 5], x[3, 6] = 1e6, math.inf, math.nan, -math.inf
    x[4], x[5], x[6] = 0.0, -0.0, x[6] * 1e-38
    entry(x, *cpu.pack(case.gemm, case.weight).values(), y)
    weights = torch.from_numpy(np.asarray(case.weight.dequantize("float64"))).T
    assert torch.allclose(y.double(), x.double() @ weights, rtol=2**-8, atol=1e-2, equal_nan=True)
    assert torch.equal(y[4:6], torch.zeros(2, 64).bfloat16())


@DIGITS
def test_groups_too_long_for_digits_are_refused() -> None:
    case = problem("int8", "bfloat16", 16, 1024, 512)
    assert not takes_digits(case.gemm, HOST)
    with pytest.raises(ScheduleError, match="sums of up to 511 columns are exact: 512 are too many"):
        emit(case.gemm, HOST, proposal(case.gemm, HOST, "avx512_vnni16", 2, 16), "entry")


SPLIT_CORES = {
    "avx512_vnni16": ("bfloat16", 2, 16),
    "avx512_vnni8": ("bfloat16", 2, 16),
    "avx512_vnni8x2": ("bfloat16", 2, 16),
    "amx_bf16_terms": ("float32", 16, 32),
}
"""Instruction that takes x in pieces -> type of x, and register tile."""


@pytest.mark.parametrize("core", SPLIT_CORES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, 3.3e38, 1e-38, -0.0])
def test_special_values_in_pieces(core: str, value: float) -> None:
    """A product with one of them is what the exact one is, an overflow included."""
    if core not in {own.name for own in HOST.cores}:
        pytest.skip(f"this CPU has no {core}")
    activation, tile_m, tile_n = SPLIT_CORES[core]
    output = "bfloat16" if core == "avx512_vnni8x2" else "float32"
    case = problem("int4", activation, 64, 256, 64, output=output)
    (entry,) = compile_entries(case.gemm, HOST, [proposal(case.gemm, HOST, core, tile_m, tile_n)])
    x, y = activations(case.gemm, 2), torch.empty(2, 64, dtype=getattr(torch, output))
    x[0, 70] = value
    entry(x, *cpu.pack(case.gemm, case.weight).values(), y)
    wanted = x.double() @ torch.from_numpy(np.asarray(case.weight.dequantize("float64"))).T
    bits = {"avx512_vnni16": 29, "avx512_vnni8": 21, "avx512_vnni8x2": 15}.get(core, math.inf)
    largest = x[0].double().abs().nan_to_num(0, 0).max()
    unit = float(largest) * 2.0**-bits * 64 * 8  # of a group whose weights are at most 8 scales
    if value == 3.3e38:  # integers are summed before they are scaled
        above = wanted[0].abs() > unit
        assert torch.equal(y[0].sign().double()[above], wanted[0].sign()[above])
        y, wanted = y[1:], wanted[1:]
    rounding = 1e-4 if output == "float32" else 2**-8
    assert torch.allclose(y.double(), wanted, rtol=rounding, atol=1e-4 + unit, equal_nan=True)


@BYTES
@pytest.mark.parametrize("m", [1, 9, 16])
@pytest.mark.parametrize(("activation", "bits"), [("float16", 2), ("bfloat16", 2), ("float32", 3)])
def test_accumulators_of_groups_of_one_unit_stay_in_registers(activation: str, bits: int, m: int) -> None:
    """Multiplies moved behind the branch on the type of scales, their operands to memory: 2.7 of the time."""
    gemm = Gemm(256, 512, "int4", activation, activation, 32)
    kernel = emit(gemm, HOST, cpu_schedule(gemm, HOST, m), "entry")
    module = compile_module({"entry": kernel}, HOST)
    lines = assembly_of(str(module.mod.inspect_source("ll")), HOST).splitlines()
    products = [line for line in lines if "vpdpbusd" in line or "vdpbf16ps" in line]
    assert len(products) >= 16 * bits
    assert not [line for line in products if "(%rsp" in line]
