// A stand-in for libcuda.so.1 that runs nothing and writes down what it was asked.
//
// Each call appends one JSON line to the file that SONATA_TEST_CUDA_LOG names, in one write, so
// that threads and processes can share the file. Every line has `call`, `result`, `pid`, `thread`
// (the kernel's thread id) and `context` (the one current when the call came in; device n's
// primary context is 4096 + n, no context is 0), and then the arguments that matter.
//
// It behaves like a driver where the launcher could tell: nothing but the version and error texts
// works before cuInit, or in the child of a process that called it; an entry must occur in the
// image; a function launches only under the context that it was resolved for, and only with as
// much dynamic shared memory as was set for it (48 KB to begin with).
//
// Read at each call, so that a test can change them as it goes:
//   SONATA_TEST_CUDA_FAIL     "cuLaunchKernel=700;cuInit=100": these calls do nothing and return
//                             that code (versioned names may be given without their suffix)
//   SONATA_TEST_CUDA_DELAY    "cuInit=300": these calls take that many milliseconds
//   SONATA_TEST_CUDA_DEVICES  number of devices (1)
//   SONATA_TEST_CUDA_CC       their compute capability ("9.0")
//   SONATA_TEST_CUDA_MULTIPROCESSORS  "132,16": how many each device has, the last number for all
//                             that follow (132)
//   SONATA_TEST_CUDA_VERSION  what cuDriverGetVersion reports (13000)
//   SONATA_TEST_CUDA_CAPTURING  handle of a stream that is being captured, in decimal
//   SONATA_TEST_CUDA_JITLOG   text for the JIT error log of a load that fails

#include "state.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

// Never logged: they are no part of what a test checks, and every message needs them.
EXPORT int cuGetErrorName(int code, const char **name) {
  const auto found = error_texts().find(code);
  *name = found == error_texts().end() ? nullptr : found->second.first;
  return *name == nullptr ? 1 : 0;
}

EXPORT int cuGetErrorString(int code, const char **text) {
  const auto found = error_texts().find(code);
  *text = found == error_texts().end() ? nullptr : found->second.second;
  return *text == nullptr ? 1 : 0;
}

EXPORT int cuDriverGetVersion(int *version) {
  Call call("cuDriverGetVersion", false);
  if (!call.fails()) *version = std::atoi(environment("SONATA_TEST_CUDA_VERSION", "13000"));
  return call.done();
}

EXPORT int cuInit(unsigned flags) {
  Call call("cuInit", false);
  call.with("flags", number(flags));
  if (call.fails()) return call.done();
  pid_t nobody = 0;
  // A fork takes the memory of an initialised driver along, but not the driver.
  if (!initialised_by.compare_exchange_strong(nobody, getpid()) && nobody != getpid()) {
    return call.done(3);
  }
  return call.done();
}

EXPORT int cuDeviceGetCount(int *count) {
  Call call("cuDeviceGetCount");
  if (!call.fails()) *count = device_count();
  return call.done();
}

EXPORT int cuDeviceGet(int *device, int index) {
  Call call("cuDeviceGet");
  call.with("index", std::to_string(index));
  if (call.fails()) return call.done();
  if (index < 0 || index >= device_count()) return call.done(101);
  *device = index;
  return call.done();
}

EXPORT int cuDeviceGetName(char *name, int size, int device) {
  Call call("cuDeviceGetName");
  call.with("device", std::to_string(device));
  if (!call.fails()) std::snprintf(name, std::size_t(size), "Recording GPU %d", device);
  return call.done();
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
  Call call("cuDeviceGetAttribute");
  call.with("attribute", std::to_string(attribute)).with("device", std::to_string(device));
  if (call.fails()) return call.done();
  int major = 0;
  int minor = 0;
  if (std::sscanf(environment("SONATA_TEST_CUDA_CC", "9.0"), "%d.%d", &major, &minor) != 2) {
    return call.done(1);
  }
  switch (attribute) {
    case 16: *value = multiprocessors(device); break;
    case 75: *value = major; break;
    case 76: *value = minor; break;
    case 97: *value = kSharedOptin; break;
    default: return call.done(1);
  }
  return call.done();
}

EXPORT int cuDevicePrimaryCtxRetain(Context *context, int device) {
  Call call("cuDevicePrimaryCtxRetain");
  call.with("device", std::to_string(device));
  if (!call.fails()) *context = kFirstContext + Context(device);
  return call.done();
}

// For tests that make a context current before the launcher comes; the launcher does not use it.
EXPORT int cuCtxSetCurrent(Context context) {
  Call call("cuCtxSetCurrent");
  call.with("wanted", number(context));
  if (call.fails()) return call.done();
  if (!contexts.empty()) contexts.pop_back();
  if (context != 0) contexts.push_back(context);
  return call.done();
}

EXPORT int cuCtxGetCurrent(Context *context) {
  Call call("cuCtxGetCurrent");
  if (!call.fails()) *context = current();
  return call.done();
}

EXPORT int cuCtxPushCurrent_v2(Context context) {
  Call call("cuCtxPushCurrent_v2");
  call.with("wanted", number(context));
  if (!call.fails()) contexts.push_back(context);
  return call.done();
}

EXPORT int cuCtxPopCurrent_v2(Context *context) {
  Call call("cuCtxPopCurrent_v2");
  if (call.fails()) return call.done();
  if (contexts.empty()) return call.done(201);
  *context = contexts.back();
  contexts.pop_back();
  return call.done();
}

EXPORT int cuLibraryLoadData(Library **library, const void *image, int *options, void **values,
                             unsigned count, int *, void **, unsigned) {
  Call call("cuLibraryLoadData");
  const std::size_t size = image_size(image);
  call.with("address", number(image)).with("size", number(size));
  call.with("sha256", quoted(recording::sha256(static_cast<const unsigned char *>(image), size)));
  call.with("head", quoted(hex(image, std::min<std::size_t>(size, 16))));
  char *log = nullptr;
  std::size_t room = 0;
  std::string list;
  for (unsigned i = 0; i < count; ++i) {
    list += (i == 0 ? "" : ", ") + std::to_string(options[i]);
    if (options[i] == 5) log = static_cast<char *>(values[i]);
    if (options[i] == 6) room = reinterpret_cast<std::uintptr_t>(values[i]);
  }
  call.with("options", "[" + list + "]");
  if (call.fails()) {
    if (log != nullptr && room > 0) {
      std::snprintf(log, room, "%s", environment("SONATA_TEST_CUDA_JITLOG", ""));
    }
    return call.done();
  }
  *library = new Library{std::string(static_cast<const char *>(image), size)};
  return call.with("library", number(*library)).done();
}

EXPORT int cuLibraryUnload(Library *library) {
  Call call("cuLibraryUnload");
  return call.with("library", number(library)).done();
}

EXPORT int cuLibraryGetKernel(Kernel **kernel, Library *library, const char *name) {
  Call call("cuLibraryGetKernel");
  call.with("library", number(library)).with("entry", quoted(name));
  if (call.fails()) return call.done();
  if (library->image.find(name) == std::string::npos) return call.done(500);
  const std::lock_guard<std::mutex> lock(mutex);
  Kernel *&slot = kernels[{library, name}];
  if (slot == nullptr) slot = new Kernel{library, name, {}};
  *kernel = slot;
  return call.done();
}

EXPORT int cuKernelGetFunction(Function **function, Kernel *kernel) {
  Call call("cuKernelGetFunction");
  call.with("entry", quoted(kernel->entry));
  if (call.fails()) return call.done();
  if (current() == 0) return call.done(201);
  const std::lock_guard<std::mutex> lock(mutex);
  Function *&slot = kernel->functions[current()];
  if (slot == nullptr) {
    slot = new Function;
    slot->context = current();
    slot->entry = kernel->entry;
  }
  *function = slot;
  return call.with("function", number(slot)).done();
}

EXPORT int cuFuncLoad(Function *function) {
  Call call("cuFuncLoad");
  call.with("function", number(function));
  return call.done(current() == function->context ? 0 : 201);
}

EXPORT int cuFuncGetAttribute(int *value, int attribute, Function *function) {
  Call call("cuFuncGetAttribute");
  call.with("attribute", std::to_string(attribute)).with("function", number(function));
  if (call.fails()) return call.done();
  switch (attribute) {
    case 0: *value = 1024; break;
    case 1: *value = 2048; break;
    case 3: *value = 16; break;
    case 4: *value = 40; break;
    case 8: *value = function->dynamic_shared; break;
    default: return call.done(1);
  }
  return call.done();
}

EXPORT int cuFuncSetAttribute(Function *function, int attribute, int value) {
  Call call("cuFuncSetAttribute");
  call.with("attribute", std::to_string(attribute)).with("value", std::to_string(value));
  call.with("function", number(function));
  if (call.fails()) return call.done();
  if (attribute != 8 || value < 0 || value > kSharedOptin) return call.done(1);
  function->dynamic_shared = value;
  return call.done();
}

namespace {

int launch(Call &call, Function *function, const unsigned (&grid)[3], const unsigned (&block)[3],
           unsigned shared, const void *stream, void **params, void **extra) {
  const void *buffer = nullptr;
  std::size_t size = 0;
  for (void **at = extra; at != nullptr && *at != nullptr; at += 2) {
    if (at[0] == reinterpret_cast<void *>(1)) buffer = at[1];
    if (at[0] == reinterpret_cast<void *>(2)) size = *static_cast<std::size_t *>(at[1]);
  }
  call.with("entry", quoted(function->entry)).with("function", number(function));
  call.with("grid", triple(grid[0], grid[1], grid[2]));
  call.with("block", triple(block[0], block[1], block[2]));
  call.with("shared", number(shared)).with("stream", number(stream));
  call.with("params", quoted(hex(buffer, size)));
  call.with("kernel_params", params == nullptr ? "false" : "true");
  if (call.fails()) return call.done();
  if (current() != function->context) return call.done(400);
  return call.done(int(shared) > function->dynamic_shared ? 1 : 0);
}

struct Attribute {  // CUlaunchAttribute
  int id;
  int padding;
  int value[16];
};

struct Config {  // CUlaunchConfig
  unsigned grid[3];
  unsigned block[3];
  unsigned shared;
  const void *stream;
  const Attribute *attributes;
  unsigned count;
};

}  // namespace

EXPORT int cuStreamIsCapturing(std::uintptr_t stream, int *status) {
  Call call("cuStreamIsCapturing");
  call.with("stream", number(stream));
  if (call.fails()) return call.done();
  const std::string captured = environment("SONATA_TEST_CUDA_CAPTURING", "none");
  *status = captured == std::to_string(stream) ? 1 : 0;
  return call.done();
}

EXPORT int cuLaunchKernel(Function *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                          const void *stream, void **params, void **extra) {
  Call call("cuLaunchKernel");
  return launch(call, function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared,
                stream, params, extra);
}

EXPORT int cuLaunchKernelEx(const Config *config, Function *function, void **params,
                            void **extra) {
  Call call("cuLaunchKernelEx");
  std::string list;
  for (unsigned i = 0; i < config->count; ++i) {
    const Attribute &attribute = config->attributes[i];
    list += (i == 0 ? "[" : ", [") + std::to_string(attribute.id) + ", " +
            std::to_string(attribute.value[0]) + "]";
  }
  call.with("attributes", "[" + list + "]");
  return launch(call, function, config->grid, config->block, config->shared, config->stream,
                params, extra);
}
