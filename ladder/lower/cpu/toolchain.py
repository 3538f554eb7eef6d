"""Compile CPU functions with TVM's LLVM backend."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladder.lower.compilation import Compilation
from ladder.lower.linking import host_linker, link
from ladder.lower.passes import context, pipeline
from ladder.lower.tvm_lock import tvm_unlocked
from targets import TileDevice
from tile_types.errors import CompilerError, DeviceError


def compile_module(functions: Mapping[str, Any], device: TileDevice) -> Any:
    """Compile PrimFuncs by name for a CPU; returns TVM's executable.

    Raises CompilerError if LLVM rejects the functions.
    """
    import tvm
    from tvm.target import Target

    target = Target(device.tvm_target)
    try:
        with context(target):
            return tvm.compile(tvm.IRModule(dict(functions)), target=target, tir_pipeline=pipeline())
    except (RuntimeError, ValueError, TypeError) as error:
        raise CompilerError(f"LLVM rejected {', '.join(functions)} for {device.name}: {error}") from error


def compile_functions(functions: Mapping[str, Any], device: TileDevice, library: Path) -> Compilation:
    """Compile PrimFuncs into a shared library.

    If the caller holds `ladder.lower.tvm_lock.tvm_lock`, other threads get it meanwhile: TVM's passes and
    LLVM change nothing but what they make of these functions.

    functions: Entries by name.
    device: The CPU to compile for.
    library: Path of the ``.so`` to write.
    Raises DeviceError if the CPU is of another architecture than this machine's.
    Raises MissingToolError if there is no linker.
    Raises CompilerError if LLVM rejects the functions or the linker fails.
    """
    arm, here = "mtriple" in device.tvm_target, platform.machine()
    if arm != (here.lower() in ("aarch64", "arm64")):
        kind = "an Arm" if arm else "an x86"
        raise DeviceError(f"{device.name} is {kind} CPU: its kernels are not linked on this machine, {here}")
    host_linker()
    with tvm_unlocked():
        executable = compile_module(functions, device)
        executable.export_library(str(library), fcompile=link)
        return Compilation("llvm", str(executable.mod.inspect_source("ll")))


def assembly_of(source: str, device: TileDevice) -> str:
    """Return the assembly that LLVM generates for a module, which names its target itself."""
    import tvm

    with tempfile.TemporaryDirectory(prefix="ladder-llvm-") as folder:
        path = Path(folder) / "kernel.ll"
        path.write_text(source, encoding="utf-8")
        return str(tvm.runtime.load_module(str(path)).inspect_source("asm"))
