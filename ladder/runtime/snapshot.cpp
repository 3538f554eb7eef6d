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

struct Known {
  PyObject **next, **end;
};

int is_another(PyObject* object, void* to) {
  auto& known = *static_cast<Known*>(to);
  return known.next == known.end || *known.next++ != object;
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

// Tells whether a list, or a tuple, holds the tensors of a snapshot, which are what they were.
int ladder_holds(const void* address, PyObject* found) try {
  const auto& snapshot = *static_cast<const Snapshot*>(address);
  auto** objects = PySequence_Fast_ITEMS(found);
  const auto same = [&](const Facts& was, const PyObject* object) {
    return object == was.object && holds(snapshot, was);
  };
  return std::equal(snapshot.tensors.begin(), snapshot.tensors.end(), objects,
                    objects + PySequence_Fast_GET_SIZE(found), same);
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

// Tells whether what the objects of a tuple refer to is, in order, what a list holds, as `gc.get_referents` gives it.
int ladder_refer_to(PyObject* tuple, PyObject* list) {
  Known known{PySequence_Fast_ITEMS(list), PySequence_Fast_ITEMS(list) + PyList_GET_SIZE(list)};
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(tuple); ++at) {
    auto* object = PyTuple_GET_ITEM(tuple, at);
    if (PyObject_IS_GC(object) && Py_TYPE(object)->tp_traverse(object, is_another, &known)) return 0;
  }
  return known.next == known.end;
}
}
