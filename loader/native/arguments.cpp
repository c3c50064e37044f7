#include "arguments.hpp"

#include <climits>
#include <cstdint>
#include <string>

#include "error.hpp"

namespace nb = nanobind;

namespace sonata {

namespace {

constexpr std::size_t kMaxParamBytes = 4096;  // of every architecture and driver since CUDA 12.0
constexpr unsigned kMaxBlockThreads = 1024;

constexpr const char *kNames[2][3] = {{"grid.x", "grid.y", "grid.z"},
                                      {"block.x", "block.y", "block.z"}};
constexpr long long kLimits[2][3] = {{INT_MAX, 65535, 65535}, {1024, 1024, 64}};

std::string for_kernel(const Kernel &kernel) {
  return " of kernel " + quoted(kernel.entry()) + " of " + quoted(kernel.module().label);
}

[[noreturn]] void throw_type(const std::string &what, nb::handle got, const char *wanted) {
  PyErr_Clear();
  const nb::str name(got.type().attr("__name__"));  // a metaclass may have made it anything
  throw nb::type_error((what + " must be " + wanted + ", not " + quoted(name.c_str())).c_str());
}

// An integer that need not fit: `overflow` is its sign if it does not.
long long integer(nb::handle value, int &overflow, const char *name) {
  const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (number == -1 && overflow == 0 && PyErr_Occurred() != nullptr) {
    throw_type(name, value, "an int");
  }
  return number;
}

std::string text_of(long long number, int overflow) {
  if (overflow != 0) return overflow > 0 ? "a number above 2**63" : "a number below -2**63";
  return std::to_string(number);
}

[[noreturn]] void throw_extent(const Kernel &kernel, int kind, int axis, long long value,
                               int overflow) {
  const char *remedy = nullptr;
  if (overflow < 0 || (overflow == 0 && value < 1)) {
    remedy = value == 0 && kind == 0
                 ? "skip the launch when there is nothing to do: an empty grid is no launch"
                 : "pass at least 1";
  } else if (kind == 1) {
    remedy = "use a smaller block and more blocks";
  } else if (axis == 0) {
    remedy = "split the work over several launches";
  } else {
    remedy = "put the large extent on grid.x, or split the work over several launches";
  }
  throw_argument_error(kNames[kind][axis] + for_kernel(kernel) + " is " +
                           text_of(value, overflow) + ", outside 1 to " +
                           std::to_string(kLimits[kind][axis]),
                       remedy);
}

Dim3 parse_extents(const Kernel &kernel, nb::handle tuple, int kind) {
  const char *name = kind == 0 ? "grid" : "block";
  if (!PyTuple_Check(tuple.ptr())) throw_type(name, tuple, "a tuple of three ints");
  if (const Py_ssize_t size = PyTuple_Size(tuple.ptr()); size != 3) {
    throw_argument_error(name + for_kernel(kernel) + " has " + std::to_string(size) + " extents",
                         "pass three: (x, y, z)");
  }
  unsigned extents[3];
  for (int axis = 0; axis < 3; ++axis) {
    int overflow = 0;
    const long long value =
        integer(PyTuple_GetItem(tuple.ptr(), axis), overflow, kNames[kind][axis]);
    if (overflow != 0 || value < 1 || value > kLimits[kind][axis]) {
      throw_extent(kernel, kind, axis, value, overflow);
    }
    extents[axis] = unsigned(value);
  }
  return {extents[0], extents[1], extents[2]};
}

}  // namespace

Dim3 parse_grid(const Kernel &kernel, nb::handle grid) { return parse_extents(kernel, grid, 0); }

Dim3 parse_block(const Kernel &kernel, nb::handle block) {
  const Dim3 dim = parse_extents(kernel, block, 1);
  if (const unsigned threads = dim.x * dim.y * dim.z; threads > kMaxBlockThreads) {
    throw_argument_error("block" + for_kernel(kernel) + " is (" + std::to_string(dim.x) + ", " +
                             std::to_string(dim.y) + ", " + std::to_string(dim.z) + "), which is " +
                             std::to_string(threads) + " threads, more than 1024",
                         "use a smaller block and more blocks");
  }
  return dim;
}

Stream parse_stream(const Kernel &kernel, nb::handle stream) {
  if (!PyLong_Check(stream.ptr())) {
    throw_type("stream", stream, "an int handle, such as torch.cuda.Stream.cuda_stream");
  }
  const unsigned long long handle = PyLong_AsUnsignedLongLong(stream.ptr());
  if (handle == ULLONG_MAX && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw_argument_error("stream" + for_kernel(kernel) + " is not a 64-bit handle",
                         "pass torch.cuda.Stream.cuda_stream, or 0 for the default stream");
  }
  return reinterpret_cast<Stream>(static_cast<std::uintptr_t>(handle));
}

void check_params(const Kernel &kernel, std::size_t size) {
  if (size <= kMaxParamBytes) return;
  throw_argument_error("params" + for_kernel(kernel) + " has " + std::to_string(size) +
                           " bytes, more than the 4096 that a kernel takes",
                       "pass large arguments through device memory");
}

int parse_shared_bytes(const std::string &entry, nb::handle shared_bytes) {
  int overflow = 0;
  const long long value = integer(shared_bytes, overflow, "shared_bytes");
  if (overflow != 0 || value < 0 || value > INT_MAX) {
    throw_argument_error(
        "shared_bytes of kernel " + quoted(entry) + " is " + text_of(value, overflow),
        "pass the bytes of dynamic shared memory that the manifest names, 0 or more");
  }
  return int(value);
}

}  // namespace sonata
