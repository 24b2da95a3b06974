# SPDX-License-Identifier: Apache-2.0
r"""The prefix tree: token-exact RadixAttention over reference-counted pages, for any engine.

Which cached pages hold the longest known prefix of a prompt? This package imports no engine and no tensor library.

The shape. A path spells a sequence; a node holds a run of it and the pages which that run touches. Namespaces (tenant,
LoRA, salt) are keys of the level below ``root_node``, compared as values and never concatenated, so none can collide.

                        root_node                       page_size = 4
                     "a" /     \ "b"
                      root      root                    namespaces: no token, no page
                       |
              A [0,6) t0..t5    pages 7 8               page 8 holds t4 t5 _ _ as far as A knows
                    /      \
    B [6,9) t6..t8   pages 8 9     C [6,7) u6  pages 5
    (the request that wrote        (another request: its own page 5 is
     A went on in page 8)           t4 t5 u6, t4 and t5 copied into it)

Pages and tokens do not line up: a node may start and end in mid-page, and then the page at the seam belongs to parent
and child. Which of the two to read? The tree keeps one

    INVARIANT. For a path and a page index, the *deepest* node on the path that touches the index refers to a page that
    is complete from the page's first token to that node's end (or to the page's end).

It holds because a node's pages come from one request's row, and that row held the whole sequence, copied or computed:

    insert   stores, for tokens [cached, n), the row's pages cached//P .. ceil(n/P): the seam page is the row's own.
    split    at cut (in mid-page) lets both halves refer to the seam page: `up` still needs [.., cut), the lower half
             still needs the page's first tokens. Its lock references follow: both halves are locked, or neither.
    evict    takes pages from the end of a leaf, cut at a page's end, so every remaining node is still the deepest one
             of a path as it was built.

So `path_pages` walks up once, and the first page that it meets for an index is the right one. C's path: 7 5.

A match allocates nothing. A hit of t tokens shares t//P pages and copies the rest of the next one; that is the
caller's business, as is never writing to a page that someone else may read.

Counting. The store knows for each page how many nodes refer to it, and how many of those are locked; the tree reports
every change (`ref`, `unref`, `lock`, `unlock`). lock(node) adds one to every node from there to `root_node`, so a
parent's lock is at least the sum of its children's, and an unlocked node has no locked descendant.

Stock's order. Access, hits and priority are counted where SGLang 0.5.23 counts them (default UnifiedRadixCache), so
that the same leaf is evicted next: an access stamps the path; a split stamps both halves; `hits` and `priority` change
at insert alone, on the nodes that the sequence covers, and a split's upper half inherits both. Two things differ. Stock
drops a leaf whole; here no more of its end goes than is asked for, since the rest may still be hit. And a page that is
filled in part only goes first (`eviction`): at page size 1, where there is none, the order is stock's.

Cost. Walking compares tokens with one C call a node: linear in the prompt, whatever the hit. Insert copies the suffix,
a split the tokens of one node, evict touches only what it removes. Not thread-safe: the scheduler's thread calls.
"""

from __future__ import annotations

from .eviction import POLICIES
from .node import Match, Node
from .pages import PageStore
from .tree import PrefixTree

__all__ = ["POLICIES", "Match", "Node", "PageStore", "PrefixTree"]
