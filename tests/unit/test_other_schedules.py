"""A kernel that spills gives way to the next best schedule, whatever kind of kernel it is."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ladder import faults
from ladder.faults import LadderWarning
from ladder.ir import GraphBuilder
from ladder.ir.attention import Attention
from ladder.ir.scaled import ScaledGemm
from ladder.partition import partition
from ladder.runtime import build, scaled, tokens
from ladder.runtime.build import Job, Kernel, attempt
from ladder.runtime.model import build as models
from ladder.runtime.model.attention import attention_jobs
from ladder.runtime.model.chains import chain_job
from ladder.runtime.spills import least_spilling, refuse_spills, warn_of_spills
from schedules.attention import choose, next_best, predict
from schedules.scaled_choice import ranked
from schedules.spilling import TRIES
from targets import get_device
from tile_types.errors import CompilerError, ScheduleError

H200, GFX942, GFX1100 = (get_device(name) for name in ("cuda/sm_90a", "rocm/gfx942", "rocm/gfx1100"))

Verdict = Callable[[Mapping[str, Any]], int | Exception]


def kernel(entry: str, spilled: int) -> Kernel:
    """Return a kernel with such a report, in a file that is there."""
    return Kernel(
        Path(__file__), {"entry": entry, "resources": {entry: {"vgpr_spills": spilled}}}, False, dict
    )


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Verdict], list[Job]]]:
    """Have jobs compile to what a verdict on their facts says; returns the jobs that were compiled."""

    def start(verdict: Verdict) -> list[Job]:
        done: list[Job] = []

        def run(jobs: Sequence[Job]) -> list[Kernel | Exception]:
            done.extend(jobs)
            found = [verdict(job.facts) for job in jobs]
            return [
                each if isinstance(each, Exception) else kernel(f"k{len(done) - len(jobs) + at}", each)
                for at, each in enumerate(found)
            ]

        monkeypatch.setattr(build, "_attempt", run)
        return done

    monkeypatch.setattr(faults, "_warned", set())
    build.forget_kernels()
    yield start
    build.forget_kernels()


def job(name: str, others: Sequence[Job] = ()) -> Job:
    return Job(
        {"name": name},
        build.Identity.of(None, GFX942),
        GFX942,
        lambda _: pytest.fail("built"),
        lambda: others,
    )


def by_name(**found: int | Exception) -> Verdict:
    return lambda facts: found[facts["name"]]


def test_the_first_that_does_not_spill_takes_its_place(compiled: Any) -> None:
    done = compiled(by_name(a=8, b=ScheduleError("refused"), c=4, d=0, e=0))
    (found,) = attempt([job("a", [job(name) for name in "bcde"])])
    assert isinstance(found, Kernel)
    assert not found.spilled
    assert [each.facts["name"] for each in done] == list("abcd")
    assert attempt([job("a", [job("e")])]) == [found]  # it is known


def test_where_all_spill_the_least_is_taken(compiled: Any) -> None:
    compiled(by_name(a=8, b=4, c=6))
    (found,) = attempt([job("a", [job("b"), job("c")])])
    assert isinstance(found, Kernel)
    assert found.spilled == 4


def test_what_does_not_spill_is_compiled_alone(compiled: Any) -> None:
    done = compiled(by_name(a=0, b=0))
    attempt([job("a", [job("b")])])
    assert len(done) == 1


def test_a_fault_of_another_schedule_is_told(compiled: Any) -> None:
    compiled(by_name(a=8, b=CompilerError("broken"), c=0))
    with pytest.raises(CompilerError, match="broken"):  # LADDER_STRICT
        attempt([job("a", [job("b"), job("c")])])


def test_tries_are_limited() -> None:
    tried: list[int] = []

    def every() -> Iterator[Kernel]:
        for at in itertools.count():
            tried.append(at)
            yield kernel(f"k{at}", 100 - at)

    assert least_spilling(every(), lambda one: [one]).entry == f"k{TRIES - 1}"
    assert len(tried) == TRIES


def test_one_warning_for_what_is_taken_though_it_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_warned", set())
    with pytest.warns(LadderWarning, match=r"free of spills: k0 \(8 registers or bytes\)") as told:
        warn_of_spills([kernel("k0", 8), kernel("k1", 0), kernel("k0", 8)], H200)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert refuse_spills([kernel("k0", 8)], H200)
    with pytest.raises(ScheduleError, match="its kernels spill: k0"):
        refuse_spills([kernel("k0", 8)], GFX942)


def chain() -> Any:
    g = GraphBuilder("chain")
    x = g.input("x", "float16", (64, 512))
    return g.finish(g.add("relu", x))


def attention(keys: int | str = 64) -> Any:
    g = GraphBuilder("attention")
    q = g.input("q", "float16", (1, 32, 1, 64))
    k, v = (g.input(name, "float16", (1, 8, keys, 64)) for name in "kv")
    return g.finish(g.add("attention", q, k, v))


MANY = {
    "chain": lambda device: [chain_job(chain(), device)],
    "attention": lambda device: attention_jobs(attention(), device),
    "attention of open sizes": lambda device: attention_jobs(attention("n"), device),
}


@pytest.mark.parametrize("device", [H200, GFX942, GFX1100], ids=lambda device: device.name)
@pytest.mark.parametrize("kind", MANY)
def test_each_kind_has_other_schedules(kind: str, device: Any) -> None:
    for first in MANY[kind](device):
        others = [other.facts for other in first.others()]
        assert others
        assert first.facts not in others
        assert len({str(facts) for facts in others}) == len(others)
        assert all(facts.keys() == first.facts.keys() for facts in others)


def test_wide_heads_that_spill_take_blocks_of_fewer_rows() -> None:
    """On NVIDIA's GPUs even where torch's is predicted to be faster: what spills is slower than predicted."""
    form, sizes = Attention(32, 8, 256, "float16", "float16", scale=1.0), (1, 4, 8192)
    choice = choose(form, H200, sizes)
    others = next_best(form, H200, choice.schedule, sizes)
    assert choice.schedule.rows == 16
    assert any(other.rows == 8 for other in others)
    assert any(predict(form, H200, other, sizes) > choice.library for other in others)


def test_long_rows_are_quantized_by_fewer_registers(compiled: Any) -> None:
    done = compiled(lambda facts: 8 * (facts["quantize_tokens"]["chunks"] > 2))
    assert not tokens.gpu_kernel("float16", "int8", 0, 40000, GFX942).spilled
    assert [each.facts["quantize_tokens"]["chunks"] for each in done] == [8, 4, 2]


@pytest.mark.parametrize(("name", "target"), [("mxfp4", "rocm/gfx950"), ("nvfp4", "cuda/sm_100a")])
def test_scaled_products_take_the_next_schedule(compiled: Any, name: str, target: str) -> None:
    form, device = ScaledGemm(4096, 4096, name, name, "bfloat16", False), get_device(target)
    first, second, third = ranked(form, device, 16)[:3]
    compiled(lambda facts: 8 * (facts["schedule"] in (str(first), str(second))))
    assert scaled.served(form, device, 16)[0] == third


@pytest.mark.parametrize("spills", [1, 1000])
def test_parts_run_in_torch_only_where_all_schedules_spill(compiled: Any, spills: int) -> None:
    done = compiled(lambda facts: 8 * (len(done) <= spills))
    kernels, _, reasons = models.build_kernels(partition(chain(), device=GFX1100), {}, GFX1100)
    assert len(done) == min(spills + 1, TRIES, 1 + len(list(chain_job(chain(), GFX1100).others())))
    assert list(kernels) == ([0] if spills == 1 else [])
    assert bool(reasons) == (spills > 1)


def test_parts_on_nvidia_keep_what_spills_least_with_a_warning(compiled: Any) -> None:
    compiled(lambda facts: 8)
    with pytest.warns(LadderWarning, match="no schedule that was tried"):
        kernels, _, reasons = models.build_kernels(partition(chain(), device=H200), {}, H200)
    assert list(kernels) == [0]
    assert not reasons
