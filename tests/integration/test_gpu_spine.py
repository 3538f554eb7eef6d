"""Every field of a GPU schedule decides: with another value there is another kernel or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest

from benchmarks import superopt_graphs as graphs
from ladder.api.problem import gemm_for
from ladder.ir.attention import Attention
from ladder.ir.scaled import ScaledGemm
from ladder.lower import build
from ladder.lower.blocks import BlockSchedule, emitter_for
from ladder.runtime.fused import Lowering
from schedules import attention, scaled_choice
from schedules.legal import check_legal
from schedules.policy import rank
from schedules.schedule import Schedule, parse_schedule
from targets import get_device
from tile_types.errors import LadderError

ROWS: tuple[tuple[str, str, int | None, str, int], ...] = (
    ("int4", "float16", 128, "cuda/sm_90a", 1),
    ("int4", "float16", 128, "cuda/sm_90a", 64),
    ("nf4", "bfloat16", 64, "cuda/sm_90a", 4096),
    ("fp8_e4m3", "fp8_e4m3", None, "cuda/sm_90a", 256),
    ("uint4", "int8", 128, "cuda/sm_90a", 16),
    ("int2", "float16", 128, "cuda/sm_80", 1),
    ("int4", "float16", 128, "cuda/sm_80", 64),
    ("mxfp4", "bfloat16", None, "cuda/sm_100a", 256),
    ("float16", "float16", None, "cuda/sm_100a", 2048),
    ("int4", "float16", 128, "rocm/gfx942", 1),
    ("int4", "float16", 128, "rocm/gfx942", 64),
    ("bfloat16", "bfloat16", None, "rocm/gfx950", 2048),
    ("int4", "float16", 128, "rocm/gfx1100", 1),
    ("int4", "float16", 128, "rocm/gfx1100", 128),
    ("int8", "int8", None, "rocm/gfx1201", 64),
)
"""Products: weight, activation, group, device, and the M whose best schedule is taken."""

HEADS = Attention(8, 2, 128, "float16", "float16", scale=128**-0.5)
CODES = replace(HEADS, stored="int8")

Emit = Callable[[Any], str]


def _product(row: tuple[str, str, int | None, str, int]) -> tuple[Emit, Schedule]:
    weight, activation, group, target, m = row
    gemm, device = gemm_for(4096, 4096, weight, activation, group_size=group), get_device(target)

    def emit(schedule: Any) -> str:
        check_legal(gemm, device, schedule)
        return str(build.emit(gemm, device, schedule, "entry").script())

    return emit, rank(gemm, device, m)[0].schedule


def _attention(form: Attention, target: str, tokens: int) -> tuple[Emit, Schedule]:
    device = get_device(target)
    emit = build.resolve(build.ATTENTION, "target", device.tvm_target["kind"])
    schedule = attention.choose(form, device, (1, tokens, 1024)).schedule
    return lambda plan: str(emit(form, device, plan, "entry").script()), schedule


def _scaled(kind: str, target: str, m: int) -> tuple[Emit, Schedule]:
    form, device = ScaledGemm(4096, 4096, kind, kind), get_device(target)
    emit = build.resolve(build.SCALED, "target", device.tvm_target["kind"])
    return lambda plan: str(emit(form, device, plan, "entry").script()), scaled_choice.choose(form, device, m)


def _block(case: graphs.Case, target: str, schedule: BlockSchedule) -> tuple[Emit, BlockSchedule]:
    device = get_device(target)
    return lambda plan: str(emitter_for(device)(case.block, device, plan, "entry", ()).script()), schedule


NORM = graphs.rmsnorm_matmul(16, 1024, 512, 64, 64)
GATED = graphs.gated_mlp(64, 1024, 512, 64, 64)
BLOCKS = {
    "norm and product": (NORM, "cuda/sm_90a", BlockSchedule(2, 1, 4, 2, 2, "tensor", "asked", 1)),
    "norm and product on AMD": (NORM, "rocm/gfx942", BlockSchedule(2, 1, 2)),
    "gated by warpgroups": (GATED, "cuda/sm_90a", BlockSchedule(1, 4, 4, copies="tensor", products="wgmma")),
    "attention as a block graph": (
        graphs.attention(2, 64, 64, 512, 64, 64), "cuda/sm_80", BlockSchedule(2, 4, 2),
    ),
}  # fmt: skip

KERNELS: Mapping[str, Callable[[], tuple[Emit, Any]]] = {
    **{" ".join(map(str, row)): partial(_product, row) for row in ROWS},
    "attention": partial(_attention, HEADS, "cuda/sm_90a", 1),
    "attention on codes": partial(_attention, CODES, "cuda/sm_80", 4),
    "attention on AMD": partial(_attention, HEADS, "rocm/gfx942", 1),
    "mxfp4 by mxfp4": partial(_scaled, "mxfp4", "cuda/sm_100a", 16),
    "mxfp4 by mxfp4 on AMD": partial(_scaled, "mxfp4", "rocm/gfx950", 64),
    **{name: partial(_block, *row) for name, row in BLOCKS.items()},
}
"""24 kernels; `tests.cpu_schedules` has 16 more, whose schedules are lists of transforms."""

WORDS = {
    "placement": ("operand", "accumulator"),
    "copies": ("lanes", "tensor"),
    "release": ("begin", "asked", "end", "never"),
    "products": ("mma", "wgmma"),
    "pipeline": ("gemv", "digits", "mma", "wgmma", "tcgen05", "mfma", "dot", "wmma"),
}


def altered(schedule: Any) -> Iterator[Any]:
    """Yield functions that make schedules which differ in one field."""
    for field in fields(schedule):
        value = getattr(schedule, field.name)
        if isinstance(value, bool):
            others: tuple[Any, ...] = (not value,)
        elif isinstance(value, int):
            others = (value * 2, value // 2, value + 1)
        else:
            others = WORDS[field.name]
        yield from (partial(replace, schedule, **{field.name: other}) for other in others if other != value)


def read_back(schedule: Any) -> Any:
    if isinstance(schedule, BlockSchedule):
        return Lowering.parse(Lowering(NORM.graph, (schedule,)).text).schedules[0]
    return parse_schedule(str(schedule))


@pytest.mark.costly
@pytest.mark.parametrize("name", KERNELS)
def test_every_field_decides(name: str) -> None:
    """What is printed is read back; with another value of a field there is another kernel, or none."""
    emit, schedule = KERNELS[name]()
    assert read_back(schedule) == schedule
    whole, idle = emit(schedule), []
    for make in altered(schedule):
        try:
            same = emit(make()) == whole
        except LadderError:
            continue
        idle += [str(make.keywords)] * same
    assert not idle
