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
  for (std::string line; std::getline(maps, line);) found += line.find("sglang-vattn") != std::string::npos;
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
  const bool closed = space.close().ok();
  made = {vattn::Status::invalid("dropped")};
  // The host's munmap of a whole range does not need the unmaps before it, but a
  // failed `free` leaks its range: that fault is the one that cannot be undone.
  if (closed || std::string(call) != "free") return driver->fail_at(call, 0).ok() && closed && driver->faults() == 0;
  return false;
}

}  // namespace

int main() {
  auto host = vattn::make_host_driver(kPageBytes);
  CHECK(host.ok());
  const int files = open_files();
  for (const char* call : {"reserve", "create", "map", "set_access", "unmap", "write", "read", "inspect", ""}) {
    int k = 1;
    while (!run(host.value(), call, k)) ++k;
    std::printf("%-10s every k up to %d\n", call, k - 1);
    CHECK(k > 1);
    if (std::string(call) != "") CHECK(our_mappings() == 0);
    CHECK(open_files() == files);
  }
}
