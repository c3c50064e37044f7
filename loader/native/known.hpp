// Launches that were planned for operands of some layouts.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "sequence.hpp"
#include "tensors.hpp"

namespace sonata {

// Both are the same where nothing may start early.
struct Planned {
  int device = 0;
  nanobind::object in_order_object;
  nanobind::object early_object;
  const Sequence *in_order = nullptr;
  const Sequence *early = nullptr;  // its first launch may begin before what precedes it has ended
  nanobind::object allocation;      // what a new output is made of, or null
};

// By layouts, and what else decides: `more`, one number.
class KnownLaunches {
 public:
  static constexpr std::size_t kMost = 4096;

  // Null where nothing was planned for these.
  std::shared_ptr<const Planned> find(const Layouts &layouts, std::int64_t more) const;

  // Forgets all others first where there are too many.
  void add(const Layouts &layouts, std::int64_t more, std::shared_ptr<const Planned> planned);

 private:
  struct Entry {
    std::vector<std::int64_t> words;
    std::int64_t more;
    std::shared_ptr<const Planned> planned;

    bool is_for(const Layouts &layouts, std::int64_t other) const;
  };

  // The GIL is the lock where there is one.
  mutable nanobind::ft_mutex mutex_;
  std::unordered_multimap<std::uint64_t, Entry> entries_;  // by hash
};

}  // namespace sonata
