// Reads tensors of torch without a call of Python for each of their properties.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dlpack.hpp"
#include "torch.hpp"

namespace sonata {

// What decides how the elements of some tensors are found. No two have the same words.
class Layouts {
 public:
  static constexpr std::size_t kMostTensors = 16;
  static constexpr std::size_t kMostDimensions = 8;

  // At most kMostTensors, each of at most kMostDimensions.
  void add(const dlpack::View &view);
  void add_nothing() { words_[size_++] = 0; }  // the place of a tensor that is None

  const std::int64_t *words() const { return words_; }
  std::size_t size() const { return size_; }

 private:
  // Of a tensor: what it is, and sizes and strides.
  std::int64_t words_[kMostTensors * (2 + 2 * kMostDimensions)];
  std::size_t size_ = 0;
};

// Whether the memory of two tensors overlaps, from first to last element.
bool overlap(const dlpack::View &one, const dlpack::View &other);

class TensorReader {
 public:
  // Reads tensors of exactly these classes, by the functions of the capsule `api`. Raises TypeError
  // where either is something else, ValueError where the functions are not of a known version.
  TensorReader(nanobind::handle api, const nanobind::tuple &classes);

  // Bytes that are equal for equal layouts: shapes, strides, dtypes, devices, and addresses modulo
  // 16. None where an item is no plain tensor, is a negated view, or, with `gradients`, requires
  // grad. Items may be None.
  nanobind::object describe(nanobind::handle tensors, bool gradients) const;

  // Whether memory between the first and the last element of the last tensor is between those of
  // another one. Items may be None. Raises TypeError.
  bool overlaps(nanobind::handle tensors) const;

  // Fills in the addresses of so many tensors, 0 for None. Raises TypeError.
  void addresses(nanobind::handle tensors, std::size_t count, std::uint64_t *found) const;

  // Whether the object is of one of the classes and has a view of few enough dimensions.
  bool view(PyObject *object, dlpack::View &view) const;

  // What a view does not tell: that elements are to be negated, or a gradient is asked for.
  bool is_plain(PyObject *object, bool gradients) const;
  bool requires_grad(PyObject *object) const;  // true, too, where it cannot be told

  // torch's count of writes to a tensor of the classes. Raises.
  std::int64_t version(PyObject *object) const;

 private:
  const dlpack::ExchangeApi *api_;
  std::vector<nanobind::object> classes_;
  Builtin is_neg_;                    // the method, called directly where it is one of C
  nanobind::object is_neg_of_class_;  // the same, where it is not
  Property requires_grad_;
  Property version_;
};

}  // namespace sonata
