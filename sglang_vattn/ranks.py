# SPDX-License-Identifier: Apache-2.0
"""What the tensor-parallel ranks of one model agree on: how a batch reads.

Hits, pages, evictions and sizes are equal on all ranks by construction, since nothing of them depends on when a mapping
is done. Whose rows are mapped does depend on it, and so would the choice among the decode graphs `paged`, `rows` and
`shared`. But ranks must replay the same graph: an all-reduce that was captured in a graph reads its peers' buffers *of
that graph* (SGLang's ``custom_all_reduce_v2.py``, ``graph_params``). On different graphs they would silently add up
what lies there from some earlier step. So the ranks vote, and a batch is read by rows only where it can be on every
rank. A rank whose mapping failed tells all the others by its vote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

if TYPE_CHECKING:
    from sglang_vattn.allocator import VattnAllocator

Facts = dict[str, int]


class RanksParted(RuntimeError):
    """The ranks' caches differ: what they compute together from here on would be wrong."""


class Ranks:
    """The vote, among ``size`` ranks that call it at the same points.

    Parameters
    ----------
    rank, size
        Of tensor parallelism.
    group
        A process group for tensors on the CPU, used by the scheduler's thread alone.
    facts
        What must be equal on all ranks: it goes along with each vote, so that ranks that have parted are found.
    """

    def __init__(self, rank: int, size: int, group: Any, facts: Callable[[], Facts]) -> None:
        self.rank, self.size = rank, size
        self._group = group
        self._facts = facts
        self._settled: tuple[Sequence[Any], Facts] | None = None

    def all_ready(self, votes: list[bool], question: Sequence[Any], *, settled_by: int) -> list[bool]:
        """Which of these are true on every rank.

        Parameters
        ----------
        votes
            At least one; the same number on every rank.
        question
            Equal on all ranks; it, or the facts, change whenever a vote may have gone from true to false. While they
            stay the same, what all have affirmed needs no other vote.
        settled_by
            So many leading votes decide; once all ranks have affirmed those, the rest counts as false.
        """
        facts = self._facts()
        if self._settled == (question, facts):
            if not all(votes[:settled_by]):
                raise RanksParted(f"{self}: a row that all ranks had mapped is not mapped any more")
            return [index < settled_by for index in range(len(votes))]
        own = list(facts.values())
        ballot = torch.tensor([*own, *(-value for value in own), *votes], dtype=torch.int64)
        self._least(ballot)
        least, most, agreed = ballot[: len(own)], -ballot[len(own) : 2 * len(own)], ballot[2 * len(own) :]
        if not torch.equal(least, most):
            differ = [
                f"{name} {mine} here, from {low} to {high} on all"
                for name, mine, low, high in zip(facts, own, least.tolist(), most.tolist(), strict=True)
                if low != high
            ]
            raise RanksParted(f"{self}: the ranks' caches differ: {'; '.join(differ)}")
        result = [bool(vote) for vote in agreed.tolist()]
        self._settled = (question, facts) if all(result[:settled_by]) else None
        return result

    def gather(self, facts: Facts) -> list[Facts]:
        """These facts of every rank, by rank. All must call it."""
        found: list[Facts] = [{}] * self.size
        torch.distributed.all_gather_object(found, facts, group=self._group)
        return found

    def _least(self, ballot: torch.Tensor) -> None:
        """In place, the least of each number over all ranks."""
        torch.distributed.all_reduce(ballot, op=torch.distributed.ReduceOp.MIN, group=self._group)

    def __str__(self) -> str:
        return f"--kv-backend vattn, tensor-parallel rank {self.rank} of {self.size}"


def decisions(allocator: VattnAllocator) -> Facts:
    """What came of all decisions so far, in a few numbers."""
    pages = allocator.pages
    return {
        "free": pages.free,
        "private": pages.private,
        "evictable": pages.evictable,
        "protected": pages.protected,
        "reserved": pages.reserved,
        "reservations_lost": pages.reservations_lost,
        "hit_tokens": allocator.hit_tokens,
        "requests": len(allocator.requests),
    }


def tensor_parallel(allocator: VattnAllocator) -> Ranks | None:
    """The ranks of this scheduler's model; None where it is alone."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return None
    return Ranks(group.rank_in_group, group.world_size, group.cpu_group, partial(decisions, allocator))


def name_of_this_rank() -> str:
    """For errors at the start: ``rank 1 of 2``, or "" where there is one only."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    return "" if group.world_size == 1 else f"rank {group.rank_in_group} of {group.world_size}: "
