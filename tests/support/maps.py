# SPDX-License-Identifier: Apache-2.0
"""Which page of the KV cache is mapped where, read from /proc/<pid>/maps.

That is the kernel's word, not the plugin's: pages are slices of one memfd, so a page that is
mapped at k addresses appears with its file offset k times.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

_LINE = re.compile(
    r"(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) (?P<mode>\S+) (?P<offset>[0-9a-f]+) \S+ \S+ +"
    r"/memfd:[^ ]*vattn"
)


def parse_maps(text: str, page_bytes: int) -> dict[int, list[int]]:
    """Page number (file offset / `page_bytes`) -> the addresses at which it is mapped.

    The kernel merges neighbouring mappings of neighbouring pages into one line, so each line
    is cut into pages again. Raises ValueError where a line tears a page.
    """
    where: dict[int, list[int]] = defaultdict(list)
    for match in _LINE.finditer(text):
        start, end, offset = (int(match[name], 16) for name in ("start", "end", "offset"))
        if offset % page_bytes or (end - start) % page_bytes:
            raise ValueError(f"a page of {page_bytes} bytes is torn: {match[0]}")
        for i in range((end - start) // page_bytes):
            where[offset // page_bytes + i].append(start + i * page_bytes)
    return dict(where)


def mapped_pages(pid: int, page_bytes: int) -> dict[int, list[int]]:
    return parse_maps(Path(f"/proc/{pid}/maps").read_text(), page_bytes)
