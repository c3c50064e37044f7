// A loaded cubin or PTX image and the kernels in it.
//
// Libraries are never unloaded. A CUDA graph keeps raw handles of the kernels that it captured and
// may be replayed after the last Python reference is gone; at process exit the driver frees
// everything by itself, and a forked child must not touch the parent's handles.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "driver.hpp"

namespace sonata {

// Where a kernel came from; shared by a library and its kernels, and owner of the lock under
// which they are set up.
struct Module {
  const DriverApi *api = nullptr;
  DriverLibrary handle = nullptr;
  Context context = nullptr;
  int device = 0;
  std::string label;

  std::mutex mutex;
  std::unordered_map<Function, int> dynamic_shared_limits;  // as set so far
};

class Kernel;

class Library {
 public:
  // `image` is given to the driver as it is; it must be NUL-terminated if it is PTX.
  static Library load(const char *image, std::string label, int device, bool ptx);

  // Loads the kernel into the device's context now, so that a first launch while a stream is
  // captured finds it there.
  Kernel kernel(const std::string &entry, int shared_bytes) const;

  const Module &module() const { return *module_; }

 private:
  explicit Library(std::shared_ptr<Module> module) : module_(std::move(module)) {}

  std::shared_ptr<Module> module_;
};

}  // namespace sonata
