// `kernels.gemv(x, weight, bias, out)`.

#include <array>

#include "calls.hpp"
#include "driver.hpp"
#include "python_error.hpp"

namespace nb = nanobind;

namespace sonata {

namespace {

enum Argument : std::size_t { kX, kWeight, kBias, kOut, kInvariant, kArguments };
constexpr std::size_t kOperands = kOut + 1;

struct GemvState : Caller {
  int traverse(visitproc, void *) const { return 0; }  // it holds nothing that could hold it
  void clear() {}
};

using GemvObject = CallObject<GemvState>;

PyObject *const *argument_names() {
  static PyObject *const names[kArguments] = {
      PyUnicode_InternFromString("x"), PyUnicode_InternFromString("weight"),
      PyUnicode_InternFromString("bias"), PyUnicode_InternFromString("out"),
      PyUnicode_InternFromString("batch_invariant")};
  return names;
}

// The result, a new reference; null where the call is not known.
nb::object call_known(const GemvState &state, PyObject *const *arguments, std::int64_t invariant) {
  require_not_forked();
  const bool gradients = state.gradients();
  std::array<dlpack::View, kOperands> views{};
  Layouts layouts;
  for (std::size_t i = 0; i < kOperands; ++i) {
    if (arguments[i] == Py_None) {
      layouts.add_nothing();
    } else if (state.reader->view(arguments[i], views[i]) &&
               state.reader->is_plain(arguments[i], gradients)) {
      layouts.add(views[i]);
    } else {
      return {};
    }
  }
  const std::shared_ptr<const Planned> planned = state.known.find(layouts, invariant);
  if (planned == nullptr) return {};
  nb::object out = nb::borrow(arguments[kOut]);
  const bool is_new = out.is_none();
  if (is_new) {
    if (!state.allocate(*planned, out, views[kOut])) return {};
  } else {
    for (std::size_t i = 0; i < kOut; ++i) {
      if (arguments[i] != Py_None && overlap(views[kOut], views[i])) return {};
    }
  }
  std::array<std::uint64_t, kOperands> addresses;
  for (std::size_t i = 0; i < kOperands; ++i) addresses[i] = views[i].address();
  state.launch(*planned->in_order, state.current_stream(planned->device), addresses.data(),
               is_new ? nullptr : out.ptr());
  return out;
}

PyObject *call(PyObject *self, PyObject *const *arguments, std::size_t flagged,
               PyObject *keywords) {
  return guarded([&]() -> PyObject * {
    const GemvState &state = *GemvObject::of(self)->state;
    const Range range(state);
    std::array<PyObject *, kArguments> sorted{};
    if (state.reader != nullptr &&
        sort_arguments(arguments, std::size_t(PyVectorcall_NARGS(flagged)), keywords,
                       argument_names(), kArguments, kOperands, sorted.data()) &&
        sorted[kX] != nullptr && sorted[kWeight] != nullptr) {
      PyObject *const invariant = sorted[kInvariant];
      if (sorted[kBias] == nullptr) sorted[kBias] = Py_None;
      if (sorted[kOut] == nullptr) sorted[kOut] = Py_None;
      if (invariant == nullptr || invariant == Py_False || invariant == Py_True) {
        nb::object out = call_known(state, sorted.data(), invariant == Py_True);
        if (out.is_valid()) return out.release().ptr();
      }
    }
    return call_python(self, arguments, flagged, keywords);
  });
}

PyObject *set_up(PyObject *self, PyObject *arguments) {
  return guarded([&]() -> PyObject * {
    PyObject *reader, *torch, *make, *ranges;
    if (!PyArg_ParseTuple(arguments, "OOOO", &reader, &torch, &make, &ranges)) return nullptr;
    GemvObject::of(self)->state->set_up(reader, torch, make, ranges);
    Py_RETURN_NONE;
  });
}

PyObject *remember_call(PyObject *self, PyObject *arguments) {
  return guarded([&]() -> PyObject * {
    PyObject *tensors, *device, *plan;
    int invariant;
    if (!PyArg_ParseTuple(arguments, "OpOO", &tensors, &invariant, &device, &plan)) return nullptr;
    remember(*GemvObject::of(self)->state, tensors, invariant, device, plan);
    Py_RETURN_NONE;
  });
}

}  // namespace

void add_gemv_call(nb::module_ &module) {
  static PyMethodDef methods[] = {
      {"_set_up", set_up, METH_VARARGS, "What calls are read, launched and allocated by."},
      {"_remember", remember_call, METH_VARARGS, "Launch such operands so from now on."},
      {nullptr, nullptr, 0, nullptr}};
  add_call_type<GemvState>(module, "GemvCall", GemvObject::make<call>, methods, nullptr,
                           "Launches a GEMV, by one native call where its operands are known.");
}

}  // namespace sonata
