// SPDX-License-Identifier: Apache-2.0
// Random operations on Pages: the integrity check holds after each, a refused
// batch changes nothing, and the counters sum to the pool while another thread
// reads them (the model-based test with reservations is tests/core/test_pages.py).
#include <random>
#include <thread>

#include "check.h"
#include "pages.h"

using vattn::Page;
using vattn::Pages;

int main() {
  constexpr int kPages = 24;
  Pages pages(kPages);
  std::atomic<bool> done = false;
  std::thread reader([&] {
    while (!done.load())
      for (int s = 0; s < Pages::kStates; ++s) {
        const auto count = pages.count(static_cast<Pages::State>(s));
        CHECK(count >= 0 && count <= kPages);
      }
  });
  std::mt19937 random(1);
  const auto pick = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  int refused = 0;
  for (int step = 0; step < 5000; ++step) {
    std::vector<Page> batch;
    for (int i = pick(4); i >= 0; --i) batch.push_back(pick(kPages + 1));  // page 0 is illegal
    const auto before = pages.free_list();
    vattn::Status status;
    switch (pick(9)) {
      case 0:
        static_cast<void>(pages.take(pick(6)));
        break;
      case 1:
        status = pages.release(batch);
        break;
      case 2:
        status = pages.ref(batch, pick(2) == 0);
        break;
      case 3:
      case 4:
        status = pages.unref(batch, pick(2) == 0);
        break;
      case 5:
        status = pages.lock(batch);
        break;
      case 6:
        status = pages.unlock(batch);
        break;
      case 7:
        static_cast<void>(pages.reserve(pick(3)));
        break;
      case 8:
        pages.unreserve(batch[0], pick(3));
        break;
    }
    if (!status.ok()) {
      ++refused;
      CHECK(pages.free_list() == before);
    }
    CHECK(pages.check_integrity().empty());
  }
  CHECK(refused > 500);
  done = true;
  reader.join();
  pages.reset();
  CHECK(pages.count(Pages::State::kFree) == kPages && pages.take(1)->front() == 1);
}
