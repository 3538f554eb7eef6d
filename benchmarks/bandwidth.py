"""Read bandwidth of a GPU: a kernel that loads 16-byte vectors and keeps nothing.

Built with nvcc, which Ladder needs for its own kernels, into a small library that is called
through ctypes, so that launches can be captured in CUDA graphs.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from benchmarks.harness import graph_time_us

SOURCE = r"""
#include <cuda_runtime.h>
#include <stdint.h>

// Every thread keeps eight loads in flight; the sum is stored only if it has an impossible value,
// which the compiler cannot know.
__global__ void __launch_bounds__(512) read_all(const uint4* data, uint64_t count, uint32_t* sink) {
  uint32_t sum = 0;
  const uint64_t stride = (uint64_t)gridDim.x * blockDim.x;
  uint64_t at = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
  for (; at + 7 * stride < count; at += 8 * stride) {
    uint4 part[8];
    #pragma unroll
    for (int i = 0; i < 8; ++i) part[i] = __ldcs(data + at + i * stride);
    #pragma unroll
    for (int i = 0; i < 8; ++i) sum |= part[i].x | part[i].y | part[i].z | part[i].w;
  }
  for (; at < count; at += stride) sum |= data[at].x;
  if (sum == 0x9e3779b9u) *sink = sum;
}

extern "C" int read_bytes(const void* data, uint64_t bytes, void* sink, int blocks, void* stream) {
  read_all<<<blocks, 512, 0, (cudaStream_t)stream>>>((const uint4*)data, bytes / 16, (uint32_t*)sink);
  return (int)cudaGetLastError();
}
"""

BLOCKS_PER_UNIT = 4


@cache
def library() -> ctypes.CDLL:
    """Build and load the kernel."""
    from ladder.lower.cuda.toolkit import nvcc

    folder = Path(tempfile.mkdtemp(prefix="ladder-bandwidth-"))
    source, built = folder / "read.cu", folder / "read.so"
    source.write_text(SOURCE)
    command = [str(nvcc()), "-O3", "-shared", "-Xcompiler", "-fPIC", "-arch=native", "-cudart", "shared"]
    subprocess.run([*command, str(source), "-o", str(built)], check=True, capture_output=True)
    loaded = ctypes.CDLL(str(built))
    loaded.read_bytes.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    return loaded


def read_bandwidth(nbytes: int = 1 << 31) -> float:
    """Return bytes per second at which the GPU reads ``nbytes`` of fresh memory."""
    import torch

    source = torch.empty(2, nbytes // 4, dtype=torch.int32, device="cuda").random_()
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    blocks = BLOCKS_PER_UNIT * torch.cuda.get_device_properties(0).multi_processor_count

    def read(part: torch.Tensor) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        failed = library().read_bytes(part.data_ptr(), nbytes, sink.data_ptr(), blocks, stream)
        if failed:
            raise RuntimeError(f"the read kernel did not start: CUDA error {failed}")

    return nbytes / (graph_time_us([lambda: read(source[0]), lambda: read(source[1])]) * 1e-6)
