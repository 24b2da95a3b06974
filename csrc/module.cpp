// SPDX-License-Identifier: Apache-2.0
// sglang_vattn._core: bindings only. The contracts stand in the headers and,
// for Python, in sglang_vattn/_core.pyi.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bind.h"
#include "pages.h"
#include "tokens.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace vattn::bind {
namespace {

// Any contiguous buffer of int64: array('q'), numpy, memoryview.
class TokenBuffer {
 public:
  TokenBuffer(nb::handle object, const char* name) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
      PyErr_Clear();
      throw nb::type_error((std::string(name) + " is not a contiguous buffer of int64").c_str());
    }
    const char* format = view_.format ? view_.format : "B";
    if (*format == '@' || *format == '=' || *format == '<') ++format;
    const bool integer = (*format == 'q' || *format == 'l') && format[1] == '\0';
    if (view_.itemsize != 8 || !integer) {
      const std::string text = std::string(name) + " holds items of format '" + view_.format +
                               "', size " + std::to_string(view_.itemsize) + ": int64 is needed";
      PyBuffer_Release(&view_);
      throw nb::type_error(text.c_str());
    }
  }
  ~TokenBuffer() { PyBuffer_Release(&view_); }
  TokenBuffer(const TokenBuffer&) = delete;
  TokenBuffer& operator=(const TokenBuffer&) = delete;

  std::size_t size() const { return static_cast<std::size_t>(view_.len) / sizeof(std::int64_t); }
  const std::int64_t* data() const { return static_cast<const std::int64_t*>(view_.buf); }

 private:
  Py_buffer view_ = {};
};

std::size_t py_common_prefix(nb::handle a, nb::handle b, std::int64_t a_start,
                             std::int64_t b_start) {
  if (a_start < 0 || b_start < 0) throw nb::value_error("a_start and b_start must not be negative");
  const TokenBuffer ta(a, "a"), tb(b, "b");
  const std::size_t from_a = std::min<std::size_t>(ta.size(), static_cast<std::size_t>(a_start));
  const std::size_t from_b = std::min<std::size_t>(tb.size(), static_cast<std::size_t>(b_start));
  return common_prefix(ta.data() + from_a, ta.size() - from_a, tb.data() + from_b,
                       tb.size() - from_b);
}

using PageList = std::vector<Page>;

const char* state_name(Pages::State state) {
  constexpr const char* kNames[] = {"free", "private", "evictable", "protected"};
  return kNames[static_cast<int>(state)];
}

}  // namespace

void bind_pages(nb::module_& m) {
  const auto counter = [](Pages::State state) {
    return [state](const Pages& p) { return p.count(state); };
  };
  nb::class_<Pages>(m, "Pages")
      .def(
          "__init__",
          [](Pages* self, std::int32_t num_pages) {
            if (num_pages < 0) throw nb::value_error("num_pages must not be negative");
            new (self) Pages(num_pages);
          },
          "num_pages"_a)
      .def_prop_ro("num_pages", &Pages::num_pages)
      .def_prop_ro("free", counter(Pages::State::kFree))
      .def_prop_ro("private", counter(Pages::State::kPrivate))
      .def_prop_ro("evictable", counter(Pages::State::kEvictable))
      .def_prop_ro("protected", counter(Pages::State::kProtected))
      .def(
          "take",
          [](Pages& p, std::int64_t n) {
            if (n < 0) throw nb::value_error("n must not be negative");
            return p.take(n);
          },
          "n"_a)
      .def(
          "release", [](Pages& p, const PageList& pages) { raise(p.release(pages)); }, "pages"_a)
      .def(
          "ref", [](Pages& p, const PageList& pages, bool locked) { raise(p.ref(pages, locked)); },
          "pages"_a, "locked"_a)
      .def(
          "unref",
          [](Pages& p, const PageList& pages, bool locked) { raise(p.unref(pages, locked)); },
          "pages"_a, "locked"_a)
      .def(
          "lock", [](Pages& p, const PageList& pages) { raise(p.lock(pages)); }, "pages"_a)
      .def(
          "unlock", [](Pages& p, const PageList& pages) { raise(p.unlock(pages)); }, "pages"_a)
      .def("reserve", &Pages::reserve, "row"_a)
      .def("is_reserved", &Pages::is_reserved, "page"_a, "row"_a)
      .def_prop_ro("reserved", &Pages::reserved)
      .def_prop_ro("reservations_lost", &Pages::reservations_lost)
      .def("take_reserved", &Pages::take_reserved, "page"_a, "row"_a)
      .def("unreserve", &Pages::unreserve, "page"_a, "row"_a)
      .def(
          "state", [](const Pages& p, Page page) { return state_name(unwrap(p.state(page))); },
          "page"_a)
      .def("states",
           [](const Pages& p) {
             const std::vector<std::uint8_t> states = p.states();
             return nb::bytes(states.data(), states.size());
           })
      .def(
          "refs",
          [](const Pages& p, Page page) {
            const Pages::Refs refs = unwrap(p.refs(page));
            return std::tuple(refs.owned, refs.tree, refs.locked);
          },
          "page"_a)
      .def("free_list", &Pages::free_list)
      .def("reset", &Pages::reset)
      .def("check_integrity", &Pages::check_integrity);
}

}  // namespace vattn::bind

NB_MODULE(_core, m) {
  // A server exits with its tensors alive; that is not a leak worth a page of text.
  nb::set_leak_warnings(false);
  m.doc() = "Pages, addresses and mappings of sglang-vattn.";
  nb::exception<vattn::bind::DriverFailure>(m, "DriverError", PyExc_RuntimeError);
  m.def("common_prefix", &vattn::bind::py_common_prefix, "a"_a, "b"_a, "a_start"_a = 0,
        "b_start"_a = 0);
  vattn::bind::bind_pages(m);
  vattn::bind::bind_space(m);
}
