"""Transforms and tile programs on cases small enough to check by eye, and what is refused."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import ladder.lower.skeletons
import schedules
from ladder.ir.gemm import Gemm
from ladder.ir.program import (
    Fill,
    Layout,
    Loop,
    TileProgram,
    block_graph,
    count,
    parse_program,
    verify_program,
)
from schedules.cpu_policy import cpu_schedule, proposal, tile_program
from schedules.schedule import GpuSchedule, TransformList, parse_plan, parse_schedule
from schedules.transforms import TRANSFORMS, Map, Pad, Place, Slice, apply_all, parse_transform
from targets import get_device
from tile_types.errors import ParseError, ScheduleError, VerificationError

ZEN = get_device("cpu/avx512_bf16")
INT4 = Gemm(64, 256, "int4", "bfloat16", "float32", 128)
GRAPH = block_graph(INT4)
SCHEDULE = cpu_schedule(INT4, ZEN, 16)
PROGRAM = tile_program(INT4, ZEN, SCHEDULE)


def body_of(program: TileProgram) -> list[str]:
    return [line for line in str(program).splitlines() if not line.startswith(("tile", "axes", "argument"))]


def test_the_block_graph_of_a_product() -> None:
    assert body_of(GRAPH) == [
        "total[m, n]: float32[M, N] dram <- 0",
        "acc[g, m, n]: float32[G, M, N] dram <- 0",
        "acc += x · w",
        "total += acc * scale",
        "store y <- total, mul row_scale",
    ]


def test_slice_wraps_what_goes_through_the_axis() -> None:
    inner = apply_all(GRAPH, (Slice("m", 8, "loop"), Slice("g", 1, "loop"), Slice("k", 32, "loop")), ZEN)
    assert body_of(inner) == [
        "for m by 8 over loop:",
        "  total[m, n]: float32[8, N] dram <- 0",
        "  for g by 1 over loop:",
        "    acc[g, m, n]: float32[1, 8, N] dram <- 0",
        "    for k by 32 over loop:",
        "      acc += x · w",
        "    total += acc * scale",
        "  store y <- total, mul row_scale",
    ]


def test_pad_rounds_the_weight_and_what_belongs_to_it() -> None:
    padded = Pad("n", 128).apply(GRAPH, ZEN)
    assert [str(operand.tile.shape[0]) for operand in padded.arguments] == ["M", "N^128", "G", "N^128", "M"]
    assert padded.extent("n") == "N^128"


def test_place_brings_sums_back_that_begin_further_out() -> None:
    outer = (Slice("m", 64, "loop"), Slice("g", 1, "loop"), Place("acc", "cache"), Slice("k", 64, "loop"))
    program = apply_all(GRAPH, (*outer, Slice("m", 16, "loop"), Place("acc", "register")), ZEN)
    assert body_of(program)[5:9] == [
        "      for m by 16 over loop:",
        "        acc.register[g, m, n]: float32[1, 16, N] register <- acc",
        "        acc.register += x · w",
        "        acc[g, m, n]: float32[1, 64, N] cache <- acc.register",
    ]


REFUSED = {
    "slice q by 2 over loop": "axes are m, n, g, k",
    "slice m by 2 over warps": "pieces lie over loop, threads, unrolled",
    "slice m by 0 over loop": "slice m by 0 over loop: a piece has at least one element",
    "slice k by 3 over loop": "k is 128",
    "slice k by 32 over threads": "threads share the columns",
    "slice n by 16 over threads": "pad w.n to a multiple of 16",
    "slice m by 4 over unrolled": "m has M elements",
    "pad w.n to 64 with 0": "weights are packed with pad w.n to 128",
    "pad w.k to 32 with 0": "weights are packed with",
    "map w to planes(16)": "first pad w.n to 128",
    "map w to planes(8)": "weights are packed as planes(16)",
    "map x to words(4)": "place x in cache before",
    "map w to rows(4)": "no tile has that layout",
    "convert w to bfloat16 by lookup": "place w in cache or register before",
    "convert w to uint4 by offset": "only bytes",
    "convert acc to float16 by widening": "only operands",
    "place w in register": "map w to planes before",
    "place y in cache": "tiles are x, w, acc and total",
    "place x in shared": "levels are",
    "place x in cache by hand": "x goes to cache",
    "place total in register": "total is summed over groups in cache",
    "use wgmma for matmul": "use wgmma for matmul: instructions are",
    "use amx_bf16 for matmul": "has no core 'amx_bf16'",
    "use fma for add": "instructions are used for matmul",
    "use fma for matmul": "place x in cache",
}


@pytest.mark.parametrize("line", REFUSED)
def test_transforms_are_refused_by_name(line: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_transform(line).apply(GRAPH, ZEN)
    assert str(caught.value).startswith(f"{line}: ")
    assert REFUSED[line].removeprefix(f"{line}: ") in str(caught.value)


def test_lines_are_not_asked_for_too_far_ahead() -> None:
    steps = SCHEDULE.transforms
    packed = next(at for at, step in enumerate(steps) if isinstance(step, Map) and step.tile == "w")
    program = apply_all(GRAPH, steps[: packed + 1], ZEN)
    Place("w", "l2", "prefetch 999999").apply(program, ZEN)
    with pytest.raises(ScheduleError, match="w goes to l2 by prefetch"):
        Place("w", "l2", "prefetch 9999999").apply(program, ZEN)


def test_registers_are_counted() -> None:
    wide = [
        str(step).replace("n by 16", "n by 128").replace("m by 16", "m by 16") for step in SCHEDULE.transforms
    ]
    with pytest.raises(ScheduleError, match="8192 bytes leave none of 2048 bytes of registers"):
        tile_program(INT4, ZEN, TransformList(tuple(map(parse_transform, wide))))


def test_features_are_asked_for() -> None:
    with pytest.raises(ScheduleError, match="cpu/avx2 lacks avx512bw, avx512f"):
        tile_program(INT4, get_device("cpu/avx2"), SCHEDULE)


def test_conversions_are_exact() -> None:
    """A float16 activation times int4 needs float32, an instruction on bfloat16 is refused."""
    half = replace(INT4, activation="float16")
    with pytest.raises(ScheduleError, match="bfloat16 does not hold every value of float16"):
        tile_program(half, ZEN, proposal(half, ZEN, "avx512_bf16", 2, 16))
    wide = replace(INT4, weight="int8", zero="none")
    tile_program(wide, ZEN, proposal(wide, ZEN, "avx512_bf16", 2, 16))
    steps = (*SCHEDULE.transforms[:4], parse_transform("convert x to bfloat16 by widening"))
    with pytest.raises(ScheduleError, match="bfloat16 does not hold every value of float16"):
        apply_all(block_graph(half), steps, ZEN)


def test_every_transform_has_a_line_of_its_own() -> None:
    assert {str(step).split()[0] for step in SCHEDULE.transforms} <= set(TRANSFORMS)
    assert {type(step) for step in SCHEDULE.transforms} == set(TRANSFORMS.values())
    for kind in TRANSFORMS.values():
        assert {"args", "rewrite", "checks"} <= {*map(str.strip, str(kind.__doc__).splitlines())}


FIELDS = "pipeline='mma', tile_m=16"


@pytest.mark.parametrize(
    "text",
    [
        *("slice m", "place", "slices n by 2 over loop", "GpuSchedule(", ""),
        f"GpuSchedule(5, {FIELDS})",
        f"GpuSchedule(x=1)({FIELDS})",
        f"GpuSchedule({FIELDS}, tile_m=16)",
        f"GpuSchedule({FIELDS}, warps=True)",
        f"GpuSchedule({FIELDS}, warps=4.0)",
        "GpuSchedule(1) + (2)",
        pytest.param(f"GpuSchedule({'-' * 100_000}1)", id="deep"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str) -> None:
    assert parse_schedule(f"GpuSchedule({FIELDS})") == GpuSchedule("mma", 16)
    with pytest.raises(ParseError):
        parse_schedule(text)


def test_plans_of_both_kinds_read_back() -> None:
    text = (
        "m<=4:\n  slice m by 2 over loop\n  use fma for matmul\nm<=8: GpuSchedule(pipeline='mma', tile_m=16)"
    )
    plan = parse_plan(text)
    assert parse_plan(str(plan)) == plan
    assert [limit for limit, _ in plan.entries] == [4, 8]
    assert plan.schedule_for(3) == parse_schedule("slice m by 2 over loop\nuse fma for matmul")
    endless = f"m<={'9' * 5000}: use fma for matmul"
    for wrong in ("", "nonsense", "slice m by 2 over loop\nm<=4: use fma for matmul", endless):
        with pytest.raises(ParseError):
            parse_plan(wrong)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tile program product", "product"),
        ("acc += x.cache · w.register by avx512_bf16", "acc += x.cache ·"),
        ("for m by 16 over loop:", "for m over loop:"),
        ("argument x[m, g, k]", "argument x"),
    ],
)
def test_damaged_programs_are_refused(old: str, new: str) -> None:
    assert parse_program(str(PROGRAM)) == PROGRAM
    with pytest.raises(ParseError):
        parse_program(str(PROGRAM).replace(old, new, 1))


WRONG = {
    "w.register is read before it is made": ("          w.register[", "          w.other["),
    "no instruction multiplies": (" by avx512_bf16", ""),
    "place total: it lies in dram": ("float32[16, 16] cache", "float32[16, 16] dram"),
    "acc is float32[1, 8, 16]": ("float32[1, 16, 16]", "float32[1, 8, 16]"),
    "no axis q": ("for m by 128 over loop", "for q by 128 over loop"),
    "no axis m over warps": ("for m by 128 over loop", "for m by 128 over warps"),
    "threads start threads": ("for k by 32 over loop", "for k by 32 over threads"),
    "place acc in register": ("register <- 0", "cache <- 0"),
    "acc is not filled": ("float32[1, 16, 16] register <- 0", "float32[1, 16, 16] register <- total"),
}


@pytest.mark.parametrize("complaint", WRONG)
def test_the_verifier_says_what_is_wrong(complaint: str) -> None:
    verify_program(PROGRAM)
    old, new = WRONG[complaint]
    assert old in str(PROGRAM)
    with pytest.raises(VerificationError) as caught:
        verify_program(parse_program(str(PROGRAM).replace(old, new, 1)))
    words = complaint.split(" is float32")
    assert all(word in str(caught.value) for word in words[:1])


def test_two_products_are_refused() -> None:
    twice = replace(PROGRAM, body=(*PROGRAM.body, *PROGRAM.body))
    with pytest.raises(VerificationError, match="2 products"):
        verify_program(twice)


def test_bytes_and_operations_are_counted() -> None:
    counts = count(PROGRAM, 16, 64, 256)
    weight, scales, x, y, row_scale = 128 * 256 // 2, 4 * 2 * 128, 2 * 16 * 256, 4 * 16 * 128, 4 * 128
    assert counts.dram == weight + scales + x + y + row_scale  # N is padded to 128
    assert counts.operations == 2 * 16 * 128 * 256
    assert counts.converted == {"lookup": 128 * 256}
    more = count(PROGRAM, 160, 64, 256)
    # Two turns of 128 rows: the weight is read twice, and decoded for 10 tiles.
    assert more.converted == {"lookup": 10 * 128 * 256}
    assert more.dram == 2 * (weight + scales) + 2 * row_scale + 10 * (x + y)
    assert count(PROGRAM, 1, 64, 256).operations == counts.operations  # a tile of 16 rows is multiplied whole


def test_loops_are_in_the_order_of_slices() -> None:
    _, loops = PROGRAM.product
    assert [(loop.axis, loop.step, loop.over) for loop in loops] == [
        (step.axis, step.step, step.over) for step in SCHEDULE.transforms if isinstance(step, Slice)
    ]
    assert isinstance(PROGRAM.body[0], Loop)
    assert PROGRAM.find(Fill)[0][1][-1].over != "threads"


def test_the_readme_shows_a_schedule_and_its_program() -> None:
    page = (Path(schedules.__path__[0]) / "README.md").read_text(encoding="utf-8")
    lines = page.split("```")[1].strip("\n").splitlines()
    column = lines[2].index("for m")
    steps = [line[:column].strip() for line in lines if line[:column].strip()]
    assert steps == str(SCHEDULE).splitlines()
    assert [line[column:] for line in lines if line[column:]] == body_of(PROGRAM)


def test_layouts_print() -> None:
    assert str(Map("x", Layout("words", (4,)))) == "map x to words(4)"


FORBIDDEN = ("ladder.ir.gemm", "ladder.ir.gemm_graph", "targets", "schedules.schedule", "schedules.policy")
EMITTERS = sorted(Path(ladder.lower.skeletons.__path__[0]).rglob("*.py"))


@pytest.mark.parametrize("path", EMITTERS, ids=lambda path: path.stem)
def test_emitters_read_nothing_but_tile_programs(path: Path) -> None:
    """They import neither a problem class, a schedule class nor a device, and name no device."""
    tree = ast.parse(path.read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    modules |= {alias.name for node in imports for alias in node.names}
    assert not [name for name in modules if name in FORBIDDEN or name.startswith("targets.")]
    names = {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert not names & {"Gemm", "TileDevice", "Schedule", "cpu_layout"}
