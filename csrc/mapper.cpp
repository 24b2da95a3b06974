// SPDX-License-Identifier: Apache-2.0
// What callers do to rows. None of it makes a driver call.
#include "mapper.h"

#include <algorithm>

namespace vattn {

Mapper::Mapper(Driver& driver, const PhysicalPages& pages, Address rows, const MapperConfig& config)
    : driver_(driver),
      pages_(pages),
      rows_address_(rows),
      config_(config),
      max_mappings_(config.max_mappings == 0 ? kAll : config.max_mappings),
      rows_(std::make_unique<Row[]>(static_cast<std::size_t>(config.num_rows))) {
  for (int row = 1; row < config.num_rows; ++row) clean_.push_back(row);
}

Mapper::~Mapper() { stop(); }

Status Mapper::check_live(int row) const {
  if (rows_[row].state == State::kLive) return {};
  return Status::invalid("row " + std::to_string(row) + " is not live: acquire_row() first");
}

void Mapper::wake() {
  woken_ = true;
  idle_ = false;
  work_changed_.notify_one();
}

void Mapper::enqueue(int row, bool urgent) {
  Row& r = rows_[row];
  bool& listed = urgent ? r.in_urgent : r.in_queue;
  if (!listed) (urgent ? urgent_ : queue_).push_back(row);
  listed = true;
}

void Mapper::refresh(int row) {
  Row& r = rows_[row];
  // keep means something only while the thread has, or is about to publish,
  // pages beyond it.
  if (active_ != row && !r.must_unmap()) r.keep = kAll;
  const bool live = r.state == State::kLive;
  const std::size_t ready = live ? std::min(r.mapped.size(), r.keep) : 0;
  r.ready.store(ready, std::memory_order_release);

  const bool pending =
      live && r.error.empty() && (r.must_unmap() || r.mapped.size() < r.wanted.size());
  stats_.queued_jobs += static_cast<int>(pending) - static_cast<int>(r.pending);
  r.pending = pending;
  if (pending) {
    enqueue(row, r.waiters > 0);
    wake();
  }
  if (r.waiters > 0) done_changed_.notify_all();
}

int Mapper::acquire_row() {
  Lock lock(state_mutex_);
  if (clean_.empty()) {
    request_clean(kStarvedRows);
    return 0;
  }
  const int row = clean_.front();
  clean_.pop_front();
  rows_[row].state = State::kLive;
  if (rows_run_short() && !retired_.empty()) wake();
  return row;
}

Status Mapper::map(int row, std::size_t index, std::span<const Page> pages) {
  Lock lock(state_mutex_);
  if (Status status = check_live(row); !status.ok()) return status;
  Row& r = rows_[row];
  if (index != r.wanted.size())
    return Status::invalid("map at page " + std::to_string(index) + " of row " +
                           std::to_string(row) + ", which holds " +
                           std::to_string(r.wanted.size()) +
                           " pages: rows grow at their end (truncate first to replace)");
  if (pages.size() > config_.pages_per_row - index)
    return Status::invalid("row " + std::to_string(row) + " would hold " +
                           std::to_string(index + pages.size()) + " pages of " +
                           std::to_string(config_.pages_per_row));
  for (Page page : pages)
    if (page < 0 || static_cast<std::size_t>(page) >= pages_.count)
      return Status::invalid("page " + std::to_string(page) + " is not in 0.." +
                             std::to_string(pages_.count - 1));
  r.wanted.insert(r.wanted.end(), pages.begin(), pages.end());
  refresh(row);
  return {};
}

Status Mapper::truncate(int row, std::size_t index) {
  Lock lock(state_mutex_);
  if (Status status = check_live(row); !status.ok()) return status;
  Row& r = rows_[row];
  if (index > r.wanted.size())
    return Status::invalid("truncate at page " + std::to_string(index) + " of row " +
                           std::to_string(row) + ", which holds " +
                           std::to_string(r.wanted.size()) + " pages");
  r.wanted.resize(index);
  r.keep = std::min(r.keep, index);
  r.error.clear();  // what could not be mapped is no longer wanted: try anew
  refresh(row);
  return {};
}

bool Mapper::wait(int row, std::size_t count, double timeout_s) {
  if (ready(row) >= count) return true;
  const auto begin = Clock::now();
  const auto timeout = std::chrono::duration<double>(std::clamp(timeout_s, 0.0, 1e6));
  Lock lock(state_mutex_);
  Row& r = rows_[row];
  ++r.waiters;
  if (r.pending) enqueue(row, true);
  const auto over = [&] {
    return stop_ || r.state != State::kLive || !r.error.empty() || ready(row) >= count;
  };
  done_changed_.wait_for(lock, timeout, over);
  --r.waiters;
  ++stats_.waits;
  stats_.wait_ns += std::chrono::nanoseconds(Clock::now() - begin).count();
  return ready(row) >= count;
}

void Mapper::prefer(std::span<const int> rows) {
  Lock lock(state_mutex_);
  for (int row : rows)
    if (rows_[row].pending) enqueue(row, true);
}

std::string Mapper::error(int row) const {
  Lock lock(state_mutex_);
  return rows_[row].error;
}

Status Mapper::retire(int row) {
  Lock lock(state_mutex_);
  if (Status status = check_live(row); !status.ok()) return status;
  Row& r = rows_[row];
  r.wanted.clear();
  r.keep = 0;
  r.error.clear();
  const bool untouched = r.mapped.empty() && active_ != row;
  r.state = untouched ? State::kClean : State::kRetired;
  (untouched ? clean_ : retired_).push_back(row);
  refresh(row);
  wake();  // it may be due for cleaning, and a drain() may be over
  return {};
}

void Mapper::request_clean(std::size_t rows) {
  for (int row : stuck_) retired_.push_back(row);
  stuck_.clear();
  clean_requested_ = std::min(retired_.size(), std::max(clean_requested_, rows));
  if (clean_requested_ > 0) wake();
}

void Mapper::clean(int max_rows) {
  Lock lock(state_mutex_);
  if (max_rows == 0)
    clean_requested_ = 0;
  else
    request_clean(max_rows < 0 ? kAll : static_cast<std::size_t>(max_rows));
}

bool Mapper::drain(double timeout_s) {
  const auto timeout = std::chrono::duration<double>(std::clamp(timeout_s, 0.0, 1e6));
  Lock lock(state_mutex_);
  return done_changed_.wait_for(lock, timeout, [&] {
    return stop_ || (idle_ && stats_.queued_jobs == 0);
  }) && stats_.queued_jobs == 0;
}

std::vector<Page> Mapper::wanted(int row) const {
  Lock lock(state_mutex_);
  return rows_[row].wanted;
}

MapperStats Mapper::stats() const {
  Lock lock(state_mutex_);
  MapperStats stats = stats_;
  stats.max_mappings = static_cast<std::int64_t>(config_.max_mappings);
  stats.rows_clean = static_cast<std::int64_t>(clean_.size());
  stats.rows_retired = static_cast<std::int64_t>(retired_.size() + stuck_.size());
  if (active_ != 0 && rows_[active_].state == State::kRetired) {
    // being cleaned: in no list for the moment
    const bool listed = std::find(retired_.begin(), retired_.end(), active_) != retired_.end();
    stats.rows_retired += listed ? 0 : 1;
  }
  stats.rows_live = config_.num_rows - 1 - stats.rows_clean - stats.rows_retired;
  return stats;
}

std::vector<MappedRow> Mapper::mapped() const {
  Lock lock(state_mutex_);
  std::vector<MappedRow> all;
  for (int row = 0; row < config_.num_rows; ++row) {
    const Row& r = rows_[row];
    all.push_back({r.mapped, std::min(r.mapped.size(), r.keep)});
  }
  return all;
}

std::vector<std::string> Mapper::check_integrity() const {
  Lock lock(state_mutex_);
  std::vector<std::string> found;
  std::int64_t mappings = 0, pending = 0;
  for (int row = 1; row < config_.num_rows; ++row) {
    const Row& r = rows_[row];
    const std::string name = "row " + std::to_string(row);
    mappings += static_cast<std::int64_t>(r.mapped.size());
    pending += r.pending;
    const std::size_t right = std::min(r.mapped.size(), r.keep);
    if (r.ready.load() != (r.state == State::kLive ? right : 0))
      found.push_back(name + ": wrong ready count");
    if (right > r.wanted.size() ||
        !std::equal(r.mapped.begin(), r.mapped.begin() + static_cast<std::ptrdiff_t>(right),
                    r.wanted.begin()))
      found.push_back(name + ": what is ready is not what is wanted");
    if (r.pending && !r.in_queue && !r.in_urgent)
      found.push_back(name + ": has work but is in no queue");
    if (r.state == State::kClean && !r.mapped.empty()) found.push_back(name + ": clean but mapped");
  }
  if (mappings != stats_.mappings)
    found.push_back("counter mappings is " + std::to_string(stats_.mappings) + ", counted " +
                    std::to_string(mappings));
  if (pending != stats_.queued_jobs)
    found.push_back("counter queued_jobs is " + std::to_string(stats_.queued_jobs) + ", counted " +
                    std::to_string(pending));
  if (stats_.mappings < 0 || static_cast<std::size_t>(stats_.mappings) > max_mappings_)
    found.push_back("more mappings than max_mappings");
  return found;
}

}  // namespace vattn
