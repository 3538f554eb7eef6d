"""Attention on AMD GPUs: right on the simulator and as machine code, no spills, planted bugs found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from attention_cases import BOUNDS, draw, require_right, run, simulate
from rewriting import Once, intrinsic, is_store, remove, rewrite, rewrite_expression
from tvm import tirx

from ladder.ir.attention import Attention
from ladder.lower.rocm.attention import emit
from ladder.lower.rocm.toolchain import resources_of
from schedules.attention import choose, has_kernels
from schedules.wave_attention import WaveAttentionSchedule, is_legal, loads_narrowly, schedules
from targets import get_device
from tile_types.errors import ScheduleError

INSTINCT, RADEON = ("gfx90a", "gfx942", "gfx950"), ("gfx1100", "gfx1201")
ARCHITECTURES = (*INSTINCT, *RADEON)
Plan = WaveAttentionSchedule


def form(
    heads: int, kv: int, size: int, ttype: str = "float16", stored: str = "", **rest: object
) -> Attention:
    return Attention(heads, kv, size, ttype, stored or ttype, scale=size**-0.5, **rest)  # type: ignore[arg-type]


CASES = {
    "four waves share keys": (form(4, 4, 64), Plan(1, 1, 4, 2), (2, 1, 129)),
    "groups of four": (form(8, 2, 128), Plan(1, 1, 4, 2), (1, 1, 300)),
    "four fragments": (form(8, 2, 64), Plan(1, 1, 2, 4), (1, 1, 170)),
    "many tokens, mask": (form(4, 4, 64, mask="bool"), Plan(1, 2, 1, 2), (2, 37, 45)),
    "many tokens, causal": (form(4, 2, 128, causal=True), Plan(2, 2, 1, 2), (1, 67, 67)),
    "bfloat16": (form(8, 2, 64, "bfloat16"), Plan(2, 1, 2, 2), (2, 5, 77)),
    "bfloat16, many tokens, causal": (form(2, 2, 64, "bfloat16", causal=True), Plan(1, 4, 1, 2), (1, 70, 70)),
    "heads of 80, added mask": (form(4, 4, 80, mask="float16"), Plan(1, 1, 2, 1), (2, 5, 45)),
    "heads of 80, bfloat16 mask": (form(4, 4, 80, "bfloat16", mask="bfloat16"), Plan(1, 1, 1, 1), (2, 5, 45)),
    "heads of 96": (form(4, 4, 96), Plan(1, 1, 1, 1), (2, 5, 45)),
    "heads of 16, causal": (form(4, 4, 16, mask="float32", causal=True), Plan(1, 1, 2, 2), (1, 9, 9)),
    "heads of 256": (form(2, 1, 256), Plan(1, 1, 2, 1), (1, 1, 33)),
    "heads of 8, causal": (form(4, 2, 8, causal=True), Plan(1, 1, 2, 2), (1, 9, 9)),
    "heads of 24, positions": (form(4, 4, 24, position="int32"), Plan(1, 1, 2, 2), (2, 1, 70)),
    "heads of 40, many tokens": (form(4, 4, 40, "bfloat16"), Plan(1, 2, 1, 1), (1, 37, 45)),
    "heads of 72, mask": (form(4, 4, 72, mask="bool"), Plan(1, 1, 2, 1), (2, 5, 45)),
    "heads of 88": (form(8, 2, 88), Plan(1, 1, 4, 1), (2, 1, 129)),
    "positions": (form(8, 2, 128, position="int64", reach=1), Plan(1, 1, 4, 2), (2, 1, 200)),
    "positions per token": (form(8, 4, 128, position="int32"), Plan(2, 1, 2, 1), (2, 7, 200)),
    "int8": (form(8, 2, 128, stored="int8"), Plan(1, 1, 2, 2), (1, 1, 77)),
    "int8, bfloat16, mask": (form(8, 2, 64, "bfloat16", "int8", mask="bool"), Plan(1, 2, 2, 1), (1, 2, 40)),
    "int8, heads of 80": (form(8, 2, 80, stored="int8"), Plan(1, 1, 1, 1), (1, 2, 40)),
    "int8, heads of 16": (form(8, 2, 16, stored="int8"), Plan(1, 1, 1, 1), (1, 2, 40)),
    "e4m3": (form(8, 2, 64, stored="fp8_e4m3"), Plan(1, 1, 2, 2), (1, 1, 77)),
    "e4m3, bfloat16": (form(8, 2, 128, "bfloat16", "fp8_e4m3"), Plan(1, 1, 2, 1), (1, 1, 77)),
    "e5m2": (form(8, 2, 128, stored="fp8_e5m2"), Plan(1, 1, 2, 1), (1, 1, 77)),
    "one key": (form(8, 2, 64), Plan(1, 1, 2, 2), (1, 1, 1)),
    "no keys": (form(8, 2, 64), Plan(1, 1, 2, 2), (1, 1, 0)),
}  # fmt: skip


def fitted(problem: Attention, plan: Plan, arch: str) -> Plan:
    """Return the plan, of fewer keys and rows of a wave at a time where the GPU has fewer registers."""
    ways = [plan, replace(plan, fragments=1), replace(plan, fragments=1, parts=1)]
    return next(way for way in ways if is_legal(problem, get_device(f"rocm/{arch}"), way))


def check(case: str, arch: str, **options: Any) -> None:
    problem, plan, sizes = CASES[case]
    if arch in RADEON and problem.size > 128:
        pytest.skip("its sums alone take half the registers: refused by name")
    plan = fitted(problem, plan, arch)
    require_right(problem, plan, *sizes, target=f"rocm/{arch}", **options)


@pytest.mark.parametrize("case", CASES)
def test_simulated(case: str) -> None:
    for arch in ARCHITECTURES:
        check(case, arch)


@pytest.mark.parametrize(("case", "arch"), list(product(CASES, ARCHITECTURES)))
def test_after_tvms_passes(case: str, arch: str) -> None:
    check(case, arch, stage="passed")


@pytest.mark.parametrize(("case", "arch"), list(product(CASES, ARCHITECTURES)))
def test_machine_code(case: str, arch: str) -> None:
    check(case, arch, stage="code")


@pytest.mark.parametrize("order", ["random", "first warps first", "last warps first"])
def test_any_order_of_waves(order: str) -> None:
    check("groups of four", "gfx942", order=order)


def test_heads_behind_tokens() -> None:
    check("bfloat16", "gfx90a", token_major=True)


def test_nothing_is_read_beyond_the_position() -> None:
    """What lies behind in the cache may be anything, and costs no traffic."""
    problem = form(8, 2, 64, position="int64", reach=1)
    given = draw(problem, 1, 1, 400)
    given["position"][:] = 37
    for name in "kv":
        given[name][:, :, 38:] = np.nan
    result = require_right(problem, Plan(1, 1, 2, 1), 1, 1, 400, given=given, target="rocm/gfx942")
    reads = [size for name, size in result.traffic.items() if name.startswith("global read")]
    assert sum(reads) < 400 * 2 * 2 * 64 * 2  # of which 38 keys are needed, rounded up to turns


@pytest.mark.parametrize("strict", [False, True])
def test_rows_that_see_nothing(strict: bool) -> None:
    problem = form(4, 4, 64, mask="bool", strict=strict)
    given = draw(problem, 1, 2, 40)
    given["mask"][:, :, 1] = 0
    for plan in (Plan(1, 1, 2, 1), Plan(1, 2, 1, 1)):
        require_right(problem, plan, 1, 2, 40, given=given, target="rocm/gfx942")


@pytest.mark.parametrize("ttype", BOUNDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("plan", [Plan(1, 1, 2, 2), Plan(1, 2, 1, 1)], ids=str)
def test_what_is_not_finite_stays_in_its_rows(ttype: str, bad: float, plan: Plan) -> None:
    """NaN and infinity of a query give NaN, in no other row; a value's reaches all rows of its head."""
    problem = form(2, 2, 32, ttype)
    given = draw(problem, 1, 3, 40)
    given["q"][0, 0, 1, 5], given["v"][0, 1, 7, 3] = bad, bad
    result, got = simulate(problem, plan, 1, 3, 40, given, target="rocm/gfx942")
    assert not result.findings, result.report()
    assert np.isnan(got[0, 0, 1]).all()
    assert np.isfinite(got[0, 0, [0, 2]]).all()
    assert not np.isfinite(got[0, 1, :, 3]).any()
    assert np.isfinite(np.delete(got[0, 1], 3, axis=-1)).all()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_many_small_weights_count(arch: str) -> None:
    """One key far above 2000 others: their weights are subnormal float16, their sum is not small."""
    problem = Attention(1, 1, 16, "float16", "float16", scale=1.0)
    given = draw(problem, 1, 1, 2000)
    given["q"][:], given["k"][:], given["v"][:] = 0, 0, 1
    given["q"][..., 0], given["k"][0, 0, 0, 0], given["v"][0, 0, 0] = 1, 11, -1
    require_right(problem, Plan(1, 1, 2, 2), 1, 1, 2000, given=given, target=f"rocm/{arch}")


@pytest.mark.costly(turns=61)
@pytest.mark.parametrize(
    ("arch", "size", "stored", "ttype", "tokens"),
    [
        case
        for case in product(ARCHITECTURES, (64, 128, 256), ("", "int8"), BOUNDS, (1, 512))
        if case[1] <= 128 or case[0] in INSTINCT
    ],
)
def test_considered_schedules_do_not_spill(
    arch: str, size: int, stored: str, ttype: str, tokens: int
) -> None:
    device, problem = get_device(f"rocm/{arch}"), form(32, 8, size, ttype, stored, causal=True, mask="bool")
    for plan in schedules(problem, device, tokens):
        (found,) = resources_of({"k": emit(problem, device, plan, "k")}, device).values()
        spilled = found["vgpr_spills"] + found["sgpr_spills"] + found["scratch_bytes"]
        assert not spilled, f"{problem} {plan}"


@pytest.mark.parametrize(("size", "narrow"), [(80, False), (152, True), (160, True)])
def test_where_registers_are_few_loads_stay_narrow(size: int, narrow: bool) -> None:
    """Wide loads hold several registers at once: heads of 152 and 160 spilled by them."""
    device, problem = get_device("rocm/gfx1201"), form(32, 8, size, mask="bool")
    for plan in schedules(problem, device, 1)[::2]:
        assert loads_narrowly(problem, device, plan) == narrow
        (found,) = resources_of({"k": emit(problem, device, plan, "k")}, device).values()
        assert found["vgpr_spills"] + found["sgpr_spills"] + found["scratch_bytes"] == 0


@pytest.mark.parametrize("stored", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("mask", ["bool", "float32"])
def test_masks_of_one_head_do_not_spill(mask: str, stored: str) -> None:
    """There LLVM moves loads of the mask and decoding across steps, until no register is left."""
    device, problem = get_device("rocm/gfx1201"), form(1, 1, 128, "bfloat16", stored, mask=mask)
    (found,) = resources_of({"k": emit(problem, device, Plan(1, 2, 2, 1), "k")}, device).values()
    assert found["vgpr_spills"] + found["sgpr_spills"] + found["scratch_bytes"] == 0


@pytest.mark.parametrize(
    ("problem", "plan", "target", "match"),
    [
        (form(2, 2, 20), Plan(), "rocm/gfx942", "20"),
        (form(2, 2, 24, stored="int8"), Plan(), "rocm/gfx942", "24"),
        (form(2, 2, 512), Plan(), "rocm/gfx942", "512"),
        (form(2, 2, 256), Plan(), "rocm/gfx942", "LDS"),
        (form(2, 2, 64), Plan(1, 1, 8, 1), "rocm/gfx942", "8"),
        (form(2, 2, 256), Plan(1, 1, 1, 1), "rocm/gfx1100", "registers"),
        (form(2, 2, 256), Plan(1, 1, 1, 1), "rocm/gfx1201", "registers"),
    ],
)
def test_refused_by_name(problem: Attention, plan: Plan, target: str, match: str) -> None:
    assert not is_legal(problem, get_device(target), plan)
    with pytest.raises(ScheduleError, match=match):
        run(problem, plan, 1, 1, 16, target=target)


@pytest.mark.parametrize(
    "wrong",
    [{"parts": 3}, {"fragments": 3}, {"key_waves": 0}, {"row_waves": 0}],
)
def test_schedules_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ScheduleError):
        Plan(**wrong)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_eight_bit_caches_are_ours(arch: str) -> None:
    """They need not be decoded before; what reads as many bytes as torch is left to torch."""
    device = get_device(f"rocm/{arch}")
    assert has_kernels(device)
    codes = choose(form(32, 8, 128, stored="int8"), device, (8, 1, 4096))
    assert codes.seconds < 0.6 * codes.library
    plain = choose(form(32, 8, 128, causal=True), device, (1, 4096, 4096))
    assert plain.seconds > plain.library


# ---- planted bugs ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Mutant:
    """A bug: what changes, and the kind of finding that must name it."""

    change: Callable[[], Any]
    kind: str
    case: str = "groups of four"
    arch: str = "gfx942"


def _operands(name: str, change: Callable[[list[Any]], list[Any]], which: int = 0) -> Once:
    """Return a change of the operands of an intrinsic whose result is bound to a name."""

    def changed(s: Any) -> Any:
        return tirx.Bind(s.var, rewrite_expression(s.value, intrinsic(name, change)))

    return Once(lambda s: type(s).__name__ == "Bind" and name in str(s.value), changed, which)


def _swapped(operands: list[Any]) -> list[Any]:
    name, a, b, *rest = operands
    return [name, b, a, *rest]


def _moved(scope: str, dtype: str, by: int, which: int = 0) -> Once:
    """Return a change of where a store goes."""

    def change(s: Any) -> Any:
        *outer, last = s.indices
        base = (
            tirx.Ramp(last.base + by, last.stride, last.lanes) if type(last).__name__ == "Ramp" else last + by
        )
        return tirx.BufferStore(s.buffer, s.value, [*outer, base])

    return Once(lambda s: is_store(s, scope, dtype), change, which)


MFMA = "amdgcn.mfma"
MUTANTS = {
    "sums joined without a barrier": Mutant(lambda: remove("tirx.tvm_storage_sync", 0), "race"),
    "keys and queries swapped": Mutant(
        lambda: _operands(MFMA, _swapped), "wrong values", "many tokens, mask"
    ),
    "bytes of the other value": Mutant(lambda: _operands("amdgcn.perm", _swapped), "wrong values"),
    "scores of another lane": Mutant(
        lambda: _operands("ds.bpermute", lambda o: [o[0], o[1] + 4, o[2]]), "wrong values"
    ),
    "halves exchanged in another order": Mutant(
        lambda: _operands("permlanex16", lambda o: [*o[:3], o[4], o[3], *o[5:]]),
        "wrong values",
        arch="gfx1100",
    ),
    "sums left by four words": Mutant(lambda: _moved("shared", "uint32", 4, 1), "wrong values"),
    "sums left by one word": Mutant(lambda: _moved("shared", "uint32", 1, 1), "misaligned"),
    "results stored a row too far": Mutant(lambda: _moved("global", "float16", 128), "out of bounds"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str) -> None:
    mutant = MUTANTS[name]
    problem, plan, sizes = CASES[mutant.case]
    plan = fitted(problem, plan, mutant.arch)

    def change(function: Any) -> Any:
        changed = rewrite(function, mutant.change())
        assert changed.script() != function.script(), "the mutation changed nothing"
        return changed

    result, error = run(problem, plan, *sizes, target=f"rocm/{mutant.arch}", change=change)
    if mutant.kind == "wrong values":
        assert not error <= 2 * BOUNDS[problem.ttype]
    else:
        assert mutant.kind in result.kinds(), result.report()
