// SPDX-License-Identifier: Apache-2.0
// /proc/self/maps, read once: what the kernel itself says is mapped. The kernel
// merges neighbouring mappings into one line and we may split one page over
// several; page_at() looks through both.
#pragma once

#include <sys/types.h>

#include <vector>

#include "driver.h"

namespace vattn {

class ProcMaps {
 public:
  static Result<ProcMaps> read_self();

  // Which page of the memfd with this inode lies, whole, at [at, at+page_bytes)?
  Mapping page_at(Address at, std::size_t page_bytes, ino_t inode) const;

 private:
  struct Line {
    Address begin, end;
    std::uint64_t offset;  // in the file
    ino_t inode;
    bool memfd;
    bool readable, writable;
  };
  std::vector<Line> lines_;  // by address, as the kernel prints them
};

}  // namespace vattn
