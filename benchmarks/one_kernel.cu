// The bytes of a decoder layer through dependent launches and through one persistent kernel, for benchmarks/one_kernel.py.
//
// A phase streams rows of UNIT bytes, multiplies them by its input vector (dp4a), and writes a vector that every block
// of the next phase reads whole. All variants compute the same integers; each prints a line of JSON.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define CHECK(call)                                                                    \
  if (cudaError_t error = (call); error != cudaSuccess) {                              \
    fprintf(stderr, "%s (line %d): %s\n", #call, __LINE__, cudaGetErrorString(error)); \
    exit(1);                                                                           \
  }

constexpr int LAYERS = 32, MOST_PHASES = 6;
constexpr int UNIT = 1024, CHUNK_UNITS = 16, CHUNK = UNIT * CHUNK_UNITS;  // a warp's share, and a bulk copy
constexpr int MOST_COLUMNS = 14336, MOST_ROWS = 128, VECTOR = 16384, FIRST = 7, STAGES = 8, SLOTS = 4, THREADS = 512;

enum Sync { COUNTER, NUMBERED, NONE };  // NUMBERED: each word of a vector carries the number of its phase

struct Phase {
  u64 offset;
  int rows, units, columns, norm;  // units of a row, columns of the input, whether it is reduced first
  u32 row_magic, column_magic;     // 2^32 / divisor + 1
};

struct Problem {
  const char* weight;
  u64 layer_bytes;
  Phase phase[MOST_PHASES];
  int phases, dependent, early, prefetched, sync;
  u16* vectors;    // VECTOR halves for the result of each phase
  u64* numbered;   // the same as (number of the phase, two halves)
  u32* counter;
  u32 number;
};

struct Share {  // a block's rows of a phase
  int first, end, units;
  const char* weight;
};

struct Shared {
  uint4 x[MOST_COLUMNS / 8];
  u32 sums[MOST_ROWS], total;
  u64 full[STAGES], empty[STAGES];
};

__device__ Share share_of(const Problem& p, int layer, int at) {
  const Phase& f = p.phase[at];
  const u64 pairs = f.rows / 2;
  const int first = 2 * (pairs * blockIdx.x / gridDim.x), end = 2 * (pairs * (blockIdx.x + 1) / gridDim.x);
  return {first, end, (end - first) * f.units, p.weight + p.layer_bytes * layer + f.offset + u64(first) * f.units * UNIT};
}

__device__ uint4 load(const char* at) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}

__device__ u32 shared_address(const void* at) { return u32(__cvta_generic_to_shared(at)); }
__device__ void sync_threads() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// MORE: logic instructions, in pairs for each word, in place of decoding.
template <int MORE>
__device__ u32 multiply(u32 w, u32 x, u32 sum) {
  sum = __dp4a(w, x, sum);
#pragma unroll
  for (int i = 0; i < MORE; i++) sum ^= (w >> (3 * i + 1)) & (0x0f0f0f0fu << i);
  return sum;
}

template <int MORE>
__device__ u32 multiply(uint4 w, uint4 x, u32 sum) {
  sum = multiply<MORE>(w.x, x.x, sum), sum = multiply<MORE>(w.y, x.y, sum);
  return multiply<MORE>(w.w, x.w, multiply<MORE>(w.z, x.z, sum));
}

template <int MORE>
__device__ void add_unit(Shared& s, const Phase& f, int unit, int first_row, uint4 low, uint4 high, int lane) {
  const u32 global = first_row * f.units + unit, parts = f.columns / 512;
  const uint4* x = s.x + 64 * (global - parts * __umulhi(global, f.column_magic)) + lane;
  const u32 sum = __reduce_add_sync(~0u, multiply<MORE>(low, x[0], multiply<MORE>(high, x[32], 0)));
  if (lane == 0) atomicAdd(&s.sums[f.units == 1 ? unit : __umulhi(unit, f.row_magic)], sum);
}

// Reads the input vector whole, waiting for each word where words are numbered.
__device__ void read_vector(const Problem& p, Shared& s, int from, const Phase& f, u32 number) {
  const int thread = threadIdx.x;
  if (p.sync == NUMBERED && number) {
    const u64* source = p.numbered + from * (VECTOR / 2);
    for (int i = thread; i < f.columns / 4; i += THREADS) {
      u64 a, b;
      do asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(source + 2 * i));
      while (u32(a >> 32) != number || u32(b >> 32) != number);
      reinterpret_cast<uint2*>(s.x)[i] = {u32(a), u32(b)};
    }
  } else {
    auto source = reinterpret_cast<const uint4*>(p.vectors + from * VECTOR);
    for (int i = thread; i < f.columns / 8; i += THREADS) s.x[i] = __ldcg(source + i);
  }
  for (int i = thread; i < MOST_ROWS; i += THREADS) s.sums[i] = 0;
  if (thread == 0) s.total = 0;
  sync_threads();
  if (!f.norm) return;
  u32 sum = 0;
  for (int i = thread; i < f.columns / 8; i += THREADS) sum += s.x[i].x * 3 + s.x[i].y + s.x[i].z + s.x[i].w * 5;
  sum = __reduce_add_sync(~0u, sum);
  if (thread % 32 == 0) atomicAdd(&s.total, sum);
  sync_threads();
  const u32 factor = s.total | 1;
  for (int i = thread; i < f.columns / 8; i += THREADS) {
    const uint4 v = s.x[i];
    s.x[i] = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
  }
  sync_threads();
}

__device__ void write_vector(const Problem& p, Shared& s, int to, const Phase& f, const Share& own, u32 number) {
  sync_threads();
  for (int i = threadIdx.x; 2 * i < own.end - own.first; i += THREADS) {
    u32 pair = 0;
    for (int row = 2 * i; row < 2 * i + 2; row++) {
      const u32 sum = f.units ? s.sums[row] : reinterpret_cast<u16*>(s.x)[(own.first + row) % f.columns] * 2654435761u;
      pair |= ((sum >> 16 ^ sum) & 0xffff) << 16 * (row % 2);
    }
    const int at = own.first / 2 + i;
    if (number) asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p.numbered + to * (VECTOR / 2) + at), "l"(u64(number) << 32 | pair) : "memory");
    else reinterpret_cast<u32*>(p.vectors + to * VECTOR)[at] = pair;
  }
  sync_threads();
}

// ---- A launch for each phase: words through registers.
struct Words {
  uint4 low[SLOTS], high[SLOTS];

  __device__ void fetch(int slot, const Share& own, int unit, int lane) {
    if (unit >= own.units) return;
    const char* at = own.weight + u64(unit) * UNIT + lane * 16;
    low[slot] = load(at), high[slot] = load(at + 512);
  }
};

template <int MORE>
__global__ void __launch_bounds__(THREADS, 2) launched(const __grid_constant__ Problem p, int layer, int at, int from) {
  extern __shared__ __align__(128) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  constexpr int WARPS = THREADS / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (p.dependent) asm volatile("griddepcontrol.launch_dependents;");
  const Share own = share_of(p, layer, at);
  const Phase f = p.phase[at];
  const int bytes = min(own.units * UNIT, p.prefetched / int(gridDim.x) / 128 * 128);
  if (bytes && threadIdx.x == 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(own.weight), "r"(bytes));
  Words words;
  auto fill = [&] {
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++) words.fetch(slot, own, warp + slot * WARPS, lane);
  };
  if (p.early) fill();
  if (p.dependent) asm volatile("griddepcontrol.wait;" ::: "memory");
  if (!p.early) fill();
  read_vector(p, s, from, f, 0);
  for (int first = warp; first < own.units; first += SLOTS * WARPS)
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++) {
      const int unit = first + slot * WARPS;
      if (unit >= own.units) continue;
      const uint4 low = words.low[slot], high = words.high[slot];
      words.fetch(slot, own, unit + SLOTS * WARPS, lane);
      add_unit<MORE>(s, f, unit, own.first, low, high, lane);
    }
  write_vector(p, s, at, f, own, 0);
}

// ---- One kernel: one more warp fills a ring in shared memory, across phases.
__device__ void wait_barrier(u64* barrier, u32 parity) {
  u32 done = 0;
  while (!done)
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
}

struct Turn {  // a place in the ring, and how often it came round
  int stage = 0;
  u32 parity = 0;
  __device__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

__device__ void copy_weights(const Problem& p, Shared& s, char* ring) {
  Turn turn;
  int copied = 0;
  for (int step = 0; step < LAYERS * p.phases; step++) {
    const Share own = share_of(p, step / p.phases, step % p.phases);
    for (int at = 0; at < own.units * UNIT; at += CHUNK, turn.next(), copied++) {
      if (copied >= STAGES) wait_barrier(&s.empty[turn.stage], turn.parity ^ 1);
      const int bytes = min(CHUNK, own.units * UNIT - at);
      const u32 full = shared_address(&s.full[turn.stage]);
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full), "r"(bytes) : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                   ::"r"(shared_address(ring + turn.stage * CHUNK)), "l"(own.weight + at), "r"(bytes), "r"(full) : "memory");
    }
  }
}

template <int MORE>
__global__ void __launch_bounds__(THREADS + 32, 1) persistent(Problem p) {
  extern __shared__ __align__(128) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  char* ring = memory + (sizeof(Shared) + 127) / 128 * 128;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  if (thread == 0) {
    for (int i = 0; i < STAGES; i++) {
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&s.full[i])));
      asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&s.empty[i])), "n"(THREADS / 32));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (warp == THREADS / 32) {
    if (lane == 0) copy_weights(p, s, ring);
    return;
  }
  Turn turn;
  const int steps = LAYERS * p.phases;
  for (int step = 0; step < steps; step++) {
    const int at = step % p.phases, from = step ? (step - 1) % p.phases : FIRST;
    const Phase f = p.phase[at];
    const Share own = share_of(p, step / p.phases, at);
    const u32 number = p.number + step;  // phases that have ended before, in all launches
    if (p.sync == COUNTER && step) {
      u32 seen = 0;
      if (thread == 0)
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(p.counter) : "memory");
        while (int(seen - number * gridDim.x) < 0);
      sync_threads();
    }
    read_vector(p, s, from, f, step ? number : 0);
    for (int chunk = 0; chunk < own.units; chunk += CHUNK_UNITS, turn.next()) {
      wait_barrier(&s.full[turn.stage], turn.parity);
      for (int i = warp; i < CHUNK_UNITS && chunk + i < own.units; i += THREADS / 32) {
        auto words = reinterpret_cast<const uint4*>(ring + turn.stage * CHUNK + i * UNIT) + lane;
        add_unit<MORE>(s, f, chunk + i, own.first, words[0], words[32], lane);
      }
      __syncwarp();
      if (lane == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&s.empty[turn.stage])) : "memory");
    }
    const bool last = step + 1 == steps;
    write_vector(p, s, at, f, own, p.sync == NUMBERED && !last ? number + 1 : 0);
    if (p.sync == COUNTER && !last && thread == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p.counter) : "memory");
  }
}

// ---- What one kernel reads that does nothing else.
__global__ void __launch_bounds__(512, 2) read_all(const char* weight, u64 bytes, u32* out) {
  u32 sum = 0;
  const u64 step = u64(gridDim.x) * 512 * 16;
  for (u64 at = (u64(blockIdx.x) * 512 + threadIdx.x) * 16; at + 7 * step < bytes; at += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = load(weight + at + i * step);
#pragma unroll
    for (int i = 0; i < 8; i++) sum ^= v[i].x + v[i].y + v[i].z + v[i].w;
  }
  if (sum == 0x12345) *out = sum;
}

__global__ void fill(u32* words, u64 count) {
  for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += u64(gridDim.x) * blockDim.x) {
    u32 v = u32(i) * 2654435761u + u32(i >> 32) * 40503u;
    v = (v ^ v >> 15) * 2246822519u;
    words[i] = v ^ v >> 13;
  }
}

cudaStream_t stream;
int multiprocessors;

double median_us(const std::function<void()>& once, int repeats = 8, int rounds = 7) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  once(), once();
  std::vector<double> found;
  for (int round = 0; round < rounds; round++) {
    CHECK(cudaEventRecord(begin, stream));
    for (int i = 0; i < repeats; i++) once();
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    found.push_back(ms * 1e3 / repeats);
  }
  std::sort(found.begin(), found.end());
  return found[rounds / 2];
}

struct Bench {
  Problem p;
  std::string name;
  std::vector<u16> wanted;

  void reset() {
    std::vector<u16> x(VECTOR);
    for (int i = 0; i < VECTOR; i++) x[i] = i * 31 + 7;
    CHECK(cudaMemset(p.vectors, 0, 8 * VECTOR * 2));
    CHECK(cudaMemset(p.numbered, 0, 8 * VECTOR * 4));
    CHECK(cudaMemset(p.counter, 0, 4));
    CHECK(cudaMemcpy(p.vectors + FIRST * VECTOR, x.data(), VECTOR * 2, cudaMemcpyHostToDevice));
    CHECK(cudaDeviceSynchronize());
  }

  void report(const char* variant, double us, bool checked) {
    std::vector<u16> found(4096);
    CHECK(cudaMemcpy(found.data(), p.vectors + (p.phases - 1) * VECTOR, 8192, cudaMemcpyDeviceToHost));
    if (wanted.empty()) wanted = found;
    const char* check = !checked ? "not checked" : found == wanted ? "equal" : "different";
    printf("{\"problem\": \"%s\", \"variant\": \"%s\", \"us_per_layer\": %.2f, \"check\": \"%s\"}\n", name.c_str(), variant, us / LAYERS, check);
    fflush(stdout);
  }

  template <int MORE>
  void launches(const char* variant, int dependent, int early, int prefetched) {
    Problem q = p;
    q.dependent = dependent, q.early = early, q.prefetched = prefetched;
    CHECK(cudaFuncSetAttribute(launched<MORE>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
    reset();
    cudaGraph_t graph;
    cudaGraphExec_t whole;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int step = 0; step < LAYERS * p.phases; step++) {
      cudaLaunchAttribute attribute = {};
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
      cudaLaunchConfig_t config = {};
      config.gridDim = 2 * multiprocessors, config.blockDim = THREADS, config.dynamicSmemBytes = sizeof(Shared);
      config.stream = stream, config.attrs = &attribute, config.numAttrs = dependent;
      const int at = step % p.phases, from = step ? (step - 1) % p.phases : FIRST;
      CHECK(cudaLaunchKernelEx(&config, launched<MORE>, q, step / p.phases, at, from));
    }
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&whole, graph, 0));
    report(variant, median_us([&] { CHECK(cudaGraphLaunch(whole, stream)); }), true);
    CHECK(cudaGraphExecDestroy(whole));
    CHECK(cudaGraphDestroy(graph));
  }

  template <int MORE>
  void one_kernel(const char* variant, Sync sync) {
    Problem q = p;
    q.sync = sync, q.number = 0;
    const int bytes = (sizeof(Shared) + 127) / 128 * 128 + STAGES * CHUNK;
    CHECK(cudaFuncSetAttribute(persistent<MORE>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    reset();
    void* arguments[] = {&q};
    auto once = [&] {
      CHECK(cudaLaunchCooperativeKernel(reinterpret_cast<void*>(persistent<MORE>), multiprocessors, THREADS + 32, arguments, bytes, stream));
      q.number += LAYERS * p.phases - 1;  // the last phase of a launch tells nobody
    };
    report(variant, median_us(once), sync != NONE);
  }

  template <int MORE>
  void run() {
    launches<MORE>("launches", 0, 0, 0);
    launches<MORE>("dependent launches, 4 MB into L2 before the wait", 1, 0, 4 << 20);
    launches<MORE>("dependent launches, first words in registers before the wait", 1, 1, 0);
    one_kernel<MORE>("one kernel, a counter", COUNTER);
    one_kernel<MORE>("one kernel, numbered results", NUMBERED);
    one_kernel<MORE>("one kernel, no dependence (wrong results)", NONE);
  }
};

int main() {
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  multiprocessors = device.multiProcessorCount;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const Phase table[] = {{0, 6144, 2, 4096, 1}, {0, 6144, 0, 6144, 0}, {0, 4096, 1, 6144, 0},
                         {0, 4096, 2, 4096, 0}, {0, 14336, 4, 4096, 1}, {0, 4096, 7, 14336, 0}};
  Problem p = {};
  for (Phase f : table) {
    f.offset = p.layer_bytes;
    f.row_magic = f.units > 1 ? u32((1ull << 32) / f.units + 1) : 0, f.column_magic = u32((1ull << 32) / (f.columns / 512) + 1);
    p.phase[p.phases++] = f, p.layer_bytes += u64(f.rows) * f.units * UNIT;
  }
  char* weight;
  const u64 bytes = p.layer_bytes * LAYERS;
  CHECK(cudaMalloc(&weight, bytes));
  CHECK(cudaMalloc(&p.vectors, 8 * VECTOR * 2));
  CHECK(cudaMalloc(&p.numbered, 8 * VECTOR * 4));
  CHECK(cudaMalloc(&p.counter, 4));
  p.weight = weight;
  fill<<<2048, 256>>>(reinterpret_cast<u32*>(weight), bytes / 4);
  CHECK(cudaDeviceSynchronize());
  const double read = median_us([&] { read_all<<<multiprocessors * 4, 512, 0, stream>>>(weight, bytes, p.counter); }, 3);
  printf("{\"device\": \"%s\", \"layer_bytes\": %llu, \"read_us_per_layer\": %.2f}\n", device.name, p.layer_bytes, read / LAYERS);
  Problem five = p, empty = p;
  five.phases = 5, std::copy(p.phase + 2, p.phase + 6, five.phase + 1);
  for (Phase& f : empty.phase) f.units = 0;
  Bench{p, "six phases"}.run<0>();
  Bench{five, "five phases"}.run<0>();
  Bench{p, "six phases, more work"}.run<4>();
  Bench{empty, "six phases without bytes"}.run<0>();
}
