"""Kernels of block graphs on the simulator: right results, no races, in any order of warps."""

from __future__ import annotations

from dataclasses import replace

import block_graphs as graphs
import pytest
from block_graphs import BOUND, Case, require_quantized, run

from ladder.ir import GraphBuilder
from ladder.lower.blocks import BlockSchedule, warpgroups
from ladder.lower.blocks.kernel import emit
from ladder.simulate.machine import ORDERS
from targets import get_device
from tile_types import TType, group_scaled, register_type
from tile_types.errors import ScheduleError


def check(case: Case, schedule: BlockSchedule, dtype: str = "float16", **options: object) -> None:
    result, error = run(case, schedule, **options)
    assert not result.findings, result.report()
    assert not result.notes, result.notes
    assert error <= BOUND[dtype]


SHARED = [
    BlockSchedule(),
    BlockSchedule(groups=4, stages=3, release="end"),
    BlockSchedule(groups=3, stages=2, release="never"),  # eight steps: not evenly
    BlockSchedule(groups=2, stages=4, cluster=2),
]


@pytest.mark.parametrize("schedule", SHARED, ids=str)
@pytest.mark.parametrize("tokens", [2, 24])
def test_division_past_the_matmul(tokens: int, schedule: BlockSchedule) -> None:
    check(graphs.rmsnorm_matmul(tokens, 256, 96, 48, 32), schedule)


def test_bfloat16() -> None:
    case = graphs.rmsnorm_matmul(4, 128, 64, 32, 32, dtype="bfloat16")
    check(case, BlockSchedule(groups=2), "bfloat16")


def test_ampere() -> None:
    check(graphs.rmsnorm_matmul(4, 128, 64, 32, 32), BlockSchedule(groups=2), arch="sm_80")


def test_parallel_products() -> None:
    check(graphs.gated_mlp(64, 128, 64, 32, 32), BlockSchedule(2, 2, 3))


@pytest.mark.parametrize("order", ORDERS)
def test_parallel_products_in_any_order(order: str) -> None:
    check(graphs.gated_mlp(8, 256, 64, 32, 32), BlockSchedule(2, 1, 3, 2), order=order)


@pytest.mark.parametrize("kt", [0, 16, 32])
def test_low_rank_updates(kt: int) -> None:
    check(graphs.lora(16, 64, 64, 16, 32, kt), BlockSchedule(groups=2 if kt else 1))


@pytest.mark.parametrize("row_warps", [1, 2])
def test_computed_second_operand(row_warps: int) -> None:
    check(graphs.add_then_multiply(32, 64, 16, 32), BlockSchedule(1, row_warps))


ATTENTION = [
    BlockSchedule(1, 4),
    BlockSchedule(2, 2, 3),
    BlockSchedule(2, 1, 2, 2),
]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("schedule", ATTENTION, ids=str)
def test_attention(schedule: BlockSchedule, norm: bool) -> None:
    check(graphs.attention(1, 64, 32, 128, 64, 32, norm=norm), schedule)


@pytest.mark.parametrize("order", ORDERS)
def test_attention_in_any_order(order: str) -> None:
    check(graphs.attention(2, 32, 64, 128, 32, 32, 0.125), BlockSchedule(2, 2, 2, 2), order=order)


@pytest.mark.parametrize("schedule", ATTENTION, ids=str)
def test_keys_split_over_blocks(schedule: BlockSchedule) -> None:
    """FlashDecoding: maxima, sums and products of each part, combined by a second kernel."""
    results, error = graphs.run_kernels(graphs.split_attention(2, 64, 32, 256, 2, 64, 32), schedule)
    assert not [result.report() for result in results if result.findings]
    assert error <= BOUND["float16"]


@pytest.mark.parametrize("row_warps", [1, 4])
def test_rows_without_products(row_warps: int) -> None:
    check(graphs.norm_transition(3, 1024), BlockSchedule(1, row_warps))


@pytest.mark.parametrize("order", ORDERS)
def test_rows_in_any_order(order: str) -> None:
    check(graphs.norm_transition(2, 768), BlockSchedule(1, 3), order=order)


COLUMNS = [
    BlockSchedule(2, 2, 3, 1, 2),
    BlockSchedule(1, 1, 2, 2, 4),
]


@pytest.mark.parametrize("schedule", COLUMNS, ids=str)
def test_columns_split_over_warps(schedule: BlockSchedule) -> None:
    check(graphs.gated_mlp(32, 128, 64, 64, 32), schedule)
    check(graphs.rmsnorm_matmul(32, 128, 64, 64, 32), schedule)


TENSOR = [
    BlockSchedule(1, 1, 2, copies="tensor"),
    BlockSchedule(2, 2, 2, 2, copies="tensor"),
    BlockSchedule(3, 1, 2, 1, 2, copies="tensor"),
]


@pytest.mark.parametrize("schedule", TENSOR, ids=str)
@pytest.mark.parametrize("order", ORDERS[:3])
def test_tensor_copies(order: str, schedule: BlockSchedule) -> None:
    check(graphs.gated_mlp(32, 256, 64, 64, 64), schedule, order=order)


def test_tensor_copies_of_other_tiles() -> None:
    check(graphs.rmsnorm_matmul(2, 192, 96, 48, 48), BlockSchedule(2, 1, 2, copies="tensor"))
    check(graphs.rmsnorm_matmul(2, 256, 256, 128, 32), BlockSchedule(4, 1, 2, copies="tensor"))
    check(graphs.rmsnorm_matmul(2, 256, 64, 32, 64), BlockSchedule(2, 1, 2, copies="tensor"))
    check(graphs.attention(2, 64, 64, 256, 64, 64), BlockSchedule(1, 4, 2, 2, copies="tensor"))
    check(graphs.attention(2, 32, 64, 256, 32, 32), BlockSchedule(2, 2, 3, 2, copies="tensor"))


WARPGROUPS = [
    (1, BlockSchedule(1, 4, 2, 1, 2, copies="tensor", products="wgmma", release="asked")),
    (1, BlockSchedule(2, 4, 2, 2, copies="tensor", products="wgmma")),
    (2, BlockSchedule(1, 8, 3, 3, copies="tensor", products="wgmma", release="asked", lead=1)),
]


@pytest.mark.parametrize(("rows", "schedule"), WARPGROUPS, ids=str)
def test_products_of_warpgroups(rows: int, schedule: BlockSchedule) -> None:
    check(graphs.gated_mlp(64 * rows, 512, 128, 128, 64), schedule)


@pytest.mark.parametrize("columns", [64, 128])
def test_products_of_warpgroups_that_one_instruction_takes(columns: int) -> None:
    """Panels of two products with the same first operand, one after the other in shared memory."""
    for schedule in (
        BlockSchedule(1, 4, 3, copies="tensor", products="wgmma"),
        BlockSchedule(1, 4, 2, 2, copies="tensor", products="wgmma"),  # addresses of a cluster
    ):
        case = graphs.gated_mlp(64, 256, 128, columns, 64)
        check(case, schedule)
        text = str(emit(case.block, get_device("cuda/sm_90a"), schedule, "k"))
        assert f"m64n{2 * columns}k16" in text


def test_descriptors_hold_no_rank_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits that name the block would be taken for the distance from panel to panel, as on an H200."""
    case, plan = graphs.gated_mlp(64, 256, 128, 64, 64), BlockSchedule(1, 4, 2, 2, copies="tensor")
    plan = replace(plan, products="wgmma")
    assert not graphs.run(case, plan)[0].findings
    monkeypatch.setattr(warpgroups, "ADDRESSES", 0xFFFFFFFF)
    result, error = graphs.run(case, plan)
    assert result.findings or not error < BOUND["float16"]


def test_products_of_warpgroups_are_summed() -> None:
    """They run on behind what a step reads: another kind of accumulator would take what is not computed."""
    case = graphs.greatest_product(64, 256, 64, 64, 64)
    check(case, BlockSchedule(1, 4, 2, copies="tensor"))
    with pytest.raises(ScheduleError, match="for a sum"):
        graphs.run(case, BlockSchedule(1, 4, 2, copies="tensor", products="wgmma"))


def test_products_of_warpgroups_of_bfloat16() -> None:
    schedule = BlockSchedule(1, 4, 2, copies="tensor", products="wgmma")
    check(graphs.rmsnorm_matmul(64, 256, 64, 64, 128, dtype="bfloat16"), schedule, "bfloat16")


EARLY = [
    BlockSchedule(2, 1, 3, release="asked", lead=2),
    BlockSchedule(2, 1, 3, copies="tensor", release="asked"),
    BlockSchedule(2, 1, 9, copies="tensor"),
    BlockSchedule(2, 1, 3, copies="tensor", release="never"),
]


@pytest.mark.parametrize("schedule", EARLY, ids=str)
def test_constants_are_copied_early(schedule: BlockSchedule) -> None:
    check(graphs.rmsnorm_matmul(4, 512, 128, 64, 64), schedule, constants=("w_in",))


def test_constants_that_the_loop_shares_are_copied_early() -> None:
    check(graphs.lora(16, 64, 64, 16, 32), BlockSchedule(), constants=("w_in", "a_in", "c_in"))


@pytest.mark.parametrize("copies", ["tensor", "lanes"])
def test_packed_constants_are_copied_early(copies: str) -> None:
    case = graphs.gated_mlp(4, 1024, 64, 64, 128, group_scaled("int4", 128).name)
    schedule = BlockSchedule(2, 1, 2, copies=copies, release="asked")
    require_quantized(case, schedule, constants=("gate_in", "up_in"))


WAIT, COPY = 'griddepcontrol("wait"', "T.ptx.cp("


@pytest.mark.parametrize(("constants", "early"), [((), 0), (("w_in",), 2)])
def test_only_constants_are_copied_before_the_wait(constants: tuple[str, ...], early: int) -> None:
    """Two of three stages are filled before the loop, each by a copy of x and one of w."""
    case = graphs.rmsnorm_matmul(4, 512, 128, 64, 64)
    schedule = BlockSchedule(2, 1, 3, copies="tensor")
    function = emit(case.block, get_device("cuda/sm_90a"), schedule, "k", constants)
    before, _ = function.script().split(WAIT, 1)
    assert before.count(COPY) == early


WEIGHTS = [
    (group_scaled("int4", 128).name, 128),
    (group_scaled("nf4", 64).name, 64),
    (group_scaled("int3", 32).name, 128),
    ("mxfp4", 64),
    ("mxfp8_e4m3", 128),
    (group_scaled("uint4", 128, zero="integer").name, 64),
    (group_scaled("uint2", 32, zero="float").name, 128),
]
QUANTIZED = [
    BlockSchedule(2, 1, 2),
    BlockSchedule(1, 1, 2, 2, 2, copies="tensor"),
]


@pytest.mark.parametrize("schedule", QUANTIZED, ids=str)
@pytest.mark.parametrize(("weight", "kt"), WEIGHTS)
def test_quantized_weights(weight: str, kt: int, schedule: BlockSchedule) -> None:
    case = graphs.rmsnorm_matmul(4, 512, 128, 64, kt, weight)
    require_quantized(case, schedule)


def test_small_values_of_an_own_type() -> None:
    """They vanished in float16 beside scales that are small as well."""
    small = TType("small_of_blocks", 4, lambda code, ops: (ops.cast(code, "float32") - 8.0) * 2.0**-16)
    weight = group_scaled(register_type(small).name, 64).name
    require_quantized(graphs.rmsnorm_matmul(4, 256, 64, 64, 64, weight), QUANTIZED[0])


def test_several_quantized_weights() -> None:
    weight = group_scaled("int4", 128).name
    schedule = BlockSchedule(2, 1, 2, copies="tensor", release="never")
    for case in (
        graphs.gated_mlp(3, 512, 64, 64, 128, weight),
        graphs.lora(3, 512, 64, 16, 64, 128, weight),
    ):
        plan = replace(schedule, copies="lanes") if len(case.graph.inputs) == 4 else schedule
        require_quantized(case, plan)


REFUSED = {
    "3 groups share 2 steps": BlockSchedule(groups=3),
    "2 warps do not share 4 rows": BlockSchedule(row_warps=2),
    "bytes of shared memory": BlockSchedule(stages=200),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_say_what_is_wrong(message: str) -> None:
    case = graphs.rmsnorm_matmul(4, 96, 96, 48, 48)
    with pytest.raises(ScheduleError, match=message):
        emit(case.block, get_device("cuda/sm_90a"), REFUSED[message], "k")


def test_tensor_copies_have_limits() -> None:
    case = graphs.gated_mlp(8, 1024, 64, 64, 512)
    with pytest.raises(ScheduleError, match="tensor copies take up to 256 rows"):
        emit(case.block, get_device("cuda/sm_90a"), BlockSchedule(copies="tensor"), "k")


def test_ampere_has_no_tensor_copies() -> None:
    case = graphs.gated_mlp(32, 128, 64, 64, 64)
    with pytest.raises(ScheduleError, match="no tensor copies"):
        emit(case.block, get_device("cuda/sm_80"), BlockSchedule(copies="tensor"), "k")


def test_columns_of_attention_are_not_split() -> None:
    case = graphs.attention(1, 64, 32, 128, 64, 32)
    with pytest.raises(ScheduleError, match="column_warps=1"):
        emit(case.block, get_device("cuda/sm_90a"), BlockSchedule(column_warps=2), "k")


def test_operators_that_are_not_lowered_are_named() -> None:
    b = GraphBuilder("block", "block")
    tile = b.add("load", b.input("x", "float16", (32, 256)), shape=(32, 256))
    moved = b.add("transpose", tile, permutation=(1, 0))
    body = b.finish(b.add("store", moved, shape=(256, 32)))
    with pytest.raises(ScheduleError, match="transpose is not lowered"):
        emit(body, get_device("cuda/sm_90a"), BlockSchedule(), "k")
