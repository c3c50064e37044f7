// Reads tensors of torch without a call of Python for each of their properties.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dlpack.hpp"
#include "layouts.hpp"
#include "torch.hpp"

namespace sonata {

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
