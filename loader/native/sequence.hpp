// Launches that follow one another on a stream, prepared once and issued by one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernel.hpp"

namespace sonata {

// Where an address goes in a launch's parameter block: that of operand `operand`, plus `added`.
struct Patch {
  std::size_t offset = 0;
  std::size_t operand = 0;
  std::uint64_t added = 0;
};

struct Launch {
  Kernel kernel;
  Dim3 grid;
  Dim3 block;
  bool programmatic = false;
  std::vector<char> params;  // complete but for what is patched
  std::vector<Patch> patches;
};

class Sequence {
 public:
  static constexpr std::size_t kMostOperands = 64;
  static constexpr std::size_t kMostBytes = 16384;  // of all parameter blocks

  // All kernels are of one device. Throws ArgumentError where a patch lies outside its block, its
  // operand outside `operands`, or there are too many of anything.
  Sequence(std::vector<Launch> launches, std::size_t operands);

  // Enqueues the launches in order and returns; never synchronises. `addresses` are those of the
  // operands. The first launch that fails ends it: those before it stay enqueued.
  void launch(Stream stream, const std::uint64_t *addresses) const;

  std::size_t operands() const { return operands_; }
  const std::vector<Launch> &launches() const { return launches_; }

 private:
  std::vector<Launch> launches_;
  std::size_t operands_;
  std::vector<std::size_t> starts_;  // of each launch's block in `pack_`
  std::vector<char> pack_;           // the blocks one after another, as they are before patching
};

}  // namespace sonata
