// SPDX-License-Identifier: Apache-2.0
// Bindings of the drivers and of AddressSpace.
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <mutex>

#include "bind.h"
#include "driver_faulty.h"
#include "driver_striped.h"
#include "space.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace vattn::bind {
namespace {

// Python's driver objects hold a driver; the spaces built on it share it.
struct DriverHandle {
  std::shared_ptr<Driver> driver;
};
struct HostHandle : DriverHandle {};
struct CudaHandle : DriverHandle {};
struct StripedHandle : DriverHandle {};
struct FaultyHandle : DriverHandle {
  FaultyDriver& faulty() const { return static_cast<FaultyDriver&>(*driver); }
};

// ---- address spaces ---------------------------------------------------------

// Mapping threads must not outlive the interpreter: CUDA is torn down after it,
// under the feet of whatever thread still calls it. Hence a list, and atexit.
class LiveSpaces {
 public:
  void add(const std::shared_ptr<AddressSpace>& space) {
    std::lock_guard lock(mutex_);
    std::erase_if(spaces_, [](const auto& s) { return s.expired(); });
    spaces_.push_back(space);
  }
  void stop_all() {
    std::lock_guard lock(mutex_);
    for (const auto& weak : spaces_)
      if (auto space = weak.lock()) space->stop_mapper();
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<AddressSpace>> spaces_;
};

LiveSpaces& live_spaces() {
  static LiveSpaces spaces;
  return spaces;
}

struct SpaceHandle {
  std::shared_ptr<AddressSpace> space;

  AddressSpace* operator->() const { return space.get(); }
};

using Bytes = nb::ndarray<nb::array_api, std::uint8_t, nb::ndim<1>, nb::c_contig>;

// A view of addresses, on the driver's device. Its owner is the Python object of
// the space, so the space lives as long as a view does (unless closed).
Bytes view(nb::handle self, Address at, std::size_t bytes) {
  const auto& space = nb::cast<const SpaceHandle&>(self);
  if (space->closed()) throw nb::value_error("the address space is closed");
  const int device = space->driver().device();
  const bool cuda = device >= 0;
  return Bytes(reinterpret_cast<void*>(at), {bytes}, self, {1}, nb::dtype<std::uint8_t>(),
               cuda ? nb::device::cuda::value : nb::device::cpu::value, cuda ? device : 0);
}

nb::dict stats_dict(const MapperStats& s) {
  nb::dict d;
  const std::pair<const char*, std::int64_t> items[] = {
      {"map_calls", s.map_calls},
      {"pages_mapped", s.pages_mapped},
      {"unmap_calls", s.unmap_calls},
      {"pages_unmapped", s.pages_unmapped},
      {"map_ns", s.map_ns},
      {"unmap_ns", s.unmap_ns},
      {"set_access_calls", s.set_access_calls},
      {"mappings", s.mappings},
      {"max_mappings", s.max_mappings},
      {"queued_jobs", s.queued_jobs},
      {"waits", s.waits},
      {"wait_ns", s.wait_ns},
      {"errors", s.errors},
      {"rows_clean", s.rows_clean},
      {"rows_live", s.rows_live},
      {"rows_retired", s.rows_retired},
  };
  for (const auto& [name, value] : items) d[name] = value;
  return d;
}

// Runs a call that may take long with the GIL released.
template <class Call>
auto unlocked(Call call) {
  nb::gil_scoped_release released;
  return call();
}

void bind_drivers(nb::module_& m) {
  nb::class_<DriverHandle>(m, "Driver")
      .def_prop_ro("name", [](const DriverHandle& d) { return d.driver->name(); })
      .def_prop_ro("granularity", [](const DriverHandle& d) { return d.driver->granularity(); })
      .def_prop_ro("stripes", [](const DriverHandle& d) { return d.driver->stripes(); })
      .def_prop_ro("device", [](const DriverHandle& d) { return d.driver->device(); });
  nb::class_<HostHandle, DriverHandle>(m, "HostDriver")
      .def(
          "__init__",
          [](HostHandle* self, std::size_t granule_bytes) {
            new (self) HostHandle{{unwrap(make_host_driver(granule_bytes))}};
          },
          "granule_bytes"_a = 4096);
  nb::class_<CudaHandle, DriverHandle>(m, "CudaDriver")
      .def(
          "__init__",
          [](CudaHandle* self, int device) {
            new (self) CudaHandle{{unwrap(unlocked([&] { return make_cuda_driver(device); }))}};
          },
          "device"_a = 0);
  nb::class_<StripedHandle, DriverHandle>(m, "StripedDriver")
      .def(
          "__init__",
          [](StripedHandle* self, const DriverHandle& inner, std::size_t stripes) {
            if (stripes < 1) throw nb::value_error("stripes is 0: at least 1");
            new (self) StripedHandle{{std::make_shared<StripedDriver>(inner.driver, stripes)}};
          },
          "inner"_a, "stripes"_a);
  nb::class_<FaultyHandle, DriverHandle>(m, "FaultyDriver")
      .def(
          "__init__",
          [](FaultyHandle* self, const DriverHandle& inner) {
            new (self) FaultyHandle{{std::make_shared<FaultyDriver>(inner.driver)}};
          },
          "inner"_a)
      .def(
          "fail_at",
          [](FaultyHandle& d, const std::string& call, std::int64_t k) {
            raise(d.faulty().fail_at(call, k));
          },
          "call"_a, "k"_a)
      .def(
          "set_delay",
          [](FaultyHandle& d, const std::string& call, double seconds) {
            raise(d.faulty().set_delay(call, seconds));
          },
          "call"_a, "seconds"_a)
      .def_prop_ro("armed", [](const FaultyHandle& d) { return d.faulty().armed(); })
      .def("calls", [](const FaultyHandle& d) { return d.faulty().calls(); });
}

}  // namespace

void bind_space(nb::module_& m) {
  bind_drivers(m);
  using S = const SpaceHandle;
  nb::class_<SpaceHandle>(m, "AddressSpace")
      .def(
          "__init__",
          [](SpaceHandle* self, const DriverHandle& driver, std::int32_t num_pages,
             std::size_t page_bytes, int num_rows, std::size_t pages_per_row,
             std::size_t max_mappings, std::size_t dummy_row_pages) {
            const SpaceConfig config = {num_pages,     page_bytes,   num_rows,
                                        pages_per_row, max_mappings, dummy_row_pages};
            auto space =
                unwrap(unlocked([&] { return AddressSpace::create(driver.driver, config); }));
            live_spaces().add(space);
            new (self) SpaceHandle{std::move(space)};
          },
          "driver"_a, "num_pages"_a, "page_bytes"_a, "num_rows"_a, "pages_per_row"_a,
          "max_mappings"_a = 0, "dummy_row_pages"_a = 1)
      .def("home",
           [](nb::handle self) {
             S& s = nb::cast<S&>(self);
             return view(self, s->home_address(), s->physical_bytes());
           })
      .def("rows",
           [](nb::handle self) {
             S& s = nb::cast<S&>(self);
             return view(self, s->rows_address(), s->rows_bytes() * s->driver().stripes());
           })
      .def_prop_ro("num_pages", [](S& s) { return s->config().num_pages; })
      .def_prop_ro("page_bytes", [](S& s) { return s->config().page_bytes; })
      .def_prop_ro("stripes", [](S& s) { return s->driver().stripes(); })
      .def_prop_ro("num_rows", [](S& s) { return s->config().num_rows; })
      .def_prop_ro("pages_per_row", [](S& s) { return s->config().pages_per_row; })
      .def_prop_ro("guard_page", [](S& s) { return s->guard_page(); })
      .def_prop_ro("physical_bytes", [](S& s) { return s->physical_bytes(); })
      .def_prop_ro("home_address", [](S& s) { return s->home_address(); })
      .def_prop_ro("rows_address", [](S& s) { return s->rows_address(); })
      .def_prop_ro("granularity", [](S& s) { return s->driver().granularity(); })
      .def("acquire_row", [](S& s) { return unwrap(s->acquire_row()); })
      .def(
          "map",
          [](S& s, int row, std::int64_t index, const std::vector<Page>& pages) {
            raise(s->map(row, index, pages));
          },
          "row"_a, "index"_a, "pages"_a)
      .def(
          "truncate", [](S& s, int row, std::int64_t index) { raise(s->truncate(row, index)); },
          "row"_a, "index"_a)
      .def(
          "ready", [](S& s, int row) { return unwrap(s->ready(row)); }, "row"_a)
      .def(
          "wait",
          [](S& s, int row, std::int64_t count, double timeout_s) {
            return unwrap(unlocked([&] { return s->wait(row, count, timeout_s); }));
          },
          "row"_a, "count"_a, "timeout_s"_a)
      .def(
          "prefer", [](S& s, const std::vector<int>& rows) { raise(s->prefer(rows)); }, "rows"_a)
      .def(
          "error", [](S& s, int row) { return unwrap(s->error(row)); }, "row"_a)
      .def(
          "retire_row", [](S& s, int row) { raise(s->retire_row(row)); }, "row"_a)
      .def(
          "clean", [](S& s, int max_rows) { raise(s->clean(max_rows)); }, "max_rows"_a = -1)
      .def(
          "drain",
          [](S& s, double timeout_s) {
            return unwrap(unlocked([&] { return s->drain(timeout_s); }));
          },
          "timeout_s"_a)
      .def(
          "row_pages", [](S& s, int row) { return unwrap(s->row_pages(row)); }, "row"_a)
      .def("stats", [](S& s) { return stats_dict(unwrap(s->stats())); })
      .def("check_integrity",
           [](S& s) { return unwrap(unlocked([&] { return s->check_integrity(); })); })
      .def("close", [](S& s) { raise(unlocked([&] { return s->close(); })); });

  nb::module_::import_("atexit").attr("register")(
      nb::cpp_function([] { unlocked([] { live_spaces().stop_all(); }); }));
}

}  // namespace vattn::bind
