// SPDX-License-Identifier: Apache-2.0
#include "driver_faulty.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>

namespace vattn {
namespace {

constexpr std::array<const char*, 10> kCalls = {"reserve", "free", "create", "map",  "set_access",
                                                "unmap",   "zero", "write",  "read", "inspect"};

Status check_call(const std::string& call) {
  if (call.empty() || std::find(kCalls.begin(), kCalls.end(), call) != kCalls.end()) return {};
  return Status::invalid("a driver has no call named \"" + call + "\"");
}

}  // namespace

Status FaultyDriver::fail_at(const std::string& call, std::int64_t k) {
  if (Status status = check_call(call); !status.ok()) return status;
  if (k < 0) return Status::invalid("k must not be negative");
  std::lock_guard lock(mutex_);
  if (k == 0)
    countdown_.erase(call);  // no fault after all
  else
    countdown_[call] = k;
  return {};
}

bool FaultyDriver::armed() const {
  std::lock_guard lock(mutex_);
  return !countdown_.empty();
}

Status FaultyDriver::set_delay(const std::string& call, double seconds) {
  if (Status status = check_call(call); !status.ok()) return status;
  std::lock_guard lock(mutex_);
  delay_[call] = seconds;
  return {};
}

std::map<std::string, std::int64_t> FaultyDriver::calls() const {
  std::lock_guard lock(mutex_);
  return calls_;
}

Status FaultyDriver::enter(const char* call) {
  double seconds = 0;
  bool fails = false;
  {
    std::lock_guard lock(mutex_);
    ++calls_[call];
    for (const std::string& key : {std::string(call), std::string()}) {
      if (auto found = delay_.find(key); found != delay_.end()) seconds += found->second;
      auto left = countdown_.find(key);
      if (left != countdown_.end() && --left->second == 0) {
        countdown_.erase(left);
        fails = true;
      }
    }
  }
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  return fails ? Status::driver(std::string(call) + ": injected fault") : Status();
}

Result<Address> FaultyDriver::reserve(std::size_t bytes) {
  if (Status s = enter("reserve"); !s.ok()) return s;
  return inner_->reserve(bytes);
}

Status FaultyDriver::free(Address at, std::size_t bytes) {
  if (Status s = enter("free"); !s.ok()) return s;
  return inner_->free(at, bytes);
}

Result<std::unique_ptr<PhysicalPages>> FaultyDriver::create(std::size_t count,
                                                            std::size_t page_bytes) {
  if (Status s = enter("create"); !s.ok()) return s;
  return inner_->create(count, page_bytes);
}

Status FaultyDriver::map(const PhysicalPages& pages, Page first, std::size_t count, Address at) {
  if (Status s = enter("map"); !s.ok()) return s;
  return inner_->map(pages, first, count, at);
}

Status FaultyDriver::set_access(Address at, std::size_t bytes) {
  if (Status s = enter("set_access"); !s.ok()) return s;
  return inner_->set_access(at, bytes);
}

Status FaultyDriver::unmap(Address at, std::size_t bytes) {
  if (Status s = enter("unmap"); !s.ok()) return s;
  return inner_->unmap(at, bytes);
}

Status FaultyDriver::zero(Address at, std::size_t bytes) {
  if (Status s = enter("zero"); !s.ok()) return s;
  return inner_->zero(at, bytes);
}

Status FaultyDriver::write(Address to, const void* from, std::size_t bytes) {
  if (Status s = enter("write"); !s.ok()) return s;
  return inner_->write(to, from, bytes);
}

Status FaultyDriver::read(void* to, Address from, std::size_t bytes) {
  if (Status s = enter("read"); !s.ok()) return s;
  return inner_->read(to, from, bytes);
}

Result<std::vector<Mapping>> FaultyDriver::inspect(const PhysicalPages& pages,
                                                   std::span<const Address> at) {
  if (Status s = enter("inspect"); !s.ok()) return s;
  return inner_->inspect(pages, at);
}

}  // namespace vattn
