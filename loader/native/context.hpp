// Devices and their primary contexts: the ones that torch and every other library use.
#pragma once

#include <string>
#include <vector>

#include "driver.hpp"
#include "error.hpp"

namespace sonata {

struct DeviceInfo {
  int index = 0;
  std::string name;
  int major = 0;
  int minor = 0;
  int multiprocessors = 0;
  int shared_per_block_optin = 0;

  std::string arch() const { return "sm" + std::to_string(major) + std::to_string(minor); }
};

std::vector<DeviceInfo> devices(const DriverApi &api);

// "device 0 (NVIDIA H200, sm90)", or as much of it as the driver tells: for error messages.
std::string describe_device(const DriverApi &api, int index);

// Fills what the driver tells; the failure says which call did not.
Failure query_device(const DriverApi &api, int index, DeviceInfo &info);

// The device's primary context, retained at the first call and kept for the life of the process:
// graphs and other threads may use it at any later time. `label` is for messages.
Context primary_context(const DriverApi &api, int index, const std::string &label);

// Runs `work` with `wanted` as this thread's current context, and leaves the thread as it was.
// The usual case, that it is current already, costs one query. `work` must not throw.
template <typename Work>
Failure with_context(const DriverApi &api, Context wanted, Work &&work) {
  static_assert(noexcept(work()), "a throw would leave the context pushed");
  Context current = nullptr;
  if (const Result code = api.context_get_current(&current)) return {"cuCtxGetCurrent", code};
  if (current == wanted) return work();
  if (const Result code = api.context_push_current(wanted)) return {"cuCtxPushCurrent", code};
  const Failure failure = work();
  Context popped = nullptr;
  const Result code = api.context_pop_current(&popped);
  if (!failure && code != 0) return {"cuCtxPopCurrent", code};
  return failure;
}

}  // namespace sonata
