#include "calls.hpp"

#include <array>
#include <utility>

#include "python_error.hpp"

namespace nb = nanobind;

namespace sonata {

namespace {

nb::object optional(PyObject *object) {
  return object == Py_None ? nb::object() : nb::borrow(object);
}

}  // namespace

bool Caller::gradients() const {
  bool enabled = false;
  if (!torch->grad_enabled(enabled)) throw nb::python_error();
  return enabled;
}

bool Caller::allocate(const Planned &planned, nb::object &out, dlpack::View &view) const {
  if (!planned.allocation.is_valid() || !make.is_valid()) return false;
  out = make(planned.device, planned.allocation);
  return !out.is_none() && reader->view(out.ptr(), view);
}

void Caller::launch(const Sequence &sequence, Stream stream, const std::uint64_t *addresses,
                    PyObject *written) const {
  {
    const GilRelease unlocked;
    sequence.launch(stream, addresses);
  }
  if (written != nullptr && !torch->count_write(written)) throw nb::python_error();
}

Stream Caller::current_stream(int device) const {
  Stream stream = nullptr;
  if (!torch->current_stream(device, stream)) throw nb::python_error();
  return stream;
}

void Caller::set_up(PyObject *reader_, PyObject *torch_, PyObject *make_, PyObject *ranges) {
  reader_object = optional(reader_);
  torch_object = nb::borrow(torch_);
  make = optional(make_);
  reader = reader_ == Py_None ? nullptr : nb::cast<const TensorReader *>(reader_object);
  torch = nb::cast<const Torch *>(torch_object);
  if (ranges == Py_None) return;
  const nb::tuple parts = nb::cast<nb::tuple>(nb::handle(ranges));
  range_push = parts[0];
  range_pop = parts[1];
  range_name = parts[2];
}

void remember(Caller &caller, PyObject *tensors, std::int64_t more, PyObject *device,
              PyObject *plan) {
  if (caller.reader == nullptr) return;
  Layouts layouts;
  const nb::tuple given = nb::cast<nb::tuple>(nb::handle(tensors));
  if (given.size() > Layouts::kMostTensors) throw nb::value_error("more than 16 tensors");
  for (nb::handle item : given) {
    dlpack::View view;
    if (item.is_none()) {
      layouts.add_nothing();
    } else if (caller.reader->view(item.ptr(), view) &&
               caller.reader->is_plain(item.ptr(), caller.gradients())) {
      layouts.add(view);
    } else {
      return;
    }
  }
  if (caller.known.find(layouts, more) != nullptr) return;
  const nb::tuple parts = nb::cast<nb::tuple>(nb::handle(plan)());
  if (parts.size() != 3) throw nb::value_error("plan() must return three things");
  const auto planned = std::make_shared<Planned>();
  planned->device = nb::cast<int>(nb::handle(device));
  planned->in_order_object = parts[0];
  planned->early_object = parts[1];
  planned->in_order = nb::cast<const Sequence *>(planned->in_order_object);
  planned->early = nb::cast<const Sequence *>(planned->early_object);
  planned->allocation = optional(nb::object(parts[2]).ptr());
  for (const Sequence *one : {planned->in_order, planned->early}) {
    if (one == nullptr || one->operands() > given.size() || one->launches().empty()) {
      throw nb::value_error("a sequence has other operands than the call");
    }
  }
  caller.known.add(layouts, more, planned);
}

Range::Range(const Caller &caller) {
  if (!caller.range_push.is_valid()) return;
  caller.range_push(caller.range_name);
  pop_ = caller.range_pop.ptr();
}

// Runs also with an exception set, which it leaves.
Range::~Range() {
  if (pop_ == nullptr) return;
  const nb::error_scope pending;
  Py_XDECREF(PyObject_CallNoArgs(pop_));
  PyErr_Clear();
}

bool sort_arguments(PyObject *const *arguments, std::size_t count, PyObject *keywords,
                    PyObject *const *names, std::size_t size, std::size_t positional,
                    PyObject **sorted) {
  if (count > positional) return false;
  for (std::size_t i = 0; i < count; ++i) sorted[i] = arguments[i];
  if (keywords == nullptr) return true;
  const Py_ssize_t named = PyTuple_Size(keywords);
  for (Py_ssize_t i = 0; i < named; ++i) {
    // The names in calls and these are interned, and so the same objects.
    PyObject *name = PyTuple_GetItem(keywords, i);
    std::size_t place = 0;
    while (place < size && names[place] != name) ++place;
    if (place == size || sorted[place] != nullptr) return false;
    sorted[place] = arguments[count + std::size_t(i)];
  }
  return true;
}

PyObject *call_python(PyObject *self, PyObject *const *arguments, std::size_t flagged,
                      PyObject *keywords) {
  static PyObject *const name = PyUnicode_InternFromString("_call");
  constexpr std::size_t kMost = 16;
  const std::size_t count = std::size_t(PyVectorcall_NARGS(flagged));
  const std::size_t all =
      count + (keywords == nullptr ? 0 : std::size_t(PyTuple_Size(keywords)));
  std::array<PyObject *, kMost + 1> given;
  if (all > kMost) {
    PyErr_SetString(PyExc_TypeError, "too many arguments");
    return nullptr;
  }
  given[0] = self;
  for (std::size_t i = 0; i < all; ++i) given[i + 1] = arguments[i];
  return PyObject_VectorcallMethod(name, given.data(), count + 1, keywords);
}

}  // namespace sonata
