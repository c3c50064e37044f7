#include "library.hpp"

#include <array>
#include <cstdint>
#include <utility>

#include "context.hpp"
#include "error.hpp"
#include "kernel.hpp"

namespace sonata {

namespace {

// Where the driver writes its PTX compiler's errors. A driver may compile as late as the first
// use of a kernel and keeps the pointers until then, so a log lives as long as its library does:
// for good.
struct JitLog {
  std::array<char, 8192> text{};
  std::array<int, 2> options{kJitErrorLogBuffer, kJitErrorLogBufferBytes};
  std::array<void *, 2> values{text.data(), reinterpret_cast<void *>(std::uintptr_t{8191})};

  // One line, for an error message; empty when the compiler said nothing.
  std::string message() const {
    std::string line;
    for (const char *at = text.data(); *at != '\0'; ++at) line += *at == '\n' ? ' ' : *at;
    while (!line.empty() && line.back() == ' ') line.pop_back();
    return line;
  }
};

std::string shared_remedy(const DriverApi &api, int device) {
  DeviceInfo info;
  if (query_device(api, device, info)) return {};
  return info.name + " gives a block at most " + std::to_string(info.shared_per_block_optin) +
         " bytes of shared memory, static and dynamic together: use a variant that needs less";
}

}  // namespace

Library Library::load(const char *image, std::string label, int device, bool ptx) {
  const DriverApi &api = driver();
  auto module = std::make_shared<Module>();
  module->api = &api;
  module->label = std::move(label);
  module->device = device;
  module->context = primary_context(api, device, module->label);

  std::unique_ptr<JitLog> log;
  if (ptx) log = std::make_unique<JitLog>();
  int *options = log ? log->options.data() : nullptr;
  void **values = log ? log->values.data() : nullptr;
  const unsigned count = log ? unsigned(log->options.size()) : 0U;
  const Failure failure = with_context(api, module->context, [&]() noexcept {
    return Failure{"cuLibraryLoadData",
                   api.library_load_data(&module->handle, image, options, values, count, nullptr,
                                         nullptr, 0U)};
  });
  if (failure) {
    std::string context =
        "loading " + quoted(module->label) + " on " + describe_device(api, device);
    if (log && !log->message().empty()) context += ", compiler log: " + log->message();
    DeviceInfo info;
    const bool known = !query_device(api, device, info);
    throw_driver_error(api, failure, context,
                       known ? remedy_for(failure.code, info.arch()) : std::string());
  }
  log.release();  // see JitLog
  return Library(std::move(module));
}

Kernel Library::kernel(const std::string &entry, int shared_bytes) const {
  require_not_forked();
  Module &module = *module_;
  const DriverApi &api = *module.api;

  // One thread at a time: the largest shared memory limit must win, whatever the order.
  const std::lock_guard<std::mutex> lock(module.mutex);
  Function function = nullptr;
  Failure failure = with_context(api, module.context, [&]() noexcept -> Failure {
    DriverKernel kernel = nullptr;
    if (const Result code = api.library_get_kernel(&kernel, module.handle, entry.c_str())) {
      return {"cuLibraryGetKernel", code};
    }
    if (const Result code = api.kernel_get_function(&function, kernel)) {
      return {"cuKernelGetFunction", code};
    }
    if (api.function_load != nullptr) return {"cuFuncLoad", api.function_load(function)};
    return {};
  });
  const auto doing = [&] {
    return "resolving kernel " + quoted(entry) + " of " + quoted(module.label) + " on " +
           describe_device(api, module.device);
  };
  if (failure) throw_driver_error(api, failure, doing());

  // Kernels of one entry share one function, so the limit is only ever raised: a launch that was
  // resolved with more must go on working.
  int &limit = module.dynamic_shared_limits[function];
  if (shared_bytes > limit) {
    failure = with_context(api, module.context, [&]() noexcept {
      return Failure{"cuFuncSetAttribute",
                     api.function_set_attribute(function, kFunctionMaxDynamicSharedBytes,
                                                shared_bytes)};
    });
    if (failure) {
      throw_driver_error(api, failure,
                         doing() + " with " + std::to_string(shared_bytes) +
                             " bytes of dynamic shared memory",
                         failure.code == 1 ? shared_remedy(api, module.device) : std::string());
    }
    limit = shared_bytes;
  }
  return Kernel(module_, function, entry, shared_bytes);
}

}  // namespace sonata
