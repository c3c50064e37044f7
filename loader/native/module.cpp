// The Python module: arguments in, GIL released around the driver, exceptions out.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "calls.hpp"
#include "context.hpp"
#include "driver.hpp"
#include "error.hpp"
#include "gil.hpp"
#include "kernel.hpp"
#include "library.hpp"
#include "python_error.hpp"
#include "sequence.hpp"
#include "tensors.hpp"
#include "torch.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace sonata {
namespace {

nb::dict py_driver_state() {
  DriverState state;
  {
    const GilRelease unlocked;
    state = driver_state();
  }
  nb::dict result;
  result["available"] = state.available;
  result["reason"] = state.available ? nb::none() : text(state.reason);
  result["version"] = state.version ? nb::cast(*state.version) : nb::none();
  result["library"] = state.path ? text(*state.path) : nb::none();
  return result;
}

nb::list py_devices() {
  std::vector<DeviceInfo> found;
  {
    const GilRelease unlocked;
    found = devices(driver());
  }
  nb::list result;
  for (const DeviceInfo &info : found) {
    nb::dict entry;
    entry["index"] = info.index;
    entry["name"] = text(info.name);
    entry["major"] = info.major;
    entry["minor"] = info.minor;
    entry["multiprocessors"] = info.multiprocessors;
    entry["shared_per_block_optin"] = info.shared_per_block_optin;
    result.append(entry);
  }
  return result;
}

Library py_load(const nb::bytes &image, const std::string &label, int device, bool ptx) {
  if (image.size() == 0) {
    throw_argument_error("the image of " + quoted(label) + " is empty",
                         "check the artifact: sonata-aot verify");
  }
  const char *data = image.c_str();  // the caller's own bytes, kept alive by the call
  const GilRelease unlocked;
  return Library::load(data, label, device, ptx);
}

Kernel py_kernel(const Library &library, const std::string &entry, nb::handle shared_bytes) {
  if (entry.empty() || entry.find('\0') != std::string::npos) {
    throw_argument_error("the entry asked of " + quoted(library.module().label) +
                             (entry.empty() ? " is empty" : " contains a NUL character"),
                         "pass the entry symbol that the manifest names");
  }
  const int bytes = parse_shared_bytes(entry, shared_bytes);
  const GilRelease unlocked;
  return library.kernel(entry, bytes);
}

nb::dict py_attributes(const Kernel &kernel) {
  KernelAttributes found;
  {
    const GilRelease unlocked;
    found = kernel.attributes();
  }
  nb::dict result;
  result["registers"] = found.registers;
  result["local_bytes"] = found.local_bytes;
  result["static_shared_bytes"] = found.static_shared_bytes;
  result["max_threads"] = found.max_threads;
  return result;
}

// Handles rather than converted types: the arguments are read in place, once.
void py_launch(const Kernel &kernel, nb::handle grid, nb::handle block, nb::handle stream,
               const nb::bytes &params, bool programmatic) {
  const Dim3 grid_dim = parse_grid(kernel, grid);
  const Dim3 block_dim = parse_block(kernel, block);
  const Stream handle = parse_stream(kernel, stream);
  const std::size_t size = params.size();
  const char *data = params.c_str();
  check_params(kernel, size);
  const GilRelease unlocked;
  kernel.launch(grid_dim, block_dim, handle, data, size, programmatic);
}

// A tuple of so many items. Raises TypeError, saying what it should be.
nb::tuple tuple_of(nb::handle item, Py_ssize_t size, const char *what) {
  if (!PyTuple_Check(item.ptr()) || (size >= 0 && PyTuple_Size(item.ptr()) != size)) {
    throw nb::type_error(what);
  }
  return nb::borrow<nb::tuple>(item);
}

std::vector<Patch> parse_patches(nb::handle patches) {
  constexpr const char *kWhat = "patches must be a tuple of tuples (offset, operand, added)";
  std::vector<Patch> parsed;
  for (nb::handle item : tuple_of(patches, -1, kWhat)) {
    const nb::tuple patch = tuple_of(item, 3, kWhat);
    parsed.push_back({nb::cast<std::size_t>(patch[0]), nb::cast<std::size_t>(patch[1]),
                      nb::cast<std::uint64_t>(patch[2])});
  }
  return parsed;
}

Launch parse_launch(nb::handle item) {
  const nb::tuple launch = tuple_of(
      item, 6, "a launch must be a tuple (kernel, grid, block, params, patches, programmatic)");
  const Kernel &kernel = nb::cast<const Kernel &>(launch[0]);
  const nb::bytes params = nb::cast<nb::bytes>(launch[3]);
  check_params(kernel, params.size());
  return {kernel,
          parse_grid(kernel, launch[1]),
          parse_block(kernel, launch[2]),
          nb::cast<bool>(launch[5]),
          std::vector<char>(params.c_str(), params.c_str() + params.size()),
          parse_patches(launch[4])};
}

void py_sequence(Sequence *self, const nb::list &launches, std::size_t operands) {
  std::vector<Launch> parsed;
  try {
    for (nb::handle item : launches) parsed.push_back(parse_launch(item));
  } catch (const nb::cast_error &) {
    throw nb::type_error("a launch has an item of the wrong type");
  }
  new (self) Sequence(std::move(parsed), operands);
}

void py_sequence_launch(const Sequence &sequence, nb::handle stream, nb::handle addresses) {
  const std::size_t count = sequence.operands();
  if (!PyTuple_Check(addresses.ptr()) || PyTuple_Size(addresses.ptr()) != Py_ssize_t(count)) {
    throw nb::type_error(
        ("addresses must be a tuple of " + std::to_string(count) + " ints").c_str());
  }
  std::array<std::uint64_t, Sequence::kMostOperands> parsed;
  for (std::size_t i = 0; i < count; ++i) {
    parsed[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(addresses.ptr(), Py_ssize_t(i)));
    if (parsed[i] == ~std::uint64_t{0} && PyErr_Occurred() != nullptr) throw nb::python_error();
  }
  if (sequence.launches().empty()) return;
  const Stream handle = parse_stream(sequence.launches().front().kernel, stream);
  const GilRelease unlocked;
  sequence.launch(handle, parsed.data());
}

void py_sequence_launch_tensors(const Sequence &sequence, const TensorReader &reader,
                                nb::handle stream, nb::handle tensors) {
  std::array<std::uint64_t, Sequence::kMostOperands> addresses;
  reader.addresses(tensors, sequence.operands(), addresses.data());
  if (sequence.launches().empty()) return;
  const Stream handle = parse_stream(sequence.launches().front().kernel, stream);
  const GilRelease unlocked;
  sequence.launch(handle, addresses.data());
}

bool py_is_capturing(const Kernel &kernel, nb::handle stream) {
  const Stream handle = parse_stream(kernel, stream);
  const GilRelease unlocked;
  return kernel.is_capturing(handle);
}

nb::object py_sequence_repr(const Sequence &sequence) {
  std::string names;
  for (const Launch &launch : sequence.launches()) {
    names += (names.empty() ? "" : ", ") + quoted(launch.kernel.entry());
  }
  return text("<Sequence of " + (names.empty() ? "nothing" : names) + ">");
}

nb::object py_library_repr(const Library &library) {
  return text("<Library " + quoted(library.module().label) + " on device " +
              std::to_string(library.module().device) + ">");
}

nb::object py_kernel_repr(const Kernel &kernel) {
  return text("<Kernel " + quoted(kernel.entry()) + " of " + quoted(kernel.module().label) +
              " on device " + std::to_string(kernel.module().device) + ">");
}

}  // namespace
}  // namespace sonata

NB_MODULE(_native, m) {
  using namespace sonata;

  watch_forks();
  // Kernels that a server still holds when it exits are no leak worth a report on its stderr.
  nb::set_leak_warnings(false);
  nb::register_exception_translator([](const std::exception_ptr &pointer, void *) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error &error) {
      raise_python(error);
    }
  });

  m.doc() = "Loads compiled kernels through the CUDA driver and launches them.";
  m.def("driver_state", &py_driver_state,
        "Whether the driver is usable, and why not. Initialises it; never raises.");
  m.def("devices", &py_devices, "The devices that this process sees.");
  m.def("load", &py_load, "image"_a, "label"_a, "device"_a, nb::kw_only(), "ptx"_a = false,
        "Loads a cubin or PTX image on a device, for good: libraries are never unloaded.");

  nb::class_<Library>(m, "Library", nb::is_final())
      .def("kernel", &py_kernel, "entry"_a, "shared_bytes"_a = 0,
           nb::sig("def kernel(self, entry: str, shared_bytes: int = 0) -> Kernel"),
           "Resolves an entry and loads its code into the device's context.")
      .def("__repr__", &py_library_repr);

  nb::class_<Kernel>(m, "Kernel", nb::is_final())
      .def("attributes", &py_attributes, "What the driver says about the machine code.")
      .def("launch", &py_launch, "grid"_a, "block"_a, "stream"_a, "params"_a,
           "programmatic"_a = false,
           nb::sig("def launch(self, grid: tuple[int, int, int], block: tuple[int, int, int], "
                   "stream: int, params: bytes, programmatic: bool = False) -> None"),
           "Enqueues the kernel on a stream handle with a packed parameter block; never waits.")
      .def("is_capturing", &py_is_capturing, "stream"_a,
           nb::sig("def is_capturing(self, stream: int) -> bool"),
           "Whether a stream of the kernel's device is being captured into a graph.")
      .def("__repr__", &py_kernel_repr);

  nb::class_<Torch>(m, "Torch", nb::is_final())
      .def(nb::init<nb::object, nb::object, nb::object, const nb::tuple &>(),
           "is_grad_enabled"_a, "current_stream"_a, "increment_version"_a,
           "samples"_a = nb::tuple(),
           nb::sig("def __init__(self, is_grad_enabled: Callable[[], bool], current_stream: "
                   "Callable[[int], int], increment_version: Callable[[tuple[object]], object], "
                   "samples: tuple[object, ...] = ()) -> None"),
           "What calls ask of torch: its C functions where it has them, else these.")
      .def_prop_ro(
          "has_handles", [](const Torch &torch) { return torch.handles().usable(); },
          "Whether tensors that were seen before are compared by torch's C functions.")
      .def(
          "current_stream",
          [](const Torch &torch, int device) {
            Stream stream = nullptr;
            if (!torch.current_stream(device, stream)) throw nb::python_error();
            return std::uint64_t(reinterpret_cast<std::uintptr_t>(stream));
          },
          "device"_a, "Handle of torch's current stream on a device.")
      .def(
          "is_grad_enabled",
          [](const Torch &torch) {
            bool enabled = false;
            if (!torch.grad_enabled(enabled)) throw nb::python_error();
            return enabled;
          },
          "Whether gradients are asked for on this thread.");

  nb::class_<TensorReader>(m, "TensorReader", nb::is_final())
      .def(nb::init<nb::handle, const nb::tuple &>(), "api"_a.none(), "classes"_a,
           nb::sig("def __init__(self, api: object, classes: tuple[type, ...]) -> None"),
           "Reads tensors of exactly these classes through DLPack's exchange API.")
      .def("describe", &TensorReader::describe, "tensors"_a, "gradients"_a,
           nb::sig("def describe(self, tensors: tuple[object, ...], gradients: bool) "
                   "-> bytes | None"),
           "Bytes that stand for the layouts of tensors; None where one is not plain.")
      .def("overlaps", &TensorReader::overlaps, "tensors"_a,
           nb::sig("def overlaps(self, tensors: tuple[object, ...]) -> bool"),
           "Whether the last tensor's memory overlaps that of another one.");

  nb::class_<Sequence>(m, "Sequence", nb::is_final())
      .def("__init__", &py_sequence, "launches"_a, "operands"_a,
           nb::sig("def __init__(self, launches: list[tuple[Kernel, tuple[int, int, int], "
                   "tuple[int, int, int], bytes, tuple[tuple[int, int, int], ...], bool]], "
                   "operands: int) -> None"),
           "Prepares launches that one call issues in order.")
      .def("launch", &py_sequence_launch, "stream"_a, "addresses"_a,
           nb::sig("def launch(self, stream: int, addresses: tuple[int, ...]) -> None"),
           "Enqueues all launches on a stream, given the operands' addresses; never waits.")
      .def("launch_tensors", &py_sequence_launch_tensors, "reader"_a, "stream"_a, "tensors"_a,
           nb::sig("def launch_tensors(self, reader: TensorReader, stream: int, "
                   "tensors: tuple[object, ...]) -> None"),
           "The same, given the operands themselves.")
      .def("__repr__", &py_sequence_repr);

  add_gemv_call(m);
  add_bound_call(m);
}
