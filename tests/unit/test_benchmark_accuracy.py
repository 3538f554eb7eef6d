"""The benchmark of accuracy against speed: its text, its figures, and all of it on a tiny model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ladder
from benchmarks import accuracy
from tile_types.errors import UnknownNameError


def test_docstrings_of_every_kind_are_read(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(
        '"""Module."""\nclass A:\n    """Class."""\n    async def f(self):\n        """Method."""\nx = "no"\n'
    )
    assert [text for text in accuracy.docstrings(path) if text] == ["Module.", "Class.", "Method."]
    path.write_text("def broken(:")
    assert list(accuracy.docstrings(path)) == []


def test_characters_that_are_unknown_share_a_code() -> None:
    assert accuracy.codes("\n a~é\x00").tolist() == [0, 1, 66, 95, accuracy.OTHER, accuracy.OTHER]


def test_figures_of_known_distributions() -> None:
    exact = torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]]).log()
    found = torch.tensor([[[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]]).log()
    windows = torch.tensor([[2, 0, 1]])
    same = accuracy.accuracy(exact, exact, windows)
    assert same == pytest.approx({"perplexity": (0.5 * 0.8) ** -0.5, "kl": 0, "same_choice": 1}, rel=1e-6)
    other = accuracy.accuracy(found, exact, windows)
    kl = (0.5 * math.log(2) - 0.25 * math.log(2)) / 2
    assert other == pytest.approx(
        {"perplexity": (0.25 * 0.8) ** -0.5, "kl": kl, "same_choice": 0.5}, rel=1e-6
    )


def test_every_type_can_be_asked_for() -> None:
    """Its weights of both signs are quantized as the benchmark says."""
    names = accuracy.weight_types()
    assert {"int4", "int1", "nf4", "ternary", "nvfp4", "fp8_e5m2", "uint3"} <= set(names)
    for name in names:
        weight = torch.randn(4, 128)
        error = (ladder.quantize(weight, name, **accuracy.options(name, 128)).dequantize() - weight).norm()
        assert error < weight.norm()


@pytest.mark.costly
def test_a_tiny_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = replace(accuracy.SIZES["tiny"], steps=8, modules=3, shape=(64, 128))
    monkeypatch.setitem(accuracy.SIZES, "tiny", tiny)
    files = {"--output": tmp_path / "found.json", "--plot": tmp_path / "found.svg"}
    named = [word for option, path in files.items() for word in (option, str(path))]
    accuracy.main(["--size", "tiny", "--device", "cpu", "--types", "int8", "int2", *named])
    whole, eight, two = json.loads(files["--output"].read_text())["rows"]
    assert (whole["kl"], whole["same_choice"]) == (0, 1)
    assert eight["kl"] < two["kl"]
    assert 2 < two["bits"] < 4 < eight["bits"] < 10
    assert max(eight["error"], two["error"]) < 1e-5
    for row in (whole, eight, two):
        assert 1 < row["perplexity"] < 2 * len(accuracy.LETTERS)
        assert row["us"] > 0
    said, drawn = capsys.readouterr().out, files["--plot"].read_text()
    assert said.index("| int8 |") < said.index("| int2 |")
    assert drawn.count("<circle") == 2 + len(accuracy.FAMILIES)
    assert ">int2<" in drawn


def test_an_unknown_type_is_named_before_anything_is_trained() -> None:
    with pytest.raises(UnknownNameError, match="int44"):
        accuracy.main(["--size", "tiny", "--device", "cpu", "--types", "int44"])
