#include "torch.hpp"

#include <utility>

#include "loaded.hpp"

namespace nb = nanobind;

namespace sonata {

Builtin::Builtin(nb::object function) : object_(std::move(function)) {
  if (!PyCFunction_Check(object_.ptr())) return;
  flags_ = PyCFunction_GetFlags(object_.ptr());
  if (flags_ != METH_NOARGS && flags_ != METH_O) return;
  function_ = PyCFunction_GetFunction(object_.ptr());
  self_ = PyCFunction_GetSelf(object_.ptr());
}

PyObject *Builtin::operator()(PyObject *argument) const {
  if (function_ != nullptr) return function_(self_, argument);
  return PyObject_Vectorcall(object_.ptr(), &argument, argument != nullptr ? 1 : 0, nullptr);
}

Property::Property(nb::handle type, const char *name)
    : name_(nb::steal(PyUnicode_InternFromString(name))) {
  if (!nb::hasattr(type, name_)) return;
  descriptor_ = type.attr(name_);
  // Of a descriptor written in C it has no arguments but these; of a class of Python it is no more
  // than slower.
  get_ = reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(descriptor_.ptr()), Py_tp_descr_get));
}

PyObject *Property::operator()(PyObject *object) const {
  if (get_ == nullptr) return PyObject_GetAttr(object, name_.ptr());
  return get_(descriptor_.ptr(), object, reinterpret_cast<PyObject *>(Py_TYPE(object)));
}

Torch::Torch(nb::object is_grad_enabled, nb::object current_stream, nb::object increment_version,
             const nb::tuple &samples)
    : is_grad_enabled_(std::move(is_grad_enabled)),
      current_stream_(std::move(current_stream)),
      increment_version_(std::move(increment_version)),
      handles_(samples) {
  find_loaded("libtorch_cpu.so", "aoti_torch_grad_mode_is_enabled", grad_enabled_);
  find_loaded("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream", stream_);
}

bool Torch::grad_enabled(bool &enabled) const {
  if (grad_enabled_ != nullptr) {
    enabled = grad_enabled_();
    return true;
  }
  PyObject *answer = is_grad_enabled_(nullptr);
  enabled = answer != Py_False;
  Py_XDECREF(answer);
  return answer != nullptr;
}

bool Torch::current_stream(int device, Stream &stream) const {
  void *found = nullptr;
  if (stream_ != nullptr && stream_(device, &found) == 0) {
    stream = static_cast<Stream>(found);
    return true;
  }
  PyObject *number = PyLong_FromLong(device);
  if (number == nullptr) return false;
  PyObject *answer = current_stream_(number);
  Py_DECREF(number);
  if (answer == nullptr) return false;
  stream = static_cast<Stream>(PyLong_AsVoidPtr(answer));
  Py_DECREF(answer);
  return stream != nullptr || PyErr_Occurred() == nullptr;
}

bool Torch::count_write(PyObject *tensor) const {
  PyObject *tensors = PyTuple_Pack(1, tensor);
  if (tensors == nullptr) return false;
  PyObject *answer = increment_version_(tensors);
  Py_DECREF(tensors);
  Py_XDECREF(answer);
  return answer != nullptr;
}

}  // namespace sonata
