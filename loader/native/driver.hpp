// The part of the CUDA driver API that the launcher uses, opened at run time.
//
// Nothing of CUDA is needed to compile or link this: the few types, constants and prototypes are
// declared here. The driver API's ABI is stable, so the values below hold for every driver.
#pragma once

#include <atomic>
#include <cstddef>
#include <optional>
#include <string>

namespace sonata {

using Result = int;  // CUresult: a C enum, 0 is success
using Device = int;  // CUdevice
using Context = struct OpaqueContext *;
using DriverLibrary = struct OpaqueLibrary *;
using DriverKernel = struct OpaqueKernel *;
using Function = struct OpaqueFunction *;
using Stream = struct OpaqueStream *;

// CUdevice_attribute
constexpr int kDeviceMultiprocessors = 16;
constexpr int kDeviceMajor = 75;
constexpr int kDeviceMinor = 76;
constexpr int kDeviceSharedPerBlockOptin = 97;

// CUfunction_attribute
constexpr int kFunctionMaxThreads = 0;
constexpr int kFunctionStaticSharedBytes = 1;
constexpr int kFunctionLocalBytes = 3;
constexpr int kFunctionRegisters = 4;
constexpr int kFunctionMaxDynamicSharedBytes = 8;

// CUjit_option
constexpr int kJitErrorLogBuffer = 5;
constexpr int kJitErrorLogBufferBytes = 6;

// CUstreamCaptureStatus
constexpr int kNotCapturing = 0;

// Markers in the `extra` argument of cuLaunchKernel.
inline void *const kParamEnd = nullptr;
inline void *const kParamBuffer = reinterpret_cast<void *>(1);
inline void *const kParamBufferSize = reinterpret_cast<void *>(2);

// CUlaunchAttributeID: the launch may begin before what precedes it on the stream has ended.
constexpr int kProgrammaticStreamSerialization = 6;

// CUlaunchAttribute: an id, and a union of 64 bytes of which a flag takes the first four.
struct LaunchAttribute {
  int id = 0;
  int padding = 0;
  alignas(8) int value[16] = {};
};
static_assert(sizeof(LaunchAttribute) == 72);

// CUlaunchConfig
struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute *attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56);

// member, exported name (versioned where the driver versions it), argument types
#define SONATA_DRIVER_ENTRIES(X)                                                                  \
  X(get_error_name, "cuGetErrorName", Result, const char **)                                      \
  X(get_error_string, "cuGetErrorString", Result, const char **)                                  \
  X(driver_get_version, "cuDriverGetVersion", int *)                                              \
  X(init, "cuInit", unsigned)                                                                     \
  X(device_get_count, "cuDeviceGetCount", int *)                                                  \
  X(device_get, "cuDeviceGet", Device *, int)                                                     \
  X(device_get_name, "cuDeviceGetName", char *, int, Device)                                      \
  X(device_get_attribute, "cuDeviceGetAttribute", int *, int, Device)                             \
  X(primary_context_retain, "cuDevicePrimaryCtxRetain", Context *, Device)                        \
  X(context_get_current, "cuCtxGetCurrent", Context *)                                            \
  X(context_push_current, "cuCtxPushCurrent_v2", Context)                                         \
  X(context_pop_current, "cuCtxPopCurrent_v2", Context *)                                         \
  X(library_load_data, "cuLibraryLoadData", DriverLibrary *, const void *, int *, void **,        \
    unsigned, int *, void **, unsigned)                                                           \
  X(library_get_kernel, "cuLibraryGetKernel", DriverKernel *, DriverLibrary, const char *)        \
  X(kernel_get_function, "cuKernelGetFunction", Function *, DriverKernel)                         \
  X(function_get_attribute, "cuFuncGetAttribute", int *, int, Function)                           \
  X(function_set_attribute, "cuFuncSetAttribute", Function, int, int)                             \
  X(stream_is_capturing, "cuStreamIsCapturing", Stream, int *)                                    \
  X(launch_kernel, "cuLaunchKernel", Function, unsigned, unsigned, unsigned, unsigned, unsigned,  \
    unsigned, unsigned, Stream, void **, void **)                                                 \
  X(launch_kernel_ex, "cuLaunchKernelEx", const LaunchConfig *, Function, void **, void **)

// Used where the driver has them (CUDA 12.4 on).
#define SONATA_OPTIONAL_DRIVER_ENTRIES(X) X(function_load, "cuFuncLoad", Function)

struct DriverApi {
#define SONATA_MEMBER(member, symbol, ...) Result (*member)(__VA_ARGS__) = nullptr;
  SONATA_DRIVER_ENTRIES(SONATA_MEMBER)
  SONATA_OPTIONAL_DRIVER_ENTRIES(SONATA_MEMBER)
#undef SONATA_MEMBER
};

struct DriverState {
  bool available = false;
  std::string reason;  // why not, when it is not available
  std::optional<int> version;
  std::optional<std::string> path;
};

// The driver, opened and initialised on first use. Throws DriverUnavailable or ForkedProcess.
const DriverApi &driver();

// The same as a report; never throws for want of a driver. It initialises the driver, too.
DriverState driver_state();

// Set in a child that was forked after its parent had begun to use the driver. Every lock and
// handle that the child inherited is then suspect, so each entry point looks here first.
extern std::atomic<bool> forked;

// Called once, when the module is imported: no fork can then slip in before the first use.
void watch_forks();

[[noreturn]] void throw_forked();

inline void require_not_forked() {
  if (__builtin_expect(forked.load(std::memory_order_relaxed), 0)) throw_forked();
}

}  // namespace sonata
