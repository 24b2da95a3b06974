// SPDX-License-Identifier: Apache-2.0
// The CUDA driver over a fake libcuda: its calls are legal by CUDA's rules, it
// undoes what it did when the k-th libcuda call fails (for every k), gives
// everything back, and says clearly what is missing. With a path to a real
// libcuda.so.1 as argument, the same life runs on the GPU.
#include <dlfcn.h>

#include <thread>

#include "check.h"
#include "driver_faulty.h"
#include "space.h"

using vattn::AddressSpace;
using vattn::Page;

namespace {

// A life of an address space; the Status of the first thing that failed.
vattn::Status live(const char* library) {
  auto driver = vattn::make_cuda_driver(0, library);
  if (!driver.ok()) return driver.status();
  vattn::Driver& cuda = *driver.value();
  CHECK(cuda.unmap_stalls_gpu());
  const std::size_t page_bytes = cuda.granularity() * 2;
  auto made = AddressSpace::create(driver.value(), {6, page_bytes, 5, 6, 0, 2});
  if (!made.ok()) return made.status();
  AddressSpace& space = *made.value();
  const auto address = [&](int row, std::size_t page) {
    return space.rows_address() + static_cast<std::size_t>(row) * space.row_bytes() +
           page * page_bytes;
  };
  const int a = space.acquire_row().value(), b = space.acquire_row().value();
  CHECK(space.map(a, 0, std::vector<Page>{4, 5, 2}).ok() &&
        space.map(b, 0, std::vector<Page>{4, 1}).ok());
  if (!space.wait(a, 3, 10).value()) return vattn::Status::driver(space.error(a).value());
  if (!space.wait(b, 2, 10).value()) return vattn::Status::driver(space.error(b).value());
  const std::uint64_t sent = 0x0123456789abcdef;
  std::uint64_t got = 1;
  // The last bytes of a shared page: zero at first, then the same through every address.
  const std::size_t last = page_bytes - sizeof(sent);
  if (auto s = cuda.read(&got, address(a, 0) + last, sizeof(got)); !s.ok()) return s;
  CHECK(got == 0);
  if (auto s = cuda.write(address(b, 0) + last, &sent, sizeof(sent)); !s.ok()) return s;
  if (auto s = cuda.read(&got, address(a, 0) + last, sizeof(got)); !s.ok()) return s;
  CHECK(got == sent);
  got = 0;
  if (auto s = cuda.read(&got, space.home_address() + 4 * page_bytes + last, sizeof(got)); !s.ok())
    return s;
  CHECK(got == sent);
  CHECK(space.truncate(a, 1).ok() && space.map(a, 1, std::vector<Page>{3}).ok());
  if (!space.wait(a, 2, 10).value()) return vattn::Status::driver(space.error(a).value());
  auto found = space.check_integrity();
  if (!found.ok()) return found.status();
  for (const auto& text : found.value()) std::fprintf(stderr, "%s\n", text.c_str());
  CHECK(found.value().empty());
  // Unmapping stalls the GPU: a retired row waits until it is asked for.
  CHECK(space.retire_row(a).ok() && space.drain(10).value() &&
        space.stats().value().rows_retired == 1);
  CHECK(space.clean(-1).ok() && space.drain(10).value());
  if (space.stats().value().rows_retired != 0)
    return vattn::Status::driver("out of memory in unmap");
  found = space.check_integrity();
  if (!found.ok()) return found.status();
  CHECK(found.value().empty());
  return space.close();
}

// Requests arrive while retired rows are unmapped: at most the call in flight goes on.
void cleaning_stops_on_request() {
  auto faulty =
      std::make_shared<vattn::FaultyDriver>(vattn::make_cuda_driver(0, FAKE_LIBCUDA).value());
  CHECK(faulty->set_delay("unmap", 0.05).ok());
  auto made = vattn::AddressSpace::create(faulty, {8, faulty->granularity(), 8, 2});
  CHECK(made.ok());
  vattn::AddressSpace& space = *made.value();
  for (Page page = 1; page <= 5; ++page) {
    const int row = space.acquire_row().value();
    CHECK(space.map(row, 0, std::vector<Page>{page}).ok() && space.wait(row, 1, 10).value());
    CHECK(space.retire_row(row).ok());
  }
  CHECK(space.clean(-1).ok() && space.clean(0).ok() && space.drain(10).value());
  CHECK(space.stats().value().unmap_calls <= 1 && space.stats().value().rows_retired >= 4);
  CHECK(space.clean(-1).ok() && space.drain(10).value());
  CHECK(space.stats().value().rows_retired == 0);
  CHECK(space.close().ok());
}

template <class F>
F* symbol(void* library, const char* name) {
  auto* found = reinterpret_cast<F*>(::dlsym(library, name));
  CHECK(found);
  return found;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) {
    const vattn::Status status = live(argv[1]);
    std::printf("%s: %s\n", argv[1], status.ok() ? "ok" : status.text().c_str());
    return status.ok() ? 0 : 1;
  }
  const auto missing = vattn::make_cuda_driver(0, "libno-such-cuda.so.1").status();
  CHECK(missing.text().find("cannot be loaded") != std::string::npos);
  const auto old = vattn::make_cuda_driver(0, "libm.so.6").status();
  CHECK(old.text().find("libm.so.6 has no cuInit") != std::string::npos);
  CHECK(vattn::make_cuda_driver(1, FAKE_LIBCUDA).status().kind() == vattn::Status::Kind::kInvalid);

  void* fake = ::dlopen(FAKE_LIBCUDA, RTLD_NOW);
  CHECK(fake);
  auto* fail = symbol<void(int)>(fake, "fake_cuda_fail");
  auto* armed = symbol<int()>(fake, "fake_cuda_armed");
  auto* held = symbol<int()>(fake, "fake_cuda_held");
  auto* forget = symbol<void()>(fake, "fake_cuda_forget");
  CHECK(live(FAKE_LIBCUDA).ok() && held() == 0);
  cleaning_stops_on_request();
  CHECK(held() == 0);

  // Another process took memory since SGLang looked: by little or by all, creation ends
  // with a reason and leaves nothing behind; when that process is gone, we start.
  auto* taken = symbol<void(int)>(fake, "fake_cuda_taken");
  constexpr int kDevice = 64, kWanted = 8 * 2;  // granules: pages 0..7 of two each
  for (int others = kDevice; others > kDevice - kWanted; --others) {
    taken(others);
    const vattn::Status status = live(FAKE_LIBCUDA);
    CHECK(!status.ok() && status.text().find("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY") == 0);
    CHECK(held() == 0);
  }
  taken(kDevice - kWanted);
  CHECK(live(FAKE_LIBCUDA).ok() && held() == 0);
  taken(0);

  int k = 1, leaks = 0;
  for (;; ++k) {
    fail(k);
    const vattn::Status status = live(FAKE_LIBCUDA);
    if (armed()) break;
    CHECK(!status.ok() && status.text().find("out of memory") != std::string::npos);
    // A teardown call that fails cannot be made good; anything else must be.
    const bool teardown =
        status.text().find("cuMemUnmap") == 0 || status.text().find("cuMemAddressFree") == 0;
    if (held() != 0) {
      CHECK(teardown);
      ++leaks;
      forget();
    }
  }
  fail(0);
  std::printf("every libcuda call up to the %d. failed once, %d left something behind\n", k - 1,
              leaks);
  CHECK(k > 50);
}
