"""Schedules decide kernels: read back they give the same one, without or with another step not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from ladder.ir.program import Layout, parse_program, verify_program
from ladder.lower import builder
from ladder.lower.build import emit
from ladder.lower.skeletons import loopnest
from schedules.cpu_policy import tile_program
from schedules.schedule import Plan, TransformList, parse_plan, parse_schedule
from schedules.transforms import Convert, Map, Pad, Place, Slice, Transform, Use
from tests.cpu_schedules import CASES, schedule_of
from tile_types.errors import LadderError

GOLDEN = ("avx512_bf16 int4 x bfloat16 g48", "avx512_vnni uint8 x int8 g0", "amx_int8 int4 x int8 g16")


def tir(name: str, schedule: TransformList) -> str:
    gemm, device, *_ = CASES[name]
    return emit(gemm, device, schedule, "entry").script()


@pytest.mark.parametrize("name", CASES)
def test_what_is_printed_gives_the_same_kernel(name: str) -> None:
    schedule = schedule_of(name)
    again = parse_schedule(str(schedule))
    assert again == schedule
    assert tir(name, again) == tir(name, schedule)
    plan = Plan(((1, schedule), (1 << 16, replace(schedule, transforms=schedule.transforms[:3]))))
    assert parse_plan(str(plan)) == plan


@pytest.mark.parametrize("name", CASES)
def test_tile_programs_read_back(name: str) -> None:
    gemm, device, *_ = CASES[name]
    steps = schedule_of(name).transforms
    for count in range(len(steps) + 1):
        program = tile_program(gemm, device, TransformList(steps[:count]))
        assert parse_program(str(program)) == program
    verify_program(program)


@pytest.mark.parametrize("name", CASES)
def test_the_text_of_the_tile_program_is_all_that_emission_needs(name: str) -> None:
    gemm, device, *_ = CASES[name]
    text = str(tile_program(gemm, device, schedule_of(name)))
    with builder.function("entry") as result:
        loopnest.emit(parse_program(text))
    assert result.func.script() == tir(name, schedule_of(name))


@pytest.mark.parametrize("name", GOLDEN)
def test_texts_of_three_kernels(name: str, golden) -> None:
    gemm, device, *_ = CASES[name]
    schedule, file = schedule_of(name), name.replace(" ", "_")
    golden(f"cpu_{file}.txt", f"{schedule}\n\n{tile_program(gemm, device, schedule)}\n")
    golden(f"cpu_{file}_tir.txt", f"{tir(name, schedule)}\n")


def altered(step: Transform) -> Iterator[Transform]:
    """Yield transforms that differ in one argument."""
    if isinstance(step, Slice):
        yield from (replace(step, step=step.step * 2), replace(step, step=step.step + 1))
        yield from (replace(step, step=step.step // 2) for _ in range(step.step > 1))
        yield from (replace(step, over=over) for over in ("loop", "threads", "unrolled") if over != step.over)
        yield from (replace(step, axis=axis) for axis in "mngk" if axis != step.axis)
    elif isinstance(step, Pad):
        yield from (replace(step, multiple=step.multiple * 2), replace(step, axis="m"))
    elif isinstance(step, Map):
        yield from (
            replace(step, layout=Layout(step.layout.name, (n,)))
            for n in (1, 2, 4, 8, 16)
            if step.layout.parameters != (n,)
        )
        yield replace(step, tile="acc")
    elif isinstance(step, Convert):
        yield from (
            replace(step, ttype=t) for t in ("float32", "bfloat16", "uint8", "int8") if t != step.ttype
        )
        yield from (
            replace(step, by=by)
            for by in ("lookup", "arithmetic", "mask", "widening", "offset")
            if by != step.by
        )
        yield replace(step, tile={"x": "w", "w": "x"}[step.tile])
    elif isinstance(step, Place):
        yield from (
            replace(step, level=level) for level in ("l2", "cache", "register") if level != step.level
        )
        yield from (replace(step, by=by) for by in ("", "loop", "threads", "prefetch 9") if by != step.by)
        yield from (replace(step, tile=tile) for tile in ("x", "w", "acc", "total") if tile != step.tile)
    elif isinstance(step, Use):
        names = ("amx_int8", "amx_bf16", "avx512_vnni", "avx2_maddubs", "avx512_bf16", "fma")
        yield from (replace(step, instruction=name) for name in names if name != step.instruction)
        yield replace(step, operator="add")


def words(step: Transform) -> str:
    """Return what a refusal names a transform by: its word and what it acts on."""
    return " ".join(str(step).split()[: 1 if isinstance(step, Use) else 2])


@pytest.mark.parametrize("name", CASES)
def test_every_transform_decides(name: str) -> None:
    """Without one transform, or with another in its place, there is another kernel or a refusal by name."""
    steps, whole = schedule_of(name).transforms, tir(name, schedule_of(name))
    complaints: list[str] = []
    for index, step in enumerate(steps):
        for other in (None, *altered(step)):
            changed = (*steps[:index], *([other] if other else []), *steps[index + 1 :])
            try:
                found = tir(name, TransformList(changed))
            except LadderError as error:
                named = {words(step), *([words(other)] if other else [])}
                complaints += [f"{step} -> {other}: {error}"] * (
                    not any(name in str(error) for name in named)
                )
            else:
                complaints += [f"{step} -> {other} changes nothing"] * (found == whole)
    assert not complaints


def test_a_later_transform_may_be_refused_for_an_earlier_one() -> None:
    schedule = schedule_of(GOLDEN[0])
    late = (Place("w", "cache"), Slice("m", 2, "loop"), Convert("x", "float32", "widening"))
    for transform in (*late, schedule.transforms[-1]):
        twice = TransformList((*schedule.transforms, transform))
        with pytest.raises(LadderError, match=f"{transform}: the instruction is chosen already"):
            tir(GOLDEN[0], twice)
