"""CPU products of digits of eight bits and weights of two bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ladder.ir.gemm import Gemm
from ladder.lower import cpu
from ladder.lower.build import emit
from schedules.cpu_policy import cpu_schedule, proposal
from schedules.instructions import columns_in_32_bits
from targets import get_device, host_cpu
from tests.numeric.cpu_problems import BOUNDS, compile_entries, problem, relative_error
from tests.numeric.test_cpu_digits import BYTES, drawn
from tile_types import QuantizedTensor, TType, get_type, register_type
from tile_types.errors import ScheduleError
from tile_types.forms import PAIR_ERROR, byte_pairs

HOST = host_cpu()
CORE = "avx512_vnni8w2"


def powers() -> str:
    """Register signed powers of two, as README does, and return their name."""

    def decode(code, ops):
        size = ops.exp2(-ops.cast(code & 7, "float32"))
        return ops.select(code >= 8, -size, size)

    return register_type(TType("pair_powers", 4, decode)).name


@pytest.mark.parametrize("weight", ["nf4", "fp6_e3m2", "bnb_fp4", ""])
def test_pairs_hold_values(weight: str) -> None:
    """Exact values are exact multiples of the unit; rounded real numbers are off by little of themselves."""
    element = get_type(weight or powers())
    form, values = byte_pairs(element), element.values()
    assert form is not None
    upper, lower = (np.array(part) + form.low for part in (form.table, form.lower))
    error = np.abs((256 * upper + lower) * form.unit - values)
    assert (error <= (0 if element.exact else PAIR_ERROR) * np.abs(values)).all()
    assert max(*form.table, *form.lower) <= 255
    assert min(*form.table, *form.lower) >= 0


def test_pairs_hold_nothing_else() -> None:
    """Values of nineteen bits, tables of more than 64 values, infinity, and values too far apart."""
    apart = TType("pair_apart", 2, lambda code, ops: ops.lookup((0.0, 1e-6, 0.3, 1.0), code), exact=False)
    for element in (get_type("fp8_e4m3"), get_type("int7"), get_type("fp6_e4m1"), apart):
        assert byte_pairs(element) is None, element


@pytest.mark.parametrize(
    ("device", "activation", "weight", "chosen"),
    [
        ("avx512_bf16", "float16", "nf4", {1: True, 8: True, 16: False}),
        ("avx512_bf16", "float16", "", {1: True, 8: True, 16: False}),
        ("avx512_bf16", "bfloat16", "nf4", {1: False}),
        ("avx512_bf16", "float32", "nf4", {1: False}),
        ("avx512_bf16", "float16", "int4", {1: False}),
        ("amx", "float16", "nf4", {1: False}),
    ],
)
def test_pairs_are_chosen_where_they_pay(
    device: str, activation: str, weight: str, chosen: dict[int, bool]
) -> None:
    gemm = Gemm(256, 512, weight or powers(), activation, activation, 128)
    found = {m: cpu_schedule(gemm, get_device(f"cpu/{device}"), m).instruction for m in chosen}
    assert {m: name == CORE for m, name in found.items()} == chosen


@BYTES
@pytest.mark.parametrize("weight", ["nf4", "fp6_e3m2", ""])
@pytest.mark.parametrize("group", [16, 20, 64])
@pytest.mark.parametrize(("tile_m", "tile_n"), [(1, 64), (4, 32), (8, 16)])
def test_products(weight: str, group: int, tile_m: int, tile_n: int) -> None:
    case = problem(weight or powers(), "float16", 37, 131, group, output="float16", bias=True)
    (entry,) = compile_entries(case.gemm, HOST, [proposal(case.gemm, HOST, CORE, tile_m, tile_n)])
    for m in (1, 9):
        assert relative_error(case, entry, m) <= BOUNDS["float16"]


@BYTES
def test_sums_stay_in_32_bits() -> None:
    """The largest digits by the largest bytes, of as many columns as an instruction takes."""
    group = columns_in_32_bits(2 * 255, "two_bytes") // 32 * 32
    case = problem("nf4", "bfloat16", 16, group + 32, group, output="bfloat16")
    schedule = proposal(case.gemm, HOST, CORE, 2, 16)
    (entry,) = compile_entries(case.gemm, HOST, [schedule])
    codes = np.full((16, group + 32), 15, np.uint8)
    codes[8:] = 0
    weights = QuantizedTensor.from_codes(
        codes, get_type("nf4"), (1, group), scale=np.ones((16, 2), np.float16)
    )
    x = torch.tensor([[253 / 128], [-253 / 128]]).bfloat16().repeat(1, group + 32)
    y = torch.empty(2, 16, dtype=torch.bfloat16)
    entry(x, *cpu.pack(case.gemm, weights).values(), y)
    signs = torch.tensor([1.0] * 8 + [-1.0] * 8)
    assert torch.allclose(y.float(), x[:, :1].float() * (group + 32) * signs, rtol=2**-8, atol=0)
    longer = problem("nf4", "bfloat16", 16, 2 * group + 64, group + 32, output="bfloat16").gemm
    with pytest.raises(ScheduleError, match="are too many"):
        emit(longer, HOST, proposal(longer, HOST, CORE, 2, 16), "entry")


@BYTES
@pytest.mark.parametrize(("m", "weight"), [(1, "nf4"), (16, "")])
def test_errors_are_those_of_dense_products(m: int, weight: str) -> None:
    """Dense: x by the weights in float32, rounded to the type of x; outliers meet weights of almost 0."""
    case = problem(weight or powers(), "float16", 64, 320, 64, output="float16")
    (entry,) = compile_entries(case.gemm, HOST, [proposal(case.gemm, HOST, CORE, min(m, 8), 16)])
    element = case.weight.ttype if isinstance(case.weight.ttype, TType) else get_type(case.gemm.weight)
    least = int(np.argmin(np.abs(element.values())))
    for name, given, without in drawn(m, 320):
        codes = np.array(case.weight.codes())
        codes[:, without] = least
        weights = QuantizedTensor.from_codes(codes, element, (1, 64), scale=case.weight.scale)
        x, y = given.half(), torch.empty(m, 64, dtype=torch.float16)
        entry(x, *cpu.pack(case.gemm, weights).values(), y)
        values = torch.from_numpy(np.asarray(weights.dequantize("float64"))).T
        exact, dense = x.double() @ values, (x.float() @ values.float()).half().double()
        assert (y.double() - exact).norm() <= 1.5 * (dense - exact).norm(), name


@BYTES
def test_what_pairs_cannot_hold_is_refused() -> None:
    for weight, output in (("fp8_e4m3", "float16"), ("int4", "float16"), ("nf4", "float32")):
        gemm = problem(weight, "float16", 16, 64, 32, output=output).gemm
        with pytest.raises(ScheduleError, match=r"hold every value|too wide|rounded to 16 bits"):
            emit(gemm, HOST, proposal(gemm, HOST, CORE, 2, 16), "entry")
