#include "sequence.hpp"

#include <cstring>
#include <string>
#include <utility>

#include "context.hpp"
#include "error.hpp"

namespace sonata {

namespace {

constexpr std::size_t kAlignment = 16;  // of a block in the pack

[[noreturn]] void refuse(const std::string &what) {
  throw_argument_error("a sequence of launches: " + what,
                       "this is a fault of the loader: report it with the call that led to it");
}

}  // namespace

Sequence::Sequence(std::vector<Launch> launches, std::size_t operands)
    : launches_(std::move(launches)), operands_(operands) {
  if (operands_ > kMostOperands) refuse(std::to_string(operands_) + " operands");
  for (const Launch &launch : launches_) {
    const std::string name = quoted(launch.kernel.entry());
    if (launch.kernel.context() != launches_.front().kernel.context()) {
      refuse(name + " is on another device than the first kernel");
    }
    for (const Patch &patch : launch.patches) {
      if (patch.operand >= operands_) {
        refuse("operand " + std::to_string(patch.operand) + " of " + name);
      }
      if (patch.offset % 8 != 0 || patch.offset + 8 > launch.params.size()) {
        refuse("an address at byte " + std::to_string(patch.offset) + " of " + name);
      }
    }
    starts_.push_back(pack_.size());
    pack_.insert(pack_.end(), launch.params.begin(), launch.params.end());
    pack_.resize((pack_.size() + kAlignment - 1) / kAlignment * kAlignment);
  }
  if (pack_.size() > kMostBytes) refuse(std::to_string(pack_.size()) + " bytes of parameters");
}

void Sequence::launch(Stream stream, const std::uint64_t *addresses) const {
  if (launches_.empty()) return;
  require_not_forked();
  alignas(kAlignment) char pack[kMostBytes];
  std::memcpy(pack, pack_.data(), pack_.size());
  for (std::size_t i = 0; i < launches_.size(); ++i) {
    for (const Patch &patch : launches_[i].patches) {
      const std::uint64_t address = addresses[patch.operand] + patch.added;
      std::memcpy(pack + starts_[i] + patch.offset, &address, sizeof address);
    }
  }
  std::size_t at = 0;
  const Kernel &first = launches_.front().kernel;
  const Failure failure = with_context(first.api(), first.context(), [&]() noexcept {
    for (; at < launches_.size(); ++at) {
      const Launch &launch = launches_[at];
      const Failure outcome =
          launch.kernel.enqueue(launch.grid, launch.block, stream, pack + starts_[at],
                                launch.params.size(), launch.programmatic);
      if (outcome) return outcome;
    }
    return Failure{};
  });
  if (failure) {
    const Launch &launch = launches_[at < launches_.size() ? at : at - 1];
    launch.kernel.fail(failure, launch.grid, launch.block, stream, launch.params.size());
  }
}

}  // namespace sonata
