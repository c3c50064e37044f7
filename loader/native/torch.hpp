// What the launch path asks of torch: grad mode, current streams, and to count a write.
//
// Torch has C functions for the first two, which compiled models call (its stable "AOTI shim"). They
// are taken from the libraries that torch has loaded; where one is missing, a Python function of
// torch's is called.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "driver.hpp"
#include "handles.hpp"

namespace sonata {

// A function of torch's without arguments or with one. If it is a builtin, it is called directly.
class Builtin {
 public:
  Builtin() = default;
  explicit Builtin(nanobind::object function);

  // A new reference, or null with an exception set. `argument` is null for none.
  PyObject *operator()(PyObject *argument) const;

  // The method of another object of the same class; only where `is_method`.
  PyObject *of(PyObject *self) const { return function_(self, nullptr); }
  bool is_method() const { return function_ != nullptr && flags_ == METH_NOARGS; }

 private:
  nanobind::object object_;
  PyCFunction function_ = nullptr;
  PyObject *self_ = nullptr;  // held by the object
  int flags_ = 0;
};

// A property of a class that is written in C, read without a look-up.
class Property {
 public:
  Property() = default;
  Property(nanobind::handle type, const char *name);

  // A new reference, or null with an exception set.
  PyObject *operator()(PyObject *object) const;

 private:
  nanobind::object name_;
  nanobind::object descriptor_;
  descrgetfunc get_ = nullptr;
};

class Torch {
 public:
  // Python functions: `is_grad_enabled()`, `current_stream(device)`, and `increment_version(tuple of
  // tensors)`. `samples`: for `handles`.
  Torch(nanobind::object is_grad_enabled, nanobind::object current_stream,
        nanobind::object increment_version, const nanobind::tuple &samples);

  // What may raise a Python exception returns false with one set.
  bool grad_enabled(bool &enabled) const;
  bool current_stream(int device, Stream &stream) const;
  bool count_write(PyObject *tensor) const;

  const TensorHandles &handles() const { return handles_; }

 private:
  bool (*grad_enabled_)() = nullptr;
  std::int32_t (*stream_)(std::int32_t device, void **stream) = nullptr;
  Builtin is_grad_enabled_;
  Builtin current_stream_;
  Builtin increment_version_;
  TensorHandles handles_;
};

}  // namespace sonata
