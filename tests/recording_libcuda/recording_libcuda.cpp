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
//   SONATA_TEST_CUDA_VERSION  what cuDriverGetVersion reports (13000)
//   SONATA_TEST_CUDA_JITLOG   text for the JIT error log of a load that fails

#include <elf.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sha256.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Context = std::uintptr_t;  // 4096 + device
constexpr Context kFirstContext = 4096;
constexpr int kSharedOptin = 232448;
constexpr int kSharedDefault = 49152;

struct Library {
  std::string image;
};

struct Function {
  Context context = 0;
  std::atomic<int> dynamic_shared{kSharedDefault};
  std::string entry;
};

struct Kernel {
  Library *library = nullptr;
  std::string entry;
  std::map<Context, Function *> functions;
};

std::mutex mutex;  // over the tables below
std::map<std::pair<Library *, std::string>, Kernel *> kernels;
std::atomic<pid_t> initialised_by{0};
thread_local std::vector<Context> contexts;

const char *environment(const char *name, const char *otherwise) {
  const char *value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

int device_count() { return std::atoi(environment("SONATA_TEST_CUDA_DEVICES", "1")); }

Context current() { return contexts.empty() ? 0 : contexts.back(); }

std::string quoted(const std::string &text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f || c == '"' || c == '\\') {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", byte);
      out += escape;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string hex(const void *data, std::size_t size) {
  std::string out;
  for (std::size_t i = 0; i < size; ++i) {
    char part[3];
    std::snprintf(part, sizeof part, "%02x", static_cast<const unsigned char *>(data)[i]);
    out += part;
  }
  return out;
}

std::string number(std::uintptr_t value) { return std::to_string(value); }
std::string number(const void *value) { return number(reinterpret_cast<std::uintptr_t>(value)); }

std::string triple(unsigned x, unsigned y, unsigned z) {
  return "[" + number(x) + ", " + number(y) + ", " + number(z) + "]";
}

// What a variable such as "cuLaunchKernel=700;cuInit=100" says of this call, or 0.
int knob_of(const char *variable, const std::string &call) {
  const std::string knob = std::string(";") + environment(variable, "") + ";";
  for (const std::string &name : {call, call.substr(0, call.find("_v"))}) {
    const auto at = knob.find(";" + name + "=");
    if (at != std::string::npos) return std::atoi(knob.c_str() + at + name.size() + 2);
  }
  return 0;
}

// One call: its line is written when it returns.
class Call {
 public:
  explicit Call(const char *name, bool needs_init = true)
      : name_(name), context_(current()), result_(knob_of("SONATA_TEST_CUDA_FAIL", name)) {
    const int delay = knob_of("SONATA_TEST_CUDA_DELAY", name);
    if (delay > 0) std::this_thread::sleep_for(std::chrono::milliseconds(delay));
    if (result_ == 0 && needs_init && initialised_by != getpid()) result_ = 3;
  }

  Call &with(const char *key, const std::string &json) {
    fields_ += std::string(", \"") + key + "\": " + json;
    return *this;
  }

  bool fails() const { return result_ != 0; }

  int done(int result = 0) {
    if (result_ == 0) result_ = result;
    const char *path = std::getenv("SONATA_TEST_CUDA_LOG");
    if (path == nullptr || *path == '\0') return result_;
    const std::string line = "{\"call\": " + quoted(name_) + ", \"result\": " +
                             std::to_string(result_) + ", \"pid\": " + std::to_string(getpid()) +
                             ", \"thread\": " + std::to_string(syscall(SYS_gettid)) +
                             ", \"context\": " + number(context_) + fields_ + "}\n";
    const int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || write(file, line.data(), line.size()) != ssize_t(line.size())) std::abort();
    close(file);
    return result_;
  }

 private:
  std::string name_;
  Context context_;
  int result_;
  std::string fields_;
};

// cuLibraryLoadData is told no size: text ends at its NUL, an ELF file where its last part does.
std::size_t image_size(const void *image) {
  const auto *bytes = static_cast<const unsigned char *>(image);
  if (std::memcmp(bytes, ELFMAG, SELFMAG) != 0) {
    return std::strlen(static_cast<const char *>(image));
  }
  Elf64_Ehdr header;
  std::memcpy(&header, bytes, sizeof header);
  std::size_t end = std::max(header.e_shoff + std::size_t{header.e_shnum} * header.e_shentsize,
                             header.e_phoff + std::size_t{header.e_phnum} * header.e_phentsize);
  for (unsigned i = 0; i < header.e_shnum; ++i) {
    Elf64_Shdr section;
    std::memcpy(&section, bytes + header.e_shoff + std::size_t{i} * header.e_shentsize,
                sizeof section);
    if (section.sh_type != SHT_NOBITS) {
      end = std::max<std::size_t>(end, section.sh_offset + section.sh_size);
    }
  }
  return end;
}

const std::map<int, std::pair<const char *, const char *>> &error_texts() {
  static const std::map<int, std::pair<const char *, const char *>> texts{
      {0, {"CUDA_SUCCESS", "no error"}},
      {1, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
      {2, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
      {3, {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"}},
      {100, {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"}},
      {101, {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}},
      {200, {"CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
      {201, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
      {209, {"CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for this device"}},
      {218, {"CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"}},
      {222, {"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX has another version"}},
      {400, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
      {500, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
      {700, {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
      {701, {"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"}},
      {802, {"CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"}},
  };
  return texts;
}

}  // namespace

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
    case 16: *value = 132; break;
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

EXPORT int cuLaunchKernel(Function *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                          const void *stream, void **params, void **extra) {
  Call call("cuLaunchKernel");
  const void *buffer = nullptr;
  std::size_t size = 0;
  for (void **at = extra; at != nullptr && *at != nullptr; at += 2) {
    if (at[0] == reinterpret_cast<void *>(1)) buffer = at[1];
    if (at[0] == reinterpret_cast<void *>(2)) size = *static_cast<std::size_t *>(at[1]);
  }
  call.with("entry", quoted(function->entry)).with("function", number(function));
  call.with("grid", triple(grid_x, grid_y, grid_z));
  call.with("block", triple(block_x, block_y, block_z));
  call.with("shared", number(shared)).with("stream", number(stream));
  call.with("params", quoted(hex(buffer, size)));
  call.with("kernel_params", params == nullptr ? "false" : "true");
  if (call.fails()) return call.done();
  if (current() != function->context) return call.done(400);
  return call.done(int(shared) > function->dynamic_shared ? 1 : 0);
}
