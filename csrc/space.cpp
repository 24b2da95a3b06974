// SPDX-License-Identifier: Apache-2.0
#include "space.h"

#include <unistd.h>

#include <array>
#include <limits>

namespace vattn {
namespace {

Status check_config(const Driver& driver, const SpaceConfig& c) {
  const auto bad = [](const char* what, auto value, const std::string& rule) {
    return Status::invalid(std::string(what) + " is " + std::to_string(value) + ": " + rule);
  };
  const std::size_t granule = driver.granularity();
  if (c.page_bytes == 0 || c.page_bytes % granule != 0)
    return bad("page_bytes", c.page_bytes,
               "it must be a multiple of the driver's granularity of " + std::to_string(granule));
  if (c.num_pages < 1 || c.num_pages > std::numeric_limits<Page>::max() - 2)
    return bad("num_pages", c.num_pages, "at least one usable page");
  if (c.num_rows < 2) return bad("num_rows", c.num_rows, "row 0 is the dummy row, so at least 2");
  if (c.pages_per_row < 1) return bad("pages_per_row", c.pages_per_row, "at least 1");
  if (c.dummy_row_pages < 1 || c.dummy_row_pages > c.pages_per_row)
    return bad("dummy_row_pages", c.dummy_row_pages, "from 1 to pages_per_row");
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(static_cast<std::size_t>(c.num_rows), c.pages_per_row, &bytes) ||
      __builtin_mul_overflow(bytes, c.page_bytes, &bytes) || bytes > (std::size_t{1} << 62))
    return Status::invalid("num_rows * pages_per_row * page_bytes does not fit into an address");
  return {};
}

}  // namespace

AddressSpace::AddressSpace(std::shared_ptr<Driver> driver, const SpaceConfig& config)
    : driver_(std::move(driver)), config_(config), creator_pid_(::getpid()) {
  if (config_.max_mappings == 0) config_.max_mappings = driver_->mapping_budget();
}

Result<std::shared_ptr<AddressSpace>> AddressSpace::create(std::shared_ptr<Driver> driver,
                                                           const SpaceConfig& config) {
  if (Status status = check_config(*driver, config); !status.ok()) return status;
  std::shared_ptr<AddressSpace> space(new AddressSpace(std::move(driver), config));
  if (Status status = space->open(); !status.ok()) {
    // The first error is the one to tell; close() undoes what open() had done.
    static_cast<void>(space->close());
    return status;
  }
  return space;
}

AddressSpace::~AddressSpace() { static_cast<void>(close()); }

Status AddressSpace::open() {
  Result<std::unique_ptr<PhysicalPages>> pages = driver_->create(total_pages(), config_.page_bytes);
  if (!pages.ok()) return pages.status();
  pages_ = std::move(pages.value());

  Result<Address> home = driver_->reserve(home_bytes());
  if (!home.ok()) return home.status();
  home_ = home.value();
  Result<Address> rows = driver_->reserve(rows_bytes());
  if (!rows.ok()) return rows.status();
  rows_ = rows.value();

  if (Status s = driver_->map(*pages_, 0, total_pages(), home_); !s.ok()) return s;
  home_mapped_ = true;
  if (Status s = driver_->set_access(home_, home_bytes()); !s.ok()) return s;
  if (!driver_->creates_zeroed())
    if (Status s = driver_->zero(home_, home_bytes()); !s.ok()) return s;
  if (Status s = map_dummy_row(); !s.ok()) return s;
  if (Status s = check_aliasing(); !s.ok()) return s;

  mapper_ = std::make_unique<Mapper>(
      *driver_, *pages_, rows_,
      MapperConfig{config_.num_rows, config_.pages_per_row, config_.max_mappings});
  mapper_->start();
  return {};
}

Status AddressSpace::map_dummy_row() {
  const std::size_t page_bytes = config_.page_bytes;
  for (; dummy_mapped_ < config_.dummy_row_pages; ++dummy_mapped_)
    if (Status s = driver_->map(*pages_, 0, 1, rows_ + dummy_mapped_ * page_bytes); !s.ok())
      return s;
  return driver_->set_access(rows_, dummy_mapped_ * page_bytes);
}

// Some drivers hand out mappings that do not work (writes that read back 0, on
// some kernels): find out now, not in a model's output.
Status AddressSpace::check_aliasing() {
  using Probe = std::array<std::uint8_t, 64>;
  Probe pattern = {}, got = {};
  const Probe zeros = {};
  for (std::size_t i = 0; i < pattern.size(); ++i) pattern[i] = static_cast<std::uint8_t>(0xA5 + i);
  const std::size_t last = config_.page_bytes - sizeof(Probe);
  for (const std::size_t offset : {std::size_t{0}, config_.page_bytes / 2, last}) {
    const Address by_home = home_ + offset;
    const Address by_row = rows_ + offset;
    // There and back: the second pass leaves the padding page zero again.
    struct Pass {
      const Probe& data;
      Address to, from;
    };
    for (const auto& [data, to, from] :
         {Pass{pattern, by_home, by_row}, Pass{zeros, by_row, by_home}}) {
      if (Status s = driver_->write(to, data.data(), sizeof(Probe)); !s.ok()) return s;
      if (Status s = driver_->read(got.data(), from, sizeof(Probe)); !s.ok()) return s;
      if (got != data)
        return Status::driver(std::string(driver_->name()) +
                              ": self-check failed: what was written through one address of a page "
                              "reads differently through another, at byte " +
                              std::to_string(offset));
    }
  }
  return {};
}

void AddressSpace::stop_mapper() {
  std::lock_guard lock(close_mutex_);
  if (mapper_ && ::getpid() == creator_pid_) mapper_->stop();
}

Status AddressSpace::close() {
  std::lock_guard lock(close_mutex_);
  if (closed_.exchange(true)) return {};
  if (::getpid() != creator_pid_) {
    // A forked child: the mapper's thread is not here to be joined, and the
    // pages are the parent's. Leave everything to the end of the process.
    static_cast<void>(mapper_.release());
    static_cast<void>(pages_.release());
    return {};
  }
  Status all;
  if (mapper_) {
    mapper_->stop();
    all.merge(mapper_->unmap_everything());
  }
  if (dummy_mapped_ > 0) all.merge(driver_->unmap(rows_, dummy_mapped_ * config_.page_bytes));
  if (home_mapped_) all.merge(driver_->unmap(home_, home_bytes()));
  if (rows_ != 0) all.merge(driver_->free(rows_, rows_bytes()));
  if (home_ != 0) all.merge(driver_->free(home_, home_bytes()));
  pages_.reset();
  return all;
}

Status AddressSpace::check_open() const {
  return closed() ? Status::invalid("the address space is closed") : Status();
}

Status AddressSpace::check_row(int row, bool dummy_too) const {
  if (Status status = check_open(); !status.ok()) return status;
  if (row >= (dummy_too ? 0 : 1) && row < config_.num_rows) return {};
  if (row == 0) return Status::invalid("row 0 is the dummy row: its mapping never changes");
  return Status::invalid("row " + std::to_string(row) + " is not in 0.." +
                         std::to_string(config_.num_rows - 1));
}

Result<int> AddressSpace::acquire_row() {
  if (Status s = check_open(); !s.ok()) return s;
  return mapper_->acquire_row();
}

Status AddressSpace::map(int row, std::int64_t index, std::span<const Page> pages) {
  if (Status s = check_row(row, false); !s.ok()) return s;
  return mapper_->map(row, static_cast<std::size_t>(index), pages);
}

Status AddressSpace::truncate(int row, std::int64_t index) {
  if (Status s = check_row(row, false); !s.ok()) return s;
  return mapper_->truncate(row, static_cast<std::size_t>(index));
}

Result<std::int64_t> AddressSpace::ready(int row) const {
  if (Status s = check_row(row, true); !s.ok()) return s;
  return static_cast<std::int64_t>(row == 0 ? config_.dummy_row_pages : mapper_->ready(row));
}

Result<bool> AddressSpace::wait(int row, std::int64_t count, double timeout_s) {
  if (Status s = check_row(row, true); !s.ok()) return s;
  if (row == 0) return count <= static_cast<std::int64_t>(config_.dummy_row_pages);
  return count <= 0 || mapper_->wait(row, static_cast<std::size_t>(count), timeout_s);
}

Status AddressSpace::prefer(std::span<const int> rows) {
  for (int row : rows)
    if (Status s = check_row(row, true); !s.ok()) return s;
  mapper_->prefer(rows);
  return {};
}

Result<std::string> AddressSpace::error(int row) const {
  if (Status s = check_row(row, true); !s.ok()) return s;
  return mapper_->error(row);
}

Status AddressSpace::retire_row(int row) {
  if (Status s = check_row(row, false); !s.ok()) return s;
  return mapper_->retire(row);
}

Status AddressSpace::clean(int max_rows) {
  if (Status s = check_open(); !s.ok()) return s;
  mapper_->clean(max_rows);
  return {};
}

Result<bool> AddressSpace::drain(double timeout_s) {
  if (Status s = check_open(); !s.ok()) return s;
  return mapper_->drain(timeout_s);
}

Result<std::vector<Page>> AddressSpace::row_pages(int row) const {
  if (Status s = check_row(row, true); !s.ok()) return s;
  if (row == 0) return std::vector<Page>(config_.dummy_row_pages, 0);
  return mapper_->wanted(row);
}

Result<MapperStats> AddressSpace::stats() const {
  if (Status s = check_open(); !s.ok()) return s;
  return mapper_->stats();
}

}  // namespace vattn
