// `bound(x, out)`, a GEMV whose weight is declared constant.

#include <algorithm>
#include <array>
#include <vector>

#include "arguments.hpp"
#include "calls.hpp"
#include "driver.hpp"
#include "python_error.hpp"

namespace nb = nanobind;

namespace sonata {

namespace {

enum Operand : std::size_t { kX, kWeight, kBias, kOut, kUpcoming, kOperands };

// The last call with the output that is bound, which the next one most often repeats.
struct LastCall {
  std::vector<std::int64_t> x;  // its layout
  std::array<TensorHandles::Seen, kOperands> seen;
  std::shared_ptr<const Planned> planned;
};

struct BoundState : Caller {
  std::array<PyObject *, kOperands> bound{};  // each a reference, None if absent; null for x
  bool constant = false;
  std::int64_t version = 0;  // of the weight when it was bound
  std::uint64_t address = 0;
  // Streams on which a launch was in order: what they did before, they have done.
  std::vector<Stream> ordered;
  std::shared_ptr<const LastCall> last;
  mutable nb::ft_mutex mutex;  // of both

  ~BoundState() { clear(); }

  int traverse(visitproc visit, void *arg) const {
    for (PyObject *object : bound) Py_VISIT(object);
    return 0;
  }

  void clear() {
    for (PyObject *&object : bound) Py_CLEAR(object);
  }
};

using BoundObject = CallObject<BoundState>;

PyObject *out_name() {
  static PyObject *const name = PyUnicode_InternFromString("out");
  return name;
}

// Whether the kernel before on the stream cannot be writing the weight.
//
// It could be, from before it was bound, at the first launch on a stream: that one is in order. In a
// graph that is captured, what precedes was captured too, and writes since it was bound count.
bool may_start_early(BoundState &state, Stream stream, const Kernel &kernel) {
  const nb::ft_lock_guard lock(state.mutex);
  if (std::find(state.ordered.begin(), state.ordered.end(), stream) != state.ordered.end()) {
    return true;
  }
  if (kernel.is_capturing(stream)) return !state.ordered.empty();
  state.ordered.push_back(stream);
  return false;
}

// Ends it for good where torch has written to the weight, or given it other memory. `_ended` of the
// class then says so.
bool is_constant(PyObject *self, BoundState &state, std::int64_t version, std::uint64_t address) {
  if (!state.constant) return false;
  if (version == state.version && address == state.address) return true;
  state.constant = false;
  nb::handle(self).attr("_ended")();
  return false;
}

// The same for a weight that may be of any class.
bool is_constant(PyObject *self) {
  BoundState &state = *BoundObject::of(self)->state;
  if (!state.constant) return false;
  const nb::handle weight = state.bound[kWeight];
  return is_constant(self, state, nb::cast<std::int64_t>(weight.attr("_version")),
                     nb::cast<std::uint64_t>(weight.attr("data_ptr")()));
}

// The sequence that a call launches: its first launch is early where nothing can be in its way.
const Sequence &choose(PyObject *self, BoundState &state, const Planned &planned, Stream stream,
                       std::int64_t version, std::uint64_t address) {
  const Sequence &in_order = *planned.in_order;
  if (planned.early == planned.in_order || !is_constant(self, state, version, address) ||
      !may_start_early(state, stream, in_order.launches().front().kernel)) {
    return in_order;
  }
  return *planned.early;
}

// Remembers a call that `call_again` may repeat.
void note_call(BoundState &state, const std::array<dlpack::View, kOperands> &views,
               const std::shared_ptr<const Planned> &planned) {
  if (!state.torch->handles().usable()) return;
  Layouts layout;
  layout.add(views[kX]);
  const auto last = std::make_shared<LastCall>();
  last->x.assign(layout.words(), layout.words() + layout.size());
  last->planned = planned;
  for (std::size_t i = kWeight; i < kOperands; ++i) {
    if (state.bound[i] == Py_None) continue;
    if (!state.torch->handles().look(state.bound[i], views[i], last->seen[i])) return;
  }
  const nb::ft_lock_guard lock(state.mutex);
  state.last = last;
}

// As `call_known`, where x is laid out as in the last call with the bound output, what is bound is
// as it was then, and no gradients are asked for. It is the shortest way to a launch.
nb::object call_again(PyObject *self, BoundState &state, PyObject *x) {
  std::shared_ptr<const LastCall> last;
  {
    const nb::ft_lock_guard lock(state.mutex);
    last = state.last;
  }
  dlpack::View view;
  if (last == nullptr || !state.reader->view(x, view) || !state.reader->is_plain(x, false)) {
    return {};
  }
  Layouts layout;
  layout.add(view);
  const TensorHandles &handles = state.torch->handles();
  if (!std::equal(last->x.begin(), last->x.end(), layout.words(),
                  layout.words() + layout.size())) {
    return {};
  }
  std::array<std::uint64_t, kOperands> addresses{view.address()};
  for (std::size_t i = kWeight; i < kOperands; ++i) {
    if (state.bound[i] == Py_None) continue;
    if (!handles.is_same(state.bound[i], last->seen[i])) return {};
    addresses[i] = last->seen[i].begin;
  }
  const TensorHandles::Seen &out = last->seen[kOut];
  if (view.address() < out.end && out.begin < end_of(view)) return {};
  const Planned &planned = *last->planned;
  const Stream stream = state.current_stream(planned.device);
  const std::int64_t version = handles.version(state.bound[kWeight], last->seen[kWeight]);
  const Sequence &sequence =
      choose(self, state, planned, stream, version, addresses[kWeight]);
  state.launch(sequence, stream, addresses.data(), nullptr);
  handles.count_write(state.bound[kOut], out);
  return nb::borrow(state.bound[kOut]);
}

// The result, a new reference; null where the call is not known. `given` is None for the output
// that was bound, or one to be allocated.
nb::object call_known(PyObject *self, PyObject *x, PyObject *given) {
  require_not_forked();
  BoundState &state = *BoundObject::of(self)->state;
  const TensorReader &reader = *state.reader;
  const bool gradients = state.gradients();
  const bool repeats = !gradients && given == Py_None && state.bound[kOut] != Py_None;
  if (repeats) {
    nb::object out = call_again(self, state, x);
    if (out.is_valid()) return out;
  }
  std::array<PyObject *, kOperands> operands = state.bound;
  operands[kX] = x;
  if (given != Py_None) operands[kOut] = given;
  std::array<dlpack::View, kOperands> views{};
  Layouts layouts;
  for (std::size_t i = 0; i < kOperands; ++i) {
    if (operands[i] == Py_None) {
      layouts.add_nothing();
      continue;
    }
    if (!reader.view(operands[i], views[i])) return {};
    // What was bound was seen to be plain then; a gradient may be asked for since.
    if (operands[i] != state.bound[i] ? !reader.is_plain(operands[i], gradients)
                                      : gradients && i != kUpcoming &&
                                            reader.requires_grad(operands[i])) {
      return {};
    }
    layouts.add(views[i]);
  }
  const std::shared_ptr<const Planned> planned = state.known.find(layouts, 0);
  if (planned == nullptr) return {};
  nb::object out = nb::borrow(operands[kOut]);
  const bool is_new = out.is_none();
  if (is_new) {
    if (!state.allocate(*planned, out, views[kOut])) return {};
  } else {
    for (std::size_t i = 0; i < kOut; ++i) {
      if (operands[i] != Py_None && overlap(views[kOut], views[i])) return {};
    }
  }
  const Stream stream = state.current_stream(planned->device);
  // Not asked of a tensor whose writes nobody counts.
  const std::int64_t version = state.constant ? reader.version(operands[kWeight]) : 0;
  const Sequence &sequence =
      choose(self, state, *planned, stream, version, views[kWeight].address());
  std::array<std::uint64_t, kOperands> addresses;
  for (std::size_t i = 0; i < kOperands; ++i) addresses[i] = views[i].address();
  state.launch(sequence, stream, addresses.data(), is_new ? nullptr : out.ptr());
  if (repeats) note_call(state, views, planned);
  return out;
}

PyObject *call(PyObject *self, PyObject *const *arguments, std::size_t flagged,
               PyObject *keywords) {
  return guarded([&]() -> PyObject * {
    const BoundState &state = *BoundObject::of(self)->state;
    const Range range(state);
    const std::size_t count = std::size_t(PyVectorcall_NARGS(flagged));
    PyObject *names[2] = {nullptr, out_name()};
    PyObject *sorted[2] = {};
    if (state.reader != nullptr &&
        sort_arguments(arguments, count, keywords, names, 2, 2, sorted) && sorted[0] != nullptr) {
      nb::object out =
          call_known(self, sorted[0], sorted[1] == nullptr ? Py_None : sorted[1]);
      if (out.is_valid()) return out.release().ptr();
    }
    return call_python(self, arguments, flagged, keywords);
  });
}

PyObject *set_up(PyObject *self, PyObject *arguments) {
  return guarded([&]() -> PyObject * {
    PyObject *reader, *torch, *make, *ranges, *weight, *bias, *out, *upcoming, *constant;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOO", &reader, &torch, &make, &ranges, &weight, &bias,
                          &out, &upcoming, &constant)) {
      return nullptr;
    }
    BoundState &state = *BoundObject::of(self)->state;
    state.set_up(reader, torch, make, ranges);
    PyObject *const objects[] = {weight, bias, out, upcoming};
    for (std::size_t i = 0; i < 4; ++i) {
      Py_INCREF(objects[i]);
      Py_XDECREF(state.bound[kWeight + i]);
      state.bound[kWeight + i] = objects[i];
    }
    state.constant = constant == Py_True;
    if (state.constant) {
      const nb::handle object = weight;
      state.version = nb::cast<std::int64_t>(object.attr("_version"));
      state.address = nb::cast<std::uint64_t>(object.attr("data_ptr")());
    }
    Py_RETURN_NONE;
  });
}

PyObject *remember_call(PyObject *self, PyObject *arguments) {
  return guarded([&]() -> PyObject * {
    PyObject *x, *out, *device, *plan;
    if (!PyArg_ParseTuple(arguments, "OOOO", &x, &out, &device, &plan)) return nullptr;
    BoundState &state = *BoundObject::of(self)->state;
    const nb::object tensors = nb::steal(
        PyTuple_Pack(5, x, state.bound[kWeight], state.bound[kBias], out, state.bound[kUpcoming]));
    remember(state, tensors.ptr(), 0, device, plan);
    Py_RETURN_NONE;
  });
}

PyObject *ask_may_start_early(PyObject *self, PyObject *arguments) {
  return guarded([&]() -> PyObject * {
    PyObject *stream, *object;
    if (!PyArg_ParseTuple(arguments, "OO", &stream, &object)) return nullptr;
    const Kernel &kernel = nb::cast<const Kernel &>(nb::handle(object));
    const Stream handle = parse_stream(kernel, stream);
    BoundState &state = *BoundObject::of(self)->state;
    return PyBool_FromLong(is_constant(self) && may_start_early(state, handle, kernel));
  });
}

PyObject *get_constant(PyObject *self, void *) {
  return guarded([&]() -> PyObject * { return PyBool_FromLong(is_constant(self)); });
}

PyObject *get_bound(PyObject *self, void *place) {
  PyObject *object = BoundObject::of(self)->state->bound[reinterpret_cast<std::uintptr_t>(place)];
  if (object == nullptr) object = Py_None;
  Py_INCREF(object);
  return object;
}

}  // namespace

void add_bound_call(nb::module_ &module) {
  static PyMethodDef methods[] = {
      {"_set_up", set_up, METH_VARARGS, "What is bound, and what calls are launched by."},
      {"_remember", remember_call, METH_VARARGS, "Launch such operands so from now on."},
      {"_may_start_early", ask_may_start_early, METH_VARARGS,
       "Whether a launch now cannot read what is still being written."},
      {nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef properties[] = {
      {"constant", get_constant, nullptr,
       "Whether the weight still counts as constant; once False, it stays so.", nullptr},
      {"weight", get_bound, nullptr, "The weight.", reinterpret_cast<void *>(kWeight)},
      {"bias", get_bound, nullptr, "The bias, or None.", reinterpret_cast<void *>(kBias)},
      {"out", get_bound, nullptr, "The output that was bound, or None.",
       reinterpret_cast<void *>(kOut)},
      {"upcoming", get_bound, nullptr, "What the next GEMV reads, or None.",
       reinterpret_cast<void *>(kUpcoming)},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  add_call_type<BoundState>(module, "BoundCall", BoundObject::make<call>, methods, properties,
                            "Launches a GEMV with a bound weight.");
}

}  // namespace sonata
