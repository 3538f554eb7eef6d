// Runs one CUDA block on the host: a fiber per thread, warp collectives by the PTX ISA's own
// fragment tables (independent of the compiler's index functions), and copies that land only
// when they are waited for. Included after the CUDA headers and before the kernel.
#pragma once
#include <ucontext.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using std::exp;
using std::erf;
typedef unsigned char uchar;
static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }
static float min(float a, float b) { return a < b ? a : b; }
static float max(float a, float b) { return a > b ? a : b; }
static uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
struct Index3 { int x, y, z; };
struct Copy { void* to; const void* from; int bytes; };
struct Warp { int arrived = 0, generation = 0; uint32_t in[32][32]; uint32_t out[32][16]; const void* address[32]; };
struct Fiber {
  ucontext_t context; std::vector<char> stack; bool done = false; int id = 0, rank = 0, cluster_phase = 0;
  std::vector<Copy> open; std::vector<std::vector<Copy>> groups;
};
struct Block { std::vector<uchar> memory; uchar* shared; int arrived = 0, generation = 0; };
static ucontext_t emu_main;
static std::vector<Block> emu_blocks;  // of one cluster
static std::vector<Fiber> emu_fibers;
static std::vector<Warp> emu_warps;
static Fiber* emu_now;
static uchar* emu_shared;
static size_t emu_shared_bytes;
static Index3 emu_block;
static int emu_threads, emu_cluster_arrived, emu_cluster_generation;
static bool emu_progress, emu_eager;
static void (*emu_kernel)();
struct EmuThread { static int get() { return emu_now->id; } };
#define threadIdx (Index3{EmuThread::get(), 0, 0})
#define blockIdx emu_block

static void emu_fail(const char* why) { fprintf(stderr, "emulator: %s\n", why); abort(); }
static void emu_yield() { swapcontext(&emu_now->context, &emu_main); }
static void emu_block_sync() {
  Block& block = emu_blocks[emu_now->rank];
  int mine = block.generation;
  emu_progress = true;
  if (++block.arrived == emu_threads) { block.arrived = 0; block.generation++; return; }
  while (block.generation == mine) emu_yield();
}
static void emu_cluster_arrive() {
  emu_now->cluster_phase = emu_cluster_generation;
  emu_progress = true;
  if (++emu_cluster_arrived == emu_threads * (int)emu_blocks.size()) { emu_cluster_arrived = 0; emu_cluster_generation++; }
}
static void emu_cluster_wait() { while (emu_cluster_generation == emu_now->cluster_phase) emu_yield(); }
static Warp& emu_warp() { return emu_warps[(emu_now->rank * emu_threads + emu_now->id) / 32]; }
template <class F> static void emu_collective(F compute) {
  Warp& warp = emu_warp();
  int mine = warp.generation;
  emu_progress = true;
  if (++warp.arrived == 32) { compute(warp); warp.arrived = 0; warp.generation++; return; }
  while (warp.generation == mine) emu_yield();
}
static int emu_lane() { return emu_now->id % 32; }
// Addresses of another block's shared memory carry its rank + 1 above bit 24.
static uchar* emu_at(uint32_t offset, size_t bytes) {
  uchar* base = offset >> 24 ? emu_blocks[(offset >> 24) - 1].shared : emu_shared;
  offset &= 0xffffff;
  if (offset + bytes > emu_shared_bytes) emu_fail("shared access out of bounds");
  if (offset % bytes) emu_fail("misaligned shared access");
  return base + offset;
}
static void ptx_mapa(uint32_t& d, uint32_t offset, int rank) { d = offset | (uint32_t)(rank + 1) << 24; }
template <class T> static const T* emu_at(const T* p, size_t bytes) {
  if ((size_t)p % bytes) emu_fail("misaligned global access");
  return p;
}
static uint32_t emu_offset(const void* p) { return (uint32_t)((const uchar*)p - emu_shared); }
#define __cvta_generic_to_shared emu_offset
static const void* __cvta_shared_to_generic(size_t at) { return emu_at((uint32_t)at, 4); }

// ---- loads, stores, copies -------------------------------------------------------------------
template <class P> static void ptx_ld1(uint32_t& a, P p) { memcpy(&a, emu_at(p, 4), 4); }
template <class P> static void ptx_ld2(uint32_t& a, uint32_t& b, P p) {
  uint32_t v[2]; memcpy(v, emu_at(p, 8), 8); a = v[0]; b = v[1];
}
template <class P> static void ptx_ld4(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, P p) {
  uint32_t v[4]; memcpy(v, emu_at(p, 16), 16); a = v[0]; b = v[1]; c = v[2]; d = v[3];
}
static void ptx_st4(uint32_t p, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  uint32_t v[4] = {a, b, c, d}; memcpy(emu_at(p, 16), v, 16);
}
static void ptx_nothing() {}
static void ptx_move(uint32_t& d, uint32_t a) { d = a; }
template <class P> static void ptx_gst2(P p, uint32_t a, uint32_t b) {
  uint32_t v[2] = {a, b}; memcpy((void*)emu_at(p, 8), v, 8);
}
static void emu_land(const Copy& c) {
  memset(c.to, 0, 16);
  if (c.bytes) memcpy(c.to, c.from, c.bytes);
}
static void ptx_cp_async(uint32_t to, const void* from, int size, int bytes = 16) {
  if (size != 16) emu_fail("cp.async of another size");
  if ((size_t)from % 16) emu_fail("misaligned cp.async");
  Copy copy{emu_at(to, 16), from, bytes};
  if (emu_eager) emu_land(copy); else emu_now->open.push_back(copy);
}
static void ptx_commit() { emu_now->groups.push_back(emu_now->open); emu_now->open.clear(); }
static void ptx_wait(int pending) {
  auto& groups = emu_now->groups;
  while ((int)groups.size() > pending) {
    for (auto& copy : groups.front()) emu_land(copy);
    groups.erase(groups.begin());
  }
}

// ---- warp collectives ------------------------------------------------------------------------
static void ptx_ldmatrix4(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t p) {
  int lane = emu_lane();
  emu_warp().address[lane] = emu_at(p, 16);
  emu_collective([](Warp& w) {
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < 4; i++) memcpy(&w.out[l][i], (const uchar*)w.address[8 * i + l / 4] + l % 4 * 4, 4);
  });
  uint32_t* r = emu_warp().out[lane]; a = r[0]; b = r[1]; c = r[2]; d = r[3];
}
template <class T> static T __shfl_xor_sync(unsigned, T value, int distance, int = 32) {
  int lane = emu_lane();
  memcpy(&emu_warp().in[lane][0], &value, 4);
  emu_collective([=](Warp& w) { for (int l = 0; l < 32; l++) w.out[l][0] = w.in[l ^ distance][0]; });
  memcpy(&value, &emu_warp().out[lane][0], 4);
  return value;
}
template <class T> static T __shfl_sync(unsigned, T value, int source, int = 32) {
  int lane = emu_lane();
  memcpy(&emu_warp().in[lane][0], &value, 4);
  emu_warp().in[lane][1] = source % 32;
  emu_collective([](Warp& w) { for (int l = 0; l < 32; l++) w.out[l][0] = w.in[w.in[l][1]][0]; });
  memcpy(&value, &emu_warp().out[lane][0], 4);
  return value;
}

struct F16 { static double at(const uint32_t* r, int e) { __half_raw h; h.x = r[e / 2] >> (e % 2 * 16); return __half2float(__half(h)); } enum { lanes = 2 }; };
struct BF16 { static double at(const uint32_t* r, int e) { uint32_t u = (r[e / 2] >> (e % 2 * 16)) << 16; float f; memcpy(&f, &u, 4); return f; } enum { lanes = 2 }; };
struct S8 { static double at(const uint32_t* r, int e) { return (int8_t)(r[e / 4] >> (e % 4 * 8)); } enum { lanes = 4 }; };
struct U8 { static double at(const uint32_t* r, int e) { return (uint8_t)(r[e / 4] >> (e % 4 * 8)); } enum { lanes = 4 }; };
template <__nv_fp8_interpretation_t F> struct FP8 {
  static double at(const uint32_t* r, int e) { return __half2float(__half(__nv_cvt_fp8_to_halfraw((uint8_t)(r[e / 4] >> (e % 4 * 8)), F))); }
  enum { lanes = 4 };
};
typedef FP8<__NV_E4M3> E4M3;
typedef FP8<__NV_E5M2> E5M2;

static float emu_bits_to_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static uint32_t emu_float_to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
template <class C> static double emu_load(uint32_t u) { return std::is_same<C, float>::value ? emu_bits_to_float(u) : (double)(int32_t)u; }
template <class C> static uint32_t emu_store(double v) { return std::is_same<C, float>::value ? emu_float_to_bits((float)v) : (uint32_t)(int64_t)v; }

// PTX ISA "Matrix fragments for mma.m16n8k8 / m16n8k16 / m16n8k32 / m8n8k16": element i of A of lane
// l is row l/4 (+8), columns c*lanes + .. (+8 bytes*2); written out as the ISA's tables state them.
template <class A, class B, class C, int M, int K>
static void emu_mma(Warp& w, int nc, int na, int nb) {
  static double a[16][32], b[32][8];
  int per = A::lanes;
  for (int l = 0; l < 32; l++) {
    for (int i = 0; i < na * per; i++) {
      int reg = i / per, row, col = l % 4 * per + i % per;
      if (M == 8) row = l / 4;
      else { row = l / 4 + (reg % 2 ? 8 : 0); col += reg / 2 * 4 * per; }
      a[row][col] = A::at(w.in[l] + nc, i);
    }
    for (int i = 0; i < nb * per; i++) b[l % 4 * per + i % per + i / per * 4 * per][l / 4] = B::at(w.in[l] + nc + na, i);
  }
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < nc; i++) {
      int row = l / 4 + (i / 2) * 8, col = l % 4 * 2 + i % 2;
      double sum = emu_load<C>(w.in[l][i]);
      for (int k = 0; k < K; k++) sum += a[row][k] * b[k][col];
      w.out[l][i] = emu_store<C>(sum);
    }
}
// PTX ISA "Matrix fragments for mma.m8n8k4 with .f16": four quad-pairs, row-major A, column-major B.
static void emu_mma_884(Warp& w) {
  for (int p = 0; p < 4; p++) {
    double a[8][4], b[4][8];
    for (int l = 0; l < 32; l++) {
      if (l % 16 / 4 != p) continue;
      for (int i = 0; i < 4; i++) {
        a[l < 16 ? l % 4 : l % 4 + 4][i] = F16::at(w.in[l] + 8, i);
        b[i][l < 16 ? l % 4 : l % 4 + 4] = F16::at(w.in[l] + 10, i);
      }
    }
    for (int l = 0; l < 32; l++) {
      if (l % 16 / 4 != p) continue;
      for (int i = 0; i < 8; i++) {
        int x = (l & 1) + (i & 2), row = l < 16 ? x : x + 4, col = (i & 4) + (l & 2) + (i & 1);
        double sum = emu_bits_to_float(w.in[l][i]);
        for (int k = 0; k < 4; k++) sum += a[row][k] * b[k][col];
        w.out[l][i] = emu_float_to_bits((float)sum);
      }
    }
  }
}
template <class V> static uint32_t emu_raw(V v) { uint32_t u; memcpy(&u, &v, 4); return u; }
template <class C, class Compute> static void emu_mma_call(std::vector<C*> d, std::vector<uint32_t> in, Compute compute) {
  int lane = emu_lane();
  for (size_t i = 0; i < in.size(); i++) emu_warp().in[lane][i] = in[i];
  emu_collective(compute);
  for (size_t i = 0; i < d.size(); i++) memcpy(d[i], &emu_warp().out[lane][i], 4);
}
#define EMU_R(x) emu_raw(x)
template <class A, class B, class C, int M, int K, class D>
static void ptx_mma4(D& d0, D& d1, D& d2, D& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, D c0, D c1, D c2, D c3) {
  emu_mma_call<D>({&d0, &d1, &d2, &d3}, {EMU_R(c0), EMU_R(c1), EMU_R(c2), EMU_R(c3), a0, a1, a2, a3, b0, b1}, [](Warp& w) { emu_mma<A, B, C, M, K>(w, 4, 4, 2); });
}
template <class A, class B, class C, int M, int K, class D>
static void ptx_mma2(D& d0, D& d1, D& d2, D& d3, uint32_t a0, uint32_t a1, uint32_t b0, D c0, D c1, D c2, D c3) {
  emu_mma_call<D>({&d0, &d1, &d2, &d3}, {EMU_R(c0), EMU_R(c1), EMU_R(c2), EMU_R(c3), a0, a1, b0}, [](Warp& w) { emu_mma<A, B, C, M, K>(w, 4, 2, 1); });
}
template <class A, class B, class C, int M, int K, class D>
static void ptx_mma1(D& d0, D& d1, uint32_t a0, uint32_t b0, D c0, D c1) {
  emu_mma_call<D>({&d0, &d1}, {EMU_R(c0), EMU_R(c1), a0, b0}, [](Warp& w) { emu_mma<A, B, C, M, K>(w, 2, 1, 1); });
}
static void ptx_mma884(float& d0, float& d1, float& d2, float& d3, float& d4, float& d5, float& d6, float& d7, uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3, float c4, float c5, float c6, float c7) {
  emu_mma_call<float>({&d0, &d1, &d2, &d3, &d4, &d5, &d6, &d7}, {EMU_R(c0), EMU_R(c1), EMU_R(c2), EMU_R(c3), EMU_R(c4), EMU_R(c5), EMU_R(c6), EMU_R(c7), a0, a1, b0, b1}, emu_mma_884);
}

// ---- arithmetic of decoders ------------------------------------------------------------------
static void ptx_lop3(uint32_t& d, uint32_t a, uint32_t b, uint32_t c, int table) {
  d = 0;
  for (int i = 0; i < 8; i++)
    if (table >> i & 1) d |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
}
static void ptx_dp4a(uint32_t& d, uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
  d = c;
}
static void ptx_prmt(uint32_t& d, uint32_t a, uint32_t b, uint32_t s) {
  uint64_t bytes = (uint64_t)b << 32 | a;
  d = 0;
  for (int i = 0; i < 4; i++) {
    int n = s >> (4 * i) & 15;
    uint32_t v = bytes >> (8 * (n & 7)) & 255;
    if (n & 8) v = v & 128 ? 255 : 0;
    d |= v << (8 * i);
  }
}

template <class H> struct Half;
template <> struct Half<__half> {
  static double get(uint16_t u) { __half_raw h; h.x = u; return __half2float(__half(h)); }
  static uint16_t put(double v) { return ((__half_raw)__double2half(v)).x; }
};
template <> struct Half<__nv_bfloat16> {
  static double get(uint16_t u) { return emu_bits_to_float((uint32_t)u << 16); }
  static uint16_t put(double v) { return ((__nv_bfloat16_raw)__double2bfloat16(v)).x; }
};
template <class H, class F> static uint32_t emu_each(F f) {
  return Half<H>::put(f(0)) | (uint32_t)Half<H>::put(f(16)) << 16;
}
template <class H> static double emu_half(uint32_t u, int shift) { return Half<H>::get((uint16_t)(u >> shift)); }
template <class H> static void ptx_sub2(uint32_t& d, uint32_t a, uint32_t b) {
  d = emu_each<H>([=](int s) { return emu_half<H>(a, s) - emu_half<H>(b, s); });
}
template <class H> static void ptx_mul2(uint32_t& d, uint32_t a, uint32_t b) {
  d = emu_each<H>([=](int s) { return emu_half<H>(a, s) * emu_half<H>(b, s); });
}
// a * b + c, such that rounding it to 16 bits rounds once: a tie that what was lost would break is moved off.
static double emu_fma(double a, double b, double c) {
  double product = a * b, sum = product + c, part = sum - product;  // the product is exact
  double lost = (product - (sum - part)) + (c - part);
  return std::isfinite(sum) && lost != 0 && (double)(float)sum == sum
      ? std::nextafter(sum, lost > 0 ? INFINITY : -INFINITY) : sum;
}
template <class H> static void ptx_fma2(uint32_t& d, uint32_t a, uint32_t b, uint32_t c) {
  d = emu_each<H>([=](int s) { return emu_fma(emu_half<H>(a, s), emu_half<H>(b, s), emu_half<H>(c, s)); });
}
template <__nv_fp8_interpretation_t F> static void ptx_narrow(uint16_t& d, uint32_t a) {
  uint32_t low = __nv_cvt_double_to_fp8(emu_half<__half>(a, 0), __NV_SATFINITE, F);
  uint32_t high = __nv_cvt_double_to_fp8(emu_half<__half>(a, 16), __NV_SATFINITE, F);
  d = (uint16_t)(low | high << 8);
}
template <__nv_fp8_interpretation_t F> static void ptx_narrow_pair(uint16_t& d, float high, float low) {
  d = (uint16_t)(__nv_cvt_float_to_fp8(low, __NV_SATFINITE, F) | __nv_cvt_float_to_fp8(high, __NV_SATFINITE, F) << 8);
}
static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t s) { uint32_t d; ptx_prmt(d, a, b, s & 0x7777); return d; }
static uint32_t __vmaxu2(uint32_t a, uint32_t b) { return max(a & 0xffff, b & 0xffff) | max(a >> 16, b >> 16) << 16; }
static int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 32; i += 8) sum += (int8_t)(a >> i) * (int8_t)(b >> i);
  return sum;
}
static float __fmul_rn(float a, float b) { return a * b; }
static float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
static int __float2int_rn(float v) {
  return std::isnan(v) ? 0 : v >= 0x1p31f ? INT32_MAX : v < -0x1p31f ? INT32_MIN : (int)std::nearbyint(v);
}
static uint32_t __float_as_uint(float v) { return emu_float_to_bits(v); }
static float __uint_as_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
static void ptx_halves(uint32_t& d, float high, float low) {
  __half pair[2] = {__float2half_rn(low), __float2half_rn(high)};
  memcpy(&d, pair, 4);
}
static void ptx_join(uint32_t& d, uint16_t low, uint16_t high) { d = low | (uint32_t)high << 16; }

// ---- the block, or the blocks of a cluster ---------------------------------------------------
static void emu_entry() { emu_kernel(); emu_now->done = true; emu_progress = true; emu_yield(); }
static void emu_start(Fiber& f, int rank, int id) {
  f.stack.resize(96 << 10); f.done = false; f.rank = rank; f.id = id; f.open.clear(); f.groups.clear();
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack.data(); f.context.uc_stack.ss_size = f.stack.size(); f.context.uc_link = &emu_main;
  makecontext(&f.context, emu_entry, 0);
}
static void emu_run_cluster(int first, int y, int blocks, int threads, size_t shared, bool eager, bool reverse) {
  emu_shared_bytes = shared; emu_threads = threads; emu_eager = eager;
  emu_cluster_arrived = emu_cluster_generation = 0;
  emu_blocks.assign(blocks, Block());
  for (auto& block : emu_blocks) {
    block.memory.assign(shared + 1024, 0xff);
    block.shared = (uchar*)(((size_t)block.memory.data() + 1023) / 1024 * 1024);
  }
  emu_warps.assign(blocks * threads / 32, Warp());
  emu_fibers.resize(blocks * threads);
  for (int i = 0; i < blocks * threads; i++) emu_start(emu_fibers[i], i / threads, i % threads);
  // One warp runs as far as it can before the next starts, to expose missing barriers.
  for (int left = blocks * threads, warps = left / 32; left > 0;) {
    bool moved = false;
    for (int k = 0; k < warps; k++) {
      int warp = reverse ? warps - 1 - k : k;
      do {
        emu_progress = false;
        for (int l = 0; l < 32; l++) {
          Fiber& f = emu_fibers[warp * 32 + l];
          if (f.done) continue;
          emu_now = &f;
          emu_shared = emu_blocks[f.rank].shared;
          emu_block = Index3{first + f.rank, y, 0};
          swapcontext(&emu_main, &f.context);
          if (f.done) left--;
        }
        moved |= emu_progress;
      } while (emu_progress);
    }
    if (!moved && left) emu_fail("deadlock: a barrier or collective is not reached by all threads");
  }
}
