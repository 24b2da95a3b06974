// SPDX-License-Identifier: Apache-2.0
// The physical pages of a pool and the two ranges of addresses they appear in.
//
//   home arena   [ 0: padding | 1 .. num_pages: usable | num_pages+1: guard ]
//                every page once, in order, mapped at start, for ever
//   rows         [ row 0: dummy | row 1 | .. | row num_rows-1 ]
//                pages_per_row pages of addresses each; aliases come and go
//
// The padding page takes the writes of padded batch entries; the dummy row is
// made of it. The guard page is zero and never written: it backs what kernels
// read past the end of a row that cannot grow.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "driver.h"
#include "mapper.h"

namespace vattn {

struct SpaceConfig {
  std::int32_t num_pages;
  std::size_t page_bytes;
  int num_rows;
  std::size_t pages_per_row;
  std::size_t max_mappings = 0;  // 0: the driver's budget
  std::size_t dummy_row_pages = 1;
};

class AddressSpace {
 public:
  // Creates and zeroes all pages, maps the home arena and the dummy row, proves
  // that two addresses of a page are the same memory, and starts the mapper.
  // On failure everything is given back.
  static Result<std::shared_ptr<AddressSpace>> create(std::shared_ptr<Driver> driver,
                                                      const SpaceConfig& config);
  ~AddressSpace();  // closes

  // Stops the mapper, unmaps and gives everything back; idempotent. Goes on
  // after an error and returns the first. Views into the space dangle then.
  Status close();
  // Only stops the mapper: at interpreter exit, when CUDA may be half gone.
  void stop_mapper();

  // Rows. Any thread may call; none of these waits for a driver call except
  // wait(), drain() and check_integrity(). A row out of range is kInvalid.

  // A clean row, now live; 0 if there is none now (then retired ones get cleaned).
  Result<int> acquire_row();
  // The row's pages from `index` on shall be these. `index` is where it ends now.
  Status map(int row, std::int64_t index, std::span<const Page> pages);
  // The row shall end at `index`. Also forgets an error, so that maps may be retried.
  Status truncate(int row, std::int64_t index);
  // Leading pages of the row that are mapped as wanted. Lock-free.
  Result<std::int64_t> ready(int row) const;
  // Until ready(row) >= count; false on timeout, or when the row's maps failed.
  Result<bool> wait(int row, std::int64_t count, double timeout_s);
  // What these rows wait for now is done before the rest of the queue.
  Status prefer(std::span<const int> rows);
  // The driver's error that stopped the row's maps, or "".
  Result<std::string> error(int row) const;
  // Nobody will touch the row again. It becomes clean when it has been unmapped.
  Status retire_row(int row);
  Status clean(int max_rows);  // negative: all; 0: none of those asked for so far
  Result<bool> drain(double timeout_s);
  Result<std::vector<Page>> row_pages(int row) const;  // wanted
  Result<MapperStats> stats() const;
  // Compares the records with what the system says is mapped. Empty: they agree.
  Result<std::vector<std::string>> check_integrity();

  const SpaceConfig& config() const { return config_; }
  Driver& driver() const { return *driver_; }
  Page guard_page() const { return config_.num_pages + 1; }
  std::size_t total_pages() const { return static_cast<std::size_t>(config_.num_pages) + 2; }
  std::size_t physical_bytes() const { return home_bytes() * driver_->stripes(); }
  // Of one stripe (driver_striped.h), as are config().page_bytes and all bytes below.
  std::size_t home_bytes() const { return total_pages() * config_.page_bytes; }
  std::size_t row_bytes() const { return config_.pages_per_row * config_.page_bytes; }
  std::size_t rows_bytes() const {
    return static_cast<std::size_t>(config_.num_rows) * row_bytes();
  }
  Address home_address() const { return home_; }
  Address rows_address() const { return rows_; }
  bool closed() const { return closed_.load(std::memory_order_acquire); }

 private:
  AddressSpace(std::shared_ptr<Driver> driver, const SpaceConfig& config);
  Status open();
  Status map_dummy_row();
  Status check_aliasing();
  Status check_open() const;
  Status check_row(int row, bool dummy_too) const;

  const std::shared_ptr<Driver> driver_;
  SpaceConfig config_;
  const int creator_pid_;  // a forked child has no mapper thread and owns nothing
  std::unique_ptr<PhysicalPages> pages_;
  Address home_ = 0;  // reservations; 0: none
  Address rows_ = 0;
  bool home_mapped_ = false;
  std::size_t dummy_mapped_ = 0;  // pages
  std::unique_ptr<Mapper> mapper_;
  std::mutex close_mutex_;
  std::atomic<bool> closed_ = false;
};

}  // namespace vattn
