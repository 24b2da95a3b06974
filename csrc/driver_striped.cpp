// SPDX-License-Identifier: Apache-2.0
#include "driver_striped.h"

#include <cstring>

namespace vattn {
namespace {

struct StripedPages final : PhysicalPages {
  using PhysicalPages::PhysicalPages;
  std::vector<std::unique_ptr<PhysicalPages>> stripes;
};

const PhysicalPages& stripe_of(const PhysicalPages& pages, std::size_t stripe) {
  return *static_cast<const StripedPages&>(pages).stripes[stripe];
}

}  // namespace

Address StripedDriver::in_stripe(std::size_t stripe, Address at) const {
  std::lock_guard lock(mutex_);
  const auto after = reservations_.upper_bound(at);
  return after == reservations_.begin() ? at : at + stripe * std::prev(after)->second;
}

Result<Address> StripedDriver::reserve(std::size_t bytes) {
  Result<Address> at = inner_->reserve(bytes * stripes_);
  if (!at.ok()) return at;
  std::lock_guard lock(mutex_);
  reservations_[at.value()] = bytes;
  return at;
}

Status StripedDriver::free(Address at, std::size_t bytes) {
  if (Status s = inner_->free(at, bytes * stripes_); !s.ok()) return s;
  std::lock_guard lock(mutex_);
  reservations_.erase(at);
  return {};
}

Result<std::unique_ptr<PhysicalPages>> StripedDriver::create(std::size_t count,
                                                             std::size_t page_bytes) {
  auto all = std::make_unique<StripedPages>(count, page_bytes);
  for (std::size_t stripe = 0; stripe < stripes_; ++stripe) {
    Result<std::unique_ptr<PhysicalPages>> made = inner_->create(count, page_bytes);
    if (!made.ok()) return made.status();
    all->stripes.push_back(std::move(made.value()));
  }
  return Result<std::unique_ptr<PhysicalPages>>(std::move(all));
}

Status StripedDriver::map(const PhysicalPages& pages, Page first, std::size_t count, Address at) {
  Status status;
  std::size_t stripe = 0;
  for (; stripe < stripes_ && status.ok(); ++stripe)
    status = inner_->map(stripe_of(pages, stripe), first, count, in_stripe(stripe, at));
  if (status.ok()) return {};
  // The last one has undone itself.
  for (std::size_t done = 0; done + 1 < stripe; ++done)
    status.merge(inner_->unmap(in_stripe(done, at), count * pages.page_bytes));
  return status;
}

// After a failure, lower stripes stay open until the caller unmaps the range.
Status StripedDriver::set_access(Address at, std::size_t bytes) {
  for (std::size_t stripe = 0; stripe < stripes_; ++stripe)
    if (Status s = inner_->set_access(in_stripe(stripe, at), bytes); !s.ok()) return s;
  return {};
}

// What is unmapped cannot be mapped again here: a repeated call goes on where it failed.
Status StripedDriver::unmap(Address at, std::size_t bytes) {
  std::size_t stripe = 0;
  {
    std::lock_guard lock(mutex_);
    if (auto left = half_unmapped_.extract(at)) stripe = left.mapped();
  }
  for (; stripe < stripes_; ++stripe) {
    if (Status s = inner_->unmap(in_stripe(stripe, at), bytes); !s.ok()) {
      std::lock_guard lock(mutex_);
      half_unmapped_[at] = stripe;
      return s;
    }
  }
  return {};
}

Status StripedDriver::zero(Address at, std::size_t bytes) {
  for (std::size_t stripe = 0; stripe < stripes_; ++stripe)
    if (Status s = inner_->zero(in_stripe(stripe, at), bytes); !s.ok()) return s;
  return {};
}

Status StripedDriver::write(Address to, const void* from, std::size_t bytes) {
  for (std::size_t stripe = 0; stripe < stripes_; ++stripe)
    if (Status s = inner_->write(in_stripe(stripe, to), from, bytes); !s.ok()) return s;
  return {};
}

Status StripedDriver::read(void* to, Address from, std::size_t bytes) {
  if (Status s = inner_->read(to, from, bytes); !s.ok()) return s;
  std::vector<unsigned char> other(bytes);
  for (std::size_t stripe = 1; stripe < stripes_; ++stripe) {
    if (Status s = inner_->read(other.data(), in_stripe(stripe, from), bytes); !s.ok()) return s;
    if (std::memcmp(to, other.data(), bytes) != 0)
      return Status::driver("stripe " + std::to_string(stripe) +
                            " of a page does not hold what was written");
  }
  return {};
}

Result<std::vector<Mapping>> StripedDriver::inspect(const PhysicalPages& pages,
                                                    std::span<const Address> at) {
  std::vector<Mapping> all;
  for (std::size_t stripe = 0; stripe < stripes_; ++stripe) {
    std::vector<Address> shifted;
    for (Address address : at) shifted.push_back(in_stripe(stripe, address));
    Result<std::vector<Mapping>> found = inner_->inspect(stripe_of(pages, stripe), shifted);
    if (!found.ok() || stripe == 0) {
      if (!found.ok()) return found;
      all = std::move(found.value());
      continue;
    }
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Mapping& other = found.value()[i];
      if (other.page != all[i].page) all[i].page = Mapping::kForeign;  // torn between stripes
      all[i].accessible &= other.accessible;
    }
  }
  return all;
}

}  // namespace vattn
