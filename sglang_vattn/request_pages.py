# SPDX-License-Identifier: Apache-2.0
"""What the plugin keeps for a running request, beside SGLang's own record."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

RELEASED = 0  # in place of a page that was given back; page 0 is the padding page, which no request owns


def namespace_of(req: Any) -> Hashable:
    """What separates tenants: (extra key, LoRA id, cache salt) as the request gave them.

    SGLang's own key carries the extra key and the LoRA id concatenated, so crafted ids could meet there.
    """
    lora_id = req.lora_id or ""
    extra_key = req.extra_key or ""
    if lora_id:  # Req.__init__ appended it
        extra_key = extra_key.removesuffix(lora_id)
    return (extra_key, lora_id, req.cache_salt or "")


@dataclass(slots=True, eq=False)
class RequestPages:
    """The pages of one request, in the order of its tokens, and what its row holds of them.

    ::

        pages   [ shared by alias | own: partial copy, extend, decode .. ]   ahead [ next, .. ]
                  0 .. shared       shared .. len(pages)
        row     [ mapped, or asked to be: the first `mapped` of pages + ahead           ]

    The first ``shared`` pages belong to the prefix tree. The others are private until the request is released,
    also when the tree already refers to them; so ``pages``, and the row that mirrors it, only ever grow.
    Pages in ``ahead`` are still free: softly reserved for this request, which will probably take them next.
    """

    pages: list[int] = field(default_factory=list)
    shared: int = 0
    copied_tokens: int = 0  # tokens of the page after the shared ones that were copied at admission
    ahead: list[int] = field(default_factory=list)
    needed: int = 0  # leading pages of the row that a kernel may touch at the current length
    row: int = 0  # the virtual range, 0 while there is none
    mapped: int = 0  # leading pages whose mapping into the row was asked for
    valid: int = 0  # of those, the ones that are still pages + ahead
    slot: int = 0  # SGLang's req_pool_idx
    tenant: Hashable = None  # as namespace_of() has it
    duplicate: bool = False  # the tree has some of its tokens in pages of others that computed them, too
    row_deferred: bool = False  # no row unless it decodes outside a group

    @property
    def backed(self) -> int:
        """Pages that the row can hold now."""
        return len(self.pages) + len(self.ahead)

    def release(self, first: int, last: int) -> list[int]:
        """Take the own pages with index in [first, last) out; returns those not given back before."""
        first = max(first, self.shared)
        given_back = [page for page in self.pages[first:last] if page != RELEASED]
        self.pages[first:last] = [RELEASED] * len(self.pages[first:last])
        return given_back
