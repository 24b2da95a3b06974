// SPDX-License-Identifier: Apache-2.0
#include "proc_maps.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>

namespace vattn {

Result<ProcMaps> ProcMaps::read_self() {
  std::ifstream file("/proc/self/maps");
  if (!file) return Status::driver("cannot read /proc/self/maps");
  ProcMaps maps;
  for (std::string text; std::getline(file, text);) {
    Line line = {};
    char perms[5] = {};
    std::uint64_t begin = 0, end = 0, offset = 0, inode = 0;
    int path_at = 0;
    const int fields =
        std::sscanf(text.c_str(), "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %*s %" SCNu64 " %n",
                    &begin, &end, perms, &offset, &inode, &path_at);
    if (fields != 5) return Status::driver("/proc/self/maps has a line we cannot read: " + text);
    line.begin = begin;
    line.end = end;
    line.offset = offset;
    line.inode = static_cast<ino_t>(inode);
    line.memfd = std::strncmp(text.c_str() + path_at, "/memfd:", 7) == 0;
    line.readable = perms[0] == 'r';
    line.writable = perms[1] == 'w';
    maps.lines_.push_back(line);
  }
  return maps;
}

Mapping ProcMaps::page_at(Address at, std::size_t page_bytes, ino_t inode) const {
  const Address end = at + page_bytes;
  auto line = std::upper_bound(lines_.begin(), lines_.end(), at,
                               [](Address a, const Line& l) { return a < l.end; });
  Mapping found;  // nothing so far
  for (Address next = at; next < end; next = line->end, ++line) {
    const bool covered = line != lines_.end() && line->begin <= next;
    if (!covered) return {Mapping::kForeign, false};  // a hole in our own reservation
    const bool ours = line->memfd && line->inode == inode;
    const bool closed = !line->readable && !line->writable;
    std::int64_t page = Mapping::kForeign;
    if (ours) {
      const std::uint64_t offset = line->offset + (next - line->begin);
      if (offset % page_bytes == next - at) page = static_cast<std::int64_t>(offset / page_bytes);
    } else if (closed) {
      page = Mapping::kNothing;
    }
    const bool accessible = line->readable && line->writable;
    if (next == at) {
      found = {page, accessible};
    } else if (found.page != page) {
      return {Mapping::kForeign, false};  // torn
    } else {
      found.accessible = found.accessible && accessible;
    }
  }
  return found;
}

}  // namespace vattn
