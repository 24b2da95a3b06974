# SPDX-License-Identifier: Apache-2.0
"""A node of the prefix tree, a match that ends at one, and the token buffers that both are about."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Tokens: TypeAlias = "array[int]"
    TokensLike: TypeAlias = "array[int] | Buffer | Iterable[int]"


class Node:
    """A run of tokens below one parent. Hashed by identity; callers read it, only the tree writes it.

    Three kinds, told apart by depth: ``root_node`` and, below it, one root per namespace hold no token and no page;
    every other node holds at least one of each. A handle to a node stays valid while the node is locked: a split
    keeps the object as the *lower* half, so ``end`` stays. Eviction cuts an unlocked leaf short, or off: then its
    ``parent`` is None.
    """

    __slots__ = (
        "children",
        "continued",
        "end",
        "hits",
        "lock",
        "namespace",
        "pages",
        "parent",
        "priority",
        "queued",
        "serial",
        "start",
        "tokens",
        "used",
    )

    def __init__(
        self, parent: Node | None, tokens: Tokens, start: int, pages: list[int], *, used: int, serial: int
    ) -> None:
        self.parent = parent
        self.tokens = tokens  # tokens [start, end) of the sequence
        self.start = start
        self.end = start + len(tokens)
        self.pages = pages  # the pages that [start, end) touches, in order
        self.children: dict[Hashable, Node] = {}  # by first token; below root_node, by namespace
        self.continued = False  # a path went on from here past its last page
        self.lock = 0  # locks on this node or below
        self.hits = 0  # inserts that walked through it (lfu, slru)
        self.priority = 0  # the highest of the requests that inserted through it
        self.used = used  # clock of the last access
        self.serial = serial  # clock of the creation, unique: breaks ties the same way on every rank
        self.namespace: Hashable = None  # of a namespace's root: its key below root_node
        self.queued = False  # has its one entry in the eviction queue

    @property
    def is_evictable(self) -> bool:
        """Whether it is a leaf of the tree that no lock holds."""
        return self.lock == 0 and not self.children and self.parent is not None and bool(self.pages)

    def __repr__(self) -> str:
        head = ",".join(map(str, self.tokens[:4])) + (",.." if len(self.tokens) > 4 else "")
        return f"<Node [{self.start},{self.end}) {head} pages={self.pages} lock={self.lock} hits={self.hits}>"


class Match(NamedTuple):
    """A cached prefix: its ``length`` in tokens and the ``node`` that ends exactly there (``root_node`` for 0)."""

    length: int
    node: Node


def as_tokens(tokens: TokensLike) -> Tokens:
    """``tokens`` as array('q'): itself if it is one, else a copy, at C speed for a buffer of int64.

    Raises TypeError for a buffer of anything else (an int32 tensor would silently pair up its tokens).
    """
    if isinstance(tokens, array):
        if tokens.typecode == "q":
            return tokens
        raise TypeError(f"tokens must be int64 (typecode 'q'), not array({tokens.typecode!r})")
    out = array("q")
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]
    except TypeError:
        out.extend(tokens)  # type: ignore[arg-type]
        return out
    if view.format not in ("q", "l") or view.itemsize != 8:
        raise TypeError(f"tokens must be int64, not a buffer of {view.format!r} with {view.itemsize} bytes an item")
    out.frombytes(view.tobytes())
    return out
