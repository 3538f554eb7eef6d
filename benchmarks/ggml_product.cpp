// Products of ggml's quantized weights by float32 rows on its CPU backend, for benchmarks/cpu_peers.py.
#include <cstring>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

struct Product {
  ggml_backend_t backend;
  std::vector<ggml_cgraph*> graphs;  // one for each copy of the weight
  ggml_tensor* result;
};

// The buffer type of that name, in which weights are packed for its kernels; the plain one if there is none.
static ggml_backend_buffer_type_t buffer_type(const char* name) {
  auto device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  auto extras = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(ggml_backend_reg_get_proc_address(
      ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts"));
  for (auto type = extras ? extras(device) : nullptr; type && *type; ++type)
    if (!strcmp(ggml_backend_buft_name(*type), name)) return *type;
  return *name ? nullptr : ggml_backend_cpu_buffer_type();
}

// Memory lives as long as the process. Returns null where this CPU has no such buffer type.
extern "C" Product* ggml_product(const char* type_name, const char* buffer, int64_t n, int64_t k, int64_t m,
                                 int copies, int threads, const float* weight, const float* x) {
  auto where = buffer_type(buffer);
  int type = 0;
  while (type < GGML_TYPE_COUNT && strcmp(ggml_type_name(ggml_type(type)), type_name)) ++type;
  if (!where || type == GGML_TYPE_COUNT) return nullptr;
  auto product = new Product{ggml_backend_cpu_init(), {}, nullptr};
  ggml_backend_cpu_set_n_threads(product->backend, threads);
  std::vector<char> codes(ggml_row_size(ggml_type(type), k) * n);
  ggml_quantize_chunk(ggml_type(type), weight, codes.data(), 0, n, k, nullptr);
  for (int copy = 0; copy < copies; ++copy) {
    auto held = ggml_init({ggml_tensor_overhead(), nullptr, true});
    auto w = ggml_new_tensor_2d(held, ggml_type(type), k, n);
    if (!ggml_backend_alloc_ctx_tensors_from_buft(held, where)) return nullptr;
    ggml_backend_tensor_set(w, codes.data(), 0, codes.size());
    auto context = ggml_init({4 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true});
    auto rows = ggml_new_tensor_2d(context, GGML_TYPE_F32, k, m);
    ggml_set_input(rows);
    auto result = ggml_mul_mat(context, w, rows);
    ggml_set_output(result);
    auto graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, result);
    ggml_gallocr_alloc_graph(ggml_gallocr_new(ggml_backend_cpu_buffer_type()), graph);
    ggml_backend_tensor_set(rows, x, 0, ggml_nbytes(rows));
    product->graphs.push_back(graph);
    if (!copy) product->result = result;
  }
  return product;
}

extern "C" int ggml_product_run(Product* product, int copy) {
  return ggml_backend_graph_compute(product->backend, product->graphs[copy]);
}

extern "C" void ggml_product_result(Product* product, float* y) {
  ggml_backend_tensor_get(product->result, y, 0, ggml_nbytes(product->result));
}
