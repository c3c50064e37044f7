#include "handles.hpp"

#include <algorithm>
#include <cstring>

#include "loaded.hpp"

namespace nb = nanobind;

namespace sonata {

namespace {

constexpr char kLibrary[] = "libtorch_cpu.so";

// Where the tensor is in an object of Python, in bytes; 0 where it is not found.
std::size_t find_tensor(nb::handle sample) {
  const void *tensor = PyLong_AsVoidPtr(sample.attr("_cdata").ptr());
  if (tensor == nullptr) return 0;
  const auto size = nb::cast<std::size_t>(sample.type().attr("__basicsize__"));
  for (std::size_t at = sizeof(PyObject); at + sizeof tensor <= size; at += sizeof tensor) {
    const void *word = nullptr;
    std::memcpy(&word, reinterpret_cast<const char *>(sample.ptr()) + at, sizeof word);
    if (word == tensor) return at;
  }
  return 0;
}

}  // namespace

TensorHandles::TensorHandles(const nb::tuple &samples) {
  find_loaded(kLibrary, "aoti_torch_get_data_ptr", address_);
  find_loaded(kLibrary, "aoti_torch_get_dim", dimensions_);
  find_loaded(kLibrary, "aoti_torch_get_sizes", sizes_);
  find_loaded(kLibrary, "aoti_torch_get_strides", strides_);
  // at::TensorBase::_version() const, torch::autograd::impl::bump_version(const at::Tensor &)
  find_loaded(kLibrary, "_ZNK2at10TensorBase8_versionEv", version_);
  find_loaded(kLibrary, "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE", count_write_);
  if (address_ == nullptr || dimensions_ == nullptr || sizes_ == nullptr || strides_ == nullptr ||
      version_ == nullptr || count_write_ == nullptr || samples.size() == 0) {
    return;
  }
  try {
    const std::size_t offset = find_tensor(samples[0]);
    for (nb::handle sample : samples) {
      if (find_tensor(sample) != offset) return;
    }
    offset_ = offset;
    for (nb::handle sample : samples) {
      if (!usable() || !answers(sample)) {
        offset_ = 0;
        return;
      }
    }
  } catch (nb::python_error &) {  // this torch has no such attributes
    offset_ = 0;
  }
}

bool TensorHandles::answers(nb::handle sample) const {
  void *address = nullptr;
  std::int64_t dimensions = 0, *sizes = nullptr, *strides = nullptr;
  void *const asked = handle(sample.ptr());
  if (address_(asked, &address) != 0 || dimensions_(asked, &dimensions) != 0 ||
      sizes_(asked, &sizes) != 0 || strides_(asked, &strides) != 0) {
    return false;
  }
  const auto number = [&](const char *name, auto... which) {
    return nb::cast<std::int64_t>(sample.attr(name)(which...));
  };
  if (reinterpret_cast<std::int64_t>(address) != number("data_ptr") || address == nullptr ||
      dimensions != number("dim")) {
    return false;
  }
  for (std::int64_t i = 0; i < dimensions; ++i) {
    if (sizes[i] != number("size", i) || strides[i] != number("stride", i)) return false;
  }
  const auto count = [&] { return nb::cast<std::int64_t>(sample.attr("_version")); };
  const std::int64_t before = count();
  if (version_(asked) != before) return false;
  count_write_(asked);
  return count() == before + 1 && version_(asked) == before + 1;
}

bool TensorHandles::look(PyObject *object, const dlpack::View &view, Seen &seen) const {
  if (!usable()) return false;
  seen.is_counted = !nb::cast<bool>(nb::handle(object).attr("is_inference")());
  seen.type = Py_TYPE(object);
  seen.tensor = tensor(object);
  seen.begin = view.address();
  seen.end = end_of(view);
  seen.dimensions = std::size_t(view.dimensions);
  std::copy_n(view.shape, seen.dimensions, seen.sizes.begin());
  std::copy_n(view.strides, seen.dimensions, seen.strides.begin());
  return is_same(object, seen);
}

bool TensorHandles::is_same(PyObject *object, const Seen &seen) const {
  if (Py_TYPE(object) != seen.type || tensor(object) != seen.tensor) return false;
  void *const asked = handle(object);
  void *address = nullptr;
  std::int64_t dimensions = 0, *sizes = nullptr, *strides = nullptr;
  if (address_(asked, &address) != 0 || dimensions_(asked, &dimensions) != 0 ||
      sizes_(asked, &sizes) != 0 || strides_(asked, &strides) != 0) {
    return false;
  }
  return reinterpret_cast<std::uint64_t>(address) == seen.begin &&
         std::size_t(dimensions) == seen.dimensions &&
         std::equal(sizes, sizes + dimensions, seen.sizes.begin()) &&
         std::equal(strides, strides + dimensions, seen.strides.begin());
}

}  // namespace sonata
