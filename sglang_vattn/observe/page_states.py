# SPDX-License-Identifier: Apache-2.0
"""What a page can be: the core's states in its order (`csrc/pages.h`), then the two that never change."""

STATES = ("free", "private", "evictable", "protected", "padding", "guard")
FREE, PRIVATE, EVICTABLE, PROTECTED, PADDING, GUARD = range(len(STATES))
