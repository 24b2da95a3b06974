// SPDX-License-Identifier: Apache-2.0
// What the binding files share. A Status becomes an exception here and nowhere else.
#pragma once

#include <nanobind/nanobind.h>

#include <stdexcept>
#include <utility>

#include "status.h"

namespace vattn::bind {

// DriverError in Python.
class DriverFailure : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void raise(const Status& status) {
  if (status.kind() == Status::Kind::kInvalid) throw nanobind::value_error(status.text().c_str());
  if (status.kind() == Status::Kind::kDriver) throw DriverFailure(status.text());
}

template <class T>
T unwrap(Result<T> result) {
  raise(result.status());
  return std::move(result.value());
}

void bind_pages(nanobind::module_& m);
void bind_space(nanobind::module_& m);  // the drivers too

}  // namespace vattn::bind
