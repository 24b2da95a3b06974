// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace vattn {

// Length of the common prefix of two token arrays. memcmp runs at memory speed
// but tells only that a block differs, so the block is then searched.
inline std::size_t common_prefix(const std::int64_t* a, std::size_t a_len, const std::int64_t* b,
                                 std::size_t b_len) {
  constexpr std::size_t kBlock = 512;  // tokens: 4 KiB, both blocks stay in the L1 cache
  const std::size_t end = std::min(a_len, b_len);
  std::size_t at = 0;
  while (at < end) {
    const std::size_t block = std::min(kBlock, end - at);
    if (std::memcmp(a + at, b + at, block * sizeof(*a)) != 0)
      return static_cast<std::size_t>(std::mismatch(a + at, a + at + block, b + at).first - a);
    at += block;
  }
  return end;
}

}  // namespace vattn
