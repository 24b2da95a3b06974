# SPDX-License-Identifier: Apache-2.0
"""The plugin's whole state under SGLang's own calls, without a model: what a scheduler does, on real memory.

Real: pool, allocator, rows, reading, prefix tree, mapping thread; SGLang's `Req`, `ReqToTokenPool`, `PrefillBudget`,
`match_kv_cache`, `alloc_for_extend`, `alloc_for_decode`, `checkpoint_kv_cache`, `release_kv_cache`; the plugin's hooks
around them. A stand-in: the batch, and the forward, which writes into each new slot the hash of the token prefix that
the slot stands for, and then reads everything that attention would read, as the plugin says it is to be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from sglang.srt.mem_cache import allocation, common
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sglang_vattn import _core, pool, running
from sglang_vattn.allocator import VattnAllocator
from sglang_vattn.tree_cache import VattnTreeCache
from tests.reliability.model import Job, Model, Namespace
from tests.reliability.stand_ins import CONTEXT, Batch, Run, Shape, settings

__all__ = ["CONTEXT", "Engine", "Run", "Shape", "settings"]


class Engine:
    """A scheduler's calls. Each asserts what it can; `check` asserts what must hold between any two."""

    def __init__(self, shape: Shape = Shape(), *, share: bool = True, fail_first: str = "") -> None:  # noqa: B008
        self.shape = shape
        self.driver = _core.FaultyDriver(_core.HostDriver())
        if fail_first:
            self.driver.fail_at(fail_first, 1)
        pool.VattnPool.row_plan = pool.RowPlan(shape.slots + 1, CONTEXT, shape.rows)
        with (
            mock.patch.object(pool, "open_driver", return_value=self.driver),
            mock.patch.dict(pool.READ_AHEAD_TOKENS, cpu=shape.read_ahead),
            mock.patch.dict("os.environ", VATTN_MAX_MAPPINGS=str(shape.max_mappings)),
        ):
            # One layer, one head: the smallest token of which a page is one page of the system's.
            dim = 512 if 4096 % shape.page_size else 4096 // shape.page_size // 8
            self.pool = pool.VattnPool(
                shape.pages * shape.page_size, shape.page_size, torch.float32, 1, dim, 1, "cpu", False
            )
        self.space, self.size = self.pool.space, shape.page_size
        self.slots = ReqToTokenPool(shape.slots, CONTEXT, "cpu", False)
        self.allocator = VattnAllocator(
            shape.pages * shape.page_size,
            dtype=torch.float32,
            device="cpu",
            pool=self.pool,
            request_slots=shape.slots + 1,
            read_mode=shape.read,
            share_prefixes=share,
            scrub=shape.scrub,
        )
        self.written_by: dict[int, Namespace] = {}  # whose token each hash in the pages is
        self.reading = self.allocator.reading
        self.reading.share_possible = self.reading.pages_as_fast = True
        self.reading.least_saved_pages = self.reading.least_saved_pages_of_a_group = 1
        self.tree = VattnTreeCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.slots,
                token_to_kv_pool_allocator=self.allocator,
                page_size=shape.page_size,
                eviction_policy=shape.policy,
            )
        )
        self.model = Model(self.tree.tree, self.size)
        # Each slot's first and last eight bytes, at home and in the rows: of K and of V.
        self.home = [each[0].view(torch.int64)[..., 0, 0].numpy() for each in (self.pool.k_buffer, self.pool.v_buffer)]
        self.row_views = [each[0].view(torch.int64)[..., 0, 0].numpy() for each in (self.pool.k_rows, self.pool.v_rows)]
        self.model.slot_hashes = self.home[0]
        self.running: list[Run] = []
        self.settled = False  # whether the mapping thread has caught up before each forward
        self.tried: Counter[str] = Counter()

    def close(self) -> None:
        self.space.close()

    def settle(self) -> None:
        """Let the mapping thread catch up. It cannot where live rows want more than the budget of mappings."""
        if self.shape.max_mappings:
            self.space.drain(0.01)
        else:
            assert self.space.drain(10), "the mapping thread does not come to an end"

    # ------------------------------------------------------------ admission and prefill

    def admit(self, jobs: Sequence[Job], chunk: int) -> list[Run]:
        """Match, lock and budget as SGLang's PrefillAdder does, then one forward; returns those that began."""
        budget = PrefillBudget(self.allocator, self.tree)
        began: list[Run] = []
        spans: list[tuple[int, int]] = []
        for job in jobs:
            if len(began) == self.slots.available_size():
                break
            self.tried["arrived"] += 1
            run = Run(job, f"r{self.tried['arrived']:08d}")
            req = run.req
            req.init_next_round_input(self.tree)
            hit = self.model.expected_hit(run.hashes, len(job.tokens) - 1)
            assert req.prefix_len == hit, f"a hit of {req.prefix_len} tokens, cached are {hit}"
            self.model.check_path(self.tree.tree.path_pages(req.last_node, hit), run.hashes[:hit])
            lock = self.tree.lock(req.last_node)
            extend = len(job.tokens) - hit
            if not extend + job.new_tokens + self.size < budget.remaining_total:
                self.tree.unlock(lock)
                self.tried["waits"] += 1
                break
            req.lock = lock
            extend = min(extend, chunk)
            budget.reserve(extend, job.new_tokens)
            spans.append((hit, hit + extend))
            began.append(run)
            self.tried["hits"] += hit > 0
            self.tried["hits_in_mid_page"] += hit % self.size > 0
        if began:
            self.extend(began, spans)
            self.running += began
        return began

    def extend(self, runs: Sequence[Run], spans: Sequence[tuple[int, int]]) -> None:
        for run, (_, end) in zip(runs, spans, strict=True):
            run.req.extend_end = end
        lengths = torch.tensor([end for _, end in spans])
        batch = self._batch(
            runs,
            prefix_lens=[start for start, _ in spans],
            extend_lens=[end - start for start, end in spans],
            extend_num_tokens=sum(end - start for start, end in spans),
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            decode=False,
        )
        result = running.alloc_for_extend(allocation.alloc_for_extend, batch)
        batch.req_pool_indices = batch.req_pool_indices_cpu = result[2]
        self._forward(batch, runs, spans)

    def continue_prefill(self, run: Run, chunk: int) -> None:
        """The next chunk; skipped if there is no room for it (SGLang would decode or retract others first)."""
        start, end = run.computed, min(run.computed + chunk, len(run.req.full_untruncated_fill_ids))
        if -(-end // self.size) - -(-start // self.size) <= self.allocator.pages.free + self.allocator.pages.evictable:
            self.checkpoint(run)
            self.extend([run], [(start, end)])
            self.tried["chunks"] += 1

    def checkpoint(self, run: Run) -> None:
        run.req.extend_end = run.computed
        run.req.refresh_fill_ids()
        pages = self.allocator.pages
        room = pages.free + pages.evictable
        common.checkpoint_kv_cache(run.req, self.tree)
        assert pages.free + pages.evictable >= room, "a checkpoint took room that the scheduler counts on"
        self.model.cached.update(run.hashes[: run.computed])

    # ------------------------------------------------------------ decode

    def decode(self, tokens: Sequence[int]) -> None:
        """One step of all requests that are past their prefill; retracts as long as pages do not suffice."""
        runs = [run for run in self.running if not run.in_prefill and run.computed < CONTEXT - 1]
        while runs:
            crossing = sum(run.computed % self.size == 0 for run in runs)
            if self.allocator.check_decode_capacity(num_tokens=crossing * self.size, tree_cache=self.tree):
                break
            self.retract(runs.pop())
        if not runs:
            return
        for i, run in enumerate(runs):
            if len(run.hashes) == run.computed:
                run.append(tokens[i % len(tokens)])
        lengths = torch.tensor([run.computed for run in runs])
        indices = torch.tensor([run.req.kv.req_pool_idx for run in runs])
        batch = self._batch(
            runs, seq_lens=lengths, seq_lens_cpu=lengths, req_pool_indices=indices, req_pool_indices_cpu=indices,
            decode=True,
        )  # fmt: skip
        running.alloc_for_decode(allocation.alloc_for_decode, batch, token_per_req=1)
        self.tried["decode_steps"] += 1
        self.tried["tokens_decoded"] += len(runs)
        self._forward(batch, runs, [(run.computed - 1, run.computed) for run in runs])

    # ------------------------------------------------------------ ends

    def release(self, run: Run, *, checkpoint: bool, drop: int = 0) -> None:
        """A request ends. ``drop``: its last tokens came after its stop (the overlap's step too many)."""
        req = run.req
        self.check_contents(run)
        prompt = len(req.origin_input_ids)
        drop = min(drop, run.computed - prompt - 1)
        if drop > 0:
            req.finished_len = run.computed - drop - prompt
        owned = req.owned_kv_len()
        common.release_kv_cache(req, self.tree, checkpoint=checkpoint)
        if checkpoint:
            self.model.cached.update(run.hashes[:owned])
        self.running.remove(run)
        self.tried["ended_with_checkpoint" if checkpoint else "ended_without"] += 1

    def retract(self, run: Run) -> Job:
        """As `release_req` in SGLang; the caller may admit the job, which now has its output in its prompt, again."""
        tokens = run.tokens[: max(run.computed, 1)]
        self.release(run, checkpoint=False)
        common.evict_from_tree_cache(self.tree, len(self.running) * 20)
        self.tried["retracted"] += 1
        return run.job._replace(tokens=tuple(tokens))

    def flush(self) -> None:
        """SGLang flushes only when nothing runs."""
        assert not self.running
        self.tree.reset()
        self.slots.free_slots = list(range(1, self.slots.size + 1))
        self.allocator.clear()
        self.model.cached.clear()
        assert self.allocator.pages.free == self.shape.pages
        self.tried["flushes"] += 1

    # ------------------------------------------------------------ the forward

    def _batch(self, runs: Sequence[Run], *, decode: bool, **fields: Any) -> Batch:
        return Batch(
            reqs=[run.req for run in runs],
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree,
            req_to_token_pool=self.slots,
            forward_mode=SimpleNamespace(is_decode=lambda: decode),
            **fields,
        )

    def _forward(self, batch: Batch, runs: Sequence[Run], spans: Sequence[tuple[int, int]]) -> None:
        if self.settled:
            self.settle()
        running.before_forward(None, batch)
        if self.shape.scrub:
            for run in runs:
                self.check_scrubbed(run)
        for run, (start, end) in zip(runs, spans, strict=True):
            self.written_by.update(dict.fromkeys(run.hashes[start:end], run.job.namespace))
            slots = self.slots.req_to_token[run.req.kv.req_pool_idx, start:end].numpy()
            self.home[0][slots] = run.hashes[start:end]
            self.home[1][slots] = ~np.array(run.hashes[start:end])
        self.tried[f"read_by_{self.reading.variant}"] += 1
        for run in runs:
            self.check_contents(run)
            if self.reading.by_rows:
                record = self.allocator.requests[run.req.kv.req_pool_idx]
                self._check_row(record.row, run.hashes[: run.computed], self.pool.read_ahead)
                assert int(self.allocator.rows.table[run.req.kv.req_pool_idx]) == record.row
                for page in record.ahead:  # read, and multiplied by zero: not while another request writes there
                    assert self.allocator.pages.is_reserved(page, run.req.kv.req_pool_idx)
        for group in self.reading.groups:
            self.tried["groups"] += 1
            for member in group.members:
                self._check_row(group.node.row, runs[member].hashes[: group.node.end * self.size], self.pool.read_ahead)

    def check_scrubbed(self, run: Run) -> None:
        """Before the forward writes: nothing in the request's pages, to their ends, is another tenant's."""
        record = self.allocator.requests[run.req.kv.req_pool_idx]
        for page in record.pages + record.ahead:
            for values in (self.home[0], ~self.home[1]):
                held = values[page * self.size : (page + 1) * self.size]
                held = held[(held != 0) & (held != -1)]  # not written, not written and negated
                others = {self.written_by[value] for value in held.tolist()} - {run.job.namespace}
                assert not others, f"page {page} of {run.job.namespace} still holds tokens of {others}"

    def _check_row(self, row: int, hashes: list[int], read_ahead: int) -> None:
        """What a kernel reads of a row is right, and what it touches past that is mapped."""
        assert row > 0 and self.space.ready(row) * self.size >= len(hashes) + read_ahead
        assert (self.row_views[0][row, : len(hashes)] == hashes).all(), f"row {row} holds something else"
        assert (self.row_views[1][row, : len(hashes)] == ~np.array(hashes)).all()
        self.row_views[1][row, len(hashes) : len(hashes) + read_ahead].sum()

    def check_contents(self, run: Run) -> None:
        """By pages: what SGLang's table says, and what the plugin's list says, holds what was written."""
        slot, length = run.req.kv.req_pool_idx, run.computed
        slots = self.slots.req_to_token[slot, :length].numpy()
        assert (self.home[0][slots] == run.hashes[:length]).all(), f"{run.req.rid} lost content"
        assert (self.home[1][slots] == ~np.array(run.hashes[:length])).all(), f"{run.req.rid} lost content"
        assert (slots == self.allocator.slots(self.allocator.requests[slot].pages, 0, length)).all()
