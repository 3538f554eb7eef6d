"""Attention kernels on the simulator: right against float64, in bounds, without races."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import draw, require_right, run

from ladder.ir.attention import Attention
from schedules.attention import AttentionSchedule
from tile_types.errors import ScheduleError


def form(
    heads: int, kv: int, size: int, ttype: str = "float16", stored: str = "", **rest: object
) -> Attention:
    return Attention(heads, kv, size, ttype, stored or ttype, scale=size**-0.5, **rest)  # type: ignore[arg-type]


Plan = AttentionSchedule

CASES = {
    "cluster": (form(8, 2, 128), Plan(8, 4, 2), (2, 1, 129)),
    "wide cluster, two fragments": (form(8, 2, 128), Plan(8, 4, 8, 2), (1, 1, 300)),
    "more tokens than rows": (form(4, 4, 64, mask="bool"), Plan(8, 2, 1, 2), (2, 9, 45)),
    "sixteen rows, bfloat16": (form(8, 2, 64, "bfloat16"), Plan(16, 2, 4), (2, 3, 77)),
    "heads of 80, added mask": (form(4, 4, 80, mask="float16"), Plan(8, 2, 2), (2, 5, 45)),
    "heads of 16, causal": (form(4, 4, 16, mask="float32", causal=True), Plan(8, 2), (1, 9, 9)),
    "heads of 256": (form(2, 1, 256), Plan(8, 2), (1, 1, 33)),
    "heads of 8, causal": (form(4, 2, 8, causal=True), Plan(8, 2, 2), (1, 9, 9)),
    "heads of 24, positions": (form(4, 4, 24, position="int32"), Plan(8, 2, 2, 2), (2, 1, 70)),
    "heads of 40, sixteen rows": (form(4, 4, 40, "bfloat16"), Plan(16, 2), (2, 11, 45)),
    "heads of 72, mask": (form(4, 4, 72, mask="bool"), Plan(8, 2, 2), (2, 5, 45)),
    "heads of 88": (form(8, 2, 88), Plan(8, 4, 2), (2, 1, 129)),
    "heads of 248": (form(2, 1, 248), Plan(8, 2), (1, 1, 33)),
    "positions": (form(8, 2, 128, position="int64", reach=1), Plan(8, 4, 2), (2, 1, 200)),
    "positions per token": (form(8, 4, 128, position="int32"), Plan(16, 2, 2), (2, 7, 200)),
    "int8": (form(8, 2, 128, stored="int8"), Plan(8, 2, 2), (1, 1, 77)),
    "int8, bfloat16, mask": (form(8, 2, 64, "bfloat16", "int8", mask="bool"), Plan(8, 2), (1, 2, 40)),
    "e4m3": (form(8, 2, 64, stored="fp8_e4m3"), Plan(8, 2, 2, 2), (1, 1, 77)),
    "e4m3, bfloat16": (form(8, 2, 128, "bfloat16", "fp8_e4m3"), Plan(8, 2, 2), (1, 1, 77)),
    "e5m2": (form(8, 2, 128, stored="fp8_e5m2"), Plan(8, 2), (1, 1, 77)),
    "e4m3, heads of 16": (form(4, 4, 16, "bfloat16", "fp8_e4m3"), Plan(8, 2), (1, 2, 45)),
    "e5m2, heads of 48": (form(4, 2, 48, stored="fp8_e5m2"), Plan(8, 2, 2, 2), (2, 1, 77)),
    "int8, heads of 80, positions": (
        form(8, 2, 80, stored="int8", position="int64"), Plan(8, 2, 2), (1, 1, 77)
    ),
    "int8, heads of 112, mask": (form(4, 2, 112, stored="int8", mask="bool"), Plan(16, 2), (1, 7, 45)),
    "e4m3, heads of 240": (form(2, 1, 240, stored="fp8_e4m3"), Plan(8, 2), (1, 1, 33)),
    "one key": (form(8, 2, 64), Plan(8, 2, 2), (1, 1, 1)),
    "no keys": (form(8, 2, 64), Plan(8, 2, 2), (1, 1, 0)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_simulated(case: str) -> None:
    problem, plan, sizes = CASES[case]
    require_right(problem, plan, *sizes)


@pytest.mark.parametrize("order", ["random", "first warps first", "last warps first"])
def test_any_order_of_warps(order: str) -> None:
    require_right(form(8, 2, 64), Plan(8, 4, 4), 1, 1, 100, order=order)


def test_heads_behind_tokens() -> None:
    require_right(form(8, 2, 64), Plan(8, 2, 2), 2, 3, 50, token_major=True)


@pytest.mark.parametrize("mask", ["", "float16", "bool"])
@pytest.mark.parametrize(("plan", "sizes"), [(Plan(16, 1), (2, 49, 49)), (Plan(8, 1, 1, 2), (3, 4, 37))])
def test_one_warp_takes_the_keys_of_windows(mask: str, plan: Plan, sizes: tuple[int, ...]) -> None:
    require_right(form(2, 2, 32, mask=mask), plan, *sizes)


def test_nothing_is_read_beyond_the_position() -> None:
    """What lies behind in the cache may be anything, and costs no traffic."""
    problem = form(8, 2, 64, position="int64", reach=1)
    given = draw(problem, 1, 1, 400)
    given["position"][:] = 37
    for name in "kv":
        given[name][:, :, 38:] = np.nan
    result = require_right(problem, Plan(8, 2, 2), 1, 1, 400, given=given)
    reads = [size for name, size in result.traffic.items() if name.startswith("global read")]
    assert sum(reads) < 2 * 2 * 64 * 2 * 64 * 2


@pytest.mark.parametrize(("mask", "hides"), [("bool", 0), ("float16", -np.inf)])
@pytest.mark.parametrize("strict", [False, True])
def test_rows_that_see_nothing(mask: str, hides: float, strict: bool) -> None:
    """They are 0, as torch's operator has them, or NaN, as softmax has."""
    problem = form(4, 4, 64, mask=mask, strict=strict)
    given = draw(problem, 1, 2, 40)
    given["mask"][:, :, 1] = hides
    require_right(problem, Plan(8, 2, 2), 1, 2, 40, given=given)


@pytest.mark.parametrize(
    ("problem", "match"),
    [
        (form(2, 2, 20), "20"),
        (form(2, 2, 24, stored="int8"), "24"),
    ],
)
def test_heads_that_do_not_divide_are_refused(problem: Attention, match: str) -> None:
    with pytest.raises(ScheduleError, match=match):
        run(problem, Plan(), 1, 1, 16)
