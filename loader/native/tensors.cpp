#include "tensors.hpp"

#include <string>

namespace nb = nanobind;

namespace sonata {

namespace {

const dlpack::ExchangeApi *find_api(nb::handle capsule) {
  const void *pointer = PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule);
  if (pointer == nullptr) {
    PyErr_Clear();
    throw nb::type_error("api must be a capsule of DLPack's exchange API");
  }
  const auto *header = static_cast<const dlpack::Header *>(pointer);
  while (header != nullptr && header->major != dlpack::kMajor) header = header->older;
  // The header is the first member of the table.
  const auto *api = reinterpret_cast<const dlpack::ExchangeApi *>(header);
  if (api == nullptr || api->view_of_object == nullptr) {
    throw nb::value_error("this DLPack exchange API has no views of version 1");
  }
  return api;
}

}  // namespace

TensorReader::TensorReader(nb::handle api, const nb::tuple &classes) : api_(find_api(api)) {
  for (nb::handle item : classes) {
    if (!PyType_Check(item.ptr())) throw nb::type_error("classes must be a tuple of classes");
    classes_.push_back(nb::borrow(item));
  }
  if (classes_.empty()) throw nb::type_error("classes must not be empty");
  const nb::handle first = classes_.front();
  is_neg_of_class_ = first.attr("is_neg");
  is_neg_ = Builtin(first().attr("is_neg"));
  requires_grad_ = Property(first, "requires_grad");
  version_ = Property(first, "_version");
}

nb::object TensorReader::describe(nb::handle tensors, bool gradients) const {
  if (!PyTuple_Check(tensors.ptr())) throw nb::type_error("tensors must be a tuple");
  const Py_ssize_t count = PyTuple_Size(tensors.ptr());
  if (std::size_t(count) > Layouts::kMostTensors) throw nb::value_error("more than 16 tensors");
  Layouts layouts;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject *object = PyTuple_GetItem(tensors.ptr(), i);
    dlpack::View found;
    if (object == Py_None) {
      layouts.add_nothing();
    } else if (view(object, found) && is_plain(object, gradients)) {
      layouts.add(found);
    } else {
      return nb::none();
    }
  }
  return nb::steal(PyBytes_FromStringAndSize(reinterpret_cast<const char *>(layouts.words()),
                                             Py_ssize_t(layouts.size() * sizeof(std::int64_t))));
}

bool TensorReader::overlaps(nb::handle tensors) const {
  if (!PyTuple_Check(tensors.ptr())) throw nb::type_error("tensors must be a tuple");
  const Py_ssize_t count = PyTuple_Size(tensors.ptr());
  dlpack::View last{};
  for (Py_ssize_t i = count - 1; i >= 0; --i) {
    PyObject *object = PyTuple_GetItem(tensors.ptr(), i);
    if (object == Py_None) continue;
    dlpack::View one{};
    if (!view(object, one)) {
      throw nb::type_error(("tensor " + std::to_string(i) + " is no plain one").c_str());
    }
    if (i == count - 1) {
      last = one;
    } else if (overlap(last, one)) {
      return true;
    }
  }
  return false;
}

void TensorReader::addresses(nb::handle tensors, std::size_t count, std::uint64_t *found) const {
  if (!PyTuple_Check(tensors.ptr()) || std::size_t(PyTuple_Size(tensors.ptr())) != count) {
    throw nb::type_error(("tensors must be a tuple of " + std::to_string(count)).c_str());
  }
  for (std::size_t i = 0; i < count; ++i) {
    PyObject *object = PyTuple_GetItem(tensors.ptr(), Py_ssize_t(i));
    dlpack::View one{};
    if (object != Py_None && !view(object, one)) {
      throw nb::type_error(("tensor " + std::to_string(i) + " is no plain one").c_str());
    }
    found[i] = one.address();
  }
}

bool TensorReader::view(PyObject *object, dlpack::View &view) const {
  const auto *type = reinterpret_cast<PyObject *>(Py_TYPE(object));
  for (const nb::object &one : classes_) {
    if (type != one.ptr()) continue;
    if (api_->view_of_object(object, &view) == 0) {
      return std::size_t(view.dimensions) <= Layouts::kMostDimensions;
    }
    PyErr_Clear();  // sparse, nested, of a functional transform: whoever asks has another way
    return false;
  }
  return false;
}

bool TensorReader::is_plain(PyObject *object, bool gradients) const {
  PyObject *answer = is_neg_.is_method() ? is_neg_.of(object)
                                         : PyObject_Vectorcall(is_neg_of_class_.ptr(), &object, 1,
                                                               nullptr);
  const bool plain = answer == Py_False;
  Py_XDECREF(answer);
  if (answer == nullptr) PyErr_Clear();
  return plain && !(gradients && requires_grad(object));
}

bool TensorReader::requires_grad(PyObject *object) const {
  PyObject *answer = requires_grad_(object);
  const bool needed = answer != Py_False;
  Py_XDECREF(answer);
  if (answer == nullptr) PyErr_Clear();
  return needed;
}

std::int64_t TensorReader::version(PyObject *object) const {
  PyObject *answer = version_(object);
  if (answer == nullptr) throw nb::python_error();
  const std::int64_t count = PyLong_AsLongLong(answer);
  Py_DECREF(answer);
  if (count == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return count;
}

}  // namespace sonata
