"""`ladder superopt`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from ladder.cli.app import FAILED, OK, USAGE, run

SMALL = ["superopt", "--program", "lora", "--operators", "4", "--jobs", "1", "--trials", "0"]


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


def test_quantized_weights_are_decoded_in_the_block(capsys):
    """Packed tiles are loaded, and decoded after; each tile holds whole groups."""
    arguments = ["superopt", "--program", "rmsnorm_matmul", "--weight", "int4", "--trials", "0", "--json"]
    assert run([*arguments, "--sizes", "K=1024,N=1024", "--seed", "1", "--jobs", "1"]) == OK
    report = json.loads(capsys.readouterr().out)
    assert report["weights"] == {"W": "int4_g128"}
    graph = report["graphs"][0]["graph"]
    assert "%W = input() : int4_g128[1024, 1024]" in graph
    assert 'convert(%w, type="float16")' in graph
    assert "transpose_b=true" in graph


def test_reuse(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("LADDER_CACHE_DIR", str(tmp_path))
    arguments = [*SMALL, "--json", "--seed", "1", "--reuse"]
    reports = []
    for _ in range(2):
        assert run(arguments) == OK
        reports.append(json.loads(capsys.readouterr().out))
    assert [report.pop("from_database") for report in reports] == [False, True]
    assert reports[0] == reports[1]  # seconds included: nothing was searched again
    (entry,) = (tmp_path / "superopt").iterdir()
    entry.write_text("{broken")
    assert run(arguments) == OK
    again = json.loads(capsys.readouterr().out)
    for report in (again, reports[0]):
        for row in report["graphs"]:
            row["certificate"].pop("seed")  # each proof draws its own
    assert again["graphs"] == reports[0]["graphs"]
    assert again["seconds"] != reports[0]["seconds"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--program", "lorra"], "did you mean 'lora'"),
        (["--program", "gqa", "--weight", "int4"], "no weights"),
        (["--sizes", "K"], "NAME=NUMBER"),
        (["--target", "cuda/sm_99"], "unknown device"),
        (["--program", "lora", "--sizes", "Z=4"], "dimension of lora"),
    ],
)
def test_refusals(capsys, options, message):
    assert run(["superopt", *options]) == USAGE
    assert message in capsys.readouterr().err


def built(capsys, tmp_path, monkeypatch, *options) -> tuple[int, dict, str]:
    """Search and build a small program; return the exit code, the report and what went to stderr."""
    monkeypatch.setenv("LADDER_CACHE_DIR", str(tmp_path))
    arguments = ["superopt", "--program", "gated_mlp", "--sizes", "B=8,K=128,N=64", "--operators", "6"]
    code = run([*arguments, "--jobs", "1", "--json", *options])
    output = capsys.readouterr()
    return code, json.loads(output.out), output.err


def test_kernels_of_this_cpu_run(capsys, tmp_path, monkeypatch):
    code, report, _ = built(capsys, tmp_path, monkeypatch, "--target", "cpu", "--trials", "2")
    assert code == OK
    assert len(report["kernels"]) == 2
    for kernel in report["kernels"]:
        assert kernel["checked"] == "run"
        assert kernel["measured"] > 0
        assert kernel["error"] <= 1e-3


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "gfx942"])
def test_kernels_of_another_gpu_are_simulated(capsys, tmp_path, monkeypatch, target):
    code, report, _ = built(capsys, tmp_path, monkeypatch, "--target", target)
    assert code == OK
    (kernel,) = report["kernels"]
    assert kernel["checked"].startswith("simulated at B=8, K=128, N=")
    assert kernel["findings"] == []
    assert kernel["error"] <= 1e-3
    assert kernel["resources"][0]["vgpr" if target == "gfx942" else "registers"] > 0


def test_nothing_found_is_a_failure(capsys):
    assert run(["superopt", "--program", "gated_mlp", "--operators", "1", "--jobs", "1"]) == FAILED
    assert "no verified graph" in capsys.readouterr().err


def test_the_package_is_light():
    """Neither torch, TVM nor z3 is loaded until used."""
    code = "import sys, ladder.superopt.generator; print(sorted({'torch', 'tvm', 'z3'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
