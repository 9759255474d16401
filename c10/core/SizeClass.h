#pragma once

// Block sizes for host memory: eight per doubling, so that rounding a request
// up to the next one adds at most 1/8 of it. Pure arithmetic; anyone may call
// it.
//
// Sizes are multiples of 64 bytes, the alignment that CPU kernels expect of a
// tensor, so below 512 bytes the step is 64 and 1/8 cannot be kept. From
// 32 KiB on every size is a multiple of 4 KiB.

#include <cstddef>
#include <cstdint>

namespace c10::size_class {

inline constexpr size_t kAlignment = 64;
inline constexpr size_t kPage = 4096;
inline constexpr unsigned kStepsPerDoubling = 8;
inline constexpr unsigned kSmallestDoubling = 9; // 512 = 8 * kAlignment
// The largest size: half of the address space of a process.
inline constexpr size_t kLargest = size_t{1} << 46;
inline constexpr unsigned kCount =
    kStepsPerDoubling + (46 - kSmallestDoubling) * kStepsPerDoubling;

// Which size class holds `bytes`. Requires 0 < bytes <= kLargest.
inline unsigned index(size_t bytes) noexcept {
  constexpr size_t kLinear = size_t{1} << kSmallestDoubling;
  if (bytes <= kLinear) {
    return static_cast<unsigned>((bytes - 1) / kAlignment);
  }
  // 2^doubling < bytes <= 2^(doubling + 1)
  const auto doubling = static_cast<unsigned>(63 - __builtin_clzll(bytes - 1));
  const auto step = static_cast<unsigned>((bytes - 1) >> (doubling - 3)) & 7u;
  return kStepsPerDoubling * (1 + doubling - kSmallestDoubling) + step;
}

// The size of class `index`, in bytes: the largest request that it holds.
inline size_t size(unsigned index) noexcept {
  if (index < kStepsPerDoubling) {
    return (index + 1) * kAlignment;
  }
  const unsigned doubling = kSmallestDoubling - 1 + index / kStepsPerDoubling;
  const size_t step = size_t{1} << (doubling - 3);
  return (kStepsPerDoubling + 1 + index % kStepsPerDoubling) * step;
}

inline size_t round_up_to_page(size_t bytes) noexcept {
  return (bytes + kPage - 1) & ~(kPage - 1);
}

} // namespace c10::size_class
