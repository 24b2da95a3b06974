# SPDX-License-Identifier: Apache-2.0
"""A request, a batch and the configuration, as far as SGLang's allocation and the plugin's hooks read them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache import allocation, common
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_vattn import reading
from tests.reliability.model import Job, chain, seed

SAMPLING = SamplingParams(max_new_tokens=1 << 20)
CONTEXT = 48  # tokens; what a row holds


class Shape(NamedTuple):
    """Everything that differs between two engines."""

    pages: int = 14
    page_size: int = 4
    slots: int = 6
    rows: int | None = None  # as --vattn-rows
    policy: str = "lru"
    read: str = "auto"
    read_ahead: int = 1
    max_mappings: int = 0
    scrub: bool = True


class Run:
    """A running request: SGLang's record, and the hashes that its slots must hold."""

    def __init__(self, job: Job, rid: str) -> None:
        extra_key, lora_id, salt = job.namespace
        self.job = job
        self.req: Any = schedule_batch.Req(
            rid, "", array("q", job.tokens), SAMPLING, extra_key=extra_key, lora_id=lora_id, cache_salt=salt
        )
        self.req.priority = job.priority
        self.hashes = chain(seed(job.namespace), job.tokens)

    @property
    def computed(self) -> int:
        return int(self.req.kv.kv_committed_len)

    @property
    def tokens(self) -> list[int]:
        return [*self.req.origin_input_ids, *self.req.output_ids]

    @property
    def in_prefill(self) -> bool:
        return self.computed < len(self.req.full_untruncated_fill_ids)

    def append(self, token: int) -> None:
        self.req.output_ids.append(token)
        self.hashes += chain(self.hashes[-1], [token])


class Batch(SimpleNamespace):
    """What SGLang's allocation and the plugin's hooks read of a ScheduleBatch."""

    device, hisparse_coordinator = "cpu", None
    model_config = SimpleNamespace(is_encoder_decoder=False)

    def maybe_evict_swa(self) -> None: ...

    def is_dllm(self) -> bool:
        return False


@contextmanager
def settings() -> Iterator[None]:
    """The parts of SGLang's published configuration that these calls read."""
    serving, spec = SimpleNamespace(strip_thinking_cache=False), SimpleNamespace(speculative_algorithm=None)
    with (
        mock.patch.object(schedule_batch, "get_serving", return_value=serving),
        mock.patch.object(common, "get_serving", return_value=serving),
        mock.patch.object(common, "get_spec", return_value=spec),
        mock.patch.object(allocation, "attention_backends", return_value=("torch_native", "torch_native")),
        mock.patch.object(reading, "LEAST_BATCH", 2),
        mock.patch.object(reading, "REQUESTS_PER_GROUP", 2),
    ):
        yield
