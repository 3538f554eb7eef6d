"""`ladder superopt`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ladder.cli.app import FAILED, OK, USAGE, run

SMALL = ["superopt", "--program", "lora", "--operators", "4", "--jobs", "1"]


def test_json(capsys):
    assert run([*SMALL, "--json", "--seed", "1"]) == OK
    report = json.loads(capsys.readouterr().out)
    assert report["verified"] == len(report["graphs"]) > 0
    assert 0 < report["delta"] <= 2**-64
    for name in ("states", "pruned", "rejected", "seconds", "candidates"):
        assert report[name] >= 0
    assert report["complete"] is True
    assert all(graph["certificate"]["verdict"] == "equal" for graph in report["graphs"])


def test_table_and_page(capsys, tmp_path):
    page = tmp_path / "page.html"
    assert run([*SMALL, "--show", str(page), "--sizes", "K=512,N=1024"]) == OK
    assert "concat_matmul" in capsys.readouterr().out
    assert "<svg" in page.read_text()


def test_ablation(capsys):
    arguments = [
        "superopt",
        "--program",
        "gated_mlp",
        "--operators",
        "4",
        "--jobs",
        "1",
        "--ablation",
        "--json",
    ]
    assert run(arguments) == OK
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["factor"] >= 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--program", "lorra"], "did you mean 'lora'"),
        (["--weight", "int4"], "float16 weights so far"),
        (["--sizes", "K"], "NAME=NUMBER"),
        (["--target", "cuda/sm_99"], "unknown device"),
        (["--program", "lora", "--sizes", "Z=4"], "dimension of lora"),
    ],
)
def test_refusals(capsys, options, message):
    assert run(["superopt", *options]) == USAGE
    assert message in capsys.readouterr().err


def test_a_device_without_shared_memory_fails(capsys):
    assert run(["superopt", "--target", "cpu/avx2"]) == FAILED
    assert "shared memory" in capsys.readouterr().err


def test_nothing_found_is_a_failure(capsys):
    assert run(["superopt", "--program", "gated_mlp", "--operators", "2", "--jobs", "1"]) == FAILED
    assert "no verified graph" in capsys.readouterr().err


def test_the_package_is_light():
    """Neither torch, TVM nor z3 is loaded until used."""
    code = "import sys, ladder.superopt.generator; print(sorted({'torch', 'tvm', 'z3'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
