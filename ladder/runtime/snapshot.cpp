// Whether tensors are what they were: one pass over what torch keeps of each. `snapshot.py` builds and calls it.
#include <Python.h>

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace {

constexpr uint32_t UNCOUNTED = 0;

struct Facts {
  PyObject* object;
  const PyTypeObject* kind;
  const c10::TensorImpl* impl;
  uint64_t keys;  // conjugation, inference, sparseness and what else dispatch depends on
  const void* data;
  size_t bytes;  // of the storage
  int64_t offset;
  size_t extents;  // where sizes begin, then strides
  size_t rank;
  caffe2::TypeMeta type;
  c10::Device device;
  uint32_t version;
  bool gradient;
};

struct Snapshot {
  bool versions;
  std::vector<Facts> tensors;
  std::vector<int64_t> extents;
};

const c10::TensorImpl* impl_of(PyObject* tensor) {
  return THPVariable_Unpack(tensor).unsafeGetTensorImpl();
}

const c10::StorageImpl& storage_of(const c10::TensorImpl& tensor) {
  return *tensor.unsafe_storage().unsafeGetStorageImpl();
}

uint32_t version_of(const c10::TensorImpl& tensor) {
  const auto& counter = tensor.version_counter();
  return counter.enabled() ? counter.current_version() : UNCOUNTED;
}

void add(Snapshot& snapshot, PyObject* object, const c10::TensorImpl& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  snapshot.tensors.push_back(
      {object, Py_TYPE(object), &tensor, tensor.key_set().raw_repr(), storage_of(tensor).data(),
       storage_of(tensor).nbytes(), tensor.storage_offset(),
       snapshot.extents.size(), sizes.size(), tensor.dtype(), tensor.device(),
       snapshot.versions ? version_of(tensor) : UNCOUNTED, tensor.requires_grad()});
  snapshot.extents.insert(snapshot.extents.end(), sizes.begin(), sizes.end());
  snapshot.extents.insert(snapshot.extents.end(), strides.begin(), strides.end());
}

bool holds(const Snapshot& snapshot, const Facts& was) {
  if (Py_TYPE(was.object) != was.kind || impl_of(was.object) != was.impl) return false;
  const auto& tensor = *was.impl;
  if (tensor.key_set().raw_repr() != was.keys || tensor.dtype() != was.type || tensor.device() != was.device ||
      tensor.requires_grad() != was.gradient || tensor.storage_offset() != was.offset)
    return false;
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const auto* extents = snapshot.extents.data() + was.extents;
  return sizes.size() == was.rank && std::equal(sizes.begin(), sizes.end(), extents) &&
      std::equal(strides.begin(), strides.end(), extents + was.rank) && storage_of(tensor).data() == was.data &&
      storage_of(tensor).nbytes() == was.bytes && (!snapshot.versions || version_of(tensor) == was.version);
}

}  // namespace

extern "C" {

// Takes a snapshot of a list of tensors. Returns null where one has no storage.
void* ladder_snapshot(PyObject* list, int versions) try {
  auto snapshot = std::make_unique<Snapshot>(Snapshot{versions != 0, {}, {}});
  const auto count = PyList_Size(list);
  for (Py_ssize_t at = 0; at < count; ++at) {
    auto* object = PyList_GetItem(list, at);
    if (!THPVariable_Check(object) || !impl_of(object)->has_storage()) return nullptr;
    add(*snapshot, object, *impl_of(object));
  }
  return snapshot.release();
} catch (...) {
  return nullptr;
}

// Tells whether all tensors of a snapshot are what they were.
int ladder_holds(const void* address) try {
  const auto& snapshot = *static_cast<const Snapshot*>(address);
  return std::all_of(snapshot.tensors.begin(), snapshot.tensors.end(), [&](const Facts& was) {
    return holds(snapshot, was);
  });
} catch (...) {
  return 0;
}

void ladder_release(void* snapshot) { delete static_cast<Snapshot*>(snapshot); }

#if PY_VERSION_HEX < 0x030C0000
// Copies the version of each dictionary of a tuple, or tells whether all are what was copied.
void ladder_copy_versions(PyObject* tuple, uint64_t* copied) {
  const auto count = PyTuple_Size(tuple);
  for (Py_ssize_t at = 0; at < count; ++at)
    copied[at] = reinterpret_cast<PyDictObject*>(PyTuple_GetItem(tuple, at))->ma_version_tag;
}
int ladder_same_versions(PyObject* tuple, const uint64_t* copied) {
  const auto count = PyTuple_Size(tuple);
  for (Py_ssize_t at = 0; at < count; ++at)
    if (reinterpret_cast<PyDictObject*>(PyTuple_GetItem(tuple, at))->ma_version_tag != copied[at]) return 0;
  return 1;
}
#endif

// Tells whether two lists, or two tuples, hold the same objects.
int ladder_identical(PyObject* found, PyObject* known) {
  const auto count = PySequence_Fast_GET_SIZE(known);
  if (PySequence_Fast_GET_SIZE(found) != count) return 0;
  return std::equal(PySequence_Fast_ITEMS(found), PySequence_Fast_ITEMS(found) + count, PySequence_Fast_ITEMS(known));
}
}
