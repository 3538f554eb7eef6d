"""Tile programs in numpy: every transform leaves the result as it is, and kernels compute what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ladder.ir.ops import get_operator
from ladder.ir.program import TileProgram, block_graph
from ladder.lower import cpu
from ladder.lower.cpu.pack import computed_as, numbers_of, offset_of, unpack_codes
from schedules.cpu_layout import cpu_layout
from schedules.cpu_policy import tile_program
from schedules.schedule import TransformList
from schedules.transforms import Convert, Place, Slice
from targets import host_cpu
from tests.cpu_schedules import CASES, K, N, schedule_of
from tests.numeric.cpu_problems import BOUNDS, Problem, activations, compile_entries, problem
from tests.numeric.tile_interpreter import interpret_program

HOST = host_cpu()
M = 5
LOOKS_UP = "avx512bw"
"""What schedules with tables need."""


def runs_here(name: str) -> bool:
    """Tell whether this CPU has what the kernel of a case needs."""
    looks_up = any(
        isinstance(step, Convert) and "lookup" in str(step) for step in schedule_of(name).transforms
    )
    has_core = CASES[name][2] in {core.name for core in HOST.cores}
    return has_core and (LOOKS_UP in HOST.features or not looks_up)


ON_HOST = [name for name in CASES if runs_here(name)]


def case_of(name: str) -> Problem:
    gemm = CASES[name][0]
    group = gemm.group_size if gemm.scale else 0
    rest = {"bias": gemm.bias, "token_scale": gemm.token_scale, "epilogue": gemm.epilogue}
    return problem(gemm.weight, gemm.activation, N, K, group, zero=gemm.zero, output=gemm.output, **rest)


def extras(case: Problem) -> dict[str, torch.Tensor]:
    """Return the arguments besides x and the packed weight, in calling order."""
    random = torch.Generator().manual_seed(2)
    found = {"token_scale": torch.rand(M, generator=random) + 0.5} if case.gemm.token_scale else {}
    dtype = getattr(torch, case.gemm.output)
    return {**found, **({"bias": torch.randn(N, generator=random).to(dtype)} if case.gemm.bias else {})}


def arguments(case: Problem, program: TileProgram) -> dict[str, np.ndarray]:
    """Return what a kernel gets as the program's arguments; codes are as packing stores them."""
    gemm, packed = case.gemm, cpu.pack(case.gemm, case.weight)
    groups = program.sizes(M, N, K)["G"]
    offset = 0
    codes = unpack_codes(cpu_layout(gemm), packed["words"], N, K)
    if program.operand("w").ttype == gemm.weight and cpu_layout(gemm).lane == 8:
        codes, offset = torch.from_numpy(case.weight.codes().astype(np.int64)), offset_of(gemm.weight)
    found = {
        "x": activations(gemm, M).double(),
        "w": codes,
        "row_scale": packed["row_scale"][:N],
        **extras(case),
    }
    if "scales" in packed:
        found["scale"] = numbers_of(gemm, "scale", packed["scales"])[:groups, :N].float()
    if "zeros" in packed:  # they count from the smallest value as packed codes do
        zeros = numbers_of(gemm, "zero", packed["zeros"])
        found["zero"] = zeros[:groups, :N].to(getattr(torch, computed_as(gemm, "zero"))) + offset
    return {name: (value if name == "w" else value.double()).numpy() for name, value in found.items()}


def reference(case: Problem) -> np.ndarray:
    result = activations(case.gemm, M).double().numpy() @ case.values.T
    more = extras(case)
    result = result * more["token_scale"].double().numpy()[:, None] if "token_scale" in more else result
    result = result + more["bias"].double().numpy() if "bias" in more else result
    for name in case.gemm.epilogue:
        result = get_operator(name).reference([result], {})
    return result


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def bound(case: Problem) -> float:
    """Values of a codebook are rounded where the instruction takes bfloat16."""
    return BOUNDS["bfloat16" if case.gemm.weight == "nf4" else case.gemm.output]


@pytest.mark.parametrize("name", CASES)
def test_every_transform_leaves_the_result(name: str) -> None:
    case, device = case_of(name), CASES[name][1]
    steps, wanted = schedule_of(name).transforms, reference(case)
    for count in range(len(steps) + 1):
        program = tile_program(case.gemm, device, TransformList(steps[:count]))
        found = interpret_program(program, arguments(case, program), N)
        assert difference(found, wanted) <= bound(case), steps[count - 1 : count]


def test_the_block_graph_is_the_product() -> None:
    case = case_of("fma uint4 x float32 g20")
    graph = block_graph(case.gemm)
    assert not graph.product[1]
    assert (
        difference(interpret_program(graph, arguments(case, graph), N), reference(case)) <= BOUNDS["float32"]
    )


@pytest.mark.parametrize("name", ON_HOST)
def test_kernels_compute_their_programs(name: str) -> None:
    case = case_of(name)
    agree(case, schedule_of(name))


def agree(case: Problem, schedule: TransformList) -> None:
    """Compare a kernel with its tile program."""
    (entry,) = compile_entries(case.gemm, HOST, [schedule])
    program = tile_program(case.gemm, HOST, schedule)
    y = torch.full((M, N), float("nan"), dtype=getattr(torch, case.gemm.output))
    entry(activations(case.gemm, M), *cpu.pack(case.gemm, case.weight).values(), *extras(case).values(), y)
    said = interpret_program(program, arguments(case, program), N)
    assert difference(y.double().numpy(), said) <= BOUNDS[case.gemm.output]


CHANGES = {
    "fma fp4_e2m1 x float16 g32": (
        (Slice("n", 16, "threads"), Slice("n", 64, "loop")),
        (Slice("m", 16, "loop"), Slice("m", 4, "loop")),
        (Convert("w", "float32", "lookup"), Convert("w", "float32", "arithmetic")),
        (Place("w", "l2", "prefetch 4"), None),
        (Place("x", "cache", "loop"), Place("x", "cache", "threads")),
    ),
    "avx512_vnni int4 x int8 g32": ((Slice("n", 16, "threads"), Slice("n", 128, "threads")),),
}
"""Case -> transforms and what stands in their place."""


@pytest.mark.parametrize("name", CHANGES)
def test_other_kernels_compute_the_same(name: str) -> None:
    if name not in ON_HOST:
        pytest.skip(f"this CPU has no {CASES[name][2]}")
    case, steps = case_of(name), schedule_of(name).transforms
    for old, new in CHANGES[name]:
        place = steps.index(old)
        agree(case, TransformList((*steps[:place], *([new] if new else []), *steps[place + 1 :])))


def test_a_wrong_program_gives_another_result() -> None:
    """The interpreter notices: codes in the place of values, a scale left out."""
    case = case_of("avx512_bf16 int4 x bfloat16 g48")
    program = block_graph(case.gemm)
    given, wanted = arguments(case, program), reference(case)
    (add,) = [s for s in program.body if hasattr(s, "scale")]
    body = tuple(replace(s, scale="") if s is add else s for s in program.body)
    assert difference(interpret_program(replace(program, body=body), given, N), wanted) > 0.1
