"""The peer benchmark without a GPU: selection, merging, verdicts and the report on made-up results."""

from __future__ import annotations

import json
import re
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness import copies_for, interleaved_us
from benchmarks.peers import bars, run
from benchmarks.peers.__main__ import narrow, parser, selection
from benchmarks.peers.cases import CASES, HELD_OUT_CASES, SHAPES, Bar, Case, everyone
from benchmarks.peers.engine import ENGINES, Engine, Operand, Work, engine
from benchmarks.peers.ladder_engine import STEPS, request
from benchmarks.peers.records import Results, merge, read
from benchmarks.peers.vllm_engine import packed
from benchmarks.report.page import page
from benchmarks.report.svg import Axis, Series, chart
from tile_types import library

RUN = {
    "date": "2026-01-02",
    "device": "Imaginary GPU",
    "versions": {"torch": "2.11"},
    "command": "python -m benchmarks.peers",
    "read_bytes_per_second": 4e12,
    "copy_bytes_per_second": 4e12,
    "float16_operations_per_second": 8e14,
    "fp8_e4m3_operations_per_second": 16e14,
    "int8_operations_per_second": 16e14,
}
PEER_FACTOR = {"ladder": 1.0, "humming": 1.5, "cublas": 2.0}


def made_up_row(case: Any, one: Any, shape: tuple[int, int], m: int, run: str) -> dict[str, Any]:
    """A contender that needs the time of its bytes, peers a factor more; host costs beside."""
    weight_bytes = shape[0] * shape[1] // 2
    work = {name: getattr(one.work, name) for name in ("weight", "activation", "group_size", "dynamic")}
    row = {"run": run, "case": case.name, "n": shape[0], "k": shape[1], "m": m, "label": one.name}
    row |= {"engine": one.engine, **work, "step": one.work.step, "output": "float16"}
    if one.engine == "gemlite":
        return row | {"reason": "not installed: gemlite"}
    time = (weight_bytes / 4e12 + 2 * m * shape[0] * shape[1] / 8e14) * 1e6
    row |= {"weight_bytes": weight_bytes, "time_us": time * PEER_FACTOR.get(one.engine, 3.0)}
    row |= {"relative_error": 1e-4, "bound": 5e-4, "ok": True}
    return row | {"direct_us": 5.0, "operator_us": 20.0, "kernel_us": 4.0}


def made_up(run: str = "r1", **narrowing: Any) -> Results:
    options = parser().parse_args([f"--{name}={value}" for name, value in narrowing.items()])
    rows = [
        made_up_row(case, one, shape, m, run)
        for case in selection(options).cases
        for shape in case.shapes
        for m in case.tokens
        for one in case.contenders
    ]
    return Results({run: dict(RUN)}, rows)


@pytest.fixture(autouse=True)
def own_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the types that a test registers."""
    monkeypatch.setattr(library, "_TYPES", dict(library._TYPES))


# ---- the table of cases ---------------------------------------------------------------
def test_every_contender_has_an_adapter() -> None:
    assert {one.engine for case in CASES.values() for one in case.contenders} == set(ENGINES)


def test_labels_are_unique_within_a_case() -> None:
    for case in CASES.values():
        names = [one.name for one in case.contenders]
        assert len(names) == len(set(names)), case.name


def test_bars_name_contenders_and_points_that_exist() -> None:
    for case in CASES.values():
        names = {one.name for one in case.contenders}
        for bar in case.bars:
            assert {bar.subject, *bar.against} <= names
            assert set(bar.tokens) <= set(case.tokens)
            assert set(bar.shapes) <= set(case.shapes)
            assert bar.measure in bars.MEASURES


@pytest.mark.parametrize("name", sorted(CASES))
def test_ladder_has_a_schedule_for_everything(name: str) -> None:
    case = CASES[name]
    for one in case.contenders:
        if one.engine == "ladder":
            for shape in case.shapes:
                assert request(one.work, *shape, case.tokens).plan is not None


def test_no_tuning_row_names_what_is_held_out() -> None:
    tuned = {
        (row[0], row[1])
        for file in files("schedules").joinpath("tuned").iterdir()
        if file.name.endswith(".json")
        for one in json.loads(file.read_text()).get("classes", ())
        for row in one["rows"]
    }
    held_out = selection(parser().parse_args(["--held-out"]))
    assert tuned >= set(SHAPES)
    assert {case.name for case in held_out.cases} == {case.name for case in HELD_OUT_CASES}
    assert tuned.isdisjoint(held_out.shapes())


def test_int4_words_hold_eight_codes_each() -> None:
    codes = torch.arange(16, dtype=torch.uint8).reshape(1, 16)
    assert [int(word) & 0xFFFFFFFF for word in packed(codes)[0]] == [0x76543210, 0xFEDCBA98]


def test_plans_hold_only_what_is_measured() -> None:
    work = Work("int4", "float16", 128)
    assert len(request(work, 4096, 4096, (1,)).plan.entries) == 1
    assert all(step in {one.work.step for one in CASES["breakdown"].contenders} for step in STEPS)


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_drawn_weight_can_be_quantized_for_every_contender(name: str) -> None:
    weight = torch.randn(16, 256).to(torch.float16)
    for one in CASES[name].contenders:
        assert one.work.quantized(weight).shape == (16, 256)


def test_kernels_are_built_once_and_waited_for_where_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    monkeypatch.setattr(run, "ProcessPoolExecutor", lambda jobs, mp_context: Inline())
    monkeypatch.setattr(run, "peer_tasks", lambda chosen: [])
    monkeypatch.setattr(run, "build", built.append)
    options = parser().parse_args(["--cases=int4,sweep", "--shapes=8192x8192,14336x4096", "-m=1,64"])
    warming = run.Warming(selection(options), 2)
    assert len(built) == len(set(built)) == len(warming.kernels)
    assert set(warming.needed) == {(c, s) for c in ("int4", "sweep") for s in ((8192, 8192), (14336, 4096))}
    assert all(len(futures) == 2 for futures in warming.needed.values())


def test_absent_peers_say_so() -> None:
    one = engine("humming")
    assert one.absence() in ("", "not installed: humming-kernels")


# ---- selection ------------------------------------------------------------------------
def test_options_narrow_the_table() -> None:
    options = parser().parse_args(["--cases=int4,int8", "--shapes=4096x4096", "-m=1,4096", "--peers=cublas"])
    int4, int8 = selection(options).cases
    assert (int4.shapes, int4.tokens) == (((4096, 4096),), (1, 4096))
    assert [one.engine for one in int4.contenders] == ["ladder", "cublas"]
    assert [one.engine for one in int8.contenders] == ["ladder"]


def test_the_host_is_timed_last_when_nothing_else_runs() -> None:
    cases = [case.name for _, case in selection(parser().parse_args([])).pairs()]
    assert cases.count("host") == 1
    assert cases[-1] == "host"


def test_unknown_cases_are_refused() -> None:
    with pytest.raises(SystemExit, match="int5"):
        selection(parser().parse_args(["--cases=int5"]))


def test_demands_join_the_tokens_of_all_cases() -> None:
    options = parser().parse_args(["--cases=int4,sweep", "--shapes=8192x8192", "-m=1,2,4096"])
    demands = selection(options).demands()
    assert demands["ladder", Work("int4", "float16", 128), (8192, 8192)] == (1, 2, 4096)
    assert demands["tinygemm", Work("int4", "bfloat16", 128), (8192, 8192)] == (1,)


def test_narrowing_keeps_everything_by_default() -> None:
    case = CASES["int4"]
    assert narrow(case, (), (), set(ENGINES)) == case
    assert case.shapes == SHAPES


# ---- results --------------------------------------------------------------------------
def test_results_survive_a_file(tmp_path: Path) -> None:
    results = made_up(cases="int4")
    results.write(tmp_path / "a.json")
    assert read(tmp_path / "a.json").text() == results.text()


def test_merging_takes_whole_points_from_the_last_run() -> None:
    first, second = made_up("r1", cases="int4"), made_up("r2", cases="int4", shapes="4096x4096")
    merged = merge([first, second])
    assert len(merged.rows) == len(first.rows)
    assert {row["run"] for row in merged.rows if row["n"] == row["k"] == 4096} == {"r2"}
    assert {row["run"] for row in merged.rows if row["n"] == 28672} == {"r1"}


def test_runs_without_rows_are_forgotten() -> None:
    first, second = made_up("r1", cases="int8"), made_up("r2", cases="int8")
    assert list(merge([first, second]).runs) == ["r2"]


# ---- measuring, with an engine of the test and no GPU ---------------------------------
class Exact(Operand):
    """A dense matrix in float64; ``off`` spoils its products."""

    nbytes = 10**8

    def __init__(self, weight: torch.Tensor, off: float) -> None:
        self.weight, self.off = weight.double(), off

    def dense(self) -> torch.Tensor:
        return self.weight

    def __call__(self, *given: Any) -> torch.Tensor:
        return given[0].double() @ self.weight.t() + self.off


class Stub(Engine):
    """Multiplies exactly, refuses M = 2 and breaks at K = 3."""

    off = 0.0

    def refusal(self, work: Work, n: int, k: int, m: int) -> str:
        return "not at M = 2" if m == 2 else ""

    def prepare(self, work: Work, weight: Any, tokens: tuple[int, ...]) -> Operand:
        if weight.shape[1] == 3:
            raise RuntimeError("K is 3")
        return Exact(weight, self.off)


class Wrong(Stub):
    off = 1.0


class Inline(Executor):
    """Runs in this process, which a `BrokenProcessPool` stands for losing."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        run.PREPARED.clear()
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BrokenProcessPool as error:
            future.set_exception(error)
        return future


class Warmed(run.Warming):
    """Has nothing to do."""

    def __init__(self) -> None:
        self.needed = {}


class Replayed:
    """Stands for a CUDA graph; the subject's takes 1 µs per call, the others' 2 and more."""

    made = 0

    def __init__(self, calls: list[Any]) -> None:
        for call in calls:
            call()
        self.calls, self.us = len(calls), float(1 + Replayed.made)
        Replayed.made += 1

    def replay_us(self) -> float:
        return self.us


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Engine]:
    """Replace engines and everything that needs a GPU."""
    made: dict[str, Engine] = {"ladder": Stub(), "humming": Stub(), "cublas": Wrong()}
    monkeypatch.setattr(run, "engine", made.__getitem__)
    monkeypatch.setattr(run, "draw_weight", lambda shape: torch.randn(*shape))
    monkeypatch.setattr(run, "draw_activations", lambda m, k, dtype: torch.randn(m, k))
    monkeypatch.setattr(run, "capture_long", Replayed)
    monkeypatch.setattr(run, "make_pool", Inline)
    monkeypatch.setattr(run, "get_ready", lambda: 0)
    monkeypatch.setattr(run.os, "kill", lambda number, kind: None)
    monkeypatch.setattr(run, "poison", lambda count, dtype: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(Replayed, "made", 0)
    return made


def measured_rows(shapes: tuple[tuple[int, int], ...], tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    case = Case("int4", "", everyone(Work("int4"), "humming", "cublas"), tokens, shapes)
    chosen = run.Selection((case,), 3)
    return [row for rows in run.measure(chosen, "r1", run.Bench(), Warmed()) for row in rows]


@pytest.mark.usefixtures("stubs")
def test_measured_rows_hold_times_ratios_and_errors() -> None:
    ladder, humming, cublas = measured_rows(((4, 8),), (1,))
    assert (ladder["time_us"], ladder["ratio"], ladder["ok"], ladder["run"]) == (1.0, 1.0, True, "r1")
    assert (humming["time_us"], humming["ratio"], humming["copies"]) == (2.0, 2.0, 3)
    assert humming["output"] == "float64"
    assert not cublas["ok"]
    assert "reason" not in ladder


@pytest.mark.usefixtures("stubs")
def test_refusals_and_failures_are_rows_with_a_reason() -> None:
    rows = measured_rows(((4, 8), (4, 3)), (1, 2))
    assert len(rows) == 2 * 2 * 3
    reasons = {(row["k"], row["m"]): row.get("reason") for row in rows if row["engine"] == "humming"}
    assert reasons == {
        (8, 1): None,
        (8, 2): "not at M = 2",
        (3, 1): "RuntimeError: K is 3",
        (3, 2): "not at M = 2",
    }


@pytest.mark.usefixtures("stubs")
def test_missing_libraries_are_rows_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stub, "absence", lambda self: "not installed: stub")
    assert {row["reason"] for row in measured_rows(((4, 8),), (1,))} == {"not installed: stub"}


@pytest.mark.parametrize("error", [torch.AcceleratorError("an illegal access"), BrokenProcessPool("it died")])
def test_a_lost_device_costs_the_rest_of_its_case(
    error: Exception, stubs: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def replay(graphs: Any, rounds: int) -> Any:
        if Replayed.made > 3:
            raise error
        return interleaved_us(graphs, rounds)

    monkeypatch.setattr(run, "interleaved_us", replay)
    rows = measured_rows(((4, 8),), (1, 3))
    assert [row.get("time_us") for row in rows if row["m"] == 3] == [None] * 3
    assert all("the device was lost" in row["reason"] for row in rows if row["m"] == 3)
    assert len(rows) == 6


def test_contenders_take_turns() -> None:
    order: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def replay_us(self) -> float:
            order.append(self.name)
            return 1.0

    samples = interleaved_us({name: Noted(name) for name in "abc"}, 2)
    assert {name: len(times) for name, times in samples.items()} == {"a": 2, "b": 2, "c": 2}
    assert "".join(order) == "abcbcacababc"


def test_copies_exceed_the_cache() -> None:
    assert copies_for(10**9) == 2
    assert copies_for(10**7) == 24


# ---- verdicts -------------------------------------------------------------------------
def verdict(results: Results, measure: str, m: int, shape: tuple[int, int] = (4096, 4096)) -> bars.Verdict:
    point = {v.bar.measure: v for v in bars.judge(results) if v.point[1:] == (*shape, m)}
    return point[measure]


def test_ratio_is_to_the_fastest_peer() -> None:
    found = verdict(made_up(cases="int4", tokens="16"), "ratio", 16)
    assert found.value == pytest.approx(1.5)
    assert found.peer == "humming"
    assert found.holds


def test_bandwidth_counts_activations_and_result() -> None:
    results = made_up(cases="int4", tokens="1")
    moved = 8192 * 28672 // 2 + 2 * (8192 + 28672)
    row = next(r for r in results.rows if r["n"] == 28672 and r["engine"] == "ladder")
    expected = moved / (row["time_us"] * 1e-6) / 4e12
    assert verdict(results, "bandwidth", 1, (28672, 8192)).value == pytest.approx(expected)


def test_neighbours_compare_with_every_larger_m() -> None:
    results = made_up(cases="sweep", peers="cublas")
    for row in results.rows:
        if row["m"] == 64 and row["engine"] == "ladder":
            row["time_us"] *= 50
    assert not verdict(results, "neighbours", 64, (8192, 8192)).holds
    assert verdict(results, "neighbours", 96, (8192, 8192)).holds


def test_dequantise_adds_both_passes_to_cublas() -> None:
    results = made_up(cases="sweep", tokens="1")
    point = results.points()["sweep", 8192, 8192, 1]
    passes = (8192 * 8192 // 2 + 2 * 8192 * 8192) / 4e12 * 1e6
    expected = (point["cublas"]["time_us"] + passes) / point["ladder"]["time_us"]
    assert verdict(results, "dequantise", 1, (8192, 8192)).value == pytest.approx(expected)


def test_missing_peers_miss_the_bar() -> None:
    found = verdict(made_up(cases="int8", peers="ladder"), "ratio", 4096)
    assert found.value is None
    assert not found.holds


def test_bars_print() -> None:
    text = bars.describe(Bar("ratio", 1.25, (1,), least_bytes=50_000_000, against=("humming",)))
    assert text == "≥ 1.25× humming; M = 1; weights ≥ 50 MB"


# ---- report ---------------------------------------------------------------------------
class Balance(HTMLParser):
    """Collects what is opened and never closed, and everything that refers to another file."""

    VOID = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href")]
        self.outside += [tag] if tag in ("script", "link", "img") else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report_is_whole_self_contained_and_repeatable() -> None:
    results = made_up()
    text = page(results)
    balance = Balance()
    balance.feed(text)
    assert balance.open == []
    assert balance.outside == []
    assert page(results) == text
    assert text.count("<svg") >= 1 + 2 + 5 + 2
    for case in CASES.values():
        if case.method == "times":
            assert case.title in text


def test_report_shows_mean_ratios() -> None:
    assert "geometric mean over the shapes: M = 16: 1.50×" in page(made_up(cases="int4", tokens="16"))


def test_report_says_what_was_not_measured() -> None:
    text = page(made_up(cases="int4", tokens="16"))
    assert "not measured" in text
    assert "not installed: gemlite" in text


def test_report_shows_missed_bars() -> None:
    results = made_up(cases="host")
    assert re.search(r"missed \(0/1\)", page(results))  # 20 µs through the operator


def test_axes_place_ends_on_the_frame() -> None:
    axis = Axis(1.0, 100.0, 10.0, 30.0)
    assert [axis.place(v) for v in (1.0, 10.0, 100.0)] == pytest.approx([10.0, 20.0, 30.0])
    assert axis.ticks() == [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]
    assert Axis(0.0, 10.0, 0.0, 1.0, log=False).ticks() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_empty_charts_say_so() -> None:
    assert "Nothing was measured" in chart([Series("a", [], 0)], "x", "y")
