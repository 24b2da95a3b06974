// SPDX-License-Identifier: Apache-2.0
// A driver for tests: passes every call on to another driver, counts it, and
// delays or fails it on request. Calls have the names of Driver's methods.
#pragma once

#include <map>
#include <mutex>
#include <string>

#include "driver_wrapped.h"

namespace vattn {

class FaultyDriver final : public WrappedDriver {
 public:
  using WrappedDriver::WrappedDriver;

  // The k-th next call (k = 1: the very next) of this name fails, once, before
  // it does anything. "" stands for a call of any name.
  Status fail_at(const std::string& call, std::int64_t k);
  bool armed() const;  // a fault is still to come
  Status set_delay(const std::string& call, double seconds);
  std::map<std::string, std::int64_t> calls() const;

  Result<Address> reserve(std::size_t bytes) override;
  Status free(Address at, std::size_t bytes) override;
  Result<std::unique_ptr<PhysicalPages>> create(std::size_t count, std::size_t page_bytes) override;
  Status map(const PhysicalPages& pages, Page first, std::size_t count, Address at) override;
  Status set_access(Address at, std::size_t bytes) override;
  Status unmap(Address at, std::size_t bytes) override;
  Status zero(Address at, std::size_t bytes) override;
  Status write(Address to, const void* from, std::size_t bytes) override;
  Status read(void* to, Address from, std::size_t bytes) override;
  Result<std::vector<Mapping>> inspect(const PhysicalPages& pages,
                                       std::span<const Address> at) override;

 private:
  Status enter(const char* call);

  mutable std::mutex mutex_;
  std::map<std::string, std::int64_t> calls_;      // made so far
  std::map<std::string, std::int64_t> countdown_;  // to the call that fails
  std::map<std::string, double> delay_;            // seconds
};

}  // namespace vattn
