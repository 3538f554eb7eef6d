// Whether tensors are what they were: one pass over what torch keeps of each. `snapshot.py` builds and calls it.
//
// Python objects are addresses here, so that Python's headers need not be installed. Each begins with its count
// of references and its class (CPython 3.11 to 3.13).
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

extern "C" {
// Python's stable ABI
void* PyList_GetItem(void* list, intptr_t at);
void* PyTuple_GetItem(void* tuple, intptr_t at);
intptr_t PyObject_Size(void* object);
}

namespace {

using Object = const void* const*;  // words of a Python object

constexpr int CLASS = 1;  // the word of an object that points to its class
constexpr uint32_t UNCOUNTED = 0;

struct Facts {
  Object object;
  const void* kind;
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
  int place;  // the word of a tensor's object that points to torch's part
  bool versions;
  std::vector<Facts> tensors;
  std::vector<int64_t> extents;
};

const c10::TensorImpl* impl_of(Object object, int place) {
  return static_cast<const c10::TensorImpl*>(object[place]);
}

const c10::StorageImpl& storage_of(const c10::TensorImpl& tensor) {
  return *tensor.unsafe_storage().unsafeGetStorageImpl();
}

uint32_t version_of(const c10::TensorImpl& tensor) {
  const auto& counter = tensor.version_counter();
  return counter.enabled() ? counter.current_version() : UNCOUNTED;
}

void add(Snapshot& snapshot, Object object, const c10::TensorImpl& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  snapshot.tensors.push_back(
      {object, object[CLASS], &tensor, tensor.key_set().raw_repr(), storage_of(tensor).data(),
       storage_of(tensor).nbytes(), tensor.storage_offset(),
       snapshot.extents.size(), sizes.size(), tensor.dtype(), tensor.device(),
       snapshot.versions ? version_of(tensor) : UNCOUNTED, tensor.requires_grad()});
  snapshot.extents.insert(snapshot.extents.end(), sizes.begin(), sizes.end());
  snapshot.extents.insert(snapshot.extents.end(), strides.begin(), strides.end());
}

bool holds(const Snapshot& snapshot, const Facts& was) {
  if (was.object[CLASS] != was.kind || impl_of(was.object, snapshot.place) != was.impl) return false;
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

template <typename Item>
int identical(void* found, void* known, Item item) {
  const auto count = PyObject_Size(known);
  if (PyObject_Size(found) != count) return 0;
  for (intptr_t at = 0; at < count; ++at)
    if (item(found, at) != item(known, at)) return 0;
  return 1;
}

}  // namespace

extern "C" {

// Takes a snapshot of a list of tensors with storage. impls: the addresses of torch's part of each, which lies
// in word `place` of its object. Returns null where one of them does not.
void* ladder_snapshot(void* list, const uintptr_t* impls, int place, int versions) try {
  auto snapshot = std::make_unique<Snapshot>(Snapshot{place, versions != 0, {}, {}});
  const auto count = PyObject_Size(list);
  for (intptr_t at = 0; at < count; ++at) {
    const auto object = static_cast<Object>(PyList_GetItem(list, at));
    const auto* tensor = impl_of(object, place);
    if (reinterpret_cast<uintptr_t>(tensor) != impls[at] || !tensor->has_storage()) return nullptr;
    add(*snapshot, object, *tensor);
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

// Copies one word of each object of a tuple, or tells whether all are what was copied.
void ladder_copy_words(void* tuple, int place, const void** copied) {
  const auto count = PyObject_Size(tuple);
  for (intptr_t at = 0; at < count; ++at) copied[at] = static_cast<Object>(PyTuple_GetItem(tuple, at))[place];
}
int ladder_same_words(void* tuple, int place, const void* const* copied) {
  const auto count = PyObject_Size(tuple);
  for (intptr_t at = 0; at < count; ++at)
    if (static_cast<Object>(PyTuple_GetItem(tuple, at))[place] != copied[at]) return 0;
  return 1;
}

// Tell whether two lists, or two tuples, hold the same objects.
int ladder_identical_lists(void* found, void* known) { return identical(found, known, PyList_GetItem); }
int ladder_identical_tuples(void* found, void* known) { return identical(found, known, PyTuple_GetItem); }
}
