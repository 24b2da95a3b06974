// SPDX-License-Identifier: Apache-2.0
// A page as several allocations, one a stripe, each with its share of the layers.
//
// With all layers in one allocation, the keys that a kernel reads of one layer
// lie one whole token apart, and on an H200 that distance costs bandwidth
// (docs/benchmarks.md, "Layout"). Two stripes halve it.
//
//   reserve(n)   reserves n bytes of addresses a stripe, one stripe behind the
//                other: what is at `at` in stripe 0 is at `at + s * n` in stripe s
//   any call     names addresses in stripe 0 and bytes of one stripe, and does
//                the same in all of them
#pragma once

#include <map>
#include <mutex>

#include "driver_wrapped.h"

namespace vattn {

class StripedDriver final : public WrappedDriver {
 public:
  StripedDriver(std::shared_ptr<Driver> inner, std::size_t stripes)
      : WrappedDriver(std::move(inner)), stripes_(stripes) {}

  std::size_t stripes() const override { return stripes_; }
  std::size_t mapping_budget() const override { return inner_->mapping_budget() / stripes_; }

  Result<Address> reserve(std::size_t bytes) override;
  Status free(Address at, std::size_t bytes) override;
  Result<std::unique_ptr<PhysicalPages>> create(std::size_t count, std::size_t page_bytes) override;
  Status map(const PhysicalPages& pages, Page first, std::size_t count, Address at) override;
  Status set_access(Address at, std::size_t bytes) override;
  Status unmap(Address at, std::size_t bytes) override;
  Status zero(Address at, std::size_t bytes) override;
  // For the self-check: the same bytes in every stripe, an error if they differ.
  Status write(Address to, const void* from, std::size_t bytes) override;
  Status read(void* to, Address from, std::size_t bytes) override;
  Result<std::vector<Mapping>> inspect(const PhysicalPages& pages,
                                       std::span<const Address> at) override;

 private:
  Address in_stripe(std::size_t stripe, Address at) const;

  const std::size_t stripes_;
  mutable std::mutex mutex_;
  std::map<Address, std::size_t> reservations_;   // bytes a stripe, by the first address
  std::map<Address, std::size_t> half_unmapped_;  // the stripe at which an unmap failed
};

}  // namespace vattn
