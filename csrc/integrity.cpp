// SPDX-License-Identifier: Apache-2.0
// check_integrity(): the records against what the system says is mapped.
#include "space.h"

namespace vattn {
namespace {

// Rows up to this many pages of addresses are looked at whole; of larger spaces
// (many TiB, mostly empty) only what is mapped and the page after it.
constexpr std::size_t kFullScanPages = std::size_t{1} << 18;

std::string describe(const Mapping& mapping) {
  if (mapping.page == Mapping::kNothing) return "nothing";
  if (mapping.page == Mapping::kForeign) return "something that is not one of our pages";
  return "page " + std::to_string(mapping.page) + (mapping.accessible ? "" : ", not accessible");
}

}  // namespace

Result<std::vector<std::string>> AddressSpace::check_integrity() {
  if (Status s = check_open(); !s.ok()) return s;
  std::vector<std::string> found = mapper_->check_integrity();

  const auto paused = mapper_->pause();
  if (Status s = check_open(); !s.ok()) return s;  // closed while we waited
  std::vector<MappedRow> rows = mapper_->mapped();
  rows[0] = {std::vector<Page>(dummy_mapped_, 0), dummy_mapped_};

  std::vector<Address> at;
  std::vector<Mapping> wanted;
  const auto expect = [&](Address address, std::int64_t page, bool accessible) {
    at.push_back(address);
    wanted.push_back({page, accessible});
  };
  for (std::size_t page = 0; page < total_pages(); ++page)
    expect(home_ + page * config_.page_bytes, static_cast<std::int64_t>(page), true);
  const std::size_t in_home = at.size();
  const bool full = rows.size() * config_.pages_per_row <= kFullScanPages;
  for (std::size_t row = 0; row < rows.size(); ++row) {
    const std::vector<Page>& mapped = rows[row].pages;
    const std::size_t end =
        full ? config_.pages_per_row : std::min(mapped.size() + 1, config_.pages_per_row);
    for (std::size_t page = 0; page < end; ++page)
      expect(rows_ + row * row_bytes() + page * config_.page_bytes,
             page < mapped.size() ? mapped[page] : Mapping::kNothing, page < rows[row].right);
  }

  Result<std::vector<Mapping>> is = driver_->inspect(*pages_, at);
  if (!is.ok()) return is.status();
  for (std::size_t i = 0; i < at.size(); ++i) {
    const Mapping& mapping = is.value()[i];
    const bool right =
        mapping.page == wanted[i].page && (mapping.accessible || !wanted[i].accessible);
    if (right) continue;
    const Address offset = at[i] - (i < in_home ? home_ : rows_);
    const std::string where = i < in_home
                                  ? "home page " + std::to_string(offset / config_.page_bytes)
                                  : "row " + std::to_string(offset / row_bytes()) + ", page " +
                                        std::to_string(offset % row_bytes() / config_.page_bytes);
    found.push_back(where + ": expected " + describe(wanted[i]) + ", found " + describe(mapping));
  }
  return found;
}

}  // namespace vattn
