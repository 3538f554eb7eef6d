"""Run `cases` on a GPU and save what came out: ``python -m tests.simulate.hardware.record FILE``."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.simulate.hardware.cases import (
    A_START,
    MMA,
    OFFSETS,
    REGISTERS,
    SHARED_BYTES,
    TRIALS,
    WGMMA,
    WORD_INSTRUCTIONS,
    cases,
)

HEADER = """
#include <cstdio>
#include <cstdlib>
#include <cstdint>
#include <vector>
typedef uint32_t u32;
"""

MAIN = """
typedef void (*Kernel)(const u32*, u32*, int);
struct Entry { const char* name; Kernel kernel; int threads, in, out; };
static Entry entries[] = { %s };
int main(int argc, char** argv) {
  FILE* in = fopen(argv[1], "rb"); FILE* out = fopen(argv[2], "wb");
  for (auto& e : entries) {
    std::vector<u32> a(e.in * TRIALS), b(e.out * TRIALS);
    if (fread(a.data(), 4, a.size(), in) != a.size()) { printf("short input\\n"); return 1; }
    u32 *da, *db; cudaMalloc(&da, 4 * a.size()); cudaMalloc(&db, 4 * b.size());
    cudaMemcpy(da, a.data(), 4 * a.size(), cudaMemcpyHostToDevice);
    cudaMemset(db, 0xFF, 4 * b.size());
    e.kernel<<<TRIALS, e.threads>>>(da, db, e.in);
    cudaError_t status = cudaDeviceSynchronize();
    printf("%%s: %%s\\n", e.name, cudaGetErrorString(status));
    if (status) return 1;
    cudaMemcpy(b.data(), db, 4 * b.size(), cudaMemcpyDeviceToHost);
    fwrite(b.data(), 4, b.size(), out);
    cudaFree(da); cudaFree(db);
  }
  fclose(out); return 0;
}
"""


def _list(first: int, count: int) -> str:
    return "{" + ", ".join(f"%{first + i}" for i in range(count)) + "}"


def _mma(name: str, shape: str, acc: str, a: str, b: str) -> str:
    na, nb, nc = REGISTERS[shape]
    kind, letter = ("float", "f") if acc == "f32" else ("u32", "r")
    text = (
        f"mma.sync.aligned.{shape}.row.col.{acc}.{a}.{b}.{acc} {_list(0, nc)}, {_list(nc, na)},"
        f" {_list(nc + na, nb)}, {_list(0, nc)};"
    )
    outs = ", ".join(f'"+{letter}"(c[{i}])' for i in range(nc))
    ins = ", ".join([f'"r"(x[{i}])' for i in range(na + nb)])
    return f"""
__global__ void {name}(const u32* in, u32* out, int size) {{
  in += blockIdx.x * size; out += blockIdx.x * {32 * nc}; int lane = threadIdx.x;
  u32 x[{na + nb}]; {kind} c[{nc}];
  for (int i = 0; i < {na}; i++) x[i] = in[lane * {na} + i];
  for (int i = 0; i < {nb}; i++) x[{na} + i] = in[{32 * na} + lane * {nb} + i];
  const {kind}* sums = reinterpret_cast<const {kind}*>(in) + {32 * (na + nb)};
  for (int i = 0; i < {nc}; i++) c[i] = sums[lane * {nc} + i];
  asm volatile("{text}" : {outs} : {ins});
  for (int i = 0; i < {nc}; i++) reinterpret_cast<{kind}*>(out)[lane * {nc} + i] = c[i];
}}
"""


def _wgmma(name: str, n: int, k: int, acc: str, a: str, b: str, mode: int, place: str, words: int) -> str:
    nc = n // 2
    kind, letter = ("float", "f") if acc == "f32" else ("u32", "r")
    leading, stride = OFFSETS[mode]
    high = mode << 62 | (stride >> 4) << 32 | (leading >> 4) << 16
    extra = {"s8": "", "f16": ", 1, 1, 0", "bf16": ", 1, 1, 0"}.get(a, ", 1, 1")
    if place == "ss":
        extra += ", 0" if a in ("f16", "bf16") else ""
    first = "%" + str(nc) if place == "ss" else _list(nc, 4)
    after = nc + (1 if place == "ss" else 4)
    text = (
        "{.reg .pred p; setp.ne.b32 p, 1, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{acc}.{a}.{b}"
        f" {_list(0, nc)}, {first}, %{after}, p{extra};}}"
    )
    outs = ", ".join(f'"+{letter}"(c[{i}])' for i in range(nc))
    sources = '"l"(da)' if place == "ss" else ", ".join(f'"r"(x[{i}])' for i in range(4))
    return f"""
__global__ void {name}(const u32* in, u32* out, int size) {{
  __shared__ __align__(1024) u32 shared[{SHARED_BYTES // 4}];
  in += blockIdx.x * size; out += blockIdx.x * {64 * n}; int t = threadIdx.x;
  for (int i = t; i < {words}; i += 128) shared[i] = in[i];
  u32 x[4]; {kind} c[{nc}];
  for (int i = 0; i < 4; i++) x[i] = in[{words} + t * 4 + i];
  for (int i = 0; i < {nc}; i++) c[i] = reinterpret_cast<const {kind}*>(in)[{words + 512} + t * {nc} + i];
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  u32 start = (u32)__cvta_generic_to_shared(shared);
  uint64_t db = {high}ull | (start >> 4 & 0x3FFF), da = {high}ull | ((start + {A_START}) >> 4 & 0x3FFF);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile("{text}" : {outs} : {sources}, "l"(db));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < {nc}; i++) asm volatile("" : "+{letter}"(c[i]) :: "memory");
  for (int i = 0; i < {nc}; i++) reinterpret_cast<{kind}*>(out)[t * {nc} + i] = c[i];
}}
"""


def _word(name: str, text: str, count: int) -> str:
    letter, cast = ("f", "__uint_as_float") if count < 0 else ("r", "")
    ins = ", ".join(f'"{letter}"({cast}(in[threadIdx.x + {i} * blockDim.x]))' for i in range(abs(count)))
    return f"""
__global__ void {name}(const u32* in, u32* out, int size) {{
  in += blockIdx.x * size; out += blockIdx.x * blockDim.x; u32 d;
  asm volatile("{text}" : "=r"(d) : {ins});
  out[threadIdx.x] = d;
}}
"""


def program() -> str:
    """Return the CUDA program."""
    every = {case.name: case for case in cases()}
    parts = [HEADER, f"#define TRIALS {TRIALS}\n"]
    for shape, acc, a, b in MMA:
        parts.append(_mma(f"mma_{shape}_{acc}_{a}_{b}", shape, acc, a, b))
    for n, k, acc, a, b, mode, place in WGMMA:
        name = f"wgmma_{n}_{k}_{acc}_{a}_{b}_{mode}_{place}"
        words = every[name].inputs.shape[1] - 512 - 64 * n
        parts.append(_wgmma(name, n, k, acc, a, b, mode, place, words))
    for name, (text, count) in WORD_INSTRUCTIONS.items():
        parts.append(_word(f"word_{name}", text, count))
    rows = (
        f'{{"{c.name}", {c.name}, {c.threads}, {c.inputs.shape[1]}, {c.outputs}}}' for c in every.values()
    )
    parts.append(MAIN % ", ".join(rows))
    return "".join(parts)


def main() -> None:
    """Compile, run, save."""
    every = cases()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cases.cu").write_text(program())
        command = ["nvcc", "-O1", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-o"]
        subprocess.run([*command, str(folder / "cases"), str(folder / "cases.cu")], check=True)
        (folder / "in").write_bytes(b"".join(case.inputs.tobytes() for case in every))
        if "--compile-only" in sys.argv:
            return
        done = subprocess.run([str(folder / "cases"), str(folder / "in"), str(folder / "out")], check=False)
        words = np.fromfile(folder / "out", np.uint32)
    results, at = {}, 0
    for case in every:
        size = TRIALS * case.outputs
        results[case.name] = words[at : at + size].reshape(TRIALS, -1)
        at += size
    np.savez_compressed(sys.argv[1], **results)
    print(f"{len(words)} words of {sum(TRIALS * c.outputs for c in every)}", "status", done.returncode)


if __name__ == "__main__":
    main()
