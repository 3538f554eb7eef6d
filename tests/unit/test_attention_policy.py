"""Which schedule attention takes, and when it is left to torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ladder.ir.attention import Attention
from schedules.attention import AttentionSchedule, choose, predict, predict_library, schedules
from targets import get_device
from tile_types.errors import ScheduleError

DEVICE = get_device("cuda/sm_90a")
LLAMA = Attention(32, 8, 128, "float16", "float16", scale=128**-0.5)

MEASURED = {
    (1, 1024, 8, 8, 1): 4.5, (1, 2048, 8, 8, 1): 6.1, (1, 8192, 8, 8, 1): 14.5, (4, 1024, 8, 2, 1): 7.9,
    (8, 1024, 8, 2, 1): 10.5, (8, 4096, 8, 2, 1): 33.4, (32, 1024, 4, 1, 2): 32.7, (32, 8192, 8, 1, 1): 244.0,
}  # fmt: skip
"""Batch, keys, warps, cluster, fragments -> microseconds on an H200."""


@pytest.mark.parametrize("point", MEASURED)
def test_predictions_are_near_measurements(point: tuple[int, ...]) -> None:
    batch, keys, warps, cluster, fragments = point
    plan = AttentionSchedule(8, warps, cluster, fragments)
    seconds = predict(LLAMA, DEVICE, plan, (batch, 1, keys))
    assert seconds * 1e6 == pytest.approx(MEASURED[point], rel=0.15)


LIBRARY = {
    (128, 32, 8, 1, 1, 16384): 23.9, (64, 16, 16, 8, 1, 4096): 38.6, (256, 32, 8, 8, 1, 16384): 316.5,
    (64, 32, 8, 1, 4, 4096): 40.7, (128, 32, 8, 1, 16, 1024): 18.8, (128, 32, 8, 8, 64, 4096): 108.9,
    (128, 32, 8, 8, 256, 16384): 844.9, (160, 8, 1, 1, 4, 16384): 278.7, (192, 32, 8, 8, 16, 4096): 151.3,
    (256, 8, 1, 8, 2, 4096): 94.1, (96, 16, 16, 1, 16, 1024): 18.5,
}  # fmt: skip
"""Elements of a head, heads, those of keys, batch, tokens, keys -> microseconds of torch's on an H200."""


@pytest.mark.parametrize("point", LIBRARY)
def test_torchs_attention_walks_all_keys_by_each_block(point: tuple[int, ...]) -> None:
    """But of one token: others took up to 33 times what bandwidth and flops say."""
    size, heads, kv, *sizes = point
    form = Attention(heads, kv, size, "float16", "float16", scale=size**-0.5)
    assert predict_library(form, DEVICE, sizes) * 1e6 == pytest.approx(LIBRARY[point], rel=0.2)


SHORT = {
    (32, 12, "", 256, 49, 49): (26.7, 55.6), (8, 4, "", 3136, 16, 16): (16.0, 207.0),
    (64, 8, "", 512, 32, 32): (28.7, 72.3),
    (32, 3, "float16", 1024, 49, 49): (33.6, 162.4), (32, 6, "float16", 256, 49, 49): (17.0, 83.6),
    (32, 8, "float16", 4096, 10, 10): (42.6, 833.0), (64, 6, "float16", 16, 197, 197): (17.8, 25.8),
    (64, 12, "", 64, 128, 128): (40.4, 18.1), (64, 12, "float16", 64, 128, 128): (51.5, 31.7),
    (64, 16, "", 64, 196, 196): (122.5, 60.4), (32, 12, "bool", 64, 49, 49): (10.5, 53.3),
}  # fmt: skip
"""Elements of a head, heads, mask, batch, tokens, keys -> microseconds on an H200: of the fastest of
ours, and of torch's."""


@pytest.mark.parametrize("point", SHORT)
def test_short_sequences_are_taken_by_what_is_faster(point: tuple[Any, ...]) -> None:
    size, heads, mask, *sizes = point
    form = Attention(heads, heads, size, "float16", "float16", mask=mask, scale=size**-0.5)
    ours, torchs = SHORT[point]
    found = choose(form, DEVICE, sizes)
    assert found.is_torchs == (torchs < ours)
    assert found.seconds * 1e6 == pytest.approx(ours, rel=0.3)


WIDE = {(192, 16, 16, 16, 8192): 48.63, (256, 16, 16, 4, 8192): 43.7, (256, 16, 16, 16, 1024): 13.28}
"""Elements of a head, heads, those of keys, tokens, keys -> microseconds without spills on an H200."""


@pytest.mark.parametrize("point", WIDE)
def test_wide_heads_take_what_kernels_without_spills_take(point: tuple[int, ...]) -> None:
    size, heads, kv, tokens, keys = point
    form = Attention(heads, kv, size, "float16", "float16", scale=size**-0.5)
    assert choose(form, DEVICE, (1, tokens, keys)).seconds * 1e6 == pytest.approx(WIDE[point], rel=0.3)


def test_several_tokens_of_long_caches_are_ours() -> None:
    choice = choose(replace(LLAMA, size=64), DEVICE, (1, 16, 4096))
    assert choice.seconds < choice.library / 2


def test_few_heads_share_keys_among_blocks() -> None:
    assert choose(LLAMA, DEVICE, (1, 1, 1024)).schedule.cluster == 8
    assert choose(LLAMA, DEVICE, (32, 1, 1024)).schedule.cluster == 1


def test_caches_that_positions_fill_are_ours_also_where_they_are_long() -> None:
    """torch's attention reads all of them, ours what is filled: half in the mean."""
    for size in (64, 128):
        form = Attention(32, 8, size, "float16", "float16", position="int64", reach=1)
        choice, whole = (
            choose(form, DEVICE, (1, 1, 8192)),
            choose(replace(form, position=""), DEVICE, (1, 1, 8192)),
        )
        assert choice.schedule == whole.schedule
        assert choice.seconds < min(whole.seconds, choice.library)


def test_prefill_is_torchs() -> None:
    choice = choose(Attention(32, 8, 128, "float16", "float16", causal=True), DEVICE, (1, 4096, 4096))
    assert choice.seconds > choice.library
    assert "torch's" in choice.reason


def test_devices_without_clusters_use_none() -> None:
    plans = schedules(LLAMA, get_device("cuda/sm_80"), 1)
    assert plans
    assert {plan.cluster for plan in plans} == {1}


@pytest.mark.parametrize("wrong", [{"rows": 12}, {"warps": 17}, {"cluster": 3}, {"fragments": 3}])
def test_schedules_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ScheduleError):
        AttentionSchedule(**wrong)
