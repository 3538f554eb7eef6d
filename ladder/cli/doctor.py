"""``ladder doctor``: which tools are here, what each is for, and how to get what is missing."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ladder.cli.console import print_table
from ladder.lower.cuda.toolkit import CUDA_RUNTIME, find_tool, nvcc, runtime_libraries
from ladder.lower.linking import host_linker
from tile_types.errors import LadderError, MissingToolError

PROBE_SECONDS = 20.0
"""A tool that does not print its version within this time counts as broken."""


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe: a version, where, and whether it works."""

    version: str
    where: str = ""
    works: bool = True


@dataclass(frozen=True)
class Tool:
    """One row of the table.

    purpose: What Ladder needs it for.
    get: How to get it.
    probe: Looks for it; None if it is absent.
    required: Whether the CPU main job, ``ladder gemm``, needs it.
    """

    name: str
    purpose: str
    get: str
    probe: Callable[[], ProbeResult | None]
    required: bool = False


@dataclass(frozen=True)
class Finding:
    """The outcome of one row, as printed and as ``--json`` gives it."""

    name: str
    status: str
    version: str
    where: str
    purpose: str
    get: str
    required: bool


def package(name: str) -> Callable[[], ProbeResult | None]:
    """Return a probe for a Python distribution."""

    def probe() -> ProbeResult | None:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            return None
        return ProbeResult(found.version, str(found.locate_file("")))

    return probe


def cxx_compiler() -> ProbeResult | None:
    """Look for a C++ compiler: ``CXX``, else the first on PATH."""
    chosen = os.environ.get("CXX")
    names = (chosen,) if chosen else ("c++", "g++", "clang++")
    path = next(filter(None, map(shutil.which, names)), None)
    return None if path is None else _version_of(path)


def _version_of(*command: str, pattern: str = r"\d+(\.\d+)+") -> ProbeResult:
    where, asked = " ".join(command), [*command, "--version"]
    try:
        ran = subprocess.run(asked, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return ProbeResult(str(error), where, works=False)
    version = re.search(pattern, ran.stdout + ran.stderr)
    return ProbeResult(version[0] if version else "version unknown", where, works=ran.returncode == 0)


def kernel_linker() -> ProbeResult | None:
    """Look for what makes libraries of kernels, as `ladder.lower.linking` does."""
    try:
        command = host_linker()
    except MissingToolError:
        return None
    return _version_of(*command)


def tvm_library() -> ProbeResult | None:
    """Load TVM and report its version."""
    try:
        import tvm
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "tvm"
        return None if absent else ProbeResult(str(error), works=False)
    except OSError as error:
        return ProbeResult(f"does not load: {error}", works=False)
    return ProbeResult(tvm.__version__, os.path.dirname(tvm.__file__))


def torch_library() -> ProbeResult | None:
    """Load torch and report its version and threads."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    except (ImportError, OSError) as error:
        return ProbeResult(f"does not load: {error}", works=False)
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    return ProbeResult(
        f"{torch.__version__} ({built_for} build, {torch.get_num_threads()} threads)",
        os.path.dirname(torch.__file__),
    )


def rocm_linker() -> ProbeResult | None:
    """Look for the linker of AMD code objects, as `ladder.lower.rocm.toolchain` does."""
    from ladder.lower.rocm.toolchain import linker

    try:
        command = linker()
    except MissingToolError:
        return None
    return _version_of(*command, pattern=r"(?<=LLD )\d+(\.\d+)+")


def cuda_program(name: str) -> Callable[[], ProbeResult | None]:
    """Return a probe for a program of the CUDA toolkit, as `ladder.lower.cuda.toolkit` finds it."""

    def probe() -> ProbeResult | None:
        try:
            path = nvcc() if name == "nvcc" else find_tool(name)
        except MissingToolError:
            return None
        return None if path is None else _version_of(str(path), pattern=r"(?<=release )\d+\.\d+")

    return probe


def nvrtc_library() -> ProbeResult | None:
    """Look for the compiler that is a library, as `ladder.lower.cuda.nvrtc` finds it."""
    from ladder.lower.cuda import nvrtc

    return ProbeResult(nvrtc.version(), nvrtc.LIBRARY) if nvrtc.library() is not None else None


def cuda_runtime() -> ProbeResult | None:
    """Look for the CUDA runtime library that TVM's links against."""
    for candidate in runtime_libraries():
        try:
            ctypes.CDLL(candidate)
        except OSError:
            continue
        return ProbeResult(CUDA_RUNTIME, candidate)
    return None


def host_processor() -> ProbeResult:
    """Report the CPU and the instructions that kernels may use."""
    from targets import host_cpu

    device = host_cpu()
    cores = dict.fromkeys(core.name for core in device.cores)
    return ProbeResult(f"{device.name}, {device.units} cores", ", ".join(cores) or "portable code only")


def gpus() -> ProbeResult | None:
    """Report the GPUs that the driver shows."""
    from targets import visible_gpus

    shown = visible_gpus()
    if not shown:
        return None
    names = [f"#{gpu.ordinal} sm_{gpu.capability[0]}{gpu.capability[1]} as {gpu.device}" for gpu in shown]
    return ProbeResult(f"{len(shown)} visible", "; ".join(names), works=any(gpu.device for gpu in shown))


def cache_folder() -> ProbeResult:
    """Report the kernel cache and whether it can be written."""
    from ladder.installation import cache_root

    root = cache_root()
    parent = next(path for path in (root, *root.parents) if path.exists())
    writable = os.access(parent, os.W_OK)
    return ProbeResult("writable" if writable else "cannot be written", str(root), works=writable)


def trial_kernel() -> ProbeResult:
    """Compile a small kernel for this CPU, run it and compare it with float64."""
    from ladder.cli.gemm import run_gemm
    from ladder.cli.problem import Problem

    try:
        report = run_gemm(Problem(m=2, n=64, k=128, group_size=64, weight="int4"), check=True, timed=False)
    except Exception as error:  # whatever breaks is what the doctor is asked about
        kind = "" if isinstance(error, LadderError) else f"{type(error).__name__}: "
        return ProbeResult(f"{kind}{error}".partition("\n")[0], works=False)
    return ProbeResult(
        f"relative error {report.relative_error:.1e}", report.kernel, works=report.passed is not False
    )


REINSTALL = "install ladder-compiler again in a fresh virtual environment"
CUDA_TOOLKIT = (
    "pip install 'ladder-compiler[cuda]', or NVIDIA's CUDA toolkit 13.0 with its bin folder on PATH"
)
TOOLS = (
    Tool(
        "Python",
        "runs everything",
        "install Python 3.11 to 3.14",
        lambda: ProbeResult(platform.python_version(), sys.executable, (3, 11) <= sys.version_info < (3, 15)),
        required=True,
    ),
    Tool("CPU", "the default target", "", host_processor, required=True),
    Tool("apache-tvm", "turns TIR into machine code", REINSTALL, tvm_library, required=True),
    Tool("apache-tvm-ffi", "calls compiled kernels", REINSTALL, package("apache-tvm-ffi"), required=True),
    Tool(
        "torch",
        "tensors in and out, baseline of timings",
        "install torch 2.11 to 2.15; its CPU build serves everything but GPU runs",
        torch_library,
        required=True,
    ),
    Tool("numpy", "exact reference of types", REINSTALL, package("numpy"), required=True),
    Tool("ml_dtypes", "values of standard low-bit types", REINSTALL, package("ml_dtypes"), required=True),
    Tool("safetensors", "cached and exported weights", REINSTALL, package("safetensors")),
    Tool("onnx", "importing and exporting models", REINSTALL, package("onnx")),
    Tool(
        "linker",
        "links kernels into libraries",
        "pip install ziglang, or install gcc or clang with your system's package manager, or set CC",
        kernel_linker,
        required=True,
    ),
    Tool(
        "C++ compiler",
        "compiles the guards of models with many tensors, which are slower without",
        "install g++ or clang (or set CXX), and Python's headers (python3-dev)",
        cxx_compiler,
    ),
    Tool(
        "nvcc",
        "compiles kernels for cuda/* targets (no GPU needed)",
        f"{CUDA_TOOLKIT}, or set LADDER_NVCC",
        cuda_program("nvcc"),
    ),
    Tool(
        "NVRTC",
        "compiles them where there is no nvcc, or no gcc",
        f"{CUDA_TOOLKIT}; a CUDA 13 build of torch has it",
        nvrtc_library,
    ),
    Tool("ptxas", "assembles for cuda/* targets", CUDA_TOOLKIT, cuda_program("ptxas")),
    Tool("CUDA runtime", "TVM's code generator for cuda/* links against it", CUDA_TOOLKIT, cuda_runtime),
    Tool("cuobjdump", "ladder explain --stage sass", CUDA_TOOLKIT, cuda_program("cuobjdump")),
    Tool("nvdisasm", "ladder explain --stage sass", CUDA_TOOLKIT, cuda_program("nvdisasm")),
    Tool(
        "lld",
        "links kernels for rocm/* targets (no GPU needed)",
        "pip install 'ladder-compiler[rocm]', or LLVM's lld with your system's package manager",
        rocm_linker,
    ),
    Tool(
        "GPU",
        "runs kernels of cuda/* targets; compiling needs none",
        "install NVIDIA's driver on a machine with a GPU",
        gpus,
    ),
    Tool("cache", "keeps compiled kernels", "set LADDER_CACHE_DIR to a folder you can write", cache_folder),
    Tool(
        "trial kernel",
        "the main job, in small: compile, run, check",
        "see the line above that is not ok",
        trial_kernel,
        required=True,
    ),
)
"""Everything that `diagnose` looks at, in the order of the report."""


def examine(tool: Tool) -> Finding:
    """Probe one tool."""
    found = tool.probe()
    status = "missing" if found is None else "ok" if found.works else "broken"
    seen = found or ProbeResult("-")
    get = "" if status == "ok" else tool.get
    return Finding(tool.name, status, seen.version, seen.where, tool.purpose, get, tool.required)


def diagnose() -> tuple[Finding, ...]:
    """Probe every tool of `TOOLS`."""
    return tuple(map(examine, TOOLS))


def healthy(findings: tuple[Finding, ...]) -> bool:
    """Return whether the CPU main job can run."""
    return all(finding.status == "ok" for finding in findings if finding.required)


def as_json(findings: tuple[Finding, ...]) -> dict[str, Any]:
    """Return the report as one JSON-able object."""
    rows = {finding.name: asdict(finding) for finding in findings}
    return {"main_job_runs": healthy(findings), "platform": sysconfig.get_platform(), "tools": rows}


def print_report(findings: tuple[Finding, ...]) -> None:
    """Print the report as a table, and what to do about each row that is not ok."""
    rows = [(f.name, f.status, f.version, f.purpose, f.where) for f in findings]
    print_table(("tool", "status", "version", "needed for", "where"), rows)
    advice = [f for f in findings if f.status != "ok"]
    for finding in advice:
        need = "needed" if finding.required else "optional"
        print(f"{finding.name} ({need}): {finding.get}")
