#include "tensors.hpp"

#include <array>
#include <string>

namespace nb = nanobind;

namespace sonata {

namespace {

constexpr std::uint64_t kAlignment = 16;
// Of a tensor: what it is, and sizes and strides. A place that is None takes one word, 0.
constexpr std::size_t kMostWords = 2 + 2 * TensorReader::kMostDimensions;

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

// Appends what decides how a tensor's elements are found. No two layouts have the same words: the
// first, never 0, says how many follow.
std::int64_t *append(std::int64_t *word, const dlpack::View &view) {
  const std::uint64_t address = view.address();
  const std::uint64_t remainder = address == 0 ? kAlignment : address % kAlignment;
  const std::uint64_t dimensions = std::uint64_t(view.dimensions);
  *word++ = std::int64_t(1 | dimensions << 8 | remainder << 16 |
                         std::uint64_t{view.dtype.code} << 24 |
                         std::uint64_t{view.dtype.bits} << 32 |
                         std::uint64_t{view.dtype.lanes} << 48);
  *word++ = std::int64_t(std::uint64_t(std::uint32_t(view.device.type)) << 32 |
                         std::uint32_t(view.device.id));
  for (std::uint64_t i = 0; i < dimensions; ++i) *word++ = view.shape[i];
  for (std::uint64_t i = 0; i < dimensions; ++i) *word++ = view.strides[i];
  return word;
}

}  // namespace

TensorReader::TensorReader(nb::handle api, const nb::tuple &classes) : api_(find_api(api)) {
  for (nb::handle item : classes) {
    if (!PyType_Check(item.ptr())) throw nb::type_error("classes must be a tuple of classes");
    classes_.push_back(nb::borrow(item));
  }
  if (classes_.empty()) throw nb::type_error("classes must not be empty");
  is_neg_ = classes_.front().attr("is_neg");
  requires_grad_ = nb::steal(PyUnicode_InternFromString("requires_grad"));
}

nb::object TensorReader::describe(nb::handle tensors, bool gradients) const {
  if (!PyTuple_Check(tensors.ptr())) throw nb::type_error("tensors must be a tuple");
  const Py_ssize_t count = PyTuple_Size(tensors.ptr());
  if (std::size_t(count) > kMostTensors) throw nb::value_error("more than 16 tensors");
  std::array<std::int64_t, kMostTensors * kMostWords> words;
  std::int64_t *word = words.data();
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject *object = PyTuple_GetItem(tensors.ptr(), i);
    if (object == Py_None) {
      *word++ = 0;
      continue;
    }
    dlpack::View found;
    if (!view(object, found) || std::size_t(found.dimensions) > kMostDimensions ||
        !is_plain(object, gradients)) {
      return nb::none();
    }
    word = append(word, found);
  }
  return nb::steal(PyBytes_FromStringAndSize(reinterpret_cast<const char *>(words.data()),
                                             (word - words.data()) * Py_ssize_t(sizeof *word)));
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

// Whether the object is of one of the classes and has a view.
bool TensorReader::view(PyObject *object, dlpack::View &view) const {
  const auto *type = reinterpret_cast<PyObject *>(Py_TYPE(object));
  for (const nb::object &one : classes_) {
    if (type != one.ptr()) continue;
    if (api_->view_of_object(object, &view) == 0) return true;
    PyErr_Clear();  // sparse, nested, of a functional transform: whoever asks has another way
    return false;
  }
  return false;
}

// A view does not tell that its elements are to be negated, or that a gradient is asked for.
bool TensorReader::is_plain(PyObject *object, bool gradients) const {
  PyObject *answer = PyObject_Vectorcall(is_neg_.ptr(), &object, 1, nullptr);
  bool plain = answer == Py_False;
  Py_XDECREF(answer);
  if (plain && gradients) {
    answer = PyObject_GetAttr(object, requires_grad_.ptr());
    plain = answer == Py_False;
    Py_XDECREF(answer);
  }
  PyErr_Clear();
  return plain;
}

}  // namespace sonata
