"""The command line: what it prints where, and with which exit code it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ladder.api.matmul import Matmul
from ladder.cli import console, doctor, problem
from ladder.cli.app import FAILED, OK, USAGE, command_names, run
from ladder.cli.problem import Problem
from ladder.lower.rocm.toolchain import linker as rocm_linker
from targets import VisibleGpu, get_device, visible_gpus

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["-n", "192", "-k", "160", "--group-size", "32"]
GPU = ["--target", "cuda/sm_80", "-n", "64", "-k", "64"]

needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not on PATH; see `ladder doctor`")
needs_no_gpu = pytest.mark.skipif(
    bool(visible_gpus()), reason="a GPU is visible, so kernels for it would run"
)

Command = Callable[..., "Outcome"]


class Outcome:
    """Exit code and output of one command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Kernels of this module go to a cache of their own, so that `clear` harms nobody."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LADDER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure for a moment only: these tests look at what is reported, not at how fast it is."""
    monkeypatch.setattr("ladder.cli.measure.MIN_SECONDS", 0.0)
    monkeypatch.setattr("ladder.cli.measure.ROUNDS", 1)
    for name in ("REST_SECONDS", "WARM_SECONDS", "ROUND_SECONDS"):
        monkeypatch.setattr(f"ladder.cli.measure.{name}", 0.0)
    monkeypatch.setattr("ladder.cli.measure.MAX_COPIES", 2)
    monkeypatch.setattr("ladder.cli.measure.BANDWIDTH_BUFFER", 1 << 20)


@pytest.fixture
def ladder(capsys: pytest.CaptureFixture[str]) -> Command:
    def command(*arguments: str) -> Outcome:
        code = run(arguments)
        out, err = capsys.readouterr()
        return Outcome(code, out, err)

    return command


def shell(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from ladder.cli import main; main()", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", [[], *([name] for name in command_names()), ["cache", "clear"]])
def test_help_of_every_command(ladder: Command, command: list[str]) -> None:
    done = ladder(*command, "--help")
    assert done.code == OK
    assert f"Usage: {' '.join(['ladder', *command])}" in done.out
    assert done.err == ""


def test_commands_of_the_cache_are_listed_where_none_is_named(ladder: Command) -> None:
    done = ladder("cache")
    assert (done.code, done.err) == (OK, "")
    assert done.out == ladder("cache", "--help").out


def test_help_is_fast() -> None:
    """Processor time, so that a busy machine does not count."""

    def seconds() -> float:
        before = os.times()
        assert shell("--help").returncode == OK
        after = os.times()
        used = (after.children_user - before.children_user, after.children_system - before.children_system)
        return sum(used)

    assert min(seconds() for _ in range(3)) < 0.5


def test_version(ladder: Command) -> None:
    assert re.match(r"\d+", ladder("--version").out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gem"], "No such command"),
        (["gemm", "--wieght", "int4"], "--wieght"),
        (["gemm", "-m", "many"], "-m"),
        (["gemm", "-n", "0"], "-n"),
        (["gemm", "--weight", "nf5"], "nf4"),
        (["gemm", "--activation", "float61"], "float16"),
        (["gemm", "--target", "cuda/sm_91"], "cuda/sm_90a"),
        (["gemm", "--zero", "inetger"], "integer"),
        (["gemm", "--epilogue", "sliu"], "silu"),
        (["gemm", "--output", "float8"], "float16"),
        (["gemm", "--group-size", "0"], "group_size"),
        (["gemm", "--weight", "mxfp4", "--group-size", "64"], "32"),
        (["gemm", "--weight", "mxfp4", "--zero", "integer"], "zero points"),
        (["gemm", "--weight", "uint8", "--activation", "int8"], "float16"),
        (["gemm", "--weight", "nf4", "--activation", "int8"], "bfloat16"),
        (["explain", "--stage", "trii", *SMALL], "tir"),
        (["tune", "--shapes", "12y12"], "NxK"),
        (["tune", "-m", "1,x"], "'x'"),
        (["tune", "--compile-only"], "--output"),
        (["tune", "--compile-only", "--output", "/proc/none"], "cannot write /proc/none"),
        (["gemm", "--experts", "4"], "name one as --target"),
        (["gemm", "--masked"], "give --experts too"),
        (["gemm", "-m", "99999999999"], "less than or equal to"),
        (["explain", "--guards"], "--guards of a program"),
        (["explain", "python:os:getcwd", "--stage", "ir"], "--stage is of a product"),
        (["explain", "python:os:sep"], "'python:os:sep' is a str, not a function"),
        (["report", "python:math:sqrt"], "'python:math:sqrt' is called without arguments: missing"),
        (["gemm", "--weight", "python:os:sep"], "'python:os:sep' is a str, not a TType"),
        (["gemm", "--weight", "python:..:sep"], "'python:..:sep' names nothing"),
        (["superopt", "--seconds", "nan"], "greater than or equal to 0"),
        (["superopt", "--show", "."], "cannot write .: it is a folder"),
        (["superopt", "--checkpoint", "/proc/none"], "cannot write /proc/none"),
        (["report", "none.onnx", "--output", "."], "cannot write .: it is a folder"),
        (["compile", "none.onnx", "--output", "."], "cannot write .: it is a folder"),
        (["gemm", "--target", "rocm/gfx1100", "--activation", "fp8_e4m3"], "float16"),
        (["gemm", "--target", "cuda/sm_70", "--activation", "int8"], "float16"),
        (["tune", "--target", "cpu"], "is no GPU and needs no tuning"),
        (["types", "--explain", "int4", "--target", "cpu"], "is no GPU and decodes by tables"),
        (["first-run", "report.json", "--target", "cpu"], "is no GPU"),
    ],
)
def test_bad_request_is_one_line_and_code_2(ladder: Command, arguments: list[str], message: str) -> None:
    done = ladder(*arguments)
    assert done.code == USAGE
    assert done.out == ""
    (line,) = done.err.splitlines()
    assert line.startswith("ladder: error: ")
    assert message in line


def test_missing_compiler_is_one_line_and_code_1(ladder: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LADDER_NVCC", "/nowhere/nvcc")
    done = ladder("gemm", *GPU, "--weight", "int3")
    assert done.code == FAILED
    assert len(done.err.splitlines()) == 1
    assert "LADDER_NVCC" in done.err


def test_python_m_ladder_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "ladder", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (OK, shell("--version").stdout)


def test_signs_that_a_terminal_lacks_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = shell("explain", "-n", "32", "-k", "64")
    assert done.returncode == OK, done.stderr
    assert " ?s\n" in done.stdout


def test_failure_in_a_process_is_no_traceback() -> None:
    done = shell("gemm", "--weight", "nope")
    assert done.returncode == USAGE
    assert "Traceback" not in done.stderr


REPORT_FIELDS = {"target", "kernel", "schedule", "relative_error", "time_us", "baseline_us", "bytes", "flops",
                 "roofline_fraction", "not_run"}  # fmt: skip


def test_gemm_on_this_cpu_is_exact_and_timed(ladder: Command) -> None:
    done = ladder("gemm", "-m", "5", *SMALL, "--json")
    assert done.code == OK, done.err
    report = done.json
    assert report.keys() >= REPORT_FIELDS
    assert 0 < report["relative_error"] <= 3e-3
    assert report["time_us"] > 0
    assert report["baseline_us"] > 0
    assert report["roofline_fraction"] > 0
    assert report["flops"] == 2 * 5 * 192 * 160
    assert report["not_run"] is None


@pytest.mark.parametrize(
    "options",
    [
        ["--weight", "nf4", "--activation", "float16", "--group-size", "64"],
        ["--weight", "uint4", "--zero", "integer", "--bias", "--epilogue", "silu"],
        ["--weight", "mxfp4"],
        ["--weight", "int4", "--activation", "int8", "--group-size", "-1"],
        ["--group-size", "12"],
        ["--weight", "int4_g128", "-n", "64"],
        ["-m", "0"],
    ],
)
def test_gemm_takes_its_options(ladder: Command, options: list[str]) -> None:
    done = ladder("gemm", "-m", "3", "-n", "70", "-k", "96", *options)
    assert done.code == OK, done.err
    assert "error" in done.out


def test_same_seed_gives_the_same_error(ladder: Command) -> None:
    errors = [ladder("gemm", *SMALL, "--seed", seed, "--json").json["relative_error"] for seed in "778"]
    assert errors[0] == errors[1] != errors[2]


def test_gemm_without_check_says_nothing_of_the_error(ladder: Command) -> None:
    assert ladder("gemm", *SMALL, "--no-check", "--json").json["relative_error"] is None


def test_failed_check_is_code_1(ladder: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ladder.cli.comparison.gemm_reference", lambda gemm, x, *rest: np.ones((x.shape[0], gemm.n))
    )
    done = ladder("gemm", *SMALL)
    assert done.code == FAILED
    assert "exceeds" in done.err


@needs_nvcc
@needs_no_gpu
def test_gemm_for_an_absent_gpu_simulates_and_says_what_it_could_not_run(ladder: Command) -> None:
    report = ladder("gemm", *GPU, "--json").json
    assert report["kernel"].startswith("ladder_gemv")
    assert report["time_us"] is report["roofline_fraction"] is None
    assert "cuda/sm_80" in report["not_run"]
    assert report["passed"]
    assert 0 < report["relative_error"] <= report["tolerance"]
    assert report["simulated"]["findings"] == []
    assert report["simulated"]["matrix_instructions"]["mma"] > 0
    assert report["mma"] > 0
    assert report["spills"] == 0
    assert report["registers"] > 0
    assert report["shared_bytes"] > 0
    assert 0 < report["occupancy"] <= 1
    assert report["predicted_us"] > 0
    assert report["bound_by"] in report["predicted_parts_us"]


def test_gemm_for_amd_states_its_evidence(ladder: Command) -> None:
    report = ladder("gemm", "--target", "rocm/gfx942", "-m", "3", "-n", "96", "-k", "160", "--json").json
    assert report["passed"]
    assert 0 < report["relative_error"] <= report["tolerance"]
    assert report["simulated"]["findings"] == []
    assert report["mfma"] + report["dots"] > 0
    assert report["vgpr"] > 0
    assert report["agpr"] >= 0
    assert report["lds_bytes"] > 0
    assert report["spills"] == report["scratch_bytes"] == 0
    assert report["predicted_us"] > 0


def test_gemm_of_experts_for_amd(ladder: Command) -> None:
    small = ("--target", "rocm/gfx942", "--experts", "4", "-m", "2", "-n", "96", "-k", "160", "--json")
    report = ladder("gemm", *small).json
    assert report["experts"] == 4
    assert report["passed"]
    assert report["spills"] == report["scratch_bytes"] == 0
    assert not report["simulated"]["findings"]


def test_few_results_of_experts_may_err_by_what_their_terms_cancel(ladder: Command) -> None:
    """The bound of many results, 3e-3, is less than rounding costs these two."""
    types = ("--weight", "nf4", "--activation", "bfloat16", "--group-size", "32")
    small = ("--experts", "3", "-m", "1", "-n", "2", "-k", "64")
    report = ladder("gemm", "--target", "rocm/gfx942", *types, *small, "--json").json
    assert report["passed"]
    assert report["relative_error"] > report["tolerance"]


def test_gemm_for_amd_checks_what_quantises_tokens(ladder: Command) -> None:
    small = ("--target", "rocm/gfx942", "--activation", "int8", "-n", "96", "-k", "160", "--json")
    report = ladder("gemm", *small, "-m", "3").json
    assert report["passed"]
    assert report["tokens"]["findings"] == []
    assert 0 < report["tokens"]["relative_error"] < 0.01
    assert report["tokens"]["spills"] == report["tokens"]["scratch_bytes"] == 0
    nothing = ladder("gemm", *small, "-m", "0").json
    assert nothing["simulated"] is nothing["relative_error"] is None
    assert nothing["vgpr"] > 0


@needs_nvcc
@needs_no_gpu
def test_gemm_without_check_only_compiles_for_an_absent_gpu(ladder: Command) -> None:
    report = ladder("gemm", *GPU, "--no-check", "--json").json
    assert report["simulated"] is report["relative_error"] is None
    assert "mma" not in report


@needs_nvcc
@needs_no_gpu
def test_faults_that_the_simulator_finds_fail_the_command(
    ladder: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ladder.cli.check import SimulatedCheck

    broken = SimulatedCheck(1, 2, 3, float("nan"), ("race: warp 1 reads",), {}, 0, 1)
    monkeypatch.setattr("ladder.cli.gemm.simulated_check", lambda problem, lowered: broken)
    done = ladder("gemm", *GPU, "--json")
    assert done.code == FAILED
    assert "race" in done.err
    assert done.json["relative_error"] is None
    assert done.json["simulated"]["findings"] == ["race: warp 1 reads"]


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ("ir", "matmul("),
        ("schedule", "pad w.n to 128"),
        ("tile", "store y <- total"),
        ("tir", "T.prim_func"),
        ("asm", "ret"),
    ],
)
def test_explain_stages_of_a_cpu_kernel(ladder: Command, stage: str, text: str) -> None:
    done = ladder("explain", *SMALL, "--stage", stage)
    assert done.code == OK, done.err
    assert text in done.out


@needs_nvcc
@pytest.mark.parametrize(
    ("stage", "text"),
    [("schedule", "GpuSchedule("), ("tir", "T.prim_func"), ("cuda", "__global__"), ("ptx", ".target sm_80")],
)
def test_explain_stages_of_a_gpu_kernel(ladder: Command, stage: str, text: str) -> None:
    done = ladder("explain", *GPU, "--stage", stage)
    assert done.code == OK, done.err
    assert text in done.out


def test_explain_summary_says_what_is_predicted(ladder: Command) -> None:
    done = ladder("explain", "--target", "cuda/sm_90a", "--json")
    assert done.json["target"] == "cuda/sm_90a"
    assert "wgmma" in done.json["text"]


def test_tuning_is_for_the_product_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    here = VisibleGpu(0, (9, 0), "cuda/sm_90a:132sm-3352gbs-50mib")
    monkeypatch.setattr(problem, "visible_gpus", lambda: [here])
    for name, expected in (("cuda/sm_90a", here.device), ("cuda/sm_80", "cuda/sm_80")):
        assert problem.as_here(get_device(name)).name == expected
    other = get_device("cuda/sm_90a:114sm-2039gbs-50mib")
    assert problem.as_here(other) == other


@pytest.mark.parametrize(("target", "measured"), [("cuda/sm_90a", True), ("cuda/sm_90a:h100", False)])
def test_explain_shows_what_was_measured_on_this_product(target: str, measured: bool) -> None:
    operator = Matmul(4096, 4096, "int4", "float16", group_size=128)
    assert ("measured" in operator.lower(target).explain()) == measured


@needs_nvcc
def test_explain_shows_what_the_code_takes(ladder: Command) -> None:
    done = ladder("explain", *GPU, "--json")
    assert done.json["evidence"]["mma"] > 0
    assert done.json["evidence"]["registers"] > 0
    assert f"registers {done.json['evidence']['registers']}" in done.json["text"]


def test_explain_without_a_compiler_says_that_there_is_no_evidence(
    ladder: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LADDER_NVCC", "/nowhere/nvcc")
    monkeypatch.setenv("LADDER_CACHE_DIR", str(tmp_path))
    done = ladder("explain", *GPU, "--json")
    assert done.code == OK, done.err
    assert done.json["evidence"] is None
    assert "no evidence" in done.json["text"]


OWN = """
from tile_types import TType
own = TType("own_type_of_cli", 3, lambda code, ops: ops.lookup((0, 9, 2, 5, 1, -7, 3, 4), code))
halves = TType("own_halves_of_cli", 3, lambda code, ops: ops.cast(code, "float32") * 0.5)
"""


def test_types_are_explained(ladder: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipe and cost of each activation type, of a type of the library and of one's own."""
    rows = {row["activation"]: row for row in ladder("types", "--explain", "nf4", "--json").json["decoders"]}
    assert rows.keys() == {"float16", "bfloat16"}
    assert (rows["float16"]["recipe"], rows["float16"]["instructions"]) == ("table", 32)
    (tmp_path / "own_types.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    shown = ladder("types", "--explain", "python:own_types:own", "--target", "cuda/sm_80")
    assert shown.code == OK, shown.err
    assert "pairs" in shown.out
    assert "16 KiB" in shown.out
    product = ladder("gemm", "--weight", "python:own_types:own", *SMALL, "--json")
    assert (product.code, product.json["weight"]) == (OK, "own_type_of_cli"), product.err
    halves = ladder("types", "--explain", "python:own_types:halves", "--target", "cuda/sm_80", "--json")
    assert "int8" in {row["activation"] for row in halves.json["decoders"]}
    of_waves = ladder("types", "--explain", "nf4", "--target", "rocm/gfx942", "--json").json["decoders"]
    assert {(row["recipe"], row["instructions"]) for row in of_waves} == {("byte table", 112)}
    refused = ladder("types", "--explain", "nf4", "--target", "cpu")
    assert refused.code != OK
    assert "is no GPU" in refused.err
    empty = ladder("types", "--explain", "")
    assert (empty.code != OK, empty.out) == (True, "")
    assert "unknown type ''" in empty.err


def test_types_and_devices_as_json(ladder: Command) -> None:
    types = {row["name"]: row for row in ladder("types", "--json").json["types"]}
    assert types["nf4"]["bits"] == 4
    assert types["mxfp4"]["bits_per_element"] == pytest.approx(4 + 8 / 32)
    assert types["int4"]["exact_in"] != types["uint8"]["exact_in"]
    devices = ladder("devices", "--json").json
    assert "cuda/sm_90a" in {row["name"] for row in devices["devices"]}
    assert devices["here"]["cpu"]["name"].startswith("cpu/")


@pytest.mark.parametrize("command", ["types", "devices"])
def test_tables_name_every_row_uncut(ladder: Command, command: str) -> None:
    rows = ladder(command, "--json").json[command]
    table = ladder(command).out
    markdown = ladder(command, "--markdown").out
    for row in rows:
        assert re.search(rf"^{re.escape(row['name'])} ", table, re.MULTILINE)
        assert f"| `{row['name']}` |" in markdown
    assert "…" not in table


def test_cache_lists_and_clears_what_was_compiled(ladder: Command) -> None:
    assert ladder("gemm", *SMALL).code == OK
    folder = Path(ladder("cache", "path").out.strip())
    entries = ladder("cache", "list", "--json").json["entries"]
    assert entries
    assert all(Path(entry["path"]).is_relative_to(folder) for entry in entries)
    assert len(ladder("cache", "list").out.splitlines()) == len(entries) + 1
    assert ladder("cache", "clear", "--json").json == {"removed": len(entries)}
    assert ladder("cache", "list", "--json").json == {"entries": []}


@pytest.mark.parametrize(
    ("version", "works"), [((3, 10), False), ((3, 11), True), ((3, 14, 9), True), ((3, 15), False)]
)
def test_doctor_knows_which_pythons_were_run(version, works, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "sys", SimpleNamespace(version_info=version, executable="python"))
    found = doctor.TOOLS[0].probe()
    assert found is not None
    assert found.works == works


def test_doctor_is_content_where_the_main_job_runs(ladder: Command) -> None:
    done = ladder("doctor", "--json")
    assert done.code == OK, done.out
    tools = done.json["tools"]
    assert tools["apache-tvm"]["status"] == "ok"
    assert all(row["get"] for row in tools.values() if row["status"] != "ok")


def test_doctor_names_what_is_missing_and_how_to_get_it(
    ladder: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = doctor.Tool("C compiler", "links kernels", "install gcc", lambda: None, required=True)
    optional = doctor.Tool("nvcc", "compiles for GPUs", "install CUDA", lambda: None)
    monkeypatch.setattr(doctor, "TOOLS", (optional,))
    assert ladder("doctor").code == OK
    monkeypatch.setattr(doctor, "TOOLS", (optional, absent))
    done = ladder("doctor")
    assert done.code == FAILED
    assert "C compiler (needed): install gcc" in done.out


def test_doctor_reports_a_program_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "nvcc"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("LADDER_NVCC", str(broken))
    tool = next(tool for tool in doctor.TOOLS if tool.name == "nvcc")
    assert doctor.examine(tool).status == "broken"


def test_doctor_takes_no_folder_for_a_linker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder named like the package imports, whatever it lacks."""
    (tmp_path / "ziglang").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "ziglang", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    rocm_linker.cache_clear()
    try:
        status = {
            tool.name: doctor.examine(tool).status for tool in doctor.TOOLS if tool.name in ("lld", "linker")
        }
    finally:
        rocm_linker.cache_clear()
    assert status == {"linker": "missing", "lld": "missing"}


@pytest.mark.parametrize("output", [">&-", "| exec <&-"])
def test_output_may_be_closed(output: str) -> None:
    """By the shell, or by a reader that leaves before anything is written."""
    command = f"set -o pipefail; (sleep 0.2; '{sys.executable}' -m ladder types) {output}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_problem_defaults_follow_the_target() -> None:
    assert Problem().activation_type == "bfloat16"
    assert Problem(target="cuda/sm_75").activation_type == "float16"
    assert Problem(weight="float16").activation_type == "float16"
    assert Problem().group == 128
    assert Problem(weight="mxfp4").group is None
    assert Problem(group_size=-1).group is None


@pytest.mark.parametrize(
    ("terminal", "ci", "shown"), [(True, "", True), (True, "1", False), (False, "", False)]
)
def test_progress_shows_on_a_terminal_outside_ci_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool, ci: str, shown: bool
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    with console.progress() as step:
        step("compiling")
        step("timing", 0.5)
    out, err = capsys.readouterr()
    assert out == ""
    assert (err != "") == shown


@needs_no_gpu
def test_tuning_without_a_gpu_says_how_to_prepare_it(ladder: Command, tmp_path: Path) -> None:
    done = ladder("tune", "--shapes", "4096x4096")
    assert done.code == FAILED
    assert "--compile-only --output" in done.err
    assert "no trials" in ladder("tune", "--measure", str(tmp_path)).err


@needs_nvcc
@pytest.mark.slow
def test_trials_are_compiled_where_there_is_no_gpu(ladder: Command, tmp_path: Path) -> None:
    options = ["--shapes", "512x512", "-m", "1,64", "--kernels", "2", "--jobs", "2"]
    done = ladder("tune", *options, "--compile-only", "--output", str(tmp_path / "trials"), "--json")
    assert done.code == OK
    assert done.json["kernels"] == 2
    assert len(list((tmp_path / "trials").glob("*.so"))) == 2


def test_a_full_disk_is_one_line(monkeypatch, capsys) -> None:
    def full(*values: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ladder.cli.tables.list_types", full)
    monkeypatch.setattr("tile_types.list_types", full)
    assert run(["types"]) == FAILED
    assert capsys.readouterr().err.strip() == "ladder: error: [Errno 28] No space left on device"
