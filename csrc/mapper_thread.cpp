// SPDX-License-Identifier: Apache-2.0
// The mapping thread: what it does next, and how it does it.
#include <algorithm>

#include "mapper.h"

namespace vattn {

void Mapper::start() { thread_ = std::thread(&Mapper::run, this); }

void Mapper::stop() {
  {
    Lock lock(state_mutex_);
    stop_ = true;
    wake();
    done_changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Mapper::run() {
  Lock lock(state_mutex_);
  while (!stop_) {
    const Work work = next_work();
    if (work.kind != Work::Kind::kNone) {
      active_ = work.row;
      lock.unlock();
      perform(work);
      lock.lock();
      continue;
    }
    idle_ = true;
    done_changed_.notify_all();
    const auto called = [&] { return stop_ || woken_; };
    if (!retired_.empty() && rows_run_short())
      work_changed_.wait_until(lock, next_trickle_, called);
    else
      work_changed_.wait(lock, called);
    woken_ = false;
  }
}

std::size_t Mapper::room() const {
  return max_mappings_ - static_cast<std::size_t>(stats_.mappings);
}

// The first row of a queue that can be worked on. Rows that have settled since
// they were queued are dropped when they reach the front. A row stays at the
// front until it has settled: the first to come is the first to be complete.
int Mapper::pick(std::deque<int>& queue, bool Row::* flag) {
  while (!queue.empty() && !rows_[queue.front()].pending) {
    rows_[queue.front()].*flag = false;
    queue.pop_front();
  }
  for (int row : queue)
    if (rows_[row].pending && (room() > 0 || rows_[row].must_unmap())) return row;
  return 0;
}

Mapper::Work Mapper::next_work() {
  if (int row = pick(urgent_, &Row::in_urgent)) return work_on(row);
  const bool starved = clean_.empty() && clean_requested_ > 0;
  const bool over_budget = stats_.queued_jobs > 0 && room() == 0;
  if ((starved || over_budget) && !retired_.empty()) return clean_work();
  if (int row = pick(queue_, &Row::in_queue)) return work_on(row);
  if (!retired_.empty() && clean_is_due()) return clean_work();
  return {};
}

Mapper::Work Mapper::work_on(int row) {
  const Row& r = rows_[row];
  if (r.must_unmap()) return {Work::Kind::kTruncate, row, r.keep, r.mapped.size() - r.keep, {}};
  const std::size_t begin = r.mapped.size();
  const std::size_t count = std::min({kChunkPages, r.wanted.size() - begin, room()});
  const auto first = r.wanted.begin() + static_cast<std::ptrdiff_t>(begin);
  return {Work::Kind::kMap, row, begin, count, {first, first + static_cast<std::ptrdiff_t>(count)}};
}

bool Mapper::rows_run_short() const {
  const auto usable = static_cast<std::size_t>(config_.num_rows - 1);
  const bool few_clean = clean_.size() < (usable + 3) / 4;
  const bool many_mapped = max_mappings_ != kAll && room() < max_mappings_ / 4;
  return few_clean || many_mapped;
}

bool Mapper::clean_is_due() {
  if (clean_requested_ > 0 || !driver_.unmap_stalls_gpu()) return true;
  return rows_run_short() && Clock::now() >= next_trickle_;
}

Mapper::Work Mapper::clean_work() {
  const int row = retired_.front();
  retired_.pop_front();
  if (clean_requested_ > 0) --clean_requested_;
  next_trickle_ = Clock::now() + kTrickle;
  return {Work::Kind::kClean, row, 0, rows_[row].mapped.size(), {}};
}

Address Mapper::address(int row, std::size_t page) const {
  return rows_address_ +
         (static_cast<std::size_t>(row) * config_.pages_per_row + page) * pages_.page_bytes;
}

void Mapper::perform(const Work& work) {
  std::lock_guard driving(driver_mutex_);
  if (work.kind == Work::Kind::kMap)
    perform_map(work);
  else
    perform_unmap(work);
}

void Mapper::perform_map(const Work& work) {
  const Address begin = address(work.row, work.begin);
  const auto began = Clock::now();
  Status status;
  std::size_t done = 0;  // pages mapped, perhaps not accessible yet
  std::int64_t calls = 0;
  while (status.ok() && done < work.count) {
    std::size_t run = 1;
    while (done + run < work.count && work.pages[done + run] == work.pages[done + run - 1] + 1)
      ++run;
    status = driver_.map(pages_, work.pages[done], run, begin + done * pages_.page_bytes);
    ++calls;
    if (status.ok()) done += run;
  }
  const bool all_mapped = status.ok();
  if (all_mapped) status = driver_.set_access(begin, work.count * pages_.page_bytes);
  // All or nothing: a page that is mapped but not accessible must not stay.
  Status undone;
  if (!status.ok() && done > 0) undone = driver_.unmap(begin, done * pages_.page_bytes);
  const std::int64_t ns = std::chrono::nanoseconds(Clock::now() - began).count();

  Lock lock(state_mutex_);
  Row& r = rows_[work.row];
  active_ = 0;
  stats_.map_calls += calls;
  stats_.set_access_calls += all_mapped;
  stats_.map_ns += ns;
  if (!status.ok()) {
    ++stats_.errors;
    if (done > 0) ++stats_.unmap_calls;
    if (undone.ok()) done = 0;
    // Could not even be undone: remember that those pages are there, beyond
    // `keep`, so that the next truncate or clean tries again.
    else {
      ++stats_.errors;
      r.keep = std::min(r.keep, work.begin);
    }
    if (r.state == State::kLive) r.error = status.text();
  }
  r.mapped.insert(r.mapped.end(), work.pages.begin(),
                  work.pages.begin() + static_cast<std::ptrdiff_t>(done));
  stats_.mappings += static_cast<std::int64_t>(done);
  if (status.ok()) stats_.pages_mapped += static_cast<std::int64_t>(done);
  refresh(work.row);
}

void Mapper::perform_unmap(const Work& work) {
  const auto began = Clock::now();
  Status status;
  if (work.count > 0)
    status = driver_.unmap(address(work.row, work.begin), work.count * pages_.page_bytes);
  const std::int64_t ns = std::chrono::nanoseconds(Clock::now() - began).count();

  Lock lock(state_mutex_);
  active_ = 0;
  unmapped(work.row, work.begin, status, work.count > 0 ? ns : 0);
  Row& r = rows_[work.row];
  if (work.kind == Work::Kind::kClean) {
    if (status.ok()) {
      r.state = State::kClean;
      clean_.push_back(work.row);
    } else {
      stuck_.push_back(work.row);
    }
  } else if (!status.ok() && r.state == State::kLive) {
    r.error = status.text();
  }
  refresh(work.row);
}

// Records the outcome of unmapping a row's pages from `from` on.
void Mapper::unmapped(int row, std::size_t from, const Status& status, std::int64_t ns) {
  Row& r = rows_[row];
  const auto count = static_cast<std::int64_t>(r.mapped.size() - from);
  if (count > 0) ++stats_.unmap_calls;
  stats_.unmap_ns += ns;
  if (!status.ok()) {
    ++stats_.errors;
    return;
  }
  stats_.pages_unmapped += count;
  stats_.mappings -= count;
  r.mapped.resize(from);
}

Status Mapper::unmap_everything() {
  std::lock_guard driving(driver_mutex_);
  Lock lock(state_mutex_);  // the thread has stopped: nobody waits for this lock
  Status all;
  for (int row = 1; row < config_.num_rows; ++row) {
    Row& r = rows_[row];
    if (r.mapped.empty()) continue;
    all.merge(driver_.unmap(address(row, 0), r.mapped.size() * pages_.page_bytes));
    stats_.mappings -= static_cast<std::int64_t>(r.mapped.size());
    r.mapped.clear();
    r.keep = 0;
  }
  return all;
}

}  // namespace vattn
