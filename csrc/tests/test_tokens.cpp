// SPDX-License-Identifier: Apache-2.0
// common_prefix against a loop, for every length and place of the difference
// around the block size.
#include <vector>

#include "check.h"
#include "tokens.h"

int main() {
  for (std::size_t length : {0, 1, 2, 511, 512, 513, 1024, 1500}) {
    std::vector<std::int64_t> a(length);
    for (std::size_t i = 0; i < length; ++i) a[i] = static_cast<std::int64_t>(i) * 7919;
    std::vector<std::int64_t> b = a;
    CHECK(vattn::common_prefix(a.data(), length, b.data(), length) == length);
    for (std::size_t differs = 0; differs < length; ++differs) {
      b[differs] ^= std::int64_t{1} << 63;
      CHECK(vattn::common_prefix(a.data(), length, b.data(), length) == differs);
      CHECK(vattn::common_prefix(a.data(), differs, b.data(), length) == differs);
      b[differs] = a[differs];
    }
  }
}
