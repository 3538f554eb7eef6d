"""From TIR to a CUDA binary: TVM's code generator, NVIDIA's compiler, and their reports.

TVM's own callback forces fast-math and hides ptxas; ours calls nvcc, or NVRTC where there is none, for
exactly one architecture and keeps the source, the binary and the resource report.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ladder import knobs
from ladder.lower.compilation import Compilation
from ladder.lower.cuda import nvrtc
from ladder.lower.cuda.toolkit import (
    CUDA_RUNTIME,
    REMEDY,
    find_tool,
    headers_elsewhere,
    nvcc,
    runtime_libraries,
)
from ladder.lower.linking import link
from ladder.lower.passes import pipeline
from ladder.lower.tvm_lock import tvm_unlocked
from targets import TileDevice
from tile_types.errors import ArtifactError, CompilerError, MissingToolError
from tile_types.files import replacing

NVCC_FLAGS = ("-O3", "-std=c++17", "--expt-relaxed-constexpr", "-diag-suppress=174,177")

ANY_GCC = "-allow-unsupported-compiler"
"""Kernels hold no host code of which a gcc newer than nvcc's release could make something else."""

DRIVER_SYMBOLS = (
    "cuDeviceGetName", "cuFuncGetAttribute", "cuFuncSetAttribute", "cuGetErrorName", "cuGetErrorString",
    "cuLaunchKernel", "cuLaunchKernelEx", "cuModuleGetFunction", "cuModuleGetGlobal_v2", "cuModuleLoadData",
    "cuModuleUnload", "cuTensorMapEncodeIm2col", "cuTensorMapEncodeTiled",
)  # fmt: skip
"""Driver functions that TVM's CUDA runtime may name; a stub answers them with an error."""

NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE: what every function of the stub returns."""


@functools.cache
def _version(compiler: Path) -> str:
    output = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"V(\d+\.\d+\.\d+)", output)
    return match[1] if match else output.strip()


def compiler_file() -> Path | None:
    """Return the program that `compiler_identity` asks, None if a library tells it."""
    return None if uses_nvrtc() else nvcc()


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def require_release(compiler: str, version: str, device: TileDevice) -> None:
    """Raise unless the compiler's release is one of those that know the device.

    Raises MissingToolError: Names the releases that do, as `TileDevice.toolkit` states them.
    """
    for condition in filter(None, device.toolkit.removeprefix("cuda").split(",")):
        sign, limit = re.fullmatch(r"(>=|<)([\d.]+)", condition).groups()  # type: ignore[union-attr]
        if re.fullmatch(r"[\d.]+", version) and (_release(version) >= _release(limit)) != (sign == ">="):
            raise MissingToolError(
                f"{device.name} needs nvcc {device.toolkit.removeprefix('cuda')}, but {compiler} is"
                f" {version}; set LADDER_NVCC to one of such a release"
            )


def uses_nvrtc() -> bool:
    """Tell whether NVRTC compiles: where there is no nvcc, or no gcc, which it calls, and none was named."""
    whole = find_tool("nvcc") is not None and shutil.which("gcc") is not None
    return knobs.settings.nvcc is None and not whole and nvrtc.library() is not None


def compiler_identity() -> str:
    """Return what tells two CUDA compilers apart in cache keys."""
    if uses_nvrtc():
        return f"nvrtc {nvrtc.version()} {' '.join(nvrtc.FLAGS)}"
    return f"nvcc {_version(nvcc())} {' '.join(NVCC_FLAGS)}"


def compile_cuda(source: str, device: TileDevice, output: str) -> tuple[bytes, str]:
    """Compile CUDA source by nvcc, or by NVRTC (`uses_nvrtc`).

    source: CUDA C++.
    device: Architecture to compile for; its ``compile_options`` name it.
    output: ``"cubin"`` or ``"ptx"``.
    Returns: Machine code or PTX, and what the compiler printed.
    Raises MissingToolError if there is no compiler, or its release does not know the architecture.
    Raises CompilerError if it rejects the source; the source is kept and named.
    """
    try:
        return (_run_nvrtc if uses_nvrtc() else _run_nvcc)(source, device, output)
    except CompilerError as error:
        raise CompilerError(_rejection(source, device, str(error))) from error


def _architecture(device: TileDevice, output: str) -> str:
    """Return ``sm_90a`` for machine code, ``compute_90a`` for PTX."""
    found: dict[str, str] = dict(re.findall(r"(arch|code)=(\w+)", " ".join(device.compile_options)))
    return found["arch" if output == "ptx" else "code"]


def _run_nvrtc(source: str, device: TileDevice, output: str) -> tuple[bytes, str]:
    require_release("NVRTC", nvrtc.version(), device)
    return nvrtc.compile_source(source, _architecture(device, output), output)


def _run_nvcc(source: str, device: TileDevice, output: str) -> tuple[bytes, str]:
    compiler = nvcc()
    require_release(str(compiler), _version(compiler), device)
    ptx = [f"-arch={_architecture(device, output)}"]
    options = (*NVCC_FLAGS, *(ptx if output == "ptx" else device.compile_options), "-Xptxas=-v")
    with tempfile.TemporaryDirectory(prefix="ladder-nvcc-") as folder:
        path, result = Path(folder) / "kernel.cu", Path(folder) / f"kernel.{output}"
        path.write_text(source)
        headers = (f"-isystem={folder}" for folder in headers_elsewhere(compiler))
        command = [compiler, ANY_GCC, f"-{output}", *options, *headers, "-o", result, path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompilerError(done.stderr or done.stdout)
        return result.read_bytes(), done.stderr


def _rejection(source: str, device: TileDevice, log: str) -> str:
    """Keep the rejected source and say where it is and what the compiler said."""
    kept = Path(tempfile.mkdtemp(prefix="ladder-rejected-")) / "kernel.cu"
    kept.write_text(source)
    lines = log.strip().splitlines()
    tail = "\n".join(lines[-12:])
    name = "NVRTC" if uses_nvrtc() else "nvcc"
    why = next((line.partition("error")[2] for line in lines if "error" in line), "")
    return f"{name} rejected the kernel for {device.name}{why} (source kept in {kept}):\n{tail}"


def parse_resources(log: str) -> dict[str, dict[str, int]]:
    """Read ptxas's report: kernel -> registers, stack, spill_stores, spill_loads, shared (bytes)."""
    patterns = {
        "registers": r"Used (\d+) registers",
        "stack": r"(\d+) bytes stack frame",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
        "shared": r"(\d+) bytes smem",
    }
    report: dict[str, dict[str, int]] = {}
    current: dict[str, int] = {}
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            current = report.setdefault(entry[1], dict.fromkeys(patterns, 0))
        for name, pattern in patterns.items():
            if match := re.search(pattern, line):
                current[name] = int(match[1])
    return report


def disassemble(binary: bytes) -> str:
    """Return the SASS of a cubin.

    Raises MissingToolError if no disassembler is installed.
    """
    tool = find_tool("cuobjdump") or find_tool("nvdisasm")
    if tool is None:
        raise MissingToolError(f"cannot show SASS: neither cuobjdump nor nvdisasm is here; {REMEDY}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        arguments = ["--dump-sass"] if tool.name == "cuobjdump" else []
        done = subprocess.run([tool, *arguments, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompilerError(f"{tool.name} failed: {done.stderr.strip()}")
    return done.stdout


def ptx_of(source: str, device: TileDevice) -> str:
    """Return the PTX of CUDA source."""
    return compile_cuda(source, device, "ptx")[0].decode()


def sass_of(source: str, device: TileDevice) -> str:
    """Return the machine code of CUDA source as text."""
    return disassemble(compile_cuda(source, device, "cubin")[0])


# ---- TVM ------------------------------------------------------------------------------
def load_compiler() -> None:
    """Make TVM's CUDA code generator work, also where no GPU driver is installed.

    TVM's CUDA runtime links against the driver. Without one it would silently keep source
    text instead of machine code, so a stub of the driver is loaded first; the stub answers
    every call with "no device".
    """
    from ladder.installation import find_library

    _load_driver()
    import torch  # noqa: F401  a CUDA build of torch brings the CUDA runtime library
    import tvm  # noqa: F401

    _load_cuda_runtime()
    ctypes.CDLL(str(find_library("libtvm_runtime_cuda.so")), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _load_driver() -> None:
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        _driver_stub()


@functools.cache
def _load_cuda_runtime() -> None:
    """Load libcudart: the one that is loaded already or that the system finds, else that of the compiler."""
    for candidate in (CUDA_RUNTIME, *runtime_libraries()):
        try:
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return
    raise MissingToolError(f"{CUDA_RUNTIME} is not found; {REMEDY}")


def _driver_stub() -> ctypes.CDLL:
    """Load a library that stands for the missing driver: the cache's, which is built where it is missing."""
    from ladder.installation import cache_root

    kept = cache_root() / "stub" / "libcuda.so.1"
    if kept.is_file():
        return ctypes.CDLL(str(kept), mode=ctypes.RTLD_GLOBAL)
    import tvm

    functions = "".join(f"define i32 @{name}() {{ ret i32 {NO_DEVICE} }}\n" for name in DRIVER_SYMBOLS)
    with tempfile.TemporaryDirectory(prefix="ladder-stub-") as scratch:
        source, built = Path(scratch) / "driver.ll", Path(scratch) / kept.name
        source.write_text(functions)
        tvm.runtime.load_module(str(source)).write_to_file(f"{source}.o")
        link(built, [f"{source}.o"], name=built.name)
        stub = ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)
        with suppress(OSError, ArtifactError):  # the cache takes no files
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(kept) as part:
                shutil.copyfile(built, part)
    return stub


_running = threading.local()
"""Per thread: device and `Compilation` of TVM's request for device code; whether arguments may overlap."""


def _compile_source(code: str, *_: Any) -> bytes:
    """Answer TVM's request for device code."""
    device, result = _running.device, _running.result
    if _running.overlapping:
        code = code.replace(" __restrict__ ", " ")
    try:
        with tvm_unlocked():
            binary, log = compile_cuda(code, device, "cubin")
    except (CompilerError, MissingToolError) as error:
        _running.failure = error
        raise
    result.source, result.binary, result.log = code, binary, log
    result.resources = parse_resources(log)
    return binary


@contextmanager
def _callback(device: TileDevice, overlapping: bool) -> Iterator[Compilation]:
    """Route TVM's requests for device code to the compiler and collect what comes out.

    TVM declares the arguments of every kernel ``__restrict__``; with ``overlapping`` that is taken back.
    """
    import tvm_ffi

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", _compile_source, override=True)
    _running.device, _running.result, _running.failure = device, Compilation("cuda"), None
    _running.overlapping = overlapping
    try:
        yield _running.result
    except Exception as error:
        # An error that crossed TVM has lost its type: raise the one that started it.
        if _running.failure is not None:
            raise _running.failure from error
        raise


def compile_functions(functions: Mapping[str, Any], device: TileDevice, library: Path) -> Compilation:
    """Compile PrimFuncs and export one shared library with an entry for each.

    If the caller holds `ladder.lower.tvm_lock.tvm_lock`, other threads get it while the compiler runs.

    functions: TIRx PrimFuncs by name.
    device: A CUDA device.
    library: Path of the ``.so`` to write.
    Raises MissingToolError, CompilerError if a compiler is missing or rejects the kernel.
    """
    load_compiler()
    import tvm
    from tvm.target import Target

    target = Target(device.tvm_target)
    overlapping = not all(function.attrs["tirx.noalias"] for function in functions.values())
    with _callback(device, overlapping) as result, target:
        module = tvm.compile(tvm.IRModule(dict(functions)), target=target, tir_pipeline=pipeline())
    if not result.binary:
        raise CompilerError(f"TVM produced no machine code for {device.name}; is its CUDA runtime installed?")
    module.export_library(str(library), fcompile=link)
    return result
