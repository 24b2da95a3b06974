// SPDX-License-Identifier: Apache-2.0
// The one thin layer that talks to CUDA or to the operating system. Everything
// above it deals in pages and addresses only.
//
// Contract of every implementation
//   * Thread-safe. No call throws. Each call does all of its work or none: on
//     failure it has already undone what it did.
//   * Addresses and sizes are multiples of granularity().
//   * A page is mapped whole; one page may be mapped at any number of addresses
//     (aliases), all of which see the same bytes.
//   * map() leaves a range that faults when touched; set_access() opens it. The
//     host keeps that CUDA rule (mmap PROT_NONE, then mprotect), so that a
//     forgotten set_access() fails on any machine.
//   * unmap() leaves the addresses reserved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "status.h"

namespace vattn {

using Address = std::uintptr_t;
using Page = std::int32_t;

// The physical memory of one pool: `count` pages of `page_bytes` each. The
// destructor gives it back; mappings must be gone by then.
class PhysicalPages {
 public:
  PhysicalPages(std::size_t count, std::size_t page_bytes) : count(count), page_bytes(page_bytes) {}
  virtual ~PhysicalPages() = default;
  PhysicalPages(const PhysicalPages&) = delete;
  PhysicalPages& operator=(const PhysicalPages&) = delete;

  const std::size_t count;
  const std::size_t page_bytes;
};

// What is really mapped at the address of a page, as inspect() found it.
struct Mapping {
  static constexpr std::int64_t kNothing = -1;  // reserved, unmapped
  static constexpr std::int64_t kForeign = -2;  // another's memory, or a torn page

  std::int64_t page = kNothing;
  bool accessible = false;
};

class Driver {
 public:
  Driver() = default;
  virtual ~Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  virtual const char* name() const = 0;
  virtual std::size_t granularity() const = 0;
  virtual std::size_t stripes() const { return 1; }  // allocations a page (driver_striped.h)
  virtual int device() const = 0;                    // CUDA ordinal; -1 on the host
  virtual std::size_t mapping_budget() const = 0;    // most mappings rows may hold; 0: no limit
  virtual bool unmap_stalls_gpu() const = 0;         // true: unmap rarely (docs: 220 us a call)
  virtual bool creates_zeroed() const = 0;           // true: create() hands out zeroed memory

  virtual Result<Address> reserve(std::size_t bytes) = 0;
  virtual Status free(Address at, std::size_t bytes) = 0;  // a whole reservation, unmapped
  virtual Result<std::unique_ptr<PhysicalPages>> create(std::size_t count,
                                                        std::size_t page_bytes) = 0;

  // Maps pages first .. first+count-1 in order at `at`. Not accessible yet.
  virtual Status map(const PhysicalPages& pages, Page first, std::size_t count, Address at) = 0;
  virtual Status set_access(Address at, std::size_t bytes) = 0;
  virtual Status unmap(Address at, std::size_t bytes) = 0;  // every page in it is mapped

  // Synchronous: the memory has changed (or been read) when they return.
  virtual Status zero(Address at, std::size_t bytes) = 0;
  virtual Status write(Address to, const void* from, std::size_t bytes) = 0;
  virtual Status read(void* to, Address from, std::size_t bytes) = 0;

  // What lies at each of these page addresses, asked of the system itself.
  virtual Result<std::vector<Mapping>> inspect(const PhysicalPages& pages,
                                               std::span<const Address> at) = 0;
};

// Drivers are shared by the spaces built on them, hence shared_ptr.
Result<std::shared_ptr<Driver>> make_host_driver(std::size_t granule_bytes);
// `library` is another file only in tests, which load a fake.
Result<std::shared_ptr<Driver>> make_cuda_driver(int device, const char* library = "libcuda.so.1");

}  // namespace vattn
