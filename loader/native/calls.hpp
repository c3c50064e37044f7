// Callables of Python whose usual call is one native call: check against what is known, and launch.
//
// They are types of their own rather than nanobind's, for the sake of Python's vectorcall protocol:
// arguments come as they lie on the interpreter's stack. Python's classes derive from them. A call
// whose operands are new in some way goes to the method `_call` of the class, which checks, plans,
// launches, and registers what it planned.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#if PY_VERSION_HEX < 0x030C0000
#include <structmember.h>
#endif

#include "dlpack.hpp"
#include "gil.hpp"
#include "known.hpp"
#include "tensors.hpp"
#include "torch.hpp"

namespace sonata {

#if PY_VERSION_HEX < 0x030C0000
constexpr int kOffsetMember = T_PYSSIZET;
constexpr int kReadOnly = READONLY;
#else
constexpr int kOffsetMember = Py_T_PYSSIZET;
constexpr int kReadOnly = Py_READONLY;
#endif

// What every such callable holds. `reader` is null as long as it is not set up, and where this torch
// has no views: every call then goes to Python.
struct Caller {
  nanobind::object reader_object;
  nanobind::object torch_object;
  nanobind::object make;  // `make(device, allocation)`: a new tensor, or None
  nanobind::object range_push;  // of a profiler, or null
  nanobind::object range_pop;
  nanobind::object range_name;
  const TensorReader *reader = nullptr;
  const Torch *torch = nullptr;
  KnownLaunches known;

  bool gradients() const;

  // Gives `out`, a new reference, memory of its own if it is null; false where Python must do it.
  bool allocate(const Planned &planned, nanobind::object &out, dlpack::View &view) const;

  // Enqueues with the GIL released. Only what was there before counts as written.
  void launch(const Sequence &sequence, Stream stream, const std::uint64_t *addresses,
              PyObject *written) const;

  Stream current_stream(int device) const;

  // (reader or None, torch, make, and None or a tuple: push, pop, name)
  void set_up(PyObject *reader, PyObject *torch, PyObject *make, PyObject *ranges);
};

// Launches such operands as `plan()` says from now on, which returns (in_order, early, allocation or
// None). It is not asked where they are known, or a tensor is not plain.
void remember(Caller &caller, PyObject *tensors, std::int64_t more, PyObject *device,
              PyObject *plan);

// A range of a profiler, if one is asked for, around a call.
class Range {
 public:
  explicit Range(const Caller &caller);
  ~Range();
  Range(const Range &) = delete;
  Range &operator=(const Range &) = delete;

 private:
  PyObject *pop_ = nullptr;
};

// Sorts the arguments of a vectorcall by name; those that are not given stay null. False where that
// is not simple: the method of Python's then says what is wrong.
bool sort_arguments(PyObject *const *arguments, std::size_t count, PyObject *keywords,
                    PyObject *const *names, std::size_t size, std::size_t positional,
                    PyObject **sorted);

// Calls the method `_call` with the arguments of a vectorcall.
PyObject *call_python(PyObject *self, PyObject *const *arguments, std::size_t flagged,
                      PyObject *keywords);

// Adds the types GemvCall and BoundCall.
void add_gemv_call(nanobind::module_ &module);
void add_bound_call(nanobind::module_ &module);

// An object of such a type; `State` derives from Caller and has `traverse(visit, arg)`, which may
// do nothing.
template <typename State>
struct CallObject {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  State *state;

  static CallObject *of(PyObject *self) { return reinterpret_cast<CallObject *>(self); }

  template <vectorcallfunc Call>
  static PyObject *make(PyTypeObject *type, PyObject *, PyObject *) {
    const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    PyObject *self = allocate(type, 0);
    if (self == nullptr) return nullptr;
    of(self)->state = new State();
    of(self)->vectorcall = Call;
#if PY_VERSION_HEX < 0x030C0000
    // From 3.12 on Python does so for a class that derives and has no `__call__` of its own.
    if (type->tp_call == PyVectorcall_Call) type->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
#endif
    return self;
  }

  static void destroy(PyObject *self) {
    PyObject_GC_UnTrack(self);
    PyTypeObject *type = Py_TYPE(self);
    delete of(self)->state;
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(reinterpret_cast<PyObject *>(type));
  }

  static int traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(reinterpret_cast<PyObject *>(Py_TYPE(self)));
    return of(self)->state == nullptr ? 0 : of(self)->state->traverse(visit, arg);
  }

  static int clear(PyObject *self) {
    of(self)->state->clear();
    return 0;
  }
};

// `make` is CallObject<State>::make of the call.
template <typename State>
void add_call_type(nanobind::module_ &module, const char *name, newfunc make, PyMethodDef *methods,
                   PyGetSetDef *properties, const char *doc) {
  using Object = CallObject<State>;
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", kOffsetMember, offsetof(Object, vectorcall), kReadOnly, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static const std::string full = std::string("sonata_aot.loader._native.") + name;
  std::vector<PyType_Slot> slots{
      {Py_tp_new, reinterpret_cast<void *>(make)},
      {Py_tp_dealloc, reinterpret_cast<void *>(Object::destroy)},
      {Py_tp_traverse, reinterpret_cast<void *>(Object::traverse)},
      {Py_tp_clear, reinterpret_cast<void *>(Object::clear)},
      {Py_tp_call, reinterpret_cast<void *>(PyVectorcall_Call)},
      {Py_tp_members, members},
      {Py_tp_methods, methods},
      {Py_tp_doc, const_cast<char *>(doc)}};
  if (properties != nullptr) slots.push_back({Py_tp_getset, properties});
  slots.push_back({0, nullptr});
  constexpr unsigned long kFlags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC |
                                   Py_TPFLAGS_HAVE_VECTORCALL;
  PyType_Spec spec{full.c_str(), int(sizeof(Object)), 0, kFlags, slots.data()};
  const nanobind::object type = nanobind::steal(PyType_FromSpec(&spec));
  if (!type.is_valid()) throw nanobind::python_error();
  module.attr(name) = type;
}

}  // namespace sonata
