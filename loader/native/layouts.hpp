// Where the elements of tensors lie.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dlpack.hpp"

namespace sonata {

// What decides how the elements of some tensors are found. No two have the same words.
class Layouts {
 public:
  static constexpr std::size_t kMostTensors = 16;
  static constexpr std::size_t kMostDimensions = 8;

  // At most kMostTensors, each of at most kMostDimensions.
  void add(const dlpack::View &view);
  void add_nothing() { words_[size_++] = 0; }  // the place of a tensor that is None

  const std::int64_t *words() const { return words_; }
  std::size_t size() const { return size_; }

 private:
  // Of a tensor: what it is, and sizes and strides.
  std::int64_t words_[kMostTensors * (2 + 2 * kMostDimensions)];
  std::size_t size_ = 0;
};

// The address past the last element; none precedes the first.
std::uint64_t end_of(const dlpack::View &view);

// Whether the memory of two tensors overlaps, from first to last element.
bool overlap(const dlpack::View &one, const dlpack::View &other);

}  // namespace sonata
