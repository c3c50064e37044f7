#include "layouts.hpp"

namespace sonata {

namespace {

constexpr std::uint64_t kAlignment = 16;

}  // namespace

// The first word, never 0, says how many follow.
void Layouts::add(const dlpack::View &view) {
  const std::uint64_t address = view.address();
  const std::uint64_t remainder = address == 0 ? kAlignment : address % kAlignment;
  const std::uint64_t dimensions = std::uint64_t(view.dimensions);
  std::int64_t *word = words_ + size_;
  *word++ = std::int64_t(1 | dimensions << 8 | remainder << 16 |
                         std::uint64_t{view.dtype.code} << 24 |
                         std::uint64_t{view.dtype.bits} << 32 |
                         std::uint64_t{view.dtype.lanes} << 48);
  *word++ = std::int64_t(std::uint64_t(std::uint32_t(view.device.type)) << 32 |
                         std::uint32_t(view.device.id));
  for (std::uint64_t i = 0; i < dimensions; ++i) *word++ = view.shape[i];
  for (std::uint64_t i = 0; i < dimensions; ++i) *word++ = view.strides[i];
  size_ = std::size_t(word - words_);
}

std::uint64_t end_of(const dlpack::View &view) {
  std::int64_t elements = 1;
  for (std::int32_t i = 0; i < view.dimensions; ++i) {
    elements += (view.shape[i] - 1) * view.strides[i];
  }
  return view.address() + std::uint64_t(elements * (view.dtype.bits / 8));
}

bool overlap(const dlpack::View &one, const dlpack::View &other) {
  return one.address() < end_of(other) && other.address() < end_of(one);
}

}  // namespace sonata
