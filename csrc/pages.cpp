// SPDX-License-Identifier: Apache-2.0
#include "pages.h"

namespace vattn {

Pages::Pages(std::int32_t num_pages)
    : num_pages_(num_pages), entries_(static_cast<std::size_t>(num_pages) + 1) {
  reset();
}

void Pages::reset() {
  plain_ = {};
  reserved_ = {};
  reserved_count_ = 0;
  for (Page page = 1; page <= num_pages_; ++page) {
    entries_[page] = {};
    push_back(plain_, page);
  }
  for (auto& count : counts_) count.store(0, std::memory_order_relaxed);
  counts_[index(State::kFree)].store(num_pages_, std::memory_order_relaxed);
}

Status Pages::out_of_range(Page page) const {
  return Status::invalid("page " + std::to_string(page) + " is not in 1.." +
                         std::to_string(num_pages_));
}

Pages::State Pages::state_of(const Entry& entry) {
  if (entry.owned) return State::kPrivate;
  if (entry.tree == 0) return State::kFree;
  return entry.locked > 0 ? State::kProtected : State::kEvictable;
}

bool Pages::apply(Entry& entry, const Change& change) {
  const std::int32_t owned = entry.owned + change.owned;
  const std::int32_t tree = entry.tree + change.tree;
  const std::int32_t locked = entry.locked + change.locked;
  if (owned < 0 || owned > 1 || locked < 0 || locked > tree) return false;
  entry.owned = owned == 1;
  entry.tree = tree;
  entry.locked = locked;
  return true;
}

Status Pages::change_all(std::span<const Page> pages, const Change& change) {
  const Change inverse = {-change.owned, -change.tree, -change.locked, ""};
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const bool known = valid(pages[i]);
    if (known && apply(entries_[pages[i]], change)) continue;
    const Page bad = pages[i];
    while (i-- > 0) apply(entries_[pages[i]], inverse);
    if (!known) return out_of_range(bad);
    const Entry& entry = entries_[bad];
    return Status::invalid(std::string("cannot ") + change.what + " page " + std::to_string(bad) +
                           ": it has owner " + (entry.owned ? "1" : "0") + ", tree references " +
                           std::to_string(entry.tree) + ", of them locked " +
                           std::to_string(entry.locked));
  }
  for (Page page : pages) settle(page);
  return {};
}

void Pages::settle(Page page) {
  Entry& entry = entries_[page];
  const State now = state_of(entry);
  if (now == entry.state) return;
  if (entry.state == State::kFree) {
    remove(list_of(entry), page);
    if (entry.reserved_row != kNoRow) {
      --reserved_count_;
      ++reservations_lost_;  // take_reserved() takes it back
    }
    entry.reserved_row = kNoRow;
  }
  counts_[index(entry.state)].fetch_sub(1, std::memory_order_relaxed);
  counts_[index(now)].fetch_add(1, std::memory_order_relaxed);
  entry.state = now;
  if (now == State::kFree) push_front(plain_, page);
}

std::optional<std::vector<Page>> Pages::take(std::int64_t n) {
  if (n < 0 || n > count(State::kFree)) return std::nullopt;
  std::vector<Page> taken;
  taken.reserve(static_cast<std::size_t>(n));
  while (n-- > 0) {
    const Page page = plain_.first != 0 ? plain_.first : reserved_.first;
    entries_[page].owned = true;
    settle(page);
    taken.push_back(page);
  }
  return taken;
}

Status Pages::release(std::span<const Page> pages) {
  return change_all(pages, {-1, 0, 0, "release"});
}
Status Pages::ref(std::span<const Page> pages, bool locked) {
  return change_all(pages, {0, 1, locked ? 1 : 0, "ref"});
}
Status Pages::unref(std::span<const Page> pages, bool locked) {
  return change_all(pages, {0, -1, locked ? -1 : 0, "unref"});
}
Status Pages::lock(std::span<const Page> pages) { return change_all(pages, {0, 0, 1, "lock"}); }
Status Pages::unlock(std::span<const Page> pages) {
  return change_all(pages, {0, 0, -1, "unlock"});
}

Page Pages::reserve(std::int32_t row) {
  const Page page = plain_.first;
  if (page == 0 || row < 0) return 0;
  remove(plain_, page);
  entries_[page].reserved_row = row;
  push_back(reserved_, page);
  ++reserved_count_;
  return page;
}

bool Pages::is_reserved(Page page, std::int32_t row) const {
  return valid(page) && row >= 0 && entries_[page].reserved_row == row;
}

bool Pages::take_reserved(Page page, std::int32_t row) {
  if (!is_reserved(page, row)) return false;
  entries_[page].owned = true;
  settle(page);
  --reservations_lost_;
  return true;
}

void Pages::unreserve(Page page, std::int32_t row) {
  if (!is_reserved(page, row)) return;
  remove(reserved_, page);
  --reserved_count_;
  entries_[page].reserved_row = kNoRow;
  push_front(plain_, page);
}

Result<Pages::State> Pages::state(Page page) const {
  if (!valid(page)) return out_of_range(page);
  return entries_[page].state;
}

std::vector<std::uint8_t> Pages::states() const {
  std::vector<std::uint8_t> states;
  states.reserve(entries_.size());
  for (const Entry& entry : entries_) states.push_back(static_cast<std::uint8_t>(entry.state));
  return states;
}

Result<Pages::Refs> Pages::refs(Page page) const {
  if (!valid(page)) return out_of_range(page);
  const Entry& entry = entries_[page];
  return Refs{entry.owned, entry.tree, entry.locked};
}

std::vector<Page> Pages::free_list() const {
  std::vector<Page> pages;
  for (const List* list : {&plain_, &reserved_})
    for (Page page = list->first; page != 0; page = entries_[page].next) pages.push_back(page);
  return pages;
}

void Pages::push_front(List& list, Page page) {
  Entry& entry = entries_[page];
  entry.previous = 0;
  entry.next = list.first;
  (list.first != 0 ? entries_[list.first].previous : list.last) = page;
  list.first = page;
}

void Pages::push_back(List& list, Page page) {
  Entry& entry = entries_[page];
  entry.previous = list.last;
  entry.next = 0;
  (list.last != 0 ? entries_[list.last].next : list.first) = page;
  list.last = page;
}

void Pages::remove(List& list, Page page) {
  Entry& entry = entries_[page];
  (entry.previous != 0 ? entries_[entry.previous].next : list.first) = entry.next;
  (entry.next != 0 ? entries_[entry.next].previous : list.last) = entry.previous;
  entry.previous = entry.next = 0;
}

void Pages::check_list(const List& list, bool reserved, std::vector<bool>& seen,
                       std::vector<std::string>& found) const {
  Page previous = 0;
  for (Page page = list.first; page != 0; previous = page, page = entries_[page].next) {
    const std::string name = "free list: page " + std::to_string(page);
    if (!valid(page) || seen[page]) {
      found.push_back(name + " is out of range or listed twice");
      return;  // the list may be a ring
    }
    seen[page] = true;
    const Entry& entry = entries_[page];
    if (entry.state != State::kFree) found.push_back(name + " is not free");
    if ((entry.reserved_row != kNoRow) != reserved) found.push_back(name + " is in the wrong list");
    if (entry.previous != previous) found.push_back(name + " has a wrong back link");
  }
  if (list.last != previous) found.push_back("free list: wrong end");
}

std::vector<std::string> Pages::check_integrity() const {
  std::vector<std::string> found;
  std::vector<bool> seen(entries_.size());
  check_list(plain_, false, seen, found);
  check_list(reserved_, true, seen, found);
  std::int64_t reserved = 0;
  for (Page page = 1; page <= num_pages_; ++page) reserved += entries_[page].reserved_row != kNoRow;
  if (reserved != reserved_count_)
    found.push_back("counter of reserved pages is " + std::to_string(reserved_count_) +
                    ", counted " + std::to_string(reserved));
  std::array<std::int64_t, kStates> counts = {};
  for (Page page = 1; page <= num_pages_; ++page) {
    const Entry& entry = entries_[page];
    const std::string name = "page " + std::to_string(page);
    ++counts[index(entry.state)];
    if (entry.state != state_of(entry))
      found.push_back(name + ": its state is not what its counts say");
    if (entry.tree < 0 || entry.locked < 0 || entry.locked > entry.tree)
      found.push_back(name + ": bad counts");
    if ((entry.state == State::kFree) != seen[page])
      found.push_back(name + ": free but not listed, or listed but not free");
  }
  for (int state = 0; state < kStates; ++state)
    if (counts[state] != counts_[state].load(std::memory_order_relaxed))
      found.push_back("counter " + std::to_string(state) + " is " +
                      std::to_string(counts_[state].load()) + ", counted " +
                      std::to_string(counts[state]));
  return found;
}

}  // namespace vattn
