#include "kernel.hpp"

#include <array>
#include <cstdint>
#include <cstdio>
#include <utility>

#include "context.hpp"
#include "error.hpp"

namespace sonata {

namespace {

std::string text_of(Dim3 dim) {
  return "(" + std::to_string(dim.x) + ", " + std::to_string(dim.y) + ", " +
         std::to_string(dim.z) + ")";
}

std::string hex(Stream stream) {
  std::array<char, 24> text{};
  std::snprintf(text.data(), text.size(), "0x%llx",
                static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(stream)));
  return text.data();
}

}  // namespace

Kernel::Kernel(std::shared_ptr<const Module> module, Function function, std::string entry,
               int shared_bytes)
    : api_(module->api),
      function_(function),
      context_(module->context),
      shared_bytes_(shared_bytes),
      entry_(std::move(entry)),
      module_(std::move(module)) {}

std::string Kernel::describe() const {
  return "kernel " + quoted(entry_) + " of " + quoted(module_->label) + " on device " +
         std::to_string(module_->device);
}

KernelAttributes Kernel::attributes() const {
  require_not_forked();
  KernelAttributes found;
  const Failure failure = with_context(*api_, context_, [&]() noexcept {
    const std::array<std::pair<int, int *>, 4> wanted{{
        {kFunctionRegisters, &found.registers},
        {kFunctionLocalBytes, &found.local_bytes},
        {kFunctionStaticSharedBytes, &found.static_shared_bytes},
        {kFunctionMaxThreads, &found.max_threads},
    }};
    Failure outcome;
    for (const auto &[attribute, value] : wanted) {
      outcome = {"cuFuncGetAttribute", api_->function_get_attribute(value, attribute, function_)};
      if (outcome) break;
    }
    return outcome;
  });
  if (failure) throw_driver_error(*api_, failure, "reading the attributes of " + describe());
  return found;
}

void Kernel::launch(Dim3 grid, Dim3 block, Stream stream, const char *params, std::size_t size,
                    bool programmatic) const {
  require_not_forked();
  const Failure failure = with_context(*api_, context_, [&]() noexcept {
    return enqueue(grid, block, stream, params, size, programmatic);
  });
  if (failure) fail(failure, grid, block, stream, size);
}

Failure Kernel::enqueue(Dim3 grid, Dim3 block, Stream stream, const char *params, std::size_t size,
                        bool programmatic) const noexcept {
  std::array<void *, 5> extra{kParamBuffer, const_cast<char *>(params), kParamBufferSize, &size,
                              kParamEnd};
  void **packed = size > 0 ? extra.data() : nullptr;
  if (programmatic) {
    LaunchAttribute attribute;
    attribute.id = kProgrammaticStreamSerialization;
    attribute.value[0] = 1;
    const LaunchConfig config{{grid.x, grid.y, grid.z},
                              {block.x, block.y, block.z},
                              unsigned(shared_bytes_),
                              stream,
                              &attribute,
                              1};
    return {"cuLaunchKernelEx", api_->launch_kernel_ex(&config, function_, nullptr, packed)};
  }
  return {"cuLaunchKernel",
          api_->launch_kernel(function_, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                              unsigned(shared_bytes_), stream, nullptr, packed)};
}

bool Kernel::is_capturing(Stream stream) const {
  require_not_forked();
  int status = 0;
  const Failure failure = with_context(*api_, context_, [&]() noexcept {
    return Failure{"cuStreamIsCapturing", api_->stream_is_capturing(stream, &status)};
  });
  if (failure) {
    throw_driver_error(*api_, failure,
                       "asking whether stream " + hex(stream) + " is captured, for " + describe());
  }
  return status != kNotCapturing;
}

void Kernel::fail(Failure failure, Dim3 grid, Dim3 block, Stream stream, std::size_t size) const {
  throw_driver_error(*api_, failure,
                     "launching " + describe() + ": grid " + text_of(grid) + ", block " +
                         text_of(block) + ", stream " + hex(stream) + ", " +
                         std::to_string(shared_bytes_) + " bytes of dynamic shared memory, " +
                         std::to_string(size) + " bytes of parameters");
}

}  // namespace sonata
