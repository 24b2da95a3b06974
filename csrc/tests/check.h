// SPDX-License-Identifier: Apache-2.0
// All the test framework we need: a failed CHECK says where, and ends the test.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                               \
  do {                                                                                 \
    if (condition) break;                                                              \
    std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
    std::abort();                                                                      \
  } while (false)
