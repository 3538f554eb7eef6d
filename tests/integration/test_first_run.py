"""AMD kernels launched through a HIP runtime that checks every argument, by the commands that run them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hip_stub import Stub, installed
from typer.testing import CliRunner

import ladder
from ladder.cli import amd_gpu, first_graphs, first_kernels, first_run, problem
from ladder.cli.app import app
from ladder.runtime import build as building
from ladder.runtime import compile as compiling
from ladder.runtime import hip
from targets import get_device
from tile_types.errors import ArtifactError, DeviceError, MissingToolError

TARGET = "rocm/gfx942"

SMALL = {
    "OUTPUTS": 64, "INPUTS": 128, "TOKENS": 16, "IMAGE": (1, 4, 5),
    "SIZES": {"rows": 8, "depth": 256, "width": 128},
}  # fmt: skip
"""Sizes of experts, convolutions and block graphs that are emulated."""


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    """A machine with one MI300X; the process keeps its runtime."""
    real = compiling.load_entry

    def load_entry(kernel: Any, family: str) -> Any:
        stub.assemblies.append(kernel.sources()["asm"])
        return real(kernel, family)

    with (
        installed("gfx942", tmp_path_factory.mktemp("hip")) as stub,
        pytest.MonkeyPatch.context() as patch,
    ):
        for module in (building, compiling, first_kernels):
            patch.setattr(module, "load_entry", load_entry)
        for module in (problem, first_run):
            patch.setattr(module, "rocm_architectures", lambda: ["gfx942"])
        patch.setattr(amd_gpu, "ROUNDS", 1)
        patch.setattr(amd_gpu, "copies_for", lambda *_: 1)
        yield stub


@pytest.fixture
def clean(gpu: Stub) -> Iterator[Stub]:
    """Nothing was refused or found before; nothing is left in GPU memory after."""
    for notes in (gpu.refusals, gpu.findings, gpu.launches):
        notes.clear()
    yield gpu
    assert not gpu.memory
    assert not gpu.events


def test_first_run_writes_what_every_kernel_gave(
    clean: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_run, "WEIGHTS", {"float16": ("int4",), "fp8_e4m3": ("fp8_e4m3",)})
    monkeypatch.setattr(first_run, "ROWS", (2,))
    for name, value in (("ROWS", 3), ("KEYS", 33), ("COLUMNS", 256)):
        monkeypatch.setattr(first_kernels, name, value)
    for name, value in SMALL.items():
        monkeypatch.setattr(first_graphs, name, value)
    asked = first_kernels.ATTENTION.items()
    few = {kind: (replace(form, heads=2, kv_heads=1), min(tokens, 5)) for kind, (form, tokens) in asked}
    monkeypatch.setattr(first_kernels, "ATTENTION", few)
    monkeypatch.setattr(first_kernels, "copies_for", lambda *_: 1)
    monkeypatch.setattr(first_run, "machine", lambda _: {"gpu": hip.runtime().device_name()})
    path = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["first-run", str(path), "--n", "40", "--k", "64"])
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    assert found["machine"]["gpu"] == "gfx942"
    names = [row["problem"] for row in found["results"]]
    assert names[:2] == ["int4 x float16, M=2", "fp8_e4m3 x fp8_e4m3, M=2"]
    assert {name.partition(",")[0].partition(" to ")[0] for name in names[2:]} == {
        "attention",
        "block graph",
        "chain",
        "convolution",
        "experts",
        "rows",
    }
    for row in found["results"]:
        assert row["passed"], row
        assert row["time_us"] == 250.0
        assert row["spills"] == 0
    assert not clean.refusals
    assert not clean.findings
    assert len(clean.launches) == 3 * len(names)


def test_first_run_takes_gpus_only(tmp_path: Path) -> None:
    with pytest.raises(ladder.UnknownNameError, match="is no GPU"):
        first_run.run_first(tmp_path / "report.json", "cpu")


def test_gemm_runs_on_the_gpu(clean: Stub) -> None:
    words = ["gemm", "--target", TARGET, "--weight", "nf4", "-m", "5", "-n", "40", "-k", "96"]
    done = CliRunner().invoke(app, [*words, "--group-size", "32", "--bias", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["not_run"] is None
    assert report["relative_error"] <= report["tolerance"]
    assert clean.launches
    assert not clean.refusals


def test_a_refusal_is_raised_in_the_runtimes_words(clean: Stub) -> None:
    op = ladder.Matmul(40, 64, "int4", group_size=32, target=TARGET)
    kernel = op.lower().kernel(3)
    entry = compiling.load_entry(kernel, "rocm")
    packed = op.pack(ladder.quantize(torch.randn(40, 64), "int4", group_size=32))
    x, y = np.ones((3, 64), np.float16), np.zeros((3, 40), np.float16)
    tensors = [x, *(tensor.numpy() for tensor in packed.tensors), y]
    with hip.on_device(hip.runtime(), tensors) as (arrays, given):
        entry(*given)
    assert len(arrays) == len(given)
    with pytest.raises(DeviceError, match=r"hipModuleLaunchKernel failed: invalid argument \(1\)"):
        entry(*given)
    assert clean.refusals == ["hipModuleLaunchKernel: argument 0 is no address of an allocation"]


def test_what_is_no_module_is_refused() -> None:
    for data, why in (
        (b"\x05\0\0\0\0\0\0\0hsaco\x01", "ends early"),
        (b"\x03\0\0\0\0\0\0\0ptx", "no code object"),
    ):
        with pytest.raises(ArtifactError, match=why):
            hip.parse_module(data)


def test_without_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hip, "LIBRARIES", ("libno_such_hip.so",))
    with pytest.raises(MissingToolError, match="HIP runtime"):
        hip.Hip()


def test_what_has_no_kernel_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block graph that the device cannot have ends no run: the rest is tried, too."""
    monkeypatch.setattr(first_graphs, "SIZES", {"rows": 3, "depth": 100, "width": 31})
    case = next(case for case in first_graphs.graph_cases(get_device(TARGET)) if "block" in case.name)
    row = first_kernels.run_case(case, get_device(TARGET))
    assert not row["passed"]
    assert "no kernel" in row["error"] or "divide" in row["error"]
