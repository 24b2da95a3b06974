// SPDX-License-Identifier: Apache-2.0
// Who holds each physical page. Plain CPU state: no driver, no addresses.
//
// A page has one owner at most (a request, through its own page list) and any
// number of references from nodes of the prefix tree, some of them locked:
//
//   owned            -> PRIVATE     whether or not the tree refers to it too
//   else no refs     -> FREE
//   else any locked  -> PROTECTED
//   else             -> EVICTABLE
//
// The four counters always sum to num_pages(). Page 0 (padding) is not handed out.
//
// A free page may be softly reserved for a row (mapped ahead at its end): it
// stays FREE and is the last that others are given.
//
// Batch calls check everything first: they change all of their pages or none.
// O(1) a page. One thread changes the state; the counters may be read by any.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "driver.h"

namespace vattn {

class Pages {
 public:
  enum class State : std::uint8_t { kFree, kPrivate, kEvictable, kProtected };
  static constexpr int kStates = 4;

  struct Refs {
    bool owned;
    std::int32_t tree;    // references by tree nodes
    std::int32_t locked;  // those of them whose node is locked
  };

  explicit Pages(std::int32_t num_pages);  // usable pages 1..num_pages; num_pages >= 0

  std::int32_t num_pages() const { return num_pages_; }
  std::int64_t count(State state) const {
    return counts_[index(state)].load(std::memory_order_relaxed);
  }

  // FREE -> PRIVATE. None, and no change, if fewer than n are free.
  std::optional<std::vector<Page>> take(std::int64_t n);
  Status release(std::span<const Page> pages);
  Status ref(std::span<const Page> pages, bool locked);
  Status unref(std::span<const Page> pages, bool locked);
  Status lock(std::span<const Page> pages);
  Status unlock(std::span<const Page> pages);

  Page reserve(std::int32_t row);  // 0: no plain free page
  bool is_reserved(Page page, std::int32_t row) const;
  bool take_reserved(Page page, std::int32_t row);  // false: it is someone else's by now
  void unreserve(Page page, std::int32_t row);

  std::int64_t reserved() const { return reserved_count_; }  // of the free pages
  // How often a reserved page went to someone else; when it changed, ask is_reserved().
  std::int64_t reservations_lost() const { return reservations_lost_; }

  Result<State> state(Page page) const;
  std::vector<std::uint8_t> states() const;  // State by page, [0] (padding) included
  Result<Refs> refs(Page page) const;
  std::vector<Page> free_list() const;  // in the order take() hands them out
  void reset();
  std::vector<std::string> check_integrity() const;  // empty: sound

 private:
  static constexpr std::int32_t kNoRow = -1;

  struct Entry {
    bool owned = false;
    State state = State::kFree;
    std::int32_t tree = 0;
    std::int32_t locked = 0;
    std::int32_t reserved_row = kNoRow;  // only while FREE
    Page previous = 0;                   // in the free list it is in; 0: none
    Page next = 0;
  };

  struct List {
    Page first = 0;
    Page last = 0;
  };

  // A change to one page's counts; false if it would be illegal. Its inverse
  // undoes it when a later page of the same batch is refused.
  struct Change {
    std::int32_t owned, tree, locked;
    const char* what;
  };

  static int index(State state) { return static_cast<int>(state); }
  static State state_of(const Entry& entry);
  static bool apply(Entry& entry, const Change& change);
  bool valid(Page page) const { return page >= 1 && page <= num_pages_; }
  Status out_of_range(Page page) const;
  Status change_all(std::span<const Page> pages, const Change& change);
  void settle(Page page);  // after its counts changed: state, counters, lists
  List& list_of(const Entry& entry) { return entry.reserved_row == kNoRow ? plain_ : reserved_; }
  void push_front(List& list, Page page);
  void push_back(List& list, Page page);
  void remove(List& list, Page page);
  void check_list(const List& list, bool reserved, std::vector<bool>& seen,
                  std::vector<std::string>& found) const;

  const std::int32_t num_pages_;
  std::vector<Entry> entries_;  // by page; [0] unused
  List plain_;                  // free pages, the last freed first
  List reserved_;               // softly reserved free pages, the oldest first
  std::int64_t reserved_count_ = 0;
  std::int64_t reservations_lost_ = 0;
  std::array<std::atomic<std::int64_t>, kStates> counts_ = {};
};

}  // namespace vattn
