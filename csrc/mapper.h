// SPDX-License-Identifier: Apache-2.0
// The rows, and the background thread that makes them so.
//
// Callers say what a row shall hold (its *wanted* pages); the thread makes what
// is *mapped* equal to that, a chunk at a time, and publishes how far it is.
// There is no list of jobs: a row with something to do waits in a queue, once.
// So the queue is bounded by the number of rows, jobs of a row keep their
// order, and a row that is retired takes its unfinished work with it.
//
// What is mapped in a row is always a prefix of the row:
//
//     wanted   [ a  b  c  d  e ]
//     mapped   [ a  b  x ]           x left over from before a truncate(2)
//     keep           2               the first mapped pages that are still right
//     ready          2               = min(mapped, keep), read without a lock
//
// A life of a row:  clean -> acquire -> live -> retire -> retired -> (one unmap) -> clean
//
// Locks. state_mutex_ guards everything that callers see and is never held
// during a driver call, so no caller waits for the driver. driver_mutex_ is held
// by the thread from before a driver call until its outcome is published; who
// holds it sees rows and driver agree. Order: driver_mutex_, then state_mutex_.
// The thread knows nothing of Python, hence never takes the GIL.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "driver.h"

namespace vattn {

struct MapperConfig {
  int num_rows;  // row 0 is the dummy row and not ours
  std::size_t pages_per_row;
  std::size_t max_mappings;  // 0: no limit
};

struct MappedRow {
  std::vector<Page> pages;  // all that is mapped, from the row's start
  std::size_t right = 0;    // of these, the first that are wanted there: accessible
};

struct MapperStats {
  std::int64_t map_calls = 0;  // driver calls; one maps a run of consecutive pages
  std::int64_t pages_mapped = 0;
  std::int64_t unmap_calls = 0;
  std::int64_t pages_unmapped = 0;
  std::int64_t map_ns = 0;  // in map and set_access
  std::int64_t unmap_ns = 0;
  std::int64_t set_access_calls = 0;
  std::int64_t mappings = 0;  // pages mapped in rows now
  std::int64_t max_mappings = 0;
  std::int64_t queued_jobs = 0;  // rows with something to do
  std::int64_t waits = 0;        // wait() calls that had to wait
  std::int64_t wait_ns = 0;
  std::int64_t errors = 0;  // failed driver calls
  std::int64_t rows_clean = 0;
  std::int64_t rows_live = 0;
  std::int64_t rows_retired = 0;
};

class Mapper {
 public:
  // All three outlive the mapper. `rows` is the address of row 0.
  Mapper(Driver& driver, const PhysicalPages& pages, Address rows, const MapperConfig& config);
  ~Mapper();  // stops

  void start();
  void stop();  // idempotent; wakes all who wait; nothing is unmapped

  // The contracts of these stand in space.h, whose interface they are.
  int acquire_row();
  Status map(int row, std::size_t index, std::span<const Page> pages);
  Status truncate(int row, std::size_t index);
  std::size_t ready(int row) const { return rows_[row].ready.load(std::memory_order_acquire); }
  bool wait(int row, std::size_t count, double timeout_s);
  void prefer(std::span<const int> rows);
  std::string error(int row) const;
  Status retire(int row);
  void clean(int max_rows);
  bool drain(double timeout_s);
  std::vector<Page> wanted(int row) const;
  MapperStats stats() const;

  // While held, the thread makes no driver call and mapped() is what the driver has.
  std::unique_lock<std::mutex> pause() { return std::unique_lock(driver_mutex_); }
  std::vector<MappedRow> mapped() const;             // by row; under pause()
  std::vector<std::string> check_integrity() const;  // of the records alone
  Status unmap_everything();                         // after stop()

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;
  enum class State : std::uint8_t { kClean, kLive, kRetired };

  static constexpr std::size_t kAll = static_cast<std::size_t>(-1);
  static constexpr std::size_t kChunkPages = 32;  // then urgent rows may cut in
  static constexpr int kStarvedRows = 8;          // cleaned at once when no row is clean
  // Between unmaps that nobody asked for, where they stall the GPU (0.2 ms
  // each, docs: "GPU slowdown from an unmap call"): at most 4 % of its time.
  static constexpr std::chrono::milliseconds kTrickle{5};

  struct Row {
    State state = State::kClean;
    std::vector<Page> wanted;
    std::vector<Page> mapped;
    std::size_t keep = kAll;
    std::atomic<std::size_t> ready = 0;
    std::string error;     // not empty: its maps have stopped
    int waiters = 0;       // threads in wait()
    bool pending = false;  // wanted and mapped differ, and no error
    bool in_queue = false;
    bool in_urgent = false;

    bool must_unmap() const { return mapped.size() > keep; }
  };

  struct Work {
    enum class Kind { kNone, kMap, kTruncate, kClean } kind = Kind::kNone;
    int row = 0;
    std::size_t begin = 0;    // first page of the row that changes
    std::size_t count = 0;    // pages
    std::vector<Page> pages;  // for kMap
  };

  // All with state_mutex_ held.
  Status check_live(int row) const;
  void refresh(int row);  // after any change to a row
  void enqueue(int row, bool urgent);
  void request_clean(std::size_t rows);
  void wake();
  std::size_t room() const;  // mappings left in the budget
  int pick(std::deque<int>& queue, bool Row::* flag);
  Work next_work();
  Work work_on(int row);
  Work clean_work();
  bool clean_is_due();
  bool rows_run_short() const;
  void unmapped(int row, std::size_t from, const Status& status, std::int64_t ns);

  // The thread; called without state_mutex_.
  void run();
  void perform(const Work& work);
  void perform_map(const Work& work);
  void perform_unmap(const Work& work);
  Address address(int row, std::size_t page) const;

  Driver& driver_;
  const PhysicalPages& pages_;
  const Address rows_address_;
  const MapperConfig config_;
  const std::size_t max_mappings_;  // kAll: no limit

  std::mutex driver_mutex_;
  mutable std::mutex state_mutex_;
  std::condition_variable work_changed_;  // the thread waits on it
  std::condition_variable done_changed_;  // wait() and drain() wait on it
  std::unique_ptr<Row[]> rows_;
  std::deque<int> urgent_;           // rows that someone waits for or prefers
  std::deque<int> queue_;            // rows with something to do; may hold settled ones
  std::deque<int> clean_;            // the longest clean first
  std::deque<int> retired_;          // the longest retired first
  std::vector<int> stuck_;           // retired, their unmap failed; tried again by clean()
  std::size_t clean_requested_ = 0;  // rows of retired_ to clean even if nothing is short
  Clock::time_point next_trickle_ = {};
  int active_ = 0;  // the row in the thread's hands; 0: none
  bool woken_ = false;
  bool idle_ = false;  // the thread found nothing it can do
  bool stop_ = false;
  MapperStats stats_;  // the counters; the gauges are filled in by stats()
  std::thread thread_;
};

}  // namespace vattn
