"""CUDA source of the all-reduce over peers' memory: every GPU writes its summand to all others and adds up.

Each 8 bytes that travel hold 4 bytes of data and the number of the call, the epoch: a reader that finds its
epoch has the data too, so no barrier is needed. Halves of the buffer take turns. A block writes a half again
two calls later: it has read the peers' next summands by then, which they send after reading the ones before.
Calls of a group must follow each other on the GPU, as NCCL's must.
"""

from __future__ import annotations

THREADS = 256
"""Of a block; each has 8 bytes of the tensor."""

BLOCKS = 128
"""At most: all of them, of all GPUs, must run at the same time, for they wait for each other."""

PACKET = 16
"""Bytes that 8 bytes of a tensor are while they travel."""

LARGEST = BLOCKS * THREADS * 8
"""Bytes of the largest tensor."""

DTYPES = {
    "float16": ("unsigned short", "half"),
    "bfloat16": ("unsigned short", "brain"),
    "float32": ("unsigned", "single"),
}
"""Type -> the C type that holds its bits, and the suffix of its conversions."""

PRIMITIVES = r"""
#define MACHINE static __device__ __forceinline__
MACHINE void send(u64 to, u64 first, u64 second) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" :: "l"(to), "l"(first), "l"(second) : "memory");
}
MACHINE void look(u64 from, u64& first, u64& second) {
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(first), "=l"(second) : "l"(from) : "memory");
}
MACHINE u32 told(u64 from) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
MACHINE u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
MACHINE void give_up() { __trap(); }
MACHINE void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
MACHINE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
MACHINE float widen_half(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
MACHINE unsigned short narrow_half(float x) {
  unsigned short y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
MACHINE float widen_brain(unsigned short x) { return __uint_as_float((u32)x << 16); }
MACHINE unsigned short narrow_brain(float x) {
  unsigned short y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
MACHINE float widen_single(u32 x) { return __uint_as_float(x); }
MACHINE u32 narrow_single(float x) { return __float_as_uint(x); }
"""
"""Functions of the machine: memory that other GPUs see, time, overlap of launches, conversions. Tests on CPUs
replace them."""

TYPES = "typedef unsigned long long u64;\ntypedef unsigned int u32;\n"

KERNEL = r"""
struct Peers { u64 at[RANKS]; };  // of this rank, and of those after it
union __align__(8) Eight { u32 words[2]; Item items[8 / sizeof(Item)]; };

static __device__ Eight arrived(u64 from, u32 epoch, u64 stop, u64 patience) {
  u64 first, second, began = 0;
  u32 looks = 0;
  for (;;) {
    look(from, first, second);
    if ((u32)(first >> 32) == epoch && (u32)(second >> 32) == epoch) break;
    if (++looks % 1024) continue;
    if (told(stop)) break;
    u64 now = nanoseconds();
    if (!began) began = now;
    if (now - began > patience) give_up();
  }
  Eight found;
  found.words[0] = (u32)first;
  found.words[1] = (u32)second;
  return found;
}

extern "C" __global__ void __launch_bounds__(THREADS) all_reduce(
    const Item* x, Item* y, u32 count, u32 rank, Peers peers, u32* epochs, u64 stop, u64 patience) {
  const u32 each = 8 / sizeof(Item), at = blockIdx.x * THREADS + threadIdx.x, begin = at * each;
  const bool whole = begin + each <= count && (u64)x % 8 == 0;
  let_next_kernel_start();  // every block of this one has a place by then
  wait_for_kernels_before();
  u32 epoch = epochs[blockIdx.x] + 1;
  if (epoch == 0) epoch = 2;  // memory begins as zeros
  if (begin < count) {
    Eight own;
    own.words[0] = own.words[1] = 0;
    if (whole) {
      own = ((const Eight*)x)[at];
    } else {
#pragma unroll
      for (u32 i = 0; i < each; i++) if (begin + i < count) own.items[i] = x[begin + i];
    }
    const u64 half = (u64)(epoch & 1) * RANKS, flag = (u64)epoch << 32;
#pragma unroll
    for (u32 step = 1; step < RANKS; step++)
      send(peers.at[step] + 16 * ((half + rank) * PLACES + at), flag | own.words[0], flag | own.words[1]);
    float sum[each];
#pragma unroll
    for (u32 peer = 0; peer < RANKS; peer++) {  // in the same order on all
      Eight summand = own;
      const u64 place = peers.at[0] + 16 * ((half + peer) * PLACES + at);
      if (peer != rank) summand = arrived(place, epoch, stop, patience);
#pragma unroll
      for (u32 i = 0; i < each; i++) {
        const float value = WIDEN(summand.items[i]);
        sum[i] = peer ? sum[i] + value : value;  // 0 + -0 would be 0
      }
    }
#pragma unroll
    for (u32 i = 0; i < each; i++) own.items[i] = NARROW(sum[i]);
    if (begin + each <= count) {
      ((Eight*)y)[at] = own;
    } else {
#pragma unroll
      for (u32 i = 0; i < each; i++) if (begin + i < count) y[begin + i] = own.items[i];
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) epochs[blockIdx.x] = epoch;
}
"""


def buffer_bytes(ranks: int) -> int:
    """Return the bytes of the memory that each GPU shares with the others."""
    return 2 * ranks * BLOCKS * THREADS * PACKET


def all_reduce_source(dtype: str, ranks: int, primitives: str = PRIMITIVES, threads: int = THREADS) -> str:
    """Return CUDA source of ``all_reduce``: it adds up tensors of all ranks, in float32, in their order."""
    item, kind = DTYPES[dtype]
    facts = {"RANKS": ranks, "THREADS": threads, "PLACES": BLOCKS * threads}
    names = {"WIDEN": f"widen_{kind}", "NARROW": f"narrow_{kind}"}
    defined = "".join(f"#define {name} {value}\n" for name, value in {**facts, **names}.items())
    return f"{TYPES}{defined}typedef {item} Item;\n{primitives}{KERNEL}"
