#include "context.hpp"

#include <array>
#include <mutex>
#include <unordered_map>

namespace sonata {

Failure query_device(const DriverApi &api, int index, DeviceInfo &info) {
  info.index = index;
  Device device = 0;
  if (const Result code = api.device_get(&device, index)) return {"cuDeviceGet", code};
  std::array<char, 256> name{};
  if (const Result code = api.device_get_name(name.data(), int(name.size()) - 1, device)) {
    return {"cuDeviceGetName", code};
  }
  info.name = name.data();
  const auto attribute = [&](int which, int &value) {
    return Failure{"cuDeviceGetAttribute", api.device_get_attribute(&value, which, device)};
  };
  if (const Failure failure = attribute(kDeviceMajor, info.major)) return failure;
  if (const Failure failure = attribute(kDeviceMinor, info.minor)) return failure;
  if (const Failure failure = attribute(kDeviceMultiprocessors, info.multiprocessors)) {
    return failure;
  }
  return attribute(kDeviceSharedPerBlockOptin, info.shared_per_block_optin);
}

std::vector<DeviceInfo> devices(const DriverApi &api) {
  int count = 0;
  if (const Result code = api.device_get_count(&count)) {
    throw_driver_error(api, {"cuDeviceGetCount", code}, "counting the devices");
  }
  std::vector<DeviceInfo> found(count > 0 ? std::size_t(count) : 0);
  for (int index = 0; index < count; ++index) {
    if (const Failure failure = query_device(api, index, found[std::size_t(index)])) {
      throw_driver_error(api, failure, "describing device " + std::to_string(index));
    }
  }
  return found;
}

std::string describe_device(const DriverApi &api, int index) {
  const std::string plain = "device " + std::to_string(index);
  DeviceInfo info;
  if (query_device(api, index, info)) return plain;
  return plain + " (" + info.name + ", " + info.arch() + ")";
}

Context primary_context(const DriverApi &api, int index, const std::string &label) {
  const auto purpose = [&] { return " for " + quoted(label); };
  static std::mutex mutex;
  static auto &retained = *new std::unordered_map<int, Context>();  // outlives exiting threads
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = retained.find(index); found != retained.end()) return found->second;

  int count = 0;
  if (const Result code = api.device_get_count(&count)) {
    throw_driver_error(api, {"cuDeviceGetCount", code}, "counting the devices" + purpose());
  }
  if (index < 0 || index >= count) {
    throw_argument_error("device" + purpose() + " is " + std::to_string(index) +
                             ", but this process sees " + std::to_string(count) +
                             (count == 1 ? " device" : " devices"),
                         "pass an index from 0 on, or check CUDA_VISIBLE_DEVICES");
  }
  Device device = 0;
  if (const Result code = api.device_get(&device, index)) {
    throw_driver_error(api, {"cuDeviceGet", code},
                       "opening device " + std::to_string(index) + purpose());
  }
  Context context = nullptr;
  if (const Result code = api.primary_context_retain(&context, device)) {
    throw_driver_error(api, {"cuDevicePrimaryCtxRetain", code},
                       "opening " + describe_device(api, index) + purpose());
  }
  retained.emplace(index, context);
  return context;
}

}  // namespace sonata
