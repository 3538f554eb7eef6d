"""Run an emitted CUDA kernel on the host, thread by thread, without a GPU.

The generated CUDA text itself is compiled with g++: PTX statements become calls into
``cuda_emulator.h``, which implements them after the PTX ISA. Launch arguments come from the
host function that TVM split off, so grid, symbols and shared memory are what a GPU would get.
"""

from __future__ import annotations

import ctypes
import operator
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

HEADER = Path(__file__).with_name("cuda_emulator.h")

INSTRUCTIONS = (
    (r"ld\.(global|shared)[\w.:]*\.v4\.[ub]32", "ptx_ld4"),
    (r"ld\.(global|shared)[\w.:]*\.v2\.[ub]32", "ptx_ld2"),
    (r"ld\.(global|shared)[\w.:]*\.[ub]32", "ptx_ld1"),
    (r"ld\.shared::cluster\.v4\.u32", "ptx_ld4"),
    (r"mapa\.shared::cluster\.u32", "ptx_mapa"),
    (r"barrier\.cluster\.arrive\.release", "emu_cluster_arrive"),
    (r"barrier\.cluster\.wait\.acquire", "emu_cluster_wait"),
    (r"st\.shared\.v4\.[ub]32", "ptx_st4"),
    (r"st\.global\.v2\.[ub]32", "ptx_gst2"),
    (r"cp\.async\.cg\.shared\.global[\w.:]*", "ptx_cp_async"),
    (r"(cp\.async\.bulk\.)?prefetch\.(global\.L2|L2\.global)", "(void)"),
    (r"griddepcontrol\.(wait|launch_dependents)", "ptx_nothing"),
    (r"cp\.async\.commit_group", "ptx_commit"),
    (r"cp\.async\.wait_group", "ptx_wait"),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16", "ptx_ldmatrix4"),
    (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32", "ptx_mma4<F16, F16, float, 16, 16>"),
    (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32", "ptx_mma4<BF16, BF16, float, 16, 16>"),
    (r"mma\.sync\.aligned\.m16n8k8\.row\.col\.f32\.f16\.f16\.f32", "ptx_mma2<F16, F16, float, 16, 8>"),
    (r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.s8\.s8\.s32", "ptx_mma4<S8, S8, int, 16, 32>"),
    (r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.u8\.s8\.s32", "ptx_mma4<U8, S8, int, 16, 32>"),
    (r"mma\.sync\.aligned\.m8n8k16\.row\.col\.s32\.s8\.s8\.s32", "ptx_mma1<S8, S8, int, 8, 16>"),
    (r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e4m3\.e4m3\.f32", "ptx_mma4<E4M3, E4M3, float, 16, 32>"),
    (r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e5m2\.e4m3\.f32", "ptx_mma4<E5M2, E4M3, float, 16, 32>"),
    (r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e4m3\.e5m2\.f32", "ptx_mma4<E4M3, E5M2, float, 16, 32>"),
    (r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e5m2\.e5m2\.f32", "ptx_mma4<E5M2, E5M2, float, 16, 32>"),
    (r"mma\.sync\.aligned\.m8n8k4\.row\.col\.f32\.f16\.f16\.f32", "ptx_mma884"),
    (r"mov\.u32", "ptx_move"),
    (r"lop3\.b32", "ptx_lop3"),
    (r"prmt\.b32", "ptx_prmt"),
    (r"dp4a\.u32\.u32", "ptx_dp4a"),
    (r"sub\.rn\.f16x2", "ptx_sub2<__half>"),
    (r"mul\.rn\.f16x2", "ptx_mul2<__half>"),
    (r"fma\.rn\.f16x2", "ptx_fma2<__half>"),
    (r"fma\.rn\.bf16x2", "ptx_fma2<__nv_bfloat16>"),
    (r"cvt\.rn\.satfinite\.e4m3x2\.f16x2", "ptx_narrow<__NV_E4M3>"),
    (r"cvt\.rn\.satfinite\.e5m2x2\.f16x2", "ptx_narrow<__NV_E5M2>"),
    (r"cvt\.rn\.satfinite\.e4m3x2\.f32", "ptx_narrow_pair<__NV_E4M3>"),
    (r"cvt\.rn\.satfinite\.e5m2x2\.f32", "ptx_narrow_pair<__NV_E5M2>"),
    (r"cvt\.rn\.f16x2\.f32", "ptx_halves"),
    (r"mov\.b32", "ptx_join"),
    (r"\.reg", "uint16_t h = 0; (void)"),
)

ASM = re.compile(r'(?:asm|__asm__)\s*(?:volatile|__volatile__)?\s*\(\s*((?:"[^"]*"\s*)+)((?::[^;]*)?)\)\s*;')
OPERAND = re.compile(r'"[=+]?\w+"\s*\(((?:[^()]|\([^()]*\))*)\)')


def missing_tools() -> str:
    """Return why the emulator cannot run here, or an empty string."""
    if shutil.which("g++") is None:
        return "needs g++"
    return "" if _cuda_include() else "needs the CUDA headers (cuda_fp16.h)"


@cache
def _cuda_include() -> str:
    """Return the folder of the CUDA headers as nvcc itself reports it, or an empty string."""
    nvcc = os.environ.get("LADDER_NVCC") or shutil.which("nvcc")
    if nvcc is None:
        return ""
    plan = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    folders = re.findall(r'INCLUDES="([^"]*)"', plan) + re.findall(r'"-I([^"]*)"', plan)
    candidates = (re.sub(r"^-I", "", text.strip()) for line in folders for text in line.split('"'))
    return next((c for c in candidates if (Path(c) / "cuda_fp16.h").exists()), "")


def _statement(match: re.Match[str]) -> str:
    """Translate one asm statement to C++ calls."""
    template = "".join(re.findall(r'"([^"]*)"', match[1])).replace("\\n", " ").replace("\\t", " ")
    operands = OPERAND.findall(match[2])
    calls = []
    for instruction in filter(None, (part.strip(" {}") for part in re.split(r";", template))):
        name, _, rest = instruction.partition(" ")
        function = next((call for pattern, call in INSTRUCTIONS if re.fullmatch(pattern, name)), None)
        if function is None:
            raise NotImplementedError(f"the emulator has no {instruction!r}")
        rest = re.sub(r"[{}\[\]]|\.b16", "", rest).replace("%%cluster_ctarank", "emu_now->rank")
        arguments = re.sub(r"%(\d+)", lambda m: operands[int(m[1])], rest)
        calls.append(f"{function}({arguments});")
    return " ".join(calls)


def translate(source: str) -> str:
    """Turn generated CUDA text into C++."""
    source = ASM.sub(_statement, source)
    source = re.sub(
        r"extern __shared__ __align__\(\d+\) uchar (\w+)\[\];", r"uchar* \1 = emu_shared;", source
    )
    source = re.sub(r"__launch_bounds__\([^)]*\)", "", source).replace("__global__", "")
    return re.sub(
        r"(unsigned int tvm_builtin_cuda_cvta_generic_to_shared\(void\* p\) \{).*?\n\}",
        r"\1 return emu_offset(p); }",
        source,
        flags=re.S,
    )


class Kernel:
    """One emitted kernel, ready to run on numpy arrays."""

    def __init__(self, func: Any, device: Any, folder: Path) -> None:
        self.host, self.launch_names, source = _lower(func, device)
        text = translate(source)
        entry = re.findall(r'extern "C"\s+void\s+(\w+)\(([^)]*)\)\s*\{', text)[-1]
        kinds = [p.rsplit(" ", 1)[0].replace("__restrict__", "").strip() for p in entry[1].split(",")]
        self.kinds = kinds
        binds = ", ".join(
            f"({kind})emu_arguments[{i}]" if "*" in kind else f"*({kind}*)emu_arguments[{i}]"
            for i, kind in enumerate(kinds)
        )
        text = (
            "#include <cstdint>\n#include <type_traits>\n#define __launch_bounds__(...)\n"
            "#include <cmath>\n#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n#include <cuda_fp8.h>\n"
            f'#include "{HEADER}"\n#define __syncthreads emu_block_sync\n'
            "#define __CUDA_ARCH__ 800\n"
            f"{text}\nstatic void** emu_arguments;\n"
            f"static void emu_call() {{ {entry[0]}({binds}); }}\n"
            'extern "C" void emu_run(void** a, int x, int y, int cluster, int threads, size_t shared,'
            " int eager, int reverse) {\n"
            "  emu_arguments = a; emu_kernel = emu_call;\n"
            "  for (int j = 0; j < y; j++) for (int i = 0; i < x; i += cluster)\n"
            "    emu_run_cluster(i, j, cluster, threads, shared, eager, reverse); }\n"
        )
        path = folder / "kernel.cpp"
        path.write_text(text)
        command = ["g++", "-O1", "-std=c++17", "-w", "-shared", "-fPIC", f"-I{_cuda_include()}"]
        done = subprocess.run(
            [*command, "-o", str(folder / "kernel.so"), str(path)], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{path}: {done.stderr[-3000:]}")
        self.library = ctypes.CDLL(str(folder / "kernel.so"))

    def __call__(self, *arrays: np.ndarray[Any, Any], eager: bool = False, reverse: bool = False) -> None:
        """Run the whole grid on C-contiguous arrays, in the kernel's argument order."""
        pointers, scalars, launch = self._arguments(arrays)
        cells = [ctypes.c_int(v) for v in scalars]
        slots = [ctypes.c_void_p(p) for p in pointers] + [
            ctypes.cast(ctypes.byref(c), ctypes.c_void_p) for c in cells
        ]
        table = (ctypes.c_void_p * len(slots))(*slots)
        self.library.emu_run(
            table,
            launch.get("blockIdx.x", 1),
            launch.get("blockIdx.y", 1),
            launch.get("clusterCtaIdx.x", 1),
            launch["threadIdx.x"],
            ctypes.c_size_t(launch.get("tirx.use_dyn_shared_memory", 0)),
            int(eager),
            int(reverse),
        )

    def _arguments(self, arrays: Any) -> tuple[list[int], list[int], dict[str, int]]:
        """Evaluate the kernel's arguments from the host function that TVM split off."""
        values: dict[Any, int] = {}
        pointers: dict[Any, int] = {}
        for buffer, array in zip(self.host.params, arrays, strict=True):
            assert array.flags.c_contiguous
            pointers[buffer] = array.ctypes.data
            for extent, size in zip(buffer.shape, array.shape, strict=True):
                if type(extent).__name__ == "Var":
                    assert values.setdefault(extent, size) == size, "extents of two arguments disagree"
                else:
                    assert int(extent) == size, f"expected extent {extent}, got {size}"
        for statement in self.host.body.seq:
            kind = type(statement).__name__
            if kind == "DeclBuffer":
                pointers[statement.buffer] = pointers[statement.data.args[0]]
            elif kind == "Bind":
                values[statement.var] = evaluate(statement.value, values)
        arguments = list(statement.value.args)[1:]
        count = len(self.launch_names)
        numbers = (evaluate(a, values) for a in arguments[-count:])
        launch = dict(zip(self.launch_names, numbers, strict=True))
        kernel = arguments[:-count]
        return (
            [pointers[a.args[0]] for a in kernel if type(a).__name__ == "Call"],
            [evaluate(a, values) for a in kernel if type(a).__name__ != "Call"],
            launch,
        )


BINARY = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "FloorMod": operator.mod,
    "Div": operator.floordiv,
    "Mod": operator.mod,
    "Min": min,
    "Max": max,
}


def evaluate(expression: Any, values: dict[Any, int]) -> int:
    """Evaluate a host expression of non-negative integers."""
    kind = type(expression).__name__
    if kind == "IntImm":
        return int(expression.value)
    if kind == "Var":
        return values[expression]
    return BINARY[kind](evaluate(expression.a, values), evaluate(expression.b, values))


def _lower(func: Any, device: Any) -> tuple[Any, list[str], str]:
    """Return the host function, the launch parameters and the CUDA text; nothing is compiled for a GPU."""
    from ladder.lower.cuda.toolchain import load_compiler
    from ladder.lower.passes import pipeline

    load_compiler()
    import tvm
    import tvm_ffi
    from tvm.ir.instrument import pass_instrument

    @pass_instrument
    class Capture:
        module: Any = None

        def run_after_pass(self, module: Any, info: Any) -> None:
            if str(info.name) == "tirx.SplitHostDevice":
                self.module = module

    sources: list[str] = []

    def keep(code: str, *_: Any) -> bytes:
        sources.append(code)
        return b"not machine code"

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", keep, override=True)
    capture = Capture()
    target = tvm.target.Target(device.tvm_target)
    with target, tvm.transform.PassContext(instruments=[capture]):
        tvm.compile(tvm.IRModule({"kernel": func}), target=target, tir_pipeline=pipeline())
    functions = {str(f.attrs["global_symbol"]): f for f in capture.module.functions.values()}
    device_function = next(f for name, f in functions.items() if name.endswith("_kernel"))
    host = next(f for name, f in functions.items() if not name.endswith("_kernel"))
    flag = "tirx.use_programtic_dependent_launch"  # takes no argument
    names = [str(n) for n in device_function.attrs["tirx.kernel_launch_params"] if str(n) != flag]
    return host, names, sources[-1]
