// SPDX-License-Identifier: Apache-2.0
// A driver on top of another: what it does not change is the inner driver's.
#pragma once

#include <memory>
#include <utility>

#include "driver.h"

namespace vattn {

class WrappedDriver : public Driver {
 public:
  explicit WrappedDriver(std::shared_ptr<Driver> inner) : inner_(std::move(inner)) {}

  const char* name() const override { return inner_->name(); }
  std::size_t granularity() const override { return inner_->granularity(); }
  std::size_t stripes() const override { return inner_->stripes(); }
  int device() const override { return inner_->device(); }
  std::size_t mapping_budget() const override { return inner_->mapping_budget(); }
  bool unmap_stalls_gpu() const override { return inner_->unmap_stalls_gpu(); }
  bool creates_zeroed() const override { return inner_->creates_zeroed(); }

 protected:
  const std::shared_ptr<Driver> inner_;
};

}  // namespace vattn
