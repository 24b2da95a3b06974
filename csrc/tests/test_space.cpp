// SPDX-License-Identifier: Apache-2.0
// The life of a row on the host driver, seen through real memory.
#include "check.h"
#include "driver_striped.h"
#include "space.h"

using vattn::AddressSpace;
using vattn::Page;

int main() {
  for (std::size_t granule : {std::size_t{4096}, std::size_t{2} << 20}) {
    auto driver = vattn::make_host_driver(granule);
    CHECK(driver.ok());
    if (granule == 4096)  // this life is the same, seen in the first stripe
      driver = std::shared_ptr<vattn::Driver>(new vattn::StripedDriver(driver.value(), 2));
    const std::size_t page_bytes = 2 * granule;
    CHECK(!AddressSpace::create(driver.value(), {8, page_bytes + 1, 4, 6}).ok());
    auto made = AddressSpace::create(driver.value(), {8, page_bytes, 4, 6, 0, 2});
    CHECK(made.ok());
    AddressSpace& space = *made.value();
    CHECK(space.home_address() % granule == 0 && space.rows_address() % granule == 0);
    const auto home = [&](Page page) {
      return reinterpret_cast<unsigned char*>(space.home_address() +
                                              static_cast<std::size_t>(page) * page_bytes);
    };
    const auto in_row = [&](int row, std::size_t index) {
      return reinterpret_cast<unsigned char*>(space.rows_address() +
                                              static_cast<std::size_t>(row) * space.row_bytes() +
                                              index * page_bytes);
    };
    const int a = space.acquire_row().value(), b = space.acquire_row().value();
    CHECK(a != 0 && b != 0 && a != b);
    CHECK(space.map(a, 0, std::vector<Page>{3, 7, 1}).ok());
    CHECK(space.map(b, 0, std::vector<Page>{3, 7}).ok());
    CHECK(space.map(b, 2, std::vector<Page>{8, space.guard_page()}).ok());
    CHECK(space.wait(a, 3, 10).value() && space.wait(b, 4, 10).value());
    home(7)[page_bytes - 1] = 42;
    CHECK(in_row(a, 1)[page_bytes - 1] == 42 && in_row(b, 1)[page_bytes - 1] == 42);
    in_row(b, 2)[0] = 9;
    CHECK(home(8)[0] == 9 && in_row(b, 3)[0] == 0);
    CHECK(space.truncate(b, 1).ok() && space.ready(b).value() <= 1);
    CHECK(space.map(b, 1, std::vector<Page>{2}).ok() && space.wait(b, 2, 10).value());
    home(2)[5] = 77;
    CHECK(in_row(b, 1)[5] == 77);
    CHECK(space.check_integrity().value().empty());
    CHECK(space.retire_row(a).ok() && space.drain(10).value());
    CHECK(space.stats().value().mappings == 2 && space.stats().value().rows_clean == 2);
    CHECK(space.check_integrity().value().empty());
    CHECK(space.close().ok() && space.close().ok());
    CHECK(!space.acquire_row().ok() && !space.ready(b).ok());
  }
}
