#include "known.hpp"

#include <cstring>
#include <utility>

namespace nb = nanobind;

namespace sonata {

namespace {

// A sum whose terms do not wait for one another; equal sums only cost a comparison.
std::uint64_t hash_of(const Layouts &layouts, std::int64_t more) {
  constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15;
  std::uint64_t sum = std::uint64_t(more);
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    sum += std::uint64_t(layouts.words()[i]) * (kOdd * (2 * i + 1));
  }
  return sum ^ sum >> 32;
}

}  // namespace

bool KnownLaunches::Entry::is_for(const Layouts &layouts, std::int64_t other) const {
  return more == other && words.size() == layouts.size() &&
         std::memcmp(words.data(), layouts.words(), words.size() * sizeof words[0]) == 0;
}

std::shared_ptr<const Planned> KnownLaunches::find(const Layouts &layouts,
                                                   std::int64_t more) const {
  const nb::ft_lock_guard lock(mutex_);
  const auto [from, to] = entries_.equal_range(hash_of(layouts, more));
  for (auto at = from; at != to; ++at) {
    if (at->second.is_for(layouts, more)) return at->second.planned;
  }
  return nullptr;
}

void KnownLaunches::add(const Layouts &layouts, std::int64_t more,
                        std::shared_ptr<const Planned> planned) {
  // Destroyed without the lock: it may run Python.
  std::unordered_multimap<std::uint64_t, Entry> old;
  const nb::ft_lock_guard lock(mutex_);
  if (entries_.size() >= kMost) old.swap(entries_);
  const std::uint64_t hash = hash_of(layouts, more);
  const auto [from, to] = entries_.equal_range(hash);
  for (auto at = from; at != to; ++at) {
    if (at->second.is_for(layouts, more)) return;  // another thread was first
  }
  const std::int64_t *words = layouts.words();
  entries_.emplace(hash, Entry{{words, words + layouts.size()}, more, std::move(planned)});
}

}  // namespace sonata
