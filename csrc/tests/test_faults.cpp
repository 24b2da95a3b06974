// SPDX-License-Identifier: Apache-2.0
// A scripted life of an address space, over and over, in which the k-th driver
// call fails, for every call name and every k until the script gets through.
// Whatever fails: the records agree with /proc/self/maps, the next attempt
// works, and closing leaves no mapping and no file behind.
#include <dirent.h>

#include <fstream>

#include "check.h"
#include "driver_faulty.h"
#include "space.h"

using vattn::AddressSpace;
using vattn::FaultyDriver;
using vattn::Page;

namespace {

constexpr std::size_t kPageBytes = 4096;

int our_mappings() {
  std::ifstream maps("/proc/self/maps");
  int found = 0;
  for (std::string line; std::getline(maps, line);)
    found += line.find("sglang-vattn") != std::string::npos;
  return found;
}

int open_files() {
  DIR* directory = ::opendir("/proc/self/fd");
  int found = 0;
  while (::readdir(directory)) ++found;
  ::closedir(directory);
  return found;
}

void check_sound(AddressSpace& space) {
  auto found = space.check_integrity();
  if (!found.ok()) found = space.check_integrity();  // the fault was in inspect
  CHECK(found.ok());
  for (const auto& text : found.value()) std::fprintf(stderr, "%s\n", text.c_str());
  CHECK(found.value().empty());
}

// Wants these pages in the row, retrying as a caller would: truncate to what is
// there, map again.
void map_surely(AddressSpace& space, int row, const std::vector<Page>& pages) {
  for (int attempt = 0; attempt < 3; ++attempt) {
    const auto have = static_cast<std::size_t>(space.ready(row).value());
    CHECK(space.truncate(row, static_cast<std::int64_t>(have)).ok());
    CHECK(space.map(row, static_cast<std::int64_t>(have), std::span(pages).subspan(have)).ok());
    if (space.wait(row, static_cast<std::int64_t>(pages.size()), 10).value()) return;
    CHECK(space.error(row).value().find("injected fault") != std::string::npos);
    check_sound(space);
  }
  CHECK(false);
}

// True if the fault did not happen: k is beyond the script.
bool run(const std::shared_ptr<vattn::Driver>& host, const char* call, int k) {
  const auto driver = std::make_shared<FaultyDriver>(host);
  CHECK(driver->fail_at(call, k).ok());
  auto made = AddressSpace::create(driver, {8, kPageBytes, 4, 6, 0, 2});
  if (!made.ok()) {
    CHECK(made.status().kind() == vattn::Status::Kind::kDriver);
    CHECK(our_mappings() == 0);
    made = AddressSpace::create(driver, {8, kPageBytes, 4, 6, 0, 2});
  }
  CHECK(made.ok());
  AddressSpace& space = *made.value();
  const int a = space.acquire_row().value(), b = space.acquire_row().value();
  map_surely(space, a, {5, 3, 4, 1});
  map_surely(space, b, {5, 3, 8});
  CHECK(space.truncate(a, 1).ok());
  map_surely(space, a, {5, 2});
  check_sound(space);
  CHECK(space.retire_row(a).ok() && space.retire_row(b).ok());
  CHECK(space.drain(10).value());
  CHECK(space.clean(-1).ok() && space.drain(10).value());  // again, had an unmap failed
  CHECK(space.stats().value().rows_clean == 3 && space.stats().value().mappings == 0);
  check_sound(space);
  const bool failed_before = !driver->armed();
  CHECK(space.close().ok() || !failed_before);
  return driver->armed();
}

// The map fails and so does undoing it: what is left over is known, stays out of
// ready(), and is gone after the next truncate.
void run_double_fault(const std::shared_ptr<vattn::Driver>& host) {
  const auto driver = std::make_shared<FaultyDriver>(host);
  auto space = AddressSpace::create(driver, {8, kPageBytes, 4, 6}).value();
  const int row = space->acquire_row().value();
  CHECK(driver->fail_at("map", 3).ok() && driver->fail_at("unmap", 1).ok());
  CHECK(space->map(row, 0, std::vector<Page>{5, 3, 1}).ok());
  CHECK(!space->wait(row, 3, 10).value() && space->ready(row).value() == 0);
  CHECK(space->stats().value().mappings == 2 && space->stats().value().errors == 2);
  check_sound(*space);
  map_surely(*space, row, {4, 6});
  check_sound(*space);
}

}  // namespace

int main() {
  auto host = vattn::make_host_driver(kPageBytes);
  CHECK(host.ok());
  const int files = open_files();
  for (const char* call : {"reserve", "free", "create", "map", "set_access", "unmap", "write",
                           "read", "inspect", ""}) {
    int k = 1;
    for (; !run(host.value(), call, k); ++k) {
      CHECK(our_mappings() == 0);
      CHECK(open_files() == files);
    }
    std::printf("%-10s every k up to %d\n", call, k - 1);
    CHECK(k > 1);
  }
  run_double_fault(host.value());
  CHECK(our_mappings() == 0 && open_files() == files);
}
