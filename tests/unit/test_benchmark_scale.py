"""The arithmetic of scale: by hand, at its limits, and against the records that it is checked with."""

from __future__ import annotations

import math
import sys

import pytest

from benchmarks.scale import page
from benchmarks.scale.machines import MACHINES
from benchmarks.scale.shapes import SHAPES, Attention, Shape
from benchmarks.scale.step import (
    EXCHANGE,
    HOP,
    LAUNCH,
    SUSTAINED,
    Cut,
    Load,
    all_reduce,
    best,
    exchange,
    experts_met,
    layer,
    prefill_idle,
    spread_of,
    step,
    stored,
)

H200 = MACHINES["H200"]
SMALL = Shape("small", 2, 64, 100, Attention(4, 2, 16), 128, bits=4)
ROUTED = Shape("routed", 3, 64, 100, Attention(4, 2, 16), 128, 8, 2, 32, 1, 1, bits=4)


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert SHAPES[name].parameters == pytest.approx(SHAPES[name].published, rel=0.015)


def test_weights_of_small_shapes() -> None:
    attention = 64 * 64 * 2 + 64 * 32 * 2
    assert SMALL.attention.weights(64) == attention
    assert SMALL.parameters == 2 * (attention + 3 * 64 * 128) + 2 * 100 * 64
    expert = 3 * 64 * 32
    routed = 2 * (9 * expert + 64 * 8) + 3 * 64 * 128
    assert ROUTED.parameters == pytest.approx(3 * attention + routed + 2 * 100 * 64)


def test_latent_attention_keeps_one_vector() -> None:
    attention = SHAPES["deepseek-v3"].attention
    assert attention.kept == 576
    assert [attention.copies(n) for n in (1, 4, 8)] == [1, 4, 8]
    assert [Attention(64, 4, 128).copies(n) for n in (1, 4, 8)] == [1, 1, 2]
    by_hand = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert attention.weights(7168) == by_hand


def test_windows_bound_every_second_layer() -> None:
    attention = SHAPES["gpt-oss-120b"].attention
    assert [attention.seen(n) for n in (0, 100, 128, 1128)] == [0, 100, 128, 628]


def test_a_layer_by_hand() -> None:
    terms = layer(SMALL, H200, Cut(2), Load(6, 10))
    dense = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128
    assert terms.weights == pytest.approx(dense / 2 / 2 / 4.25e12)
    assert terms.cache == pytest.approx(6 * 10 * 2 * 2 * 16 * 2 / 2 / 4.25e12)
    assert terms.products == pytest.approx((2 * 6 * dense + 6 * 2 * 4 * 2 * 16 * 10) / 2 / H200.rate)
    assert terms.launches == 9.5 * LAUNCH
    assert terms.sums == 2 * all_reduce(6 * 64 * 2, 2, H200)
    assert terms.exchanges == terms.sends == 0
    assert terms.total == pytest.approx(sum(vars(terms).values()))


def test_experts_that_tokens_meet() -> None:
    assert experts_met(SMALL, 5) == 0
    assert [experts_met(ROUTED, n) for n in (0, 1)] == [0, 2]
    assert experts_met(ROUTED, 2) == pytest.approx(8 * (1 - 0.75**2))
    assert experts_met(ROUTED, 10_000) == pytest.approx(8)


def test_experts_lie_again_where_gpus_outnumber_them() -> None:
    assert [spread_of(ROUTED, Cut(1, 1, n)) for n in (1, 8, 64)] == [1, 8, 8]
    assert spread_of(SMALL, Cut(2, 1, 4)) == 1
    eight, more = (stored(ROUTED, Cut(1, 1, n), Load(n, 1))[0] for n in (8, 64))
    assert eight == more
    terms = [layer(ROUTED, H200, Cut(1, 1, n), Load(4 * n, 10)) for n in (8, 64)]
    assert vars(terms[0]) == pytest.approx(vars(terms[1]))


def test_collectives_by_hand() -> None:
    assert all_reduce(1e6, 1, H200) == exchange(1e6, 1, H200) == 0
    assert all_reduce(0, 2, H200) == 10.9e-6
    rest = 14 / 8 * 1e6 / (450e9 * SUSTAINED)
    assert all_reduce(1e6, 8, H200) == pytest.approx(10.9e-6 + 12 * HOP + rest)
    assert exchange(1e6, 8, H200) == pytest.approx(EXCHANGE + 7 / 8 * 1e6 / 450e9 / SUSTAINED)
    assert exchange(1e6, 32, H200) == pytest.approx(EXCHANGE + 24 / 32 * 1e6 / 50e9 / SUSTAINED)


def test_a_pipeline_buys_memory_and_no_time() -> None:
    shape, load = SHAPES["llama-3.1-70b"], Load(16, 1024)
    one, four = (step(shape, H200, Cut(1, p), load) for p in (1, 4))
    assert four.weights < 0.3 * one.weights
    assert four.idle == 0
    # Each part of the sequences reads all weights; caches are read once in all.
    assert four.terms.weights == pytest.approx(one.terms.weights)
    assert four.terms.cache == pytest.approx(one.terms.cache / 4)
    assert four.terms.sends > one.terms.sends == 0
    assert step(shape, H200, Cut(1, 4), Load(1, 1024)).idle == 0.75


def test_bubbles_of_prompts() -> None:
    assert [prefill_idle(p, n) for p, n in ((1, 5), (4, 1), (4, 9))] == [0, 0.75, 0.25]


def test_rates_count_every_gpu() -> None:
    made = step(SHAPES["llama-3.1-8b"], H200, Cut(1, 1, 8), Load(64, 1024))
    alone = step(SHAPES["llama-3.1-8b"], H200, Cut(), Load(8, 1024))
    assert made.rate == pytest.approx(alone.rate)
    assert alone.rate == pytest.approx(8 / alone.terms.total)


@pytest.mark.parametrize("cut", [Cut(16), Cut(3), Cut(1, 100), Cut(0), Cut(1, 1, -1)])
def test_cuts_that_no_machine_has_are_refused(cut: Cut) -> None:
    with pytest.raises(ValueError, match=r"cut|stages|GPU"):
        step(SHAPES["llama-3.1-70b"], H200, cut, Load(8, 100))


def test_what_does_not_fit_is_said() -> None:
    kimi = SHAPES["kimi-k2"]
    assert best(kimi, MACHINES["H100"], 4, Load(8, 100), 1) is None
    found = best(kimi, H200, 8, Load(8, 100), 1)
    assert found is not None
    assert found[1].fits
    assert found[0].gpus == 8
    quickest = best(SHAPES["llama-3.1-70b"], H200, 8, Load(8, 1024), 1e-9)
    assert quickest is not None
    assert quickest[0].tensor == 8


def test_it_agrees_with_the_records() -> None:
    """Within 9 % of ours of one and two GPUs, within 8 % of DeepEP's exchanges."""
    for what, ours, theirs in page.measured():
        assert ours == pytest.approx(theirs, rel=0.09), what
    for what, ours, theirs in page.exchanged():
        assert ours == pytest.approx(theirs, rel=0.08), what
    assert all(math.isfinite(value) for _, *values in page.measured() for value in values)


def test_the_page_is_what_the_code_says() -> None:
    text = page.PAGE.read_text()
    assert page.with_tables(text) == text, "run `python -m benchmarks.scale --page`"
    with pytest.raises(ValueError, match="has 0 tables 'parameters'"):
        page.with_tables("")


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.scale.__main__ import main

    def said(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["scale", *words])
        main()
        return capsys.readouterr().out

    assert "fits; stages idle 0%" in said("--model", "deepseek-v3", "--gpus", "64")
    assert "2 x 2 x 2" in said("--cut", "2", "2", "2")
    for words in (("--gpus", "0"), ("--gpus", "12"), ("--context", "0"), ("--cut", "9", "1", "1")):
        with pytest.raises(SystemExit, match=r"power of two|cut"):
            said(*words)
    with pytest.raises(SystemExit, match="does not fit"):
        said("--model", "kimi-k2", "--machine", "H100")
