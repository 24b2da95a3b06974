// SPDX-License-Identifier: Apache-2.0
// Several threads use one address space as hard as they can, over a slow driver
// that fails now and then. Meant for ThreadSanitizer (VATTN_SANITIZE=thread);
// checks without it that every page in every row that says it is ready is right.
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "check.h"
#include "driver_faulty.h"
#include "space.h"

using vattn::AddressSpace;
using vattn::Page;

namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr int kPages = 64;
constexpr std::size_t kRowPages = 40;  // more than a chunk

// The first bytes of each page hold its number.
const std::int64_t* number_at(const AddressSpace& space, int row, std::size_t page) {
  return reinterpret_cast<const std::int64_t*>(
      space.rows_address() + static_cast<std::size_t>(row) * space.row_bytes() + page * kPageBytes);
}

void use_rows(AddressSpace& space, unsigned seed, const std::atomic<bool>& stop) {
  std::mt19937 random(seed);
  const auto pick = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  while (!stop.load()) {
    const int row = space.acquire_row().value();
    if (row == 0) {
      std::this_thread::yield();
      continue;
    }
    std::vector<Page> pages;
    for (std::size_t step = pick(6); step-- > 0;) {
      std::vector<Page> more(pick(kRowPages - pages.size() + 1));
      for (Page& page : more) page = 1 + static_cast<Page>(pick(kPages));
      CHECK(space.map(row, static_cast<std::int64_t>(pages.size()), more).ok());
      pages.insert(pages.end(), more.begin(), more.end());
      if (pick(3) == 0) CHECK(space.prefer(std::vector<int>{row}).ok());
      if (pick(3) == 0)
        static_cast<void>(space.wait(row, static_cast<std::int64_t>(pages.size()), 0.002));
      const auto ready = static_cast<std::size_t>(space.ready(row).value());
      CHECK(ready <= pages.size());
      for (std::size_t i = 0; i < ready; ++i) CHECK(*number_at(space, row, i) == pages[i]);
      if (pick(3) == 0) {
        pages.resize(pick(pages.size() + 1));
        CHECK(space.truncate(row, static_cast<std::int64_t>(pages.size())).ok());
      }
    }
    CHECK(space.row_pages(row).value() == pages);
    CHECK(space.retire_row(row).ok());
  }
}

void run(std::size_t max_mappings) {
  auto driver = std::make_shared<vattn::FaultyDriver>(vattn::make_host_driver(kPageBytes).value());
  auto space =
      AddressSpace::create(driver, {kPages, kPageBytes, 12, kRowPages, max_mappings}).value();
  for (Page page = 1; page <= kPages; ++page)
    *reinterpret_cast<std::int64_t*>(space->home_address() +
                                     static_cast<std::size_t>(page) * kPageBytes) = page;
  CHECK(driver->set_delay("map", 20e-6).ok() && driver->set_delay("unmap", 50e-6).ok());

  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 3; ++seed)
    threads.emplace_back([&, seed] { use_rows(*space, seed, stop); });
  threads.emplace_back([&] {
    while (!stop.load()) {
      const vattn::MapperStats stats = space->stats().value();
      CHECK(stats.rows_live >= 0 && stats.rows_live <= 11 && stats.mappings >= 0);
      CHECK(stats.rows_clean + stats.rows_live + stats.rows_retired == 11);
      for (const auto& text : space->check_integrity().value()) {
        std::fprintf(stderr, "%s\n", text.c_str());
        CHECK(false);
      }
      CHECK(space->clean(2).ok());
      if (!driver->armed())
        CHECK(driver->fail_at("map", 20).ok() && driver->fail_at("unmap", 5).ok());
      for (int row = 0; row < 12; ++row) static_cast<void>(space->error(row).value());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  std::this_thread::sleep_for(std::chrono::seconds(2));
  stop = true;
  for (auto& thread : threads) thread.join();
  CHECK(driver->fail_at("map", 0).ok() && driver->fail_at("unmap", 0).ok());
  // Twice: the last fault may have hit a row on its way to clean.
  for (int i = 0; i < 2; ++i) CHECK(space->clean(-1).ok() && space->drain(10).value());
  const vattn::MapperStats stats = space->stats().value();
  CHECK(stats.rows_clean == 11 && stats.mappings == 0);
  CHECK(space->check_integrity().value().empty());
  std::printf("%lld pages mapped, %lld errors\n", static_cast<long long>(stats.pages_mapped),
              static_cast<long long>(stats.errors));

  // Closing wakes whoever waits, and answers whoever calls.
  const int row = space->acquire_row().value();
  std::thread waiter([&] { static_cast<void>(space->wait(row, 1, 60)); });
  std::thread caller([&] {
    while (space->ready(row).ok()) static_cast<void>(space->stats());
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(space->close().ok());
  waiter.join();
  caller.join();
}

}  // namespace

int main() {
  run(0);
  run(45);  // a budget that is always short
}
