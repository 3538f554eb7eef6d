"""CPU kernels against float64 on shapes that divide nothing, for every type and activation."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from ladder.ir.gemm import ACTIVATIONS
from ladder.ir.program import operand_type, summed_columns
from ladder.lower import cpu
from ladder.lower.build import emit
from ladder.lower.cpu.toolchain import compile_module
from ladder.runtime.model.joined import numbers_side_by_side
from schedules.cpu_layout import cpu_layout
from schedules.cpu_policy import cpu_candidates, proposal, takes_digits
from schedules.instructions import BYTE_PAIRS, BYTE_SPLITS, INSTRUCTIONS, RECIPES, SPLITS, TWO_BYTES
from targets import get_device, host_cpu
from tests.numeric.cpu_problems import (
    BOUNDS,
    activations,
    compile_entries,
    factored,
    problem,
    relative_error,
)
from tile_types import QuantizedTensor, TType, get_type, list_types, register_type
from tile_types.errors import DTypeError, ScheduleError
from tile_types.forms import BytePairs, byte_form, byte_pairs, choices
from tile_types.shards import taken_rows

HOST = host_cpu()
PORTABLE = get_device("cpu/avx2" if "avx2" in HOST.features else "cpu/dotprod")
WEIGHTS = [t.name for t in list_types() if not t.is_block]
N, K, GROUP = 37, 131, 48

OTHERWISE_IN_TIR = {
    "quotient": lambda code, ops: code / 2,
    "wrapped": lambda code, ops: ops.cast(code, "uint8") * 100,
    "mixed": lambda code, ops: ops.select(code > 7, ops.cast(code, "int32"), ops.cast(code, "float32") * 0.5),
    "power": lambda code, ops: 2.0 ** (ops.cast(code, "float32") / 4.0),
    "numpy": lambda code, ops: np.sqrt(code),
}
"""Decode expressions whose operators TIR lacks, or reads in another way."""


def cores(device, gemm):
    """Return a small tile for every core of the device that holds the problem's values."""
    names = {core.name for core in device.cores} & INSTRUCTIONS.keys()
    bits, operands = get_type(gemm.weight).elem_bits, (operand_type(gemm), "float32")
    rows = {core: INSTRUCTIONS[core] for core in names}
    fitting = {core for core, row in rows.items() if row.operand in operands and bits <= row.most_bits}
    fitting -= set() if takes_digits(gemm, device) else {"avx512_vnni16"}
    for core, split in ((core, rows[core].split) for core in names if rows[core].split in BYTE_SPLITS):
        element, paired = get_type(gemm.weight), rows[core].recipe == BYTE_PAIRS
        form = byte_pairs(element) if paired and not byte_form(element) else byte_form(element)
        fits = form and paired == isinstance(form, BytePairs) and gemm.activation in SPLITS[split]
        fits = fits and summed_columns(gemm)
        fitting -= set() if fits and (split != TWO_BYTES or gemm.output != "float32") else {core}
    return [proposal(gemm, device, core, 2, 16) for core in sorted(fitting) if not core.startswith("amx")]


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("activation", ["bfloat16", "int8"])
def test_every_weight_type_on_every_core(weight: str, activation: str) -> None:
    case = problem(weight, activation, N, K, GROUP)
    bound = BOUNDS["float32" if get_type(weight).exact else "bfloat16"]
    for entry in compile_entries(case.gemm, HOST, cores(HOST, case.gemm)):
        assert relative_error(case, entry, 3) <= bound


@pytest.mark.parametrize("weight", WEIGHTS)
def test_every_weight_type_without_vector_extensions(weight: str) -> None:
    case = problem(weight, "float32", N, K, GROUP)
    (entry,) = compile_entries(case.gemm, PORTABLE, [proposal(case.gemm, PORTABLE, "fma", 2, 16)])
    assert relative_error(case, entry, 3) <= BOUNDS["float32"]


@pytest.mark.parametrize("bits", [4, 8, 10])
def test_tables_are_read_from_memory(bits: int) -> None:
    """As selections, 256 values took 45 s to compile without AVX-512; 1024 have no other way anywhere."""
    values = np.random.default_rng(bits).normal(size=1 << bits).astype(np.float32)
    name = register_type(TType(f"memory{bits}", bits, lambda code, ops: ops.lookup(values, code))).name
    case = problem(name, "float32", N, K, GROUP)
    schedule = proposal(case.gemm, PORTABLE, "fma", 2, 16)
    (entry,) = compile_entries(case.gemm, PORTABLE, [schedule])
    assert relative_error(case, entry, 3) <= BOUNDS["float32"]
    assert emit(case.gemm, PORTABLE, schedule, "entry").script().count("Select") < 16


def test_powers_of_two_are_read_from_memory() -> None:
    ttype = TType("powers", 3, lambda code, ops: ops.exp2(ops.cast(code, "float32")))
    assert choices(ttype) >= RECIPES["table"].choices > choices(get_type("fp8_e4m3"))


@pytest.mark.parametrize("name", OTHERWISE_IN_TIR)
def test_kernels_compute_what_a_decode_gives_in_numpy(name: str) -> None:
    """The quotient was 0 in kernels and bytes did not wrap, silently; the others raised within TVM."""
    ttype = register_type(TType(f"otherwise_{name}", 4, OTHERWISE_IN_TIR[name], exact=False))
    case = problem(ttype.name, "float32", N, K, GROUP)
    for device in {HOST.name: HOST, PORTABLE.name: PORTABLE}.values():
        (entry,) = compile_entries(case.gemm, device, [proposal(case.gemm, device, "fma", 2, 16)])
        assert relative_error(case, entry, 3) <= BOUNDS["float32"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("zero", ["none", "integer", "float"])
def test_every_activation_zero_point_and_output(activation: str, zero: str) -> None:
    output = {"none": "float16", "integer": "bfloat16", "float": "float32"}[zero]
    token = activation == "int8"
    case = problem("uint4", activation, N, K, 32, zero=zero, output=output, bias=True, token_scale=token)
    for device in (HOST, PORTABLE):
        for entry in compile_entries(case.gemm, device, cores(device, case.gemm)):
            for m in (1, 5):
                assert relative_error(case, entry, m) <= BOUNDS[output]


@pytest.mark.parametrize("group", [0, 8, 16, 20, 100, 128])
@pytest.mark.parametrize("activation", ["bfloat16", "int8"])
def test_every_kind_of_group(group: int, activation: str) -> None:
    case = problem("int3", activation, 19, 211, group)
    bound = BOUNDS["float32"]
    for entry in compile_entries(case.gemm, HOST, cores(HOST, case.gemm)[:1]):
        assert relative_error(case, entry, 2) <= bound


NUMBERS_HELD = {
    # (activation, zero points): what they and the scales are, and the bytes that they take
    ("bfloat16", "integer"): [
        ("float16", "int8", 2, 1),
        ("bfloat16", "int16", 4, 2),
        ("float32", "far", 4, 4),
    ],
    ("bfloat16", "float"): [("float16", "float16", 2, 2), ("float32", "float32", 4, 4)],
    ("float32", "float"): [("float32", "float16", 4, 2), ("float16", "float32", 2, 4)],
    ("int8", "integer"): [("float16", "uint8", 2, 1), ("float32", "int16", 4, 2), ("float16", "far", 2, 4)],
}


@pytest.mark.parametrize(("activation", "zero"), NUMBERS_HELD)
def test_scales_and_zero_points_keep_their_widths(activation: str, zero: str) -> None:
    """Kernels read either width; none holds a number that it has not."""
    groups, codes = -(-K // 32), np.random.default_rng(3).integers(0, 16, (N, K)).astype(np.uint8)
    cases = NUMBERS_HELD[activation, zero]
    random = torch.Generator().manual_seed(5)
    scales = {
        "float16": (torch.rand(N, groups, generator=random) + 0.5).half(),
        "bfloat16": torch.full((N, groups), 2.0**-40).bfloat16(),  # float16 would make it 0
        "float32": torch.rand(N, groups, generator=random) + 0.5,
    }
    far = {"int8": 1, "uint8": 15, "int16": 256, "far": 1 << 17}
    base = problem("uint4", activation, N, K, 32, zero=zero)
    entries = compile_entries(base.gemm, HOST, cores(HOST, base.gemm))
    for scale_type, zero_type, scale_bytes, zero_bytes in cases:
        points = torch.randint(0, 8, (N, groups), generator=random)
        if zero_type in far:
            points[1, 0] = far[zero_type]
        else:
            points = (points + torch.rand(N, groups, generator=random)).to(getattr(torch, zero_type))
        weight = QuantizedTensor.from_codes(
            torch.from_numpy(codes),
            get_type("uint4"),
            (1, 32),
            scale=scales[scale_type],
            zero=points.to(torch.int32) if zero_type in far else points,
            zero_kind=zero,
        )
        packed = cpu.pack(base.gemm, weight)
        assert (packed["scales"].shape[-1], packed["zeros"].shape[-1]) == (scale_bytes, zero_bytes)
        x, y = activations(base.gemm, 3), torch.empty(3, N)
        shown = torch.from_numpy(np.asarray(weight.dequantize("float64")))
        exact, size = x.double() @ shown.T, x.double().abs() @ shown.abs().T
        for entry in entries:
            entry(x, *packed.values(), y)
            assert ((y - exact).abs() <= 1e-5 * size).all()


@pytest.mark.parametrize("activation", ["bfloat16", "float16", "int8"])
def test_every_schedule_and_all_m_share_one_packed_weight(activation: str) -> None:
    case = problem("int4", activation, 300, 521, 128)
    schedules = [
        s
        for s in cpu_candidates(case.gemm, HOST, 1)
        if INSTRUCTIONS[s.instruction].operand == operand_type(case.gemm)
    ]
    for entry in compile_entries(case.gemm, HOST, schedules):
        for m in (1, 3, 17, 131):
            assert relative_error(case, entry, m) <= BOUNDS["float32"]


@pytest.mark.skipif("avx2" not in HOST.features, reason="this CPU has no AVX2")
@pytest.mark.parametrize("bits", range(2, 8))
def test_sums_of_16_bits_never_saturate(bits: int) -> None:
    """The largest products that there are, through `vpmaddubsw`, exactly."""
    case, largest = problem(f"uint{bits}", "int8", 16, 256), (1 << bits) - 1
    (entry,) = compile_entries(case.gemm, PORTABLE, [proposal(case.gemm, PORTABLE, "avx2_maddubs", 2, 16)])
    codes, ones = np.full((16, 256), largest, np.uint8), np.ones((16, 1), np.float16)
    weight = QuantizedTensor.from_codes(codes, get_type(f"uint{bits}"), (1, 256), scale=ones)
    x, y = torch.tensor([-128, 127], dtype=torch.int8)[:, None].repeat(1, 256), torch.empty(2, 16)
    entry(x, *cpu.pack(case.gemm, weight).values(), y)
    assert torch.equal(y, torch.tensor([-128.0, 127.0])[:, None].repeat(1, 16) * 256 * largest)


def test_one_build_serves_other_shapes() -> None:
    first = problem("nf4", "float16", N, K, 32)
    (entry,) = compile_entries(first.gemm, HOST, [proposal(first.gemm, HOST, "fma", 4, 16)])
    for n, k, m in ((1, 1, 1), (16, 32, 4), (129, 1009, 7), (128, 64, 2)):
        other = problem("nf4", "float16", n, k, 32 if k > 32 else 0)
        if k > 32:
            assert relative_error(other, entry, m) <= BOUNDS["float32"]


TAILED = [("int8", "avx512_vnni", 16), ("bfloat16", "avx512_bf16", 8), ("float16", "avx512_vnni8x2", 8)]


@pytest.mark.parametrize(("activation", "core", "tile_m"), TAILED)
def test_rows_that_are_left_take_tiles_of_fewer_rows(activation: str, core: str, tile_m: int) -> None:
    """Each M computes its rows alone, as whole tiles do, and NaN of the last one stays there."""
    if core not in {row.name for row in HOST.cores}:
        pytest.skip(f"this CPU has no {core}")
    output = "float16" if activation == "float16" else "float32"
    case = problem("int4", activation, N, K, 64, output=output)
    (entry,) = compile_entries(case.gemm, HOST, [proposal(case.gemm, HOST, core, tile_m, 16)])
    x, weight = activations(case.gemm, 2 * tile_m + 1), cpu.pack(case.gemm, case.weight)
    if activation != "int8":
        x[tile_m + tile_m // 4] = torch.nan
    exact = x.double() @ torch.from_numpy(case.values).T
    for m in range(2 * tile_m + 2):
        y = torch.full((m + 1, N), 7.0, dtype=getattr(torch, output))
        entry(x[:m], *weight.values(), y[:m])
        assert (y[m] == 7).all()
        found = y[:m].double()
        assert torch.equal(found.isnan(), exact[:m].isnan())
        error = (found - exact[:m]).nan_to_num().norm()
        assert error <= BOUNDS[output] * exact[:m].nan_to_num().norm()


def test_tiles_of_columns_that_packing_added_are_left_out() -> None:
    """Packing rounds up to 128 columns: 16 of them, the scores of a few experts, took the time of all."""
    case = problem("int4", "float32", 16, K, 32)
    script = emit(case.gemm, HOST, proposal(case.gemm, HOST, "fma", 1, 64), "entry").script()
    *_, result = re.findall(r'T.Buffer\(\(\w+, "(\w+)"\)', script)
    (tiles,) = re.findall(r"in T.parallel\((\w+)\)", script)
    assert f" {tiles}: T.let[T.int32] = ({result} + 64 - 1) // 64" in script
    for n in (1, 16, 17, 130):
        other = problem("int4", "float32", n, K, 32)
        (entry,) = compile_entries(other.gemm, HOST, [proposal(other.gemm, HOST, "fma", 1, 64)])
        assert relative_error(other, entry, 3) <= BOUNDS["float32"]


def test_no_tokens_write_nothing() -> None:
    case = problem("int4", "bfloat16", N, K, GROUP)
    (entry,) = compile_entries(case.gemm, HOST, [cores(HOST, case.gemm)[0]])
    y = torch.empty(0, N)
    entry(torch.empty(0, K, dtype=torch.bfloat16), *cpu.pack(case.gemm, case.weight).values(), y)
    assert y.shape == (0, N)


def test_epilogue_operators_apply_in_order() -> None:
    case = problem("int4", "float32", N, K, 32, epilogue=("relu", "square"))
    (entry,) = compile_entries(case.gemm, HOST, [proposal(case.gemm, HOST, "fma", 2, 16)])
    x = torch.randn(3, K)
    y = torch.empty(3, N)
    entry(x, *cpu.pack(case.gemm, case.weight).values(), y)
    expected = np.maximum(x.double().numpy() @ case.values.T, 0) ** 2
    assert np.linalg.norm(y.numpy() - expected) <= BOUNDS["float32"] * np.linalg.norm(expected)


EXPONENTIAL = {
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
}


@pytest.mark.parametrize("name", EXPONENTIAL)
@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
def test_epilogues_of_exponentials_in_whole_and_partial_vectors(name: str, scale: float) -> None:
    case = problem("int4", "float32", N, K, 32, epilogue=(name,))
    (entry,) = compile_entries(case.gemm, HOST, [proposal(case.gemm, HOST, "fma", 2, 16)])
    x = torch.randn(4, K, generator=torch.Generator().manual_seed(7)) * scale
    x[2, 5], x[3, 5] = float("nan"), float("inf")
    y = torch.empty(4, N)
    entry(x, *cpu.pack(case.gemm, case.weight).values(), y)
    sums = x @ torch.from_numpy(case.values).float().T
    expected = EXPONENTIAL[name](sums.double())
    bound = 1e-4 * scale  # of float32 sums
    near = torch.isclose(y.double(), expected, rtol=bound, atol=bound, equal_nan=True)
    over = torch.isinf(y) & (expected > torch.finfo(torch.float32).max)
    assert bool((near | over)[:3].all())
    assert bool(torch.isnan(y[2]).all())
    assert torch.equal(torch.isnan(y[3]), torch.isnan(expected[3]))


def test_large_activations_stay_finite_in_float32_sums() -> None:
    case = problem("int4", "float16", N, K, 32)
    (entry,) = compile_entries(case.gemm, HOST, [proposal(case.gemm, HOST, "fma", 1, 16)])
    x = torch.full((1, K), 60000.0, dtype=torch.float16)
    assert relative_error(case, entry, 1, x) <= BOUNDS["float32"]


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
def test_dynamic_quantization_per_token(source: str) -> None:
    module = compile_module({"quantize": cpu.emit_quantize(source, HOST, "quantize")}, HOST)
    x = (torch.randn(5, 77, generator=torch.Generator().manual_seed(3)) * 3).to(getattr(torch, source))
    x[2] = 0
    codes, scale = torch.empty(5, 77, dtype=torch.int8), torch.empty(5)
    module["quantize"](x, codes, scale)
    wide = x.double()
    expected = (wide.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    torch.testing.assert_close(scale.double(), expected, rtol=1e-6, atol=0)
    error = (codes.double() * scale.double()[:, None] - wide).abs().amax(1)
    assert bool((error <= expected * 0.5001).all())
    assert bool((codes[2] == 0).all())
    assert int(codes.abs().max()) == 127


def straight(assembly: list[str], instruction: str) -> list[list[str]]:
    """Return the runs of lines without jumps or labels that hold an instruction, from its first on."""
    runs: list[list[str]] = [[]]
    for line in assembly:
        if line.startswith((".LBB", "\tj")):
            runs.append([])
        else:
            runs[-1].append(line)
    first = [next((at for at, line in enumerate(run) if instruction in line), None) for run in runs]
    return [run[at:] for run, at in zip(runs, first, strict=True) if at is not None]


def test_accumulators_stay_in_registers() -> None:
    """The innermost loops of the widest tile, and of those for what is left, must not touch the stack."""
    if "avx512_bf16" not in HOST.features:
        pytest.skip("the assembly checked here is AVX-512 BF16; this CPU has none")
    case = problem("int4", "bfloat16", 128, 256, 128)
    function = emit(case.gemm, HOST, proposal(case.gemm, HOST, "avx512_bf16", 16, 16), "entry")
    assembly = compile_module({"entry": function}, HOST).mod.inspect_source("asm").splitlines()
    runs = straight(assembly, "vdpbf16ps")
    assert sorted(sum("vdpbf16ps" in line for line in run) for run in runs) == [
        16 * m for m in (4, 8, 12, 16)
    ]
    assert not any("(%rsp)" in line for run in runs for line in run)
    assert sum("vpermw" in line for line in assembly) == 16 * len(runs)


@pytest.mark.skipif("avx2" not in HOST.features, reason="this CPU has no AVX2")
@pytest.mark.parametrize("group", [32, 128])
def test_words_of_x_are_not_kept_on_the_stack(group: int) -> None:
    """Both halves of a vector are multiplied at once, however few sums a group has."""
    case, device = problem("int4", "int8", 128, 256, group), get_device("cpu/avx2")
    function = emit(case.gemm, device, proposal(case.gemm, device, "avx2_maddubs", 4, 16), "entry")
    assembly = compile_module({"entry": function}, device).mod.inspect_source("asm").splitlines()
    places = [index for index, line in enumerate(assembly) if "vpmaddubsw" in line]
    assert len(places) == 8 * 4 * 2  # steps of a unit, rows, halves
    assert sum("(%rsp)" in line for line in assembly[places[0] : places[-1]]) <= 8


@pytest.mark.skipif("avx2" not in HOST.features, reason="this is no x86-64 CPU")
def test_sums_begin_with_what_the_offset_adds() -> None:
    """A group of 32 ends with two instructions per row."""
    case, device = problem("int4", "int8", 128, 256, 32), get_device("cpu/avx512_vnni")
    function = emit(case.gemm, device, proposal(case.gemm, device, "avx512_vnni", 16, 16), "entry")
    assembly = compile_module({"entry": function}, device).mod.inspect_source("asm").splitlines()
    runs = [[line.split()[0] for line in run] for run in straight(assembly, "vpdpbusd")]
    assert sorted(run.count("vpdpbusd") for run in runs) == [8 * m for m in (4, 8, 12, 16)]  # steps, rows
    wanted = ("vcvtdq2ps", "vfmadd", "vmov", "prefetch", "add", "inc", "cmp", "mov", "lea")
    for run in runs:
        last = max(at for at, name in enumerate(run) if name == "vpdpbusd")
        assert all(name.startswith(wanted) for name in run[last + 1 :]), run[last + 1 :]


def test_errors_name_what_fits() -> None:
    case = problem("int4", "bfloat16", N, K, GROUP)
    zen = get_device("cpu/avx512_bf16")

    def attempt(device, core, tile_m):
        emit(case.gemm, device, proposal(case.gemm, zen, core, tile_m, 16), "e")

    with pytest.raises(ScheduleError, match="lacks avx512bw"):
        attempt(get_device("cpu/avx2"), "avx512_bf16", 1)
    with pytest.raises(ScheduleError, match="convert x to int8"):
        attempt(zen, "avx512_vnni", 1)
    with pytest.raises(ScheduleError, match="power of two"):
        attempt(zen, "fma", 3)
    with pytest.raises(DTypeError, match="bfloat16, float16, float32"):
        cpu.emit_quantize("int8", HOST, "q")


def test_rows_of_x_may_be_padded_with_zeros() -> None:
    for activation, pitch in (("bfloat16", 136), ("int8", 144)):
        case = problem("int4", activation, N, K, GROUP)
        (entry, *_) = compile_entries(case.gemm, HOST, cores(HOST, case.gemm))
        x = activations(case.gemm, 3)
        padded = torch.nn.functional.pad(x, (0, pitch - K))
        y = [torch.empty(3, N) for _ in range(2)]
        for argument, result in zip((x, padded), y, strict=True):
            entry(argument, *cpu.pack(case.gemm, case.weight).values(), result)
        assert torch.equal(y[0], y[1])


def test_portable_kernels_compile_for_arm() -> None:
    arm = get_device("cpu/dotprod")
    case = problem("nf4", "float16", N, K, 32)
    module = compile_module(
        {"entry": emit(case.gemm, arm, proposal(case.gemm, arm, "fma", 4, 16), "entry")}, arm
    )
    assert "fmla" in module.mod.inspect_source("asm")


FACTORED = {
    # type of codes, group: whether there are offsets
    ("uint4", 32): True,
    ("uint2", 16): True,
    ("int6", 16): False,
}


@pytest.mark.parametrize("vanishing", [False, True])
@pytest.mark.parametrize("activation", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize(("ttype", "group"), FACTORED)
def test_factors_give_the_products_of_their_scales(
    ttype: str, group: int, activation: str, vanishing: bool
) -> None:
    """They take the bytes of the factors, and products are bit for bit those of scales and zero points."""
    offset = FACTORED[ttype, group]
    weight = factored(ttype, (N, 512), group, offset=offset, vanishing=vanishing)
    plain = replace(weight, factors={}).without_offset()
    gemm = problem(ttype, activation, N, 512, group, zero="float" if offset else "none").gemm
    small, large = cpu.pack(gemm, weight), cpu.pack(gemm, plain)
    blocks = 512 // 256 * cpu_layout(gemm).padded_n(N)
    assert small["scales"].nbytes == blocks * (2 + 256 // group)
    assert large["scales"].nbytes == blocks * 4 * 256 // group
    shown = weight.dequantize("float64")
    for entry in compile_entries(gemm, HOST, cores(HOST, gemm)):
        for m in (1, 3, 33):
            x, results = activations(gemm, m), (torch.empty(m, N), torch.empty(m, N))
            for packed, y in zip((small, large), results, strict=True):
                entry(x, *packed.values(), y)
            assert vanishing or torch.equal(*results)
            size = x.double().abs() @ shown.abs().T
            assert ((results[0] - x.double() @ shown.T).abs() <= 2e-5 * size).all()


def test_a_scale_of_zero_beside_an_offset_is_no_factor() -> None:
    """No zero point gives the offset of a group whose scale is zero: codes and scales change instead."""
    gemm = problem("uint4", "float32", N, 512, 32, zero="float").gemm
    assert cpu.factors_of(gemm, factored("uint4", (N, 512), 32, vanishing=True))
    weight = factored("uint4", (N, 512), 32)
    weight.factors["scale"].integers[5, 3] = 0
    weight.scale[5, 3] = 0
    assert not cpu.factors_of(gemm, weight)


def test_factors_side_by_side_are_those_of_the_whole() -> None:
    """So plans join weights; of factors beside none, scales and zero points are made."""
    gemm = problem("uint4", "float32", 128, 512, 32, zero="float").gemm
    whole = factored("uint4", (256, 512), 32)
    parts = [taken_rows(whole, range(first, first + 128)) for first in (0, 128)]
    packed = [cpu.pack(gemm, part) for part in parts]
    plain = cpu.pack(gemm, replace(parts[1], factors={}).without_offset())

    def joined(*arrays: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        scales, zeros = ([each[name] for each in arrays] for name in ("scales", "zeros"))
        return [numbers_side_by_side(scales, "float32"), numbers_side_by_side(zeros, "float32", scales)]

    wide = replace(gemm, n=256)
    for found, given in (joined(*packed), whole), (joined(packed[0], plain), replace(whole, factors={})):
        wanted = cpu.pack(wide, given if given.factors else given.without_offset())
        assert torch.equal(found[0], wanted["scales"])
        assert torch.equal(found[1], wanted["zeros"])
