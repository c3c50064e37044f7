// Reads tensors of torch without a call of Python for each of their properties.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dlpack.hpp"

namespace sonata {

class TensorReader {
 public:
  static constexpr std::size_t kMostTensors = 16;
  static constexpr std::size_t kMostDimensions = 8;

  // Reads tensors of exactly these classes, by the functions of the capsule `api`. Raises TypeError
  // where either is something else, ValueError where the functions are not of a known version.
  TensorReader(nanobind::handle api, const nanobind::tuple &classes);

  // Bytes that are equal for equal layouts: shapes, strides, dtypes, devices, and addresses modulo
  // 16. None where an item is no plain tensor, is a negated view, or, with `gradients`, requires
  // grad. Items may be None.
  nanobind::object describe(nanobind::handle tensors, bool gradients) const;

  // Fills in the addresses of so many tensors, 0 for None. Raises TypeError.
  void addresses(nanobind::handle tensors, std::size_t count, std::uint64_t *found) const;

 private:
  bool view(PyObject *object, dlpack::View &view) const;
  bool is_plain(PyObject *object, bool gradients) const;

  const dlpack::ExchangeApi *api_;
  std::vector<nanobind::object> classes_;
  nanobind::object is_neg_;         // the method of the class: a call looks nothing up
  nanobind::object requires_grad_;  // a name
};

}  // namespace sonata
