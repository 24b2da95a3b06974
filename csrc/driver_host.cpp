// SPDX-License-Identifier: Apache-2.0
// The host driver: pages are slices of one memfd, a reservation is a PROT_NONE
// mapping, an alias is a MAP_FIXED mapping of a slice over it.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "driver.h"
#include "proc_maps.h"

namespace vattn {
namespace {

Status os_error(const char* call, int code) {
  const char* name = strerrorname_np(code);
  return Status::driver(std::string(call) + ": " + (name ? name : "errno") + " (" +
                        std::to_string(code) + ") " + strerrordesc_np(code));
}

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

void* pointer(Address at) { return reinterpret_cast<void*>(at); }

// A mapping that faults when touched and costs no memory. MAP_FIXED (over
// addresses we own) also discards what was mapped there, in one step, so
// nobody else's mmap can slip in between.
Result<Address> map_nothing(Address at, std::size_t bytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at != 0 ? MAP_FIXED : 0);
  void* got = ::mmap(pointer(at), bytes, PROT_NONE, flags, -1, 0);
  if (got == MAP_FAILED) return os_error("mmap", errno);
  return reinterpret_cast<Address>(got);
}

class HostPages final : public PhysicalPages {
 public:
  HostPages(int fd, ino_t inode, std::size_t count, std::size_t page_bytes)
      : PhysicalPages(count, page_bytes), fd(fd), inode(inode) {}
  ~HostPages() override { ::close(fd); }

  const int fd;
  const ino_t inode;  // recognises our lines in /proc/self/maps
};

class HostDriver final : public Driver {
 public:
  HostDriver(std::size_t granule, std::size_t budget) : granule_(granule), budget_(budget) {}

  const char* name() const override { return "host"; }
  std::size_t granularity() const override { return granule_; }
  int device() const override { return -1; }
  std::size_t mapping_budget() const override { return budget_; }
  bool unmap_stalls_gpu() const override { return false; }
  bool creates_zeroed() const override { return true; }

  Result<Address> reserve(std::size_t bytes) override {
    // mmap aligns to the system's page only: reserve one granule more, give the ends back.
    const std::size_t slack = granule_ - 1;
    Result<Address> raw = map_nothing(0, bytes + slack);
    if (!raw.ok()) return raw;
    const Address begin = raw.value();
    const Address aligned = round_up(begin, granule_);
    const Address end = begin + round_up(bytes + slack, os_page());
    if (aligned > begin) ::munmap(pointer(begin), aligned - begin);
    if (end > aligned + bytes) ::munmap(pointer(aligned + bytes), end - aligned - bytes);
    return aligned;
  }

  Status free(Address at, std::size_t bytes) override {
    if (::munmap(pointer(at), bytes) != 0) return os_error("munmap", errno);
    return {};
  }

  Result<std::unique_ptr<PhysicalPages>> create(std::size_t count,
                                                std::size_t page_bytes) override {
    const int fd = ::memfd_create("sglang-vattn", MFD_CLOEXEC);
    if (fd < 0) return os_error("memfd_create", errno);
    struct stat info = {};
    if (::fstat(fd, &info) != 0) {
      Status failure = os_error("fstat", errno);
      ::close(fd);
      return failure;
    }
    auto pages = std::make_unique<HostPages>(fd, info.st_ino, count, page_bytes);
    // Allocate now: a file that is only sized would kill the process (SIGBUS)
    // at the first write for which no memory is left.
    int rc = 0;
    do {
      rc = ::fallocate(fd, 0, 0, static_cast<off_t>(count * page_bytes));
    } while (rc != 0 && errno == EINTR);
    if (rc != 0) return os_error("fallocate", errno);
    return std::unique_ptr<PhysicalPages>(std::move(pages));
  }

  // Pages that follow each other in the file become one mmap: the home arena
  // is a single mapping, whatever its size.
  Status map(const PhysicalPages& pages, Page first, std::size_t count, Address at) override {
    const auto& ours = static_cast<const HostPages&>(pages);
    const auto offset = static_cast<off_t>(static_cast<std::size_t>(first) * pages.page_bytes);
    void* got = ::mmap(pointer(at), count * pages.page_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                       ours.fd, offset);
    if (got == MAP_FAILED) return os_error("mmap", errno);
    return {};
  }

  Status set_access(Address at, std::size_t bytes) override {
    if (::mprotect(pointer(at), bytes, PROT_READ | PROT_WRITE) != 0)
      return os_error("mprotect", errno);
    return {};
  }

  Status unmap(Address at, std::size_t bytes) override { return map_nothing(at, bytes).status(); }

  Status zero(Address at, std::size_t bytes) override {
    std::memset(pointer(at), 0, bytes);
    return {};
  }
  Status write(Address to, const void* from, std::size_t bytes) override {
    std::memcpy(pointer(to), from, bytes);
    return {};
  }
  Status read(void* to, Address from, std::size_t bytes) override {
    std::memcpy(to, pointer(from), bytes);
    return {};
  }

  Result<std::vector<Mapping>> inspect(const PhysicalPages& pages,
                                       std::span<const Address> at) override {
    const auto& ours = static_cast<const HostPages&>(pages);
    Result<ProcMaps> maps = ProcMaps::read_self();
    if (!maps.ok()) return maps.status();
    std::vector<Mapping> found;
    found.reserve(at.size());
    for (Address address : at)
      found.push_back(maps.value().page_at(address, pages.page_bytes, ours.inode));
    return found;
  }

  static std::size_t os_page() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

 private:
  const std::size_t granule_;
  const std::size_t budget_;
};

// Half of what the kernel allows the process: the other half is for the gaps
// between the rows and for everything else that the process maps.
Result<std::size_t> read_mapping_budget() {
  const char* path = "/proc/sys/vm/max_map_count";
  std::ifstream file(path);
  std::size_t limit = 0;
  if (!(file >> limit)) return Status::driver(std::string("cannot read ") + path);
  return std::max<std::size_t>(limit / 2, 1);
}

}  // namespace

Result<std::shared_ptr<Driver>> make_host_driver(std::size_t granule_bytes) {
  const std::size_t os_page = HostDriver::os_page();
  if (granule_bytes == 0 || (granule_bytes & (granule_bytes - 1)) != 0 || granule_bytes % os_page)
    return Status::invalid("granule_bytes is " + std::to_string(granule_bytes) +
                           ": it must be a power of two and a multiple of the system's page of " +
                           std::to_string(os_page) + " bytes");
  Result<std::size_t> budget = read_mapping_budget();
  if (!budget.ok()) return budget.status();
  return std::shared_ptr<Driver>(std::make_shared<HostDriver>(granule_bytes, budget.value()));
}

}  // namespace vattn
