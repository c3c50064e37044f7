// One entry of a loaded image, ready to launch.
#pragma once

#include <memory>
#include <string>

#include "driver.hpp"
#include "error.hpp"
#include "library.hpp"

namespace sonata {

struct Dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

struct KernelAttributes {
  int registers = 0;
  int local_bytes = 0;
  int static_shared_bytes = 0;
  int max_threads = 0;
};

class Kernel {
 public:
  Kernel(std::shared_ptr<const Module> module, Function function, std::string entry,
         int shared_bytes);

  KernelAttributes attributes() const;

  // Enqueues the kernel on `stream` and returns; never synchronises. `params` is the packed
  // parameter block, of which the driver takes a copy. The caller has checked grid and block.
  // `programmatic` is for a kernel that itself waits for what precedes it on the stream
  // (griddepcontrol.wait): it may then begin before that has ended.
  void launch(Dim3 grid, Dim3 block, Stream stream, const char *params, std::size_t size,
              bool programmatic) const;

  // The same within the kernel's context, which the caller has made current. Of a failure `fail`
  // makes an error that says what was launched, and how.
  Failure enqueue(Dim3 grid, Dim3 block, Stream stream, const char *params, std::size_t size,
                  bool programmatic) const noexcept;
  [[noreturn]] void fail(Failure failure, Dim3 grid, Dim3 block, Stream stream,
                         std::size_t size) const;

  // Whether a stream of the kernel's device is being captured into a graph.
  bool is_capturing(Stream stream) const;

  const DriverApi &api() const { return *api_; }
  Context context() const { return context_; }
  const Module &module() const { return *module_; }
  const std::string &entry() const { return entry_; }
  int shared_bytes() const { return shared_bytes_; }

 private:
  std::string describe() const;  // "kernel 'entry' of 'label' on device 0"

  // What a launch needs comes first, copied out of the module.
  const DriverApi *api_;
  Function function_;
  Context context_;
  int shared_bytes_;
  std::string entry_;
  std::shared_ptr<const Module> module_;
};

}  // namespace sonata
