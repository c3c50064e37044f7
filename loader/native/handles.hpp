// What a launch depends on of a tensor that was looked at before, asked of torch's C functions.
//
// A view by DLPack describes a tensor from nothing; to see that one is as it was takes a fifth of
// that. torch's stable "AOTI shim" answers from a pointer to the tensor, which lies in the object of
// Python: where, is found out with sample objects, by the address of the tensor that torch tells.
// Two functions of C++ count writes. Each is tried on the samples, and none is used where one does
// not answer as torch's Python does, or is not there.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "dlpack.hpp"
#include "layouts.hpp"

namespace sonata {

class TensorHandles {
 public:
  // What was seen of a tensor.
  struct Seen {
    const void *type = nullptr;
    const void *tensor = nullptr;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::size_t dimensions = 0;
    std::array<std::int64_t, Layouts::kMostDimensions> sizes{};
    std::array<std::int64_t, Layouts::kMostDimensions> strides{};
    bool is_counted = false;  // whether torch counts writes to it: not to an inference tensor
  };

  TensorHandles() = default;

  // By samples of each class that is to be asked about, with memory of their own.
  explicit TensorHandles(const nanobind::tuple &samples);

  bool usable() const { return offset_ != 0; }

  // What `view`, a view of the object, says. False where the functions say something else. Raises.
  bool look(PyObject *object, const dlpack::View &view, Seen &seen) const;

  // Whether the object has the same tensor, and that the same memory and layout.
  bool is_same(PyObject *object, const Seen &seen) const;

  // torch's count of writes, and one more, of an object that `is_same`. Nothing where they are not
  // counted: torch would throw.
  std::int64_t version(PyObject *object, const Seen &seen) const {
    return seen.is_counted ? version_(handle(object)) : 0;
  }
  void count_write(PyObject *object, const Seen &seen) const {
    if (seen.is_counted) count_write_(handle(object));
  }

 private:
  // To the pointer that torch's tensors are in C++.
  void *handle(PyObject *object) const { return reinterpret_cast<char *>(object) + offset_; }
  const void *tensor(PyObject *object) const { return *static_cast<void **>(handle(object)); }
  bool answers(nanobind::handle sample) const;

  std::size_t offset_ = 0;
  std::int32_t (*address_)(void *handle, void **address) = nullptr;
  std::int32_t (*dimensions_)(void *handle, std::int64_t *count) = nullptr;
  std::int32_t (*sizes_)(void *handle, std::int64_t **sizes) = nullptr;
  std::int32_t (*strides_)(void *handle, std::int64_t **strides) = nullptr;
  std::int64_t (*version_)(const void *handle) = nullptr;
  void (*count_write_)(const void *handle) = nullptr;
};

}  // namespace sonata
