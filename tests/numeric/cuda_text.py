"""CUDA text of kernels, and what g++ needs to compile CUDA headers on the host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any


def missing_tools() -> str:
    """Return what CUDA text cannot be compiled without here, or an empty string."""
    if shutil.which("g++") is None:
        return "needs g++"
    return "" if cuda_include() else "needs the CUDA headers (cuda_fp16.h)"


@cache
def cuda_include() -> str:
    """Return the folder of the CUDA headers as nvcc itself reports it, or an empty string."""
    nvcc = os.environ.get("LADDER_NVCC") or shutil.which("nvcc")
    if nvcc is None:
        return ""
    plan = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    folders = re.findall(r'INCLUDES="([^"]*)"', plan) + re.findall(r'"-I([^"]*)"', plan)
    candidates = (re.sub(r"^-I", "", text.strip()) for line in folders for text in line.split('"'))
    return next((c for c in candidates if (Path(c) / "cuda_fp16.h").exists()), "")


def source_of(func: Any, device: Any) -> str:
    """Return the CUDA text of a kernel; nothing is compiled for a GPU."""
    from ladder.lower.cuda.toolchain import load_compiler
    from ladder.lower.passes import pipeline

    load_compiler()
    import tvm
    import tvm_ffi

    sources: list[str] = []

    def keep(code: str, *_: Any) -> bytes:
        sources.append(code)
        return b"not machine code"

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", keep, override=True)
    target = tvm.target.Target(device.tvm_target)
    with target, tvm.transform.PassContext():
        tvm.compile(tvm.IRModule({"kernel": func}), target=target, tir_pipeline=pipeline())
    return sources[-1]
